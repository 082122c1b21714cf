// SPDX-License-Identifier: MIT
// Axes of plots: mapping of values to positions, and ticks.
#pragma once

#include <vector>

namespace coterie::train {

enum class ScaleKind : unsigned char { linear, log };

struct Scale {
  ScaleKind kind = ScaleKind::linear;
  double low = 0, high = 1;  // low < high; log: low > 0

  double share(double value) const;  // 0 at low, 1 at high
};

// Whether a value can be drawn: finite, at most 1e30 in size, and positive on a log scale.
bool drawable(ScaleKind kind, double value);

// A scale over the values that can be drawn, with a small margin. Without values: 0 to 1, or 1 to
// 10 (log).
Scale scale_over(ScaleKind kind, const std::vector<double>& values);

// Round numbers inside the scale, about `wanted` of them: 1, 2 or 5 times powers of ten.
std::vector<double> ticks(const Scale& scale, int wanted);

}  // namespace coterie::train
