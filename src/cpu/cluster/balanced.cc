// SPDX-License-Identifier: MIT
#include "cpu/cluster/balanced.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

#include "core/check.h"
#include "core/parallel.h"
#include "cpu/engine/row_tiles.h"
#include "cpu/engine/tile_steps.h"

namespace coterie::cpu {

template <class T>
BalancedWorkspace<T>::BalancedWorkspace(Arena& arena, std::int64_t problems, std::int64_t tokens,
                                        std::int64_t clusters)
    : choices(arena.take<BalancedChoice<T>>(tokens * kChoices)) {
  for (std::int32_t** ints : {&num_choices, &tried, &waiting, &left, &right, &distance})
    *ints = arena.take<std::int32_t>(tokens);
  top = arena.take<std::int32_t>(problems * clusters);
  size = arena.take<std::int32_t>(problems * clusters);
}

namespace {

template <class T>
using Choice = BalancedChoice<T>;

template <class T>
bool before(const Choice<T>& a, const Choice<T>& b) {
  return a.score > b.score || (a.score == b.score && a.cluster < b.cluster);
}

// One problem and its part of the workspace, which is advanced to the problem's first element.
template <class T>
struct Matching {
  static constexpr std::int32_t kChoices = BalancedWorkspace<T>::kChoices;

  BalancedProblem problem;
  BalancedWorkspace<T> at;
  std::int64_t num_waiting = 0;

  void start(std::int64_t clusters) {
    std::fill_n(at.num_choices, problem.tokens, 0);
    std::fill_n(at.tried, problem.tokens, 0);
    std::iota(at.waiting, at.waiting + problem.tokens, 0);
    std::fill_n(at.top, clusters, -1);
    std::fill_n(at.size, clusters, 0);
    num_waiting = problem.tokens;
  }

  // The choice that a token tried last: its cluster, or one that rejected it.
  const Choice<T>& last(std::int32_t token) const {
    return at.choices[token * std::int64_t{kChoices} + at.tried[token] - 1];
  }

  bool better(std::int32_t a, std::int32_t b) const {
    const T left = last(a).score, right = last(b).score;
    return left > right || (left == right && a < b);
  }

  // The heaps of all clusters share the token arrays: a token is held by one cluster at a time.
  // They are leftist: the right spine has at most log2(size + 1) tokens, which bounds the
  // recursion.
  std::int32_t distance(std::int32_t token) const { return token < 0 ? 0 : at.distance[token]; }

  std::int32_t merge(std::int32_t a, std::int32_t b) {
    if (a < 0) return b;
    if (b < 0) return a;
    if (better(a, b)) std::swap(a, b);
    at.right[a] = merge(at.right[a], b);
    if (distance(at.left[a]) < distance(at.right[a])) std::swap(at.left[a], at.right[a]);
    at.distance[a] = distance(at.right[a]) + 1;
    return a;
  }

  // Applies to the cluster tried last; returns the token left without a cluster, or -1.
  std::int32_t apply(std::int32_t token) {
    const std::int32_t cluster = last(token).cluster;
    std::int32_t& top = at.top[cluster];
    std::int32_t dropped = -1;
    if (at.size[cluster] < problem.capacity) {
      ++at.size[cluster];
    } else {
      if (better(top, token)) return token;
      dropped = top;
      top = merge(at.left[dropped], at.right[dropped]);
    }
    at.left[token] = at.right[token] = -1;
    at.distance[token] = 1;
    top = merge(top, token);
    problem.labels[token] = cluster;
    return dropped;
  }

  // Lets the waiting tokens apply until their known choices run out.
  void place() {
    std::int64_t left = 0;  // grows by at most one per turn, so no unread entry is overwritten
    for (std::int64_t turn = 0; turn < num_waiting; ++turn) {
      std::int32_t token = at.waiting[turn];
      // There are enough slots for all, so a token cannot have tried every cluster.
      COTERIE_CHECK(at.num_choices[token] > 0, "internal", "a token was left out");
      while (token >= 0 && at.tried[token] < at.num_choices[token]) {
        ++at.tried[token];
        token = apply(token);
      }
      if (token >= 0) at.waiting[left++] = token;
    }
    num_waiting = left;
  }

