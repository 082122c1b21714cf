// SPDX-License-Identifier: MIT
// Members of a cluster against its top keys, in the backward pass (clustered_bwd.h): what a block
// works on, its shared memory, and what it copies there.
#pragma once

#include <cstdint>

#include "cuda/clustered_bwd.h"
#include "cuda/device/ascending.cuh"
#include "cuda/device/copy_word.cuh"
#include "cuda/device/load.cuh"
#include "cuda/device/row_chunk.cuh"
#include "cuda/tuning.h"

namespace coterie::cuda {

// Shared memory: two stages of Q and dO rows with their numbers and lse, weights of kSlotTile
// slots, a place for 32 columns of dq, mean and output of the cluster, the top keys' numbers;
// behind these for every kSlotTile slots dS, keys and values.
template <class T, int kWidth, int kBlockWarps>
struct MemberShape {
  static constexpr int kWarps = kBlockWarps;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kRowTile = 16 * kWarps;  // members at a time
  static constexpr int kRowTileBytes = kRowTile * kWidth * static_cast<int>(sizeof(T));
  static constexpr int kSlotTileBytes = kSlotTile * kWidth * static_cast<int>(sizeof(T));
  static constexpr int kWeightBytes = kRowTile * kSlotTile * static_cast<int>(sizeof(T));
  static constexpr int kWeights = 4 * kRowTileBytes;
  static constexpr int kFacts = kWeights + 2 * kWeightBytes;
  static constexpr int kCluster = kFacts + 2 * kRowTile * 8;
  static constexpr int kKeys = kCluster + 2 * kWidth * 4;
  static constexpr int kSlots = kKeys + kMaxTopKeys * 4;
  static constexpr int kTileBytes = kWeightBytes + 2 * kSlotTileBytes;  // of kSlotTile slots
  static constexpr int kMinBlocks = sizeof(T) == 4 ? 1 : kWidth > 64 ? 2 : kWarps == 2 ? 6 : 4;
  static constexpr int bytes(int tiles) { return kSlots + tiles * kTileBytes; }
};

// Rows of a tile that this thread copies, by number; the same ones of two tensors.
template <class T, int kWidth, int kRows, int kThreads>
struct Gather {
  static constexpr int kChunks = Tile<T, kWidth>::kChunks;
  static constexpr int kStep = kThreads / kChunks, kCount = kRows / kStep;
  static_assert(kStep > 0 && kThreads % kChunks == 0 && kRows % kStep == 0, "whole rows");
  const std::int32_t* list;  // from this thread's first row on
  int left;                  // entries from there on
  int number[kCount];

  __device__ void find(const std::int32_t* order, int first, int end) {
    const int r = first + static_cast<int>(threadIdx.x) / kChunks;
    list = order + r;
    left = end - r;
#pragma unroll
    for (int i = 0; i < kCount; ++i) number[i] = i * kStep < left ? list[i * kStep] : -1;
  }
  __device__ void load(const Tile<T, kWidth>& tile, const Rows<const T>& rows) const {
    const int r = static_cast<int>(threadIdx.x) / kChunks, chunk = threadIdx.x % kChunks;
    const int column = chunk * Tile<T, kWidth>::kVector;
    if (in_vectors(rows)) {
      const bool inside = column < rows.width;
      const T* from = rows.data + (inside ? column : 0);
      const int pitch = pitch_bytes(rows);
#pragma unroll
      for (int i = 0; i < kCount; ++i)
        cp_async16(tile.chunk(r + i * kStep, chunk), row_address(from, max(number[i], 0), pitch),
                   number[i] >= 0 && inside ? 16 : 0);
      return;
    }
#pragma unroll 1
    for (int i = 0; i < kCount; ++i) {
      const int row = i * kStep < left ? list[i * kStep] : -1;
      store_shared16(
          tile.chunk(r + i * kStep, chunk),
          load_slowly(rows.row(max(row, 0)) + column, row >= 0 ? rows.width - column : 0));
    }
  }
};

// What a block works on: members [unit.first, unit.first + unit.count) in sorted order.
template <class T, int kWidth, int kWarps>
struct MemberBlock {
  using S = MemberShape<T, kWidth, kWarps>;
  const BackwardArgs<T>& args;
  unsigned char* memory;
  std::uint32_t base;
  int head;
  ClusterUnit unit;
  ItemSpan k_span;
  int row;                    // of the cluster
  std::int64_t token;         // of the item's first query in (B, H, N) tensors
  const std::int32_t* order;  // of the members

