// SPDX-License-Identifier: MIT
#include "bench_report.h"

#include <fmt/core.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <stdexcept>

#include "coterie/runtime.h"

namespace coterie::cli {
namespace {

using bench::Measurement;
using Json = nlohmann::ordered_json;

std::string label(const bench::Entry& entry) {
  const std::string spec = entry.spec.to_string();
  const bool named = spec.find("causal=") != std::string::npos;
  return spec + (entry.causal && !named ? ", causal" : "");
}

bool same_entry(const bench::Entry& a, const bench::Entry& b) {
  return a.causal == b.causal && a.spec.to_string() == b.spec.to_string();
}

// Full attention at the same length with the same causality; the driver always measures it.
const Measurement& full_beside(const Measurement& measurement,
                               const std::vector<Measurement>& measurements) {
  for (const Measurement& other : measurements) {
    const bool same = other.N == measurement.N && other.entry.causal == measurement.entry.causal;
    if (same && bench::is_full(other.entry)) return other;
  }
  throw std::logic_error("no measurement of full attention to compare with");
}

double speed(const Measurement& measurement, const std::vector<Measurement>& measurements) {
  return full_beside(measurement, measurements).total_ms() / measurement.total_ms();
}

double gflops(const Measurement& full) { return full.full_flops / (1e6 * full.total_ms()); }

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
    const std::string name = m.entry.spec.to_string() + (bench::leaks_future(m.entry) ? " *" : "");
    fmt::print("  {:<{}} {:>10} {:>10} {:>5.0f}% {:>7.2f}x {:>8.4f} {:>9.1f}\n", name, width,
               milliseconds(m.forward), milliseconds(m.backward), 100 * spread(m),
               speed(m, measurements), m.error, mebibytes(m));
  }
}

std::string length_text(double tokens) {
  const bool whole = tokens >= 1024 && std::fmod(tokens, 1024) == 0;
  return whole ? fmt::format("{:.0f}k", tokens / 1024) : fmt::format("{:.0f}", tokens);
}

// One attention over all lengths.
struct Series {
  bench::Entry entry;
  std::vector<std::pair<double, double>> speeds;  // (length, against full attention)
};

std::vector<Series> make_series(const std::vector<Measurement>& measurements) {
  std::vector<Series> all;
  for (const Measurement& m : measurements) {
    if (bench::is_full(m.entry)) continue;
    const auto known = std::find_if(all.begin(), all.end(), [&](const Series& series) {
      return same_entry(series.entry, m.entry);
    });
    Series& series = known != all.end() ? *known : all.emplace_back(Series{m.entry, {}});
    series.speeds.emplace_back(static_cast<double>(m.N), speed(m, measurements));
  }
  return all;
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

Json timing_json(const std::optional<bench::Timing>& timing) {
  if (!timing) return nullptr;
  return {{"median", timing->median_ms},
          {"p20", timing->p20_ms},
          {"p80", timing->p80_ms},
          {"repeats", timing->repeats}};
}

const char* pass_name(bench::Pass pass) {
  return pass == bench::Pass::forward    ? "forward"
         : pass == bench::Pass::backward ? "backward"
                                         : "both";
}

const char* data_name(bench::DataKind data) {
  return data == bench::DataKind::normal ? "normal" : "mixture";
}

Json run_json(const BenchReport& report) {
  const BuildInfo build = build_info();
  const bench::Problem& problem = report.problem;
  return {{"kind", "run"},
          {"version", build.version},
          {"compiler", build.compiler},
          {"build_type", build.build_type},
          {"cpu", cpu_model()},
          {"isa", cpu_isa_name(cpu_isa())},
          {"threads", threads()},
          {"pass", pass_name(report.pass)},
          {"batch", problem.B},
          {"heads", problem.heads},
          {"kv_heads", problem.kv_heads},
          {"dim", problem.D},
          {"dtype", dtype_name(problem.dtype)},
          {"data", data_name(problem.data)},
          {"seed", problem.seed}};
}

Json measurement_json(const Measurement& m, const std::vector<Measurement>& measurements) {
  Json line = {{"kind", "measurement"},
               {"attention", m.entry.spec.to_string()},
               {"causal", m.entry.causal},
               {"leaks_future", bench::leaks_future(m.entry)},
               {"N", m.N},
               {"forward_ms", timing_json(m.forward)},
               {"backward_ms", timing_json(m.backward)},
               {"speed", speed(m, measurements)},
               {"error", m.error},
               {"workspace_bytes", m.workspace_bytes},
               {"saved_bytes", m.saved_bytes}};
  if (bench::is_full(m.entry)) line["gflops"] = gflops(m);
  return line;
}

Json crossover_json(const Series& series) {
  const std::optional<double> from = bench::crossover(series.speeds);
  return {{"kind", "crossover"},
          {"attention", series.entry.spec.to_string()},
          {"causal", series.entry.causal},
          {"N", from ? Json(*from) : Json(nullptr)}};
}

}  // namespace

