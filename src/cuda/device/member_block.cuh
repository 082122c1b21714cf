// SPDX-License-Identifier: MIT
// Members of a cluster against its top keys, in the backward pass (clustered_bwd.h): what a block
// works on, its shared memory, and the weights.
#pragma once

#include <cstdint>

#include "cuda/clustered_bwd.h"
#include "cuda/device/ascending.cuh"
#include "cuda/device/load.cuh"
#include "cuda/device/mma.cuh"
#include "cuda/device/softmax.cuh"
#include "cuda/tuning.h"

namespace coterie::cuda {

// Shared memory: kStages times Q and dO rows, weights of kSlotTile slots, the top keys' numbers;
// behind these for every kSlotTile slots dS, keys and values.
template <class T, int kWidth, int kBlockWarps>
struct MemberShape {
  static constexpr int kWarps = kBlockWarps, kThreads = 32 * kWarps;
  static constexpr int kRowTile = 16 * kWarps;  // members at a time
  static constexpr int kStages = kWarps / 2;
  static constexpr int kRowTileBytes = kRowTile * kWidth * static_cast<int>(sizeof(T));
  static constexpr int kSlotTileBytes = kSlotTile * kWidth * static_cast<int>(sizeof(T));
  static constexpr int kWeightBytes = kRowTile * kSlotTile * static_cast<int>(sizeof(T));
  static constexpr int kWeights = 2 * kStages * kRowTileBytes;
  static constexpr int kKeys = kWeights + kWeightBytes;
  static constexpr int kSlots = kKeys + kMaxTopKeys * 4;
  static constexpr int kTileBytes = kWeightBytes + 2 * kSlotTileBytes;  // of kSlotTile slots
  static constexpr int kMinBlocks = sizeof(T) == 4 ? 1
                                    : kWidth > 64  ? 8 / kWarps
                                    : kWarps == 2  ? 6
                                                   : 4;
  static constexpr int bytes(int tiles) { return kSlots + tiles * kTileBytes; }
};

// The rows of a tile that this thread copies, by number; the same ones of two tensors.
template <class T, int kWidth, int kRows, int kThreads>
struct Gather {
  static constexpr int kChunks = Tile<T, kWidth>::kChunks;
  static constexpr int kStep = kThreads / kChunks, kCount = kRows / kStep;
  static_assert(kStep > 0 && kThreads % kChunks == 0 && kRows % kStep == 0, "whole rows");
  int number[kCount];

  __device__ void find(const std::int32_t* list, int first, int end) {
    const int r = first + static_cast<int>(threadIdx.x) / kChunks;
#pragma unroll
    for (int i = 0; i < kCount; ++i) number[i] = r + i * kStep < end ? list[r + i * kStep] : -1;
  }
  __device__ void load(const Tile<T, kWidth>& tile, const Rows<const T>& rows) const {
    const int r = static_cast<int>(threadIdx.x) / kChunks, chunk = threadIdx.x % kChunks;
    const int column = chunk * Tile<T, kWidth>::kVector;
    const T* from = rows.data + column;
    if (rows.aligned) {
      const bool inside = column < rows.width;
#pragma unroll
      for (int i = 0; i < kCount; ++i)
        cp_async16(tile.chunk(r + i * kStep, chunk), from + max(number[i], 0) * rows.pitch,
                   number[i] >= 0 && inside ? 16 : 0);
    } else {
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        uint4 words = make_uint4(0, 0, 0, 0);
        if (number[i] >= 0)
          words = load_chunk(from + number[i] * rows.pitch, 0, rows.width - column);
        store_shared16(tile.chunk(r + i * kStep, chunk), words);
      }
    }
  }
};

// What a block works on.
template <class T, int kWidth, int kWarps>
struct MemberBlock {
  using S = MemberShape<T, kWidth, kWarps>;
  const BackwardArgs<T>& args;
  unsigned char* memory;
  std::uint32_t base;
  int head;
  QueryTile unit;
  ItemSpan k_span;
  std::int64_t row;           // of the cluster
  std::int64_t token;         // of the item's first query in (B, H, N) tensors
  const std::int32_t* order;  // of the unit's members

  __device__ MemberBlock(const BackwardArgs<T>& a, unsigned char* m)
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
    order = args.lists.order + token + unit.first;
  }

  __device__ std::int32_t* keys() const {
    return reinterpret_cast<std::int32_t*>(memory + S::kKeys);
  }
  __device__ Tile<T, kWidth> rows(int first, int tensor) const {
    const int stage = first / S::kRowTile % S::kStages;
    return {base + (2 * stage + tensor) * S::kRowTileBytes};
  }
  __device__ Tile<T, kSlotTile> weights() const { return {base + S::kWeights}; }
  // Of slots [kSlotTile tile, kSlotTile (tile + 1)).
  __device__ Tile<T, kSlotTile> derivatives(int tile) const {
    return {base + S::kSlots + tile * S::kTileBytes};
  }
  __device__ Tile<T, kWidth> slots(int tile, int tensor) const {
    return {base + S::kSlots + tile * S::kTileBytes + S::kWeightBytes + tensor * S::kSlotTileBytes};
  }
  // Whether this warp has rows in a tile.
  __device__ bool active(int first) const {
    return first + static_cast<int>(threadIdx.x) / 32 * 16 < unit.count;
  }

  // Tells how many top keys there are; keys() is filled for the causal form only. By whole warps.
  __device__ int count_keys() const {
    const int lane = threadIdx.x % 32, topk = args.shape.topk;
    const std::int32_t* list = args.lists.top_keys + row * topk;
    int count = 0;
    for (int slot = lane; slot - lane < topk; slot += 32) {
      const int key = slot < topk ? list[slot] : -1;
      if (args.shape.causal) keys()[slot] = key;
      count += __popc(__ballot_sync(~0u, key >= 0));
    }
    return count;
  }
  // How many of the `count` top keys a member sees.
  __device__ int visible(int member, int count) const {
    if (!args.shape.causal) return count;
    return count_up_to(keys(), count, member + k_span.length - unit.span.length);
  }
  // Keys and values of the top keys' slots [kSlotTile tile, kSlotTile (tile + 1)).
  __device__ void load_slots(int tile) const {
    const int key_head = head / args.shape.group;
    Gather<T, kWidth, kSlotTile, S::kThreads> gather;
    gather.find(args.lists.top_keys + row * args.shape.topk, tile * kSlotTile, args.shape.topk);
    gather.load(slots(tile, 0), args.k.rows(k_span.batch, key_head, k_span.begin));
    gather.load(slots(tile, 1), args.v.rows(k_span.batch, key_head, k_span.begin));
  }
};

// lse in base 2; +inf, which makes weights 0, for rows without keys.
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

template <class T>
__device__ __forceinline__ void store_weights(const Tile<T, kSlotTile>& tile,
                                              const Accumulator (&acc)[2]) {
  const int lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16 + lane / 4;
#pragma unroll
  for (int n = 0; n < 4; ++n)
#pragma unroll
    for (int side = 0; side < 2; ++side) {
      const std::uint32_t to = tile.address(row + 8 * side, 8 * n + lane % 4 * 2);
      const float low = acc[n / 2][n % 2][2 * side], high = acc[n / 2][n % 2][2 * side + 1];
      if constexpr (sizeof(T) == 2)
        asm volatile("st.shared.b32 [%0], %1;" ::"r"(to), "r"(pack2<T>(low, high)) : "memory");
      else
        asm volatile("st.shared.v2.f32 [%0], {%1,%2};" ::"r"(to), "f"(low), "f"(high) : "memory");
    }
}

}  // namespace coterie::cuda
