// SPDX-License-Identifier: MIT
#include "bench/run.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>

#include "coterie/error.h"
#include "coterie/layer.h"
#include "coterie/routing.h"

namespace coterie::bench {
namespace {

// The factor that gives every mechanism the logits q . k / sqrt(D): keys of lsh have unit length,
// while rows of synthetic data have length sqrt(D).
double logit_factor(const Mechanism& mechanism, std::int64_t D) {
  if (row_form(mechanism) == RowForm::unit_keys) return 1.0;
  return 1.0 / std::sqrt(static_cast<double>(D));
}

TensorView queries_of(const HeadSlice& heads, const TensorView& x) {
  return x.present() ? x.narrowed(1, heads.first, heads.count) : x;
}
TensorView keys_of(const HeadSlice& heads, const TensorView& x) {
  return x.present() ? x.narrowed(1, heads.first_kv, heads.kv_count) : x;
}

// Calls visit(group, its heads) for the groups of an entry.
template <class Visit>
void for_each_group(const Entry& entry, const Problem& problem, const Visit& visit) {
  const std::vector<HeadSlice> slices = head_slices(entry.spec, problem.heads, problem.kv_heads);
  for (std::size_t g = 0; g < slices.size(); ++g) visit(entry.spec.groups[g], slices[g]);
}

struct Rows {
  TensorView q, k, v;
};

// Inputs without learned tensors.
AttentionInputs make_inputs(const Mechanism& mechanism, const Entry& entry, const Rows& rows,
                            std::uint64_t seed) {
  AttentionInputs inputs;
  inputs.q = rows.q;
  if (!keys_are_queries(mechanism)) inputs.k = rows.k;
  inputs.v = rows.v;
  inputs.scale = logit_factor(mechanism, rows.q.size(3));
  inputs.causal = entry.causal;
  inputs.seed = seed;
  inputs.delta_from_output = true;  // as both torch libraries
  return inputs;
}

// Layouts of tensors that a model learns or computes from the tokens; without sizes if the
// mechanism does not use them.
struct LearnedLayouts {
  TensorLayout centroids, gate;

