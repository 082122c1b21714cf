// SPDX-License-Identifier: MIT
// Logs of runs (log.h) and output of `coterie bench --json` as structs. Fields missing in a file
// keep their defaults; unreadable lines are counted.
#pragma once

#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace coterie::train {

constexpr double kUnknown = std::numeric_limits<double>::quiet_NaN();

using Facts = std::vector<std::pair<std::string, std::string>>;
using NamedValues = std::vector<std::pair<std::string, double>>;

struct LoggedStep {
  std::int64_t step = 0;
  double loss = kUnknown, seconds = kUnknown, tokens_per_s = kUnknown, memory_bytes = kUnknown;
};

struct LoggedEvaluation {
  std::int64_t step = 0;
  std::string split;
  double metric = kUnknown;
  double share = 1;    // of the split's batches
  NamedValues strata;  // in the order of the first number in their names
};

// Whether a head is useless: one of two or more clusters has more than 90 % of the tokens, or the
// head keeps less than 1 % of full attention's mass.
bool has_collapsed(const std::vector<double>& cluster_sizes, double mass);

struct LoggedHead {
  std::vector<double> sizes;  // as HeadReport in inspect.h
  double empty = kUnknown, mass = kUnknown;
};

struct LoggedGroup {
  std::int64_t layer = 0, group = 0;
  std::string attention;
  std::vector<LoggedHead> heads;
};

struct LoggedEnd {
  std::string reason;
  double seconds = kUnknown, peak_memory_bytes = kUnknown;
};

struct RunLog {
  std::string folder;
  std::string task, attention, metric, config, date;
  std::int64_t parameters = 0, seed = 0;
  bool leaks = false;         // some heads see the future
  std::string data_checksum;  // empty: generated, or unknown
  Facts machine;
  NamedValues baselines;
  std::vector<LoggedStep> steps;
  std::vector<LoggedEvaluation> evaluations;
  std::optional<LoggedEvaluation> final_evaluation{};  // at the end, on all validation data
  std::vector<LoggedGroup> clusters;                   // of the last such line
  std::optional<LoggedEnd> end;                        // absent: still running, or killed
  std::int64_t unreadable = 0;                         // lines

  // The test score if there is one, otherwise that at the end of the run, otherwise the best on
  // valid; kUnknown without evaluations.
  double result() const;
  // The evaluation with that score; null without evaluations.
  const LoggedEvaluation* best_evaluation() const;
  // Training time up to a step: that of the last logged step not after it.
  double seconds_at(std::int64_t step) const;
  double seconds() const;
  std::int64_t last_step() const;
  double peak_memory_bytes() const;
  double tokens_per_s() const;  // median over the logged steps
};

// The run folders of `path`: itself if it has a log.jsonl, otherwise those inside it, sorted by
// name. Throws Error if there are none.
std::vector<std::string> find_runs(const std::string& path);

// std::nullopt if the log has no line of kind "run".
std::optional<RunLog> read_run(const std::string& folder);

struct BenchPoint {
  std::int64_t length = 0;
  double select_ms = kUnknown, attend_ms = kUnknown, forward_ms = kUnknown, backward_ms = kUnknown;
  double speed = kUnknown, error = kUnknown, extra_bytes = kUnknown;

  double total_ms() const;  // of the passes that were timed
};

struct BenchSeries {
  std::string attention, against;
  bool causal = false, opponent = false, leaks_future = false;
  std::int64_t threads = 0;           // 0: unknown
  std::vector<BenchPoint> points;     // lengths ascending
  std::optional<double> crossover{};  // faster from this length
};

struct BenchLog {
  std::string file;
  Facts facts;
  std::string pass;
  std::vector<BenchSeries> series;
  std::vector<std::string> refused;  // "attention: why it was not measured"
  std::int64_t unreadable = 0;
};

BenchLog read_bench(const std::string& path);

}  // namespace coterie::train
