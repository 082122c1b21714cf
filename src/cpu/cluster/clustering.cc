// SPDX-License-Identifier: MIT
#include "cpu/cluster/clustering.h"

#include <algorithm>
#include <numeric>

#include "core/parallel.h"
#include "coterie/random.h"
#include "cpu/cluster/group.h"
#include "cpu/cluster/hash.h"
#include "cpu/cluster/means.h"
#include "cpu/cluster/nearest.h"
#include "cpu/engine/row_tiles.h"
#include "cpu/engine/rows.h"

namespace coterie::cpu {

namespace {

// Calls body(item, head, worker) for `heads` heads of every item.
template <class Body>
void for_heads(const AttentionCall& call, std::int64_t heads, Body body) {
  parallel_for(call.num_items() * heads,
               [&](std::int64_t task, int worker) { body(task / heads, task % heads, worker); });
}

const Span& query_span(const AttentionCall& call, std::int64_t item) { return call.item(item).q; }

template <class T>
void hamming_clusters(const ClusteringParams& params, const AttentionCall& call,
                      const TensorView& labels, ClusteringWorkspace<T>& ws) {
  const bool by_keys = params.method == Clustering::hamming_keys;
  const std::int64_t bits = params.bits;
  if (by_keys) {
    for_heads(call, call.key_heads, [&](std::int64_t item, std::int64_t head, int) {
      key_difference_planes<T>(call, item, head, bits,
                               ws.planes + (item * call.key_heads + head) * bits * call.Dk);
    });
  } else {
    isotropic_planes(call.inputs.seed, params.hash_bias, bits, call.Dk, ws.planes, ws.thresholds);
  }
  const auto planes_of = [&](std::int64_t item, std::int64_t head) {
    const std::int64_t set = by_keys ? item * call.key_heads + call.key_head(head) : 0;
    return ws.planes + set * bits * call.Dk;
  };
  const auto thresholds_of = [&](std::int64_t item, std::int64_t head) {
    return ws.thresholds + (by_keys ? item * call.H + head : 0) * bits;
  };
  if (by_keys)
    for_heads(call, call.H, [&](std::int64_t item, std::int64_t head, int worker) {
      mean_query_thresholds(call, item, head, bits, planes_of(item, head),
                            ws.mean + worker * padded(call.Dk), thresholds_of(item, head));
    });
  const auto codes_of = [&](std::int64_t item, std::int64_t head) {
    const Span& span = query_span(call, item);
    return ws.codes + (span.batch * call.H + head) * call.N + span.begin;
  };
  const std::vector<RowTile> row_list = span_tiles(query_spans(call), call.H);
  for_tiles(row_list, ws.tiles, [&](const RowTile& tile, Tiles<T>& own) {
    hash_tile(span_rows(call.inputs.q, query_span(call, tile.item), tile.head), tile.first,
              tile.count, bits, planes_of(tile.item, tile.head),
              thresholds_of(tile.item, tile.head), own,
              codes_of(tile.item, tile.head) + tile.first);
  });
  std::vector<CodeProblem> problems;
  for (std::int64_t item = 0; item < call.num_items(); ++item)
    for (std::int64_t head = 0; head < call.H; ++head) {
      const Span& span = query_span(call, item);
      const std::int64_t problem = item * call.H + head;
      problems.push_back({codes_of(item, head), span.length,
                          call.inputs.part.stream(problem, call.H),
                          ws.code_centroids + problem * params.clusters,
                          span_at<std::int32_t>(labels, span, head)});
    }
  hamming_kmeans({params.clusters, params.iterations, bits, call.inputs.seed}, problems, ws.votes);
}

// Sigma = mean of (k - mean k)(k - mean k)^T over evenly spaced keys.
template <class T>
void key_covariance(const AttentionCall& call, std::int64_t item, std::int64_t kv_head,
                    Tiles<T>& tiles, T* covariance) {
  const Kernels<T>& kernel = kernels<T>();
  const Span& span = call.item(item).k;
  const std::int64_t width = padded(call.Dk), samples = std::min(span.length, 8 * call.Dk);
  std::fill_n(covariance, call.Dk * width, T(0));
  if (samples == 0) return;
  std::vector<std::int32_t> index(static_cast<std::size_t>(samples));
  for (std::int64_t t = 0; t < samples; ++t)
    index[static_cast<std::size_t>(t)] = static_cast<std::int32_t>(t * span.length / samples);
  Rows keys = span_rows(call.k, span, kv_head);
  std::vector<T> mean(static_cast<std::size_t>(width));
  mean_rows(keys, index.data(), 0, samples, tiles, mean.data());
  keys.index = index.data();
  for (std::int64_t first = 0; first < samples; first += kQueryTile) {
    const std::int64_t count = std::min(kQueryTile, samples - first);
    kernel.load(keys, first, count, T(1), tiles.q, tiles.key_row);
    for (std::int64_t r = 0; r < count; ++r)
      kernel.row_add(tiles.q + r * tiles.key_row, mean.data(), width, T(-1));
    kernel.multiply({call.Dk, width, count, tiles.q, 1, tiles.key_row, tiles.q, tiles.key_row,
                     covariance, width, true});
  }
  kernel.row_scale(covariance, call.Dk * width, T(1) / static_cast<T>(samples));
}

// weighted_c = Sigma mu_c and bias_c = -mu_c . weighted_c / 2.
template <class T>
void weigh_centroids(const AttentionCall& call, std::int64_t clusters, const T* covariance,
                     const T* centroids, Tiles<T>& tiles, T* weighted, T* bias) {
  const Kernels<T>& kernel = kernels<T>();
  const std::int64_t width = padded(call.Dk);
  const Rows rows = memory_rows(const_cast<T*>(centroids), call.Dk);
  const Rows out = memory_rows(weighted, call.Dk);
  for (std::int64_t first = 0; first < clusters; first += kQueryTile) {
    const std::int64_t count = std::min(kQueryTile, clusters - first);
    kernel.load(rows, first, count, T(1), tiles.q, width);
    kernel.multiply(
        {count, width, call.Dk, tiles.q, width, 1, covariance, width, tiles.dq, width, false});
    kernel.store(out, first, count, T(1), tiles.dq, width);
    for (std::int64_t r = 0; r < count; ++r)
      bias[first + r] = T(-0.5) * kernel.row_dot(tiles.q + r * width, tiles.dq + r * width, width);
  }
}

template <class T>
void key_metric_clusters(const ClusteringParams& params, const AttentionCall& call,
                         const TensorView& labels, ClusteringWorkspace<T>& ws) {
  const std::int64_t clusters = params.clusters, width = padded(call.Dk);
  const auto tiles_of = [&](int worker) -> Tiles<T>& {
    return ws.tiles[static_cast<std::size_t>(worker)];
  };
  const auto one_each = [&](std::int64_t item) {
    return query_span(call, item).length <= clusters;
  };
  const auto centroids_of = [&](std::int64_t problem) {
    return ws.centroids + problem * clusters * call.Dk;
  };
  for_heads(call, call.key_heads, [&](std::int64_t item, std::int64_t head, int worker) {
    key_covariance(call, item, head, tiles_of(worker),
                   ws.covariance + (item * call.key_heads + head) * call.Dk * width);
  });
  // Start: distinct random queries, or one cluster per query if there are enough clusters.
  for_heads(call, call.H, [&](std::int64_t item, std::int64_t head, int) {
    const Span& span = query_span(call, item);
    std::int32_t* label = span_at<std::int32_t>(labels, span, head);
    if (one_each(item)) {
      std::iota(label, label + span.length, 0);
      return;
    }
    const std::int64_t problem = item * call.H + head;
    const RandomStream stream{call.inputs.seed, RandomUse::initial_centroid,
                              call.inputs.part.stream(problem, call.H)};
    const Rows queries = span_rows(call.inputs.q, span, head);
    for (std::int64_t c = 0; c < clusters; ++c)
      kernels<T>().load(queries,
                        random_permutation(stream, static_cast<std::uint32_t>(c),
                                           static_cast<std::uint32_t>(span.length)),
                        1, T(1), centroids_of(problem) + c * call.Dk, call.Dk);
  });
  const std::vector<RowTile> query_tiles = span_tiles(query_spans(call), call.H);
  for (std::int64_t iteration = 0; iteration <= params.iterations; ++iteration) {
    for_heads(call, call.H, [&](std::int64_t item, std::int64_t head, int worker) {
      if (one_each(item)) return;
      const std::int64_t problem = item * call.H + head;
      const T* covariance =
          ws.covariance + (item * call.key_heads + call.key_head(head)) * call.Dk * width;
      weigh_centroids(call, clusters, covariance, centroids_of(problem), tiles_of(worker),
                      ws.weighted + problem * clusters * call.Dk, ws.bias + problem * clusters);
    });
    for_tiles(query_tiles, ws.tiles, [&](const RowTile& tile, Tiles<T>& own) {
      if (one_each(tile.item)) return;
      const Span& span = query_span(call, tile.item);
      const std::int64_t problem = tile.item * call.H + tile.head;
      nearest_tile(span_rows(call.inputs.q, span, tile.head), tile.first, tile.count,
                   memory_rows(ws.weighted + problem * clusters * call.Dk, call.Dk), clusters,
                   ws.bias + problem * clusters, own,
                   span_at<std::int32_t>(labels, span, tile.head) + tile.first);
    });
    if (iteration == params.iterations) return;
    const auto order_of = [&](const Span& span, std::int64_t head) {
      return ws.order + (span.batch * call.H + head) * call.N + span.begin;
    };
    for_heads(call, call.H, [&](std::int64_t item, std::int64_t head, int) {
      const Span& span = query_span(call, item);
      if (!one_each(item))
        group_rows(span_at<std::int32_t>(labels, span, head), span.length, clusters,
                   order_of(span, head), ws.offsets + (item * call.H + head) * (clusters + 1));
    });
    parallel_for(call.num_items() * call.H * clusters, [&](std::int64_t task, int worker) {
      const std::int64_t cluster = task % clusters, problem = task / clusters;
      const std::int64_t item = problem / call.H, head = problem % call.H;
      if (one_each(item)) return;
      const Span& span = query_span(call, item);
      const std::int32_t* offsets = ws.offsets + problem * (clusters + 1);
      mean_rows(span_rows(call.inputs.q, span, head), order_of(span, head), offsets[cluster],
                offsets[cluster + 1], tiles_of(worker), centroids_of(problem) + cluster * call.Dk);
    });
  }
}

}  // namespace

template <class T>
ClusteringWorkspace<T>::ClusteringWorkspace(Arena& arena, const ClusteringParams& params,
                                            const AttentionCall& call)
    : tiles(make_tiles<T>(arena, call.Dk, 1)),
      votes(arena, params.method == Clustering::keys ? 0 : call.num_items() * call.H, call.N,
            params.clusters) {
  const std::int64_t problems = call.num_items() * call.H, clusters = params.clusters;
  const std::int64_t key_problems = call.num_items() * call.key_heads;
  if (params.method != Clustering::keys) {
    const bool by_keys = params.method == Clustering::hamming_keys;
    codes = arena.take<std::uint64_t>(call.B * call.H * call.N);
    code_centroids = arena.take<std::uint64_t>(problems * clusters);
    planes = arena.take<float>((by_keys ? key_problems : 1) * params.bits * call.Dk);
    thresholds = arena.take<float>((by_keys ? problems : 1) * params.bits);
    mean = arena.take<T>(call_threads() * padded(call.Dk));
    return;
  }
  covariance = arena.take<T>(key_problems * call.Dk * padded(call.Dk));
  centroids = arena.take<T>(problems * clusters * call.Dk);
  weighted = arena.take<T>(problems * clusters * call.Dk);
  bias = arena.take<T>(problems * clusters);
  order = arena.take<std::int32_t>(call.B * call.H * call.N);
  offsets = arena.take<std::int32_t>(problems * (clusters + 1));
}

template <class T>
void cluster_queries(const ClusteringParams& params, const AttentionCall& call,
                     const TensorView& labels, ClusteringWorkspace<T>& workspace) {
  fill_padding(labels, query_spans(call), -1);
  if (params.method == Clustering::keys)
    key_metric_clusters(params, call, labels, workspace);
  else
    hamming_clusters(params, call, labels, workspace);
}

#define COTERIE_INSTANTIATE(T)                                                                    \
  template struct ClusteringWorkspace<T>;                                                         \
  template void cluster_queries(const ClusteringParams&, const AttentionCall&, const TensorView&, \
                                ClusteringWorkspace<T>&);
COTERIE_INSTANTIATE(float)
COTERIE_INSTANTIATE(double)
#undef COTERIE_INSTANTIATE

}  // namespace coterie::cpu
