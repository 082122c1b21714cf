// SPDX-License-Identifier: MIT
#include "positions.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/linear.h>

#include <cmath>

namespace coterie::torch_api {

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

at::Tensor rotated(const at::Tensor& x_BNHD, const Waves& waves) {
  const std::int64_t half = x_BNHD.size(3) / 2;
  const at::Tensor a = x_BNHD.narrow(3, 0, half), b = x_BNHD.narrow(3, half, half);
  return at::cat({a * waves.cos - b * waves.sin, a * waves.sin + b * waves.cos}, 3);
}

at::Tensor widened_queries(const at::Tensor& q_BNHD, const RelativePositions& relative,
                           const Waves& waves) {
  const at::Tensor term =
      (at::linear(q_BNHD, relative.weight) + relative.bias).to(q_BNHD.scalar_type());
  const std::int64_t half = term.size(3) / 2;
  const at::Tensor a = term.narrow(3, 0, half), c = term.narrow(3, half, half);
  return at::cat({q_BNHD, a * waves.sin + c * waves.cos, c * waves.sin - a * waves.cos}, 3);
}

at::Tensor widened_keys(const at::Tensor& k_BNHD, const Waves& waves) {
  const at::Tensor features = at::cat({waves.cos, waves.sin}, 2);
  const auto sizes = k_BNHD.sizes();
  return at::cat({k_BNHD, features.expand({sizes[0], sizes[1], sizes[2], features.size(2)})}, 3);
}

}  // namespace coterie::torch_api
