// SPDX-License-Identifier: MIT
#include "train/trainer.h"

#include <ATen/Context.h>
#include <ATen/core/Generator.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/isfinite.h>
#include <fmt/core.h>

#include <chrono>
#include <cmath>
#include <filesystem>
#include <mutex>
#include <nlohmann/json.hpp>

#include "coterie/error.h"
#include "formats/files.h"
#include "train/eval_mode.h"
#include "train/gradients.h"
#include "train/memory.h"
#include "train/optimizer.h"
#include "train/options.h"
#include "train/run_lines.h"
#include "train/schedule.h"

namespace coterie::train {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

bool has_routing(const std::vector<AttentionSpec>& specs) {
  for (const AttentionSpec& spec : specs) {
    for (const HeadGroup& group : spec.groups) {
      if (std::holds_alternative<RoutingParams>(group.mechanism)) return true;
    }
  }
  return false;
}

// State of the random generator used by dropout.
std::string generator_name(c10::Device device) { return device.is_cpu() ? "cpu" : "cuda"; }

at::Tensor generator_state(c10::Device device) {
  at::Generator generator = at::globalContext().defaultGenerator(device);
  const std::lock_guard<std::mutex> lock(generator.mutex());
  return generator.get_state();
}

void set_generator_state(c10::Device device, const at::Tensor& state) {
  at::Generator generator = at::globalContext().defaultGenerator(device);
  const std::lock_guard<std::mutex> lock(generator.mutex());
  generator.set_state(state);
}

// One run, from step 0 or the checkpoint it resumes from.
class Run {
 public:
  Run(const Config& config, const Task& task, const TrainHooks& hooks)
      : config_(config),
        task_(task),
        hooks_(hooks),
        device_(config_device(config)),
        memory_(device_),
        attention_(layer_attention(config)),
        model_(make_model(config, task)),
        optimizer_(make_optimizer(config.optimizer, *model_)),
        routing_(has_routing(attention_)) {}

  void begin(bool resume) {
    const std::string leak = leak_warning(attention_, task_.causal());
    if (!leak.empty()) warn(leak);
    const bool restored = resume && restore();
    resumed_step_ = restored ? state_.step : Log::kNew;
    if (!restored && routing_ && config_.train.centroids == "data") initialise_centroids();
    open_folder();
  }

  TrainResult finish() {
    std::string reason;
    const std::int64_t first = state_.step;
    const Clock::time_point start = Clock::now();
    while ((reason = reason_to_stop()).empty()) {
      run_step();
      after_step();
      show_progress(seconds_since(start) / static_cast<double>(state_.step - first));
    }
    if (reason == "interrupted" && saved_step_ != state_.step) save(/*best=*/false);
    if (reason != "interrupted" && !evaluation_) evaluate_now();  // resumed after its last step
    if (reason != "interrupted") log_clusters();
    write(end_line({reason, state_, memory_.peak_bytes()}));
    return {state_, reason, evaluation_,
            config_.out.empty() ? "" : checkpoints().path(saved_step_)};
  }

 private:
  Checkpoints checkpoints() const { return Checkpoints(config_.out); }

  void write(const nlohmann::json& line) const {
    if (log_) log_->write(line);
  }

  void warn(const std::string& line) const {
    if (hooks_.warn) hooks_.warn(line);
  }

  // Whether there was a checkpoint to resume from.
  bool restore() {
    if (config_.out.empty() || checkpoints().steps().empty()) {
      warn("no checkpoint to resume from yet; starting from step 0");
      return false;
    }
    std::string warning;
    const std::string folder = find_checkpoint(config_.out, /*best=*/false, &warning);
    if (!warning.empty()) warn(warning);
    Checkpoint checkpoint = load_checkpoint(folder);
    load_module(*model_, checkpoint.model, folder);
    const auto generator = checkpoint.optimizer.find("generator." + generator_name(device_));
    if (generator != checkpoint.optimizer.end()) set_generator_state(device_, generator->second);
    std::erase_if(checkpoint.optimizer,
                  [](const auto& item) { return item.first.starts_with("generator."); });
    load_optimizer(*optimizer_, *model_, checkpoint.optimizer, folder);
    state_ = checkpoint.state;
    saved_step_ = state_.step;
    checkpoints().set_aside_after(state_);
    return true;
  }