  LearnedLayouts(const Mechanism& mechanism, const AttentionInputs& inputs) {
    const DType dtype = accumulator_dtype(inputs.q.dtype);
    const std::int64_t D = inputs.q.size(3);
    if (const auto* routing = std::get_if<RoutingParams>(&mechanism)) {
      centroids = {"centroids", dtype, {inputs.v.size(1), routing->clusters, D}};
    }
    if (const auto* cast = std::get_if<CastParams>(&mechanism)) {
      centroids = {"centroids", dtype, {inputs.q.size(1), cast->clusters, D}};
      gate = {"gate", dtype, {inputs.q.size(0), inputs.q.size(2)}};
    }
  }
};

// Centroids like those after training: k-means of the rows they attract.
HostTensor trained_centroids(const TensorLayout& layout, const TensorView& x, std::uint64_t seed) {
  HostTensor centroids(layout);
  const HostTensor copy = x.device == Device::cpu ? HostTensor() : host_copy(x);
  const TensorView& rows = x.device == Device::cpu ? x : copy.view();
  spherical_kmeans({.iterations = 5, .seed = seed}, rows, {}, centroids);
  return centroids;
}

void add_learned_inputs(HeadRun& run, std::uint64_t seed) {
  AttentionInputs& inputs = run.inputs;
  const LearnedLayouts layouts(run.mechanism, inputs);
  const Device device = inputs.q.device;
  if (!layouts.centroids.sizes.empty()) {
    const bool attract_keys =
        std::holds_alternative<RoutingParams>(run.mechanism) && !run.shared_qk;
    const TensorView& attracted = attract_keys ? inputs.k : inputs.q;
    inputs.centroids = run.own({trained_centroids(layouts.centroids, attracted, seed), device});
  }
  if (!layouts.gate.sizes.empty()) {
    inputs.gate = run.own({HostTensor(layouts.gate), device});
    run.gradients.dcentroids = run.own({layouts.centroids, device});
    run.gradients.dgate = run.own({layouts.gate, device});
  }
}

void add_results(HeadRun& run) {
  const TensorView& q = run.inputs.q;
  const SavedLayout layout = attention_saved(run.mechanism, run.inputs);
  run.selection_count = layout.selection_count;
  for (const TensorLayout& saved : layout.tensors) {
    run.result.saved.push_back(run.own({saved, q.device}));
  }
  run.result.out = run.own(
      {{"out", q.dtype, {q.size(0), q.size(1), q.size(2), run.inputs.v.size(3)}}, q.device});
  const std::int64_t bytes = attention_workspace_bytes(run.mechanism, run.inputs);
  run.workspace = {run.own({{"workspace", DType::u8, {bytes}}, q.device}).data, bytes, nullptr};
}

// A view without memory, for shape queries.
TensorView shape_only(const TensorLayout& layout, Device device) {
  if (layout.sizes.empty()) return {};
  static std::max_align_t nothing;
  return view_of(layout, &nothing, device);
}

}  // namespace

Gradients::Gradients(const AttentionData& data) {
  if (!data.grad_out.view().present()) return;
  const auto like = [](const TensorView& x) {
    return Tensor({"", x.dtype, sizes_of(x)}, x.device);
  };
  dq = like(data.q);
  dk = like(data.k);
  dv = like(data.v);
}

TensorView HeadRun::own(Tensor tensor) {
  owned.push_back(std::move(tensor));
  return owned.back().view();
}

AttentionRun::AttentionRun(const Entry& entry, const AttentionData& data,
                           const Gradients& gradients) {
  for_each_group(entry, data.problem, [&](const HeadGroup& group, const HeadSlice& heads) {
    HeadRun& run = groups_.emplace_back();
    run.mechanism = group.mechanism;
    run.shared_qk = keys_are_queries(group.mechanism);
    run.inputs =
        make_inputs(group.mechanism, entry,
                    {queries_of(heads, data.q), keys_of(heads, data.k), keys_of(heads, data.v)},
                    data.problem.seed);
    run.gradients.dq = queries_of(heads, gradients.dq);
    if (!run.shared_qk) run.gradients.dk = keys_of(heads, gradients.dk);
    run.gradients.dv = keys_of(heads, gradients.dv);
    run.grad_out = queries_of(heads, data.grad_out);
    add_learned_inputs(run, data.problem.seed);
    add_results(run);
  });
}

void AttentionRun::select() {
  for (HeadRun& group : groups_) {
    attention_select(group.mechanism, group.inputs, group.result.saved, group.workspace);
  }
}

void AttentionRun::attend() {
  for (HeadRun& group : groups_) {
    attention_attend(group.mechanism, group.inputs, group.result, group.workspace);
  }
}

void AttentionRun::forward() {
  for (HeadRun& group : groups_) {
    attention_forward(group.mechanism, group.inputs, group.result, group.workspace);
  }
}

void AttentionRun::backward() {
  for (HeadRun& group : groups_) {
    attention_backward(group.mechanism, group.inputs, group.result, group.grad_out, group.gradients,
                       group.workspace);
  }
}

std::int64_t AttentionRun::workspace_bytes() const {
  std::int64_t most = 0;
  for (const HeadRun& group : groups_) most = std::max(most, group.workspace.bytes);
  return most;
}

std::int64_t AttentionRun::saved_bytes() const {
  std::int64_t bytes = 0;
  for (const HeadRun& group : groups_) {
    for (const TensorView& saved : group.result.saved) bytes += bytes_of(saved);
  }
  return bytes;
}

std::string refusal(const Entry& entry, const Problem& problem) {
  const auto rows = [&](std::int64_t heads) {
    return shape_only({"", problem.dtype, {problem.B, heads, problem.N, problem.D}},
                      problem.device);
  };
  if (problem.device == Device::cpu) return "";
  try {
    for_each_group(entry, problem, [&](const HeadGroup& group, const HeadSlice& heads) {
      const TensorView keys = rows(heads.kv_count);
      AttentionInputs inputs =
          make_inputs(group.mechanism, entry, {rows(heads.count), keys, keys}, problem.seed);
      const LearnedLayouts layouts(group.mechanism, inputs);
      inputs.centroids = shape_only(layouts.centroids, problem.device);
      inputs.gate = shape_only(layouts.gate, problem.device);
      attention_saved(group.mechanism, inputs);
    });
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

}  // namespace coterie::bench
