// SPDX-License-Identifier: MIT
// The results of `coterie approximate` as a table and as JSON lines.
#include <fmt/core.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <ctime>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>

#include "apps/commit.h"
#include "apps/coterie/approximate_options.h"
#include "apps/coterie/progress.h"
#include "coterie/runtime.h"

namespace coterie::cli {
namespace {

using Json = nlohmann::ordered_json;

constexpr int kNameWidth = 44;

std::string date_text() {
  const std::time_t now = std::time(nullptr);
  char text[32] = {};
  std::strftime(text, sizeof text, "%Y-%m-%dT%H:%M:%SZ", std::gmtime(&now));
  return text;
}

Json machine_json(const ApproximateVerb& verb) {
  const BuildInfo build = build_info();
  Json facts = {{"version", build.version},       {"commit", kCommit},
                {"compiler", build.compiler},     {"cpu", cpu_model()},
                {"isa", cpu_isa_name(cpu_isa())}, {"threads", threads()},
                {"device", verb.device}};
  const std::vector<CudaDevice> devices = cuda_devices();
  if (verb.device == "cuda" && !devices.empty()) facts["gpu"] = devices[0].name;
  return facts;
}

Json interval_json(const train::Interval& interval) {
  return Json::array({interval.value, interval.low, interval.high});
}

std::string file_name(const std::string& path) {
  return std::filesystem::path(path).filename().string();
}

// "minilm" of ".../minilm", but the folder above "model".
std::string model_name(const std::string& path) {
  const std::filesystem::path folder = std::filesystem::path(path).lexically_normal();
  const std::string own =
      (folder.has_filename() ? folder : folder.parent_path()).filename().string();
  const std::string above = folder.parent_path().filename().string();
  return own == "model" && !above.empty() ? above : own;
}

Json measured_json(const train::MeasuredAttention& measured) {
  return {{"name", measured.name}, {"error", measured.error}, {"seconds", measured.seconds}};
}

std::string mebibytes(std::int64_t bytes) {
  return fmt::format("{:.0f}", static_cast<double>(bytes) / (1 << 20));
}

}  // namespace

Json approximate_line(const ApproximateVerb& verb, const train::EncoderTask* task) {
  Json data = Json::array();
  for (const std::string& path : verb.task.data) data.push_back(file_name(path));
  Json line = {{"kind", "approximate"},
               {"model", model_name(verb.model)},
               {"task", verb.task.name},
               {"glue", verb.task.name == "glue" ? Json(verb.task.glue) : Json()},
               {"data", data},
               {"length", verb.task.length},
               {"join", verb.task.join},
               {"limit", verb.task.limit},
               {"train_limit", verb.task.train_limit},
               {"tune", verb.task.tune.encoder},
               {"epochs", verb.task.tune.epochs},
               {"dtype", verb.dtype},
               {"seed", verb.seed},
               {"draws", verb.draws},
               {"date", date_text()},
               {"machine", machine_json(verb)}};
  if (task == nullptr) return line;
  std::int64_t tokens = 0;
  for (const train::EncodedText& input : task->inputs()) {
    tokens += static_cast<std::int64_t>(input.tokens.size());
  }
  line["notes"] = task->notes();
  line["units"] = task->units();
  line["inputs"] = task->inputs().size();
  line["mean_tokens"] = static_cast<double>(tokens) / static_cast<double>(task->inputs().size());
  return line;
}

Json result_line(const train::ApproximateResult& result) {
  Json scores = Json::array(), speeds = Json::array();
  for (const train::ScoreResult& score : result.scores) {
    scores.push_back({{"name", score.name},
                      {"value", interval_json(score.value)},
                      {"difference", interval_json(score.difference)}});
  }
  for (const train::SpeedPoint& point : result.speeds) {
    speeds.push_back({{"length", point.length}, {"tokens_per_s", point.tokens_per_s}});
  }
  return {{"kind", "result"},
          {"attention", result.attention},
          {"scores", scores},
          {"cosine", result.cosine},
          {"worst_cosine", result.worst_cosine},
          {"embedding_error", result.embedding_error},
          {"head_error", result.head_error},
          {"exact_share", result.exact_share},
          {"seconds", result.seconds},
          {"tokens", result.tokens},
          {"tokens_per_s", result.tokens_per_s},
          {"peak_memory_bytes", result.peak_memory_bytes},
          {"speeds", speeds},
          {"crossover", result.crossover ? Json(*result.crossover) : Json()}};
}

Json calibration_line(const train::Calibration& calibration, const ApproximateVerb& verb) {
  Json uniform = Json::array(), targets = Json::array();
  for (const train::MeasuredAttention& rung : calibration.uniform) {
    uniform.push_back(measured_json(rung));
  }
  for (const train::CalibratedTarget& target : calibration.targets) {
    Json layers = Json::array();
    for (const AttentionSpec& spec : target.choice.layers) layers.push_back(spec.to_string());
    targets.push_back({{"target", target.target},
                       {"layers", layers},
                       {"estimated_error", target.choice.error},
                       {"measured", measured_json(target.measured)},
                       {"explanation", explain(target, verb.task.length)}});
  }
  return {{"kind", "calibration"},
          {"length", verb.task.length},
          {"samples", verb.samples},
          {"ladder", calibration.ladder},
          {"layer_seconds", calibration.seconds},
          {"uniform", uniform},
          {"targets", targets}};
}

Json spec_file_json(const train::CalibratedTarget& target, const train::Calibration& calibration,
                    const std::vector<std::string>& names, const ApproximateVerb& verb) {
  Json layers = Json::array(), reasons = Json::array();
  for (std::size_t l = 0; l < target.choice.layers.size(); ++l) {
    layers.push_back({{"name", names[l]}, {"spec", target.choice.layers[l].to_string()}});
    reasons.push_back(target.choice.reasons[l]);
  }
  return {{"coterie_specs", 1},
          {"layers", layers},
          {"about",
           {{"model", model_name(verb.model)},
            {"target", target.target},
            {"length", verb.task.length},
            {"device", verb.device},
            {"estimated_error", target.choice.error},
            {"verified_error", target.measured.error},
            {"seconds", target.measured.seconds},
            {"full_seconds", calibration.uniform.at(calibration.full).seconds},
            {"reasons", reasons}}}};
}

void print_results_header(const train::EncoderTask& task) {
  fmt::print("\n{:<{}}", "attention", kNameWidth);
  for (const std::string& name : task.score_names()) {
    fmt::print(" {:>8} {:>17}", name, "95 % interval");
    fmt::print(" {:>24}", "against full");
  }
  fmt::print(" {:>8} {:>13} {:>6} {:>9} {:>6} {:>11}\n", "cosine", "head error", "exact",
             "tokens/s", "MiB", "faster from");
}

void print_approximation(const train::ApproximateResult& result,
                         const train::ApproximateResult& full) {
  fmt::print("{:<{}}", result.attention, kNameWidth);
  for (const train::ScoreResult& score : result.scores) {
    fmt::print(" {:>8.4f} {:>17} {:>24}", score.value.value,
               fmt::format("{:.4f} {:.4f}", score.value.low, score.value.high),
               fmt::format("{:+.4f} ({:+.4f} {:+.4f})", score.difference.value,
                           score.difference.low, score.difference.high));
  }
  if (result.tokens > 0) {
    double sum = 0, most = 0;
    std::size_t heads = 0;
    for (const std::vector<double>& layer : result.head_error) {
      for (const double error : layer) {
        sum += error;
        most = std::max(most, error);
        ++heads;
      }
    }
    const bool is_full = &result == &full || result.attention == full.attention;
    fmt::print(
        " {:>8.5f} {:>13} {:>5.0f}% {:>9} {:>6} {:>11}", result.cosine,
        heads == 0 ? "-" : fmt::format("{:.3f} {:.3f}", sum / static_cast<double>(heads), most),
        100 * result.exact_share, count_text(result.tokens_per_s),
        mebibytes(result.peak_memory_bytes),
        result.crossover                   ? fmt::format("{:.0f}", *result.crossover)
        : result.speeds.empty() || is_full ? "-"
                                           : fmt::format("> {}", result.speeds.back().length));
  }
  fmt::print("\n");
  for (const train::SpeedPoint& point : result.speeds) {
    const auto same = [&](const train::SpeedPoint& other) { return other.length == point.length; };
    const auto base = std::find_if(full.speeds.begin(), full.speeds.end(), same);
    fmt::print("    {} tokens: {} tokens/s{}\n", point.length, count_text(point.tokens_per_s),
               base == full.speeds.end()
                   ? ""
                   : fmt::format(", {:.2f} times full", point.tokens_per_s / base->tokens_per_s));
  }
  std::fflush(stdout);
}

void print_calibration(const train::Calibration& calibration, std::int64_t length) {
  const double full = calibration.uniform.at(calibration.full).seconds;
  const auto line = [&](const train::MeasuredAttention& measured, const std::string& name) {
    fmt::print("{:<{}} {:>9.5f} {:>10.1f} {:>7.2f}\n", name, kNameWidth, measured.error,
               1e3 * measured.seconds, full / measured.seconds);
  };
  fmt::print("\n{:<{}} {:>9} {:>10} {:>7}\n", "in all heads", kNameWidth, "error", "ms", "speed");
  for (const train::MeasuredAttention& rung : calibration.uniform) line(rung, rung.name);
  for (const train::CalibratedTarget& target : calibration.targets) {
    fmt::print("\n");
    line(target.measured, fmt::format("chosen for an error of {}", target.target));
    for (std::size_t l = 0; l < target.choice.layers.size(); ++l) {
      fmt::print("  layer {}: {}\n", l, target.choice.layers[l].to_string());
    }
    for (const std::string& text : explain(target, length)) fmt::print("  {}\n", text);
  }
}

}  // namespace coterie::cli
