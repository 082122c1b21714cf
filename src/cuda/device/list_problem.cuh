// SPDX-License-Identifier: MIT
// A list plan (lists.h) as kernels see it: which keys a query sees, and what a score is made of.
#pragma once

#include <cmath>
#include <cstdint>

#include "cuda/device/list_slots.cuh"

namespace coterie::cuda {

// The forms of a list kernel: what is decided when it is compiled.
enum class ListForm {
  plain,       // softmax over ranges
  normalised,  // and row statistics
  general,     // and filters, and laplace
};

inline ListForm list_form(const ListPlan& plan) {
  if (plan.filters.any() || plan.weighting == ListWeighting::laplace) return ListForm::general;
  return plan.q_stats || plan.k_stats ? ListForm::normalised : ListForm::plain;
}

// Ranks [low, high) of a key list.
struct RankRange {
  int low, high;
};

// A query list and its keys.
struct ListPair {
  ItemSpan q_span, k_span;
  SlotList q, k;
  int offset;  // position of query row 0
  int shift;   // r of ListRule, of query rank 0
};

struct ListMask {
  const std::uint8_t* data;
  std::int64_t batch, head, row, column;
};

struct ListProblem {
  SlotSide q, k;
  int group, value_group;  // query heads of a key head and of a value head
  bool offset_rows;        // the last query row stands at the last key row, else the first at 0
  ListRule rule;
  bool causal;
  int window, before, after;
  const std::int32_t* ends;
  bool causal_rows, drop_by_slot, laplace;
  const std::uint8_t* drop_own;
  ListMask mask;
  float scale;
  const float* head_scale;
  const RowStatistics *q_stats, *k_stats;
  int width;  // elements of a row

  // List `list` of an item and query head. By all lanes of a warp, or by a thread alone.
  template <bool kAlone = false>
  __device__ ListPair pair(int item, int head, int list) const {
    ListPair pair;
    pair.q_span = q.spans.span(item);
    pair.k_span = k.spans.span(item);
    pair.offset = offset_rows ? pair.k_span.length - pair.q_span.length : 0;
    pair.q = q.list<kAlone>(item, pair.q_span, head, list, pair.offset);
    pair.k = k.list<kAlone>(item, pair.k_span, head / group, list, 0);
    pair.shift = 0;
    if (!pair.q.index && !pair.k.index)  // a whole number of steps, from the list's first key
      pair.shift = (pair.q.first + pair.offset - pair.k.first) / k.lists;
    return pair;
  }

  // What the query of rank t sees; never decreases with t.
  __device__ RankRange range(const ListPair& pair, int t) const {
    if (rule != ListRule::ends) return range_at(pair.k.count, t + pair.shift);
    const int high = min(ends[pair.q.slot_of(t)], pair.k.count);
    return {max(high - window, 0), max(high, 0)};
  }

  // What a query with this r of ListRule sees of `keys` keys; for all rules but ends.
  __device__ RankRange range_at(int keys, int r) const {
    std::int64_t low = 0, high = keys;
    switch (rule) {
      case ListRule::causal:
        high = r + 1;
        break;
      case ListRule::sliding:
        low = std::int64_t{r} - (causal ? window - 1 : window / 2);
        high = causal ? r + 1 : std::int64_t{r} + (window + 1) / 2;
        break;
      case ListRule::blocked: {
        const std::int64_t block = r < 0 ? -1 - (-1 - r) / window : r / window;
        low = (block - before) * window;
        high = causal ? r + 1 : (block + after + 1) * window;
        break;
      }
      case ListRule::wrap: {
        const int last = keys > 0 ? (keys - 1) / window : 0;
        low = last > 0 && r < window ? last * window : keys;
        break;
      }
      default:
        break;
    }
    low = min(max(low, std::int64_t{0}), std::int64_t{keys});
    return {static_cast<int>(low), static_cast<int>(min(max(high, low), std::int64_t{keys}))};
  }

  // Factor of the scores of a head; never 0, so that its product with an infinity is one.
  __device__ float score_scale(int head) const {
    const float factor = head_scale ? scale * head_scale[head] : scale;
    return fabsf(factor) < 1e-30f ? 1e-30f : factor;
  }

  // Number of row 0 of an item and head among those of (B, heads, rows).
  __device__ static std::int64_t row_base(const SlotSide& side, const ItemSpan& span, int head) {
    return (static_cast<std::int64_t>(span.batch) * side.heads + head) * side.spans.rows +
           span.begin;
  }
};

// A query of the general form: what its filters need to know.
struct QueryFilter {
  int last_row;              // keys of later rows are out of sight
  int own_row;               // as is the key of this row; -1: none
  const std::uint8_t* mask;  // of key row 0; null: none
  std::int64_t column;

  QueryFilter() = default;
  __device__ QueryFilter(const ListProblem& problem, const ListPair& pair, int head, int rank) {
    const int row = pair.q.row(rank);
    last_row = problem.causal_rows ? row + pair.offset : 0x7fffffff;
    own_row = -1;
    if (problem.drop_own) {
      const std::int64_t place = problem.drop_by_slot
                                     ? pair.q.slot_of(rank)
                                     : ListProblem::row_base(problem.q, pair.q_span, head) + row;
      if (problem.drop_own[place] & 1) own_row = row + pair.offset;
    }
    const ListMask& m = problem.mask;
    column = m.column;
    mask = m.data ? m.data + pair.q_span.batch * m.batch + head * m.head +
                        (pair.q_span.begin + row) * m.row + pair.k_span.begin * m.column
                  : nullptr;
  }
  __device__ bool sees(int key_row) const {
    return key_row <= last_row && key_row != own_row && (!mask || mask[key_row * column]);
  }
};

// Of a row without statistics.
constexpr RowStatistics kNoStatistics{0.0f, 1.0f};

inline ListProblem list_problem(const AttentionCall& call, const ListPlan& plan) {
  ListProblem problem{};
  problem.q = slot_side(call, plan, false);
  problem.k = slot_side(call, plan, true);
  problem.group = static_cast<int>(call.H / call.key_heads);
  problem.value_group = static_cast<int>(call.H / call.value_heads);
  problem.offset_rows = call.causal;
  problem.rule = plan.ranges.rule;
  problem.causal = plan.ranges.causal;
  // Larger numbers see no more, even with half a window.
  const std::int64_t most = 2 * (call.N * plan.queries.per_row + call.S) + 1;
  const auto clipped = [&](std::int64_t value) {
    return static_cast<int>(min(min(value, most), std::int64_t{0x7fffffff}));
  };
  problem.window = clipped(plan.ranges.window);
  problem.before = clipped(plan.ranges.before);
  problem.after = clipped(plan.ranges.after);
  problem.ends = plan.ranges.ends;
  problem.causal_rows = plan.filters.causal_rows;
  problem.drop_own = plan.filters.drop_own;
  problem.drop_by_slot = plan.filters.drop_by_slot;
  problem.laplace = plan.weighting == ListWeighting::laplace;
  if (const TensorView& mask = plan.filters.mask; mask.present())
    problem.mask = {static_cast<const std::uint8_t*>(mask.data), mask.stride(0), mask.stride(1),
                    mask.stride(2), mask.stride(3)};
  problem.scale = plan.scale;
  problem.head_scale = plan.head_scale;
  problem.q_stats = plan.q_stats;
  problem.k_stats = plan.k_stats;
  problem.width = static_cast<int>(call.Dk);
  return problem;
}

}  // namespace coterie::cuda
