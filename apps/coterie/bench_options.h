// SPDX-License-Identifier: MIT
// Options of `coterie bench`.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "bench/attention.h"

namespace CLI {
class App;
}

namespace coterie::cli {

struct BenchOptions {
  std::vector<std::string> attention;
  std::string lengths;  // empty: 512:4k, or all tokens of saved data
  std::int64_t heads = 8;
  std::int64_t kv_heads = 0;  // 0: same as heads
  std::int64_t dim = 64;
  std::int64_t batch = 1;
  bool causal = false;
  std::string device = "cpu";
  std::string pass = "both";
  std::string data = "mixture";
  std::string dtype = "f32";
  std::vector<int> threads;  // empty: the library's choice
  int repeats = 0;           // 0: as many as fit in `seconds`
  double seconds = 60;
  std::uint64_t seed = 1;
  bool gate = false;
  bool alone = false;
  std::string json;
  std::string title;
  std::vector<std::string> report;
};

void add_bench_options(CLI::App& verb, BenchOptions& options);

// The given options as a command line, without --json and --title.
std::string bench_command(const CLI::App& verb);

// Refuses options that would be ignored in combination with others.
void check_conflicts(const CLI::App& verb, const BenchOptions& options);

// The problem described by the options; N is only set for saved data.
bench::Problem make_problem(const BenchOptions& options);

// "512,1k,4k" or "1k:8k" (doubling), or both; ascending.
std::vector<std::int64_t> make_lengths(const BenchOptions& options, const bench::Problem& problem);

bench::Pass make_pass(const std::string& name);

// Throws an error that the program reports as a user's mistake.
[[noreturn]] void refuse_option(const std::string& option, const std::string& message);

}  // namespace coterie::cli
