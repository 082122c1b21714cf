// SPDX-License-Identifier: MIT
// Balanced assignment: of all pairs (token, cluster) by descending score, ties by lower token, then
// lower cluster, each is accepted while its token and a slot of its cluster are free.
//
// Computed by deferred acceptance: every unplaced token proposes to its best cluster not yet tried,
// a cluster keeps its best proposals. Both sides rank pairs by the same strict order, so the stable
// matching is unique and is the one above. Scores are recomputed for each proposal: memory is
// O(tokens).
#pragma once

#include <cstdint>

#include "cpu/segment.h"

namespace coterie::cpu {

// One worker's memory.
template <class T>
struct BalancedBuffer {
  T* score;                           // tokens: of the last proposal
  std::int32_t *cluster, *pending;    // tokens: of the last proposal; who is unplaced
  std::int32_t *left, *right, *rank;  // tokens: leftist heaps, worst token on top
  std::int32_t *top, *size;           // clusters

  BalancedBuffer(Arena& arena, std::int64_t tokens, std::int64_t clusters);
};

// labels of rows 0 .. count - 1 of x, at most `capacity` each; -1 where no slot was left. NaN
// scores rank as -inf.
template <class T>
void balanced_rows(const Rows& x, std::int64_t count, const Rows& centroids, std::int64_t clusters,
                   std::int64_t capacity, Tiles<T>& tiles, BalancedBuffer<T>& buffer,
                   std::int32_t* labels);

}  // namespace coterie::cpu
