// SPDX-License-Identifier: MIT
#include "bench/attention.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <map>

#include "coterie/attention.h"
#include "coterie/cluster.h"
#include "coterie/error.h"

namespace coterie::bench {
namespace {

// Memory as attention wants it, 64-byte aligned.
struct alignas(64) Line {
  std::byte bytes[64];
};

// What all runs of a problem may overwrite in turn.
struct Buffers {
  HostTensor dq, dk, dv;
  std::vector<Line> workspace = {};

  Workspace view() {
    return {.data = workspace.data(),
            .bytes = static_cast<std::int64_t>(workspace.size() * sizeof(Line))};
  }
};

// The heads of one group; views point into the data, the buffers and `owned`.
struct HeadRun {
  Mechanism mechanism;
  AttentionInputs inputs;
  AttentionResult result;
  AttentionGradients gradients;
  TensorView grad_out;
  bool shared_qk = false;
  std::vector<HostTensor> owned;
};

struct AttentionRun {
  HostTensor out;
  std::vector<HeadRun> groups;
  std::int64_t workspace_bytes = 0, saved_bytes = 0;
};

bool shares_queries_and_keys(const Mechanism& mechanism) {
  const auto* routing = std::get_if<RoutingParams>(&mechanism);
  return std::holds_alternative<LshParams>(mechanism) || (routing && routing->share_qk);
}

// The factor that gives every mechanism the logits q . k / sqrt(D): keys of lsh have unit length,
// while rows of our data have length sqrt(D).
double logit_factor(const Mechanism& mechanism, std::int64_t D) {
  if (std::holds_alternative<LshParams>(mechanism)) return 1.0;
  return 1.0 / std::sqrt(static_cast<double>(D));
}

const TensorView& own(HeadRun& run, HostTensor tensor) {
  run.owned.push_back(std::move(tensor));
  return run.owned.back().view();
}

// Centroids as training would leave them: k-means of the rows they attract.
HostTensor trained_centroids(const TensorView& x, std::int64_t clusters, std::uint64_t seed) {
  HostTensor centroids(accumulator_dtype(x.dtype), {x.size(1), clusters, x.size(3)});
  spherical_kmeans({.iterations = 5, .seed = seed}, x, {}, centroids);
  return centroids;
}

void add_learned_inputs(HeadRun& run, std::uint64_t seed) {
  AttentionInputs& inputs = run.inputs;
  if (const auto* routing = std::get_if<RoutingParams>(&run.mechanism)) {
    const TensorView& keys = run.shared_qk ? inputs.q : inputs.k;
    inputs.centroids = own(run, trained_centroids(keys, routing->clusters, seed));
  }
  if (const auto* cast = std::get_if<CastParams>(&run.mechanism)) {
    inputs.centroids = own(run, trained_centroids(inputs.q, cast->clusters, seed));
    run.gradients.dcentroids = own(run, HostTensor(run.owned.back()));
    const DType dtype = accumulator_dtype(inputs.q.dtype);
    inputs.gate = own(run, HostTensor(dtype, {inputs.q.size(0), inputs.q.size(2)}));
    run.gradients.dgate = own(run, HostTensor(run.owned.back()));
  }
}

HeadRun make_group(const HeadGroup& group, bool causal, const AttentionData& data,
                   const Buffers& buffers, std::int64_t first, std::int64_t count) {
  const Problem& problem = data.problem;
  const std::int64_t ratio = problem.heads / problem.kv_heads;
  if (first % ratio != 0 || count % ratio != 0) {
    throw Error("[bench] expected groups of whole key/value heads (" + std::to_string(ratio) +
                " query heads each); got " + std::to_string(count) + " heads from head " +
                std::to_string(first));
  }
  const auto heads = [&](const TensorView& x) { return x.narrowed(1, first, count); };
  const auto kv = [&](const TensorView& x) { return x.narrowed(1, first / ratio, count / ratio); };
  HeadRun run;
  run.owned.reserve(16);  // views of its elements must stay good
  run.mechanism = group.mechanism;
  run.shared_qk = shares_queries_and_keys(group.mechanism);
  run.inputs.q = heads(data.q);
  run.inputs.v = kv(data.v);
  run.inputs.scale = logit_factor(group.mechanism, problem.D);
  run.inputs.causal = causal;
  run.inputs.seed = problem.seed;
  run.gradients.dq = heads(buffers.dq);
  run.gradients.dv = kv(buffers.dv);
  if (!run.shared_qk) {
    run.inputs.k = kv(data.k);
    run.gradients.dk = kv(buffers.dk);
  }
  run.grad_out = heads(data.grad_out);
  add_learned_inputs(run, problem.seed);
  return run;
}

AttentionRun make_run(const Entry& entry, const AttentionData& data, Buffers& buffers) {
  const Problem& problem = data.problem;
  AttentionRun run;
  run.out = HostTensor(problem.dtype, {problem.B, problem.heads, problem.N, problem.D});
  const std::vector<std::int64_t> counts = entry.spec.head_counts(problem.heads);
  std::int64_t first = 0;
  for (std::size_t g = 0; g < counts.size(); ++g) {
    HeadRun group = make_group(entry.spec.groups[g], entry.causal, data, buffers, first, counts[g]);
    group.result.out = run.out.view().narrowed(1, first, counts[g]);
    for (const TensorLayout& layout : attention_saved(group.mechanism, group.inputs).tensors) {
      group.result.saved.push_back(own(group, HostTensor(layout)));
      const TensorView& saved = group.result.saved.back();
      run.saved_bytes += saved.count() * dtype_bytes(saved.dtype);
    }
    run.workspace_bytes =
        std::max(run.workspace_bytes, attention_workspace_bytes(group.mechanism, group.inputs));
    run.groups.push_back(std::move(group));
    first += counts[g];
  }
  const std::size_t lines = static_cast<std::size_t>(run.workspace_bytes) / sizeof(Line) + 1;
  if (buffers.workspace.size() < lines) buffers.workspace.resize(lines);
  return run;
}

void forward(AttentionRun& run, Buffers& buffers) {
  for (HeadRun& group : run.groups) {
    attention_forward(group.mechanism, group.inputs, group.result, buffers.view());
  }
}

void backward(AttentionRun& run, Buffers& buffers) {
  for (HeadRun& group : run.groups) {
    attention_backward(group.mechanism, group.inputs, group.result, group.grad_out, group.gradients,
                       buffers.view());
  }
}

// Full attention on the data, with the keys or with the queries as keys.
HostTensor full_output(const AttentionData& data, bool causal, bool shared_qk, Buffers& buffers) {
  AttentionRun run = make_run({AttentionSpec::parse("full"), causal}, data, buffers);
  if (shared_qk) run.groups[0].inputs.k = data.q;
  forward(run, buffers);
  return run.out;
}

struct SquaredNorms {
  double difference = 0, reference = 0;
};

void add_norms(const TensorView& x, const TensorView& reference, SquaredNorms& norms) {
  for (std::int64_t b = 0; b < x.size(0); ++b) {
    for (std::int64_t h = 0; h < x.size(1); ++h) {  // head by head, for the sake of memory
      const auto one = [&](const TensorView& t) {
        return read_values(t.narrowed(0, b, 1).narrowed(1, h, 1));
      };
      const std::vector<double> got = one(x), wanted = one(reference);
      for (std::size_t i = 0; i < got.size(); ++i) {
        norms.difference += (got[i] - wanted[i]) * (got[i] - wanted[i]);
        norms.reference += wanted[i] * wanted[i];
      }
    }
  }
}

// Full attention's outputs, each computed when first asked for.
struct References {
  const AttentionData& data;
  Buffers& buffers;
  std::map<std::pair<bool, bool>, HostTensor> outputs = {};