void print_header(const BenchReport& report) {
  const bench::Problem& problem = report.problem;
  fmt::print("{}, {}, {} threads; {}, batch {}, {} heads", cpu_model(), cpu_isa_name(cpu_isa()),
             threads(), dtype_name(problem.dtype), problem.B, problem.heads);
  if (problem.kv_heads != problem.heads) fmt::print(" ({} of keys)", problem.kv_heads);
  fmt::print(" of {}, data {}\n", problem.D, data_name(problem.data));
  fmt::print(
      "Times are medians (spread: 20th to 80th percentile). Speed and error are against full "
      "attention;\nextra memory is workspace and what is saved for the backward pass.\n");
}

void print_table(const std::vector<Measurement>& measurements) {
  std::size_t width = 12;
  bool leaks = false;
  for (const Measurement& m : measurements) {
    width = std::max(width, m.entry.spec.to_string().size() + 2);
    leaks = leaks || bench::leaks_future(m.entry);
  }
  for (const bool causal : {false, true}) {
    const auto first = std::find_if(measurements.begin(), measurements.end(),
                                    [&](const auto& m) { return m.entry.causal == causal; });
    if (first == measurements.end()) continue;
    fmt::print("\n{} tokens{}; full attention runs at {:.1f} GFLOP/s\n", first->N,
               causal ? ", causal" : "", gflops(full_beside(*first, measurements)));
    fmt::print("  {:<{}} {:>10} {:>10} {:>6} {:>8} {:>8} {:>9}\n", "attention", width, "forward ms",
               "backw. ms", "spread", "speed", "error", "extra MiB");
    print_rows(measurements, causal, width);
  }
  if (leaks) fmt::print("  * its selection sees the future, as published\n");
}

void print_crossovers(const BenchReport& report) {
  const std::vector<Series> all = make_series(report.measurements);
  if (all.empty()) return;
  std::size_t width = 0;
  for (const Series& series : all) width = std::max(width, label(series.entry).size());
  const char* const passes =
      report.pass == bench::Pass::both ? "forward and backward together" : pass_name(report.pass);
  fmt::print("\nFaster than full attention ({})\n", passes);
  for (const Series& series : all) {
    fmt::print("  {:<{}}  {}\n", label(series.entry), width, crossover_text(series));
  }
}

void write_json(const BenchReport& report, const std::string& path) {
  const std::string temporary = fmt::format("{}.{}.tmp", path, getpid());
  std::ofstream file(temporary);
  file << run_json(report).dump() << '\n';
  for (const Measurement& m : report.measurements) {
    file << measurement_json(m, report.measurements).dump() << '\n';
  }
  for (const Series& series : make_series(report.measurements)) {
    file << crossover_json(series).dump() << '\n';
  }
  file.close();
  std::error_code error;
  if (file) std::filesystem::rename(temporary, path, error);
  if (!file || error) {
    std::filesystem::remove(temporary, error);
    throw std::runtime_error("cannot write " + path);
  }
}

}  // namespace coterie::cli
