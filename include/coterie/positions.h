// SPDX-License-Identifier: MIT
// Positions by sines and cosines, as rotations of rows (Su et al. 2021). Rows of (1, 0) become
// (cos, sin), from which sinusoidal and relative positions are made.
#pragma once

#include <cstdint>

#include "coterie/view.h"

namespace coterie {

struct Rotation {
  std::int64_t first = 0;  // position of row 0
  double base = 10000.0;
  bool inverse = false;  // turns back: the gradient of the rotation
};

// Elements d and d + D/2 of row n of x (B, H, N, D), D even, turned by the angle
// (first + n) * base^(-2 d / D): (a, b) becomes (a cos - b sin, a sin + b cos). Angles are computed
// in double, products in x's accumulator type; out, of x's shape and type, is rounded once. Strides
// are free but for a contiguous last dimension; out may be x. On the CPU or a GPU.
void rotate_rows(const TensorView& x, const Rotation& rotation, const TensorView& out,
                 const Workspace& workspace = {});

}  // namespace coterie
