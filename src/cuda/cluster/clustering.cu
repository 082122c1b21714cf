// SPDX-License-Identifier: MIT
// The three clusterings as sequences of kernels, decided once per call.
#include "cuda/cluster/clustering.h"

#include <algorithm>

#include "core/arena.h"
#include "cuda/cluster/stages.h"
#include "cuda/launch/launch.h"

namespace coterie::cuda {

namespace {

struct ClusteringPlan {
  const ClusteringParams& params;
  const AttentionCall& call;
  ClusterShape shape;
  bool keys;           // in the keys' metric; else by codes in Hamming distance
  bool single_kernel;  // keys: one kernel for all passes

  ClusteringPlan(const ClusteringParams& p, const AttentionCall& c)
      : params(p),
        call(c),
        shape(cluster_shape(c, p.clusters)),
        keys(p.method == Clustering::keys) {
    if (p.clusters > kMaxClusters) fail_more_than(c.op, kMaxClusters, "clusters", p.clusters);
    single_kernel = keys && key_kmeans_serves(c, shape);
  }

  // The alignment of rows decides on the single kernel, but not on the memory that a call needs.
  std::int64_t bytes() const {
    Arena stages, single;
    if (keys && key_kmeans_fits(call, shape)) cluster_at_once({}, {}, single, nullptr);
    if (keys)
      cluster_in_stages({}, stages, nullptr);
    else
      cluster_codes({}, stages, nullptr);
    return std::max(stages.used(), single.used());
  }

  void run(const ClusterLists& out, const ClusterExtra& extra, Arena& arena,
           cudaStream_t stream) const {
    if (!keys) return cluster_codes(out, arena, stream);
    if (single_kernel) return cluster_at_once(out, extra, arena, stream);
    cluster_in_stages(out, arena, stream);
  }

 private:
  // 3 launches: planes, codes, k-means.
  void cluster_codes(const ClusterLists& out, Arena& arena, cudaStream_t stream) const {
    const HashPlan hash(arena, params, call);
    const HammingPlan kmeans(arena, shape, static_cast<int>(params.iterations));
    if (arena.counting()) return;
    hash_queries(params, call, hash, kmeans.zeroed, stream);
    hamming_kmeans(
        kmeans,
        {static_cast<int>(params.iterations), static_cast<int>(params.bits), hash.codes, out},
        stream);
  }

  void cluster_at_once(const ClusterLists& out, const ClusterExtra& extra, Arena& arena,
                       cudaStream_t stream) const {
    const KeyMetricBuffers metric(arena, call, params.clusters);
    const KeyKMeansPlan kmeans(arena, call, shape);
    if (arena.counting()) return;
    key_kmeans(call, kmeans, metric,
               {static_cast<int>(params.iterations) + 1, out, extra.means, extra.zeroed}, stream);
  }

  // 3 launches, and 3 more for each iteration: sums of clusters, centroids, labels.
  void cluster_in_stages(const ClusterLists& out, Arena& arena, cudaStream_t stream) const {
    const KeyMetricBuffers metric(arena, call, params.clusters);
    const NearestPlan nearest(arena, shape, params.iterations + 1);
    // The sums may overwrite the centroids: only empty clusters keep theirs, and they have no sums.
    const ClusterSums sums =
        make_cluster_sums(arena, shape, call.inputs.q, out.order, out.offsets, metric.centroids);
    if (arena.counting()) return;
    key_covariance(call, metric, nearest.zeroed, stream);
    for (std::int64_t pass = 0; pass <= params.iterations; ++pass) {
      if (pass > 0) sum_cluster_tiles(call.op, sums, call.inputs.q, stream);
      weigh_centroids(call, sums, pass == 0, metric, stream);
      nearest_clusters(call, nearest, metric.table, pass, out, stream);
    }
  }
};

}  // namespace

std::int64_t cluster_workspace_bytes(const ClusteringParams& params, const AttentionCall& call) {
  return ClusteringPlan(params, call).bytes();
}

bool clusters_with_means(const ClusteringParams& params, const AttentionCall& call) {
  return ClusteringPlan(params, call).single_kernel;
}

void cluster_queries(const ClusteringParams& params, const AttentionCall& call,
                     const TensorView& labels, const TensorView& order, const TensorView& offsets,
                     void* workspace, cudaStream_t stream, const ClusterExtra& extra) {
  if (call.num_items() == 0) return;
  const ClusteringPlan plan(params, call);
  const std::int64_t bytes = plan.bytes();
  Arena arena(call.op, {workspace, bytes, stream}, bytes);
  plan.run({static_cast<std::int32_t*>(labels.data), static_cast<std::int32_t*>(order.data),
            static_cast<std::int32_t*>(offsets.data)},
           extra, arena, stream);
}

}  // namespace coterie::cuda