  void open_folder() {
    if (config_.out.empty()) return;
    std::error_code error;
    std::filesystem::create_directories(config_.out, error);
    if (error) throw Error("[train] cannot create " + config_.out + ": " + error.message());
    write_file(config_.out + "/config.toml", config_text(config_));
    log_.emplace(config_.out + "/log.jsonl", resumed_step_);
    if (resumed_step_ == Log::kNew) write(run_line(config_, task_, *model_));
  }

  // By k-means over the first batch, with the untrained model.
  void initialise_centroids() {
    const at::NoGradGuard no_grad;
    const Batch batch = step_batch(1);
    std::vector<torch_api::AttentionRecord> records;
    torch_api::PassContext context;
    context.lengths = batch.lengths;
    context.seed = step_seed(config_.seed, 0);
    context.records = &records;
    const EvalMode eval_mode(model_);
    model_->forward(batch.tokens, context);
    model_->transformer()->initialise_centroids(records, config_.seed);
  }

  // Steps are counted from 1, batches from 0.
  Batch step_batch(std::int64_t step) const {
    const Batch batch = task_.batch(Split::train, step - 1, config_.train.batch);
    return to_device(truncated(batch, step_length(config_, step)), device_);
  }

  std::string reason_to_stop() const {
    if (state_.step >= config_.train.steps) return "steps";
    const std::int64_t patience = config_.train.patience;
    if (patience > 0 && state_.evaluations_without_improvement >= patience) return "patience";
    if (hooks_.interrupted != nullptr && *hooks_.interrupted) return "interrupted";
    return "";
  }

  void run_step() {
    const Clock::time_point start = Clock::now();
    const std::int64_t step = state_.step + 1;
    last_ = {.step = step};
    last_.rate = config_.optimizer.lr * rate_factor(config_.schedule, step, config_.train.steps);
    set_learning_rate(*optimizer_, last_.rate);
    const Batch batch = step_batch(step);
    optimizer_->zero_grad();
    const StepLoss loss = add_gradients(model_, batch,
                                        {.micro_batch = config_.train.micro_batch,
                                         .seed = step_seed(config_.seed, step),
                                         .bf16 = config_.train.dtype == "bf16",
                                         .update_centroids = routing_});
    last_.loss = loss.loss;
    last_.commitment = loss.commitment;
    check_finite("loss", loss.loss + loss.commitment);
    last_.gradient_norm = clip_gradients(*model_, config_.optimizer.clip);
    check_finite("gradient norm", last_.gradient_norm);
    optimizer_->step();
    state_.step = step;
    const double seconds = seconds_since(start);
    state_.seconds += seconds;
    logged_seconds_ += seconds;
    logged_tokens_ += batch.tokens.numel();
  }

  void after_step() {
    const bool last = state_.step == config_.train.steps;
    const auto due = [&](std::int64_t every) { return every > 0 && state_.step % every == 0; };
    const bool evaluates = last || due(config_.train.eval_every);
    if (evaluates || due(config_.train.log_every) || state_.step == 1) log_step();
    const bool improved = evaluates && evaluate_now();
    if (improved || last || due(config_.checkpoint.every)) save(improved);
  }

  void log_step() {
    last_.tokens_per_s = static_cast<double>(logged_tokens_) / logged_seconds_;
    last_.seconds = state_.seconds;
    last_.memory_bytes = memory_.bytes();
    logged_tokens_ = 0;
    logged_seconds_ = 0;
    tokens_per_s_ = last_.tokens_per_s;
    write(step_line(last_, routing_));
  }

