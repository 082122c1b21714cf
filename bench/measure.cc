// SPDX-License-Identifier: MIT
#include <algorithm>
#include <chrono>
#include <deque>

#include "bench/attention.h"
#include "bench/device.h"
#include "bench/opponent.h"
#include "bench/parts.h"
#include "bench/peak.h"
#include "bench/reference.h"
#include "bench/work.h"
#include "coterie/runtime.h"

namespace coterie::bench {
namespace {

// The host's time to launch a forward pass on an idle GPU.
double launch_ms(AttentionRun& run) {
  constexpr int kRuns = 5;
  std::vector<double> samples;
  for (int i = 0; i < kRuns; ++i) {
    wait_for_device();
    const auto begin = std::chrono::steady_clock::now();
    run.forward();
    const std::chrono::duration<double, std::milli> elapsed =
        std::chrono::steady_clock::now() - begin;
    samples.push_back(elapsed.count());
  }
  return quantile(samples, 0.5);
}

// Everything that is measured on one problem: the contenders and the receivers of their times.
class Field {
 public:
  Field(const Problem& problem, const MeasurePlan& plan, const Progress& progress)
      : plan_(plan),
        progress_(progress),
        data_(make_data(problem, plan.pass)),
        gradients_(data_),
        references_(data_) {}
  Field(const Field&) = delete;  // contenders point into it
  Field& operator=(const Field&) = delete;

  void add_all(const std::vector<Entry>& entries, int threads);
  std::vector<Measurement> run();

 private:
  using Receiver = std::function<void(const StagedTiming&)>;

  void add_opponent(Opponent opponent, const Entry& full, int threads);
  void add_entry(const Entry& entry, int threads);
  void add_peak(int threads);
  Measurement& add_measurement(const Entry& entry, int threads);
  void add(Contender contender, Receiver receiver);
  void tell(const std::string& what) const {
    if (progress_) progress_({what, {}}, 1, 1);
  }
  bool on_gpu() const { return data_.problem.device == Device::cuda; }

