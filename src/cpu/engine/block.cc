// SPDX-License-Identifier: MIT
#include "cpu/engine/block.h"

#include <cmath>
#include <vector>

#include "core/block_rows.h"
#include "core/half.h"
#include "core/parallel.h"

namespace coterie::cpu {
namespace {

// Rows of a contiguous (R, E) tensor of f32, bf16 or f16 as floats.
void load(const TensorView& from, std::int64_t row, float* to) {
  const std::int64_t E = from.size(1), begin = row * E;
  for (std::int64_t d = 0; d < E; ++d) {
    if (from.dtype == DType::f32) to[d] = static_cast<const float*>(from.data)[begin + d];
    if (from.dtype == DType::bf16) to[d] = to_float(static_cast<const Bf16*>(from.data)[begin + d]);
    if (from.dtype == DType::f16) to[d] = to_float(static_cast<const F16*>(from.data)[begin + d]);
  }
}

void store(const TensorView& to, std::int64_t row, const float* from) {
  const std::int64_t E = to.size(1), begin = row * E;
  for (std::int64_t d = 0; d < E; ++d) {
    if (to.dtype == DType::f32) static_cast<float*>(to.data)[begin + d] = from[d];
    if (to.dtype == DType::bf16) static_cast<Bf16*>(to.data)[begin + d] = to_bf16(from[d]);
    if (to.dtype == DType::f16) static_cast<F16*>(to.data)[begin + d] = to_f16(from[d]);
  }
}

float at(const TensorView& vector, std::int64_t d, float absent) {
  return vector.present() ? static_cast<const float*>(vector.data)[d] : absent;
}

// sums[d] += partial[s, d] over the slices in order.
void add_slices(const float* partial, std::int64_t slices, std::int64_t pitch,
                const TensorView& sums) {
  if (!sums.present()) return;
  auto* const to = static_cast<float*>(sums.data);
  for (std::int64_t d = 0; d < sums.size(0); ++d) {
    float sum = 0;
    for (std::int64_t s = 0; s < slices; ++s) sum += partial[s * pitch + d];
    to[d] = sum;
  }
}

// task(row, sums) for the rows of each slice in order; sums are those of the slice.
template <class Task>
void for_slices(std::int64_t rows, std::int64_t slices, std::int64_t pitch, float* partial,
                const Task& task) {
  parallel_for(slices, [&](std::int64_t slice, int) {
    float* const sums = partial + slice * pitch;
    for (std::int64_t i = 0; i < pitch; ++i) sums[i] = 0;
    for (std::int64_t row = slice; row < rows; row += slices) task(row, sums);
  });
}

}  // namespace

void add_norm(const AddNorm& in, const AddNormResult& result) {
  const std::int64_t E = in.x.size(1);
  parallel_for(in.x.size(0), [&](std::int64_t row, int) {
    std::vector<float> y(static_cast<std::size_t>(E)), other(y.size());
    load(in.x, row, y.data());
    if (in.branch.present()) {
      load(in.branch, row, other.data());
      for (std::size_t d = 0; d < y.size(); ++d) {
        y[d] += other[d] + at(in.branch_bias, static_cast<std::int64_t>(d), 0);
      }
      store(result.y, row, y.data());
    }
    float sum = 0, square = 0;
    for (const float value : y) sum += value;
    const float mean = sum / static_cast<float>(E);
    for (const float value : y) square += (value - mean) * (value - mean);
    const float scale =
        1.0f / std::sqrt(square / static_cast<float>(E) + static_cast<float>(in.eps));
    for (std::int64_t d = 0; d < E; ++d) {
      float& value = y[static_cast<std::size_t>(d)];
      value = (value - mean) * scale * at(in.gain, d, 1) + at(in.bias, d, 0);
    }
    store(result.out, row, y.data());
    static_cast<float*>(result.mean.data)[row] = mean;
    static_cast<float*>(result.scale.data)[row] = scale;
  });
}

void add_norm_backward(const AddNormBackward& in, const AddNormGradients& gradients,
                       float* partial) {
  const std::int64_t R = in.y.size(0), E = in.y.size(1), slices = norm_slices(R);
  for_slices(R, slices, 3 * E, partial, [&](std::int64_t row, float* sums) {
    std::vector<float> h(static_cast<std::size_t>(E)), g(h.size()), dx(h.size());
    load(in.y, row, h.data());
    load(in.grad_out, row, g.data());
    if (in.grad_y.present()) load(in.grad_y, row, dx.data());
    const float mean = at(in.mean, row, 0), scale = at(in.scale, row, 0);
    float sum = 0, product = 0;
    for (std::int64_t d = 0; d < E; ++d) {
      const auto i = static_cast<std::size_t>(d);
      h[i] = (h[i] - mean) * scale;
      sums[d] += g[i] * h[i];
      sums[E + d] += g[i];
      g[i] *= at(in.gain, d, 1);
      sum += g[i];
      product += g[i] * h[i];
    }
    for (std::int64_t d = 0; d < E; ++d) {
      const auto i = static_cast<std::size_t>(d);
      dx[i] +=
          scale * (g[i] - sum / static_cast<float>(E) - h[i] * (product / static_cast<float>(E)));
      sums[2 * E + d] += dx[i];
    }
    store(gradients.dx, row, dx.data());
    if (gradients.dbranch.present()) store(gradients.dbranch, row, dx.data());
  });
  add_slices(partial, slices, 3 * E, gradients.dgain);
  add_slices(partial + E, slices, 3 * E, gradients.dbias);
  add_slices(partial + 2 * E, slices, 3 * E, gradients.dbranch_bias);
}

void bias_gelu(const TensorView& x, const TensorView& bias, const TensorView& out) {
  parallel_for(x.size(0), [&](std::int64_t row, int) {
    std::vector<float> values(static_cast<std::size_t>(x.size(1)));
    load(x, row, values.data());
    for (std::int64_t d = 0; d < x.size(1); ++d) {
      float& value = values[static_cast<std::size_t>(d)];
      value += at(bias, d, 0);
      value *= 0.5f * std::erfc(-value * 0.70710678f);
    }
    store(out, row, values.data());
  });
}

void bias_gelu_backward(const TensorView& x, const TensorView& bias, const TensorView& grad_out,
                        const TensorView& dx, const TensorView& dbias, float* partial) {
  const std::int64_t R = x.size(0), F = x.size(1), slices = gelu_slices(R, F);
  for_slices(R, slices, F, partial, [&](std::int64_t row, float* sums) {
    std::vector<float> values(static_cast<std::size_t>(F)), grad(values.size());
    load(x, row, values.data());
    load(grad_out, row, grad.data());
    for (std::int64_t d = 0; d < F; ++d) {
      const auto i = static_cast<std::size_t>(d);
      const float v = values[i] + at(bias, d, 0);
      const float density = 0.39894228f * std::exp(-0.5f * v * v);
      values[i] = grad[i] * (0.5f * std::erfc(-v * 0.70710678f) + v * density);
      sums[d] += values[i];
    }
    store(dx, row, values.data());
  });
  add_slices(partial, slices, F, dbias);
}

void sum_rows(const TensorView& x, const TensorView& sums, float* partial) {
  const std::int64_t R = x.size(0), F = x.size(1), slices = gelu_slices(R, F);
  for_slices(R, slices, F, partial, [&](std::int64_t row, float* own) {
    std::vector<float> values(static_cast<std::size_t>(F));
    load(x, row, values.data());
    for (std::int64_t d = 0; d < F; ++d) own[d] += values[static_cast<std::size_t>(d)];
  });
  add_slices(partial, slices, F, sums);
}

}  // namespace coterie::cpu
