// SPDX-License-Identifier: MIT
#include "bench/driver.h"

#include <algorithm>
#include <chrono>
#include <cmath>

namespace coterie::bench {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

Timing summary(const std::vector<double>& samples_ms) {
  return {.median_ms = quantile(samples_ms, 0.5),
          .p20_ms = quantile(samples_ms, 0.2),
          .p80_ms = quantile(samples_ms, 0.8),
          .repeats = static_cast<int>(samples_ms.size())};
}

}  // namespace

double quantile(std::vector<double> values, double share) {
  if (values.empty()) return 0;
  std::sort(values.begin(), values.end());
  const double place = share * static_cast<double>(values.size() - 1);
  const std::size_t below = static_cast<std::size_t>(std::floor(place));
  const std::size_t above = std::min(below + 1, values.size() - 1);
  const double part = place - static_cast<double>(below);
  return values[below] + part * (values[above] - values[below]);
}

std::vector<Timing> time_interleaved(const std::vector<Contender>& contenders,
                                     const TimingPlan& plan, const Progress& progress) {
  std::vector<std::vector<double>> samples_ms(contenders.size());
  const Clock::time_point start = Clock::now();
  const int rounds = plan.warmups + plan.repeats;
  for (int round = 0; round < rounds; ++round) {
    const bool enough = round >= plan.warmups + plan.min_repeats;
    if (enough && plan.seconds > 0 && seconds_since(start) > plan.seconds) break;
    for (std::size_t i = 0; i < contenders.size(); ++i) {
      if (progress) progress(contenders[i], round + 1, rounds);
      const Clock::time_point begin = Clock::now();
      contenders[i].run();
      const double elapsed_ms = 1e3 * seconds_since(begin);
      if (round >= plan.warmups) samples_ms[i].push_back(elapsed_ms);
    }
  }
  std::vector<Timing> timings;
  for (const auto& samples : samples_ms) timings.push_back(summary(samples));
  return timings;
}

}  // namespace coterie::bench
