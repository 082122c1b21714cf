// SPDX-License-Identifier: MIT
#include "coterie/torch/centroids.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/DeviceGuard.h>
#include <torch/csrc/autograd/custom_function.h>

#include <optional>

#include "bridge.h"
#include "coterie/attention.h"
#include "coterie/cluster.h"
#include "coterie/error.h"

namespace coterie::torch_api {
namespace {

using ::torch::autograd::AutogradContext;
using ::torch::autograd::variable_list;

at::Tensor as_int32(const at::Tensor& lengths) {
  return lengths.defined() ? with_own_values(lengths).to(at::kInt).contiguous() : lengths;
}

at::ScalarType accumulator_of(const at::Tensor& x) {
  return scalar_type_of(accumulator_dtype(dtype_of(x.scalar_type())));
}

// Rows of x as the core wants them, with what must live as long as the views of them.
struct Tokens {
  at::Tensor x, lengths;
  c10::DeviceGuard guard;
  Scratch scratch;

  Tokens(const at::Tensor& tokens, const at::Tensor& token_lengths)
      : x(with_contiguous_rows(tokens.detach())),
        lengths(as_int32(token_lengths)),
        guard(x.device()),
        scratch(commitment_workspace_bytes(view(x)), x) {}

  Sequences sequences() const { return {view(lengths), {}}; }
};

struct CommitmentFunction : ::torch::autograd::Function<CommitmentFunction> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& x, const at::Tensor& centroids,
                            const at::Tensor& labels, const std::optional<at::Tensor>& lengths) {
    const Tokens tokens(x, lengths.value_or(at::Tensor()));
    const at::Tensor loss = at::empty({1}, x.options().dtype(accumulator_of(x)));
    coterie::commitment_loss(view(tokens.x), tokens.sequences(), view(centroids), view(labels),
                             view(loss), tokens.scratch.workspace());
    ctx->save_for_backward({tokens.x, centroids, labels, tokens.lengths});
    return loss.squeeze(0);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grad_outputs) {
    if (at::GradMode::is_enabled()) {
      throw Error("[commitment_loss] expected derivatives of first order; got create_graph");
    }
    const variable_list saved = ctx->get_saved_variables();
    // In the accumulator's type until it is scaled: with a weight of 1 it underflows in f16.
    const Tokens tokens(saved[0].to(accumulator_of(saved[0])), saved[3]);
    const at::Tensor dx = at::zeros_like(tokens.x);
    coterie::commitment_loss_backward(view(tokens.x), tokens.sequences(), view(saved[1]),
                                      view(saved[2]), 1.0, view(dx), tokens.scratch.workspace());
    return {dx.mul(grad_outputs[0]).to(saved[0].scalar_type()), {}, {}, {}};
  }
};

}  // namespace

at::Tensor normalised_rows(const at::Tensor& x) {
  constexpr double kVarianceFloor = 1e-6;  // src/cpu/cluster/normalise.cc
  const at::Tensor wide = x.to(accumulator_of(x));
  const at::Tensor centred = wide - wide.mean(-1, /*keepdim=*/true);
  return centred * (centred.square().mean(-1, /*keepdim=*/true) + kVarianceFloor).rsqrt();
}

CentroidState make_centroids(std::int64_t heads, std::int64_t clusters, std::int64_t dim,
                             std::uint64_t seed) {
  const at::Generator generator = at::make_generator<at::CPUGeneratorImpl>(seed);
  const at::Tensor centroids =
      normalised_rows(at::randn({heads, clusters, dim}, generator, at::kFloat));
  return {centroids, at::ones({heads, clusters}, at::kFloat), centroids.clone()};
}

void initialise_centroids(const CentroidState& state, const at::Tensor& x,
                          const at::Tensor& lengths, std::uint64_t seed) {
  // Once in a training, and on the CPU.
  const Tokens tokens(x.cpu(), lengths.defined() ? lengths.cpu() : lengths);
  const at::Tensor centroids = at::empty(state.centroids.sizes(), state.centroids.scalar_type());
  spherical_kmeans({.seed = seed}, view(tokens.x), tokens.sequences(), view(centroids),
                   tokens.scratch.workspace());
  const at::NoGradGuard no_grad;
  at::Tensor(state.centroids).copy_(centroids);
  at::Tensor(state.counts).fill_(1);
  at::Tensor(state.sums).copy_(state.centroids);
}

