// SPDX-License-Identifier: MIT
#include "cpu/top.h"

#include <algorithm>
#include <cmath>

#include "cpu/pass.h"

namespace coterie::cpu {

namespace {

template <class T>
bool better(const Candidate<T>& a, const Candidate<T>& b) {
  return a.score > b.score || (a.score == b.score && a.index < b.index);
}

// Keeps the best `count` candidates of a row.
template <class T>
void prune(TopBuffer<T>& buffer, std::int64_t row) {
  Candidate<T>* candidates = buffer.candidates + row * buffer.capacity;
  if (buffer.filled[row] <= buffer.count) return;
  std::nth_element(candidates, candidates + buffer.count - 1, candidates + buffer.filled[row],
                   better<T>);
  buffer.filled[row] = buffer.count;
  buffer.threshold[row] = candidates[buffer.count - 1].score;
}

}  // namespace

template <class T>
TopBuffer<T>::TopBuffer(Arena& arena, std::int64_t kept)
    : count(kept), capacity(kept + std::max(kept, kKeyTile)) {
  candidates = arena.take<Candidate<T>>(kQueryTile * capacity);
  filled = arena.take<std::int64_t>(kQueryTile);
  threshold = arena.take<T>(kQueryTile);
}

template <class T>
void clear_rows(TopBuffer<T>& buffer, std::int64_t rows) {
  std::fill_n(buffer.filled, rows, 0);
  std::fill_n(buffer.threshold, rows, kNegInf<T>);
}

template <class T>
void offer_scores(TopBuffer<T>& buffer, std::int64_t row, std::int64_t begin, std::int64_t count,
                  const T* scores) {
  const bool full = buffer.filled[row] >= buffer.count;
  // Later keys have higher indices, so they must be strictly better than the worst kept.
  if (full && !(kernels<T>().row_max(scores, padded(count)) > buffer.threshold[row])) return;
  if (buffer.filled[row] + count > buffer.capacity) prune(buffer, row);
  Candidate<T>* candidates = buffer.candidates + row * buffer.capacity;
  for (std::int64_t t = 0; t < count; ++t) {
    if (scores[t] == kNegInf<T>) continue;  // not admissible
    const T score = std::isnan(scores[t]) ? kNegInf<T> : scores[t];
    if (buffer.filled[row] >= buffer.count && !(score > buffer.threshold[row])) continue;
    candidates[buffer.filled[row]++] = {score, static_cast<std::int32_t>(begin + t)};
  }
}

template <class T>
void write_rows(TopBuffer<T>& buffer, std::int64_t rows, std::int32_t* indices) {
  for (std::int64_t r = 0; r < rows; ++r) {
    prune(buffer, r);
    Candidate<T>* candidates = buffer.candidates + r * buffer.capacity;
    std::int32_t* row = indices + r * buffer.count;
    for (std::int64_t t = 0; t < buffer.count; ++t)
      row[t] = t < buffer.filled[r] ? candidates[t].index : -1;
    std::sort(row, row + buffer.filled[r]);
  }
}

template <class T>
void select_tile(const Segment<T>& scaled, std::int64_t first, std::int64_t count, Tiles<T>& tiles,
                 TopBuffer<T>& buffer, std::int32_t* indices) {
  Segment<T> segment = scaled;
  segment.scale = scaled.scale < 0 ? T(-1) : T(1);
  Pass<T> pass{segment, tiles};
  pass.load_queries(first, count);
  clear_rows(buffer, count);
  const Range span = tile_span(tiles.ranges, count);
  for (std::int64_t begin = span.begin; begin < span.end; begin += kKeyTile) {
    const std::int64_t keys = std::min(kKeyTile, span.end - begin);
    pass.kernel.load_transposed(segment.k, begin, keys, T(1), tiles.k_columns, kKeyTile);
    pass.score(first, count, begin, keys);
    for (std::int64_t r = 0; r < count; ++r)
      offer_scores(buffer, r, begin, keys, tiles.s + r * kKeyTile);
  }
  write_rows(buffer, count, indices);
}

#define COTERIE_INSTANTIATE(T)                                                                   \
  template struct TopBuffer<T>;                                                                  \
  template void clear_rows(TopBuffer<T>&, std::int64_t);                                         \
  template void offer_scores(TopBuffer<T>&, std::int64_t, std::int64_t, std::int64_t, const T*); \
  template void write_rows(TopBuffer<T>&, std::int64_t, std::int32_t*);                          \
  template void select_tile(const Segment<T>&, std::int64_t, std::int64_t, Tiles<T>&,            \
                            TopBuffer<T>&, std::int32_t*);
COTERIE_INSTANTIATE(float)
COTERIE_INSTANTIATE(double)
#undef COTERIE_INSTANTIATE

}  // namespace coterie::cpu
