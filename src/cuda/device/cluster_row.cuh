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
  float delta;

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

// dq of 16 rows over all slots, 32 columns: dS times the keys.
template <class T, int kWidth, int kWarps>
__device__ __forceinline__ void multiply_keys(Accumulator (&dq)[2],
                                              const MemberBlock<T, kWidth, kWarps>& block, int row,
                                              int column) {
  const int tiles = (block.args.shape.topk + kSlotTile - 1) / kSlotTile;
#pragma unroll
  for (int i = 0; i < 16; ++i) dq[i / 8][i / 4 % 2][i % 4] = 0.0f;
#pragma unroll 1
  for (int tile = 0; tile < tiles; ++tile)
#pragma unroll
    for (int n = 0; n < kSlotTile; n += 16) {
      FragmentA<T> ds;
      load_a(ds, block.derivatives(tile), row, n);
#pragma unroll
      for (int d = 0; d < 2; ++d) {
        FragmentB<T> b;
        load_b_transposed(b, block.slots(tile, 0), column + 16 * d, n);
        multiply_add(dq[d], ds, b);
      }
    }
}

// The cluster as row 0 of the first stage. The first two warps share the work.
template <class T, int kWidth, int kWarps>
struct ClusterRow {
  static constexpr int kColumns = kWidth / 32;  // of a lane
  static constexpr float kMost = 128.0f;
  const MemberBlock<T, kWidth, kWarps>& block;
  MemberSums<T, kWidth, kWarps>& sums;
  float lse, dmass = 0.0f;

  __device__ ClusterRow(const MemberBlock<T, kWidth, kWarps>& b, float mean_lse)
      : block(b), sums(MemberSums<T, kWidth, kWarps>::of(b)) {
    lse = mean_lse == -INFINITY ? INFINITY : mean_lse * kLog2e - block.args.shape.weight_bits;
    if (block.args.shape.mass_grad)
      for (const float part : sums.dmass) dmass += part;
    dmass *= block.args.shape.gradient_scale;
  }

  // Rounds the mean (warp 0) and dout (warp 1) into the row, the other 15 of which become zero, and
  // writes them, lse and delta to scratch memory if `write`. delta is taken of the rounded sum:
  // dout . v - delta then cancels as in exact arithmetic.
  __device__ void write_operands(float mass, bool write) const {
    const BackwardScratch<T>& scratch = block.args.scratch;
    const int lane = threadIdx.x % 32, first = lane * kColumns, tensor = threadIdx.x / 32;
    const Tile<T, kWidth> tile = block.rows(0, tensor);
    const float* from = tensor == 0 ? block.mean() : sums.dout;
    const float factor = tensor == 0 ? 1.0f : block.args.shape.gradient_scale;
    T* to = (tensor == 0 ? scratch.mean : scratch.dout) +
            static_cast<std::int64_t>(block.row) * kWidth + first;
#pragma unroll
    for (int i = 0; i < 16 * tile.kChunks; i += 32)
      store_shared16(tile.base + (i + lane) * 16, make_uint4(0, 0, 0, 0));
    __syncwarp();
    float delta = 0.0f;
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      const T value = from_float<T>(from[first + i] * factor);
      store_element(tile.address(0, first + i), value);
      if (write) to[i] = value;
      delta = fmaf(to_float(value), block.out()[first + i], delta);
    }
    if (tensor == 0) return;
    delta = warp_sum(delta) + mass * dmass;
    if (lane > 0) return;
    sums.delta = delta;
    if (!write) return;
    scratch.row_lse[block.row] = lse;
    scratch.row_delta[block.row] = delta;
  }

  // Writes dS of all slots and the weights of slot tile `own` to shared memory, as those of
  // members; a warp has half of the slots of a tile.
  __device__ void differentiate(int num_keys, int own) const {
    const BackwardShape& shape = block.args.shape;
    const float power = shape.unscale > kMost ? kMost : shape.unscale, delta = sums.delta;
    const float lses[2] = {threadIdx.x % 32 < 4 ? lse : INFINITY, INFINITY};
    const int slot = static_cast<int>(threadIdx.x) / 32 * 16;
#pragma unroll 1
    for (int tile = 0; tile * kSlotTile < shape.topk; ++tile) {
      const int left[2] = {num_keys - tile * kSlotTile, 0};
      Accumulator p[1], d[1];
      weights(p, d, block.rows(0, 0), block.rows(0, 1), block.slots(tile, 0), block.slots(tile, 1),
              0, slot, lses, left, shape.scale * kLog2e);
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        float& a = p[0][j / 4][j % 4];
        float& x = d[0][j / 4][j % 4];
        x = (a * (dmass - delta) - to_float(from_float<T>(a * (x - delta)))) * shape.unscale;
        a = -to_float(from_float<T>(a)) * power;
      }
      if (tile == own) store_fragment(block.weights(), 0, slot, p[0]);
      store_fragment(block.derivatives(tile), 0, slot, d[0]);
    }
  }
  // What top keys add to the gradient of the mean. By all warps.
  __device__ void write_mean() const {
    float* to = block.args.scratch.top_dmean + static_cast<std::int64_t>(block.row) * kWidth;
    const float scale = block.args.shape.scale;
    const int lane = threadIdx.x % 32;
#pragma unroll 1
    for (int column = static_cast<int>(threadIdx.x) / 32 * 32; column < kWidth;
         column += 32 * kWarps) {
      Accumulator dq[2];
      multiply_keys(dq, block, 0, column);
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
    const float rest = block.args.shape.unscale / kMost;
    if (rest <= 1.0f) return;
    for (int column = static_cast<int>(threadIdx.x); column < kWidth; column += 32 * kWarps) {
      const T rounded = from_float<T>(sums.dout[column] * block.args.shape.gradient_scale);
      store_element(block.rows(0, 1).address(0, column), from_float<T>(to_float(rounded) * rest));
    }
    __syncthreads();
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
                                               Sums& slot_sums, int num_keys, int own, float mass,
                                               float mean_lse) {
  const BackwardShape& shape = block.args.shape;
  const bool empty = block.unit.size == 0, top = shape.topk > 0 && !empty;
  const bool first_warps = threadIdx.x < 64;
  __syncthreads();
  const ClusterRow<T, kWidth, kWarps> row(block, empty ? -INFINITY : mean_lse);
  if (first_warps) row.write_operands(top ? mass : 0.0f, own == 0);
  if (!top) return;
  __syncthreads();
  if (first_warps) row.differentiate(num_keys, own);
  __syncthreads();
  if (own == 0 && block.args.dq.data) row.write_mean();
  row.unscale_dout();
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
  const auto copy = [&](int i, bool sum) {
    const int slot = (r + i) / 2;
    if (slot >= count) return;
    uint4 words = load_shared16(tile(r % 2).chunk(slot, chunk));
    uint4* place = reinterpret_cast<uint4*>(to + i * kWidth);
    if (sum) {
      float total[16 / sizeof(T)] = {};
      add_chunk<T>(total, words);
      add_chunk<T>(total, *place);
      words = pack_chunk<T>(total);
    }
    *place = words;
  };
  if (add) {
#pragma unroll 1
    for (int i = 0; i < 2 * kSlotTile; i += kStep) copy(i, true);
  } else {
#pragma unroll
    for (int i = 0; i < 2 * kSlotTile; i += kStep) copy(i, false);
  }
}

}  // namespace coterie::cuda
