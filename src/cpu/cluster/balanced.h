// SPDX-License-Identifier: MIT
// Balanced assignment: all pairs (token, cluster) are visited by descending score, ties by lower
// token, then lower cluster; a pair is accepted if its token and a slot of its cluster are free.
//
// Computed by deferred acceptance: tokens without a cluster apply to the best one that they have
// not tried, a full cluster drops its worst token for a better one. Both sides rank pairs by the
// same strict order, so the stable matching is unique and is the one above. A pass over the scores
// finds the next few choices of every waiting token; scores are recomputed, tile by tile, when
// those run out, so memory is O(tokens).
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "core/arena.h"
#include "cpu/engine/rows.h"
#include "cpu/engine/segment.h"

namespace coterie::cpu {

// Tokens 0 .. tokens - 1 to assign to clusters of `capacity` slots each; there are slots for all.
struct BalancedProblem {
  std::int64_t tokens = 0, capacity = 0;
  std::int32_t* labels = nullptr;
};

// Writes rows [tokens.begin, tokens.end) of a list of a problem's tokens, at most kQueryTile, to
// tiles.s: scores of clusters [clusters.begin, clusters.end) in rows of kKeyTile. The score of a
// pair must not depend on the rest of the tile. NaN ranks as -inf.
template <class T>
using BalancedScores = std::function<void(std::int64_t problem, const RowList& list,
                                          const Range& tokens, const Range& clusters, Tiles<T>&)>;

// A cluster that a token may join.
template <class T>
struct BalancedChoice {
  T score;
  std::int32_t cluster;
};

template <class T>
struct BalancedWorkspace {
  static constexpr std::int32_t kChoices = 8;

  // By token, problem after problem.
  BalancedChoice<T>* choices;             // the best kChoices clusters after those tried
  std::int32_t *num_choices, *tried;      // number of choices, and of those tried
  std::int32_t* waiting;                  // tokens without a cluster
  std::int32_t *left, *right, *distance;  // heaps of the clusters' tokens, worst on top
  // By problem and cluster.
  std::int32_t *top, *size;

  // `tokens`: upper bound on the total over all problems.
  BalancedWorkspace(Arena& arena, std::int64_t problems, std::int64_t tokens,
                    std::int64_t clusters);
};

// Fills the labels of every problem.
template <class T>
void match_balanced(const std::vector<BalancedProblem>& problems, std::int64_t clusters,
                    const BalancedScores<T>& scores, std::vector<Tiles<T>>& tiles,
                    BalancedWorkspace<T>& workspace);

// members (problems, clusters, width): the tokens of each cluster, ascending, -1 beyond them.
void list_members(const std::vector<BalancedProblem>& problems, std::int64_t clusters,
                  std::int64_t width, std::int32_t* members);

}  // namespace coterie::cpu
