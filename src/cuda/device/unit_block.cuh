// SPDX-License-Identifier: MIT
// Backward pass over the members of clusters (clustered_bwd.h): what its kernels share. A block
// takes a unit, up to kUnitRows members of one cluster gathered in sorted order, against kSlotTile
// of its top keys, which stay in shared memory.
#pragma once

#include <cstdint>

#include "cuda/clustered_bwd.h"
#include "cuda/device/ascending.cuh"
#include "cuda/device/load.cuh"
#include "cuda/device/mma.cuh"
#include "cuda/device/softmax.cuh"
#include "cuda/tuning.h"

namespace coterie::cuda {

// Mean size of clusters up to which units are taken by blocks of two warps that load nothing ahead,
// so that more of them fit on a multiprocessor; others have four.
constexpr int kSmallUnit = 48;

// Shared memory: members and top keys, kStages times Q and dO rows, one tile of keys and values.
template <class T, int kWidth, int kBlockWarps>
struct UnitShape {
  static constexpr int kWarps = kBlockWarps, kThreads = 32 * kWarps;
  static constexpr int kRowTile = 16 * kWarps;  // members at a time
  static constexpr int kStages = kWarps / 2;
  static constexpr int kRowTileBytes = kRowTile * kWidth * static_cast<int>(sizeof(T));
  static constexpr int kSlotTileBytes = kSlotTile * kWidth * static_cast<int>(sizeof(T));
  static constexpr int kRows = (kUnitRows + kMaxTopKeys) * 4;
  static constexpr int kSlots = kRows + 2 * kStages * kRowTileBytes;
  static constexpr int kBytes = kSlots + 2 * kSlotTileBytes;
};

// What a block works on.
template <class T, int kWidth, int kWarps>
struct UnitBlock {
  using S = UnitShape<T, kWidth, kWarps>;
  const BackwardArgs<T>& args;
  unsigned char* memory;
  std::uint32_t base;
  int head;
  QueryTile unit;
  ItemSpan k_span;
  std::int64_t row;    // of the cluster
  std::int64_t token;  // of the item's first query in (B, H, N) tensors

  __device__ UnitBlock(const BackwardArgs<T>& a, unsigned char* m)
      : args(a), memory(m), base(shared_address(m)) {
    const BackwardShape& shape = args.shape;
    head = static_cast<int>(blockIdx.x) / shape.units.total;
    unit = shape.units.find(shape.spans.q, args.lists.offsets, shape.H, head,
                            static_cast<int>(blockIdx.x) % shape.units.total);
    if (unit.count == 0) return;
    k_span = shape.spans.k.span(unit.item);
    row = (static_cast<std::int64_t>(unit.item) * shape.H + head) * shape.clusters + unit.cluster;
    token =
        (static_cast<std::int64_t>(unit.span.batch) * shape.H + head) * shape.N + unit.span.begin;
  }

  __device__ std::int32_t* indices() const { return reinterpret_cast<std::int32_t*>(memory); }
  __device__ std::int32_t* keys() const { return indices() + kUnitRows; }
  __device__ Tile<T, kWidth> rows(int first, int tensor) const {
    const int stage = first / S::kRowTile % S::kStages;
    return {base + S::kRows + (2 * stage + tensor) * S::kRowTileBytes};
  }
  __device__ Tile<T, kWidth> slots(int offset, int tensor) const {
    return {base + offset + tensor * S::kSlotTileBytes};
  }
  // Rows of a tile, in whole sixteens.
  __device__ int tile_rows(int first) const {
    return min(S::kRowTile, (unit.count - first + 15) / 16 * 16);
  }
  // Whether this warp has rows in a tile.
  __device__ bool active(int first) const {
    return first + static_cast<int>(threadIdx.x) / 32 * 16 < unit.count;
  }

