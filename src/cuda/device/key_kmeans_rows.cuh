// SPDX-License-Identifier: MIT
// The steps by rows of the one-kernel k-means (key_kmeans_sm90a.cu). A round is 256 rows, 64 for
// each warpgroup:
//   labels   a warpgroup's rows times all centroids, as in nearest_sm90a.cu
//   lists    a warp picks the rows of its 16 clusters, in order
//   sums     onehot(labels)ᵀ times the listed rows by mma.sync: exact products, added up in fp32
//            registers over many rounds
// A round is labelled before the one before it is listed, so that warps seldom wait for each other.
#pragma once

#include "cuda/device/key_kmeans_metric.cuh"

namespace coterie::cuda {

namespace key_kmeans_detail {

// 1 where two pairs of numbers are equal, else 0.
__device__ __forceinline__ std::uint32_t equal_pairs(std::uint32_t a, std::uint32_t b, Bf16) {
  std::uint32_t ones;
  asm("set.eq.bf16x2.bf16x2 %0, %1, %2;" : "=r"(ones) : "r"(a), "r"(b));
  return ones;
}
__device__ __forceinline__ std::uint32_t equal_pairs(std::uint32_t a, std::uint32_t b, F16) {
  std::uint32_t ones;
  asm("set.eq.f16x2.f16x2 %0, %1, %2;" : "=r"(ones) : "r"(a), "r"(b));
  return ones;
}

// A list entry: the row above, the cluster as a number of either type below; distinct bits are
// distinct numbers here. kNobody is no cluster's.
constexpr std::uint32_t kNumber = 0x4000, kNobody = 0x5000;

// The bits of infinity.
template <class T>
constexpr std::uint32_t kInfinity = std::is_same_v<T, F16> ? 0x7c00u : 0x7f80u;

// The bits of the larger absolute value of two numbers, as a float.
template <class T>
__device__ __forceinline__ float magnitude(std::uint32_t bits) {
  if constexpr (std::is_same_v<T, F16>) return to_float(F16{static_cast<std::uint16_t>(bits)});
  return __uint_as_float(bits << 16);
}

// The steps by rows.
template <class T>
struct KeyRows : KeyMetric<T> {
  using Base = KeyMetric<T>;
  using Base::args;
  using Base::Base;
  using Base::done;
  using Base::group;
  using Base::head;
  using Base::item;
  using Base::memory;
  using Base::own_lane;
  using Base::place;
  using Base::range;
  using Base::rounds;
  using Base::rows;
  using Base::slot;
  using Base::span;
  using Base::team;
  using Base::warp;

  __device__ std::uint32_t ready(int round) const {
    return shared_address(memory.ready + place(round));
  }
  __device__ std::uint32_t free(int round) const {
    return shared_address(memory.free + place(round));
  }
  __device__ int phase(int round) const { return static_cast<unsigned>(done + round) / kSlots & 1; }

  // Starts to load this warp's 16 rows of a round, zeros behind the last one.
  __device__ __forceinline__ void load(int round) const {
    const int lane = own_lane(), r = warp % 4 * 16 + lane / 8, chunk = lane % 8;
    const int count = left(round) - group * 64;
    if (round < rounds) {
      const Tile<T, 64> tile{slot(round) + group * kTileBytes};
      const std::int64_t first = range.begin + round * kRound + group * 64;
      const T* from = rows.data + first * rows.pitch + (r * rows.pitch + chunk * 8);
#pragma unroll
      for (int step = 0; step < 16; step += 4)
        cp_async16(tile.chunk(r + step, chunk), from + step * rows.pitch,
                   chunk * 8 < args.width && r + step < count ? 16 : 0);
    }
    cp_async_commit();
  }
  // Rows of the block from a round on.
  __device__ int left(int round) const { return range.end - range.begin - round * kRound; }
  // Where the block's rows of a round begin in labels and ranks.
  __device__ std::int64_t first_row(int round) const {
    return args.shape.start(span, head) + range.begin + round * kRound;
  }

