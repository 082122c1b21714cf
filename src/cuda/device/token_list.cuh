// SPDX-License-Identifier: MIT
// The tokens of a block of threads by the number of their slots, so that all lanes have rows to
// add: some tokens are in many lists.
#pragma once

#include <cstdint>

#include "cuda/device/slot_tokens.cuh"

namespace coterie::cuda {

constexpr int kListedTokens = 256;  // of a block, and its threads

// The tokens of a block, in any order: those with many slots from the front, those with few from
// the back.
struct TokenList {
  static constexpr int kMany = 8;  // slots; a warp takes such a token
  int many, few, idle;             // tokens
  std::int32_t row[kListedTokens], idle_row[kListedTokens];
  std::int32_t count[kListedTokens];
  std::int64_t start[kListedTokens];                 // of the slots of its item and head ...
  std::int32_t first[kListedTokens];                 // ... and where its own are listed
  std::int32_t near[kListedTokens][SlotSet::kNear];  // the first of them

  // By all threads. Padding is idle.
  __device__ void fill(const TokenSlots& tokens, int head) {
    if (threadIdx.x == 0) many = few = idle = 0;
    __syncthreads();
    const int place = static_cast<int>(blockIdx.x) * kListedTokens + static_cast<int>(threadIdx.x);
    const bool there = place < tokens.spans.rows;
    Token token(tokens.spans, tokens.items, place, there);
    int slots = token.item >= 0, own = 0;
    if (slots && tokens.slots) {
      const std::int64_t number = tokens.row(token.span, head, token.row);
      slots = tokens.count[number];
      own = tokens.first[number];
    } else if (slots) {
      token.follow(tokens, head);
    }
    if (token.item >= 0) {
      const int number =
          slots > kMany ? atomicAdd(&many, 1) : kListedTokens - 1 - atomicAdd(&few, 1);
      const std::int64_t begin = tokens.start(token.item, token.span, head);
      row[number] = token.span.begin + token.row;
      count[number] = slots;
      first[number] = own;
      start[number] = begin;
#pragma unroll
      for (int i = 0; i < SlotSet::kNear; ++i)
        near[number][i] = tokens.slots && i < slots ? tokens.slots[begin + own + i] : token.slot;
    } else if (there) {
      idle_row[atomicAdd(&idle, 1)] = place;
    }
    __syncthreads();
  }

  // Calls body(number, part) for tokens with slots: a group of lanes has the token `number`, or
  // none, and then it is -1; where all groups of a warp share one, `part` is the group's number,
  // else -1. Warps stay together.
  template <int kLanes, class Body>
  __device__ __forceinline__ void for_each(const Body& body) const {
    constexpr int kGroups = 32 / kLanes;
    const int group = static_cast<int>(threadIdx.x) % 32 / kLanes;
    const int units = many + (few + kGroups - 1) / kGroups;
#pragma unroll 1
    for (int unit = static_cast<int>(threadIdx.x) / 32; unit < units; unit += kListedTokens / 32) {
      const int own = (unit - many) * kGroups + group;
      body(unit < many ? unit : own < few ? kListedTokens - 1 - own : -1, unit < many ? group : -1);
    }
  }

  // The sum of the rows of a token's slots.
  template <class Lanes>
  __device__ __forceinline__ void add(const SlotRows& slots, int number, int part, int width,
                                      typename Lanes::Values& sum) const {
    constexpr int kGroups = 32 / Lanes::kLanes;
    if (number >= 0) {
      const std::int64_t begin = start[number];
      const int all = count[number], each = part < 0 ? all : (all + kGroups - 1) / kGroups;
      const int skipped = max(part, 0) * each;
      const SlotSet set{slots.tokens.slots + begin + first[number] + skipped,
                        part <= 0 ? near[number] : nullptr, min(each, all - skipped)};
      add_slot_rows<Lanes>(static_cast<const float*>(slots.values) + begin * width, set, width,
                           sum);
    }
    if (part < 0) return;
#pragma unroll
    for (int step = Lanes::kLanes; step < 32; step *= 2)
#pragma unroll
      for (int j = 0; j < Lanes::kVector; ++j) sum[j] += __shfl_xor_sync(~0u, sum[j], step);
  }

  // Rows of idle tokens become 0.
  template <class Lanes, class T>
  __device__ __forceinline__ void clear(const Rows<T>& rows) const {
    const typename Lanes::Values zero = {};
    for (int i = threadIdx.x / Lanes::kLanes; i < idle; i += kListedTokens / Lanes::kLanes)
      Lanes::store(rows, idle_row[i], zero);
  }
};

}  // namespace coterie::cuda
