// SPDX-License-Identifier: MIT
// A call of lists (lists.h) as kernels see it: slots and tiles of a side, which keys a query sees,
// and how a score is computed. Built by plan.cu.
#pragma once

#include <cmath>
#include <cstdint>

#include "cuda/lists/lists.h"
#include "cuda/prim/sorted_tiles.cuh"
#include "cuda/prim/tensor.cuh"

namespace coterie::cuda {

// One list of an item and head.
struct SlotList {
  int count;                  // number of rows
  const std::int32_t* index;  // of rank 0; null: row first + rank * step
  int first, step;
  std::int64_t slot;  // of rank 0

  __device__ int row(int rank) const { return index ? index[rank] : first + rank * step; }
  __device__ std::int64_t slot_of(int rank) const {
    return slot + static_cast<std::int64_t>(rank) * (index ? 1 : step);
  }
  // Rows by rank for load_tile with index_at, from a tensor's rows of the item and head.
  template <class T>
  __device__ Rows<T> rows(const Rows<T>& item) const {
    if (index) return item;
    return {item.row(first), item.pitch * step, item.width, item.aligned};
  }
  __device__ const std::int32_t* index_at(int rank) const { return index ? index + rank : nullptr; }
};

constexpr int kNoRank = 0x3fffffff;  // in no list
constexpr int kProbes = 8;           // array elements that a search reads at once

// The ranks of a list from `first` on.
struct ListTile {
  int item, list, first;
};

struct SlotSide {
  SequenceSpans spans;
  ListLayout layout;
  const std::int32_t *index, *offsets;
  int items, heads, index_heads, lists, per_row, width;
  int heads_of_index;       // heads that share the lists of an index head
  std::int64_t head_slots;  // slots of an item and head

  __device__ int index_head(int head) const { return head / heads_of_index; }

  // Number of filled entries of a list.
  __device__ int filled(const std::int32_t* members) const {
    if (width == 0 || members[width - 1] >= 0) return width;
    int count = 0;  // the first -1 is in [count, count + left)
#pragma unroll 1
    for (int left = width; left > 0;) {
      const int step = (left + kProbes - 1) / kProbes;
      int reached = 0;
#pragma unroll
      for (int i = 0; i < kProbes; ++i)
        reached += i * step < left && members[count + min(i * step, left - 1)] >= 0;
      if (reached == 0) break;
      count += (reached - 1) * step + 1;
      left = min(step - 1, width - count);
    }
    return count;
  }

  // List `number` of an item and head; positions are rows + offset.
  __device__ SlotList list(int item, const ItemSpan& span, int head, int number, int offset) const {
    const std::int64_t block = static_cast<std::int64_t>(span.batch) * heads + head;
    const std::int64_t index_block =
        static_cast<std::int64_t>(span.batch) * index_heads + index_head(head);
    if (layout == ListLayout::residues) {
      const int first = ((number - offset) % lists + lists) % lists;
      const int count = first < span.length ? (span.length - first - 1) / lists + 1 : 0;
      return {count, nullptr, first, lists, block * spans.rows + span.begin + first};
    }
    if (layout == ListLayout::runs) {
      const std::int64_t starts =
          (static_cast<std::int64_t>(item) * index_heads + index_head(head)) * (lists + 1) + number;
      const std::int64_t rows = static_cast<std::int64_t>(spans.rows) * per_row;
      const std::int64_t first = static_cast<std::int64_t>(span.begin) * per_row + offsets[starts];
      return {offsets[starts + 1] - offsets[starts], index + index_block * rows + first, 0, 1,
              block * rows + first};
    }
    if (layout == ListLayout::members) {
      const std::int64_t place =
          (static_cast<std::int64_t>(item) * index_heads + index_head(head)) * lists + number;
      const std::int32_t* members = index + place * width;
      const std::int64_t own = (static_cast<std::int64_t>(item) * heads + head) * lists + number;
      return {filled(members), members, 0, 1, own * width};
    }
    return {span.length, index + (index_block * lists + number) * spans.rows + span.begin, 0, 1,
            (block * lists + number) * spans.rows + span.begin};
  }
};

// Tiles of 1 << bits ranks, numbered over the items of a head. Some numbers have no tile: their
// first rank is then beyond the list.
struct ListTiles {
  int bits;
  int per_list;     // numbers per list; 0 for packed items and runs
  int unit;         // packed: rows per additional tile of every list of an item
  QueryTiles runs;  // ListLayout::runs only
  int total;

