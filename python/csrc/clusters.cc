// SPDX-License-Identifier: MIT
#include "clusters.h"

#include <torch/csrc/stable/ops.h>

#include "coterie/cluster.h"
#include "coterie/error.h"

namespace coterie::stable_api {
namespace {

// Which rows of a tensor count, as lengths or cu_seqlens.
struct Spans {
  OptionalTensor lengths, cu_seqlens;

  explicit Spans(Arguments& arguments)
      : lengths(with_contiguous_rows(arguments.optional_tensor())),
        cu_seqlens(with_contiguous_rows(arguments.optional_tensor())) {}

  Sequences sequences() const { return {view(lengths), view(cu_seqlens)}; }
};

void check_rank(const char* op, const char* name, const Tensor& tensor, std::int64_t rank) {
  if (tensor.dim() == rank) return;
  throw Error(std::string("[") + op + "] expected " + name + " with " + std::to_string(rank) +
              " dimensions; got " + std::to_string(tensor.dim()));
}

std::int64_t at_least_one(const char* op, const char* name, std::int64_t value) {
  if (value >= 1) return value;
  throw Error(std::string("[") + op + "] expected " + name + " of at least 1; got " +
              std::to_string(value));
}

DType accumulator_of(const Tensor& x) { return accumulator_dtype(view(x).dtype); }

}  // namespace

void spherical_kmeans(StableIValue* stack, std::uint64_t, std::uint64_t) {
  Arguments arguments(stack);
  const Tensor given = arguments.tensor();
  const Spans spans(arguments);
  const std::int64_t clusters = arguments.integer();
  SphericalKMeansParams params;
  params.iterations = arguments.integer();
  params.seed = arguments.seed();
  check_rank("spherical_kmeans", "x", given, 4);
  at_least_one("spherical_kmeans", "clusters", clusters);
  const Scratch scratch(given);
  const Tensor x = with_contiguous_rows(given);
  const Tensor centroids = empty(accumulator_of(x), {x.size(1), clusters, x.size(3)}, x);
  coterie::spherical_kmeans(params, view(x), spans.sequences(), view(centroids),
                            scratch.workspace());
  give(stack, centroids);
}

void ema_update(StableIValue* stack, std::uint64_t, std::uint64_t) {
  Arguments arguments(stack);
  const Tensor centroids = arguments.tensor(), counts = arguments.tensor();
  const Tensor sums = arguments.tensor();
  const Tensor given = arguments.tensor(), labels = arguments.tensor();
  const Spans spans(arguments);
  const double decay = arguments.number();
  const Scratch scratch(given);
  const Tensor x = with_contiguous_rows(given);
  coterie::ema_update(decay, view(x), spans.sequences(), view(labels),
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
  check_rank("commitment_loss_backward", "x", given, 4);
  const Scratch scratch(given);
  const Tensor x = with_contiguous_rows(given);
  Tensor dx = empty_rows(x, x.size(3));
  torch::stable::zero_(dx);  // the core adds to it
  coterie::commitment_loss_backward(view(x), spans.sequences(), view(centroids), view(labels), 1.0,
                                    view(dx), scratch.workspace());
  give(stack, dx);
}

}  // namespace coterie::stable_api