  // Fills indices() and keys(), and tells how many top keys there are. Synchronises the threads.
  __device__ int load_lists() const {
    const int thread = static_cast<int>(threadIdx.x), topk = args.shape.topk;
    const std::int32_t* order = args.lists.order + token + unit.first;
    for (int i = thread; i < unit.count; i += S::kThreads) indices()[i] = order[i];
    int count = 0;
#pragma unroll
    for (int slot = thread; slot - thread < kMaxTopKeys; slot += S::kThreads) {
      const int key = slot < topk ? args.lists.top_keys[row * topk + slot] : -1;
      keys()[slot] = key;
      count += __syncthreads_count(key >= 0);
    }
    return count;
  }
  // How many of the `count` top keys a member sees.
  __device__ int visible(int member, int count) const {
    if (!args.shape.causal) return count;
    return count_up_to(keys(), count, member + k_span.length - unit.span.length);
  }
  __device__ void load_rows(int first, bool queries) const {
    const int count = unit.count - first;
    if (queries)
      load_tile<S::kRowTile, S::kThreads>(rows(first, 0),
                                          args.q.rows(unit.span.batch, head, unit.span.begin), 0,
                                          count, indices() + first);
    load_tile<S::kRowTile, S::kThreads>(rows(first, 1),
                                        args.g.rows(unit.span.batch, head, unit.span.begin), 0,
                                        count, indices() + first);
    cp_async_commit();
  }
  // Waits for the rows of a tile. With two stages the next ones are then on their way; with one
  // they are loaded here, after all threads are done with those before.
  __device__ void next_rows(int first, bool queries) const {
    if (S::kStages == 1 && first > 0) {
      __syncthreads();
      load_rows(first, queries);
    }
    cp_async_wait<0>();
    __syncthreads();
    if (S::kStages == 2 && first + S::kRowTile < unit.count)
      load_rows(first + S::kRowTile, queries);
  }
  // Keys and values of slots [slot, slot + kSlotTile).
  __device__ void load_slots(int offset, int slot) const {
    const int key_head = head / args.shape.group, count = args.shape.topk - slot;
    load_tile<kSlotTile, S::kThreads>(slots(offset, 0),
                                      args.k.rows(k_span.batch, key_head, k_span.begin), 0, count,
                                      keys() + slot);
    load_tile<kSlotTile, S::kThreads>(slots(offset, 1),
                                      args.v.rows(k_span.batch, key_head, k_span.begin), 0, count,
                                      keys() + slot);
  }
};

// lse of this lane's two rows in base 2; +inf, which makes weights 0, for rows without keys.
__device__ __forceinline__ float log2_lse(const float* lse, std::int64_t row, bool there) {
  const float value = there ? lse[row] * kLog2E : INFINITY;
  return value == -INFINITY ? INFINITY : value;
}

// p and g . v of the warp's 16 rows over kSlotTile slots, of which the lane's two rows see the
// first keys[].
template <class T, int kWidth>
__device__ __forceinline__ void weights(Accumulator (&p)[2], Accumulator (&gv)[2],
                                        const Tile<T, kWidth>& sQ, const Tile<T, kWidth>& sG,
                                        const Tile<T, kWidth>& sK, const Tile<T, kWidth>& sV,
                                        const float (&lse)[2], const int (&keys)[2], float scale) {
  const int row = threadIdx.x / 32 * 16;
#pragma unroll
  for (int i = 0; i < 16; ++i) p[i / 8][i / 4 % 2][i % 4] = gv[i / 8][i / 4 % 2][i % 4] = 0.0f;
#pragma unroll
  for (int d = 0; d < kWidth; d += 16) {
    FragmentA<T> q, g;
    load_a(q, sQ, row, d);
    load_a(g, sG, row, d);
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      FragmentB<T> b;
      load_b(b, sK, 16 * n, d);
      multiply_add(p[n], q, b);
      load_b(b, sV, 16 * n, d);
      multiply_add(gv[n], g, b);
    }
  }
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    float& x = p[i / 8][i / 4 % 2][i % 4];
    const int column = i / 4 * 8 + static_cast<int>(threadIdx.x) % 4 * 2 + i % 2;
    x = column < keys[i / 2 % 2] ? exp2_approximate(fmaf(x, scale, -lse[i / 2 % 2])) : 0.0f;
  }
}

// Launches kernel<kWarps> for the sizes of a call's clusters.
template <class T, class Launch>
void with_warps(const BackwardArgs<T>& args, const Launch& launch) {
  if (args.shape.N <= kSmallUnit * args.shape.clusters)
    launch(std::integral_constant<int, 2>{});
  else
    launch(std::integral_constant<int, 4>{});
}

}  // namespace coterie::cuda