  __device__ int first_tile(const SlotSide& side, int item) const {
    return side.lists * (item + min(max(side.spans.cu_seqlens[item], 0), side.spans.rows) / unit);
  }

  // The last cluster of an item whose first tile is not after this number.
  __device__ int find_run(const std::int32_t* starts, int origin, int before, int number) const {
    int cluster = 0;
    for (int left = runs.clusters; left > 1;) {
      const int step = (left + kProbes - 1) / kProbes;
      int start[kProbes], reached = 0;
#pragma unroll
      for (int i = 1; i < kProbes; ++i) start[i] = starts[min(cluster + i * step, runs.clusters)];
#pragma unroll
      for (int i = 1; i < kProbes; ++i) {
        const int first = origin + cluster + i * step + ((before + start[i]) >> bits);
        reached += i * step < left && first <= number;
      }
      cluster += step * reached;
      left = min(step, left - step * reached);
    }
    return cluster;
  }
  // find() for runs.
  __device__ ListTile find_run(const SlotSide& side, int head, int number) const {
    int item = 0;
    if (runs.per_item > 0) {
      item = number / runs.per_item;
    } else {
      for (int high = side.items; high - item > 1;) {
        const int middle = (item + high) / 2;
        (runs.first_tile(side.spans, middle) <= number ? item : high) = middle;
      }
    }
    const std::int32_t* starts =
        side.offsets +
        (static_cast<std::int64_t>(item) * side.index_heads + side.index_head(head)) *
            (side.lists + 1);
    // Packed rows are counted from the start of the tensor, others from the start of the item.
    const int before = runs.per_item > 0 ? 0 : side.spans.span(item).begin * runs.per_row;
    const int origin = runs.per_item > 0 ? item * runs.per_item : item * runs.clusters;
    const int cluster = find_run(starts, origin, before, number);
    const int skipped = number - origin - cluster - ((before + starts[cluster]) >> bits);
    return {item, cluster, skipped << bits};
  }

  __device__ ListTile find(const SlotSide& side, int head, int number) const {
    if (side.layout == ListLayout::runs) return find_run(side, head, number);
    if (per_list > 0) {
      const int list = number / per_list;
      return {list / side.lists, list % side.lists, number % per_list << bits};
    }
    int item = 0;
    for (int high = side.items; high - item > 1;) {
      const int middle = (item + high) / 2;
      (first_tile(side, middle) <= number ? item : high) = middle;
    }
    const int origin = first_tile(side, item);
    const int tiles = max((first_tile(side, item + 1) - origin) / side.lists, 1);
    if (number - origin >= tiles * side.lists) return {item, 0, kNoRank};  // after all items
    return {item, (number - origin) / tiles, (number - origin) % tiles << bits};
  }
};

// Ranks [low, high) of a key list.
struct RankRange {
  int low, high;
};

// A query list and its keys.
struct ListPair {
  ItemSpan q_span, k_span;
  SlotList q, k;
  int offset;  // position of query row 0
  int shift;   // r of ListRule for query rank 0
};

struct ListMask {
  const std::uint8_t* data;
  std::int64_t batch, head, row, column;
};

struct ListProblem {
  SlotSide q, k;
  int group, value_group;  // query heads of a key head and of a value head
  bool offset_rows;        // the last query row is at the last key row, else the first is at 0
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
  Dropout dropout;

  // List `list` of an item and query head.
  __device__ ListPair pair(int item, int head, int list) const {
    ListPair pair;
    pair.q_span = q.spans.span(item);
    pair.k_span = k.spans.span(item);
    pair.offset = offset_rows ? pair.k_span.length - pair.q_span.length : 0;
    pair.q = q.list(item, pair.q_span, head, list, pair.offset);
    pair.k = k.list(item, pair.k_span, head / group, list, 0);
    pair.shift = 0;
    if (!pair.q.index && !pair.k.index)  // a whole number of steps, from the list's first key
      pair.shift = (pair.q.first + pair.offset - pair.k.first) / k.lists;
    return pair;
  }

