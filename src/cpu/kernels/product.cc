// SPDX-License-Identifier: MIT
// Matrix products; compiled once per COTERIE_ISA.
#include "cpu/kernels/isa.h"
#include "cpu/kernels/vec.h"

namespace coterie::cpu::COTERIE_ISA {

namespace {

// A register tile: kRows rows of a times two vectors of b's columns. Loops over rows are fully
// unrolled: otherwise g++ keeps the sums in memory before and after the loop over k.
template <class T, int kRows>
void multiply_tile(const Product<T>& p, int64_t row, int64_t column) {
  constexpr int kL = kLanes<T>;
  const T* b = p.b + column;
  T* c = p.c + row * p.c_row + column;
  Vec<T> sum[kRows][2] = {};
  if (p.accumulate) {
#pragma GCC unroll 12
    for (int r = 0; r < kRows; ++r) {
      sum[r][0] = load_vec(c + r * p.c_row);
      sum[r][1] = load_vec(c + r * p.c_row + kL);
    }
  }
  // One pointer per three rows, at the offsets 0, 1 and 2 strides that an address can encode. g++
  // would use one offset per row, more than there are registers; the empty asm prevents that.
  const T* a[(kRows + 2) / 3];
#pragma GCC unroll 12
  for (int r = 0; r < kRows; r += 3) a[r / 3] = p.a + (row + r) * p.a_row;
  for (int64_t k = 0; k < p.k; ++k) {
    const Vec<T> b0 = load_vec(b), b1 = load_vec(b + kL);
    b += p.b_row;
#pragma GCC unroll 12
    for (int r = 0; r < kRows; ++r) {
      const T factor = a[r / 3][r % 3 * p.a_row];
      sum[r][0] += factor * b0;
      sum[r][1] += factor * b1;
    }
#pragma GCC unroll 12
    for (int r = 0; r < kRows; r += 3) {
      a[r / 3] += p.a_col;
      asm("" : "+r"(a[r / 3]));
    }
  }
#pragma GCC unroll 12
  for (int r = 0; r < kRows; ++r) {
    store_vec(c + r * p.c_row, sum[r][0]);
    store_vec(c + r * p.c_row + kL, sum[r][1]);
  }
}

// The same for the last `rows` <= kRows rows.
template <class T, int kRows>
void multiply_rest(const Product<T>& p, int64_t row, int64_t column, int64_t rows) {
  if constexpr (kRows > 0) {
    if (rows == kRows) return multiply_tile<T, kRows>(p, row, column);
    multiply_rest<T, kRows - 1>(p, row, column, rows);
  }
}

}  // namespace

template <class T>
void multiply(const Product<T>& p) {
  constexpr int kRows = COTERIE_TILE_ROWS;
  for (int64_t column = 0; column < p.n; column += 2 * kLanes<T>) {
    int64_t row = 0;
    for (; row + kRows <= p.m; row += kRows) multiply_tile<T, kRows>(p, row, column);
    multiply_rest<T, kRows - 1>(p, row, column, p.m - row);
  }
}
template void multiply(const Product<float>&);
template void multiply(const Product<double>&);

}  // namespace coterie::cpu::COTERIE_ISA
