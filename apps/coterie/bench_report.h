// SPDX-License-Identifier: MIT
// What `coterie bench` shows of its measurements.
#pragma once

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bench/attention.h"

namespace coterie::cli {

// An attention that the device has no kernels for.
struct Refused {
  std::string attention, reason;
};

struct BenchReport {
  std::string title, command;
  bench::Problem problem;  // N is that of the last length
  bench::Pass pass = bench::Pass::both;
  bool alone = false;        // without full attention beside, so without speeds
  std::vector<int> threads;  // of the CPU: the counts measured
  double copy_gbs = 0;       // the device's copying speed
  double hamming_rate = 0;   // the CPU's pairs of codes per second, one thread; 0 on a GPU
  double load = 0;           // of the machine before, by others: processes that want to run
  bool gated = false;        // compared with the specification before
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

// The measurement that speeds are against, at the same length, with the same causality and number
// of threads: the opponent's full attention where there is one, else ours; null without either.
const bench::Measurement* baseline_beside(const bench::Measurement& measurement,
                                          const std::vector<bench::Measurement>& measurements);
// Of the measured passes together, and of the forward pass.
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
// The measurements of one length, beside full attention of the same causality.
void print_table(const std::vector<bench::Measurement>& measurements);
// From which length on each attention is faster than the baseline, and where it loses.
void print_crossovers(const BenchReport& report);
void print_scalings(const BenchReport& report);
// One JSON object per line: the run, each refused attention, each measurement, each crossover. The
// file appears when it is complete, or not at all.
void write_json(const BenchReport& report, const std::string& path);
// Markdown of such files on the standard output.
void print_markdown(const std::vector<std::string>& paths);

}  // namespace coterie::cli