  // What the query of rank t sees; the bounds never decrease with t.
  __device__ RankRange range(const ListPair& pair, int t) const {
    if (rule != ListRule::ends) return range_at(pair.k.count, t + pair.shift);
    const int high = min(ends[pair.q.slot_of(t)], pair.k.count);
    return {max(high - window, 0), max(high, 0)};
  }

  // What a query with this r of ListRule sees of `keys` keys; all rules except ends.
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
      case ListRule::earlier:
        low = std::int64_t{r} - (window - 1);
        high = max(r, 1);
        break;
      case ListRule::blocked: {
        const std::int64_t block = r < 0 ? -1 - (-1 - r) / window : r / window;
        low = (block - before) * window;
        high = causal ? r + 1 : (block + after + 1) * window;
        break;
      }
      default:
        break;
    }
    low = min(max(low, std::int64_t{0}), std::int64_t{keys});
    return {static_cast<int>(low), static_cast<int>(min(max(high, low), std::int64_t{keys}))};
  }

  // First rank of a query list for which `late` is true, given that it stays true; count if none.
  template <class Late>
  __device__ static __forceinline__ int first_rank(int count, const Late& late) {
    int begin = 0;  // the answer is in [begin, begin + left]
    for (int left = count; left > 0;) {
      const int step = (left + kProbes - 1) / kProbes;
      int reached = 0;
#pragma unroll
      for (int i = 0; i < kProbes; ++i)
        reached += i * step < left && !late(begin + min(i * step, left - 1));
      if (reached == 0) break;
      const int end = min(begin + reached * step, begin + left);
      begin += (reached - 1) * step + 1;
      left = end - begin;
    }
    return begin;
  }
  // The query ranks that see any of the keys [first, end); may include some that see none.
  __device__ __forceinline__ RankRange queries_of(const ListPair& pair, int first, int end) const {
    const std::int64_t count = pair.q.count, wide = window;
    std::int64_t low = 0, high = count + pair.shift;  // by r of ListRule
    switch (rule) {
      case ListRule::all:
        return {0, pair.q.count};
      case ListRule::causal:
        low = first;
        break;
      case ListRule::sliding:
        low = causal ? first : first - (wide + 1) / 2 + 1;
        high = causal ? end + wide - 1 : end + wide / 2;
        break;
      case ListRule::earlier:
        low = first;
        high = end + wide - 1;
        break;
      case ListRule::blocked:
        low = causal ? first : (first / wide - after) * wide;
        high = ((end - 1) / wide + 1 + before) * wide;
        break;
      default: {
        int found[2];
#pragma unroll 1
        for (int side = 0; side < 2; ++side) {
          const int rank = first_rank(pair.q.count, [&](int r) {
            const RankRange seen = range(pair, r);
            return side ? seen.low >= end : seen.high > first;
          });
          (side ? found[1] : found[0]) = rank;
        }
        return {found[0], found[1]};
      }
    }
    low = min(max(low - pair.shift, std::int64_t{0}), count);
    high = min(max(high - pair.shift, low), count);
    return {static_cast<int>(low), static_cast<int>(high)};
  }

  // Factor of the scores of a head; never 0, so its product with infinity is infinite.
  __device__ float score_scale(int head) const {
    const float factor = head_scale ? scale * head_scale[head] : scale;
    return fabsf(factor) < 1e-30f ? 1e-30f : factor;
  }

  // Index of row 0 of an item and head among the rows of (B, heads, rows).
  __device__ static std::int64_t row_base(const SlotSide& side, const ItemSpan& span, int head) {
    return (static_cast<std::int64_t>(span.batch) * side.heads + head) * side.spans.rows +
           span.begin;
  }
};

// The filters of one query in the general form.
struct QueryFilter {
  int last_row;              // keys of later rows are hidden
  int own_row;               // as is the key of this row; -1: none
  const std::uint8_t* mask;  // at key row 0; null: none
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

// For rows without statistics.
constexpr RowStatistics kNoStatistics{0.0f, 1.0f};

}  // namespace coterie::cuda
