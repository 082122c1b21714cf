// SPDX-License-Identifier: MIT
// The Laplace attention function of MEGA (Ma et al. 2022); see Weighting in engine/segment.h.
#pragma once

#include <cmath>

namespace coterie::cpu {

// Reaches 0 and 1 exactly, so that distant tokens are tied in a selection; erfc, which does not
// cancel for small weights, would rank them by insignificant differences.
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

}  // namespace coterie::cpu
