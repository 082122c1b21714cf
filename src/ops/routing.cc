// SPDX-License-Identifier: MIT
// The centroids of routing: checks, then the back end.
#include "coterie/routing.h"

#include <algorithm>
#include <cmath>
#include <string>

#include "core/arena.h"
#include "core/check.h"
#include "core/dispatch.h"
#include "core/parallel.h"
#include "coterie/attention.h"
#include "coterie/spec.h"
#include "cpu/cluster/centroid_update.h"
#include "cpu/cluster/commitment.h"
#include "cpu/cluster/normalise.h"
#include "cpu/engine/rows.h"
#include "cpu/mechanisms/routing_step.h"
#include "cuda/api/entry.h"
#include "ops/call.h"
#include "ops/scratch.h"
#include "ops/tokens.h"

namespace coterie {

namespace {

// Centroids (Hc, C, D).
void check_centroids(const char* op, const TensorView& x, const TensorView& centroids) {
  COTERIE_CHECK(centroids.rank == 3 && centroids.size(1) >= 1, op,
                "expected centroids of shape (heads, clusters, ", x.size(3), "); got ",
                describe(centroids));
  ops::check_head_count(op, x, centroids.size(0));
  ops::check_dense(op, "centroids", centroids, accumulator_dtype(x.dtype),
                   {centroids.size(0), centroids.size(1), x.size(3)}, x.device);
}

// Checks labels to be read: those of valid tokens are in [0, clusters). A GPU has no spans.
void check_read_labels(const char* op, const TensorView& x, const TensorView& labels,
                       const std::vector<Span>& spans, std::int64_t clusters) {
  ops::check_labels(op, x, labels);
  for (const Span& span : spans)
    for (std::int64_t head = 0; head < labels.size(1); ++head) {
      const auto* label = cpu::span_at<const std::int32_t>(labels, span, head);
      for (std::int64_t i = 0; i < span.length; ++i)
        COTERIE_CHECK(0 <= label[i] && label[i] < clusters, op, "expected labels in [0, ", clusters,
                      "); got ", label[i], " at token ", i, ", head ", head);
    }
}

// members (Hc, C) and sums (Hc, C, D) for rows of `dim` elements.
void check_statistics(const char* op, const CentroidStatistics& statistics, std::int64_t dim,
                      Device device) {
  const TensorView& members = statistics.members;
  COTERIE_CHECK(members.rank == 2 && members.size(0) >= 1 && members.size(1) >= 1, op,
                "expected members of shape (heads, clusters); got ", describe(members));
  ops::check_dense(op, "members", members, DType::f64, {members.size(0), members.size(1)}, device);
  ops::check_dense(op, "sums of the statistics", statistics.sums, DType::f64,
                   {members.size(0), members.size(1), dim}, device);
}

cpu::CommitmentProblem check_commitment(const char* op, const TensorView& x,
                                        const Sequences& sequences, const TensorView& centroids,
                                        const TensorView& labels) {
  const std::vector<Span> spans = ops::check_tokens_anywhere(op, x, sequences);
  check_centroids(op, x, centroids);
  check_read_labels(op, x, labels, spans, centroids.size(1));
  return {x, centroids, labels, spans};
}

// A call of strict routing. The labels are the first tensor of its selection.
struct LabelsCall {
  RoutingParams params;
  AttentionInputs inputs;
  SavedLayout layout;

