// SPDX-License-Identifier: MIT
#include "train/trainer.h"

#include <ATen/Context.h>
#include <ATen/core/Generator.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/isfinite.h>
#include <ATen/record_function.h>
#include <fmt/core.h>

#include <chrono>
#include <cmath>
#include <ctime>
#include <filesystem>
#include <mutex>
#include <nlohmann/json.hpp>
#include <set>
#include <utility>

#include "coterie/error.h"
#include "coterie/random.h"
#include "coterie/runtime.h"
#include "coterie/torch/fast.h"
#include "formats/files.h"
#include "report/data.h"
#include "train/collapse.h"
#include "train/device_graph.h"
#include "train/eval_mode.h"
#include "train/gradients.h"
#include "train/memory.h"
#include "train/optimizer.h"
#include "train/options.h"
#include "train/readback.h"
#include "train/run_lines.h"
#include "train/run_lock.h"
#include "train/schedule.h"

namespace coterie::train {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kBeforeGraph = 3;         // steps until libraries have initialised themselves
constexpr double kLatest = 3.0;         // seconds that a step may take after an interrupt
constexpr std::uint32_t kDropouts = 3;  // random stream, distinct from those of gradients.cc

// Leaves a step or an evaluation after an interrupt.
struct Abandoned {};

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

// Why a step cannot be recorded: it would repeat the numbers that the host gave it. Empty if it
// can.
std::string graph_refusal(const Config& config, const std::vector<AttentionSpec>& specs,
                          bool alone) {
  if (!config.device.starts_with("cuda")) return "--device is " + config.device;
  if (!alone) return "several processes train together";
  if (config.train.truncate > 0) return "--train.truncate changes the length of steps";
  if (config.model.dropout > 0 || config.model.attention_dropout > 0) {
    return "dropout draws other masks in every step";
  }
  for (const AttentionSpec& spec : specs) {
    for (const HeadGroup& group : spec.groups) {
      const Mechanism& mechanism = group.mechanism;
      if (std::holds_alternative<ClusteredParams>(mechanism) ||
          std::holds_alternative<ImprovedClusteredParams>(mechanism) ||
          std::holds_alternative<LshParams>(mechanism)) {
        return std::string(mechanism_name(mechanism)) +
               " starts from other random numbers in every step";
      }
    }
  }
  return "";
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

void refuse_used_folder(const std::string& out) {
  if (out.empty() || !std::filesystem::exists(out + "/log.jsonl")) return;
  throw Error("[train] " + out +
              " already contains a run: continue it with --resume or choose another --out");
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
        ranks_(hooks.ranks),
        routing_(has_routing(attention_)),
        label_(attention_text(config)) {
    if (ranks_ != nullptr) join_ranks();
    if (config.train.graph) {
      const std::string refusal = graph_refusal(config, attention_, ranks_ == nullptr);
      if (!refusal.empty()) throw Error("[train] --train.graph cannot be used: " + refusal);
      graph_.emplace();
    }
    optimizer_ = make_optimizer(config.optimizer, *model_, owners_.empty() ? nullptr : &owned_);
  }

  void begin(bool resume) {
    lock_folder(resume);
    const std::string leak = leak_warning(attention_, task_.causal());
    if (!leak.empty()) warn(leak);
    const bool restored = resume && restore();
    resumed_step_ = restored ? state_.step : Log::kNew;
    state_.threads = coterie::threads();
    finished_ = restored && !reason_to_stop().empty() && log_has_ended();
    if (finished_) return;
    if (!restored) start_parameters();
    open_folder();
  }

  TrainResult finish() {
    if (finished_) return {state_, "finished", {}, checkpoints().path(saved_step_)};
    if (ranks_ != nullptr) sums_.emplace(*ranks_, model_->parameters());
    std::string reason = run_steps();
    if (reason != "interrupted" && !try_to([&] { evaluate_at_end(); })) reason = "interrupted";
    if (reason == "interrupted" && saved_step_ != state_.step) save(/*best=*/false);
    if (reason != "interrupted" && writes()) log_clusters();
    write(end_line({reason, state_, memory_.peak_bytes(), ranks_}));
    if (ranks_ != nullptr) ranks_->barrier();  // rank 0 may serve the others' store
    return {state_, reason, evaluation_, saved_step_ == 0 ? "" : checkpoints().path(saved_step_)};
  }

  // The first steps also allocate memory and initialise libraries.
  DryRun try_steps(int steps, bool profile) {
    DryRun result;
    if (ranks_ != nullptr) sums_.emplace(*ranks_, model_->parameters());
    for (const at::Tensor& parameter : model_->parameters()) {
      result.parameters += parameter.numel();
    }
    const Clock::time_point begun = Clock::now();
    if (start_parameters()) {
      synchronise(device_);
      result.centroid_seconds = seconds_since(begun);
    }
    result.batch_tokens = config_.train.batch * config_.length;
    for (int i = 0; i < (graph_ ? kBeforeGraph + 1 : 1); ++i) run_step();
    read_launched();
    const Clock::time_point start = Clock::now();
    const std::clock_t used_before = std::clock();
    for (int i = 0; i < steps; ++i) run_step();
    read_launched();
    synchronise(device_);
    result.step_seconds = seconds_since(start) / steps;
    result.step_cpu_seconds =
        static_cast<double>(std::clock() - used_before) / CLOCKS_PER_SEC / steps;
    const auto all = static_cast<double>(task_.batches(Split::valid, config_.train.batch));
    const auto used = [&](std::int64_t batches) {
      return batches > 0 ? std::min(static_cast<double>(batches), all) : all;
    };
    const double one = evaluation_of(/*batches=*/1).seconds;
    const std::int64_t every = config_.train.eval_every;
    const double times = every > 0 ? static_cast<double>(config_.train.steps / every) : 1;
    result.evaluation_seconds =
        one * (times * used(config_.train.eval_batches) + used(config_.train.final_batches));
    result.peak_bytes = memory_.peak_bytes();
    constexpr int kProfiled = 3;
    if (profile) result.profile = profile_steps(kProfiled, device_, [this] { run_step(); });
    read_launched();
    return result;
  }

 private:
  Checkpoints checkpoints() const { return Checkpoints(config_.out); }

  bool writes() const { return ranks_ == nullptr || ranks_->first(); }
  std::int64_t data_ranks() const { return ranks_ == nullptr ? 1 : ranks_->data_size(); }

  // Equal parameters on all ranks, and what each of them does.
  void join_ranks() {
    if (config_.train.batch < ranks_->data_size()) {
      throw Error(fmt::format(
          "[train] expected --train.batch of at least {}, one sequence for each part of the batch; "
          "got {}: raise it, or --train.context, which shares sequences",
          ranks_->data_size(), config_.train.batch));
    }
    const std::int64_t context = ranks_->context_size();
    if (config_.length < context) {
      throw Error(fmt::format("[train] expected --length of at least --train.context {}; got {}",
                              context, config_.length));
    }
    const std::int64_t heads = config_.model.heads, kv_heads = config_.model.kv_heads;
    for (const AttentionSpec& spec : attention_) {
      torch_api::check_sequence_ranks(spec, heads, kv_heads == 0 ? heads : kv_heads, context);
    }
    const std::string data = task_.data().checksum, expected = ranks_->from_first(data);
    if (data != expected) {
      throw Error(
          fmt::format("[train] rank {} has other data than rank 0: checksum {} instead of "
                      "{}",
                      ranks_->rank(), data, expected));
    }
    share_module();
    if (!config_.optimizer.shard) return;
    owners_ = parameter_owners(*model_, ranks_->size());
    owned_ = owned_parameters(*model_, owners_, ranks_->rank());
  }

  // Parameters and centroids of rank 0.
  void share_module() {
    const at::NoGradGuard no_grad;
    for (const at::Tensor& tensor : model_->parameters()) ranks_->broadcast(tensor, 0, "start");
    for (const at::Tensor& tensor : model_->buffers()) ranks_->broadcast(tensor, 0, "start");
  }

  void write(const nlohmann::json& line) const {
    if (log_) log_->write(line);
  }

  void warn(const std::string& line) const {
    if (hooks_.warn) hooks_.warn(line);
  }

  // Creates the folder. Nothing else in it is written before it is locked.
  void lock_folder(bool resume) {
    if (config_.out.empty() || !writes()) return;
    std::error_code error;
    std::filesystem::create_directories(config_.out, error);
    if (error) throw Error("[train] cannot create " + config_.out + ": " + error.message());
    lock_.emplace(config_.out);
    if (!resume) refuse_used_folder(config_.out);
  }

  bool log_has_ended() const {
    const std::optional<RunLog> log = read_run(config_.out);
    return log && log->end && log->end->reason != "interrupted";
  }

  // Until there is a reason to stop, which is returned.
  std::string run_steps() {
    if (resumed_step_ != Log::kNew && evaluation_is_due() && !try_to([&] { finish_step(); })) {
      return "interrupted";
    }
    const std::int64_t first = state_.step;
    const Clock::time_point start = Clock::now();
    while (true) {
      std::string reason = reason_to_stop();
      if (!reason.empty()) return reason;
      const at::Tensor random = generator_state(device_);
      if (ranks_ != nullptr) ranks_->start_vote(interrupted());
      const bool whole = try_to([&] { run_step(); });
      if (!whole) {  // as if it had not begun
        optimizer_->zero_grad();
        set_generator_state(device_, random);
        return "interrupted";
      }
      if (!try_to([&] { finish_step(); })) return "interrupted";
      if (ranks_ != nullptr) stop_together_ = ranks_->finish_vote();
      show_progress(seconds_since(start) / static_cast<double>(state_.step - first));
    }
  }

  // Whether `work` ran to its end.
  template <class Work>
  bool try_to(const Work& work) {
    try {
      work();
      return true;
    } catch (const Abandoned&) {
      return false;
    }
  }

  bool interrupted() const { return hooks_.interrupted != nullptr && *hooks_.interrupted; }
  bool stops() const { return ranks_ == nullptr ? interrupted() : stop_together_; }

  void leave_if_late() {
    if (ranks_ != nullptr || !interrupted()) return;  // a rank cannot leave the others alone
    if (!noticed_) noticed_ = Clock::now();
    if (seconds_since(*noticed_) > kLatest) throw Abandoned();
  }

  // Whether there was a checkpoint to resume from.
  bool restore() {
    const std::string folder = from_first([&] { return checkpoint_to_resume(); });
    if (folder.empty()) {
      warn("no checkpoint to resume from yet; starting from step 0");
      return false;
    }
    Checkpoint checkpoint = load_checkpoint(folder);
    check_data(checkpoint, folder);
    load_module(*model_, checkpoint.model, folder);
    const auto generator = checkpoint.optimizer.find("generator." + generator_name(device_));
    if (generator != checkpoint.optimizer.end()) set_generator_state(device_, generator->second);
    std::erase_if(checkpoint.optimizer,
                  [](const auto& item) { return item.first.starts_with("generator."); });
    if (!owners_.empty()) {
      checkpoint.optimizer = tensors_of_parameters(checkpoint.optimizer, *model_, owned_);
    }
    load_optimizer(*optimizer_, *model_, checkpoint.optimizer, folder);
    state_ = checkpoint.state;
    saved_step_ = state_.step;
    if (writes()) checkpoints().set_aside_after(state_);
    if (state_.threads != 0 && state_.threads != coterie::threads()) {
      warn(
          fmt::format("the run used {} thread(s) until step {} and uses {} from there on: torch's "
                      "matrix products may then sum in another order, which changes last bits",
                      state_.threads, state_.step, coterie::threads()));
    }
    return true;
  }

  // The text that rank 0 computes; all ranks must see the run's folder.
  template <class Text>
  std::string from_first(const Text& text) const {
    if (ranks_ == nullptr) return text();
    return ranks_->from_first(ranks_->first() ? text() : "");
  }

  std::string checkpoint_to_resume() const {
    if (config_.out.empty() || checkpoints().steps().empty()) return "";
    std::string warning;
    const std::string folder = find_checkpoint(config_.out, /*best=*/false, &warning);
    if (!warning.empty()) warn(warning);
    return folder;
  }

  void check_data(const Checkpoint& checkpoint, const std::string& folder) const {
    const DataFacts now = task_.data();
    if (checkpoint.data.checksum.empty() || checkpoint.data.checksum == now.checksum) return;
    throw Error(fmt::format(
        "[train] {} was trained on other data: expected {} bytes with checksum {} in "
        "--data; got {} bytes with {}. To train its parameters on other data, start a "
        "new run with --init-from",
        folder, checkpoint.data.bytes, checkpoint.data.checksum, now.bytes, now.checksum));
  }

  // Before the first step; returns whether it initialised centroids.
  bool start_parameters() {
    const bool loads = !config_.init_from.empty();
    const bool initialises = !loads && routing_ && config_.train.centroids == "data";
    if (loads) load_parameters();
    if (initialises) initialise_centroids();
    return initialises;
  }

  void load_parameters() {
    std::string warning;
    const std::string folder = find_checkpoint(config_.init_from, /*best=*/true, &warning);
    if (!warning.empty()) warn(warning);
    load_module(*model_, load_checkpoint(folder).model, folder);
    if (ranks_ != nullptr) share_module();
  }

  void open_folder() {
    if (config_.out.empty() || !writes()) return;
    write_file(config_.out + "/config.toml", config_text(config_));
    log_.emplace(config_.out + "/log.jsonl", resumed_step_);
    const bool resumed = resumed_step_ != Log::kNew;
    nlohmann::json line =
        resumed ? resume_line(state_.step, config_) : run_line(config_, task_, *model_);
    if (ranks_ != nullptr) line["ranks"] = ranks_line(*ranks_);
    write(line);
  }

  // By k-means over the first batch, with the untrained model.
  void initialise_centroids() {
    const at::NoGradGuard no_grad;
    const Batch batch = step_batch(1);
    std::vector<torch_api::AttentionRecord> records;
    torch_api::PassContext context;
    context.lengths = batch.lengths;
    context.seed = step_seed(config_.seed, 0);
    context.first_row = own_rows().first;
    context.records = &records;
    context.ranks = ranks_ == nullptr ? nullptr : ranks_->sequence();
    const EvalMode eval_mode(model_);
    model_->forward(batch.tokens, context);
    if (data_ranks() > 1) gather_records(records, batch);
    model_->transformer()->initialise_centroids(records, config_.seed, context.ranks);
    if (context.ranks == nullptr) return;
    for (const auto& buffer : model_->named_buffers()) {  // each rank has those of its heads
      ranks_->sum(buffer.value(), "start");
      buffer.value().div_(static_cast<double>(data_ranks()));
    }
  }

  // The rows of all parts of the batch in their order, as one process would record them.
  void gather_records(std::vector<torch_api::AttentionRecord>& records, const Batch& batch) {
    const std::int64_t all = config_.train.batch, parts = data_ranks();
    const auto gather = [&](at::Tensor& tensor) {
      if (!tensor.defined()) return;
      std::vector<std::int64_t> sizes = tensor.sizes().vec();
      std::vector<at::Tensor> pieces;
      for (std::int64_t part = 0; part < parts; ++part) {
        sizes[0] = torch_api::sequence_slice(all, part, parts).count;
        pieces.push_back(part == ranks_->data_rank() ? tensor.contiguous()
                                                     : at::empty(sizes, tensor.options()));
        ranks_->broadcast_data(pieces.back(), part, "start");
      }
      tensor = at::cat(pieces);
    };
    at::Tensor lengths =
        batch.lengths.defined()
            ? batch.lengths
            : at::full({batch.tokens.size(0)}, batch.tokens.size(1), batch.tokens.options());
    gather(lengths);
    for (torch_api::AttentionRecord& record : records) {
      if (!std::holds_alternative<RoutingParams>(record.mechanism)) continue;
      gather(record.q);
      gather(record.k);
      record.options.q_lengths = lengths;
    }
  }

  // The rows of a batch that are this rank's.
  torch_api::SequenceSlice own_rows() const {
    const std::int64_t part = ranks_ == nullptr ? 0 : ranks_->data_rank();
    return torch_api::sequence_slice(config_.train.batch, part, data_ranks());
  }

  // This rank's rows of a step's batch. Steps are counted from 1, batches from 0.
  Batch step_batch(std::int64_t step) const {
    const std::int64_t rows = config_.train.batch, parts = data_ranks();
    const std::int64_t part = ranks_ == nullptr ? 0 : ranks_->data_rank();
    Batch batch;
    if (rows % parts == 0) {  // rows are pure functions of their number
      batch = task_.batch(Split::train, (step - 1) * parts + part, rows / parts);
    } else {
      const torch_api::SequenceSlice own = own_rows();
      batch = rows_of(task_.batch(Split::train, step - 1, rows), own.first, own.count);
    }
    return to_device(truncated(batch, step_length(config_, step)), device_);
  }

  std::string reason_to_stop() const {
    if (state_.step >= config_.train.steps) return "steps";
    const std::int64_t patience = config_.train.patience;
    if (patience > 0 && state_.evaluations_without_improvement >= patience) return "patience";
    if (stops()) return "interrupted";
    return "";
  }

  // On a GPU the host launches a step and reads the numbers of the one before.
  void run_step() {
    const Clock::time_point start = Clock::now();
    const std::int64_t step = state_.step + 1;
    StepFacts facts{.step = step};
    facts.rate = config_.optimizer.lr * rate_factor(config_.schedule, step, config_.train.steps);
    set_learning_rate(*optimizer_, facts.rate);
    const Batch batch = step_batch(step);
    if (ranks_ != nullptr) seed_dropout(step);
    const StepLoss loss = graph_ ? repeated_gradients(batch, step) : gradients(batch, step);
    RECORD_USER_SCOPE("optimizer");
    const at::Tensor norm = gradient_norm(*model_);
    Launched launched{facts, Readback({loss.loss, loss.commitment, norm})};
    read_launched();
    launched_ = std::move(launched);
    if (!skips_bad_gradients(*optimizer_)) read_launched();
    clip_gradients(*model_, norm, config_.optimizer.clip);
    step_optimizer(*optimizer_, norm);
    if (!owners_.empty()) share_parameters(*model_, owners_, *ranks_);
    state_.step = step;
    if (needs_facts()) read_launched();
    const double seconds = seconds_since(start);
    state_.seconds += seconds;
    logged_seconds_ += seconds;
    logged_tokens_ += config_.train.batch * batch.tokens.size(1);
  }

  StepLoss gradients(const Batch& batch, std::int64_t step) {
    model_->zero_grad();
    return add_gradients(model_, batch,
                         {.micro_batch = config_.train.micro_batch,
                          .seed = step_seed(config_.seed, step),
                          .first_row = own_rows().first,
                          .bf16 = config_.train.dtype == "bf16",
                          .update_centroids = routing_,
                          .before_layer = [this] { leave_if_late(); },
                          .ranks = ranks_,
                          .sums = sums_ ? &*sums_ : nullptr});
  }

  // Recorded work writes its gradients over those of the step before.
  StepLoss repeated_gradients(const Batch& batch, std::int64_t step) {
    if (usual_steps_ < kBeforeGraph) {
      ++usual_steps_;
      return gradients(batch, step);
    }
    if (!repeated_loss_) {
      repeated_batch_ = {batch.tokens.clone(), batch.targets.clone(), batch.strata,
                         batch.lengths.defined() ? batch.lengths.clone() : at::Tensor()};
      graph_->record([&] { repeated_loss_ = gradients(repeated_batch_, step); });
    }
    for (const auto& [from, to] : {std::pair(batch.tokens, repeated_batch_.tokens),
                                   std::pair(batch.targets, repeated_batch_.targets),
                                   std::pair(batch.lengths, repeated_batch_.lengths)}) {
      if (from.defined() != to.defined() || (to.defined() && from.sizes() != to.sizes())) {
        throw Error("[train] --train.graph cannot be used: batches of the task " + config_.task +
                    " differ in shape");
      }
      if (to.defined()) to.copy_(from);
    }
    graph_->run();
    return *repeated_loss_;
  }

  // With several ranks masks are a function of step and rank: a run can continue on other numbers
  // of them.
  void seed_dropout(std::int64_t step) {
    const RandomStream stream{config_.seed, RandomUse::sample, kDropouts};
    const auto number = static_cast<std::uint64_t>(step * ranks_->size() + ranks_->rank());
    at::Generator generator = at::globalContext().defaultGenerator(device_);
    const std::lock_guard<std::mutex> lock(generator.mutex());
    generator.set_current_seed(random_u64(stream, number));
  }

  // Waits for the numbers of the last step that was launched, and checks them.
  void read_launched() {
    if (!launched_) return;
    const Launched step = *std::exchange(launched_, std::nullopt);
    const std::vector<double> values = step.numbers.read();
    last_ = step.facts;
    last_.loss = values[0];
    last_.commitment = values[1];
    last_.gradient_norm = values[2];
    check_finite("loss", last_.loss + last_.commitment);
    check_finite("gradient norm", last_.gradient_norm);
  }

  bool is_due(std::int64_t every) const { return every > 0 && state_.step % every == 0; }

  // Whether the last step's validation has not been done yet.
  bool evaluation_is_due() const {
    const bool last = state_.step == config_.train.steps;
    return state_.evaluated_step < state_.step && (last || is_due(config_.train.eval_every));
  }

  bool log_is_due() const {
    return evaluation_is_due() || is_due(config_.train.log_every) || state_.step == 1;
  }

  // Whether the last step is logged or saved, or a user waits for the end.
  bool needs_facts() const {
    const bool last = state_.step == config_.train.steps;
    return log_is_due() || last || is_due(config_.checkpoint.every) || interrupted();
  }

  void finish_step() {
    const bool last = state_.step == config_.train.steps, evaluates = evaluation_is_due();
    const bool resumed = state_.step == resumed_step_;  // the step is in the log
    if (log_is_due() && !resumed) log_step();
    const bool improved = evaluates && evaluate_now();
    if (improved || last || is_due(config_.checkpoint.every)) save(improved);
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

  Evaluation evaluation_of(std::int64_t batches) {
    return evaluate(model_, task_,
                    {.rows = config_.train.batch,
                     .batches = batches,
                     .bf16 = config_.train.dtype == "bf16",
                     .before_layer = [this] { leave_if_late(); },
                     .progress = hooks_.validation,
                     .ranks = ranks_});
  }

  // Whether the model is the best so far.
  bool evaluate_now() {
    evaluation_ = evaluation_of(config_.train.eval_batches);
    const double metric = evaluation_->metric;
    check_finite("validation loss", evaluation_->score.loss());
    write(eval_line("eval", state_.step, task_, *evaluation_));
    const bool improved = !state_.best || better(task_.metric(), metric, *state_.best);
    state_.evaluations_without_improvement =
        improved ? 0 : state_.evaluations_without_improvement + 1;
    if (improved) {
      state_.best = metric;
      state_.best_step = state_.step;
    }
    state_.evaluated_step = state_.step;
    return improved;
  }

  // Uses the last step's validation if it was of all the data.
  void evaluate_at_end() {
    const bool whole = evaluation_ && state_.evaluated_step == state_.step &&
                       evaluation_->share == 1.0 && config_.train.final_batches == 0;
    if (!whole) evaluation_ = evaluation_of(config_.train.final_batches);
    write(eval_line("final", state_.step, task_, *evaluation_));
  }

  void log_clusters() {
    const std::optional<Inspection> clusters = inspect_clusters(model_, task_);
    if (!clusters) return;
    write(clusters_line(state_.step, *clusters));
    for (const std::string& line : collapse_warnings(clusters->groups)) warn(line);
  }

  void save(bool best) {
    read_launched();
    if (config_.out.empty()) return;
    for (const auto& item : model_->named_parameters()) {
      if (!at::isfinite(item.value()).all().item<bool>()) check_finite(item.key(), NAN);
    }
    NamedTensors optimizer;
    if (!owners_.empty()) {
      optimizer = gathered_optimizer_tensors(*optimizer_, *model_, owners_, *ranks_);
    } else if (writes()) {
      optimizer = optimizer_tensors(*optimizer_, *model_);
    }
    saved_step_ = state_.step;
    if (!writes()) return;
    Checkpoint checkpoint{module_tensors(*model_), std::move(optimizer),
                          config_text(config_),    state_,
                          task_.files(),           task_.data()};
    checkpoint.optimizer["generator." + generator_name(device_)] = generator_state(device_);
    checkpoints().save(checkpoint, best);
    checkpoints().prune(config_.checkpoint.keep);
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
    line.label = config_.task + "  " + label_;
    line.step = state_.step;
    line.steps = config_.train.steps;
    line.score = score_text();
    line.tokens_per_s = tokens_per_s_;
    line.seconds_left = seconds_per_step * static_cast<double>(line.steps - line.step);
    hooks_.progress(line);
  }

  // The loss in the unit of the metric, and the last validation.
  std::string score_text() const {
    const Metric metric = task_.metric();
    if (counts_answers(metric)) {
      std::string text = fmt::format("loss {:#.4g}", last_.loss);
      if (evaluation_) text += fmt::format("  {} {:.4g}", metric_name(metric), evaluation_->metric);
      return text;
    }
    const Score score{.nats = last_.loss, .count = 1};
    std::string text = fmt::format("{} {:#.4g}", metric_name(metric), metric_value(metric, score));
    if (evaluation_) text += fmt::format(", valid {:#.4g}", evaluation_->metric);
    return text;
  }

  const Config& config_;
  const Task& task_;
  const TrainHooks& hooks_;
  c10::Device device_;
  MemoryMeter memory_;  // made before the model, to measure it
  std::vector<AttentionSpec> attention_;
  torch_api::Model model_;
  Ranks* ranks_;                      // null: alone
  std::vector<std::int64_t> owners_;  // of the parameters' optimiser states; empty: every rank
  std::set<std::string> owned_;       // by this rank
  std::unique_ptr<::torch::optim::Optimizer> optimizer_;
  std::optional<GradientSums> sums_;
  std::optional<DeviceGraph> graph_;
  int usual_steps_ = 0;                    // before it is recorded
  Batch repeated_batch_;                   // what it reads
  std::optional<StepLoss> repeated_loss_;  // and writes
  bool stop_together_ = false;             // an interrupt of any rank
  bool routing_;
  std::string label_;
  std::optional<RunLock> lock_;
  std::optional<Log> log_;
  TrainState state_;
  std::int64_t resumed_step_ = Log::kNew, saved_step_ = 0;
  struct Launched {
    StepFacts facts;
    Readback numbers;  // loss, commitment, norm of the gradients
  };
  std::optional<Launched> launched_;  // whose numbers have not been read
  StepFacts last_;                    // of the last step whose numbers have been
  std::optional<Evaluation> evaluation_;
  std::optional<Clock::time_point> noticed_;  // when an interrupt was first seen
  bool finished_ = false;                     // before it was resumed
  std::int64_t logged_tokens_ = 0;            // tokens and seconds since the last log line
  double logged_seconds_ = 0, tokens_per_s_ = 0;
};

// Torch and the core report missing memory in several ways.
bool is_out_of_memory(const std::exception& error) {
  const std::string_view message = error.what();
  return dynamic_cast<const std::bad_alloc*>(&error) != nullptr ||
         message.find("out of memory") != std::string_view::npos ||
         message.find("not enough memory") != std::string_view::npos ||
         message.find("can't allocate memory") != std::string_view::npos;
}

// One line with what helps most.
[[noreturn]] void refuse_size(const Config& config) {
  const std::int64_t rows =
      config.train.micro_batch > 0 ? config.train.micro_batch : config.train.batch;
  std::string advice;
  if (rows > 1) advice += fmt::format("--train.micro-batch {}, ", rows / 2);
  if (!config.model.recompute) advice += "--model.recompute, ";
  throw Error(
      fmt::format("[memory] not enough memory on {} for passes of {} x {} tokens: try {}a shorter "
                  "--length than "
                  "{} or a smaller model; --dry-run shows how much a run needs",
                  config.device, rows, config.length, advice, config.length));
}

template <class Work>
auto with_memory_advice(const Config& config, const Work& work) {
  try {
    return work();
  } catch (const std::exception& error) {
    if (is_out_of_memory(error)) refuse_size(config);
    throw;
  }
}

// Ranks on one machine share its cores.
void use_own_threads(const Config& config, const Ranks* ranks) {
  const bool share = ranks != nullptr && config.threads == 0;
  use_threads(share ? std::max(1, coterie::threads() / ranks->local_size()) : config.threads);
}

}  // namespace

TrainResult train(const Config& config, const Task& task, bool resume, const TrainHooks& hooks) {
  const bool writes = hooks.ranks == nullptr || hooks.ranks->first();
  if (!resume && writes) refuse_used_folder(config.out);
  use_own_threads(config, hooks.ranks);
  torch_api::set_fast(config.train.fast);
  return with_memory_advice(config, [&] {
    Run run(config, task, hooks);
    run.begin(resume);
    return run.finish();
  });
}

DryRun dry_run(const Config& config, const Task& task, int steps, bool profile, Ranks* ranks) {
  use_own_threads(config, ranks);
  torch_api::set_fast(config.train.fast);
  return with_memory_advice(config, [&] {
    TrainHooks hooks;
    hooks.ranks = ranks;
    Run run(config, task, hooks);
    return run.try_steps(steps, profile);
  });
}

}  // namespace coterie::train
