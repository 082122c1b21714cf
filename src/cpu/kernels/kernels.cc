// SPDX-License-Identifier: MIT
// The kernels of kernels.h for one instruction set: this file is compiled once per COTERIE_ISA.
#include "cpu/kernels/kernels.h"

#include <type_traits>

#include "core/half.h"
#include "cpu/kernels/isa.h"
#include "cpu/kernels/vec.h"

namespace coterie::cpu::COTERIE_ISA {

namespace {

// Converts an element to the type it is computed in; in addition to the overloads of half.h.
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
    int64_t d = 0;
    if constexpr (std::is_same_v<T, Element>)
      for (; d + kLanes<T> <= rows.width; d += kLanes<T>)
        store_vec(to + d, load_vec(from + d) * factor);
    for (; d < rows.width; ++d) to[d] = static_cast<T>(to_float(from[d])) * factor;
    for (; d < tile_row; ++d) to[d] = 0;
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
    if (strip == kL)  // vectors for whole blocks, scalars for the rest
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

// Calls use(Element{}) with the type of the rows' elements.
template <class Use>
void by_element(DType dtype, const Use& use) {
  switch (dtype) {
    case DType::f32:
      return use(float{});
    case DType::f64:
      return use(double{});
    case DType::bf16:
      return use(Bf16{});
    default:
      return use(F16{});
  }
}

template <class T>
void load(const Rows& rows, int64_t first, int64_t count, T factor, T* tile, int64_t tile_row) {
  by_element(rows.dtype, [&](auto element) {
    load_as<T, decltype(element)>(rows, first, count, factor, tile, tile_row);
  });
}

template <class T>
void load_transposed(const Rows& rows, int64_t first, int64_t count, T factor, T* tile,
                     int64_t tile_row) {
  by_element(rows.dtype, [&](auto element) {
    load_transposed_as<T, decltype(element)>(rows, first, count, factor, tile, tile_row);
  });
}

template <class T>
void store(const Rows& rows, int64_t first, int64_t count, T factor, const T* tile,
           int64_t tile_row) {
  by_element(rows.dtype, [&](auto element) {
    store_as<T, decltype(element)>(rows, first, count, factor, tile, tile_row);
  });
}

template <class T>
T row_max(const T* row, int64_t n) {
  Vec<T> best = broadcast(static_cast<T>(-INFINITY));
  for (int64_t i = 0; i < n; i += kLanes<T>) best = max_vec<T>(load_vec(row + i), best);
  return max_lanes<T>(best);
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

// Processes kLanes rows at a time, so that one vector exponential gives their rescaling factors.
template <class T>
void softmax(const ScoreTile<T>& tile) {
  constexpr int kL = kLanes<T>;
  for (int64_t first = 0; first < tile.rows; first += kL) {
    const int64_t rows = tile.rows - first < kL ? tile.rows - first : kL;
    T before[kL] = {}, shift[kL] = {};
    for (int64_t r = 0; r < rows; ++r) {
      const T largest = row_max(tile.scores + (first + r) * tile.row, tile.columns);
      before[r] = tile.max[first + r];
      if (largest > before[r]) tile.max[first + r] = largest;
      // No admissible key so far: exp(-inf - 0) makes every weight 0.
      shift[r] = tile.max[first + r] == static_cast<T>(-INFINITY) ? 0 : tile.max[first + r];
    }
    T rescale[kL];
    store_vec(rescale, exp_vec(load_vec(before) - load_vec(shift)));
    for (int64_t r = first; r < first + rows; ++r) {
      tile.rescale[r] = rescale[r - first];
      tile.sum[r] = tile.sum[r] * rescale[r - first] +
                    row_exp(tile.scores + r * tile.row, tile.columns, shift[r - first]);
    }
  }
}

template <class T>
void softmax_grad(const GradientTile<T>& tile) {
  for (int64_t r = 0; r < tile.rows; ++r) {
    T *row = tile.scores + r * tile.row, *dp = tile.dp + r * tile.row;
    const T lse = tile.lse[r], delta = tile.delta[r];
    for (int64_t i = 0; i < tile.columns; i += kLanes<T>) {
      const Vec<T> p = exp_vec(load_vec(row + i) - lse);
      store_vec(row + i, p);
      store_vec(dp + i, p * (load_vec(dp + i) - delta));
    }
  }
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

template <class T>
void row_drop(T* row, int64_t n, const DroppedKeys& keys, T factor) {
  const DropoutRow words = keys.row;
  const uint32_t threshold = keys.threshold;
  if (keys.index) {
    for (int64_t i = 0; i < n; ++i) {
      const uint32_t word = dropout_word(words, static_cast<uint32_t>(keys.index[i]));
      row[i] = word < threshold ? T(0) : row[i] * factor;
    }
    return;
  }
  const auto first = static_cast<uint32_t>(keys.first), step = static_cast<uint32_t>(keys.step);
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t word = dropout_word(words, first + static_cast<uint32_t>(i) * step);
    row[i] = word < threshold ? T(0) : row[i] * factor;
  }
}

template <class T>
constexpr Kernels<T> make_kernels() {
  return {multiply<T>,     load<T>,      load_transposed<T>, store<T>,
          row_max<T>,      row_exp<T>,   row_dot<T>,         softmax<T>,
          softmax_grad<T>, row_scale<T>, row_add<T>,         row_softmax_grad<T>,
          row_argmax<T>,   row_above<T>, row_drop<T>};
}

#if defined(__AVX512BF16__)
constexpr const PairKernels* kPairTable = &kPairs;
#else
constexpr const PairKernels* kPairTable = nullptr;
#endif

}  // namespace

extern const KernelTable kTable;
const KernelTable kTable = {
    make_kernels<float>(), make_kernels<double>(), {nearest_code, vote}, kPairTable};

}  // namespace coterie::cpu::COTERIE_ISA