  // Labels of this warpgroup's rows of a round; to global memory in the last pass.
  __device__ __forceinline__ void label(int round, const float2& bounds, bool last) const {
    const Tile<T, 64> tile{slot(round) + group * kTileBytes};
    const int lane = own_lane(), warp_row = warp % 4 * 16, quad = lane % 4;
    const std::uint32_t ones = quad == 0 ? 0x3f803f80u : 0, with_offset = quad == 1 ? ~0u : 0;
    std::uint32_t a[4][4], shift[4] = {}, most[2] = {}, best[2] = {};
    float offset[2];
#pragma unroll
    for (int d = 0; d < 4; ++d)
      ldmatrix_x4(a[d], tile.address(warp_row + lane % 16, 16 * d + lane / 16 * 8));
#pragma unroll
    for (int d = 0; d < 4; ++d)
#pragma unroll
      for (int i = 0; i < 4; ++i) most[i % 2] = __vmaxu2(most[i % 2], a[d][i] & 0x7fff7fffu);
#pragma unroll
    for (int side = 0; side < 2; ++side) most[side] = max(most[side] & 0xffffu, most[side] >> 16);
#pragma unroll
    for (int step = 1; step <= 2; step *= 2)
#pragma unroll
      for (int side = 0; side < 2; ++side)
        most[side] = max(most[side], __shfl_xor_sync(~0u, most[side], step));
#pragma unroll
    for (int side = 0; side < 2; ++side) {
      offset[side] = key_offset(magnitude<T>(most[side]), bounds.x, bounds.y);
      // 1, 1 | 1, K in bf16: K has two digits
      shift[side] =
          ones | (((__float_as_uint(offset[side]) & 0xffff0000u) | 0x3f80u) & with_offset);
    }
    const int columns = (args.shape.clusters + kStep - 1) / kStep * kStep;
    // Descriptors that change from step to step, so that the products follow each other at once.
    std::uint64_t table[4],
        bias = narrow_descriptor(shared_address(memory.table) + kClusters * 128);
#pragma unroll
    for (int step = 0; step < 4; ++step)
      table[step] = matrix_descriptor(shared_address(memory.table) + step * 32);
#pragma unroll 1
    for (int column = 0; column < columns; column += kStep) {
      float d[kStep / 2];
      wgmma_fence();
      wgmma<T, 0, 0>(d, a[0], table[0]);
#pragma unroll
      for (int step = 1; step < 4; ++step) wgmma<T, 1, 0>(d, a[step], table[step]);
      // Last: what K pushes out of the sum is lost once.
      wgmma<Bf16, 1, 0>(d, shift, bias);
#pragma unroll
      for (int step = 0; step < 4; ++step)
        table[step] = descriptor_behind(table[step], kStep * 128);
      bias = descriptor_behind(bias, kStep * kBiasBytes);
      wgmma_commit();
      wgmma_wait<0>();
      wgmma_settle(d);
      std::uint32_t found[2] = {};
#pragma unroll
      for (int j = 0; j < kStep / 8; ++j)
#pragma unroll
        for (int side = 0; side < 2; ++side)
          found[side] = best_key(found[side], d[4 * j + 2 * side], d[4 * j + 2 * side + 1],
                                 args.key_scale, 511 - 8 * j);
#pragma unroll
      for (int side = 0; side < 2; ++side)
        best[side] = max(best[side], found[side] - static_cast<std::uint32_t>(column + 2 * quad));
    }
#pragma unroll
    for (int step = 1; step <= 2; step *= 2)
#pragma unroll
      for (int side = 0; side < 2; ++side)
        best[side] = max(best[side], __shfl_xor_sync(~0u, best[side], step));
    // Of four lanes the first two write a label each.
    const unsigned row = group * 64 + warp_row + quad % 2 * 8 + lane / 4;
    const bool valid = (quad % 2 ? offset[1] : offset[0]) < INFINITY;
    const int number = 511 - static_cast<int>((quad % 2 ? best[1] : best[0]) & 511u);
    const int label = valid ? min(number, args.shape.clusters - 1) : 0;
    if (quad < 2) {
      memory.labels[place(round)][row % 32 * 8 + row / 32] = static_cast<std::uint8_t>(label);
      if (last && static_cast<int>(row) < left(round))
        args.run.labels[first_row(round) + row] = label;
    }
    if (__any_sync(~0u, max(most[0], most[1]) >= kInfinity<T>)) clear(tile, warp_row, most);
    mbarrier_arrive(ready(round));
  }

