// SPDX-License-Identifier: MIT
// The CPU kernels: small functions on rows and tiles, compiled once per instruction set and called
// through a table of function pointers. They do not allocate, throw or start threads.
//
// Every sum runs in an order that depends on the summed index alone, never on the tile a row is in:
// a row's result does not change when other rows, padding or masked keys are added or removed.
#pragma once

#include <cstdint>

#include "core/dropout.h"
#include "coterie/runtime.h"
#include "coterie/tensor.h"

namespace coterie::cpu {

// Tile matrices have their columns padded to a multiple of this many elements.
constexpr std::int64_t kColumnPad = 32;
constexpr std::int64_t padded(std::int64_t columns) {
  return (columns + kColumnPad - 1) / kColumnPad * kColumnPad;
}

// Rows of one item and head in their stored type. Row t is number index[t], or t if index is null.
struct Rows {
  void* base = nullptr;
  std::int64_t stride_bytes = 0;
  std::int64_t width = 0;
  DType dtype = DType::f32;
  const std::int32_t* index = nullptr;
};

// c(m,n) = a(m,k) b(k,n), or c += a b. Element (r,p) of a is a[r * a_row + p * a_col], so a may be
// transposed; b and c are row-major, n a multiple of kColumnPad.
template <class T>
struct Product {
  std::int64_t m, n, k;
  const T* a;
  std::int64_t a_row, a_col;
  const T* b;
  std::int64_t b_row;
  T* c;
  std::int64_t c_row;
  bool accumulate;
};

// Scores of `rows` queries over `columns` keys, a multiple of kColumnPad; rows are `row` apart.
template <class T>
struct ScoreTile {
  T* scores;
  std::int64_t rows, row, columns;
  T *max, *sum;  // of each row so far: largest score, sum of exp(score - max)
  T* rescale;    // factor for earlier sums of a row
};

// Scores and gradient . value of `rows` queries over `columns` keys, a multiple of kColumnPad; rows
// of both are `row` apart.
template <class T>
struct GradientTile {
  T *scores, *dp;
  std::int64_t rows, row, columns;
  const T *lse, *delta;  // of each row
};

// Keys that are dropped: the factors of a row's entries. Key t is number index[t], or first + t *
// step if index is null.
struct DroppedKeys {
  DropoutRow row;
  std::uint32_t threshold;
  const std::int32_t* index;
  std::int64_t first, step;
};

template <class T>
struct Kernels {
  void (*multiply)(const Product<T>& product);

  // Rows [first, first+count) as a row-major tile times `factor`; columns beyond the width are 0.
  void (*load)(const Rows& rows, std::int64_t first, std::int64_t count, T factor, T* tile,
               std::int64_t tile_row);
  // The same transposed: tile (width x tile_row), columns beyond count are 0.
  void (*load_transposed)(const Rows& rows, std::int64_t first, std::int64_t count, T factor,
                          T* tile, std::int64_t tile_row);
  // The reverse of load, with rounding to the rows' type.
  void (*store)(const Rows& rows, std::int64_t first, std::int64_t count, T factor, const T* tile,
                std::int64_t tile_row);

  // n is a multiple of kColumnPad in the next three.
  T (*row_max)(const T* row, std::int64_t n);     // NaN counts as -inf
  T (*row_exp)(T* row, std::int64_t n, T shift);  // row = exp(row - shift); returns the sum
  T (*row_dot)(const T* a, const T* b, std::int64_t n);

  // Updates max, sum and rescale, and sets score = exp(score - max) with the new maximum; 0 while
  // all scores of a row are -inf.
  void (*softmax)(const ScoreTile<T>& tile);
  // row_exp and row_softmax_grad for all rows: score = exp(score - lse), dp = score (dp - delta).
  void (*softmax_grad)(const GradientTile<T>& tile);

  void (*row_scale)(T* row, std::int64_t n, T factor);
  void (*row_add)(T* row, const T* other, std::int64_t n, T factor);  // row += factor * other
  // dp = p * (dp - delta): the softmax derivative.
  void (*row_softmax_grad)(const T* p, T* dp, std::int64_t n, T delta);
  // Index of the first largest element of row[0..n), any n >= 1; 0 when all are NaN.
  std::int64_t (*row_argmax)(const T* row, std::int64_t n);
  // Writes the indices of elements that are not <= threshold (so NaN is among them), ascending, and
  // returns their number; n is a multiple of kColumnPad.
  std::int64_t (*row_above)(const T* row, std::int64_t n, T threshold, std::int32_t* indices);
  // Dropout of row[0..n): 0 for dropped keys, the others times `factor`.
  void (*row_drop)(T* row, std::int64_t n, const DroppedKeys& keys, T factor);
};

// The same on bf16 elements, packed in pairs into words, the first one in the low half: c(m,n) =
// factor * a b, or c = factor * (c + a b), with k pairs of summed elements. Products are exact,
// sums are in float; subnormal elements and sums count as 0.
struct PairProduct {
  std::int64_t m, n, k;
  const std::uint32_t* a;  // pairs of a row's elements
  std::int64_t a_row;
  const std::uint32_t* b;  // a pair is two rows of a column
  std::int64_t b_row;
  float* c;
  std::int64_t c_row;
  float factor;
  bool accumulate;
};

// Kernels on pairs of bf16.
struct PairKernels {
  void (*multiply)(const PairProduct& product);

  // Rows [first, first+count) of bf16 with an even width, as pairs.
  void (*load)(const Rows& rows, std::int64_t first, std::int64_t count, std::uint32_t* tile,
               std::int64_t tile_row);
  // The same transposed: tile (width / 2 x tile_row), columns beyond count are 0.
  void (*load_transposed)(const Rows& rows, std::int64_t first, std::int64_t count,
                          std::uint32_t* tile, std::int64_t tile_row);
  // Pairs of rows of any width: tile (count / 2 rounded up x tile_row), padded with 0.
  void (*load_row_pairs)(const Rows& rows, std::int64_t first, std::int64_t count,
                         std::uint32_t* tile, std::int64_t tile_row);
  // Rounds rows to pairs of bf16; columns is a multiple of kColumnPad.
  void (*round)(const float* from, std::int64_t from_row, std::int64_t rows, std::int64_t columns,
                std::uint32_t* tile, std::int64_t tile_row);
};

// Integer kernels of Hamming clustering.
struct CodeKernels {
  // labels[i] = nearest centroid of codes[i] in Hamming distance, lower index on ties.
  void (*nearest)(const std::uint64_t* codes, std::int64_t count, const std::uint64_t* centroids,
                  std::int64_t num_centroids, std::int32_t* labels);
  // Adds the set bits of each code to votes (num_centroids x 64) and counts codes in sizes.
  void (*vote)(const std::uint64_t* codes, const std::int32_t* labels, std::int64_t count,
               std::int32_t* votes, std::int32_t* sizes);
};

// All kernels of one instruction set.
struct KernelTable {
  Kernels<float> f32;
  Kernels<double> f64;
  CodeKernels codes;
  const PairKernels* pairs;  // null if the instruction set has no bf16 products
};

// The table in use (runtime.h: cpu_isa, force_cpu_isa).
const KernelTable& kernel_table();

template <class T>
const Kernels<T>& kernels();
template <>
inline const Kernels<float>& kernels<float>() {
  return kernel_table().f32;
}
template <>
inline const Kernels<double>& kernels<double>() {
  return kernel_table().f64;
}

}  // namespace coterie::cpu
