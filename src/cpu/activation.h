// SPDX-License-Identifier: MIT
// The two attention functions of CAST over the tiles of segment.h: softmax, and laplace (MEGA, Ma
// et al. 2022), which turns each score into a weight of its own without normalising:
//   f(x) = (1 + erf((x - mu) / (sigma sqrt 2))) / 2,  mu = sqrt(1/2), sigma = sqrt(1/(4 pi))
#pragma once

#include <cmath>
#include <cstdint>

#include "coterie/mechanism.h"
#include "cpu/segment.h"

namespace coterie::cpu {

// Exactly 0 and 1 far from mu: selections by it depend on where that begins, so it is computed as
// it is written above.
template <class T>
T laplace(T x) {
  constexpr T mu = T(0.70710678118654752440), sqrt_two_pi = T(2.5066282746310005024);
  return (1 + std::erf((x - mu) * sqrt_two_pi)) / 2;  // sqrt(2 pi) = 1 / (sigma sqrt 2)
}

// exp(-(x - mu)^2 / (2 sigma^2)) / (sigma sqrt(2 pi)).
template <class T>
T laplace_slope(T x) {
  constexpr T mu = T(0.70710678118654752440), two_pi = T(6.2831853071795864769);
  return std::exp(-two_pi * (x - mu) * (x - mu)) * 2 * mu;
}

// The functions of segment.h for one attention function. Laplace has no log-sum-exps: it leaves
// Tiles::lse alone and reads neither RowGradients::lse nor ::delta.
template <class T>
struct Activation {
  void (*forward)(const Segment<T>& segment, std::int64_t first, std::int64_t count,
                  Tiles<T>& tiles, const TileHook<T>* hook);
  void (*backward_query)(const Segment<T>& segment, const RowGradients<T>& rows, std::int64_t first,
                         std::int64_t count, Tiles<T>& tiles, const TileHook<T>* hook);
  void (*backward_key)(const Segment<T>& segment, const RowGradients<T>& rows, std::int64_t first,
                       std::int64_t count, Tiles<T>& tiles, const TileHook<T>* hook);
  void (*delta)(const Segment<T>& segment, const RowGradients<T>& rows, std::int64_t first,
                std::int64_t count, Tiles<T>& tiles);
};

template <class T>
Activation<T> activation(CastActivation function);

}  // namespace coterie::cpu
