// SPDX-License-Identifier: MIT
#include "cpu/engine/top.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>

#include "cpu/engine/tile_steps.h"

namespace coterie::cpu {

namespace {

template <class T>
using Key = typename CandidateKey<T>::type;
template <class T>
using Bits = std::conditional_t<sizeof(T) == 8, std::uint64_t, std::uint32_t>;

// Flipping the sign bit of positive numbers and all bits of negative ones makes the bits compare
// like the numbers.
template <class T>
Key<T> make_key(T score, std::int64_t index) {
  constexpr Bits<T> sign = Bits<T>{1} << (8 * sizeof(T) - 1);
  const T ranked = (std::isnan(score) ? kNegInf<T> : score) + T(0);  // + 0 makes -0 equal 0
  Bits<T> bits;
  std::memcpy(&bits, &ranked, sizeof bits);
  bits = bits & sign ? ~bits : bits | sign;
  return (static_cast<Key<T>>(bits) << (8 * sizeof(T))) | static_cast<Bits<T>>(~index);
}

template <class T>
std::int32_t key_index(Key<T> key) {
  return static_cast<std::int32_t>(~static_cast<Bits<T>>(key));
}

template <class T>
T key_score(Key<T> key) {
  constexpr Bits<T> sign = Bits<T>{1} << (8 * sizeof(T) - 1);
  Bits<T> bits = static_cast<Bits<T>>(key >> (8 * sizeof(T)));
  bits = bits & sign ? bits & ~sign : ~bits;
  T score;
  std::memcpy(&score, &bits, sizeof score);
  return score;
}

// Keeps the best `count` candidates of a row.
template <class T>
void prune(TopBuffer<T>& buffer, std::int64_t row) {
  Key<T>* keys = buffer.candidates + row * buffer.capacity;
  if (buffer.filled[row] <= buffer.count) return;
  std::nth_element(keys, keys + buffer.count - 1, keys + buffer.filled[row],
                   std::greater<Key<T>>());
  buffer.filled[row] = buffer.count;
  buffer.threshold[row] = key_score<T>(keys[buffer.count - 1]);
}

}  // namespace

// Least capacity beyond the kept candidates: delays the first cut until its threshold is useful.
constexpr std::int64_t kRoom = 2 * kKeyTile;

template <class T>
TopBuffer<T>::TopBuffer(Arena& arena, std::int64_t kept)
    : count(kept), capacity(kept + std::max(kept, kRoom)) {
  candidates = arena.take<Key<T>>(kQueryTile * capacity);
  filled = arena.take<std::int64_t>(kQueryTile);
  threshold = arena.take<T>(kQueryTile);
  found = arena.take<std::int32_t>(kKeyTile);
}

template <class T>
void clear_rows(TopBuffer<T>& buffer, std::int64_t rows) {
  std::fill_n(buffer.filled, rows, 0);
  std::fill_n(buffer.threshold, rows, kNegInf<T>);
}

template <class T>
void offer_scores(TopBuffer<T>& buffer, std::int64_t row, std::int64_t begin, std::int64_t count,
                  const T* scores) {
  // Later keys have higher indices, so they must be strictly better than the worst kept. Before the
  // first cut the threshold is -inf, which excludes masked keys.
  std::int64_t found =
      kernels<T>().row_above(scores, padded(count), buffer.threshold[row], buffer.found);
  while (found > 0 && buffer.found[found - 1] >= count) --found;  // padding
  if (found == 0) return;
  if (buffer.filled[row] + found > buffer.capacity) prune(buffer, row);
  Key<T>* keys = buffer.candidates + row * buffer.capacity + buffer.filled[row];
  for (std::int64_t t = 0; t < found; ++t)
    keys[t] = make_key(scores[buffer.found[t]], begin + buffer.found[t]);
  buffer.filled[row] += found;
}

template <class T>
void write_rows(TopBuffer<T>& buffer, std::int64_t rows, std::int32_t* indices) {
  for (std::int64_t r = 0; r < rows; ++r) {
    prune(buffer, r);
    const Key<T>* keys = buffer.candidates + r * buffer.capacity;
    std::int32_t* row = indices + r * buffer.count;
    for (std::int64_t t = 0; t < buffer.count; ++t)
      row[t] = t < buffer.filled[r] ? key_index<T>(keys[t]) : -1;
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
    pass.load_key_columns(begin, keys);
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
