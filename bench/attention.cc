// SPDX-License-Identifier: MIT
#include "bench/attention.h"

#include <algorithm>
#include <cmath>

#include "bench/opponent.h"
#include "bench/peak.h"
#include "bench/run.h"

namespace coterie::bench {
namespace {

std::int64_t io_bytes(const Problem& problem) {
  const std::int64_t rows = 2 * problem.heads + 2 * problem.kv_heads;  // q, out and k, v
  return problem.B * rows * problem.N * problem.D * dtype_bytes(problem.dtype);
}

// Everything that is measured on one problem: who runs, and what is known before.
struct Field {
  AttentionData data;
  Gradients gradients;
  References references;
  std::vector<AttentionRun> runs;
  std::vector<Contender> contenders;
  std::vector<Measurement> measurements;

  explicit Field(const Problem& problem)
      : data(make_data(problem)), gradients(data), references(data, gradients) {}
  Field(const Field&) = delete;  // contenders point into it
  Field& operator=(const Field&) = delete;
};

Measurement blank(const Entry& entry, const Problem& problem, Pass pass) {
  Measurement measurement;
  measurement.entry = entry;
  measurement.name = entry.spec.to_string();
  measurement.N = problem.N;
  measurement.io_bytes = io_bytes(problem);
  if (is_full(entry)) {
    const auto flops = [&](Pass one) { return full_attention_flops(problem, one, entry.causal); };
    if (pass != Pass::backward) measurement.forward_flops = flops(Pass::forward);
    if (pass != Pass::forward) measurement.backward_flops = flops(Pass::backward);
  }
  return measurement;
}

void add_entry(Field& field, const Entry& entry, Pass pass) {
  AttentionRun& run = field.runs.emplace_back(entry, field.data, field.gradients);
  run.forward();  // the backward pass needs one, and so does the error
  Measurement measurement = blank(entry, field.data.problem, pass);
  measurement.error = field.references.error_of(run, entry.causal);
  measurement.workspace_bytes = run.workspace_bytes();
  measurement.saved_bytes = run.saved_bytes();
  if (pass != Pass::backward) {
    field.contenders.push_back(
        {measurement.name + " forward", {[&run] { run.select(); }, [&run] { run.attend(); }}});
  }
  if (pass != Pass::forward) {
    field.contenders.push_back({measurement.name + " backward", {[&run] { run.backward(); }}});
  }
  field.measurements.push_back(std::move(measurement));
}

void add_opponent(Field& field, Opponent opponent, const Entry& entry, Pass pass) {
  opponent.forward();
  Measurement measurement = blank(entry, field.data.problem, pass);
  measurement.name = opponent.name;
  measurement.opponent = true;
  measurement.error = field.references.error_of(opponent.output(), entry.causal);
  if (pass != Pass::backward) {
    field.contenders.push_back({measurement.name + " forward", {opponent.forward}});
  }
  if (pass != Pass::forward) {
    field.contenders.push_back({measurement.name + " backward", {opponent.backward}});
  }
  field.measurements.push_back(std::move(measurement));
}

void fill_in(std::vector<Measurement>& measurements, const std::vector<StagedTiming>& timings,
             Pass pass, double peak_gflops) {
  auto timing = timings.begin();
  for (Measurement& measurement : measurements) {
    measurement.peak_gflops = peak_gflops;
    if (pass != Pass::backward) {
      measurement.forward = timing->total;
      if (!measurement.opponent) {
        measurement.select = timing->stages[0];
        measurement.attend = timing->stages[1];
      }
      ++timing;
    }
    if (pass != Pass::forward) measurement.backward = (timing++)->total;
  }
}

}  // namespace

Entry make_entry(const std::string& spec, bool causal) {
  Entry entry{AttentionSpec::parse(spec), causal};
  for (const HeadGroup& group : entry.spec.groups) {
    const Causality form = resolve_causality(group.mechanism, causal);
    entry.causal = entry.causal || form != Causality::none;
  }
  for (const HeadGroup& group : entry.spec.groups) resolve(group.mechanism, entry.causal);
  return entry;
}

bool leaks_future(const Entry& entry) {
  const auto leaks = [&](const HeadGroup& group) {
    return coterie::leaks_future(group.mechanism, entry.causal);
  };
  return std::any_of(entry.spec.groups.begin(), entry.spec.groups.end(), leaks);
}

bool is_full(const Entry& entry) {
  return entry.spec.groups.size() == 1 &&
         std::holds_alternative<FullParams>(entry.spec.groups[0].mechanism);
}

double Measurement::total_ms() const {
  return (forward ? forward->median_ms : 0) + (backward ? backward->median_ms : 0);
}

std::optional<double> Measurement::gflops() const {
  if (!forward_flops && !backward_flops) return std::nullopt;
  return (forward_flops.value_or(0) + backward_flops.value_or(0)) / (1e6 * total_ms());
}

std::vector<Measurement> measure(const std::vector<Entry>& entries, const Problem& problem,
                                 Pass pass, const TimingPlan& plan, const Progress& progress) {
  Field field(problem);
  field.runs.reserve(entries.size());  // contenders point to them
  for (const Entry& entry : entries) {
    if (progress) progress({entry.spec.to_string() + " error", {}}, 1, 1);
    add_entry(field, entry, pass);
    if (!is_full(entry)) continue;
    for (Opponent& opponent : make_opponents(field.data, entry.causal)) {
      add_opponent(field, std::move(opponent), entry, pass);
    }
  }
  FmaPeak peak(accumulator_dtype(problem.dtype));
  field.contenders.push_back({"the machine's FMA peak", {[&peak] { peak.run(); }}});
  const std::vector<StagedTiming> timings = time_interleaved(field.contenders, plan, progress);
  fill_in(field.measurements, timings, pass, peak.gflops());
  return std::move(field.measurements);
}

double full_attention_flops(const Problem& problem, Pass pass, bool causal) {
  // Per pair of tokens: two products forward; backward recomputes the logits and has four more.
  const double forward = 4.0, backward = 10.0;
  const double per_pair =
      (pass != Pass::backward ? forward : 0.0) + (pass != Pass::forward ? backward : 0.0);
  const double n = static_cast<double>(problem.N);
  const double pairs = causal ? n * (n + 1) / 2 : n * n;
  return per_pair * pairs * static_cast<double>(problem.D * problem.heads * problem.B);
}

std::optional<double> crossover(const std::vector<std::pair<double, double>>& speeds) {
  std::size_t first = speeds.size();  // of the run of wins at the end
  while (first > 0 && speeds[first - 1].second > 1) --first;
  if (first == speeds.size()) return std::nullopt;
  if (first == 0) return speeds[0].first;
  const auto& [low, slow] = speeds[first - 1];
  const auto& [high, fast] = speeds[first];
  const double part = -std::log(slow) / (std::log(fast) - std::log(slow));
  return low * std::pow(high / low, part);
}

}  // namespace coterie::bench
