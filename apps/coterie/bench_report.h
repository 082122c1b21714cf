// SPDX-License-Identifier: MIT
// Output of `coterie bench`.
#pragma once

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bench/attention.h"

namespace coterie::cli {

// An attention for which the device has no kernels.
struct Refused {
  std::string attention, reason;
};

struct BenchReport {
  std::string title, command;
  bench::Problem problem;  // N is that of the last length
  bench::Pass pass = bench::Pass::both;
  bool alone = false;        // without full attention, therefore without speeds
  std::vector<int> threads;  // of the CPU: the counts measured
  double copy_gbs = 0;       // copy bandwidth of the device
  double hamming_rate = 0;   // Hamming code pairs per second on one CPU thread; 0 on a GPU
  double load = 0;           // load average of the machine before the run
  bool gated = false;        // compared with the specification first
  std::vector<Refused> refused;
  std::vector<bench::Measurement> measurements;  // lengths ascending
};

// One attention over all lengths.
struct Series {
  std::string name;
  bench::Entry entry;
  int threads;
  std::vector<std::pair<double, double>> speeds;  // (length, against the baseline)
};
std::vector<Series> make_series(const std::vector<bench::Measurement>& measurements);

// The baseline of speeds at the same length, causality and thread count: the opponent's full
// attention if there is one, otherwise ours; null without either.
const bench::Measurement* baseline_beside(const bench::Measurement& measurement,
                                          const std::vector<bench::Measurement>& measurements);
// Speed over the baseline of all measured passes together, and of the forward pass.
std::optional<double> speed(const bench::Measurement& measurement,
                            const std::vector<bench::Measurement>& measurements);
std::optional<double> forward_speed(const bench::Measurement& measurement,
                                    const std::vector<bench::Measurement>& measurements);

// How much faster an attention is with the most threads than with the fewest.
struct Scaling {
  std::string name;
  std::int64_t N;
  int fewest, most;
  double factor;
};
std::vector<Scaling> make_scalings(const std::vector<bench::Measurement>& measurements);

const char* pass_name(bench::Pass pass);
const char* data_name(bench::DataKind data);

void print_header(const BenchReport& report);
// The measurements of one length, compared with full attention of the same causality.
void print_table(const std::vector<bench::Measurement>& measurements);
// The length from which each attention is faster than the baseline, and where it is slower.
void print_crossovers(const BenchReport& report);
void print_scalings(const BenchReport& report);
// One JSON object per line: the run, each refused attention, each measurement, each crossover. The
// file is written completely or not at all.
void write_json(const BenchReport& report, const std::string& path);
// Prints such files as Markdown on standard output.
void print_markdown(const std::vector<std::string>& paths);

}  // namespace coterie::cli
