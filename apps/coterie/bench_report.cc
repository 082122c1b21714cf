// SPDX-License-Identifier: MIT
// The tables of `coterie bench`.
#include "bench_report.h"

#include <fmt/core.h>

#include <algorithm>
#include <cmath>

#include "bench/device.h"
#include "bench/opponent.h"
#include "coterie/runtime.h"

namespace coterie::cli {
namespace {

using bench::Measurement;

std::string label(const Series& series) {
  const bool named = series.name.find("causal=") != std::string::npos;
  return series.name + (series.entry.causal && !named ? ", causal" : "");
}

std::string threads_text(int count) {
  return fmt::format("{} thread{}", count, count == 1 ? "" : "s");
}

bool several_thread_counts(const std::vector<Measurement>& measurements) {
  return std::any_of(measurements.begin(), measurements.end(),
                     [&](const Measurement& m) { return m.threads != measurements[0].threads; });
}

double mebibytes(const Measurement& measurement) {
  const std::int64_t bytes = measurement.workspace_bytes + measurement.saved_bytes;
  return static_cast<double>(bytes) / (1 << 20);
}

// Three significant digits; whole milliseconds from 100 on.
std::string milliseconds(const std::optional<bench::Timing>& timing) {
  if (!timing) return "-";
  const double ms = timing->median_ms;
  return ms >= 100 ? fmt::format("{:.0f}", ms) : fmt::format("{:#.3g}", ms);
}

// From the 20th to the 80th percentile, as a fraction of the median.
double spread(const Measurement& measurement) {
  double widest = 0;
  for (const auto& timing : {measurement.forward, measurement.backward}) {
    if (!timing || timing->median_ms <= 0) continue;
    widest = std::max(widest, (timing->p80_ms - timing->p20_ms) / timing->median_ms);
  }
  return widest;
}

// The measurements of one table: same length, causality and thread count.
struct Group {
  bool causal;
  int threads;

