// SPDX-License-Identifier: MIT
// The end of a cluster in the backward pass (clustered_bwd.h): operands of the centroid kernels
// from the sums over its members, and what those kernels get wrong for its top keys. dS should be
// A (dm - delta) and the weight 0, where they take A (dout . v - delta) and A. The difference is
// that of one more member: a row with the mean as query and dout as output gradient.
#pragma once

#include <cstdint>

#include "cuda/device/element.cuh"
#include "cuda/device/member_block.cuh"
#include "cuda/device/member_products.cuh"
#include "cuda/device/warp.cuh"

namespace coterie::cuda {

// Sums over the members, in shared memory behind the first stage of rows.
template <class T, int kWidth, int kWarps>
struct MemberSums {
  float dout[kWidth];
  float dmass[kWarps];

  __device__ static MemberSums& of(const MemberBlock<T, kWidth, kWarps>& block) {
    return *reinterpret_cast<MemberSums*>(block.memory +
                                          2 * MemberShape<T, kWidth, kWarps>::kRowTileBytes);
  }
};

// Sums over the members of a unit: to where finish_cluster finds them, or where add_units does.
template <class T, int kWidth, int kWarps, class Sums>
__device__ __forceinline__ void store_sums(const MemberBlock<T, kWidth, kWarps>& block,
                                           const Sums& sums, float dmass, bool whole) {
  const BackwardScratch<T>& scratch = block.args.scratch;
  const std::int64_t place = block.unit.place;
  MemberSums<T, kWidth, kWarps>& shared = MemberSums<T, kWidth, kWarps>::of(block);
  sums.write_rows_sum(whole ? shared.dout : scratch.unit_dout + place * kWidth);
  dmass = warp_sum(dmass);
  if (threadIdx.x % 32 == 0) shared.dmass[threadIdx.x / 32] = dmass;
  if (whole) return;
  __syncthreads();
  float sum = 0.0f;
  for (const float part : shared.dmass) sum += part;
  if (threadIdx.x == 0) scratch.unit_dmass[place] = sum;
}

// The sums of all units of the cluster, in their order.
template <class T, int kWidth, int kWarps>
__device__ __forceinline__ void add_units(const MemberBlock<T, kWidth, kWarps>& block) {
  using S = MemberShape<T, kWidth, kWarps>;
  const BackwardScratch<T>& scratch = block.args.scratch;
  MemberSums<T, kWidth, kWarps>& shared = MemberSums<T, kWidth, kWarps>::of(block);
  const int more = (block.unit.size - 1) / kUnitRows;
  const std::int64_t second =
      block.args.shape.units.second_place(block.head, block.unit.span, block.unit.first);
  for (int column = static_cast<int>(threadIdx.x); column < kWidth; column += S::kThreads) {
    float sum = scratch.unit_dout[static_cast<std::int64_t>(block.row) * kWidth + column];
    for (int i = 0; i < more; ++i) sum += scratch.unit_dout[(second + i) * kWidth + column];
    shared.dout[column] = sum;
  }
  if (threadIdx.x >= S::kWarps) return;
  float sum = scratch.unit_dmass[block.row];
  for (int i = 0; i < more; ++i) sum += scratch.unit_dmass[second + i];
  shared.dmass[threadIdx.x] = threadIdx.x == 0 ? sum : 0.0f;
}

// dq of the warp's 16 rows over all slots, 32 columns: dS times the keys.
template <class T, int kWidth, int kWarps>
__device__ __forceinline__ void multiply_keys(Accumulator (&dq)[2],
                                              const MemberBlock<T, kWidth, kWarps>& block,
                                              int column) {
  const int tiles = (block.args.shape.topk + kSlotTile - 1) / kSlotTile;
#pragma unroll
  for (int i = 0; i < 16; ++i) dq[i / 8][i / 4 % 2][i % 4] = 0.0f;
#pragma unroll 1
  for (int tile = 0; tile < tiles; ++tile)
#pragma unroll
    for (int n = 0; n < kSlotTile; n += 16) {
      FragmentA<T> ds;
      load_a(ds, block.derivatives(tile), threadIdx.x / 32 * 16, n);
#pragma unroll
      for (int d = 0; d < 2; ++d) {
        FragmentB<T> b;
        load_b_transposed(b, block.slots(tile, 0), column + 16 * d, n);
        multiply_add(dq[d], ds, b);
      }
    }
}

// The cluster as row 0 of the first stage, by the first warp.
template <class T, int kWidth, int kWarps>
struct ClusterRow {
  static constexpr int kColumns = kWidth / 32;  // of a lane
  static constexpr float kMost = 128.0f;
  const MemberBlock<T, kWidth, kWarps>& block;
  float lse = INFINITY, delta = 0.0f, dmass = 0.0f;