  LabelsCall(const TensorView& x, const Sequences& sequences, const TensorView& centroids) {
    ops::check_tokens_anywhere("routing_labels", x, sequences);
    check_centroids("routing_labels", x, centroids);
    params.clusters = centroids.size(1);
    params.window = 1;
    params.share_qk = SharedKeys::yes;
    inputs.q = x;
    inputs.v = x.narrowed(1, 0, centroids.size(0));  // not read
    inputs.q_sequences = inputs.k_sequences = sequences;
    inputs.centroids = centroids;
    inputs.causal = true;
    layout = attention_saved(params, inputs);
  }
};

// The selection of a call of strict routing, after those of its tensors that are `given`.
std::vector<TensorView> take_selection(const SavedLayout& layout, std::vector<TensorView> given,
                                       Device device, Arena& arena) {
  for (std::size_t t = given.size(); t < layout.selection_count; ++t) {
    const std::vector<std::int64_t>& sizes = layout.tensors[t].sizes;  // three of them
    given.push_back(TensorView::contiguous(arena.take<std::int32_t>(sizes[0] * sizes[1] * sizes[2]),
                                           DType::i32, {sizes[0], sizes[1], sizes[2]}, device));
  }
  return given;
}

std::int64_t selection_bytes(const SavedLayout& layout, std::size_t given) {
  Arena arena;
  take_selection(layout, std::vector<TensorView>(given), Device::cpu, arena);
  return arena.used();
}

// What an arena left of its workspace.
Workspace rest_of(const Workspace& workspace, const Arena& arena) {
  return {static_cast<std::byte*>(workspace.data) + arena.used(), workspace.bytes - arena.used(),
          workspace.stream};
}

// A checked call for tokens that follow those in the rings.
struct StepCall {
  RoutingParams params;
  AttentionCall call;
  SavedLayout layout;

  StepCall(const RoutingParams& asked, const AttentionInputs& inputs) {
    const char* op = "routing_step";
    COTERIE_CHECK(inputs.causal, op, "expected causal inputs; got others");
    const Mechanism settled = resolve(asked, true);
    params = std::get<RoutingParams>(settled);
    COTERIE_CHECK(inputs.dropout == 0, op, "decoding has no dropout; got ", inputs.dropout);
    COTERIE_CHECK(params.membership == Membership::nearest, op,
                  "expected strict routing, whose selection sees no later token; got ",
                  to_string(settled));
    for (const Sequences* sequences : {&inputs.q_sequences, &inputs.k_sequences})
      COTERIE_CHECK(!sequences->lengths.present() && !sequences->cu_seqlens.present(), op,
                    "lengths and cu_seqlens are not used by a step of one token; got some");
    call = ops::make_call(settled, inputs);
    layout = ops::saved_layout(settled, call);
    call.op = op;
    COTERIE_CHECK(call.N == call.S, op, "expected as many keys as queries; got ", call.N,
                  " queries and ", call.S, " keys");
  }

  int most_threads() const {
    const std::int64_t in = std::min(params.queries_in, params.clusters);
    return ops::most_threads(call, params.clusters + in * params.window);
  }

  // The selection, then what the back end needs.
  std::int64_t workspace_bytes() const {
    const std::int64_t selected = selection_bytes(layout, 0);
    if (call.device == Device::cuda)
      return selected + attention_workspace_bytes(params, call.inputs);
    return selected + dispatch_accumulator(call.inputs.q.dtype, [&](auto tag) {
             Arena arena;
             cpu::RoutingStepBuffers<typename decltype(tag)::type>(arena, params, call);
             return arena.used();
           });
  }

  void check_rings(const RoutingRings& rings, const TensorView& out) const {
    const DType wide = accumulator_dtype(call.inputs.q.dtype);
    const std::int64_t slots = params.clusters * params.window;
    ops::check_dense(call.op, "the ring of keys", rings.k, wide,
                     {call.B, call.key_heads, slots, call.Dk}, call.device);
    ops::check_dense(call.op, "the ring of values", rings.v, wide,
                     {call.B, call.key_heads, slots, call.Dv}, call.device);
    ops::check_dense(call.op, "counts", rings.counts, DType::i64,
                     {call.B, call.key_heads, params.clusters}, call.device);
    ops::check_rows(call.op, "out", out, 4, call.device);
    ops::check_dtype(call.op, "out", out, call.inputs.q.dtype);
    ops::check_shape(call.op, "out", out, {call.B, call.H, call.N, call.Dv});
  }
};

}  // namespace

void normalise_rows(const TensorView& x, const TensorView& out, const Workspace& workspace) {
  const char* op = "normalise_rows";
  ops::check_rows(op, "x", x, 4, x.device);
  COTERIE_CHECK(is_floating(x.dtype), op, "expected x of type f32, f64, bf16 or f16; got ",
                describe(x));
  COTERIE_CHECK(x.size(3) >= 1, op, "expected at least one element per row; got x ", describe(x));
  ops::check_dense(op, "out", out, accumulator_dtype(x.dtype),
                   {x.size(0), x.size(1), x.size(2), x.size(3)}, x.device);
  if (x.count() == 0) return;
  if (x.device == Device::cuda) return cuda::normalise_rows(x, out, workspace);
  const std::vector<Span> spans = make_spans(op, {}, x.size(0), x.size(2));
  dispatch_accumulator(x.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    ops::Scratch memory;
    auto tiles = ops::take_scratch(
        memory, [&](Arena& arena) { return cpu::make_tiles<T>(arena, x.size(3), 1); });
    cpu::normalise_rows<T>(x, spans, cpu::NormalisedRows<T>(out), tiles);
  });
}