  // Keeps the best choices of a token in order.
  void keep(std::int32_t token, const Choice<T>& choice) {
    Choice<T>* best = at.choices + token * std::int64_t{kChoices};
    std::int32_t& num = at.num_choices[token];
    if (num == kChoices && !before(choice, best[num - 1])) return;
    std::int32_t rank = num < kChoices ? num++ : num - 1;
    for (; rank > 0 && before(choice, best[rank - 1]); --rank) best[rank] = best[rank - 1];
    best[rank] = choice;
  }
};

// Finds the next choices of a tile of waiting tokens: those that rank below the last one tried.
template <class T>
void find_choices(Matching<T>& matching, const RowTile& tile, std::int64_t num_clusters,
                  const BalancedScores<T>& scores, Tiles<T>& tiles) {
  const RowList list{matching.num_waiting, matching.at.waiting};
  const std::int32_t* waiting = matching.at.waiting + tile.first;
  Choice<T> last[kQueryTile];
  bool any_tried[kQueryTile];
  for (std::int64_t r = 0; r < tile.count; ++r) {
    any_tried[r] = matching.at.tried[waiting[r]] > 0;
    if (any_tried[r]) last[r] = matching.last(waiting[r]);
    matching.at.num_choices[waiting[r]] = matching.at.tried[waiting[r]] = 0;
  }
  for (std::int64_t begin = 0; begin < num_clusters; begin += kKeyTile) {
    const Range clusters{begin, std::min(begin + kKeyTile, num_clusters)};
    scores(tile.item, list, {tile.first, tile.first + tile.count}, clusters, tiles);
    for (std::int64_t r = 0; r < tile.count; ++r)
      for (std::int64_t c = clusters.begin; c < clusters.end; ++c) {
        const T score = tiles.s[r * kKeyTile + c - begin];
        const Choice<T> choice{std::isnan(score) ? kNegInf<T> : score,
                               static_cast<std::int32_t>(c)};
        if (!any_tried[r] || before(last[r], choice)) matching.keep(waiting[r], choice);
      }
  }
}

// Each problem with its part of the workspace.
template <class T>
std::vector<Matching<T>> divide(const std::vector<BalancedProblem>& problems, std::int64_t clusters,
                                const BalancedWorkspace<T>& workspace) {
  std::vector<Matching<T>> matchings;
  BalancedWorkspace<T> at = workspace;
  for (const BalancedProblem& problem : problems) {
    matchings.push_back({problem, at});
    at.choices += problem.tokens * BalancedWorkspace<T>::kChoices;
    for (std::int32_t** ints :
         {&at.num_choices, &at.tried, &at.waiting, &at.left, &at.right, &at.distance})
      *ints += problem.tokens;
    at.top += clusters;
    at.size += clusters;
  }
  return matchings;
}

}  // namespace

template <class T>
void match_balanced(const std::vector<BalancedProblem>& problems, std::int64_t clusters,
                    const BalancedScores<T>& scores, std::vector<Tiles<T>>& tiles,
                    BalancedWorkspace<T>& workspace) {
  std::vector<Matching<T>> matchings = divide(problems, clusters, workspace);
  const std::int64_t count = static_cast<std::int64_t>(matchings.size());
  const auto matching = [&](std::int64_t problem) -> Matching<T>& {
    return matchings[static_cast<std::size_t>(problem)];
  };
  for (Matching<T>& each : matchings) each.start(clusters);
  // All problems advance together, which gives many tiles to score and many problems to place.
  for (;;) {
    const std::vector<RowTile> waiting =
        list_tiles({count, 1}, kQueryTile, [&](std::int64_t problem, std::int64_t, std::int64_t) {
          return matching(problem).num_waiting;
        });
    if (waiting.empty()) return;
    for_tiles(waiting, tiles, [&](const RowTile& tile, Tiles<T>& own) {
      find_choices(matching(tile.item), tile, clusters, scores, own);
    });
    parallel_for(count, [&](std::int64_t problem, int) { matching(problem).place(); });
  }
}

void list_members(const std::vector<BalancedProblem>& problems, std::int64_t clusters,
                  std::int64_t width, std::int32_t* members) {
  parallel_for(static_cast<std::int64_t>(problems.size()), [&](std::int64_t number, int) {
    const BalancedProblem& problem = problems[static_cast<std::size_t>(number)];
    std::int32_t* lists = members + number * clusters * width;
    std::fill_n(lists, clusters * width, -1);
    std::vector<std::int64_t> size(static_cast<std::size_t>(clusters));
    for (std::int64_t token = 0; token < problem.tokens; ++token) {
      const std::int32_t cluster = problem.labels[token];
      lists[cluster * width + size[static_cast<std::size_t>(cluster)]++] =
          static_cast<std::int32_t>(token);
    }
  });
}

#define COTERIE_INSTANTIATE(T)                                                    \
  template struct BalancedWorkspace<T>;                                           \
  template void match_balanced(const std::vector<BalancedProblem>&, std::int64_t, \
                               const BalancedScores<T>&, std::vector<Tiles<T>>&,  \
                               BalancedWorkspace<T>&);
COTERIE_INSTANTIATE(float)
COTERIE_INSTANTIATE(double)
#undef COTERIE_INSTANTIATE

}  // namespace coterie::cpu
