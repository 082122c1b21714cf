// SPDX-License-Identifier: MIT
#include "positions.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/linear.h>

#include <cmath>

namespace coterie::torch_api {
namespace {

struct Waves {
  at::Tensor sin, cos;  // (N, 1, width / 2): they broadcast over heads
};

Waves make_waves(std::int64_t first, std::int64_t N, std::int64_t width, double base,
                 const at::Tensor& like) {
  const at::TensorOptions options = like.options().dtype(at::kDouble);
  const at::Tensor positions = at::arange(first, first + N, options);
  const at::Tensor frequencies =
      (at::arange(width / 2, options) * (-2.0 * std::log(base) / static_cast<double>(width))).exp();
  const at::Tensor angles = positions.unsqueeze(1) * frequencies;
  const auto cast = [&](const at::Tensor& wave) {
    return wave.to(like.scalar_type()).unsqueeze(1);
  };
  return {cast(angles.sin()), cast(angles.cos())};
}

}  // namespace

at::Tensor sinusoids(std::int64_t first, std::int64_t N, std::int64_t width, double base,
                     const at::Tensor& like) {
  const Waves waves = make_waves(first, N, width, base, like);
  return at::cat({waves.sin, waves.cos}, -1).squeeze(1);
}

at::Tensor rotated(const at::Tensor& x_BNHD, std::int64_t first, double base) {
  const std::int64_t D = x_BNHD.size(3);
  const Waves waves = make_waves(first, x_BNHD.size(1), D, base, x_BNHD);
  const at::Tensor a = x_BNHD.narrow(3, 0, D / 2), b = x_BNHD.narrow(3, D / 2, D / 2);
  return at::cat({a * waves.cos - b * waves.sin, a * waves.sin + b * waves.cos}, 3);
}

at::Tensor widened_queries(const at::Tensor& q_BNHD, const RelativePositions& relative,
                           std::int64_t first, double base) {
  const std::int64_t F = relative.weight.size(0);
  const Waves waves = make_waves(first, q_BNHD.size(1), F, base, q_BNHD);
  const at::Tensor term =
      (at::linear(q_BNHD, relative.weight) + relative.bias).to(q_BNHD.scalar_type());
  const at::Tensor a = term.narrow(3, 0, F / 2), c = term.narrow(3, F / 2, F / 2);
  return at::cat({q_BNHD, a * waves.sin + c * waves.cos, c * waves.sin - a * waves.cos}, 3);
}

at::Tensor widened_keys(const at::Tensor& k_BNHD, std::int64_t width, std::int64_t first,
                        double base) {
  const std::int64_t B = k_BNHD.size(0), N = k_BNHD.size(1), heads = k_BNHD.size(2);
  const Waves waves = make_waves(first, N, width, base, k_BNHD);
  const at::Tensor features = at::cat({waves.cos, waves.sin}, 2);
  return at::cat({k_BNHD, features.expand({B, N, heads, width})}, 3);
}

}  // namespace coterie::torch_api
