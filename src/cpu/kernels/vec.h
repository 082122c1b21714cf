// SPDX-License-Identifier: MIT
// Vectors of the instruction set a file is compiled for, with the compiler's vector extension.
// Everything is static for the reason given in half.h.
#pragma once

#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
#define COTERIE_VECTOR_BYTES 64
#define COTERIE_TILE_ROWS 12  // 12 x 2 accumulators of the 32 registers
#elif defined(__AVX2__)
#define COTERIE_VECTOR_BYTES 32
#define COTERIE_TILE_ROWS 6  // 6 x 2 of the 16 registers
#elif defined(__aarch64__)
#define COTERIE_VECTOR_BYTES 16
#define COTERIE_TILE_ROWS 12  // 12 x 2 of the 32 registers of NEON
#else
#define COTERIE_VECTOR_BYTES 16
#define COTERIE_TILE_ROWS 6
#endif

namespace coterie::cpu::COTERIE_ISA {

template <class T>
struct VecOf;
template <>
struct VecOf<float> {
  typedef float type __attribute__((vector_size(COTERIE_VECTOR_BYTES)));
  typedef int32_t ints __attribute__((vector_size(COTERIE_VECTOR_BYTES)));
};
template <>
struct VecOf<double> {
  typedef double type __attribute__((vector_size(COTERIE_VECTOR_BYTES)));
  typedef int64_t ints __attribute__((vector_size(COTERIE_VECTOR_BYTES)));
};
template <class T>
using Vec = typename VecOf<T>::type;

template <class T>
constexpr int kLanes = COTERIE_VECTOR_BYTES / static_cast<int>(sizeof(T));

// 0, 1, .. n-1 as template arguments.
template <int... kLane>
struct Lanes {};
template <int n, int... kLane>
struct MakeLanes : MakeLanes<n - 1, n - 1, kLane...> {};
template <int... kLane>
struct MakeLanes<0, kLane...> {
  using type = Lanes<kLane...>;
};
template <int n>
using LaneList = typename MakeLanes<n>::type;

template <class T>
static inline Vec<T> load_vec(const T* from) {
  Vec<T> v;
  memcpy(&v, from, sizeof v);
  return v;
}

template <class T>
static inline void store_vec(T* to, Vec<T> v) {
  memcpy(to, &v, sizeof v);
}

template <class T>
static inline Vec<T> broadcast(T value) {
  return value - Vec<T>{};
}

// Rotates a vector down by kBy lanes.
template <class T, int kBy, int... kLane>
static inline Vec<T> lanes_down(Vec<T> v, Lanes<kLane...>) {
  return __builtin_shufflevector(v, v, ((kLane + kBy) % kLanes<T>)...);
}

// Lanes are added in a fixed tree.
template <class T, int kWidth = kLanes<T> / 2>
static inline T sum_lanes(Vec<T> v) {
  v += lanes_down<T, kWidth>(v, LaneList<kLanes<T>>{});
  if constexpr (kWidth == 1)
    return v[0];
  else
    return sum_lanes<T, kWidth / 2>(v);
}

// The larger of two in each lane; b if a is NaN.
template <class T>
static inline Vec<T> max_vec(Vec<T> a, Vec<T> b) {
  return a > b ? a : b;
}

template <class T, int kWidth = kLanes<T> / 2>
static inline T max_lanes(Vec<T> v) {
  v = max_vec<T>(lanes_down<T, kWidth>(v, LaneList<kLanes<T>>{}), v);
  if constexpr (kWidth == 1)
    return v[0];
  else
    return max_lanes<T, kWidth / 2>(v);
}

// Whether any lane is not <= threshold.
template <class T>
static inline bool any_above(Vec<T> v, T threshold) {
  const typename VecOf<T>::ints below = v <= threshold;
  int64_t words[COTERIE_VECTOR_BYTES / 8];
  memcpy(words, &below, sizeof below);
  int64_t all = -1;
  for (int64_t word : words) all &= word;
  return all != -1;
}

// Interleaves the lower (or upper) halves of two vectors.
template <class T, int kHalf, int... kLane>
static inline Vec<T> interleave(Vec<T> a, Vec<T> b, Lanes<kLane...>) {
  constexpr int kL = kLanes<T>;
  return __builtin_shufflevector(a, b, (kLane % 2 * kL + kHalf * kL / 2 + kLane / 2)...);
}

// Transposes kLanes x kLanes elements with log2(kLanes) perfect shuffles.
template <class T>
static inline void transpose(Vec<T>* block) {
  constexpr int kL = kLanes<T>;
  for (int width = 1; width < kL; width *= 2) {
    Vec<T> shuffled[kL];
    for (int i = 0; i < kL / 2; ++i) {
      shuffled[2 * i] = interleave<T, 0>(block[i], block[i + kL / 2], LaneList<kL>{});
      shuffled[2 * i + 1] = interleave<T, 1>(block[i], block[i + kL / 2], LaneList<kL>{});
    }
    for (int i = 0; i < kL; ++i) block[i] = shuffled[i];
  }
}

// exp(f) on [-ln2/2, ln2/2]: 1 + f + .., so that exp(0) is 1; minimax, relative error 1.05e-7.
static inline Vec<float> exp_near_zero(Vec<float> f) {
  Vec<float> p = broadcast(8.312515914e-3f) * f + 4.189020023e-2f;
  p = p * f + 1.666711420e-1f;
  p = p * f + 4.999923110e-1f;
  p = p * f + 1.0f;
  return p * f + 1.0f;
}

// exp(x) = 2^n exp(f) with an error of about 1.5 ulp; 0 below the normal range, so that -inf gives
// exactly 0; NaN stays NaN.
#if defined(__AVX512F__)
static inline Vec<float> exp_vec(Vec<float> x) {
  const __mmask16 normal = _mm512_cmp_ps_mask(x, broadcast(-87.0f), _CMP_NLT_UQ);
  const Vec<float> n = _mm512_maskz_roundscale_ps(0xffff, x * 1.44269504f, _MM_FROUND_NO_EXC);
  Vec<float> f = x - n * 0.693359375f;  // ln 2 in two parts
  f = f + n * 2.12194440e-4f;
  return _mm512_maskz_scalef_ps(normal, exp_near_zero(f), n);
}
#else
static inline Vec<float> exp_vec(Vec<float> x) {
  using V = Vec<float>;
  using I = VecOf<float>::ints;
  const V underflow = broadcast(-87.0f), overflow = broadcast(88.7f);
  const I tiny = x < underflow;
  x = x > overflow ? overflow : x;
  x = tiny ? underflow : x;
  const V magic = broadcast(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  const V shifted = x * 1.44269504f + magic;
  const V n = shifted - magic;
  V f = x - n * 0.693359375f;  // ln 2 in two parts
  f = f + n * 2.12194440e-4f;
  I bits, bias;
  memcpy(&bits, &shifted, sizeof bits);
  memcpy(&bias, &magic, sizeof bias);
  const I exponent = (bits - bias + 127) << 23;
  V power;
  memcpy(&power, &exponent, sizeof power);
  return tiny ? V{} : exp_near_zero(f) * power;
}
#endif

static inline Vec<double> exp_vec(Vec<double> x) {
  for (int i = 0; i < kLanes<double>; ++i) x[i] = exp(x[i]);
  return x;
}

}  // namespace coterie::cpu::COTERIE_ISA