  const HostTensor& get(bool causal, bool shared_qk) {
    const auto key = std::make_pair(causal, shared_qk);
    if (!outputs.count(key)) outputs[key] = full_output(data, causal, shared_qk, buffers);
    return outputs[key];
  }
};

double error_of(const AttentionRun& run, bool causal, References& references) {
  SquaredNorms norms;
  std::int64_t first = 0;
  for (const HeadRun& group : run.groups) {
    const TensorView& out = group.result.out;
    const TensorView& full = references.get(causal, group.shared_qk);
    add_norms(out, full.narrowed(1, first, out.size(1)), norms);
    first += out.size(1);
  }
  return std::sqrt(norms.difference / norms.reference);
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

std::vector<Measurement> measure(const std::vector<Entry>& entries, const Problem& problem,
                                 Pass pass, const TimingPlan& plan, const Progress& progress) {
  const AttentionData data = make_data(problem);
  Buffers buffers{.dq = HostTensor(data.q), .dk = HostTensor(data.k), .dv = HostTensor(data.v)};
  std::vector<AttentionRun> runs;
  for (const Entry& entry : entries) runs.push_back(make_run(entry, data, buffers));

  std::vector<Measurement> measurements;
  References references{data, buffers};
  std::vector<Contender> contenders;
  for (std::size_t i = 0; i < entries.size(); ++i) {
    AttentionRun& run = runs[i];
    const std::string name = entries[i].spec.to_string();
    if (progress) progress({name + " error", {}}, 1, 1);
    forward(run, buffers);
    Measurement& measurement = measurements.emplace_back();
    measurement.entry = entries[i];
    measurement.N = problem.N;
    measurement.error = error_of(run, entries[i].causal, references);
    measurement.workspace_bytes = run.workspace_bytes;
    measurement.saved_bytes = run.saved_bytes;
    measurement.full_flops = full_attention_flops(problem, pass, entries[i].causal);
    if (pass != Pass::backward) {
      contenders.push_back(
          {name + " forward", [&run = runs[i], &buffers] { forward(run, buffers); }});
    }
    if (pass != Pass::forward) {
      contenders.push_back(
          {name + " backward", [&run = runs[i], &buffers] { backward(run, buffers); }});
    }
  }

  const std::vector<Timing> timings = time_interleaved(contenders, plan, progress);
  auto timing = timings.begin();
  for (Measurement& measurement : measurements) {
    if (pass != Pass::backward) measurement.forward = *timing++;
    if (pass != Pass::forward) measurement.backward = *timing++;
  }
  return measurements;
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
