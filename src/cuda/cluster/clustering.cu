// SPDX-License-Identifier: MIT
// The three clusterings as sequences of kernels.
#include "cuda/cluster/clustering.h"

#include <algorithm>

#include "core/arena.h"
#include "cuda/cluster/hamming.h"
#include "cuda/cluster/hash.h"
#include "cuda/cluster/key_kmeans.h"
#include "cuda/cluster/key_metric.h"
#include "cuda/cluster/nearest.h"
#include "cuda/cluster/sums.h"
#include "cuda/launch/launch.h"

namespace coterie::cuda {

namespace {

struct Outputs {
  std::int32_t *labels = nullptr, *order = nullptr, *offsets = nullptr;
  ClusterExtra extra;
};

// 3 launches: planes, codes, k-means.
void hamming_clusters(const ClusteringParams& params, const AttentionCall& call, const Outputs& out,
                      Arena& arena, cudaStream_t stream) {
  const ClusterShape shape = cluster_shape(call, params.clusters);
  const HashBuffers hash(arena, params, call);
  const HammingBuffers buffers(arena, shape, static_cast<int>(params.iterations));
  if (arena.counting()) return;
  hash_queries(params, call, hash, {buffers.zeroed, buffers.zeroed_count}, stream);
  hamming_kmeans(shape,
                 {static_cast<int>(params.iterations), static_cast<int>(params.bits), hash.codes,
                  out.labels, out.order, out.offsets},
                 buffers, stream);
}

// One launch, `at_once`, where key_kmeans serves. Else 3, and 3 more for each iteration: sums of
// clusters, centroids, labels.
void key_metric_clusters(const ClusteringParams& params, const AttentionCall& call,
                         const Outputs& out, bool at_once, Arena& arena, cudaStream_t stream) {
  const ClusterShape shape = cluster_shape(call, params.clusters);
  const KeyMetricBuffers metric(arena, call, params.clusters);
  if (at_once) {
    const KeyKMeansBuffers buffers(arena, call, shape);
    if (arena.counting()) return;
    return key_kmeans(call, shape, metric, buffers,
                      {static_cast<int>(params.iterations) + 1, out.labels, out.order, out.offsets,
                       out.extra.means, out.extra.zeroed},
                      stream);
  }
  const NearestBuffers nearest(arena, shape, params.iterations + 1);
  // The sums may overwrite the centroids: those of empty clusters, which are kept, have none.
  const ClusterSums sums =
      make_cluster_sums(arena, shape, call.inputs.q, out.order, out.offsets, metric.centroids);
  if (arena.counting()) return;
  key_covariance(call, metric, {nearest.zeroed, nearest.passes * nearest.teams}, stream);
  for (std::int64_t pass = 0; pass <= params.iterations; ++pass) {
    if (pass > 0) sum_cluster_tiles(call.op, sums, call.inputs.q, stream);
    weigh_centroids(call, sums, pass == 0, metric, stream);
    nearest_clusters(call, shape, metric.table, nearest, {pass, out.labels, out.order, out.offsets},
                     stream);
  }
}

void cluster(const ClusteringParams& params, const AttentionCall& call, const Outputs& out,
             bool at_once, Arena& arena, cudaStream_t stream) {
  if (params.clusters > kMaxClusters)
    fail_more_than(call.op, kMaxClusters, "clusters", params.clusters);
  if (params.method == Clustering::keys)
    key_metric_clusters(params, call, out, at_once, arena, stream);
  else
    hamming_clusters(params, call, out, arena, stream);
}

}  // namespace

std::int64_t cluster_workspace_bytes(const ClusteringParams& params, const AttentionCall& call) {
  // Where the rows are decides between the two, but not how much memory a call needs.
  Arena stages, whole;
  cluster(params, call, {}, false, stages, nullptr);
  if (params.method == Clustering::keys &&
      key_kmeans_fits(call, cluster_shape(call, params.clusters)))
    cluster(params, call, {}, true, whole, nullptr);
  return std::max(stages.used(), whole.used());
}

bool clusters_with_means(const ClusteringParams& params, const AttentionCall& call) {
  return params.method == Clustering::keys &&
         key_kmeans_serves(call, cluster_shape(call, params.clusters));
}

void cluster_queries(const ClusteringParams& params, const AttentionCall& call,
                     const TensorView& labels, const TensorView& order, const TensorView& offsets,
                     void* workspace, cudaStream_t stream, const ClusterExtra& extra) {
  if (call.num_items() == 0) return;
  const std::int64_t bytes = cluster_workspace_bytes(params, call);
  Arena arena(call.op, {workspace, bytes, stream}, bytes);
  cluster(params, call,
          {static_cast<std::int32_t*>(labels.data), static_cast<std::int32_t*>(order.data),
           static_cast<std::int32_t*>(offsets.data), extra},
          clusters_with_means(params, call), arena, stream);
}

}  // namespace coterie::cuda