  // Zeros in place of rows that are not finite: 0 times such a row would reach all sums.
  __device__ void clear(const Tile<T, 64>& tile, int warp_row,
                        const std::uint32_t (&most)[2]) const {
    const int lane = own_lane(), quad = lane % 4;
    for (int side = 0; side < 2; ++side) {
      if ((side ? most[1] : most[0]) < kInfinity<T>) continue;
      const int r = warp_row + 8 * side + lane / 4;
      store_shared16(tile.chunk(r, 2 * quad), make_uint4(0, 0, 0, 0));
      store_shared16(tile.chunk(r, 2 * quad + 1), make_uint4(0, 0, 0, 0));
      memory.poisoned = 1;
    }
  }

  __device__ __forceinline__ static void store_where(bool condition, std::uint32_t* to,
                                                     std::uint32_t word) {
    asm volatile("{.reg .pred p; setp.ne.b32 p, %0, 0; @p st.shared.b32 [%1], %2;}" ::"r"(
                     static_cast<int>(condition)),
                 "r"(shared_address(to)), "r"(word)
                 : "memory");
  }

  // Lists the round's rows of this warp's clusters, in order; filled up to a multiple of 16.
  __device__ __forceinline__ int list(int round, std::uint32_t* entries) const {
    const int lane = own_lane();
    const uint2 packed = reinterpret_cast<const uint2*>(memory.labels[place(round)])[lane];
    const int count = left(round);
    const std::uint32_t own = warp * 0x10101010u, below = (1u << lane) - 1;
    const std::uint32_t low = static_cast<std::uint32_t>(lane) << 16 | kNumber;
    int found = 0;
#pragma unroll
    for (int i = 0; i < kRound / 32; ++i) {
      const std::uint32_t word = (i < 4 ? packed.x : packed.y) ^ own;
      const bool mine = (word & 0xf0u << i % 4 * 8) == 0 && 32 * i + lane < count;
      const unsigned lanes = __ballot_sync(~0u, mine);
      store_where(mine, entries + found + __popc(lanes & below),
                  (low + (32u * i << 16)) | (word >> i % 4 * 8 & 15u));
      found += __popc(lanes);
    }
    if (lane < 16) entries[found + lane] = kNobody;
    __syncwarp();
    return found;
  }

  // Ranks of the listed rows among those of their cluster; lane c counts cluster c.
  __device__ __forceinline__ void rank(int round, const std::uint32_t* entries, int found,
                                       int& members) const {
    const int lane = own_lane();
    std::int32_t* ranks = args.ranks + first_row(round);
#pragma unroll 1
    for (int first = 0; first < found; first += 32) {
      const bool there = first + lane < found;
      const std::uint32_t entry = there ? entries[first + lane] : 0;
      unsigned alike = __ballot_sync(~0u, there), own = alike;
#pragma unroll
      for (int bit = 0; bit < 4; ++bit) {
        const unsigned lanes = __ballot_sync(~0u, entry >> bit & 1);
        alike &= entry >> bit & 1 ? lanes : ~lanes;
        own &= lane >> bit & 1 ? lanes : ~lanes;
      }
      const int before = __shfl_sync(~0u, members, entry & 15);
      if (there) ranks[entry >> 16] = before + __popc(alike & ((1u << lane) - 1));
      members += __popc(own);
    }
  }

