// SPDX-License-Identifier: MIT
// coterie bench: time, error and memory of attentions compared with full attention.
#include <fmt/core.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "bench/device.h"
#include "bench/gate.h"
#include "bench/peak.h"
#include "bench_options.h"
#include "bench_report.h"
#include "coterie/error.h"
#include "coterie/runtime.h"
#include "verbs.h"

namespace coterie::cli {
namespace {

// The default set: every mechanism, and the causal forms of those that have one.
std::vector<bench::Entry> default_entries(bool causal_only) {
  std::vector<bench::Entry> entries;
  const std::vector<std::string> open = {"local(window=256)",
                                         "strided(stride=32)",
                                         "oracle-top",
                                         "clustered(clusters=100)",
                                         "i-clustered(clusters=100)",
                                         "i-clustered(clusters=100,clustering=hamming-keys)",
                                         "lsh(combine=mean)",
                                         "routing(clusters=16,window=256)",
                                         "routing(clusters=16,membership=balanced)",
                                         "cast(clusters=16,size=256)"};
  const std::vector<std::string> causal = {
      "local(window=256)", "routing(clusters=16,window=256,causal=strict)",
      "routing(clusters=16,window=256,causal=paper)", "i-clustered(clusters=100,causal=reference)",
      "lsh(combine=mean)"};
  for (const std::string& spec : open) {
    if (!causal_only) entries.push_back(bench::make_entry(spec, false));
  }
  for (const std::string& spec : causal) entries.push_back(bench::make_entry(spec, true));
  return entries;
}

// The attentions to measure: the wanted ones and, unless options.alone, full attention of each
// causality that occurs. Attentions that the device cannot run are listed in report.refused if they
// come from the default set, and are an error if the user named them.
std::vector<bench::Entry> make_entries(const BenchOptions& options, BenchReport& report) {
  std::vector<bench::Entry> wanted;
  for (const std::string& spec : options.attention) {
    wanted.push_back(bench::make_entry(spec, options.causal));
  }
  if (wanted.empty()) wanted = default_entries(options.causal);
  std::vector<bench::Entry> entries;
  const auto add = [&](const bench::Entry& entry, bool named) {
    const std::string reason = bench::refusal(entry, report.problem);
    if (reason.empty()) return entries.push_back(entry);
    if (named) throw Error(reason);
    const std::string name = entry.spec.to_string() + (entry.causal ? ", causal" : "");
    report.refused.push_back({name, reason});
  };
  for (const bool causal : {false, true}) {
    const bool occurs = std::any_of(wanted.begin(), wanted.end(), [&](const bench::Entry& entry) {
      return entry.causal == causal;
    });
    if (occurs && !options.alone) add(bench::make_entry("full", causal), false);
  }
  for (const bench::Entry& entry : wanted) {
    entry.spec.head_counts(report.problem.heads);  // refuses counts that do not add up
    if (options.alone || !bench::is_full(entry)) add(entry, !options.attention.empty());
  }
  return entries;
}

// Shows what is being run; prints nothing if stderr is not a terminal.
void show_progress(const std::string& text) {
  static const bool terminal = isatty(STDERR_FILENO) != 0;
  if (!terminal) return;
  fmt::print(stderr, "\r\x1b[K{:.78}", text);  // back to the start, clear
  std::fflush(stderr);
}

// The time budget of one length: its share of the remaining time.
bench::TimingPlan make_timing(const BenchOptions& options, double seconds_left, double share) {
  if (options.repeats > 0) {
    return {.repeats = options.repeats, .min_repeats = options.repeats, .seconds = 0};
  }
  const bool on_gpu = options.device == "cuda";
  return {
      .warmups = on_gpu ? 3 : 1,
      .repeats = on_gpu ? 50 : 20,
      .min_repeats = on_gpu ? 5 : 1,  // full attention of 64k tokens: 0.15 s on a GPU, 100 on a CPU
      .seconds = std::max(0.001, seconds_left * share)};
}

void check_json_path(const std::string& path) {
  if (path.empty()) return;
  if (!std::filesystem::is_directory(std::filesystem::absolute(path).parent_path())) {
    refuse_option("--json", "expected a file in an existing folder; got \"" + path + "\"");
  }
}

void check_device(const bench::Problem& problem) {
  if (problem.device == Device::cpu) return;
  const std::string missing = bench::why_no_device();
  if (!missing.empty()) refuse_option("--device", "expected a CUDA device; got " + missing);
}

// Compares all entries with the specification; throws when one is wrong.
void run_gate(const std::vector<bench::Entry>& entries, const bench::Problem& problem) {
  const std::vector<bench::Check> checks = bench::gate(
      entries, problem,
      [](const bench::Contender& contender, int, int) { show_progress(contender.name); });
  show_progress("");
  bench::refuse_wrong(checks);
  fmt::print("{} outputs and gradients agree with the specification.\n", checks.size());
}

// Measures one length after the other and prints each.
void measure_lengths(const BenchOptions& options, const std::vector<std::int64_t>& lengths,
                     const std::vector<bench::Entry>& entries, BenchReport& report) {
  using Clock = std::chrono::steady_clock;
  const Clock::time_point start = Clock::now();
  std::int64_t tokens_left = std::accumulate(lengths.begin(), lengths.end(), std::int64_t{0});
  for (const std::int64_t N : lengths) {
    const double seconds = std::chrono::duration<double>(Clock::now() - start).count();
    const double share = static_cast<double>(N) / static_cast<double>(tokens_left);
    const bench::MeasurePlan plan{.pass = report.pass,
                                  .timing = make_timing(options, options.seconds - seconds, share),
                                  .threads = report.threads,
                                  .alone = report.alone};
    report.problem.N = N;
    const auto measured = bench::measure(
        entries, report.problem, plan,
        [&](const bench::Contender& contender, int round, int rounds) {
          show_progress(fmt::format("{} tokens, {}/{}: {}", N, round, rounds, contender.name));
        });
    show_progress("");
    print_table(measured);
    std::fflush(stdout);
    report.measurements.insert(report.measurements.end(), measured.begin(), measured.end());
    tokens_left -= N;
  }
}

void measure_machine(BenchReport& report) {
  double loads[1] = {0};
  if (getloadavg(loads, 1) == 1) report.load = loads[0];
  const bool on_gpu = report.problem.device == Device::cuda;
  report.copy_gbs =
      on_gpu ? bench::device_copy_gigabytes_per_second() : bench::copy_gigabytes_per_second();
  if (!on_gpu) report.hamming_rate = bench::hamming_pairs_per_second();
}

void run_bench(const BenchOptions& options, const std::string& command) {
  if (!options.report.empty()) return print_markdown(options.report);
  check_json_path(options.json);
  BenchReport report;
  report.title = options.title;
  report.command = command;
  report.problem = make_problem(options);
  const std::vector<std::int64_t> lengths = make_lengths(options, report.problem);
  report.problem.N = lengths.back();
  report.pass = make_pass(options.pass);
  report.alone = options.alone;
  report.threads = options.threads.empty() ? std::vector{threads()} : options.threads;
  check_device(report.problem);
  const std::vector<bench::Entry> entries = make_entries(options, report);

  if (options.gate) run_gate(entries, report.problem);
  report.gated = options.gate;
  measure_machine(report);
  print_header(report);
  std::fflush(stdout);  // the first table may take minutes
  measure_lengths(options, lengths, entries, report);
  print_crossovers(report);
  print_scalings(report);
  if (!options.json.empty()) write_json(report, options.json);
}

}  // namespace

void add_bench(CLI::App& program) {
  CLI::App* verb = program.add_subcommand(
      "bench", "Measure time, error and memory of attentions compared with full attention");
  const auto options = std::make_shared<BenchOptions>();  // lives as long as the callback
  add_bench_options(*verb, *options);
  verb->callback([verb, options] {
    check_conflicts(*verb, *options);
    run_bench(*options, bench_command(*verb));
  });
}

}  // namespace coterie::cli