  __device__ MemberBlock(const BackwardArgs<T>& a, unsigned char* m, int h, const ClusterUnit& u)
      : args(a), memory(m), base(shared_address(m)), head(h), unit(u) {
    const BackwardShape& shape = args.shape;
    k_span = shape.spans.k.span(unit.item);
    row = shape.units.row(unit.item, head, unit.cluster);
    token =
        (static_cast<std::int64_t>(unit.span.batch) * shape.H + head) * shape.N + unit.span.begin;
    order = args.lists.order + token + unit.first;
  }

  __device__ static int stage(int first) { return first / S::kRowTile % 2; }
  __device__ Tile<T, kWidth> rows(int first, int tensor) const {
    return {base + (2 * stage(first) + tensor) * S::kRowTileBytes};
  }
  // Of the rows of a stage: their numbers (-1: none) and lse.
  __device__ std::int32_t* numbers(int first) const {
    return reinterpret_cast<std::int32_t*>(memory + S::kFacts) + stage(first) * 2 * S::kRowTile;
  }
  __device__ float* lse(int first) const {
    return reinterpret_cast<float*>(numbers(first) + S::kRowTile);
  }
  __device__ float* mean() const { return reinterpret_cast<float*>(memory + S::kCluster); }
  __device__ float* out() const { return mean() + kWidth; }
  __device__ std::int32_t* keys() const {
    return reinterpret_cast<std::int32_t*>(memory + S::kKeys);
  }
  __device__ Tile<T, kSlotTile> weights() const { return {base + S::kWeights}; }
  __device__ Tile<T, kSlotTile> staging() const { return {base + S::kWeights + S::kWeightBytes}; }
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
    const std::int32_t* list = args.lists.top_keys + static_cast<std::int64_t>(row) * topk;
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
  // Keys and values of all slots.
  __device__ void load_slots() const {
    const int group = args.shape.group, topk = args.shape.topk;
    const int key_head = group > 1 ? head / group : head;
    for (int tile = 0; tile * kSlotTile < topk; ++tile) {
      Gather<T, kWidth, kSlotTile, S::kThreads> gather;
      gather.find(args.lists.top_keys + static_cast<std::int64_t>(row) * topk, tile * kSlotTile,
                  topk);
      gather.load(slots(tile, 0), args.k.rows(k_span.batch, key_head, k_span.begin));
      gather.load(slots(tile, 1), args.v.rows(k_span.batch, key_head, k_span.begin));
    }
  }
  // Mean and output of the cluster.
  __device__ void load_cluster() const {
    const float* mean_row = args.lists.centroids + static_cast<std::int64_t>(row) * args.k.width;
    const float* out_row = args.lists.out + static_cast<std::int64_t>(row) * args.v.width;
#pragma unroll
    for (int i = 0; i < kWidth; i += S::kThreads) {
      const int column = i + static_cast<int>(threadIdx.x);
      if (column >= kWidth) break;
      cp_async4(shared_address(mean() + column), mean_row + min(column, args.k.width - 1),
                column < args.k.width);
      cp_async4(shared_address(out() + column), out_row + min(column, args.v.width - 1),
                column < args.v.width);
    }
  }
};

// The members of a unit on their way to shared memory, a tile at a time: find() asks for the
// numbers of its rows, load() copies them.
template <class T, int kWidth, int kWarps>
struct UnitRows {
  using Block = MemberBlock<T, kWidth, kWarps>;
  using S = MemberShape<T, kWidth, kWarps>;
  const Block& block;
  Rows<const T> q, g;
  Gather<T, kWidth, S::kRowTile, S::kThreads> gather;
  int own;  // number of the row whose lse this thread copies

  __device__ explicit UnitRows(const Block& b)
      : block(b),
        q(b.args.q.rows(b.unit.span.batch, b.head, b.unit.span.begin)),
        g(b.args.g.rows(b.unit.span.batch, b.head, b.unit.span.begin)) {}

  __device__ void find(int first) {
    const int r = first + static_cast<int>(threadIdx.x);
    if (first >= block.unit.count) return;
    gather.find(block.order, first, block.unit.count);
    own = r < block.unit.count ? block.order[r] : -1;
  }
  __device__ void load(int first) const {
    if (first >= block.unit.count) return cp_async_commit();
    const bool top = block.args.shape.topk > 0;
    if (top) gather.load(block.rows(first, 0), q);
    gather.load(block.rows(first, 1), g);
    if (threadIdx.x < S::kRowTile) {
      block.numbers(first)[threadIdx.x] = own;
      if (top)
        cp_async4(shared_address(block.lse(first) + threadIdx.x),
                  block.args.lists.lse + block.token + max(own, 0), own >= 0);
    }
    cp_async_commit();
  }
};

}  // namespace coterie::cuda
