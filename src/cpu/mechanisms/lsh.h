// SPDX-License-Identifier: MIT
// LSH attention in sorted order: the keys that a query sees in one round.
//
// The tokens of an item and head are sorted by (bucket, position) and cut into chunks. A chunk sees
// itself and the chunk before it, a band of the sorted list. With combine=lse the first chunk also
// sees the last one; that wrap-around is a separate part, so that every key is in one list of a
// part and its gradient has one writer.
#pragma once

#include <cstdint>
#include <vector>

#include "core/call.h"
#include "coterie/mechanism.h"
#include "cpu/engine/partition.h"

namespace coterie::cpu {

template <class T>
struct LshSelectWorkspace {
  std::int64_t half, row;       // buckets / 2, unpadded and padded
  std::vector<Tiles<T>> tiles;  // one per thread
  T* rotations;                 // (R, Dk, row)
  std::int32_t* buckets;        // (B, H, R, N)
  std::int32_t* starts;         // buckets + 1 per thread

  LshSelectWorkspace(Arena& arena, const LshParams& params, const AttentionCall& call);
};

// Fills order (B, H, R, N).
template <class T>
void lsh_select(const LshParams& params, const AttentionCall& call, const TensorView& order,
                LshSelectWorkspace<T>& workspace);

// The lists of a (round, part) for calls whose k contains the unit keys.
template <class T>
struct LshParts {
  const LshParams& params;
  const AttentionCall& call;
  TensorView order;           // (B, H, R, N)
  const std::uint8_t* alone;  // (B, H, N): the query sees only its own key in every round

  int num_parts() const { return params.combine == LshCombine::lse ? 2 : 1; }
  ListCall<T> plan(std::int64_t round, int part) const;
};

// Fills LshParts::alone from the order.
void lsh_find_alone(const LshParams& params, const AttentionCall& call, const TensorView& order,
                    std::uint8_t* alone);

// The slots of (item, head, round) in a tensor laid out as order.
template <class T>
T* round_at(const AttentionCall& call, T* base, const Span& span, std::int64_t head,
            std::int64_t rounds, std::int64_t round) {
  return base + ((span.batch * call.H + head) * rounds + round) * call.N + span.begin;
}

}  // namespace coterie::cpu