at::Tensor nearest_centroids(const at::Tensor& x, const at::Tensor& centroids,
                             const at::Tensor& lengths) {
  // As attention selects, so that a row has the same cluster everywhere.
  RoutingParams params;
  params.clusters = centroids.size(1);
  params.window = 1;
  params.share_qk = true;
  const Tokens tokens(x, lengths);
  const at::Tensor wide = centroids.detach().to(accumulator_of(x)).contiguous();
  AttentionInputs inputs;
  inputs.q = view(tokens.x);
  inputs.v = view(tokens.x.narrow(1, 0, centroids.size(0)));
  inputs.q_sequences = inputs.k_sequences = tokens.sequences();
  inputs.centroids = view(wide);
  inputs.causal = true;
  const SavedLayout layout = attention_saved(params, inputs);
  std::vector<at::Tensor> selection;
  std::vector<TensorView> views;
  for (std::size_t i = 0; i < layout.selection_count; ++i) {
    selection.push_back(at::empty(layout.tensors[i].sizes, x.options().dtype(at::kInt)));
    views.push_back(view(selection.back()));
  }
  const Scratch scratch(attention_workspace_bytes(params, inputs), tokens.x);
  attention_select(params, inputs, views, scratch.workspace());
  return selection[0];
}

at::Tensor commitment_loss(const at::Tensor& x, const at::Tensor& centroids,
                           const at::Tensor& labels, const at::Tensor& lengths) {
  const auto optional = lengths.defined() ? std::optional(lengths) : std::nullopt;
  const at::Tensor wide = centroids.detach().to(accumulator_of(x)).contiguous();
  return CommitmentFunction::apply(with_contiguous_rows(x), wide, labels, optional);
}

void add_statistics(const at::Tensor& x, const at::Tensor& labels, const at::Tensor& lengths,
                    const CentroidState& state, CentroidStatistics& statistics) {
  const Tokens tokens(x, lengths);
  const at::Tensor moved = state.centroids.clone();  // no one reads it
  const at::Tensor members = at::zeros_like(state.counts), sums = at::zeros_like(state.sums);
  // With decay 0 the core's counts and sums become those of the rows.
  coterie::ema_update(/*decay=*/0.0, view(tokens.x), tokens.sequences(), view(labels),
                      {view(moved), view(members), view(sums)}, tokens.scratch.workspace());
  const auto add = [](at::Tensor& total, const at::Tensor& part) {
    total = total.defined() ? total + part : part.to(at::kDouble);
  };
  add(statistics.members, members);
  add(statistics.sums, sums);
}

void ema_update(double decay, const CentroidStatistics& statistics, const CentroidState& state) {
  constexpr double kSmoothing = 1e-5;  // src/cpu/cluster/centroid_update.cc
  const at::NoGradGuard no_grad;
  const auto& [members, added] = statistics;
  at::Tensor(state.counts).copy_(decay * state.counts.to(at::kDouble) + (1 - decay) * members);
  const at::Tensor counts = state.counts.to(at::kDouble), total = counts.sum(1, /*keepdim=*/true);
  const at::Tensor smoothed =
      (counts + kSmoothing) / (total + static_cast<double>(counts.size(1)) * kSmoothing) * total;
  const at::Tensor sums = decay * state.sums.to(at::kDouble) + (1 - decay) * added;
  at::Tensor(state.sums).copy_(sums);
  at::Tensor(state.centroids)
      .copy_(at::where(members.unsqueeze(2) > 0, sums / smoothed.unsqueeze(2),
                       state.centroids.to(at::kDouble)));
}

void ema_update(double decay, const at::Tensor& x, const at::Tensor& labels,
                const at::Tensor& lengths, const CentroidState& state) {
  CentroidStatistics statistics;
  add_statistics(x, labels, lengths, state, statistics);
  ema_update(decay, statistics, state);
}

}  // namespace coterie::torch_api
