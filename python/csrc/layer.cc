// SPDX-License-Identifier: MIT
#include "layer.h"

#include <torch/csrc/stable/ops.h>

#include "coterie/error.h"
#include "coterie/kmeans.h"
#include "coterie/positions.h"
#include "coterie/routing.h"
#include "spec.h"

namespace coterie::stable_api {
namespace {

// Which rows of a tensor count: two arguments.
struct Spans {
  OptionalTensor lengths, cu_seqlens;

  explicit Spans(Arguments& arguments)
      : lengths(with_contiguous_rows(arguments.optional_tensor())),
        cu_seqlens(with_contiguous_rows(arguments.optional_tensor())) {}

  Sequences sequences() const { return {view(lengths), view(cu_seqlens)}; }
};

void check_rank(const char* op, const Tensor& x) {
  if (x.dim() == 4) return;
  throw Error(std::string("[") + op + "] expected x with 4 dimensions; got " +
              std::to_string(x.dim()));
}

DType accumulator_of(const Tensor& x) { return accumulator_dtype(view(x).dtype); }

}  // namespace

void rotate_rows(StableIValue* stack, std::uint64_t, std::uint64_t) {
  Arguments arguments(stack);
  const Tensor given = arguments.tensor();
  Rotation rotation;
  rotation.first = arguments.integer();
  rotation.base = arguments.number();
  rotation.inverse = arguments.flag();
  const Scratch scratch(given);
  const Tensor x = with_contiguous_rows(given), out = empty_rows(x, x.size(x.dim() - 1));
  coterie::rotate_rows(view(x), rotation, view(out), scratch.workspace());
  give(stack, out);
}

void normalise_rows(StableIValue* stack, std::uint64_t, std::uint64_t) {
  Arguments arguments(stack);
  const Tensor given = arguments.tensor();
  check_rank("normalise_rows", given);
  const Scratch scratch(given);
  const Tensor x = with_contiguous_rows(given);
  const Tensor out = empty(accumulator_of(x), {x.size(0), x.size(1), x.size(2), x.size(3)}, x);
  coterie::normalise_rows(view(x), view(out), scratch.workspace());
  give(stack, out);
}

void routing_labels(StableIValue* stack, std::uint64_t, std::uint64_t) {
  Arguments arguments(stack);
  const Tensor given = arguments.tensor(), centroids = arguments.tensor();
  const Spans spans(arguments);
  check_rank("routing_labels", given);
  Scratch scratch(given);
  const Tensor x = with_contiguous_rows(given);
  const Tensor labels = empty(DType::i32, {x.size(0), x.size(1), x.size(2)}, x);
  coterie::routing_labels(view(x), spans.sequences(), view(centroids), view(labels),
                          scratch.allocate(routing_labels_workspace_bytes(
                              view(x), spans.sequences(), view(centroids))));
  give(stack, labels);
}

void spherical_kmeans(StableIValue* stack, std::uint64_t, std::uint64_t) {
  Arguments arguments(stack);
  const Tensor given = arguments.tensor();
  const Spans spans(arguments);
  const std::int64_t clusters = arguments.integer();
  SphericalKMeansParams params;
  params.iterations = arguments.integer();
  params.seed = arguments.seed();
  check_rank("spherical_kmeans", given);
  if (clusters < 1) {
    throw Error("[spherical_kmeans] expected at least one cluster; got " +
                std::to_string(clusters));
  }
  const Scratch scratch(given);
  const Tensor x = with_contiguous_rows(given);
  const Tensor centroids = empty(accumulator_of(x), {x.size(1), clusters, x.size(3)}, x);
  coterie::spherical_kmeans(params, view(x), spans.sequences(), view(centroids),
                            scratch.workspace());
  give(stack, centroids);
}

void kmeans(StableIValue* stack, std::uint64_t, std::uint64_t) {
  Arguments arguments(stack);
  const Tensor given = arguments.tensor();
  const OptionalTensor start = arguments.optional_tensor();
  const std::int64_t clusters = arguments.integer();
  KMeansParams params;
  params.iterations = arguments.integer();
  params.start = static_cast<KMeansStart>(arguments.integer());
  params.fill_empty = arguments.flag();
  params.seed = arguments.seed();
  if (given.dim() != 3 || clusters < 1) {
    throw Error("[kmeans] expected x (problems, rows, elements) and at least one cluster; got " +
                std::to_string(given.dim()) + " dimensions and " + std::to_string(clusters));
  }
  Scratch scratch(given);
  const Tensor x = with_contiguous_rows(given);
  const Tensor centroids = empty(accumulator_of(x), {x.size(0), clusters, x.size(2)}, x);
  const Tensor labels = empty(DType::i32, {x.size(0), x.size(1)}, x);
  const Tensor counts = empty(DType::i32, {x.size(0), clusters}, x);
  if (params.start == KMeansStart::given) {
    if (!start) throw Error("[kmeans] expected centroids to start from; got none");
    if (start->size(0) != x.size(0) || start->size(1) != clusters || start->size(2) != x.size(2))
      throw Error("[kmeans] expected centroids of the shape of the result; got others");
    torch::stable::copy_(const_cast<Tensor&>(centroids), *start);
  }
  const std::int64_t bytes = kmeans_workspace_bytes(params, view(x), clusters);
  coterie::kmeans(params, view(x), {view(centroids), view(labels), view(counts)},
                  scratch.allocate(bytes));
  give(stack, centroids, labels, counts);
}

void add_centroid_statistics(StableIValue* stack, std::uint64_t, std::uint64_t) {
  Arguments arguments(stack);
  const Tensor members = arguments.tensor(), sums = arguments.tensor();
  const Tensor given = arguments.tensor(), labels = arguments.tensor();
  const Spans spans(arguments);
  Scratch scratch(given);
  const Tensor x = with_contiguous_rows(given);
  const CentroidStatistics to{view(members), view(sums)};
  coterie::add_centroid_statistics(
      view(x), spans.sequences(), view(labels), to,
      scratch.allocate(centroid_statistics_workspace_bytes(view(x), to)));
}

void move_centroids(StableIValue* stack, std::uint64_t, std::uint64_t) {
  Arguments arguments(stack);
  const Tensor centroids = arguments.tensor(), counts = arguments.tensor();
  const Tensor sums = arguments.tensor();
  const Tensor members = arguments.tensor(), added = arguments.tensor();
  const double decay = arguments.number();
  const Scratch scratch(centroids);
  coterie::move_centroids(decay, {view(members), view(added)},
                          {view(centroids), view(counts), view(sums)}, scratch.workspace());
}

void commitment_loss(StableIValue* stack, std::uint64_t, std::uint64_t) {
  Arguments arguments(stack);
  const Tensor given = arguments.tensor(), centroids = arguments.tensor();
  const Tensor labels = arguments.tensor();
  const Spans spans(arguments);
  Scratch scratch(given);
  const Tensor x = with_contiguous_rows(given);
  const Tensor loss = empty(accumulator_of(x), {1}, x);
  coterie::commitment_loss(view(x), spans.sequences(), view(centroids), view(labels), view(loss),
                           scratch.allocate(commitment_workspace_bytes(view(x))));
  give(stack, loss);
}

void commitment_loss_backward(StableIValue* stack, std::uint64_t, std::uint64_t) {
  Arguments arguments(stack);
  const Tensor given = arguments.tensor(), centroids = arguments.tensor();
  const Tensor labels = arguments.tensor();
  const Spans spans(arguments);
  check_rank("commitment_loss_backward", given);
  const Scratch scratch(given);
  const Tensor x = with_contiguous_rows(given);
  Tensor dx = empty_rows(x, x.size(3));
  torch::stable::zero_(dx);  // the core adds to it
  coterie::commitment_loss_backward(view(x), spans.sequences(), view(centroids), view(labels), 1.0,
                                    view(dx), scratch.workspace());
  give(stack, dx);
}

void routing_step(StableIValue* stack, std::uint64_t, std::uint64_t) {
  Arguments arguments(stack);
  const Tensor ring_k = arguments.tensor(), ring_v = arguments.tensor();
  const Tensor counts = arguments.tensor();
  const Tensor given_q = arguments.tensor();
  const OptionalTensor given_k = arguments.optional_tensor();
  const Tensor given_v = arguments.tensor(), centroids = arguments.tensor();
  const OptionalTensor logit_scale = arguments.optional_tensor();
  const std::string text = arguments.text();
  AttentionInputs inputs;
  inputs.scale = arguments.number();
  inputs.causal = true;
  const Mechanism mechanism = mechanism_of(text);
  const auto* params = std::get_if<RoutingParams>(&mechanism);
  if (!params) throw Error("[routing_step] expected routing; got " + text);
  Scratch scratch(given_q);
  const Tensor q = with_contiguous_rows(given_q), v = with_contiguous_rows(given_v);
  const OptionalTensor k = with_contiguous_rows(given_k);
  inputs.q = view(q);
  inputs.k = view(k);
  inputs.v = view(v);
  inputs.centroids = view(centroids);
  inputs.logit_scale = view(logit_scale);
  const Tensor out = empty_rows(q, v.size(v.dim() - 1));
  coterie::routing_step(*params, inputs, {view(ring_k), view(ring_v), view(counts)}, view(out),
                        scratch.allocate(routing_step_workspace_bytes(*params, inputs)));
  give(stack, out);
}

}  // namespace coterie::stable_api
