// SPDX-License-Identifier: MIT
// Positions on torch tensors: rows rotated by the angles of their positions
// (coterie/positions.h), sinusoids, and relative positions as a term of the logits (Dai et al.
// 2019). Rows are (B, H, N, D).
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace coterie::torch_api {

// Positions from `first` on.
struct PositionOptions {
  std::int64_t first = 0;
  double base = 0;
};

// Differentiable.
at::Tensor rotated(const at::Tensor& x_BHND, const PositionOptions& options);

// Cosines, then sines of the angles of N positions: (1, 1, N, width), of the type and on the device
// of `like`.
at::Tensor waves(std::int64_t N, std::int64_t width, const PositionOptions& options,
                 const at::Tensor& like);

// Relative positions: the logits of query i and key j get (weight q_i + bias_h) . r_(i-j), where
// r_t holds the sines and cosines of distance t. With (a, c) = weight q_i + bias_h,
//   a sin(wi - wj) + c cos(wi - wj) = (a sin wi + c cos wi) cos wj + (c sin wi - a cos wi) sin wj
// is the product of (c, -a) rotated by i and (1, 0) rotated by j: F more elements of q_i and of
// k_j, and any attention over the widened rows has it. weight (F, D), bias (h, F).
struct RelativePositions {
  at::Tensor weight, bias;
};
at::Tensor widened_queries(const at::Tensor& q_BHND, const RelativePositions& relative,
                           const PositionOptions& options);
at::Tensor widened_keys(const at::Tensor& k_BHND, std::int64_t width,
                        const PositionOptions& options);

}  // namespace coterie::torch_api
