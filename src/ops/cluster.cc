// SPDX-License-Identifier: MIT
// Assignment of tokens to centroids, and the centroids of routing.
#include "coterie/cluster.h"

#include <cmath>

#include "core/check.h"
#include "core/dispatch.h"
#include "core/items.h"
#include "cpu/cluster/assign.h"
#include "cpu/cluster/centroid_update.h"
#include "cpu/cluster/commitment.h"
#include "cpu/engine/rows.h"
#include "cuda/api/entry.h"
#include "ops/call.h"
#include "ops/scratch.h"

namespace coterie {

namespace {

// x (B, H, N, D) of a floating type, with its sequences on the same device.
void check_rows_of_tokens(const char* op, const TensorView& x, const Sequences& sequences) {
  ops::check_rows(op, "x", x, 4, x.device);
  COTERIE_CHECK(is_floating(x.dtype), op, "expected x of type f32, f64, bf16 or f16; got ",
                describe(x));
  COTERIE_CHECK(x.size(1) >= 1 && x.size(3) >= 1, op,
                "expected at least one head and one element per row; got x ", describe(x));
  for (const TensorView* ints : {&sequences.lengths, &sequences.cu_seqlens})
    COTERIE_CHECK(!ints->present() || ints->device == x.device, op,
                  "expected lengths and cu_seqlens on ", describe(x.device), "; got them on ",
                  describe(ints->device));
}

// The same on the CPU, for what no other device does.
std::vector<Span> check_tokens(const char* op, const TensorView& x, const Sequences& sequences) {
  ops::check_cpu(op, "x", x);
  check_rows_of_tokens(op, x, sequences);
  return make_spans(op, sequences, x.size(0), x.size(2));
}

// What both devices do: their sequences on the CPU, which reads them, and none on a GPU.
std::vector<Span> check_tokens_anywhere(const char* op, const TensorView& x,
                                        const Sequences& sequences) {
  if (x.device == Device::cpu) return check_tokens(op, x, sequences);
  check_rows_of_tokens(op, x, sequences);
  check_sequences(op, sequences, x.size(0));
  const std::string refusal = cuda::refuse_tokens(x);
  COTERIE_CHECK(refusal.empty(), op, "expected tensors on the cpu; got tensors on cuda, and ",
                refusal);
  return {};
}

void check_labels(const char* op, const TensorView& x, const TensorView& labels) {
  ops::check_dense(op, "labels", labels, DType::i32, {x.size(0), x.size(1), x.size(2)}, x.device);
}

// Labels that are read: those of valid tokens lie in [0, clusters). A GPU keeps its own.
void check_label_values(const char* op, const TensorView& labels, const std::vector<Span>& spans,
                        std::int64_t clusters) {
  for (const Span& span : spans)
    for (std::int64_t head = 0; head < labels.size(1); ++head) {
      const auto* label = cpu::span_at<const std::int32_t>(labels, span, head);
      for (std::int64_t i = 0; i < span.length; ++i)
        COTERIE_CHECK(0 <= label[i] && label[i] < clusters, op, "expected labels in [0, ", clusters,
                      "); got ", label[i], " at token ", i, ", head ", head);
    }
}

void check_head_count(const char* op, const TensorView& x, std::int64_t centroid_heads) {
  COTERIE_CHECK(centroid_heads >= 1 && x.size(1) % centroid_heads == 0, op,
                "expected a number of centroid heads that divides the ", x.size(1),
                " heads of x; got ", centroid_heads);
}

// Centroids (items|1, Hc, C, D) and bias (items|1, Hc, C) or absent.
cpu::CentroidView check_centroids(const char* op, const TensorView& x, std::int64_t items,
                                  const TensorView& centroids, const TensorView& bias) {
  COTERIE_CHECK(centroids.rank == 4 && centroids.size(2) >= 1, op,
                "expected centroids of shape (items or 1, heads, clusters, ", x.size(3), "); got ",
                describe(centroids));
  COTERIE_CHECK(centroids.size(0) == 1 || centroids.size(0) == items, op,
                "expected centroids for 1 or ", items, " items; got ", describe(centroids));
  check_head_count(op, x, centroids.size(1));
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

// Centroids (Hc, C, D) of routing.
void check_routing_centroids(const char* op, const TensorView& x, const TensorView& centroids) {
  COTERIE_CHECK(centroids.rank == 3 && centroids.size(1) >= 1, op,
                "expected centroids of shape (heads, clusters, ", x.size(3), "); got ",
                describe(centroids));
  check_head_count(op, x, centroids.size(0));
  ops::check_dense(op, "centroids", centroids, accumulator_dtype(x.dtype),
                   {centroids.size(0), centroids.size(1), x.size(3)}, x.device);
}

cpu::CommitmentProblem check_commitment(const char* op, const TensorView& x,
                                        const Sequences& sequences, const TensorView& centroids,
                                        const TensorView& labels) {
  const std::vector<Span> spans = check_tokens_anywhere(op, x, sequences);
  check_routing_centroids(op, x, centroids);
  check_labels(op, x, labels);
  check_label_values(op, labels, spans, centroids.size(1));
  return {x, centroids, labels, spans};
}

}  // namespace

void nearest_centroid(const TensorView& x, const Sequences& sequences, const TensorView& centroids,
                      const TensorView& bias, const TensorView& labels, const Workspace&) {
  const char* op = "nearest_centroid";
  const std::vector<Span> spans = check_tokens(op, x, sequences);
  const cpu::CentroidView view =
      check_centroids(op, x, static_cast<std::int64_t>(spans.size()), centroids, bias);
  check_labels(op, x, labels);
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
  const std::vector<Span> spans = check_tokens(op, x, sequences);
  const cpu::CentroidView view =
      check_centroids(op, x, static_cast<std::int64_t>(spans.size()), centroids, {});
  check_labels(op, x, labels);
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

void spherical_kmeans(const SphericalKMeansParams& params, const TensorView& x,
                      const Sequences& sequences, const TensorView& centroids, const Workspace&) {
  const char* op = "spherical_kmeans";
  const std::vector<Span> spans = check_tokens(op, x, sequences);
  check_routing_centroids(op, x, centroids);
  COTERIE_CHECK(centroids.size(0) == x.size(1), op, "expected centroids for the ", x.size(1),
                " heads of x; got ", describe(centroids));
  COTERIE_CHECK(params.iterations >= 0, op, "expected 0 or more iterations; got ",
                params.iterations);
  COTERIE_CHECK(params.candidates >= 1, op, "expected 1 or more candidates; got ",
                params.candidates);
  std::int64_t tokens = 0;
  for (const Span& span : spans) tokens += span.length;
  COTERIE_CHECK(tokens >= 1, op, "expected at least one valid row; got none");
  dispatch_accumulator(x.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    ops::Scratch memory;
    auto workspace = ops::take_scratch(
        memory, [&](Arena& arena) { return cpu::CentroidWorkspace<T>(arena, x, centroids); });
    cpu::spherical_kmeans<T>(params, x, spans, centroids, workspace);
  });
}

void ema_update(double decay, const TensorView& x, const Sequences& sequences,
                const TensorView& labels, const CentroidState& state, const Workspace& workspace) {
  const char* op = "ema_update";
  const std::vector<Span> spans = check_tokens_anywhere(op, x, sequences);
  COTERIE_CHECK(decay >= 0 && decay <= 1, op, "expected a decay from 0 to 1; got ", decay);
  check_routing_centroids(op, x, state.centroids);
  const std::int64_t heads = state.centroids.size(0), clusters = state.centroids.size(1);
  const DType accumulator = accumulator_dtype(x.dtype);
  ops::check_dense(op, "counts", state.counts, accumulator, {heads, clusters}, x.device);
  ops::check_dense(op, "sums", state.sums, accumulator, {heads, clusters, x.size(3)}, x.device);
  check_labels(op, x, labels);
  check_label_values(op, labels, spans, clusters);
  if (x.device == Device::cuda)
    return cuda::ema_update(decay, x, sequences, labels, state, workspace);
  dispatch_accumulator(x.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    ops::Scratch memory;
    auto scratch = ops::take_scratch(
        memory, [&](Arena& arena) { return cpu::CentroidWorkspace<T>(arena, x, state.centroids); });
    cpu::ema_update<T>(decay, x, spans, labels, state, scratch);
  });
}

std::int64_t commitment_workspace_bytes(const TensorView& x) {
  return x.device == Device::cuda ? cuda::commitment_workspace_bytes(x) : 0;
}

void commitment_loss(const TensorView& x, const Sequences& sequences, const TensorView& centroids,
                     const TensorView& labels, const TensorView& loss, const Workspace& workspace) {
  const char* op = "commitment_loss";
  const cpu::CommitmentProblem problem = check_commitment(op, x, sequences, centroids, labels);
  COTERIE_CHECK(loss.count() == 1, op, "expected a loss of one element; got ", describe(loss));
  ops::check_rows(op, "loss", loss, loss.rank, x.device);
  ops::check_dtype(op, "loss", loss, accumulator_dtype(x.dtype));
  if (x.device == Device::cuda)
    return cuda::commitment_loss(x, sequences, centroids, labels, loss, workspace);
  dispatch_accumulator(x.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    ops::Scratch memory;
    auto tiles = ops::take_scratch(
        memory, [&](Arena& arena) { return cpu::make_tiles<T>(arena, x.size(3), 1); });
    *static_cast<T*>(loss.data) = cpu::commitment_loss<T>(problem, tiles);
  });
}

void commitment_loss_backward(const TensorView& x, const Sequences& sequences,
                              const TensorView& centroids, const TensorView& labels, double weight,
                              const TensorView& dx, const Workspace& workspace) {
  const char* op = "commitment_loss_backward";
  const cpu::CommitmentProblem problem = check_commitment(op, x, sequences, centroids, labels);
  COTERIE_CHECK(std::isfinite(weight), op, "expected a finite weight; got ", weight);
  ops::check_rows(op, "dx", dx, 4, x.device);
  ops::check_dtype(op, "dx", dx, x.dtype);
  ops::check_shape(op, "dx", dx, {x.size(0), x.size(1), x.size(2), x.size(3)});
  if (x.device == Device::cuda)
    return cuda::commitment_loss_backward(x, sequences, centroids, labels, weight, dx, workspace);
  dispatch_accumulator(x.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    ops::Scratch memory;
    auto tiles = ops::take_scratch(
        memory, [&](Arena& arena) { return cpu::make_tiles<T>(arena, x.size(3), 1); });
    cpu::commitment_backward<T>(problem, weight, dx, tiles);
  });
}

}  // namespace coterie
