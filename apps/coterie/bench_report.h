// SPDX-License-Identifier: MIT
// What `coterie bench` shows of its measurements.
#pragma once

#include <string>
#include <vector>

#include "bench/attention.h"

namespace coterie::cli {

struct BenchReport {
  bench::Problem problem;  // N is that of the last length
  bench::Pass pass = bench::Pass::both;
  std::vector<bench::Measurement> measurements;  // lengths ascending
};

void print_header(const BenchReport& report);
// The measurements of one length, beside full attention of the same causality.
void print_table(const std::vector<bench::Measurement>& measurements);
// From which length on each attention is faster than full attention, and where it loses.
void print_crossovers(const BenchReport& report);
// One JSON object per line: the run, each measurement, each crossover. The file appears when it is
// complete, or not at all.
void write_json(const BenchReport& report, const std::string& path);

}  // namespace coterie::cli