  const MeasurePlan& plan_;
  const Progress& progress_;
  AttentionData data_;
  Gradients gradients_;
  References references_;
  std::deque<AttentionRun> runs_;  // deques: contenders and receivers point to elements
  std::deque<FmaPeak> peaks_;
  std::deque<Measurement> measurements_;
  std::vector<Contender> contenders_;
  std::vector<Receiver> receivers_;  // of the contenders' times
};

void Field::add(Contender contender, Receiver receiver) {
  contenders_.push_back(std::move(contender));
  receivers_.push_back(std::move(receiver));
}

Measurement& Field::add_measurement(const Entry& entry, int threads) {
  const Problem& problem = data_.problem;
  Measurement& measurement = measurements_.emplace_back();
  measurement.entry = entry;
  measurement.name = entry.spec.to_string();
  measurement.N = problem.N;
  measurement.threads = threads;
  measurement.error_rows = references_.rows();
  measurement.io_bytes = static_cast<std::int64_t>(least_bytes(problem, Pass::forward));
  measurement.least_bytes = least_bytes(problem, plan_.pass);
  if (plan_.pass != Pass::backward) {
    measurement.forward_flops = attention_flops(entry, problem, Pass::forward);
  }
  if (plan_.pass != Pass::forward) {
    measurement.backward_flops = attention_flops(entry, problem, Pass::backward);
  }
  return measurement;
}

void Field::add_entry(const Entry& entry, int threads) {
  tell(entry.spec.to_string() + " error");
  AttentionRun& run = runs_.emplace_back(entry, data_, gradients_);
  run.forward();  // needed by the backward pass and by the error
  Measurement& measurement = add_measurement(entry, threads);
  measurement.error = references_.error_of(run, entry.causal);
  measurement.workspace_bytes = run.workspace_bytes();
  measurement.saved_bytes = run.saved_bytes();
  const auto prepare = [threads] { set_threads(threads); };
  if (plan_.pass != Pass::backward) {
    if (on_gpu()) measurement.launch_ms = launch_ms(run);
    add({measurement.name + " forward", {[&run] { run.forward(); }}, prepare},
        [&measurement](const StagedTiming& timing) { measurement.forward = timing.total; });
    const std::vector<Part> parts = parts_of(run);
    Contender alone{measurement.name + " parts", {}, prepare};
    for (const Part& part : parts) alone.stages.push_back(part.run);
    if (!parts.empty()) {
      add(alone, [&measurement, parts](const StagedTiming& timing) {
        for (std::size_t p = 0; p < parts.size(); ++p) {
          measurement.*parts[p].time = timing.stages[p];
        }
      });
    }
  }
  if (plan_.pass != Pass::forward) {
    add({measurement.name + " backward", {[&run] { run.backward(); }}, prepare},
        [&measurement](const StagedTiming& timing) { measurement.backward = timing.total; });
  }
}

void Field::add_opponent(Opponent opponent, const Entry& full, int threads) {
  opponent.forward();
  Measurement& measurement = add_measurement(full, threads);
  measurement.name = opponent.name;
  measurement.opponent = true;
  measurement.error = references_.error_of(opponent.output(), full.causal);
  const auto prepare = [opponent, threads] { opponent.set_threads(threads); };
  if (plan_.pass != Pass::backward) {
    add({measurement.name + " forward", {opponent.forward}, prepare},
        [&measurement](const StagedTiming& timing) { measurement.forward = timing.total; });
  }
  if (plan_.pass != Pass::forward) {
    add({measurement.name + " backward", {opponent.backward}, prepare},
        [&measurement](const StagedTiming& timing) { measurement.backward = timing.total; });
  }
}

void Field::add_peak(int threads) {
  const auto give = [this, threads](double gflops) {
    for (Measurement& measurement : measurements_) {
      if (measurement.threads == threads) measurement.peak_gflops = gflops;
    }
  };
  if (!on_gpu()) {
    FmaPeak& peak = peaks_.emplace_back(accumulator_dtype(data_.problem.dtype));
    return add({"the machine's FMA peak", {[&peak] { peak.run(); }}},
               [give, &peak](const StagedTiming&) { give(peak.gflops()); });
  }
  const std::optional<MatrixProduct> product = make_matrix_product(data_.problem.dtype);
  if (!product) return;
  add({"the machine's product of matrices", {product->run}},
      [give, flops = product->flops](const StagedTiming& timing) {
        give(flops / (1e6 * timing.total.median_ms));
      });
}

void Field::add_all(const std::vector<Entry>& entries, int threads) {
  set_threads(threads);
  for (const bool causal : {false, true}) {
    const bool occurs = std::any_of(entries.begin(), entries.end(),
                                    [&](const Entry& entry) { return entry.causal == causal; });
    if (!occurs || plan_.alone) continue;
    tell("full attention by others");
    for (Opponent& opponent : make_opponents(data_, causal, plan_.pass)) {
      add_opponent(std::move(opponent), make_entry("full", causal), threads);
    }
  }
  for (const Entry& entry : entries) add_entry(entry, threads);
  add_peak(threads);
}

std::vector<Measurement> Field::run() {
  const Stopwatch stopwatch = on_gpu() ? device_stopwatch() : Stopwatch(time_by_steady_clock);
  const std::vector<StagedTiming> timings =
      time_interleaved(contenders_, plan_.timing, progress_, stopwatch);
  for (std::size_t i = 0; i < timings.size(); ++i) receivers_[i](timings[i]);
  return {measurements_.begin(), measurements_.end()};
}

// Restores the library's number of threads when destroyed.
class KeepThreads {
 public:
  KeepThreads() : count_(threads()) {}
  ~KeepThreads() { set_threads(count_); }
  KeepThreads(const KeepThreads&) = delete;
  KeepThreads& operator=(const KeepThreads&) = delete;

 private:
  int count_;
};

}  // namespace

std::vector<Measurement> measure(const std::vector<Entry>& entries, const Problem& problem,
                                 const MeasurePlan& plan, const Progress& progress) {
  const KeepThreads keep;
  const std::vector<int> counts = plan.threads.empty() ? std::vector{threads()} : plan.threads;
  Field field(problem, plan, progress);
  for (const int count : counts) field.add_all(entries, count);
  return field.run();
}

}  // namespace coterie::bench
