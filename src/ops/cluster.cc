// SPDX-License-Identifier: MIT
// Assignment of tokens to centroids.

#include "core/check.h"
#include "core/dispatch.h"
#include "cpu/cluster/assign.h"
#include "ops/call.h"
#include "ops/parts.h"
#include "ops/scratch.h"
#include "ops/tokens.h"

namespace coterie {

namespace {

// Centroids (items|1, Hc, C, D) and bias (items|1, Hc, C) or absent.
cpu::CentroidView check_centroids(const char* op, const TensorView& x, std::int64_t items,
                                  const TensorView& centroids, const TensorView& bias) {
  COTERIE_CHECK(centroids.rank == 4 && centroids.size(2) >= 1, op,
                "expected centroids of shape (items or 1, heads, clusters, ", x.size(3), "); got ",
                describe(centroids));
  COTERIE_CHECK(centroids.size(0) == 1 || centroids.size(0) == items, op,
                "expected centroids for 1 or ", items, " items; got ", describe(centroids));
  ops::check_head_count(op, x, centroids.size(1));
  const DType accumulator = accumulator_dtype(x.dtype);
  ops::check_dense(op, "centroids", centroids, accumulator,
                   {centroids.size(0), centroids.size(1), centroids.size(2), x.size(3)});
  if (bias.present()) {
    COTERIE_CHECK(bias.size(0) == 1 || bias.size(0) == items, op, "expected bias for 1 or ", items,
                  " items; got ", describe(bias));
    ops::check_dense(op, "bias", bias, accumulator,
                     {bias.size(0), centroids.size(1), centroids.size(2)});
  }
  return {centroids, bias};
}

}  // namespace

void nearest_centroid(const TensorView& x, const Sequences& sequences, const TensorView& centroids,
                      const TensorView& bias, const TensorView& labels, const Workspace&) {
  const char* op = "nearest_centroid";
  const std::vector<Span> spans = ops::check_tokens(op, x, sequences);
  const cpu::CentroidView view =
      check_centroids(op, x, static_cast<std::int64_t>(spans.size()), centroids, bias);
  ops::check_labels(op, x, labels);
  dispatch_accumulator(x.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    ops::Scratch memory;
    auto tiles = ops::take_scratch(
        memory, [&](Arena& arena) { return cpu::make_tiles<T>(arena, x.size(3), 1); });
    cpu::assign_nearest<T>(x, spans, view, labels, tiles);
  });
}

void balanced_assign(const TensorView& x, const Sequences& sequences, const TensorView& centroids,
                     std::int64_t capacity, const TensorView& labels, const Workspace&) {
  const char* op = "balanced_assign";
  const std::vector<Span> spans = ops::check_tokens(op, x, sequences);
  const cpu::CentroidView view =
      check_centroids(op, x, static_cast<std::int64_t>(spans.size()), centroids, {});
  ops::check_labels(op, x, labels);
  for (const Span& span : spans) {
    const std::int64_t even = (span.length + view.clusters() - 1) / view.clusters();
    COTERIE_CHECK(capacity == 0 || capacity >= even, op, "expected a capacity of at least ", even,
                  " (", span.length, " tokens in ", view.clusters(),
                  " clusters), or 0 for the smallest possible; got ", capacity);
  }
  dispatch_accumulator(x.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    ops::Scratch memory;
    auto [tiles, workspace] = ops::take_scratch(memory, [&](Arena& arena) {
      const std::int64_t items = static_cast<std::int64_t>(spans.size());
      return std::make_pair(
          cpu::make_tiles<T>(arena, x.size(3), 1),
          cpu::BalancedWorkspace<T>(arena, items * x.size(1), x.size(0) * x.size(1) * x.size(2),
                                    view.clusters()));
    });
    cpu::assign_balanced<T>(x, spans, view, capacity, labels, tiles, workspace);
  });
}

}  // namespace coterie