  // Whether the model is the best so far.
  bool evaluate_now() {
    evaluation_ = evaluate(model_, task_,
                           {.rows = config_.train.batch,
                            .batches = config_.train.eval_batches,
                            .bf16 = config_.train.dtype == "bf16"});
    const double metric = evaluation_->metric;
    if (state_.step == resumed_step_) return false;  // already counted and logged
    check_finite("validation loss", evaluation_->score.loss());
    write(eval_line(state_.step, task_, *evaluation_));
    const bool improved = !state_.best || better(task_.metric(), metric, *state_.best);
    state_.evaluations_without_improvement =
        improved ? 0 : state_.evaluations_without_improvement + 1;
    if (improved) {
      state_.best = metric;
      state_.best_step = state_.step;
    }
    return improved;
  }

  void log_clusters() {
    if (!log_) return;
    const auto line = clusters_line(state_.step, model_, task_);
    if (line) write(*line);
  }

  void save(bool best) {
    if (config_.out.empty()) return;
    for (const auto& item : model_->named_parameters()) {
      if (!at::isfinite(item.value()).all().item<bool>()) check_finite(item.key(), NAN);
    }
    Checkpoint checkpoint{module_tensors(*model_), optimizer_tensors(*optimizer_, *model_),
                          config_text(config_), state_};
    checkpoint.optimizer["generator." + generator_name(device_)] = generator_state(device_);
    checkpoints().save(checkpoint, best);
    checkpoints().prune(config_.checkpoint.keep);
    saved_step_ = state_.step;
  }

  void check_finite(const std::string& what, double value) const {
    if (std::isfinite(value)) return;
    const std::string kept =
        saved_step_ == 0 ? "" : "; the last good checkpoint is " + checkpoints().path(saved_step_);
    throw Error(
        fmt::format("[train] {} is {} in step {}: try a lower --optimizer.lr, a longer "
                    "--schedule.warmup or a lower --optimizer.clip{}",
                    what, value, last_.step, kept));
  }

  void show_progress(double seconds_per_step) const {
    if (!hooks_.progress) return;
    ProgressLine line;
    line.label = config_.task + "  " + config_.attention;
    line.step = state_.step;
    line.steps = config_.train.steps;
    line.loss = last_.loss;
    line.tokens_per_s = tokens_per_s_;
    line.seconds_left = seconds_per_step * static_cast<double>(line.steps - line.step);
    if (evaluation_) {
      line.note = fmt::format("{} {:.4g}", metric_name(task_.metric()), evaluation_->metric);
    }
    hooks_.progress(line);
  }

  const Config& config_;
  const Task& task_;
  const TrainHooks& hooks_;
  c10::Device device_;
  MemoryMeter memory_;  // made before the model, to measure it
  std::vector<AttentionSpec> attention_;
  torch_api::LanguageModel model_;
  std::unique_ptr<::torch::optim::Optimizer> optimizer_;
  bool routing_;
  std::optional<Log> log_;
  TrainState state_;
  std::int64_t resumed_step_ = Log::kNew, saved_step_ = 0;
  StepFacts last_;
  std::optional<Evaluation> evaluation_;
  std::int64_t logged_tokens_ = 0;  // tokens and seconds since the last log line
  double logged_seconds_ = 0, tokens_per_s_ = 0;
};

void refuse_used_folder(const std::string& out) {
  if (out.empty() || !std::filesystem::exists(out + "/log.jsonl")) return;
  throw Error("[train] " + out +
              " already contains a run: continue it with --resume or choose another --out");
}

}  // namespace

TrainResult train(const Config& config, const Task& task, bool resume, const TrainHooks& hooks) {
  if (!resume) refuse_used_folder(config.out);
  use_threads(config.threads);
  Run run(config, task, hooks);
  run.begin(resume);
  return run.finish();
}

}  // namespace coterie::train
