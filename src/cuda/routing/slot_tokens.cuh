// SPDX-License-Identifier: MIT
// Tokens and the slots of routing's lists that they are in: what the kernels of slot_tokens.cu and
// run_tokens.cu share.
#pragma once

#include <cstdint>

#include "cuda/launch/dispatch.h"
#include "cuda/prim/row_lanes.cuh"
#include "cuda/routing/slot_tokens.h"

namespace coterie::cuda {

constexpr int kTokenThreads = 256;
constexpr int kTokenRows = 128;  // tokens of a block

// Rows of one head of a (B, heads, N, D) tensor: block (x, y, z) has rows from x * kTokenRows of
// head y of batch entry z. Calls body(row) for every row of this thread's group of lanes.
template <int kLanes, class Body>
__device__ __forceinline__ void for_block_rows(int rows, const Body& body) {
  constexpr int kGroups = kTokenThreads / kLanes;
#pragma unroll 1
  for (int i = threadIdx.x / kLanes; i < kTokenRows; i += kGroups) {
    const int row = static_cast<int>(blockIdx.x) * kTokenRows + i;
    body(row, row < rows);
  }
}

inline dim3 row_grid(std::int64_t batches, std::int64_t heads, std::int64_t rows) {
  return dim3(static_cast<unsigned>((rows + kTokenRows - 1) / kTokenRows),
              static_cast<unsigned>(heads), static_cast<unsigned>(batches));
}

// A token of one side.
struct Token {
  int item, row;  // row counted from the item
  int slot;       // its only slot, where the tokens of a block are taken in the order of a run
  ItemSpan span;

  // item is -1 in padding.
  __device__ Token(const SequenceSpans& spans, int items, int place, bool there) {
    item = there ? spans.item_of(static_cast<int>(blockIdx.z), place, items) : -1;
    span = item >= 0 ? spans.span(item) : ItemSpan{0, 0, 0};
    row = place - span.begin;
    slot = -1;
  }
  // The token of slot `row` instead.
  __device__ void follow(const TokenSlots& slots, int head) {
    if (item < 0) return;
    slot = row;
    row = slots.index[slots.start(item, span, head) + slot];
  }
};

// The slots of a token: own[0 .. count), of which kNear may stand in near[] as well.
struct SlotSet {
  static constexpr int kNear = 4;
  const std::int32_t *own, *near;
  int count;

  __device__ __forceinline__ int slot(int i) const { return near && i < kNear ? near[i] : own[i]; }
};

// Neighbouring floats, four at a time.
template <int kVector>
struct SlotValues {
  union {
    uint4 words[kVector / 4];
    float elements[kVector];
  };

  __device__ __forceinline__ SlotValues(const float* from, bool there) {
#pragma unroll
    for (int i = 0; i < kVector / 4; ++i)
      words[i] = there ? __ldcs(reinterpret_cast<const uint4*>(from) + i) : make_uint4(0, 0, 0, 0);
  }
};

// Adds a token's rows in the order of its slots; several are on their way at a time. By all lanes
// of a row.
template <class Lanes>
__device__ __forceinline__ void add_whole_rows(const float* values, const SlotSet& set, int width,
                                               typename Lanes::Values& sum) {
  constexpr int kAhead = 4;
  const int lane = static_cast<int>(threadIdx.x) % Lanes::kLanes;
  const unsigned lanes = (~0u >> (32 - Lanes::kLanes)) << (threadIdx.x % 32 - lane);
  const bool there = Lanes::column() < width;
  values += Lanes::column();
#pragma unroll 1
  for (int base = 0; base < set.count; base += Lanes::kLanes) {
    const int slot = base + lane < set.count ? set.slot(base + lane) : 0;
    const int end = min(set.count - base, Lanes::kLanes);
#pragma unroll 1
    for (int i = 0; i < end; i += kAhead) {
      std::int64_t row[kAhead];
#pragma unroll
      for (int j = 0; j < kAhead; ++j) row[j] = __shfl_sync(lanes, slot, i + j, Lanes::kLanes);
      const SlotValues<Lanes::kVector> x[kAhead] = {
          {values + row[0] * width, there},
          {values + row[1] * width, there && i + 1 < end},
          {values + row[2] * width, there && i + 2 < end},
          {values + row[3] * width, there && i + 3 < end}};
#pragma unroll
      for (int j = 0; j < kAhead; ++j)
#pragma unroll
        for (int d = 0; d < Lanes::kVector; ++d) sum[d] += x[j].elements[d];
    }
  }
}

// The same where rows are no whole vectors.
template <class Lanes>
__device__ __forceinline__ void add_odd_rows(const float* values, const SlotSet& set, int width,
                                             typename Lanes::Values& sum) {
#pragma unroll 1
  for (int i = 0; i < set.count; ++i) {
    const float* row = values + static_cast<std::int64_t>(set.slot(i)) * width;
#pragma unroll
    for (int d = 0; d < Lanes::kVector; ++d)
      if (Lanes::column() + d < width) sum[d] += row[Lanes::column() + d];
  }
}

template <class Lanes>
__device__ __forceinline__ void add_slot_rows(const float* values, const SlotSet& set, int width,
                                              typename Lanes::Values& sum) {
  if (width % Lanes::kVector == 0)
    add_whole_rows<Lanes>(values, set, width, sum);
  else
    add_odd_rows<Lanes>(values, set, width, sum);
}

// Calls body(TypeTag<T>, std::integral_constant<int, width>).
template <class Body>
void dispatch_rows(const AttentionCall& call, Body&& body) {
  dispatch_element(call.op, call.inputs.q.dtype, [&](auto tag) {
    dispatch_head_dim(call.op, call.Dk, [&](auto width) { body(tag, width); });
  });
}

}  // namespace coterie::cuda
