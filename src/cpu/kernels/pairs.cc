// SPDX-License-Identifier: MIT
// Products of bf16 matrices in pairs; compiled once per COTERIE_ISA, empty without such an
// instruction.
#include "cpu/kernels/isa.h"
#include "cpu/kernels/vec.h"

#if defined(__AVX512BF16__)

namespace coterie::cpu::COTERIE_ISA {

namespace {

typedef uint32_t Pairs __attribute__((vector_size(64)));
typedef uint16_t Halves __attribute__((vector_size(32)));
constexpr int kL = 16;

Pairs load_pairs_vec(const uint32_t* from) {
  Pairs pairs;
  memcpy(&pairs, from, sizeof pairs);
  return pairs;
}

// multiply_tile of product.cc with two products per multiply-add.
template <int kRows>
void multiply_tile(const PairProduct& p, int64_t row, int64_t column) {
  const uint32_t* b = p.b + column;
  float* c = p.c + row * p.c_row + column;
  Vec<float> sum[kRows][2] = {};
  if (p.accumulate) {
#pragma GCC unroll 12
    for (int r = 0; r < kRows; ++r) {
      sum[r][0] = load_vec(c + r * p.c_row);
      sum[r][1] = load_vec(c + r * p.c_row + kL);
    }
  }
  const uint32_t* a[(kRows + 2) / 3];
#pragma GCC unroll 12
  for (int r = 0; r < kRows; r += 3) a[r / 3] = p.a + (row + r) * p.a_row;
  for (int64_t k = 0; k < p.k; ++k) {
    const Pairs b0 = load_pairs_vec(b), b1 = load_pairs_vec(b + kL);
    b += p.b_row;
#pragma GCC unroll 12
    for (int r = 0; r < kRows; ++r) {
      const Pairs factor = a[r / 3][r % 3 * p.a_row] - Pairs{};
      sum[r][0] = _mm512_dpbf16_ps(sum[r][0], (__m512bh)factor, (__m512bh)b0);
      sum[r][1] = _mm512_dpbf16_ps(sum[r][1], (__m512bh)factor, (__m512bh)b1);
    }
#pragma GCC unroll 12
    for (int r = 0; r < kRows; r += 3) {
      ++a[r / 3];
      asm("" : "+r"(a[r / 3]));
    }
  }
#pragma GCC unroll 12
  for (int r = 0; r < kRows; ++r) {
    store_vec(c + r * p.c_row, sum[r][0] * p.factor);
    store_vec(c + r * p.c_row + kL, sum[r][1] * p.factor);
  }
}

template <int kRows>
void multiply_rest(const PairProduct& p, int64_t row, int64_t column, int64_t rows) {
  if constexpr (kRows > 0) {
    if (rows == kRows) return multiply_tile<kRows>(p, row, column);
    multiply_rest<kRows - 1>(p, row, column, rows);
  }
}

void multiply_pairs(const PairProduct& p) {
  constexpr int kRows = COTERIE_TILE_ROWS;
  for (int64_t column = 0; column < p.n; column += 2 * kL) {
    int64_t row = 0;
    for (; row + kRows <= p.m; row += kRows) multiply_tile<kRows>(p, row, column);
    multiply_rest<kRows - 1>(p, row, column, p.m - row);
  }
}

const uint16_t* row_at(const Rows& rows, int64_t t) {
  const int64_t number = rows.index ? rows.index[t] : t;
  return reinterpret_cast<const uint16_t*>(static_cast<const char*>(rows.base) +
                                           number * rows.stride_bytes);
}

void load_pairs(const Rows& rows, int64_t first, int64_t count, uint32_t* tile, int64_t tile_row) {
  for (int64_t r = 0; r < count; ++r)
    memcpy(tile + r * tile_row, row_at(rows, first + r),
           static_cast<size_t>(rows.width) * sizeof(uint16_t));
}

// 16 pairs of a row from pair d on, 0 beyond its width; stored as the bits of floats, which are
// only moved.
Vec<float> load_block_row(const Rows& rows, int64_t t, int64_t d) {
  const uint16_t* from = row_at(rows, t) + 2 * d;
  const int64_t left = rows.width / 2 - d;
  Vec<float> block = {};
  if (left >= kL)
    memcpy(&block, from, sizeof block);
  else
    memcpy(&block, from, static_cast<size_t>(left) * sizeof(uint32_t));
  return block;
}

void load_pairs_transposed(const Rows& rows, int64_t first, int64_t count, uint32_t* tile,
                           int64_t tile_row) {
  const int64_t width = rows.width / 2;
  for (int64_t r0 = 0; r0 < tile_row; r0 += kL) {
    const int64_t strip = count - r0 < kL ? count - r0 : kL;
    for (int64_t d = 0; d < width; d += kL) {
      Vec<float> block[kL] = {};
      for (int64_t r = 0; r < strip; ++r) block[r] = load_block_row(rows, first + r0 + r, d);
      transpose<float>(block);
      const int64_t columns = width - d < kL ? width - d : kL;
      for (int64_t c = 0; c < columns; ++c)
        memcpy(tile + (d + c) * tile_row + r0, &block[c], sizeof block[c]);
    }
  }
}

// Elements [d, d + 16) of a row of `width`, 0 beyond it.
Pairs load_halves(const uint16_t* row, int64_t d, int64_t width) {
  Halves halves = {};
  if (d + kL <= width)
    memcpy(&halves, row + d, sizeof halves);
  else if (d < width)
    memcpy(&halves, row + d, static_cast<size_t>(width - d) * sizeof(uint16_t));
  return __builtin_convertvector(halves, Pairs);
}

void load_row_pairs(const Rows& rows, int64_t first, int64_t count, uint32_t* tile,
                    int64_t tile_row) {
  for (int64_t r = 0; r < count; r += 2) {
    const uint16_t* low = row_at(rows, first + r);
    const bool both = r + 1 < count;
    const uint16_t* high = both ? row_at(rows, first + r + 1) : low;
    for (int64_t d = 0; d < tile_row; d += kL) {
      Pairs pairs = load_halves(low, d, rows.width);
      if (both) pairs |= load_halves(high, d, rows.width) << 16;
      memcpy(tile + r / 2 * tile_row + d, &pairs, sizeof pairs);
    }
  }
}

void round_pairs(const float* from, int64_t from_row, int64_t rows, int64_t columns, uint32_t* tile,
                 int64_t tile_row) {
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t d = 0; d < columns; d += 2 * kL) {
      const float* values = from + r * from_row + d;
      const __m512bh rounded = _mm512_cvtne2ps_pbh(load_vec(values + kL), load_vec(values));
      memcpy(tile + r * tile_row + d / 2, &rounded, sizeof rounded);
    }
}

}  // namespace

const PairKernels kPairs = {multiply_pairs, load_pairs, load_pairs_transposed, load_row_pairs,
                            round_pairs};

}  // namespace coterie::cpu::COTERIE_ISA

#endif
