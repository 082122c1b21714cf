// SPDX-License-Identifier: MIT
// The kernels of kernels.h for one instruction set: this file is compiled once per COTERIE_ISA.
#include "cpu/kernels.h"

#include "core/half.h"
#include "cpu/vec.h"

namespace coterie::cpu::COTERIE_ISA {

namespace {

// A register tile: kRows rows of a times two vectors of b's columns.
template <class T, int kRows>
void multiply_tile(const Product<T>& p, int64_t row, int64_t column) {
  constexpr int kL = kLanes<T>;
  const T* a = p.a + row * p.a_row;
  const T* b = p.b + column;
  T* c = p.c + row * p.c_row + column;
  Vec<T> sum[kRows][2];
  for (int r = 0; r < kRows; ++r) {
    sum[r][0] = p.accumulate ? load_vec(c + r * p.c_row) : Vec<T>{};
    sum[r][1] = p.accumulate ? load_vec(c + r * p.c_row + kL) : Vec<T>{};
  }
  for (int64_t k = 0; k < p.k; ++k) {
    const Vec<T> b0 = load_vec(b + k * p.b_row), b1 = load_vec(b + k * p.b_row + kL);
    for (int r = 0; r < kRows; ++r) {
      const T factor = a[r * p.a_row + k * p.a_col];
      sum[r][0] += factor * b0;
      sum[r][1] += factor * b1;
    }
  }
  for (int r = 0; r < kRows; ++r) {
    store_vec(c + r * p.c_row, sum[r][0]);
    store_vec(c + r * p.c_row + kL, sum[r][1]);
  }
}

template <class T>
void multiply(const Product<T>& p) {
  constexpr int kRows = COTERIE_TILE_ROWS;
  for (int64_t column = 0; column < p.n; column += 2 * kLanes<T>) {
    int64_t row = 0;
    for (; row + kRows <= p.m; row += kRows) multiply_tile<T, kRows>(p, row, column);
    for (; row + 4 <= p.m; row += 4) multiply_tile<T, 4>(p, row, column);
    for (; row < p.m; ++row) multiply_tile<T, 1>(p, row, column);
  }
}

// Elements as the type they are computed in; beside the overloads of half.h.
inline double to_float(double value) { return value; }
using coterie::to_float;

inline const char* row_at(const Rows& rows, int64_t t) {
  const int64_t number = rows.index ? rows.index[t] : t;
  return static_cast<const char*>(rows.base) + number * rows.stride_bytes;
}

template <class T, class Element>
void load_as(const Rows& rows, int64_t first, int64_t count, T factor, T* tile, int64_t tile_row) {
  for (int64_t r = 0; r < count; ++r) {
    const Element* from = reinterpret_cast<const Element*>(row_at(rows, first + r));
    T* to = tile + r * tile_row;
    for (int64_t d = 0; d < rows.width; ++d) to[d] = static_cast<T>(to_float(from[d])) * factor;
    for (int64_t d = rows.width; d < tile_row; ++d) to[d] = 0;
  }
}

// A vector of converted elements.
template <class T, class Element>
Vec<T> load_converted(const Element* from) {
  T lane[kLanes<T>];
  for (int i = 0; i < kLanes<T>; ++i) lane[i] = static_cast<T>(to_float(from[i]));
  return load_vec(lane);
}

template <class T, class Element>
void load_transposed_as(const Rows& rows, int64_t first, int64_t count, T factor, T* tile,
                        int64_t tile_row) {
  constexpr int kL = kLanes<T>;
  for (int64_t r0 = 0; r0 < tile_row; r0 += kL) {
    const Element* from[kL];
    int64_t strip = 0;
    for (; strip < kL && r0 + strip < count; ++strip)
      from[strip] = reinterpret_cast<const Element*>(row_at(rows, first + r0 + strip));
    int64_t d = 0;
    if (strip == kL)  // whole blocks by vectors, the rest one by one
      for (; d + kL <= rows.width; d += kL) {
        Vec<T> block[kL];
        for (int r = 0; r < kL; ++r) block[r] = load_converted<T>(from[r] + d) * factor;
        transpose<T>(block);
        for (int c = 0; c < kL; ++c) store_vec(tile + (d + c) * tile_row + r0, block[c]);
      }
    for (; d < rows.width; ++d) {
      T* to = tile + d * tile_row + r0;
      for (int64_t r = 0; r < strip; ++r) to[r] = static_cast<T>(to_float(from[r][d])) * factor;
      for (int64_t r = strip; r < kL; ++r) to[r] = 0;
    }
  }
}

inline void assign(float& to, double value) { to = static_cast<float>(value); }
inline void assign(double& to, double value) { to = value; }
inline void assign(Bf16& to, double value) { to = to_bf16(static_cast<float>(value)); }
inline void assign(F16& to, double value) { to = to_f16(static_cast<float>(value)); }

template <class T, class Element>
void store_as(const Rows& rows, int64_t first, int64_t count, T factor, const T* tile,
              int64_t tile_row) {
  for (int64_t r = 0; r < count; ++r) {
    Element* to = reinterpret_cast<Element*>(const_cast<char*>(row_at(rows, first + r)));
    const T* from = tile + r * tile_row;
    for (int64_t d = 0; d < rows.width; ++d) assign(to[d], from[d] * factor);
  }
}

template <class T>
void load(const Rows& rows, int64_t first, int64_t count, T factor, T* tile, int64_t tile_row) {
  switch (rows.dtype) {
    case DType::f32:
      return load_as<T, float>(rows, first, count, factor, tile, tile_row);
    case DType::f64:
      return load_as<T, double>(rows, first, count, factor, tile, tile_row);
    case DType::bf16:
      return load_as<T, Bf16>(rows, first, count, factor, tile, tile_row);
    default:
      return load_as<T, F16>(rows, first, count, factor, tile, tile_row);
  }
}

template <class T>
void load_transposed(const Rows& rows, int64_t first, int64_t count, T factor, T* tile,
                     int64_t tile_row) {
  switch (rows.dtype) {
    case DType::f32:
      return load_transposed_as<T, float>(rows, first, count, factor, tile, tile_row);
    case DType::f64:
      return load_transposed_as<T, double>(rows, first, count, factor, tile, tile_row);
    case DType::bf16:
      return load_transposed_as<T, Bf16>(rows, first, count, factor, tile, tile_row);
    default:
      return load_transposed_as<T, F16>(rows, first, count, factor, tile, tile_row);
  }
}

template <class T>
void store(const Rows& rows, int64_t first, int64_t count, T factor, const T* tile,
           int64_t tile_row) {
  switch (rows.dtype) {
    case DType::f32:
      return store_as<T, float>(rows, first, count, factor, tile, tile_row);
    case DType::f64:
      return store_as<T, double>(rows, first, count, factor, tile, tile_row);
    case DType::bf16:
      return store_as<T, Bf16>(rows, first, count, factor, tile, tile_row);
    default:
      return store_as<T, F16>(rows, first, count, factor, tile, tile_row);
  }
}

template <class T>
T row_max(const T* row, int64_t n) {
  Vec<T> best = broadcast(static_cast<T>(-INFINITY));
  for (int64_t i = 0; i < n; i += kLanes<T>) {
    const Vec<T> v = load_vec(row + i);
    best = v > best ? v : best;
  }
  T lane[kLanes<T>];
  memcpy(lane, &best, sizeof best);
  T largest = lane[0];
  for (int i = 1; i < kLanes<T>; ++i) largest = lane[i] > largest ? lane[i] : largest;
  return largest;
}

template <class T>
T row_exp(T* row, int64_t n, T shift) {
  Vec<T> sum{};
  for (int64_t i = 0; i < n; i += kLanes<T>) {
    const Vec<T> p = exp_vec(load_vec(row + i) - shift);
    store_vec(row + i, p);
    sum += p;
  }
  return sum_lanes<T>(sum);
}

template <class T>
void row_scale(T* row, int64_t n, T factor) {
  for (int64_t i = 0; i < n; ++i) row[i] *= factor;
}

template <class T>
void row_add(T* row, const T* other, int64_t n, T factor) {
  for (int64_t i = 0; i < n; ++i) row[i] += factor * other[i];
}

template <class T>
T row_dot(const T* a, const T* b, int64_t n) {
  Vec<T> sum{};
  for (int64_t i = 0; i < n; i += kLanes<T>) sum += load_vec(a + i) * load_vec(b + i);
  return sum_lanes<T>(sum);
}

template <class T>
void row_softmax_grad(const T* p, T* dp, int64_t n, T delta) {
  for (int64_t i = 0; i < n; ++i) dp[i] = p[i] * (dp[i] - delta);
}

template <class T>
int64_t row_argmax(const T* row, int64_t n) {
  T largest = static_cast<T>(-INFINITY);
  const int64_t whole = n / kLanes<T> * kLanes<T>;
  if (whole > 0) largest = row_max(row, whole);
  for (int64_t i = whole; i < n; ++i) largest = row[i] > largest ? row[i] : largest;
  for (int64_t i = 0; i < n; ++i)
    if (row[i] == largest) return i;
  return 0;
}

template <class T>
int64_t row_above(const T* row, int64_t n, T threshold, int32_t* indices) {
  int64_t count = 0;
  for (int64_t i = 0; i < n; i += kLanes<T>) {
    if (!any_above(load_vec(row + i), threshold)) continue;
    for (int64_t j = i; j < i + kLanes<T>; ++j) {
      indices[count] = static_cast<int32_t>(j);
      count += !(row[j] <= threshold);
    }
  }
  return count;
}

void nearest_code(const uint64_t* codes, int64_t count, const uint64_t* centroids,
                  int64_t num_centroids, int32_t* labels) {
  // The distance in the high half and the index in the low half make one key per pair, so that the
  // minimum is the nearest centroid with ties to the lower index.
  constexpr int64_t kStrip = 32;
  for (int64_t i0 = 0; i0 < count; i0 += kStrip) {
    uint64_t code[kStrip], best[kStrip];
    const int64_t strip = count - i0 < kStrip ? count - i0 : kStrip;
    for (int64_t i = 0; i < kStrip; ++i) {
      code[i] = codes[i0 + (i < strip ? i : 0)];
      best[i] = ~uint64_t{0};
    }
    for (int64_t c = 0; c < num_centroids; ++c) {
      const uint64_t centroid = centroids[c], index = static_cast<uint64_t>(c);
      for (int64_t i = 0; i < kStrip; ++i) {
        const uint64_t distance = static_cast<uint64_t>(__builtin_popcountll(code[i] ^ centroid));
        const uint64_t key = (distance << 32) | index;
        best[i] = key < best[i] ? key : best[i];
      }
    }
    for (int64_t i = 0; i < strip; ++i) labels[i0 + i] = static_cast<int32_t>(best[i]);
  }
}

void vote(const uint64_t* codes, const int32_t* labels, int64_t count, int32_t* votes,
          int32_t* sizes) {
  for (int64_t i = 0; i < count; ++i) {
    const uint64_t code = codes[i];
    int32_t* row = votes + 64 * static_cast<int64_t>(labels[i]);
    for (int bit = 0; bit < 64; ++bit) row[bit] += static_cast<int32_t>((code >> bit) & 1);
    ++sizes[labels[i]];
  }
}

template <class T>
constexpr Kernels<T> make_kernels() {
  return {multiply<T>,   load<T>,     load_transposed<T>, store<T>,   row_max<T>,
          row_exp<T>,    row_dot<T>,  row_scale<T>,       row_add<T>, row_softmax_grad<T>,
          row_argmax<T>, row_above<T>};
}

}  // namespace

extern const KernelTable kTable;
const KernelTable kTable = {make_kernels<float>(), make_kernels<double>(), {nearest_code, vote}};

}  // namespace coterie::cpu::COTERIE_ISA