  // Rounds mean and dout into the row, the other 15 of which become zero, and writes them and lse
  // and delta to scratch memory. delta is taken of the rounded sum: dout . v - delta then cancels
  // as in exact arithmetic.
  __device__ void write_operands(float mass, float mean_lse, bool write) {
    const BackwardShape& shape = block.args.shape;
    const BackwardScratch<T>& scratch = block.args.scratch;
    const MemberSums<T, kWidth, kWarps>& sums = MemberSums<T, kWidth, kWarps>::of(block);
    const int lane = threadIdx.x % 32, first = lane * kColumns;
    const Tile<T, kWidth> q = block.rows(0, 0), g = block.rows(0, 1);
#pragma unroll
    for (int i = 0; i < 16 * q.kChunks; i += 32) {
      store_shared16(q.base + (i + lane) * 16, make_uint4(0, 0, 0, 0));
      store_shared16(g.base + (i + lane) * 16, make_uint4(0, 0, 0, 0));
    }
    __syncwarp();
    const std::int64_t place = static_cast<std::int64_t>(block.row) * kWidth + first;
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      const T mean = from_float<T>(block.mean()[first + i]);
      const T dout = from_float<T>(sums.dout[first + i] * shape.gradient_scale);
      store_element(q.address(0, first + i), mean);
      store_element(g.address(0, first + i), dout);
      if (write) {
        scratch.mean[place + i] = mean;
        scratch.dout[place + i] = dout;
      }
      delta = fmaf(to_float(dout), block.out()[first + i], delta);
    }
    if (shape.mass_grad)
      for (const float part : sums.dmass) dmass += part;
    dmass *= shape.gradient_scale;
    delta = warp_sum(delta) + mass * dmass;
    if (mean_lse != -INFINITY) lse = mean_lse * kLog2E - shape.weight_bits;
    if (lane > 0 || !write) return;
    scratch.row_lse[block.row] = lse;
    scratch.row_delta[block.row] = delta;
  }

  // Writes dS of all slots and the weights of slot tile `own` to shared memory, as those of
  // members.
  __device__ void differentiate(int num_keys, int own) const {
    const BackwardShape& shape = block.args.shape;
    const float power = shape.unscale > kMost ? kMost : shape.unscale;
    const float lses[2] = {threadIdx.x % 32 < 4 ? lse : INFINITY, INFINITY};
    __syncwarp();
#pragma unroll 1
    for (int tile = 0; tile * kSlotTile < shape.topk; ++tile) {
      const int left[2] = {num_keys - tile * kSlotTile, 0};
      Accumulator p[2], d[2];
      weights(p, d, block.rows(0, 0), block.rows(0, 1), block.slots(tile, 0), block.slots(tile, 1),
              lses, left, shape.scale * kLog2E);
#pragma unroll
      for (int j = 0; j < 16; ++j) {
        float& a = p[j / 8][j / 4 % 2][j % 4];
        float& x = d[j / 8][j / 4 % 2][j % 4];
        x = (a * (dmass - delta) - to_float(from_float<T>(a * (x - delta)))) * shape.unscale;
        a = -to_float(from_float<T>(a)) * power;
      }
      if (tile == own) store_weights(block.weights(), p);
      store_weights(block.derivatives(tile), d);
    }
    __syncwarp();
  }
  // What top keys add to the gradient of the mean.
  __device__ void write_mean() const {
    float* to = block.args.scratch.top_dmean + static_cast<std::int64_t>(block.row) * kWidth;
    const float scale = block.args.shape.scale;
    const int lane = threadIdx.x % 32;
#pragma unroll 1
    for (int column = 0; column < kWidth; column += 32) {
      Accumulator dq[2];
      multiply_keys(dq, block, column);
      if (lane >= 4) continue;  // the first row
#pragma unroll
      for (int n = 0; n < 4; ++n)
        store2(to + column + 8 * n + 2 * lane, dq[n / 2][n % 2][0] * scale,
               dq[n / 2][n % 2][1] * scale);
    }
  }
  // dout times weights has to be what it is without scales. The power of two that is missing goes
  // to the weights up to kMost, so that fp16 holds them, the rest to dout.
  __device__ void unscale_dout() const {
    if (block.args.shape.unscale <= kMost) return;
    const float rest = block.args.shape.unscale / kMost;
    const int first = threadIdx.x % 32 * kColumns;
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      const float dout = MemberSums<T, kWidth, kWarps>::of(block).dout[first + i];
      const T rounded = from_float<T>(dout * block.args.shape.gradient_scale);
      store_element(block.rows(0, 1).address(0, first + i),
                    from_float<T>(to_float(rounded) * rest));
    }
  }

 private:
  __device__ static void store_element(std::uint32_t to, T value) {
    if constexpr (sizeof(T) == 2)
      asm volatile("st.shared.b16 [%0], %1;" ::"r"(to),
                   "h"(*reinterpret_cast<const unsigned short*>(&value))
                   : "memory");
    else
      asm volatile("st.shared.f32 [%0], %1;" ::"r"(to), "f"(value) : "memory");
  }
};

