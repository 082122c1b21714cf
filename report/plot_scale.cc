// SPDX-License-Identifier: MIT
#include "report/plot_scale.h"

#include <algorithm>
#include <cmath>

namespace coterie::train {

namespace {

constexpr double kLargest = 1e30;   // larger values are not drawn
constexpr double kMargin = 0.03;    // of the axis, on both sides of the data
constexpr double kRounding = 1e-9;  // relative to the tick distance

std::vector<double> linear_ticks(const Scale& scale, int wanted) {
  const double raw = (scale.high - scale.low) / wanted;
  const double power = std::pow(10.0, std::floor(std::log10(raw)));
  const double share = raw / power;
  const double step = power * (share <= 1 ? 1 : share <= 2 ? 2 : share <= 5 ? 5 : 10);
  std::vector<double> all;
  const double first = std::ceil(scale.low / step - kRounding);
  const double last = std::floor(scale.high / step + kRounding);
  for (double index = first; index <= last; ++index) all.push_back(index * step + 0.0);  // no -0
  return all;
}

std::vector<double> log_ticks(const Scale& scale, int wanted) {
  const double decades = std::log10(scale.high / scale.low);
  const int stride = std::max(1, static_cast<int>(std::ceil(decades / wanted)));
  const bool fine = 3 * decades <= 1.5 * wanted;  // ticks at 2 and 5 fit as well
  std::vector<double> all;
  const int first = static_cast<int>(std::floor(std::log10(scale.low)));
  const int last = static_cast<int>(std::ceil(std::log10(scale.high)));
  for (int power = first; power <= last; power += stride) {
    for (const double digit : {1.0, 2.0, 5.0}) {
      const double tick = digit * std::pow(10.0, power);
      const bool inside =
          tick >= scale.low * (1 - kRounding) && tick <= scale.high * (1 + kRounding);
      if (inside && (fine || digit == 1.0)) all.push_back(tick);
    }
  }
  return all;
}

}  // namespace

double Scale::share(double value) const {
  if (kind == ScaleKind::linear) return (value - low) / (high - low);
  return std::log(value / low) / std::log(high / low);
}

bool drawable(ScaleKind kind, double value) {
  if (!std::isfinite(value) || std::abs(value) > kLargest) return false;
  return kind == ScaleKind::linear || value > 1 / kLargest;
}

Scale scale_over(ScaleKind kind, const std::vector<double>& values) {
  const bool log = kind == ScaleKind::log;
  Scale scale{.kind = kind, .low = kLargest, .high = -kLargest};
  for (const double value : values) {
    if (!drawable(kind, value)) continue;
    scale.low = std::min(scale.low, value);
    scale.high = std::max(scale.high, value);
  }
  if (scale.low > scale.high) return {.kind = kind, .low = log ? 1.0 : 0.0, .high = log ? 10 : 1.0};
  if (log) {
    const double ratio = scale.high / scale.low;
    const double factor = ratio > 1 + kRounding ? std::pow(ratio, kMargin) : 2;
    return {.kind = kind, .low = scale.low / factor, .high = scale.high * factor};
  }
  const double size = std::max(std::abs(scale.low), std::abs(scale.high));
  const double width = scale.high - scale.low;
  const double margin = width > kRounding * size ? kMargin * width : size > 0 ? 0.1 * size : 0.5;
  return {.kind = kind, .low = scale.low - margin, .high = scale.high + margin};
}

std::vector<double> ticks(const Scale& scale, int wanted) {
  std::vector<double> all;
  if (scale.kind == ScaleKind::log) all = log_ticks(scale, wanted);
  // A narrow log scale, with fewer than two log ticks, gets linear ones.
  return all.size() >= 2 ? all : linear_ticks(scale, wanted);
}

}  // namespace coterie::train
