// SPDX-License-Identifier: MIT
// Clusters of codes and of queries.
#include "cpu/cluster/clustering.h"

#include "core/check.h"
#include "core/dispatch.h"
#include "core/items.h"
#include "cpu/cluster/hamming.h"
#include "cpu/engine/rows.h"
#include "ops/call.h"
#include "ops/parts.h"
#include "ops/scratch.h"

namespace coterie {

namespace {

// The parameters with automatic values replaced, as for the mechanism that uses them.
ClusteringParams settled(const ClusteringParams& params) {
  return std::get<ClusteredParams>(resolve(ClusteredParams{params}, false)).clustering;
}

}  // namespace

void hamming_kmeans(const HammingKMeansParams& params, const TensorView& codes,
                    const Sequences& sequences, const TensorView& labels,
                    const TensorView& centroids, const Workspace&) {
  const char* op = "hamming_kmeans";
  COTERIE_CHECK(codes.rank == 3, op, "expected codes with 3 dimensions; got ", describe(codes));
  COTERIE_CHECK(params.iterations >= 0, op, "expected 0 or more iterations; got ",
                params.iterations);
  const std::int64_t bits = params.bits == kAutomatic ? kMaxHashBits : params.bits;
  COTERIE_CHECK(1 <= bits && bits <= kMaxHashBits, op, "expected bits from 1 to ", kMaxHashBits,
                "; got ", bits);
  const std::int64_t batches = codes.size(0), heads = codes.size(1), rows = codes.size(2);
  ops::check_dense(op, "codes", codes, DType::u64, {batches, heads, rows});
  ops::check_dense(op, "labels", labels, DType::i32, {batches, heads, rows});
  const std::vector<Span> spans = make_spans(op, sequences, batches, rows);
  COTERIE_CHECK(centroids.rank == 3 && centroids.size(2) >= 1, op,
                "expected centroids of shape (items, heads, clusters); got ", describe(centroids));
  const std::int64_t items = static_cast<std::int64_t>(spans.size()), clusters = centroids.size(2);
  ops::check_dense(op, "centroids", centroids, DType::u64, {items, heads, clusters});
  cpu::fill_padding(labels, spans, -1);
  std::vector<cpu::CodeProblem> problems;
  for (std::int64_t item = 0; item < items; ++item)
    for (std::int64_t head = 0; head < heads; ++head) {
      const Span& span = spans[static_cast<std::size_t>(item)];
      problems.push_back({cpu::span_at<std::uint64_t>(codes, span, head), span.length,
                          static_cast<std::uint32_t>(item * heads + head),
                          cpu::block_at<std::uint64_t>(centroids, item, head),
                          cpu::span_at<std::int32_t>(labels, span, head)});
    }
  ops::Scratch memory;
  cpu::VoteBuffer votes = ops::take_scratch(
      memory, [&](Arena& arena) { return cpu::VoteBuffer(arena, items * heads, rows, clusters); });
  cpu::hamming_kmeans({clusters, params.iterations, bits, params.seed}, problems, votes);
}

std::int64_t cluster_queries_workspace_bytes(const ClusteringParams& params,
                                             const AttentionInputs& inputs) {
  const AttentionCall call = ops::make_part_call("cluster_queries", inputs);
  const CallThreads threads;
  Arena arena;
  dispatch_accumulator(inputs.q.dtype, [&](auto tag) {
    cpu::ClusteringWorkspace<typename decltype(tag)::type>(arena, settled(params), call);
  });
  return arena.used();
}

void cluster_queries(const ClusteringParams& params, const AttentionInputs& inputs,
                     const TensorView& labels, const Workspace& workspace) {
  const char* op = "cluster_queries";
  const AttentionCall call = ops::make_part_call(op, inputs);
  ops::check_dense(op, "labels", labels, DType::i32, {call.B, call.H, call.N});
  const auto needed = [&] { return cluster_queries_workspace_bytes(params, inputs); };
  const CallThreads threads(workspace.bytes, needed);
  Arena arena(op, workspace, needed());
  dispatch_accumulator(inputs.q.dtype, [&](auto tag) {
    cpu::ClusteringWorkspace<typename decltype(tag)::type> ws(arena, settled(params), call);
    cpu::cluster_queries(settled(params), call, labels, ws);
  });
}

}  // namespace coterie
