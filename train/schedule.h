// SPDX-License-Identifier: MIT
// The learning rate of each step.
#pragma once

#include <cstdint>

#include "train/config.h"

namespace coterie::train {

// The learning-rate factor in step t = 1 ... steps, with w warm-up steps:
//   t <= w      t / w
//   constant    1
//   rsqrt       sqrt(max(w, 1) / t)
//   cosine      floor + (1 - floor) (1 + cos(pi (t - w) / (steps - w))) / 2
double rate_factor(const ScheduleConfig& schedule, std::int64_t step, std::int64_t steps);

}  // namespace coterie::train