  bool has(const Measurement& m) const { return m.entry.causal == causal && m.threads == threads; }
};

void print_rows(const std::vector<Measurement>& measurements, const Group& group,
                std::size_t width) {
  for (const Measurement& m : measurements) {
    if (!group.has(m)) continue;
    const std::string name = m.name + (bench::leaks_future(m.entry) ? " *" : "");
    const std::string memory = m.opponent ? "-" : fmt::format("{:.1f}", mebibytes(m));
    const std::optional<double> factor = speed(m, measurements), gflops = m.gflops();
    fmt::print(
        "  {:<{}} {:>8} {:>8} {:>8} {:>8} {:>9} {:>5.0f}% {:>8} {:>8.4f} {:>9} {:>7.1f} {:>8}\n",
        name, width, milliseconds(m.cluster), milliseconds(m.select), milliseconds(m.attend),
        milliseconds(m.forward), milliseconds(m.backward), 100 * spread(m),
        factor ? fmt::format("{:.2f}x", *factor) : "-", m.error, memory, m.gigabytes_per_second(),
        gflops ? fmt::format("{:.0f}", *gflops) : "-");
  }
}

// "; peak 230 GFLOP/s; full 141.2 (61 %); torch sdpa 120.3 (52 %)"
std::string arithmetic_text(const std::vector<Measurement>& measurements, const Group& group) {
  std::string text;
  for (const Measurement& m : measurements) {
    if (!group.has(m) || m.peak_gflops <= 0) continue;
    if (text.empty()) text = fmt::format("; peak {:.0f} GFLOP/s", m.peak_gflops);
    const std::optional<double> gflops = m.gflops();
    if (!bench::is_full(m.entry) || !gflops) continue;
    text += fmt::format("; {} {:.1f} ({:.0f} %)", m.name, *gflops, 100 * *gflops / m.peak_gflops);
  }
  return text;
}

std::string length_text(double tokens) {
  const bool whole = tokens >= 1024 && std::fmod(tokens, 1024) == 0;
  return whole ? fmt::format("{:.0f}k", tokens / 1024) : fmt::format("{:.0f}", tokens);
}

// The lengths at which it is faster than the baseline, or is not.
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

void print_group(const std::vector<Measurement>& measurements, const Group& group,
                 std::size_t width) {
  const auto first = std::find_if(measurements.begin(), measurements.end(),
                                  [&](const Measurement& m) { return group.has(m); });
  if (first == measurements.end()) return;
  const std::string threads =
      several_thread_counts(measurements) ? ", " + threads_text(group.threads) : "";
  const std::string sample =
      first->error_rows < first->N ? fmt::format("; errors of {} queries", first->error_rows) : "";
  fmt::print("\n{} tokens{}{}{}{}\n", first->N, group.causal ? ", causal" : "", threads,
             arithmetic_text(measurements, group), sample);
  fmt::print("  {:<{}} {:>8} {:>8} {:>8} {:>8} {:>9} {:>6} {:>8} {:>8} {:>9} {:>7} {:>8}\n",
             "attention", width, "cluster", "select", "attend", "forward", "backward", "spread",
             "speed", "error", "extra MiB", "GB/s", "GFLOP/s");
  print_rows(measurements, group, width);
}

}  // namespace

const Measurement* baseline_beside(const Measurement& measurement,
                                   const std::vector<Measurement>& measurements) {
  const Measurement* full = nullptr;
  for (const Measurement& other : measurements) {
    const bool same = other.N == measurement.N && other.threads == measurement.threads &&
                      other.entry.causal == measurement.entry.causal;
    if (!same || !bench::is_full(other.entry)) continue;
    if (other.opponent) return &other;
    full = &other;
  }
  return full;
}

std::optional<double> speed(const Measurement& measurement,
                            const std::vector<Measurement>& measurements) {
  const Measurement* const baseline = baseline_beside(measurement, measurements);
  if (!baseline) return std::nullopt;
  return baseline->total_ms() / measurement.total_ms();
}

std::optional<double> forward_speed(const Measurement& measurement,
                                    const std::vector<Measurement>& measurements) {
  const Measurement* const baseline = baseline_beside(measurement, measurements);
  if (!baseline || !measurement.forward) return std::nullopt;
  return baseline->forward->median_ms / measurement.forward->median_ms;
}

std::vector<Series> make_series(const std::vector<Measurement>& measurements) {
  std::vector<Series> all;
  for (const Measurement& m : measurements) {
    const std::optional<double> factor = speed(m, measurements);
    if (!factor || &m == baseline_beside(m, measurements)) continue;
    const auto known = std::find_if(all.begin(), all.end(), [&](const Series& series) {
      return series.name == m.name && series.entry.causal == m.entry.causal &&
             series.threads == m.threads;
    });
    Series& series =
        known != all.end() ? *known : all.emplace_back(Series{m.name, m.entry, m.threads, {}});
    series.speeds.emplace_back(static_cast<double>(m.N), *factor);
  }
  return all;
}

std::vector<Scaling> make_scalings(const std::vector<Measurement>& measurements) {
  std::vector<Scaling> all;
  if (measurements.empty()) return all;
  const auto by_threads = [](const Measurement& a, const Measurement& b) {
    return a.threads < b.threads;
  };
  const auto [fewest, most] =
      std::minmax_element(measurements.begin(), measurements.end(), by_threads);
  if (fewest->threads == most->threads) return all;
  for (const Measurement& slow : measurements) {
    for (const Measurement& fast : measurements) {
      const bool same =
          slow.name == fast.name && slow.N == fast.N && slow.entry.causal == fast.entry.causal;
      if (!same || slow.threads != fewest->threads || fast.threads != most->threads) continue;
      all.push_back({slow.name + (slow.entry.causal ? ", causal" : ""), slow.N, slow.threads,
                     fast.threads, slow.total_ms() / fast.total_ms()});
    }
  }
  return all;
}

const char* pass_name(bench::Pass pass) {
  return pass == bench::Pass::forward    ? "forward"
         : pass == bench::Pass::backward ? "backward"
                                         : "both";
}

const char* data_name(bench::DataKind data) {
  switch (data) {
    case bench::DataKind::normal:
      return "normal";
    case bench::DataKind::saved:
      return "saved";
    case bench::DataKind::mixture:
      break;
  }
  return "mixture";
}

void print_header(const BenchReport& report) {
  const bench::Problem& problem = report.problem;
  const bool on_gpu = problem.device == Device::cuda;
  fmt::print("{}, {}", cpu_model(), cpu_isa_name(cpu_isa()));
  for (std::size_t i = 0; i < report.threads.size(); ++i) {
    fmt::print("{}{}", i == 0 ? ", " : " and ", threads_text(report.threads[i]));
  }
  if (on_gpu) fmt::print("; {}", bench::device_description());
  fmt::print("; copies at {:.1f} GB/s", report.copy_gbs);
  if (!on_gpu) fmt::print("; {:.1f} G pairs of codes/s per thread", 1e-9 * report.hamming_rate);
  fmt::print("; {}, batch {}, {} heads", dtype_name(problem.dtype), problem.B, problem.heads);
  if (problem.kv_heads != problem.heads) fmt::print(" ({} of keys)", problem.kv_heads);
  fmt::print(" of {}, data {}\n", problem.D, data_name(problem.data));
  fmt::print("Times are medians in ms (spread: 20th to 80th percentile){};\n",
             on_gpu ? ", by CUDA events with flushed caches" : "");
  const std::string opponent = bench::opponent_description(problem.device);
  if (!report.alone) {
    fmt::print("speed is against {};\n",
               opponent.empty() ? "this library's full attention" : opponent);
  }
  fmt::print(
      "error is against full attention; extra memory is the workspace and the tensors saved for "
      "the "
      "backward pass;\ncluster is part of select; GB/s count inputs and outputs once.\n");
  if (!report.refused.empty()) fmt::print("Not measured:\n");
  for (const Refused& refused : report.refused) {
    fmt::print("  {}: {}\n", refused.attention, refused.reason);
  }
}

void print_table(const std::vector<Measurement>& measurements) {
  std::size_t width = 12;
  bool leaks = false;
  std::vector<int> threads;
  for (const Measurement& m : measurements) {
    width = std::max(width, m.name.size() + 2);
    leaks = leaks || bench::leaks_future(m.entry);
    if (std::find(threads.begin(), threads.end(), m.threads) == threads.end()) {
      threads.push_back(m.threads);
    }
  }
  for (const int count : threads) {
    for (const bool causal : {false, true}) print_group(measurements, {causal, count}, width);
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
  const bool several = several_thread_counts(report.measurements);
  for (const Series& series : all) {
    fmt::print("  {:<{}}  {}{}\n", label(series), width, crossover_text(series),
               several ? fmt::format(" ({})", threads_text(series.threads)) : "");
  }
}

void print_scalings(const BenchReport& report) {
  const std::vector<Scaling> all = make_scalings(report.measurements);
  if (all.empty()) return;
  std::size_t width = 0;
  for (const Scaling& scaling : all) width = std::max(width, scaling.name.size());
  fmt::print("\nSpeed with {} against {}\n", threads_text(all[0].most), all[0].fewest);
  for (const Scaling& scaling : all) {
    fmt::print("  {:<{}} {:>8} tokens {:>6.2f}x\n", scaling.name, width, scaling.N, scaling.factor);
  }
}

}  // namespace coterie::cli
