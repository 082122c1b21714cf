// SPDX-License-Identifier: MIT
#include "train/schedule.h"

#include <algorithm>
#include <cmath>
#include <numbers>

namespace coterie::train {

double rate_factor(const ScheduleConfig& schedule, std::int64_t step, std::int64_t steps) {
  const double t = static_cast<double>(step), w = static_cast<double>(schedule.warmup);
  if (step <= schedule.warmup) return t / w;
  if (schedule.decay == "rsqrt") return std::sqrt(std::max(w, 1.0) / t);
  if (schedule.decay == "constant") return 1.0;
  const double progress = std::min(1.0, (t - w) / (static_cast<double>(steps) - w));
  const double cosine = (1.0 + std::cos(std::numbers::pi * progress)) / 2.0;
  return schedule.floor + (1.0 - schedule.floor) * cosine;
}

}  // namespace coterie::train
