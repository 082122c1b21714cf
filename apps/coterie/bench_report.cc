// SPDX-License-Identifier: MIT
// The tables of `coterie bench`.
#include "bench_report.h"

#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <stdexcept>

#include "bench/opponent.h"
#include "coterie/runtime.h"

namespace coterie::cli {
namespace {

using bench::Measurement;

std::string label(const Series& series) {
  const bool named = series.name.find("causal=") != std::string::npos;
  return series.name + (series.entry.causal && !named ? ", causal" : "");
}

double mebibytes(const Measurement& measurement) {
  const std::int64_t bytes = measurement.workspace_bytes + measurement.saved_bytes;
  return static_cast<double>(bytes) / (1 << 20);
}

// Three digits, whatever the size.
std::string milliseconds(const std::optional<bench::Timing>& timing) {
  if (!timing) return "-";
  const double ms = timing->median_ms;
  return ms >= 100 ? fmt::format("{:.0f}", ms) : fmt::format("{:#.3g}", ms);
}

// Between the 20th and the 80th percentile, as a share of the median.
double spread(const Measurement& measurement) {
  double widest = 0;
  for (const auto& timing : {measurement.forward, measurement.backward}) {
    if (!timing || timing->median_ms <= 0) continue;
    widest = std::max(widest, (timing->p80_ms - timing->p20_ms) / timing->median_ms);
  }
  return widest;
}

void print_rows(const std::vector<Measurement>& measurements, bool causal, std::size_t width) {
  for (const Measurement& m : measurements) {
    if (m.entry.causal != causal) continue;
    const std::string name = m.name + (bench::leaks_future(m.entry) ? " *" : "");
    const std::string memory = m.opponent ? "-" : fmt::format("{:.1f}", mebibytes(m));
    fmt::print("  {:<{}} {:>8} {:>8} {:>8} {:>9} {:>5.0f}% {:>7.2f}x {:>8.4f} {:>9}\n", name, width,
               milliseconds(m.select), milliseconds(m.attend), milliseconds(m.forward),
               milliseconds(m.backward), 100 * spread(m), speed(m, measurements), m.error, memory);
  }
}

// "; FMA peak 230 GFLOP/s; full 141.2 (61 %); torch sdpa 120.3 (52 %)"
std::string arithmetic_text(const std::vector<Measurement>& measurements, bool causal) {
  std::string text = fmt::format("; FMA peak {:.0f} GFLOP/s", measurements[0].peak_gflops);
  for (const Measurement& m : measurements) {
    const std::optional<double> gflops = m.gflops();
    if (m.entry.causal != causal || !gflops) continue;
    text += fmt::format("; {} {:.1f} ({:.0f} %)", m.name, *gflops, 100 * *gflops / m.peak_gflops);
  }
  return text;
}

std::string length_text(double tokens) {
  const bool whole = tokens >= 1024 && std::fmod(tokens, 1024) == 0;
  return whole ? fmt::format("{:.0f}k", tokens / 1024) : fmt::format("{:.0f}", tokens);
}

// The lengths at which it wins, or does not.
std::string lengths_text(const Series& series, bool wins) {
  std::string text;
  for (const auto& [length, speed] : series.speeds) {
    if ((speed > 1) == wins) text += (text.empty() ? "" : ", ") + length_text(length);
  }
  return text;
}

std::string crossover_text(const Series& series) {
  const std::string wins = lengths_text(series, true), losses = lengths_text(series, false);
  if (losses.empty()) return "at every length measured";
  if (wins.empty()) return "at no length measured";
  const std::optional<double> from = bench::crossover(series.speeds);
  if (!from) return fmt::format("only at {} tokens; slower at {}", wins, losses);
  return fmt::format("from about {:.0f} tokens; slower at {}", *from, losses);
}

std::string baseline_name() {
  const std::string opponent = bench::opponent_name();
  return opponent.empty() ? "full attention" : opponent;
}

}  // namespace

const Measurement& baseline_beside(const Measurement& measurement,
                                   const std::vector<Measurement>& measurements) {
  const Measurement* full = nullptr;  // the driver always measures it
  for (const Measurement& other : measurements) {
    const bool same = other.N == measurement.N && other.entry.causal == measurement.entry.causal;
    if (!same || !bench::is_full(other.entry)) continue;
    if (other.opponent) return other;
    full = &other;
  }
  if (!full) throw std::logic_error("no measurement of full attention to compare with");
  return *full;
}

double speed(const Measurement& measurement, const std::vector<Measurement>& measurements) {
  return baseline_beside(measurement, measurements).total_ms() / measurement.total_ms();
}

std::vector<Series> make_series(const std::vector<Measurement>& measurements) {
  std::vector<Series> all;
  for (const Measurement& m : measurements) {
    if (&m == &baseline_beside(m, measurements)) continue;
    const auto known = std::find_if(all.begin(), all.end(), [&](const Series& series) {
      return series.name == m.name && series.entry.causal == m.entry.causal;
    });
    Series& series = known != all.end() ? *known : all.emplace_back(Series{m.name, m.entry, {}});
    series.speeds.emplace_back(static_cast<double>(m.N), speed(m, measurements));
  }
  return all;
}

const char* pass_name(bench::Pass pass) {
  return pass == bench::Pass::forward    ? "forward"
         : pass == bench::Pass::backward ? "backward"
                                         : "both";
}

const char* data_name(bench::DataKind data) {
  return data == bench::DataKind::normal ? "normal" : "mixture";
}

void print_header(const BenchReport& report) {
  const bench::Problem& problem = report.problem;
  fmt::print("{}, {}, {} threads, copies at {:.1f} GB/s; {}, batch {}, {} heads", cpu_model(),
             cpu_isa_name(cpu_isa()), threads(), report.copy_gbs, dtype_name(problem.dtype),
             problem.B, problem.heads);
  if (problem.kv_heads != problem.heads) fmt::print(" ({} of keys)", problem.kv_heads);
  fmt::print(" of {}, data {}\n", problem.D, data_name(problem.data));
  const std::string opponent = bench::opponent_description();
  fmt::print("Times are medians (spread: 20th to 80th percentile). Speed is against {};\n",
             opponent.empty() ? "this library's full attention" : opponent);
  fmt::print(
      "error is against full attention; extra memory is workspace and what is saved for the "
      "backward pass.\n");
}

void print_table(const std::vector<Measurement>& measurements) {
  std::size_t width = 12;
  bool leaks = false;
  for (const Measurement& m : measurements) {
    width = std::max(width, m.name.size() + 2);
    leaks = leaks || bench::leaks_future(m.entry);
  }
  for (const bool causal : {false, true}) {
    const auto first = std::find_if(measurements.begin(), measurements.end(),
                                    [&](const auto& m) { return m.entry.causal == causal; });
    if (first == measurements.end()) continue;
    fmt::print("\n{} tokens{}{}\n", first->N, causal ? ", causal" : "",
               arithmetic_text(measurements, causal));
    fmt::print("  {:<{}} {:>8} {:>8} {:>8} {:>9} {:>6} {:>8} {:>8} {:>9}\n", "attention", width,
               "select", "attend", "forward", "backward", "spread", "speed", "error", "extra MiB");
    print_rows(measurements, causal, width);
  }
  if (leaks) fmt::print("  * its selection sees the future, as published\n");
}

void print_crossovers(const BenchReport& report) {
  const std::vector<Series> all = make_series(report.measurements);
  if (all.empty()) return;
  std::size_t width = 0;
  for (const Series& series : all) width = std::max(width, label(series).size());
  const char* const passes =
      report.pass == bench::Pass::both ? "forward and backward together" : pass_name(report.pass);
  fmt::print("\nFaster than {} ({})\n", baseline_name(), passes);
  for (const Series& series : all) {
    fmt::print("  {:<{}}  {}\n", label(series), width, crossover_text(series));
  }
}

}  // namespace coterie::cli