  // Adds the listed rows of a round to the sums of this warp's clusters, and to their counts.
  __device__ __forceinline__ void add(int round, const std::uint32_t* entries, int found,
                                      float (&sums)[kWidth / 8][4], float (&counts)[4]) const {
    const int lane = own_lane();
    const std::uint32_t own[2] = {(kNumber | lane / 4) * 0x10001u,
                                  (kNumber | (lane / 4 + 8)) * 0x10001u};
    const std::uint32_t one = pack2<T>(1.0f, 1.0f), ones[2] = {one, one};
    const Tile<T, kWidth> tile{slot(round)};
#pragma unroll 1
    for (int first = 0; first < found; first += 16) {
      const uint2* pairs = reinterpret_cast<const uint2*>(entries + first) + lane % 4;
      const std::uint32_t row = entries[first + lane % 16] >> 16;
      const uint2 low = pairs[0], high = pairs[4];
      std::uint32_t right[kWidth / 16][4];
#pragma unroll
      for (int n = 0; n < kWidth / 16; ++n)
        ldmatrix_x4_trans(right[n], tile.chunk(row, 2 * n + lane / 16));
      const std::uint32_t numbers[2] = {__byte_perm(low.x, low.y, 0x5410),
                                        __byte_perm(high.x, high.y, 0x5410)};
      std::uint32_t left[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) left[i] = equal_pairs(numbers[i / 2], own[i % 2], T());
      mma_m16n8k16<T>(counts, left, ones, counts);
#pragma unroll
      for (int n = 0; n < kWidth / 8; ++n)
        mma_m16n8k16<T>(sums[n], left, right[n / 2] + n % 2 * 2, sums[n]);
    }
  }

  // The warp's sums to global memory, to what it wrote before where `more`, and zeros in their
  // place.
  __device__ __forceinline__ void flush(float (&sums)[kWidth / 8][4], bool more) const {
    const int lane = own_lane();
    const std::int64_t row = this->part(team.rank) + warp * kOwn;
    auto* to = reinterpret_cast<float2*>(args.sums + row * kWidth) + lane / 4 * 32 + lane % 4;
    if (more)
#pragma unroll
      for (int n = 0; n < kWidth / 8; ++n)
#pragma unroll
        for (int side = 0; side < 2; ++side) {
          const float2 before = to[4 * n + 256 * side];
          sums[n][2 * side] += before.x;
          sums[n][2 * side + 1] += before.y;
        }
#pragma unroll
    for (int n = 0; n < kWidth / 8; ++n)
#pragma unroll
      for (int side = 0; side < 2; ++side) {
        to[4 * n + 256 * side] = make_float2(sums[n][2 * side], sums[n][2 * side + 1]);
        sums[n][2 * side] = sums[n][2 * side + 1] = 0.0f;
      }
  }

  // Labels of the block's rows, and its sums of clusters and their sizes to global memory.
  __device__ void pass(bool last) {
    constexpr int kTogether = 64;  // rounds that the tensor cores add up: they lose digits
    const float2 bounds = this->table_bounds();
    float sums[kWidth / 8][4] = {}, counts[4] = {};
    int members = 0;
#pragma unroll 1
    for (int round = 0; round <= rounds; ++round) {
      if (round < rounds) {
        cp_async_wait<1>();
        __syncwarp();
        label(round, bounds, last);
        if (done + round >= 2) mbarrier_wait(free(round + 2), phase(round - 2));
        load(round + 2);
      }
      if (round > 0) {
        std::uint32_t* entries = memory.lists[warp];
        mbarrier_wait(ready(round - 1), phase(round - 1));
        const int found = list(round - 1, entries);
        if (last) rank(round - 1, entries, found, members);
        add(round - 1, entries, found, sums, counts);
        __syncwarp();  // before the next list
        mbarrier_arrive(free(round - 1));
      } else if (rounds > 0) {
        continue;
      }
      if (round % kTogether == 0 || round == rounds) flush(sums, round > kTogether);
    }
    cp_async_wait<0>();
    __syncthreads();
    done += rounds;
    const std::int64_t start = this->part(team.rank);
    const int lane = own_lane();
    if (lane % 4 == 0) {
      args.counts[start + warp * kOwn + lane / 4] = static_cast<int>(counts[0]);
      args.counts[start + warp * kOwn + lane / 4 + 8] = static_cast<int>(counts[2]);
    }
    if (memory.poisoned && threadIdx.x < kWidth) args.sums[start * kWidth + threadIdx.x] = NAN;
  }
};

}  // namespace key_kmeans_detail

}  // namespace coterie::cuda
