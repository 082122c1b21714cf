// SPDX-License-Identifier: MIT
// Streaming selection of the best keys of a row: a buffer of candidates that is cut back to the
// best `count` whenever it fills, so that scores are never stored.
#pragma once

#include <cstdint>
#include <vector>

#include "cpu/engine/segment.h"

namespace coterie::cpu {

// A candidate as one number, larger is better: the score's bits, mapped to compare like the score,
// then the inverted index, so that the lower index wins among equal scores.
template <class T>
struct CandidateKey;
template <>
struct CandidateKey<float> {
  using type = std::uint64_t;
};
template <>
struct CandidateKey<double> {
  __extension__ typedef unsigned __int128 type;
};

template <class T>
struct TopBuffer {
  std::int64_t count = 0, capacity = 0;                  // candidates per row: kept, at most
  typename CandidateKey<T>::type* candidates = nullptr;  // kQueryTile x capacity
  std::int64_t* filled = nullptr;                        // kQueryTile
  T* threshold = nullptr;                                // kQueryTile: the worst kept score
  std::int32_t* found = nullptr;                         // kKeyTile

  TopBuffer(Arena& arena, std::int64_t count);
};

template <class T>
std::vector<TopBuffer<T>> make_top_buffers(Arena& arena, std::int64_t count) {
  std::vector<TopBuffer<T>> buffers;
  for (int worker = 0; worker < call_threads(); ++worker) buffers.emplace_back(arena, count);
  return buffers;
}

// Clears the first `rows` rows.
template <class T>
void clear_rows(TopBuffer<T>& buffer, std::int64_t rows);

// Offers scores[t] for index begin + t to a row, in ascending order of indices; -inf is no
// candidate, NaN ranks last. `scores` is padded with -inf to a multiple of kColumnPad; count <=
// kKeyTile.
template <class T>
void offer_scores(TopBuffer<T>& buffer, std::int64_t row, std::int64_t begin, std::int64_t count,
                  const T* scores);

// Writes the kept indices of the first `rows` rows, ascending, -1 beyond them.
template <class T>
void write_rows(TopBuffer<T>& buffer, std::int64_t rows, std::int32_t* indices);

// Writes the ranks of the best admissible keys of queries [first, first + count) of the segment as
// rows of buffer.count indices, ascending, -1 beyond them. NaN scores rank as -inf. Only the sign
// of the scale is used: with scaled queries, equal scores could differ by rounding.
template <class T>
void select_tile(const Segment<T>& scaled, std::int64_t first, std::int64_t count, Tiles<T>& tiles,
                 TopBuffer<T>& buffer, std::int32_t* indices);

}  // namespace coterie::cpu
