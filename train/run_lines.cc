// SPDX-License-Identifier: MIT
#include "train/run_lines.h"

#include <torch/headeronly/version.h>

#include <ctime>
#include <nlohmann/json.hpp>

#include "coterie/runtime.h"
#include "train/inspect.h"
#include "train/options.h"
#include "train/trainer.h"

namespace coterie::train {
namespace {

using nlohmann::json;

constexpr std::int64_t kInspectedRows = 4;

std::string utc_date() {
  const std::time_t now = std::time(nullptr);
  std::tm fields{};
  ::gmtime_r(&now, &fields);
  char text[32];
  std::strftime(text, sizeof text, "%Y-%m-%dT%H:%M:%SZ", &fields);
  return text;
}

json machine(const Config& config) {
  const BuildInfo build = build_info();
  json facts = {{"version", build.version},   {"torch", TORCH_VERSION},
                {"compiler", build.compiler}, {"build_type", build.build_type},
                {"cpu", cpu_model()},         {"isa", cpu_isa_name(cpu_isa())},
                {"threads", threads()},       {"device", config.device}};
  const std::vector<CudaDevice> devices = cuda_devices();
  const auto index = static_cast<std::size_t>(
      config.device.starts_with("cuda:") ? std::stoi(config.device.substr(5)) : 0);
  if (config.device != "cpu" && index < devices.size()) facts["gpu"] = devices[index].name;
  return facts;
}

// Queries of these mechanisms share keys selected by content, which is why they take no mask.
bool selects_by_content(const Mechanism& mechanism) { return !takes_mask(mechanism); }

bool selects_by_content(const std::vector<AttentionSpec>& specs) {
  for (const AttentionSpec& spec : specs) {
    for (const HeadGroup& group : spec.groups) {
      if (selects_by_content(group.mechanism)) return true;
    }
  }
  return false;
}

}  // namespace

json run_line(const Config& config, const Task& task, const ::torch::nn::Module& model) {
  std::int64_t parameters = 0;
  for (const at::Tensor& parameter : model.parameters()) parameters += parameter.numel();
  const DataFacts data = task.data();
  json baselines = json::array();
  for (const Baseline& baseline : task.baselines()) {
    baselines.push_back({{"name", baseline.name}, {"value", baseline.value}});
  }
  return {{"kind", "run"},
          {"task", task.name()},
          {"attention", attention_text(config)},
          {"leaks", !leak_warning(layer_attention(config), task.causal()).empty()},
          {"data", {{"checksum", data.checksum}, {"bytes", data.bytes}}},
          {"config", config_text(config)},
          {"machine", machine(config)},
          {"parameters", parameters},
          {"metric", metric_name(task.metric())},
          {"baselines", baselines},
          {"seed", config.seed},
          {"date", utc_date()}};
}

json step_line(const StepFacts& facts, bool with_commitment) {
  json line = {{"kind", "step"},
               {"step", facts.step},
               {"loss", facts.loss},
               {"lr", facts.rate},
               {"grad_norm", facts.gradient_norm},
               {"tokens_per_s", facts.tokens_per_s},
               {"seconds", facts.seconds},
               {"memory_bytes", facts.memory_bytes}};
  if (with_commitment) line["commitment"] = facts.commitment;
  return line;
}

json resume_line(std::int64_t step, const Config& config) {
  return {{"kind", "resume"},
          {"step", step},
          {"config", config_text(config)},
          {"machine", machine(config)},
          {"date", utc_date()}};
}

json eval_line(const char* kind, std::int64_t step, const Task& task,
               const Evaluation& evaluation) {
  json strata = json::object();
  for (const auto& [name, score] : evaluation.strata) {
    if (score.count > 0) strata[name] = metric_value(task.metric(), score);
  }
  return {{"kind", kind},
          {"step", step},
          {"split", "valid"},
          {"share", evaluation.share},
          {"loss", evaluation.score.loss()},
          {"metric", evaluation.metric},
          {"accuracy", metric_value(Metric::accuracy, evaluation.score)},
          {"seconds", evaluation.seconds},
          {"strata", strata}};
}

json end_line(const EndFacts& facts) {
  json line = {{"kind", "end"},
               {"step", facts.state.step},
               {"reason", facts.reason},
               {"seconds", facts.state.seconds},
               {"peak_memory_bytes", facts.peak_memory_bytes}};
  if (facts.state.best) {
    line["best"] = *facts.state.best;
    line["best_step"] = facts.state.best_step;
  }
  if (facts.ranks == nullptr) return line;
  for (const auto& [name, traffic] : facts.ranks->traffic()) {
    line["collectives"][name] = {{"calls", traffic.calls}, {"bytes", traffic.bytes}};
  }
  return line;
}

json ranks_line(const Ranks& ranks) {
  return {{"size", ranks.size()},
          {"data", ranks.data_size()},
          {"context", ranks.context_size()},
          {"backend", ranks.back_end()}};
}

std::optional<Inspection> inspect_clusters(const torch_api::Model& model, const Task& task) {
  if (!selects_by_content(model->transformer()->options().attention)) return std::nullopt;
  return inspect(model, task, kInspectedRows, /*seed=*/0);
}

json clusters_line(std::int64_t step, const Inspection& inspection) {
  json layers = json::array();
  for (const GroupReport& group : inspection.groups) {
    json heads = json::array();
    for (const HeadReport& head : group.heads) {
      heads.push_back({{"sizes", head.sizes}, {"empty", head.empty}, {"mass", head.mass}});
    }
    layers.push_back({{"layer", group.layer},
                      {"group", group.group},
                      {"attention", group.attention},
                      {"heads", heads}});
  }
  return {{"kind", "clusters"}, {"step", step}, {"layers", layers}};
}

}  // namespace coterie::train
