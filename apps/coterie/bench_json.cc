// SPDX-License-Identifier: MIT
// The results of `coterie bench` as JSON lines.
#include <fmt/core.h>
#include <unistd.h>

#include <ctime>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>
#include <stdexcept>
#include <string>

#include "apps/commit.h"
#include "bench/device.h"
#include "bench/opponent.h"
#include "bench_report.h"
#include "coterie/runtime.h"

namespace coterie::cli {
namespace {

using bench::Measurement;
using Json = nlohmann::ordered_json;

Json or_null(const std::string& text) { return text.empty() ? Json(nullptr) : Json(text); }

std::string today() {
  const std::time_t now = std::time(nullptr);
  char text[16] = {};
  std::strftime(text, sizeof text, "%Y-%m-%d", std::gmtime(&now));
  return text;
}

Json run_json(const BenchReport& report) {
  const BuildInfo build = build_info();
  const bench::Problem& problem = report.problem;
  return {{"kind", "run"},
          {"version", build.version},
          {"commit", or_null(kCommit)},
          {"compiler", build.compiler},
          {"build_type", build.build_type},
          {"asserts", build.asserts},
          {"date", today()},
          {"title", or_null(report.title)},
          {"command", report.command},
          {"alone", report.alone},
          {"opponent", or_null(report.alone ? "" : bench::opponent_description(problem.device))},
          {"cpu", cpu_model()},
          {"isa", cpu_isa_name(cpu_isa())},
          {"threads", report.threads},
          {"load", report.load},
          {"device", device_name(problem.device)},
          {"gpu", or_null(bench::device_description())},
          {"copy_gbs", report.copy_gbs},
          {"hamming_gpairs", report.hamming_rate > 0 ? Json(1e-9 * report.hamming_rate) : Json()},
          {"gated", report.gated},
          {"pass", pass_name(report.pass)},
          {"batch", problem.B},
          {"heads", problem.heads},
          {"kv_heads", problem.kv_heads},
          {"dim", problem.D},
          {"dtype", dtype_name(problem.dtype)},
          {"data", data_name(problem.data)},
          {"seed", problem.seed}};
}

// A value of a spec key: a number, true, false or a name.
Json value_json(const std::string& text) {
  const Json value = Json::parse(text, nullptr, /*allow_exceptions=*/false);
  return value.is_discarded() ? Json(text) : value;
}

// The mechanism of each head group with all its keys, automatic ones resolved.
Json groups_json(const bench::Entry& entry) {
  Json groups = Json::array();
  for (const HeadGroup& group : entry.spec.groups) {
    Json json{{"mechanism", mechanism_name(group.mechanism)}, {"heads", group.heads}};
    std::istringstream facts(mechanism_facts(group.mechanism, entry.causal));
    for (std::string line; std::getline(facts, line);) {
      const std::size_t equals = line.find('=');
      if (line.rfind("key.", 0) == 0) {
        json[line.substr(4, equals - 4)] = value_json(line.substr(equals + 1));
      }
    }
    groups.push_back(std::move(json));
  }
  return groups;
}

Json timing_json(const std::optional<bench::Timing>& timing) {
  if (!timing) return nullptr;
  return {{"median", timing->median_ms},
          {"p20", timing->p20_ms},
          {"p80", timing->p80_ms},
          {"repeats", timing->repeats}};
}

// Arithmetic rate of one pass; null if its operation count is not known.
Json gflops_json(const std::optional<double>& flops, const std::optional<bench::Timing>& timing) {
  if (!flops || !timing) return nullptr;
  return *flops / (1e6 * timing->median_ms);
}

template <class Value>
Json or_null(const std::optional<Value>& value) {
  return value ? Json(*value) : Json(nullptr);
}

Json measurement_json(const Measurement& m, const std::vector<Measurement>& measurements) {
  const Measurement* const baseline = baseline_beside(m, measurements);
  const auto bytes = [&](std::int64_t count) { return m.opponent ? Json(nullptr) : Json(count); };
  return {{"kind", "measurement"},
          {"attention", m.name},
          {"opponent", m.opponent},
          {"groups", groups_json(m.entry)},
          {"causal", m.entry.causal},
          {"leaks_future", bench::leaks_future(m.entry)},
          {"N", m.N},
          {"threads", m.threads},
          {"hash_ms", timing_json(m.hash)},
          {"cluster_ms", timing_json(m.cluster)},
          {"select_ms", timing_json(m.select)},
          {"attend_ms", timing_json(m.attend)},
          {"forward_ms", timing_json(m.forward)},
          {"backward_ms", timing_json(m.backward)},
          {"launch_ms", or_null(m.launch_ms)},
          {"against", baseline ? Json(baseline->name) : Json(nullptr)},
          {"speed", or_null(speed(m, measurements))},
          {"forward_speed", or_null(forward_speed(m, measurements))},
          {"error", m.error},
          {"error_rows", m.error_rows},
          {"gbs", m.gigabytes_per_second()},
          {"gflops", or_null(m.gflops())},
          {"forward_gflops", gflops_json(m.forward_flops, m.forward)},
          {"backward_gflops", gflops_json(m.backward_flops, m.backward)},
          {"peak_gflops", m.peak_gflops > 0 ? Json(m.peak_gflops) : Json(nullptr)},
          {"workspace_bytes", bytes(m.workspace_bytes)},
          {"saved_bytes", bytes(m.saved_bytes)},
          {"io_bytes", m.io_bytes}};
}

Json crossover_json(const Series& series) {
  const std::optional<double> from = bench::crossover(series.speeds);
  return {{"kind", "crossover"},
          {"attention", series.name},
          {"causal", series.entry.causal},
          {"threads", series.threads},
          {"N", from ? Json(*from) : Json(nullptr)}};
}

Json scaling_json(const Scaling& scaling) {
  return {{"kind", "scaling"},
          {"attention", scaling.name},
          {"N", scaling.N},
          {"fewest_threads", scaling.fewest},
          {"most_threads", scaling.most},
          {"factor", scaling.factor}};
}

}  // namespace

void write_json(const BenchReport& report, const std::string& path) {
  const std::string temporary = fmt::format("{}.{}.tmp", path, getpid());
  std::ofstream file(temporary);
  file << run_json(report).dump() << '\n';
  for (const Refused& refused : report.refused) {
    const Json json = {
        {"kind", "refused"}, {"attention", refused.attention}, {"reason", refused.reason}};
    file << json.dump() << '\n';
  }
  for (const Measurement& m : report.measurements) {
    file << measurement_json(m, report.measurements).dump() << '\n';
  }
  for (const Series& series : make_series(report.measurements)) {
    file << crossover_json(series).dump() << '\n';
  }
  for (const Scaling& scaling : make_scalings(report.measurements)) {
    file << scaling_json(scaling).dump() << '\n';
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
