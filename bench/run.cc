// SPDX-License-Identifier: MIT
#include "bench/run.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>

#include "coterie/cluster.h"
#include "coterie/error.h"

namespace coterie::bench {
namespace {

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

// Query heads [first, first + count), and the key heads they read.
struct HeadRange {
  std::int64_t first, count, ratio;

  TensorView queries(const TensorView& x) const { return x.narrowed(1, first, count); }
  TensorView keys(const TensorView& x) const { return x.narrowed(1, first / ratio, count / ratio); }
  void check() const {
    if (first % ratio == 0 && count % ratio == 0) return;
    throw Error("[bench] expected groups of whole key/value heads (" + std::to_string(ratio) +
                " query heads each); got " + std::to_string(count) + " heads from head " +
                std::to_string(first));
  }
};

HeadRun make_group(const HeadGroup& group, bool causal, const AttentionData& data,
                   const Gradients& gradients, const HeadRange& heads) {
  heads.check();
  HeadRun run;
  run.owned.reserve(16);  // views of its elements must stay good
  run.mechanism = group.mechanism;
  run.shared_qk = shares_queries_and_keys(group.mechanism);
  run.inputs.q = heads.queries(data.q);
  run.inputs.v = heads.keys(data.v);
  run.inputs.scale = logit_factor(group.mechanism, data.problem.D);
  run.inputs.causal = causal;
  run.inputs.seed = data.problem.seed;
  run.gradients.dq = heads.queries(gradients.dq);
  run.gradients.dv = heads.keys(gradients.dv);
  if (!run.shared_qk) {
    run.inputs.k = heads.keys(data.k);
    run.gradients.dk = heads.keys(gradients.dk);
  }
  run.grad_out = heads.queries(data.grad_out);
  add_learned_inputs(run, data.problem.seed);
  run.buffers = AttentionBuffers(run.mechanism, run.inputs);
  return run;
}

}  // namespace

AttentionRun::AttentionRun(const Entry& entry, const AttentionData& data,
                           const Gradients& gradients) {
  const std::vector<std::int64_t> counts = entry.spec.head_counts(data.problem.heads);
  HeadRange heads{0, 0, data.problem.heads / data.problem.kv_heads};
  for (std::size_t g = 0; g < counts.size(); ++g) {
    heads.count = counts[g];
    groups_.push_back(make_group(entry.spec.groups[g], entry.causal, data, gradients, heads));
    heads.first += counts[g];
  }
}

void AttentionRun::select() {
  for (HeadRun& group : groups_) {
    attention_select(group.mechanism, group.inputs, group.buffers.result().saved,
                     group.buffers.workspace());
  }
}

void AttentionRun::attend() {
  for (HeadRun& group : groups_) {
    attention_attend(group.mechanism, group.inputs, group.buffers.result(),
                     group.buffers.workspace());
  }
}

void AttentionRun::forward() {
  select();
  attend();
}

void AttentionRun::backward() {
  for (HeadRun& group : groups_) {
    attention_backward(group.mechanism, group.inputs, group.buffers.result(), group.grad_out,
                       group.gradients, group.buffers.workspace());
  }
}

std::int64_t AttentionRun::workspace_bytes() const {
  std::int64_t most = 0;
  for (const HeadRun& group : groups_) most = std::max(most, group.buffers.workspace().bytes);
  return most;
}

std::int64_t AttentionRun::saved_bytes() const {
  std::int64_t bytes = 0;
  for (const HeadRun& group : groups_) {
    for (const TensorView& saved : group.buffers.result().saved) {
      bytes += saved.count() * dtype_bytes(saved.dtype);
    }
  }
  return bytes;
}

void SquaredNorms::add(const std::vector<double>& got, const std::vector<double>& wanted) {
  for (std::size_t i = 0; i < got.size(); ++i) {
    difference += (got[i] - wanted[i]) * (got[i] - wanted[i]);
    reference += wanted[i] * wanted[i];
  }
}

double SquaredNorms::relative_error() const {
  if (difference == 0) return 0;  // also of zeros against zeros
  return reference > 0 ? std::sqrt(difference / reference)
                       : std::numeric_limits<double>::infinity();
}

namespace {

void add_norms(const TensorView& x, const TensorView& reference, SquaredNorms& norms) {
  for (std::int64_t b = 0; b < x.size(0); ++b) {
    for (std::int64_t h = 0; h < x.size(1); ++h) {  // head by head, for the sake of memory
      const auto one = [&](const TensorView& t) {
        return read_values(t.narrowed(0, b, 1).narrowed(1, h, 1));
      };
      norms.add(one(x), one(reference));
    }
  }
}

}  // namespace

TensorView References::output(bool causal, bool shared_qk) {
  const auto key = std::make_pair(causal, shared_qk);
  if (!outputs_.count(key)) {
    AttentionRun run({AttentionSpec::parse("full"), causal}, data_, gradients_);
    HeadRun& heads = run.groups()[0];
    if (shared_qk) heads.inputs.k = data_.q;
    run.forward();
    outputs_[key] = std::move(heads.buffers);
  }
  return outputs_[key].result().out;
}

double References::error_of(const TensorView& out, bool causal) {
  SquaredNorms norms;
  add_norms(out, output(causal, false), norms);
  return norms.relative_error();
}

double References::error_of(const AttentionRun& run, bool causal) {
  SquaredNorms norms;
  std::int64_t first = 0;
  for (const HeadRun& group : run.groups()) {
    const TensorView out = group.buffers.result().out;
    add_norms(out, output(causal, group.shared_qk).narrowed(1, first, out.size(1)), norms);
    first += out.size(1);
  }
  return norms.relative_error();
}

}  // namespace coterie::bench
