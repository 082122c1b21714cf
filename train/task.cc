// SPDX-License-Identifier: MIT
#include "train/task.h"

#include <fmt/core.h>
#include <fmt/ranges.h>

#include <cmath>
#include <utility>

#include "coterie/error.h"
#include "train/tasks/tasks.h"

namespace coterie::train {
namespace {

using Make = std::unique_ptr<Task> (*)(const Config&, const TaskFiles* stored);
constexpr std::pair<const char*, Make> kTasks[] = {
    {"copy", make_copy_task},           {"recall", make_recall_task},
    {"bytes", make_bytes_task},         {"masked", make_masked_task},
    {"words", make_words_task},         {"tokens", make_tokens_task},
    {"listops", make_listops_task},     {"pathfinder", make_pathfinder_task},
    {"images", make_images_task},       {"imdb", make_imdb_task},
    {"retrieval", make_retrieval_task}, {"speech", make_speech_task}};

}  // namespace

const char* metric_name(Metric metric) {
  switch (metric) {
    case Metric::accuracy:
      return "accuracy";
    case Metric::bits_per_byte:
      return "bits per byte";
    case Metric::bits_per_masked_byte:
      return "bits per masked byte";
    case Metric::bits_per_dimension:
      return "bits per dimension";
    case Metric::perplexity:
      return "perplexity";
    case Metric::error_rate:
      return "error rate";
  }
  return "";
}

double metric_value(Metric metric, const Score& score) {
  const auto share = [&](std::int64_t part) {
    return score.count == 0 ? 0.0 : static_cast<double>(part) / static_cast<double>(score.count);
  };
  switch (metric) {
    case Metric::accuracy:
      return share(score.correct);
    case Metric::error_rate:
      return share(score.count - score.correct);
    case Metric::bits_per_byte:
    case Metric::bits_per_masked_byte:
    case Metric::bits_per_dimension:
      return score.loss() / std::log(2.0);
    case Metric::perplexity:
      return std::exp(score.loss());
  }
  return 0.0;
}

bool better(Metric metric, double a, double b) {
  return metric == Metric::accuracy ? a > b : a < b;
}

bool counts_answers(Metric metric) {
  return metric == Metric::accuracy || metric == Metric::error_rate;
}

std::vector<std::int64_t> Task::encode(const std::string& /*text*/) const {
  throw Error(
      fmt::format("[task] expected a task with text (bytes, words or tokens); got {}", name()));
}

std::string Task::decode(const std::vector<std::int64_t>& /*tokens*/) const {
  throw Error(
      fmt::format("[task] expected a task with text (bytes, words or tokens); got {}", name()));
}

std::vector<std::string> task_names() {
  std::vector<std::string> names;
  for (const auto& [name, make] : kTasks) names.emplace_back(name);
  return names;
}

std::unique_ptr<Task> make_task(const Config& config, const TaskFiles* stored) {
  for (const auto& [name, make] : kTasks) {
    if (config.task == name) return make(config, stored);
  }
  throw Error(fmt::format("[task] expected one of {}; got \"{}\"", fmt::join(task_names(), ", "),
                          config.task));
}

}  // namespace coterie::train
