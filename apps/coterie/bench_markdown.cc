// SPDX-License-Identifier: MIT
// A Markdown report of measurements, from the JSON lines of `coterie bench`.
#include <fmt/core.h>

#include <algorithm>

#include "bench_report.h"
#include "coterie/error.h"
#include "report/json.h"

namespace coterie::cli {
namespace {

using train::Json;

// The lines of one file by kind.
struct Run {
  Json run;
  std::vector<Json> refused, measurements, crossovers, scalings;
};

[[noreturn]] void refuse_lines(const std::string& path, const std::string& got) {
  throw Error("[bench] expected the output of coterie bench --json in " + path + "; got " + got);
}

Run read_run(const std::string& path) {
  Run run;
  const std::int64_t others = train::for_each_line(path, [&](const Json& json) {
    const std::string kind = train::text_at(json, "kind");
    if (kind == "run") {
      run.run = json;
    } else if (kind == "refused") {
      run.refused.push_back(json);
    } else if (kind == "measurement") {
      run.measurements.push_back(json);
    } else if (kind == "crossover") {
      run.crossovers.push_back(json);
    } else if (kind == "scaling") {
      run.scalings.push_back(json);
    } else {
      refuse_lines(path, "a line of kind \"" + kind.substr(0, 60) + "\"");
    }
  });
  if (others > 0) refuse_lines(path, std::to_string(others) + " lines that are not JSON objects");
  if (run.run.is_null())
    throw Error("[bench] expected a line of kind run in " + path + "; got none");
  return run;
}

// A number with three digits, multiplied by `factor`; "" if the field is null or missing.
std::string number(const Json& json, const char* key, double factor = 1.0) {
  const auto found = json.find(key);
  if (found == json.end() || !found->is_number()) return "";
  const double value = factor * found->get<double>();
  return value >= 100 || value == 0 ? fmt::format("{:.0f}", value) : fmt::format("{:#.3g}", value);
}

std::string median(const Json& measurement, const char* key) {
  const auto found = measurement.find(key);
  return found == measurement.end() || found->is_null() ? "" : number(*found, "median");
}

std::string text(const Json& json, const char* key) {
  const auto found = json.find(key);
  return found == json.end() || !found->is_string() ? "" : found->get<std::string>();
}

std::string extra_mebibytes(const Json& m) {
  if (m.at("workspace_bytes").is_null()) return "";
  const double bytes = m.at("workspace_bytes").get<double>() + m.at("saved_bytes").get<double>();
  return fmt::format("{:.1f}", bytes / (1 << 20));
}

std::string share_of_peak(const Json& m) {
  if (m.at("gflops").is_null() || m.at("peak_gflops").is_null()) return "";
  return fmt::format("{:.0f} %",
                     100 * m.at("gflops").get<double>() / m.at("peak_gflops").get<double>());
}

// From the 20th to the 80th percentile as a fraction of the median; the wider of the two passes.
std::string spread(const Json& m) {
  double widest = 0;
  for (const char* key : {"forward_ms", "backward_ms"}) {
    const Json& timing = m.at(key);
    if (timing.is_null() || timing.at("median").get<double>() <= 0) continue;
    const double width = timing.at("p80").get<double>() - timing.at("p20").get<double>();
    widest = std::max(widest, width / timing.at("median").get<double>());
  }
  return fmt::format("{:.0f} %", 100 * widest);
}

void print_run(const Json& run) {
  const std::string title = text(run, "title"), gpu = text(run, "gpu");
  const bool on_gpu = text(run, "device") == "cuda";
  fmt::print("## {}\n\n", title.empty() ? "Attentions" : title);
  fmt::print("{}. ", on_gpu ? gpu
                            : fmt::format("{}, {}, load average {} before the run",
                                          text(run, "cpu"), text(run, "isa"), number(run, "load")));
  fmt::print("{}; {}, batch {}, {} heads of {}, data {}. ", text(run, "date"), text(run, "dtype"),
             run.at("batch").get<int>(), run.at("heads").get<int>(), run.at("dim").get<int>(),
             text(run, "data"));
  fmt::print("Copy bandwidth {} GB/s", number(run, "copy_gbs"));
  const std::string hamming = number(run, "hamming_gpairs");
  if (!hamming.empty()) fmt::print("; Hamming assignment {} G pairs/s on one thread", hamming);
  const std::string opponent = text(run, "opponent"), commit = text(run, "commit");
  if (!run.value("alone", false)) {
    fmt::print(". Speed relative to {}",
               opponent.empty() ? "this library's full attention" : opponent);
  }
  fmt::print(". Commit {}{}.\n\n", commit.empty() ? "unknown" : commit,
             run.value("gated", false) ? ", checked against the specification" : "");
  fmt::print("```\n{}\n```\n\n", text(run, "command"));
}

// "0.0450 (256 queries)" for a sample of every head's queries; without the note for all of them.
std::string error_text(const Json& m) {
  const std::int64_t rows = m.at("error_rows").get<std::int64_t>();
  const std::string error = fmt::format("{:.4f}", m.at("error").get<double>());
  if (rows >= m.at("N").get<std::int64_t>()) return error;
  return fmt::format("{} ({} queries)", error, rows);
}

// "4096 | 2 | local(window=256), causal": the first columns of a table row.
std::string subject(const Json& run, const Json& m) {
  const bool on_gpu = text(run, "device") == "cuda";
  return fmt::format("{} | {} | {}{}{}", m.at("N").get<std::int64_t>(),
                     on_gpu ? "" : std::to_string(m.at("threads").get<int>()), text(m, "attention"),
                     m.at("causal").get<bool>() ? ", causal" : "",
                     m.at("leaks_future").get<bool>() ? " (selection sees the future)" : "");
}

void print_measurements(const Json& run, const std::vector<Json>& measurements) {
  fmt::print(
      "| tokens | threads | attention | forward ms | backward ms | spread | speed forward | speed "
      "| "
      "error | extra MiB | GB/s | GFLOP/s | of peak |\n"
      "|---:|---:|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|\n");
  for (const Json& m : measurements) {
    fmt::print("| {} | {} | {} | {} | {} | {} | {} | {} | {} | {} | {} |\n", subject(run, m),
               median(m, "forward_ms"), median(m, "backward_ms"), spread(m),
               number(m, "forward_speed"), number(m, "speed"), error_text(m), extra_mebibytes(m),
               number(m, "gbs"), number(m, "gflops"), share_of_peak(m));
  }
  fmt::print("\n");
}

// Only for attentions that select.
void print_parts(const Json& run, const std::vector<Json>& measurements) {
  bool any = false;
  for (const Json& m : measurements) {
    if (m.at("select_ms").is_null()) continue;
    if (!any) {
      fmt::print(
          "| tokens | threads | attention | hash ms | cluster ms | select ms | attend ms | launch "
          "ms |\n|---:|---:|---|---:|---:|---:|---:|---:|\n");
    }
    any = true;
    fmt::print("| {} | {} | {} | {} | {} | {} |\n", subject(run, m), median(m, "hash_ms"),
               median(m, "cluster_ms"), median(m, "select_ms"), median(m, "attend_ms"),
               number(m, "launch_ms"));
  }
  if (any) fmt::print("\n");
}

// The length from which each attention is faster.
void print_crossovers(const Run& run) {
  const bool one_length =
      std::all_of(run.measurements.begin(), run.measurements.end(),
                  [&](const Json& m) { return m.at("N") == run.measurements[0].at("N"); });
  if (one_length || run.crossovers.empty()) return;
  for (const Json& crossover : run.crossovers) {
    const std::string from = number(crossover, "N");
    fmt::print("* {}{}, {} threads: {}\n", text(crossover, "attention"),
               crossover.at("causal").get<bool>() ? ", causal" : "",
               crossover.at("threads").get<int>(),
               from.empty() ? "not faster at the longest length"
                            : fmt::format("faster from {} tokens on", from));
  }
  fmt::print("\n");
}

void print_scalings(const std::vector<Json>& scalings) {
  for (const Json& s : scalings) {
    fmt::print("* {} at {} tokens: {:.2f}x with {} threads against {}\n", text(s, "attention"),
               s.at("N").get<std::int64_t>(), s.at("factor").get<double>(),
               s.at("most_threads").get<int>(), s.at("fewest_threads").get<int>());
  }
  if (!scalings.empty()) fmt::print("\n");
}

void print_refused(const std::vector<Json>& refused) {
  for (const Json& one : refused) {
    fmt::print("* not measured: {} ({})\n", text(one, "attention"), text(one, "reason"));
  }
  if (!refused.empty()) fmt::print("\n");
}

void print_report(const Run& run) {
  print_run(run.run);
  print_measurements(run.run, run.measurements);
  print_parts(run.run, run.measurements);
  print_crossovers(run);
  print_scalings(run.scalings);
  print_refused(run.refused);
}

const char* const kIntroduction = R"text(# Performance

Generated by `coterie bench --report` from the records of `coterie bench --json`; do not edit.

Times are medians of runs that alternate between the attentions; on a GPU they are measured by CUDA
events with flushed caches. Spread is the distance from the 20th to the 80th percentile, relative to the
median. Speed is the speedup over full attention of the named library: "speed forward" for the forward
pass, "speed" for all measured passes together. Error is the relative error of the outputs against full
attention in the Frobenius norm. Extra memory is the workspace plus the tensors saved for the backward
pass. GB/s counts inputs and outputs once; GFLOP/s counts the products of the pairs that attend to each
other. The peak is measured in alternation with the rest. In the second table, cluster includes hash,
select includes cluster, and each is timed alone; launch is the host time to start a forward pass on a GPU.

)text";

}  // namespace

void print_markdown(const std::vector<std::string>& paths) {
  std::vector<Run> runs;
  for (const std::string& path : paths) runs.push_back(read_run(path));
  fmt::print("{}", kIntroduction);
  for (std::size_t i = 0; i < runs.size(); ++i) {
    try {
      print_report(runs[i]);
    } catch (const Json::exception& error) {
      throw Error("[bench] expected the fields of coterie bench --json in " + paths[i] + "; got " +
                  error.what());
    }
  }
}

}  // namespace coterie::cli
