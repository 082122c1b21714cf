// SPDX-License-Identifier: MIT
// Decisions of clustered and improved clustered attention, once per call (clustered.h): which
// kernels run, the shape of their blocks, and how keys are cut. Host code only.
#include <cmath>

#include "cuda/cluster/clustering.h"
#include "cuda/clustered/clustered.h"
#include "cuda/clustered/near.h"
#include "cuda/launch/device.h"
#include "cuda/launch/dispatch.h"

namespace coterie::cuda {
namespace {

// Means per thread block of the centroid kernels, and resident blocks.
struct CentroidBlocks {
  int rows, resident;
};

CentroidBlocks centroid_blocks(const AttentionCall& call, std::int64_t clusters, bool sm90a) {
  const bool wide = call.Dk > 64 || call.inputs.q.dtype == DType::f32;
  if (!sm90a) return {kCentroidRows, (wide ? 2 : 3) * multiprocessors()};
  // Wide rows: two warpgroups with all the registers of a multiprocessor.
  if (wide) return {kCentroidRows, multiprocessors()};
  // Two or four warpgroups of 64 rows, whichever wastes fewer rows; four if equal.
  const bool large = 2 * ((clusters + 255) / 256) == (clusters + 127) / 128;
  return {large ? 256 : 128, (large ? 1 : 2) * multiprocessors()};
}

CentroidQueries centroid_queries(const AttentionCall& call, std::int64_t clusters,
                                 const CentroidBlocks& blocks) {
  CentroidQueries queries{};
  queries.spans = item_spans(call.inputs);
  queries.H = static_cast<int>(call.H);
  queries.group = static_cast<int>(call.H / call.value_heads);
  queries.clusters = static_cast<int>(clusters);
  queries.width = static_cast<int>(call.Dk);
  queries.block_rows = blocks.rows;
  queries.row_tiles = (queries.clusters + blocks.rows - 1) / blocks.rows;
  queries.chunks = key_chunks(call, call.H * queries.row_tiles, blocks.resident);
  queries.sign = call.scale < 0 ? -1.0f : 1.0f;
  queries.exponent = static_cast<float>(std::fabs(call.scale) * 1.4426950408889634);
  queries.inverse = 1.0f / queries.exponent;
  queries.dropout = call.dropout;
  return queries;
}

// Chooses the team size that takes the least time: rounds x (keys of a block + overhead of a
// problem, in keys).
SelectTeams select_teams(const AttentionCall& call, int problems, int resident) {
  constexpr std::int64_t kOverhead = 2048;
  SelectTeams selection{};
  selection.problems = problems;
  std::int64_t least = 0;
  for (int size = kSelectParts; size > 0; size /= 2) {
    const int count = max(1, min(problems, resident / size));
    const std::int64_t time = (problems + count - 1) / count * (call.S / size + kOverhead);
    if (least > 0 && time >= least) continue;
    least = time;
    selection.teams.size = size;
    selection.teams.count = count;
  }
  return selection;
}

BackwardShape backward_shape(const AttentionCall& call, std::int64_t clusters, std::int64_t topk,
                             bool mass_grad, bool sm90a) {
  const auto number = [](std::int64_t size) { return static_cast<int>(size); };
  BackwardShape shape{
      number(call.num_items()), number(call.B), number(call.H),   number(call.H / call.value_heads),
      number(call.N),           number(call.S), number(clusters), number(topk)};
  shape.units = {shape.items, shape.H, shape.clusters, shape.N,
                 static_cast<int>(max(call.B * call.N - 1, std::int64_t{0}) >> kUnitBits)};
  shape.pitch = dispatch_head_dim(call.op, max(call.Dk, call.Dv),
                                  [](auto width) { return static_cast<int>(width); });
  const std::int64_t stacked = shape.group * clusters;
  shape.fused = sm90a && shape.pitch == 64 && stacked <= kFusedCentroids;
  // Centroids per block, and resident blocks, of the kernels that sum over keys.
  const std::int64_t owned = shape.fused ? kFusedCentroids : kMeanRows,
                     resident = (sm90a ? 1 : 2) * multiprocessors();
  shape.chunks = key_chunks(call, call.value_heads * ((stacked + owned - 1) / owned), resident);
  shape.key_ranges = key_chunks(call, call.value_heads, resident);
  shape.mass_grad = mass_grad;
  shape.causal = call.causal;
  shape.scale = static_cast<float>(call.scale);
  shape.gradient_scale = shape.weight_scale = 1.0f;
  if (call.inputs.q.dtype == DType::f16) {
    // Sums over a cluster grow with its size; weights shrink with the number of keys.
    const double members =
        static_cast<double>(call.N) / static_cast<double>(max(clusters, std::int64_t{1}));
    shape.gradient_scale = std::exp2(-std::ceil(std::log2(max(members, 1.0))));
    shape.weight_scale = 256.0f;
  }
  shape.weight_bits = std::log2(shape.weight_scale);
  shape.unscale = 1.0f / (shape.weight_scale * shape.gradient_scale);
  shape.spans = item_spans(call.inputs);
  shape.dropout = call.dropout;
  return shape;
}

}  // namespace

ClusteredPlan clustered_plan(const AttentionCall& call, const ClusteringParams& clustering,
                             std::int64_t topk, bool mass_grad, std::int64_t near) {
  const std::int64_t clusters = clustering.clusters;
  topk = min(topk, call.S);
  ClusteredPlan plan{call,
                     static_cast<int>(clusters),
                     static_cast<int>(topk),
                     cluster_workspace_bytes(clustering, call),
                     clusters_with_means(clustering, call),
                     on_hopper() && call.inputs.q.dtype != DType::f32 && !call.dropout.on()};
  const CentroidBlocks blocks = centroid_blocks(call, clusters, plan.sm90a);
  plan.means = centroid_queries(call, clusters, blocks);
  plan.backward = backward_shape(call, clusters, topk, mass_grad, plan.sm90a);
  const int problems = static_cast<int>(call.num_items() * call.H) * plan.means.row_tiles;
  if (plan.sm90a && topk > 0) plan.selection = select_teams(call, problems, blocks.resident);
  plan.near = near_width(call, near);
  plan.subtracts = plan.near > 0 && call.N >= kLeastBlocks * plan.near && !call.dropout.on();
  plan.backward.near = plan.near;
  plan.backward.subtracts = plan.subtracts;
  if (plan.subtracts && topk > 0)
    plan.backward.top_words = TopKeyBits::words_of(plan.backward.group * plan.clusters);
  if (call.causal || (plan.near > 0 && !plan.subtracts)) return plan;
  // With few problems, one kernel for both would leave multiprocessors idle. With near keys the
  // means attend after the selection, to keys that are not top keys.
  plan.selection_attends =
      plan.near == 0 && 4 * plan.selection.teams.blocks() >= 3 * blocks.resident;
  // Teams, if the blocks of all chunks of all means are resident at once.
  const int size = plan.means.chunks.per_item;
  if (plan.sm90a && static_cast<std::int64_t>(problems) * size <= blocks.resident)
    plan.attention = {problems, size, nullptr};
  return plan;
}

}  // namespace coterie::cuda
