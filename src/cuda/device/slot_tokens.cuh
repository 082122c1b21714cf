// SPDX-License-Identifier: MIT
// Tokens and the slots of routing's lists that they are in: what the kernels of slot_tokens.cu and
// routing_tokens.cu share.
#pragma once

#include <cstdint>

#include "cuda/device/row_lanes.cuh"
#include "cuda/slot_tokens.h"
#include "cuda/tuning.h"

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

// Adds the rows of a token's slots of a head to `sum`.
template <class Lanes>
__device__ __forceinline__ int add_slots(const SlotRows& slots, const Token& token, int head,
                                         int width, typename Lanes::Values& sum) {
  if (token.item < 0) return 0;
  const TokenSlots& tokens = slots.tokens;
  const std::int64_t start = tokens.start(token.item, token.span, head);
  const auto add = [&](int slot) {
    typename Lanes::Values x;
    Lanes::load_floats(slots.values + (start + slot) * width, width, x);
#pragma unroll
    for (int j = 0; j < Lanes::kVector; ++j) sum[j] += x[j];
  };
  if (!tokens.slots) {
    add(token.slot);
    return 1;
  }
  const std::int64_t place = tokens.row(token.span, head, token.row);
  const int count = tokens.count[place];
  const std::int32_t* own = tokens.slots + start + tokens.first[place];
  for (int i = 0; i < count; ++i) add(own[i]);
  return count;
}

// Calls body(TypeTag<T>, std::integral_constant<int, width>).
template <class Body>
void dispatch_rows(const AttentionCall& call, Body&& body) {
  dispatch_element(call.op, call.inputs.q.dtype, [&](auto tag) {
    dispatch_wide_dim(call.op, call.Dk, [&](auto width) { body(tag, width); });
  });
}

}  // namespace coterie::cuda
