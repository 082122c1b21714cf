// SPDX-License-Identifier: MIT
// Positions by sines and cosines: added to embeddings, rotating rows (Su et al. 2021), or relative
// ones as a term of the logits (Dai et al. 2019). Angles are position * base^(-2 f / width), in
// double.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace coterie::torch_api {

// Sines and cosines of the angles, (N, 1, width / 2) each: they broadcast over heads.
struct Waves {
  at::Tensor sin, cos;
};
// Of positions [first, first + N), of the type and on the device of `like`.
Waves make_waves(std::int64_t first, std::int64_t N, std::int64_t width, double base,
                 const at::Tensor& like);

// Elements d and d + D/2 of each row turned by the angle of its position.
at::Tensor rotated(const at::Tensor& x_BNHD, const Waves& waves);

// Relative positions: the logits of query i and key j get (weight q_i + bias_h) . r_(i-j), where
// r_t holds the sines and cosines of distance t. As
//   a sin(wi - wj) + c cos(wi - wj) = (a sin wi + c cos wi) cos wj + (c sin wi - a cos wi) sin wj
// the term is an inner product of F more elements of q_i and of k_j, and any attention over the
// widened rows has it. weight (F, D), bias (h, F), waves of width F.
struct RelativePositions {
  at::Tensor weight, bias;
};
at::Tensor widened_queries(const at::Tensor& q_BNHD, const RelativePositions& relative,
                           const Waves& waves);
at::Tensor widened_keys(const at::Tensor& k_BNHD, const Waves& waves);

}  // namespace coterie::torch_api