// All that follows from the sums over the members, which are in shared memory; adds to the sums of
// the slots. Blocks with own > 0 write nothing else. By all threads.
template <class T, int kWidth, int kWarps, class Sums>
__device__ __forceinline__ void finish_cluster(const MemberBlock<T, kWidth, kWarps>& block,
                                               Sums& slot_sums, int num_keys, int own) {
  const BackwardShape& shape = block.args.shape;
  const bool empty = block.unit.size == 0, top = shape.topk > 0 && !empty;
  __syncthreads();
  if (threadIdx.x < 32) {
    ClusterRow<T, kWidth, kWarps> row{block};
    row.write_operands(top ? block.args.lists.mass[block.row] : 0.0f,
                       empty ? -INFINITY : block.args.lists.centroid_lse[block.row], own == 0);
    if (top) {
      row.differentiate(num_keys, own);
      if (own == 0 && block.args.dq.data) row.write_mean();
      row.unscale_dout();
    }
  }
  __syncthreads();
  if (top)
    slot_sums.add(block.derivatives(own), block.weights(), block.rows(0, 0), block.rows(0, 1), 1);
}

// Writes the sums of slot tile `own` to their rows in scratch memory, or adds them to what lies
// there.
template <class T, int kWidth, int kWarps, class Sums>
__device__ __forceinline__ void write_slots(const MemberBlock<T, kWidth, kWarps>& block,
                                            const Sums& slot_sums, int own, bool add) {
  using S = MemberShape<T, kWidth, kWarps>;
  constexpr int kChunks = Tile<T, kWidth>::kChunks, kStep = S::kThreads / kChunks;
  const int topk = block.args.shape.topk, count = min(topk - own * kSlotTile, kSlotTile);
  const auto tile = [&](int tensor) {
    return Tile<T, kWidth>{block.base + tensor * S::kSlotTileBytes};
  };
  __syncthreads();
  slot_sums.store(tile(0), tile(1), block.args.shape.scale);
  __syncthreads();
  const int r = static_cast<int>(threadIdx.x) / kChunks, chunk = threadIdx.x % kChunks;
  T* to =
      block.args.scratch.slots +
      (static_cast<std::int64_t>(block.unit.place) * topk + own * kSlotTile + r / 2) * 2 * kWidth +
      r % 2 * kWidth + chunk * Tile<T, kWidth>::kVector;
#pragma unroll
  for (int i = 0; i < 2 * kSlotTile; i += kStep) {
    const int slot = (r + i) / 2;
    if (slot >= count) break;
    uint4 words = load_shared16(tile(r % 2).chunk(slot, chunk));
    uint4* place = reinterpret_cast<uint4*>(to + i * kWidth);
    if (add) {
      float sum[16 / sizeof(T)] = {};
      add_chunk<T>(sum, words);
      add_chunk<T>(sum, *place);
      words = pack_chunk<T>(sum);
    }
    *place = words;
  }
}

}  // namespace coterie::cuda
