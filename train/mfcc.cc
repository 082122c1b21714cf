// SPDX-License-Identifier: MIT
#include "train/mfcc.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/cos.h>
#include <ATen/ops/hamming_window.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/minimum.h>
#include <ATen/ops/outer.h>
#include <ATen/ops/sin.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <cmath>
#include <numbers>

namespace coterie::train {
namespace {

constexpr std::int64_t kBands = 26;

double mel_of(double hertz) { return 1127.0 * std::log1p(hertz / 700.0); }

// (bins, bands): triangles whose corners are evenly spaced in mel.
at::Tensor mel_filters(std::int64_t bins, std::int64_t rate) {
  const auto options = at::TensorOptions().dtype(at::kDouble);
  const double highest = static_cast<double>(rate) / 2;
  const at::Tensor mels = at::arange(kBands + 2, options) * (mel_of(highest) / (kBands + 1));
  const at::Tensor corners = ((mels / 1127.0).exp() - 1.0) * 700.0;
  const at::Tensor bin =
      (at::arange(bins, options) * (highest / static_cast<double>(bins - 1))).unsqueeze(1);
  const at::Tensor low = corners.narrow(0, 0, kBands), middle = corners.narrow(0, 1, kBands),
                   high = corners.narrow(0, 2, kBands);
  const at::Tensor rise = (bin - low) / (middle - low), fall = (high - bin) / (high - middle);
  return at::minimum(rise, fall).clamp_min(0.0);
}

// Least-squares slopes of the columns.
at::Tensor slopes(const at::Tensor& x) {
  const std::int64_t T = x.size(0);
  const at::Tensor at_frame = at::arange(T, at::kLong);
  const auto shifted = [&](std::int64_t by) {
    return x.index_select(0, (at_frame + by).clamp(0, T - 1));
  };
  at::Tensor sum = at::zeros_like(x);
  for (std::int64_t k = 1; k <= 2; ++k)
    sum = sum + (shifted(k) - shifted(-k)) * static_cast<double>(k);
  return sum / 10.0;  // 2 (1 + 4)
}

}  // namespace

at::Tensor cepstra(const at::Tensor& samples, std::int64_t rate) {
  const std::int64_t window = rate / 40, hop = rate / 100, bins = window / 2 + 1;
  const auto options = at::TensorOptions().dtype(at::kDouble);
  const std::int64_t missing = std::max<std::int64_t>(0, window - samples.size(0));
  const at::Tensor frames =
      at::constant_pad_nd(samples.to(at::kDouble), {0, missing}).unfold(0, window, hop) *
      at::hamming_window(window, options);
  const at::Tensor angles = at::outer(at::arange(window, options), at::arange(bins, options)) *
                            (2 * std::numbers::pi / static_cast<double>(window));
  const at::Tensor power =
      at::matmul(frames, at::cos(angles)).square() + at::matmul(frames, at::sin(angles)).square();
  const at::Tensor bands = at::matmul(power, mel_filters(bins, rate)).clamp_min(1e-10).log();
  const at::Tensor waves =
      at::cos(at::outer(at::arange(kBands, options) + 0.5, at::arange(kCepstra, options)) *
              (std::numbers::pi / kBands));
  return at::matmul(bands, waves).to(at::kFloat);
}

at::Tensor speech_features(const at::Tensor& cepstra) {
  const at::Tensor slope = slopes(cepstra);
  const at::Tensor all = at::cat({cepstra, slope, slopes(slope)}, 1);
  const at::Tensor centred = all - all.mean(0, /*keepdim=*/true);
  const at::Tensor deviation = centred.square().mean(0, /*keepdim=*/true).sqrt();
  return centred / deviation.clamp_min(1e-5);
}

}  // namespace coterie::train
