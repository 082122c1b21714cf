// SPDX-License-Identifier: MIT
// The timing driver. Contenders take turns (A B C, A B C, ...), so that other load on the machine
// affects all of them alike; a result is the median with its spread.
#pragma once

#include <functional>
#include <string>
#include <vector>

namespace coterie::bench {

// Something to time: stages that run one after the other.
struct Contender {
  std::string name;
  std::vector<std::function<void()>> stages;
  std::function<void()> prepare{};  // called before every run, not timed
};

// Runs the stages of a contender once and returns the milliseconds of each.
using Stopwatch = std::function<std::vector<double>(const Contender& contender)>;
std::vector<double> time_by_steady_clock(const Contender& contender);

struct TimingPlan {
  int warmups = 1;      // rounds that are not counted
  int repeats = 20;     // rounds, unless time runs out
  int min_repeats = 3;  // rounds to run in any case
  double seconds = 0;   // no further round starts after this time; 0 = no limit
};

struct Timing {
  double median_ms = 0, p20_ms = 0, p80_ms = 0, fastest_ms = 0;
  int repeats = 0;
};

// All stages of a contender together, and each of them.
struct StagedTiming {
  Timing total;
  std::vector<Timing> stages;
};

// Called before each run with the contender, the round and the number of rounds planned.
using Progress = std::function<void(const Contender& contender, int round, int rounds)>;

// One per contender.
std::vector<StagedTiming> time_interleaved(const std::vector<Contender>& contenders,
                                           const TimingPlan& plan, const Progress& progress = {},
                                           const Stopwatch& stopwatch = time_by_steady_clock);

// The value below which a share (0..1) of `values` lies, linearly interpolated between neighbours.
double quantile(std::vector<double> values, double share);

}  // namespace coterie::bench
