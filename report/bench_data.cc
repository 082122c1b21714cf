// SPDX-License-Identifier: MIT
// Records of coterie bench.
#include <algorithm>
#include <cmath>

#include "report/data.h"
#include "report/json.h"

namespace coterie::train {

namespace {

double median_at(const Json& line, const char* key) {
  return line.contains(key) ? number_at(line[key], "median") : kUnknown;
}

BenchSeries& series_of(const Json& line, BenchLog& log) {
  const std::string attention = text_at(line, "attention");
  const bool causal = flag_at(line, "causal");
  const std::int64_t threads = integer_at(line, "threads");
  const auto found = std::find_if(log.series.begin(), log.series.end(), [&](const auto& series) {
    return series.attention == attention && series.causal == causal && series.threads == threads;
  });
  if (found != log.series.end()) return *found;
  return log.series.emplace_back(BenchSeries{.attention = attention,
                                             .against = text_at(line, "against"),
                                             .causal = causal,
                                             .opponent = flag_at(line, "opponent"),
                                             .leaks_future = flag_at(line, "leaks_future"),
                                             .threads = threads,
                                             .points = {}});
}

BenchPoint read_point(const Json& line) {
  return {.length = integer_at(line, "N"),
          .select_ms = median_at(line, "select_ms"),
          .attend_ms = median_at(line, "attend_ms"),
          .forward_ms = median_at(line, "forward_ms"),
          .backward_ms = median_at(line, "backward_ms"),
          .speed = number_at(line, "speed"),
          .error = number_at(line, "error"),
          .extra_bytes = number_at(line, "workspace_bytes") + number_at(line, "saved_bytes")};
}

void read_line(const Json& line, BenchLog& log) {
  const std::string kind = text_at(line, "kind");
  if (kind == "run") {
    log.facts = facts_of(line);
    std::erase_if(log.facts, [](const auto& fact) { return fact.first == "kind"; });
    log.pass = text_at(line, "pass");
  } else if (kind == "measurement") {
    series_of(line, log).points.push_back(read_point(line));
  } else if (kind == "refused") {
    log.refused.push_back(text_at(line, "attention") + ": " + text_at(line, "reason"));
  } else if (kind == "crossover") {
    const double from = number_at(line, "N");
    if (std::isfinite(from)) series_of(line, log).crossover = from;
  }
}

}  // namespace

double BenchPoint::total_ms() const {
  double sum = 0;
  for (const double ms : {forward_ms, backward_ms}) sum += std::isfinite(ms) ? ms : 0;
  return sum > 0 ? sum : kUnknown;
}

BenchLog read_bench(const std::string& path) {
  BenchLog log;
  log.file = path;
  log.unreadable = for_each_line(path, [&](const Json& line) { read_line(line, log); });
  for (BenchSeries& series : log.series) {
    std::stable_sort(series.points.begin(), series.points.end(),
                     [](const auto& a, const auto& b) { return a.length < b.length; });
  }
  return log;
}

}  // namespace coterie::train