std::int64_t routing_labels_workspace_bytes(const TensorView& x, const Sequences& sequences,
                                            const TensorView& centroids) {
  const LabelsCall call(x, sequences, centroids);
  return selection_bytes(call.layout, 1) + attention_workspace_bytes(call.params, call.inputs);
}

void routing_labels(const TensorView& x, const Sequences& sequences, const TensorView& centroids,
                    const TensorView& labels, const Workspace& workspace) {
  const LabelsCall call(x, sequences, centroids);
  ops::check_labels("routing_labels", x, labels);
  Arena arena("routing_labels", workspace, selection_bytes(call.layout, 1));
  const std::vector<TensorView> selection = take_selection(call.layout, {labels}, x.device, arena);
  attention_select(call.params, call.inputs, selection, rest_of(workspace, arena));
}

void spherical_kmeans(const SphericalKMeansParams& params, const TensorView& x,
                      const Sequences& sequences, const TensorView& centroids, const Workspace&) {
  const char* op = "spherical_kmeans";
  const std::vector<Span> spans = ops::check_tokens(op, x, sequences);
  check_centroids(op, x, centroids);
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
        memory, [&](Arena& arena) { return cpu::KMeansWorkspace<T>(arena, x, centroids); });
    cpu::spherical_kmeans<T>(params, x, spans, centroids, workspace);
  });
}

std::int64_t centroid_statistics_workspace_bytes(const TensorView& x,
                                                 const CentroidStatistics& statistics) {
  if (x.device != Device::cuda) return 0;
  const char* op = "add_centroid_statistics";
  ops::check_rows(op, "x", x, 4, x.device);
  check_statistics(op, statistics, x.size(3), x.device);
  ops::check_head_count(op, x, statistics.members.size(0));
  return cuda::centroid_statistics_workspace_bytes(x, statistics);
}

void add_centroid_statistics(const TensorView& x, const Sequences& sequences,
                             const TensorView& labels, const CentroidStatistics& statistics,
                             const Workspace& workspace) {
  const char* op = "add_centroid_statistics";
  const std::vector<Span> spans = ops::check_tokens_anywhere(op, x, sequences);
  check_statistics(op, statistics, x.size(3), x.device);
  ops::check_head_count(op, x, statistics.members.size(0));
  check_read_labels(op, x, labels, spans, statistics.members.size(1));
  if (x.device == Device::cuda)
    return cuda::add_centroid_statistics(x, sequences, labels, statistics, workspace);
  dispatch_accumulator(x.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    ops::Scratch memory;
    auto scratch = ops::take_scratch(
        memory, [&](Arena& arena) { return cpu::CentroidWorkspace<T>(arena, x); });
    cpu::add_centroid_statistics<T>(x, spans, labels, statistics, scratch);
  });
}

