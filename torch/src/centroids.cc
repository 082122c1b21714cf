// SPDX-License-Identifier: MIT
#include "coterie/torch/centroids.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/DeviceGuard.h>
#include <torch/csrc/autograd/custom_function.h>

#include <optional>

#include "bridge.h"
#include "coterie/error.h"
#include "coterie/routing.h"

namespace coterie::torch_api {
namespace {

using ::torch::autograd::AutogradContext;
using ::torch::autograd::variable_list;

// Rows of x as the core wants them; their device is current.
struct Tokens {
  at::Tensor x, lengths;
  c10::DeviceGuard guard;

  Tokens(const at::Tensor& tokens, const at::Tensor& token_lengths)
      : x(with_contiguous_rows(tokens.detach())),
        lengths(with_type(token_lengths, at::kInt)),
        guard(x.device()) {}

  Sequences sequences() const { return {view(lengths), {}}; }
  Scratch scratch(std::int64_t bytes) const { return {bytes, x}; }
};

struct CommitmentFunction : ::torch::autograd::Function<CommitmentFunction> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& x, const at::Tensor& centroids,
                            const at::Tensor& labels, const std::optional<at::Tensor>& lengths) {
    const Tokens tokens(x, lengths.value_or(at::Tensor()));
    const at::Tensor loss = at::empty({1}, x.options().dtype(accumulator_of(x)));
    coterie::commitment_loss(
        view(tokens.x), tokens.sequences(), view(centroids), view(labels), view(loss),
        tokens.scratch(commitment_workspace_bytes(view(tokens.x))).workspace());
    ctx->save_for_backward({tokens.x, centroids, labels, tokens.lengths});
    return loss.squeeze(0);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grad_outputs) {
    if (at::GradMode::is_enabled()) {
      throw Error("[commitment_loss] double backward is not supported; got create_graph");
    }
    const variable_list saved = ctx->get_saved_variables();
    const Tokens tokens(saved[0], saved[3]);
    const at::Tensor dx = at::zeros_like(tokens.x);
    // Scaled before it is rounded: with a weight of 1 it underflows in f16.
    coterie::commitment_loss_backward(view(tokens.x), tokens.sequences(), view(saved[1]),
                                      view(saved[2]), 1.0, view(dx), tokens.scratch(0).workspace(),
                                      view(with_own_values(grad_outputs[0]).reshape({1})));
    return {dx, {}, {}, {}};
  }
};

}  // namespace

at::Tensor normalised_rows(const at::Tensor& x) {
  const Tokens rows(x.reshape({1, 1, -1, x.size(-1)}), {});
  const at::Tensor out = at::empty(rows.x.sizes(), x.options().dtype(accumulator_of(x)));
  normalise_rows(view(rows.x), view(out), rows.scratch(0).workspace());
  return out.view(x.sizes());
}

CentroidState make_centroids(std::int64_t heads, std::int64_t clusters, std::int64_t dim,
                             std::uint64_t seed) {
  const at::Generator generator = at::make_generator<at::CPUGeneratorImpl>(seed);
  const at::Tensor centroids =
      normalised_rows(at::randn({heads, clusters, dim}, generator, at::kFloat));
  return {centroids, at::ones({heads, clusters}, at::kFloat), centroids.clone()};
}

void initialise_centroids(const CentroidState& state, const at::Tensor& x,
                          const at::Tensor& lengths, std::uint64_t seed, std::int64_t first_head) {
  // Once in a training, and on the CPU.
  const Tokens tokens(x.cpu(), lengths.defined() ? lengths.cpu() : lengths);
  const at::Tensor centroids = at::empty(state.centroids.sizes(), state.centroids.scalar_type());
  spherical_kmeans({.seed = seed, .first_head = first_head}, view(tokens.x), tokens.sequences(),
                   view(centroids));
  const at::NoGradGuard no_grad;
  at::Tensor(state.centroids).copy_(centroids);
  at::Tensor(state.counts).fill_(1);
  at::Tensor(state.sums).copy_(state.centroids);
}

at::Tensor nearest_centroids(const at::Tensor& x, const at::Tensor& centroids,
                             const at::Tensor& lengths) {
  const Tokens tokens(x, lengths);
  const at::Tensor wide = with_type(centroids.detach(), accumulator_of(x));
  const at::Tensor labels = at::empty(x.sizes().slice(0, 3), x.options().dtype(at::kInt));
  const std::int64_t bytes =
      routing_labels_workspace_bytes(view(tokens.x), tokens.sequences(), view(wide));
  routing_labels(view(tokens.x), tokens.sequences(), view(wide), view(labels),
                 tokens.scratch(bytes).workspace());
  return labels;
}

at::Tensor commitment_loss(const at::Tensor& x, const at::Tensor& centroids,
                           const at::Tensor& labels, const at::Tensor& lengths) {
  const auto optional = lengths.defined() ? std::optional(lengths) : std::nullopt;
  const at::Tensor wide = with_type(centroids.detach(), accumulator_of(x));
  return CommitmentFunction::apply(with_contiguous_rows(x), wide, labels, optional);
}

void add_statistics(const at::Tensor& x, const at::Tensor& labels, const at::Tensor& lengths,
                    const CentroidState& state, CentroidStatistics& statistics) {
  const Tokens tokens(x, lengths);
  if (!statistics.members.defined()) {
    statistics = {at::zeros_like(state.counts, at::kDouble),
                  at::zeros_like(state.sums, at::kDouble)};
  }
  const coterie::CentroidStatistics to{view(statistics.members), view(statistics.sums)};
  const std::int64_t bytes = centroid_statistics_workspace_bytes(view(tokens.x), to);
  add_centroid_statistics(view(tokens.x), tokens.sequences(), view(labels), to,
                          tokens.scratch(bytes).workspace());
}

void move_centroids(double decay, const CentroidStatistics& statistics,
                    const CentroidState& state) {
  const c10::DeviceGuard guard(state.centroids.device());
  coterie::move_centroids(decay, {view(statistics.members), view(statistics.sums)},
                          {view(state.centroids), view(state.counts), view(state.sums)},
                          Scratch(0, state.centroids).workspace());
  for (const at::Tensor& moved : {state.centroids, state.counts, state.sums}) {
    moved.unsafeGetTensorImpl()->bump_version();  // autograd must know
  }
}

}  // namespace coterie::torch_api
