// SPDX-License-Identifier: MIT
// What `coterie bench` shows of its measurements.
#pragma once

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bench/attention.h"

namespace coterie::cli {

struct BenchReport {
  bench::Problem problem;  // N is that of the last length
  bench::Pass pass = bench::Pass::both;
  double copy_gbs = 0;                           // the machine's copying speed
  bool gated = false;                            // compared with the specification before
  std::vector<bench::Measurement> measurements;  // lengths ascending
};

// One attention over all lengths.
struct Series {
  std::string name;
  bench::Entry entry;
  std::vector<std::pair<double, double>> speeds;  // (length, against the baseline)
};
std::vector<Series> make_series(const std::vector<bench::Measurement>& measurements);

// The measurement that speeds are against, at the same length and with the same causality: the
// opponent's full attention where there is one, else ours.
const bench::Measurement& baseline_beside(const bench::Measurement& measurement,
                                          const std::vector<bench::Measurement>& measurements);
double speed(const bench::Measurement& measurement,
             const std::vector<bench::Measurement>& measurements);

const char* pass_name(bench::Pass pass);
const char* data_name(bench::DataKind data);

void print_header(const BenchReport& report);
// The measurements of one length, beside full attention of the same causality.
void print_table(const std::vector<bench::Measurement>& measurements);
// From which length on each attention is faster than the baseline, and where it loses.
void print_crossovers(const BenchReport& report);
// One JSON object per line: the run, each measurement, each crossover. The file appears when it is
// complete, or not at all.
void write_json(const BenchReport& report, const std::string& path);

}  // namespace coterie::cli