void move_centroids(double decay, const CentroidStatistics& statistics, const CentroidState& state,
                    const Workspace& workspace) {
  const char* op = "move_centroids";
  COTERIE_CHECK(decay >= 0 && decay <= 1, op, "expected a decay from 0 to 1; got ", decay);
  const TensorView& centroids = state.centroids;
  COTERIE_CHECK(centroids.rank == 3, op,
                "expected centroids of shape (heads, clusters, elements); got ",
                describe(centroids));
  COTERIE_CHECK(centroids.dtype == DType::f32 || centroids.dtype == DType::f64, op,
                "expected centroids of type f32 or f64; got ", describe(centroids));
  check_statistics(op, statistics, centroids.size(2), centroids.device);
  const std::int64_t heads = statistics.members.size(0), clusters = statistics.members.size(1);
  const auto check = [&](const char* name, const TensorView& tensor,
                         const std::vector<std::int64_t>& sizes) {
    ops::check_dense(op, name, tensor, centroids.dtype, sizes, centroids.device);
  };
  check("centroids", centroids, {heads, clusters, centroids.size(2)});
  check("counts", state.counts, {heads, clusters});
  check("sums", state.sums, {heads, clusters, centroids.size(2)});
  if (centroids.device == Device::cuda)
    return cuda::move_centroids(decay, statistics, state, workspace);
  const CallThreads threads;
  dispatch_accumulator(centroids.dtype, [&](auto tag) {
    cpu::move_centroids<typename decltype(tag)::type>(decay, statistics, state);
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
                              const TensorView& dx, const Workspace& workspace,
                              const TensorView& scale) {
  const char* op = "commitment_loss_backward";
  const cpu::CommitmentProblem problem = check_commitment(op, x, sequences, centroids, labels);
  COTERIE_CHECK(std::isfinite(weight), op, "expected a finite weight; got ", weight);
  ops::check_rows(op, "dx", dx, 4, x.device);
  ops::check_dtype(op, "dx", dx, x.dtype);
  ops::check_shape(op, "dx", dx, {x.size(0), x.size(1), x.size(2), x.size(3)});
  if (scale.present()) {
    COTERIE_CHECK(scale.count() == 1, op, "expected a scale of one element; got ", describe(scale));
    ops::check_rows(op, "scale", scale, scale.rank, x.device);
    ops::check_dtype(op, "scale", scale, accumulator_dtype(x.dtype));
  }
  if (x.device == Device::cuda)
    return cuda::commitment_loss_backward(x, sequences, centroids, labels, weight, scale, dx,
                                          workspace);
  dispatch_accumulator(x.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    ops::Scratch memory;
    auto tiles = ops::take_scratch(
        memory, [&](Arena& arena) { return cpu::make_tiles<T>(arena, x.size(3), 1); });
    const double factor = scale.present() ? *static_cast<const T*>(scale.data) : 1.0;
    cpu::commitment_backward<T>(problem, weight * factor, dx, tiles);
  });
}

std::int64_t routing_step_workspace_bytes(const RoutingParams& params,
                                          const AttentionInputs& inputs) {
  const StepCall step(params, inputs);
  const CallThreads threads(step.most_threads());
  return step.workspace_bytes();
}

void routing_step(const RoutingParams& params, const AttentionInputs& inputs,
                  const RoutingRings& rings, const TensorView& out, const Workspace& workspace) {
  const StepCall step(params, inputs);
  step.check_rings(rings, out);
  const AttentionCall& call = step.call;
  if (call.B == 0 || call.N == 0) return;
  const CallThreads threads(
      workspace.bytes, [&] { return step.workspace_bytes(); }, step.most_threads());
  Arena arena(call.op, workspace, step.workspace_bytes());
  const std::vector<TensorView> selection = take_selection(step.layout, {}, call.device, arena);
  if (call.device == Device::cuda) {
    attention_select(step.params, inputs, selection, rest_of(workspace, arena));
    return cuda::routing_step(step.params, call, selection, rings, out, workspace);
  }
  dispatch_accumulator(inputs.q.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    cpu::RoutingStepBuffers<T> buffers(arena, step.params, call);
    cpu::routing_step<T>(step.params, call, selection, rings, out, buffers);
  });
}

}  // namespace coterie
