// SPDX-License-Identifier: MIT
#include "bench/driver.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <thread>

namespace coterie::bench {
namespace {

using Clock = std::chrono::steady_clock;

// Pause before every run: OpenMP threads spin for about a millisecond after their work, on cores
// that the next run needs.
constexpr std::chrono::milliseconds kPause(2);

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

Timing summary(const std::vector<double>& samples_ms) {
  return {.median_ms = quantile(samples_ms, 0.5),
          .p20_ms = quantile(samples_ms, 0.2),
          .p80_ms = quantile(samples_ms, 0.8),
          .fastest_ms = quantile(samples_ms, 0),
          .repeats = static_cast<int>(samples_ms.size())};
}

// Times of a contender's rounds in milliseconds.
struct Samples {
  std::vector<double> total;
  std::vector<std::vector<double>> stages;

  explicit Samples(const Contender& contender) : stages(contender.stages.size()) {}

  void add(const std::vector<double>& stages_ms) {
    double sum = 0;
    for (std::size_t s = 0; s < stages_ms.size(); ++s) {
      stages[s].push_back(stages_ms[s]);
      sum += stages_ms[s];
    }
    total.push_back(sum);
  }
};

}  // namespace

std::vector<double> time_by_steady_clock(const Contender& contender) {
  std::this_thread::sleep_for(kPause);
  std::vector<double> stages_ms;
  for (const auto& stage : contender.stages) {
    const Clock::time_point begin = Clock::now();
    stage();
    stages_ms.push_back(1e3 * seconds_since(begin));
  }
  return stages_ms;
}

double quantile(std::vector<double> values, double share) {
  if (values.empty()) return 0;
  std::sort(values.begin(), values.end());
  const double place = share * static_cast<double>(values.size() - 1);
  const std::size_t below = static_cast<std::size_t>(std::floor(place));
  const std::size_t above = std::min(below + 1, values.size() - 1);
  const double part = place - static_cast<double>(below);
  return values[below] + part * (values[above] - values[below]);
}

std::vector<StagedTiming> time_interleaved(const std::vector<Contender>& contenders,
                                           const TimingPlan& plan, const Progress& progress,
                                           const Stopwatch& stopwatch) {
  std::vector<Samples> samples(contenders.begin(), contenders.end());
  const Clock::time_point start = Clock::now();
  const int rounds = plan.warmups + plan.repeats;
  for (int round = 0; round < rounds; ++round) {
    const bool enough = round >= plan.warmups + plan.min_repeats;
    if (enough && plan.seconds > 0 && seconds_since(start) > plan.seconds) break;
    for (std::size_t i = 0; i < contenders.size(); ++i) {
      if (progress) progress(contenders[i], round + 1, rounds);
      if (contenders[i].prepare) contenders[i].prepare();
      const std::vector<double> stages_ms = stopwatch(contenders[i]);
      if (round >= plan.warmups) samples[i].add(stages_ms);
    }
  }
  std::vector<StagedTiming> timings;
  for (const Samples& one : samples) {
    StagedTiming& timing = timings.emplace_back();
    timing.total = summary(one.total);
    for (const auto& stage : one.stages) timing.stages.push_back(summary(stage));
  }
  return timings;
}

}  // namespace coterie::bench
