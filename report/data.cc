// SPDX-License-Identifier: MIT
// Logs of runs.
#include "report/data.h"

#include <algorithm>
#include <cctype>
#include <cmath>
#include <filesystem>

#include "coterie/error.h"
#include "report/json.h"
#include "report/text.h"

namespace coterie::train {

namespace {

namespace fs = std::filesystem;

// The first number in a name, to sort "65-128" after "9-64".
double first_number(const std::string& name) {
  const auto digit = std::find_if(name.begin(), name.end(),
                                  [](unsigned char letter) { return std::isdigit(letter) != 0; });
  double value = 0;
  for (auto at = digit; at != name.end() && std::isdigit(static_cast<unsigned char>(*at)); ++at) {
    value = 10 * value + (*at - '0');
  }
  return value;
}

void read_header(const Json& line, RunLog& run) {
  run.task = text_at(line, "task");
  run.attention = text_at(line, "attention");
  run.metric = text_at(line, "metric");
  run.config = text_at(line, "config");
  run.date = text_at(line, "date");
  run.parameters = integer_at(line, "parameters");
  run.seed = integer_at(line, "seed");
  run.leaks = line.value("leaks", Json(false)) == true;
  if (line.contains("data")) run.data_checksum = text_at(line["data"], "checksum");
  run.machine = line.contains("machine") ? facts_of(line["machine"]) : Facts();
  run.baselines.clear();
  for (const Json& baseline : list_at(line, "baselines")) {
    run.baselines.emplace_back(text_at(baseline, "name"), number_at(baseline, "value"));
  }
}

LoggedStep read_step(const Json& line) {
  return {.step = integer_at(line, "step"),
          .loss = number_at(line, "loss"),
          .seconds = number_at(line, "seconds"),
          .tokens_per_s = number_at(line, "tokens_per_s"),
          .memory_bytes = number_at(line, "memory_bytes")};
}

LoggedEvaluation read_evaluation(const Json& line) {
  LoggedEvaluation evaluation{.step = integer_at(line, "step"),
                              .split = text_at(line, "split"),
                              .metric = number_at(line, "metric"),
                              .share = line.contains("share") ? number_at(line, "share") : 1.0,
                              .strata = {}};
  if (!line.contains("strata") || !line["strata"].is_object()) return evaluation;
  for (const auto& [name, value] : line["strata"].items()) {
    if (value.is_number()) evaluation.strata.emplace_back(name, value.get<double>());
  }
  std::stable_sort(
      evaluation.strata.begin(), evaluation.strata.end(),
      [](const auto& a, const auto& b) { return first_number(a.first) < first_number(b.first); });
  return evaluation;
}

LoggedHead read_head(const Json& object) {
  LoggedHead head{
      .sizes = {}, .empty = number_at(object, "empty"), .mass = number_at(object, "mass")};
  for (const Json& size : list_at(object, "sizes")) {
    head.sizes.push_back(size.is_number() ? size.get<double>() : 0.0);
  }
  return head;
}

std::vector<LoggedGroup> read_clusters(const Json& line) {
  std::vector<LoggedGroup> groups;
  for (const Json& layer : list_at(line, "layers")) {
    LoggedGroup group{.layer = integer_at(layer, "layer"),
                      .group = integer_at(layer, "group"),
                      .attention = text_at(layer, "attention"),
                      .heads = {}};
    for (const Json& head : list_at(layer, "heads")) group.heads.push_back(read_head(head));
    groups.push_back(std::move(group));
  }
  return groups;
}

void read_line(const Json& line, RunLog& run, bool& has_header) {
  const std::string kind = text_at(line, "kind");
  if (kind == "run") {
    read_header(line, run);
    has_header = true;
  } else if (kind == "step") {
    run.steps.push_back(read_step(line));
  } else if (kind == "eval") {
    run.evaluations.push_back(read_evaluation(line));
  } else if (kind == "final") {
    run.final_evaluation = read_evaluation(line);
  } else if (kind == "resume") {
    run.config = text_at(line, "config");
  } else if (kind == "clusters") {
    run.clusters = read_clusters(line);
  } else if (kind == "end") {
    run.end = LoggedEnd{.reason = text_at(line, "reason"),
                        .seconds = number_at(line, "seconds"),
                        .peak_memory_bytes = number_at(line, "peak_memory_bytes")};
  }
}

}  // namespace

bool has_collapsed(const std::vector<double>& cluster_sizes, double mass) {
  constexpr double kLargestShare = 0.9, kLeastMass = 0.01;
  double sum = 0, largest = 0;
  for (const double size : cluster_sizes) {
    sum += size;
    largest = std::max(largest, size);
  }
  return (cluster_sizes.size() > 1 && largest > kLargestShare * sum) || mass < kLeastMass;
}

const LoggedEvaluation* RunLog::best_evaluation() const {
  const LoggedEvaluation* best = final_evaluation ? &*final_evaluation : nullptr;
  for (const LoggedEvaluation& evaluation : evaluations) {
    if (!std::isfinite(evaluation.metric)) continue;
    const bool better = !best || (evaluation.split == "test") > (best->split == "test") ||
                        (!final_evaluation && evaluation.split == best->split &&
                         (higher_is_better(metric) ? evaluation.metric >= best->metric
                                                   : evaluation.metric <= best->metric));
    if (better) best = &evaluation;
  }
  return best;
}

double RunLog::result() const {
  const LoggedEvaluation* const best = best_evaluation();
  return best ? best->metric : kUnknown;
}

double RunLog::seconds_at(std::int64_t step) const {
  double seconds = step == 0 ? 0 : kUnknown;
  for (const LoggedStep& logged : steps) {
    if (logged.step <= step) seconds = logged.seconds;
  }
  return seconds;
}

double RunLog::seconds() const {
  if (end && std::isfinite(end->seconds)) return end->seconds;
  return steps.empty() ? kUnknown : steps.back().seconds;
}

std::int64_t RunLog::last_step() const { return steps.empty() ? 0 : steps.back().step; }

double RunLog::peak_memory_bytes() const {
  if (end && std::isfinite(end->peak_memory_bytes)) return end->peak_memory_bytes;
  double peak = kUnknown;
  for (const LoggedStep& step : steps) peak = std::fmax(peak, step.memory_bytes);
  return peak;
}

double RunLog::tokens_per_s() const {
  std::vector<double> rates;
  for (const LoggedStep& step : steps) {
    if (std::isfinite(step.tokens_per_s)) rates.push_back(step.tokens_per_s);
  }
  if (rates.empty()) return kUnknown;
  const auto middle = rates.begin() + static_cast<std::ptrdiff_t>(rates.size() / 2);
  std::nth_element(rates.begin(), middle, rates.end());
  return *middle;
}

std::vector<std::string> find_runs(const std::string& path) {
  std::error_code error;
  if (fs::is_regular_file(fs::path(path) / "log.jsonl", error)) return {path};
  std::vector<std::string> folders;
  if (fs::is_directory(path, error)) {
    for (const auto& entry : fs::recursive_directory_iterator(path, error)) {
      if (entry.path().filename() == "log.jsonl") {
        folders.push_back(entry.path().parent_path().string());
      }
    }
  }
  if (folders.empty()) {
    throw Error(
        "[report] expected a run's folder (with log.jsonl) or a folder that contains runs; got \"" +
        path + "\"");
  }
  std::sort(folders.begin(), folders.end());
  return folders;
}

std::optional<RunLog> read_run(const std::string& folder) {
  RunLog run;
  run.folder = folder;
  bool has_header = false;
  run.unreadable = for_each_line((fs::path(folder) / "log.jsonl").string(),
                                 [&](const Json& line) { read_line(line, run, has_header); });
  return has_header ? std::optional(std::move(run)) : std::nullopt;
}

}  // namespace coterie::train
