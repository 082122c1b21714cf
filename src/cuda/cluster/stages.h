// SPDX-License-Identifier: MIT
// Stages of the clusterings (clustering.cu). Every stage launches on `stream`; members of buffers
// are null when the arena only counts or a method does not need them.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "core/arena.h"
#include "core/call.h"
#include "coterie/params.h"
#include "cuda/cluster/group.h"
#include "cuda/cluster/means.h"
#include "cuda/prim/team.cuh"
#include "cuda/prim/zero.cuh"

namespace coterie::cuda {

// Hash codes of queries (see ops/parts.h). hash.cu

struct HashPlan {
  ClusterShape shape;
  int bits, width;
  int splits, split_rows;          // of the sums over queries
  bool by_keys;                    // planes from keys, and thresholds from the mean query
  std::uint64_t* codes = nullptr;  // (B, H, N); padding is not written
  float* planes = nullptr;         // (bits, Dk), or (items, Hkv, bits, Dk) for hamming_keys
  float* thresholds = nullptr;     // (bits); hamming only
  float* query_sums = nullptr;     // (items, H, splits, Dk): partial sums; hamming_keys only

  HashPlan(Arena& arena, const ClusteringParams& params, const AttentionCall& call);
};

// Fills plan.codes using the planes of params.method, hamming or hamming_keys.
void hash_queries(const ClusteringParams& params, const AttentionCall& call, const HashPlan& plan,
                  const ZeroedWords& zeroed, cudaStream_t stream);

// k-means of 64-bit codes in Hamming distance, one persistent kernel for all iterations. hamming.cu

struct HammingPlan {
  ClusterShape shape;
  Teams teams;
  int rows, segments;  // of a block, at most
  int columns;         // centroids in shared memory at a time, a multiple of kColumnStep
  bool votes_shared;   // shared memory holds the changes of all clusters' votes
  std::uint64_t* centroids = nullptr;  // (problems, C)
  std::int32_t* votes = nullptr;       // (problems, C, 64): members with a bit set, see hamming.cu
  std::uint32_t* changes = nullptr;    // (blocks, segments, C, 32)
  std::int32_t* histograms = nullptr;  // (2, blocks, C)
  ZeroedWords zeroed;                  // by an earlier kernel

  HammingPlan(Arena& arena, const ClusterShape& shape, int iterations);
};

struct HammingRun {
  int iterations, bits;
  const std::uint64_t* codes;  // (B, H, N)
  ClusterLists out;
};

// Labels by k-means, then order and offsets. With at most C rows every row is its own cluster.
void hamming_kmeans(const HammingPlan& plan, const HammingRun& run, cudaStream_t stream);

// The metric of the keys' covariance (docs/mechanisms.md: clustering by keys) and centroids
// prepared for it.
//
// With S the covariance and r a fixed query, argmax_c x.S mu_c - mu_c.S mu_c / 2 is argmax_c of
// x.m_c + b_c with m_c = S (mu_c - r) and b_c = -(mu_c + r).m_c / 2: terms that all clusters share
// are left out, which keeps rounding small. m_c is rounded to m'_c in the type of the product; b_c
// compensates for the change at x = mu_c, -mu_c.(m'_c - m_c).

// m'_c, b_c and |m'_c|_1 of every cluster, the last one repeated up to `padded` of them.
struct CentroidTable {
  void* columns = nullptr;  // (problems, padded) columns as in prim/row_fragments.cuh
  float* bias = nullptr;    // (problems, padded)
  float* norms = nullptr;   // (problems, padded)
  int padded = 0;           // clusters, a multiple of 16

  CentroidTable() = default;
  CentroidTable(Arena& arena, const AttentionCall& call, std::int64_t clusters);
};

struct KeyMetricBuffers {
  float* covariance = nullptr;  // (items, Hkv, P, P), P = 64 or 128; zeros beyond Dk
  float* centroids = nullptr;   // (items, H, C, Dk)
  CentroidTable table;

  KeyMetricBuffers(Arena& arena, const AttentionCall& call, std::int64_t clusters);
};

// Covariance of min(keys, 8 Dk) evenly spaced keys of every item and key head.
void key_covariance(const AttentionCall& call, const KeyMetricBuffers& buffers,
                    const ZeroedWords& zeroed, cudaStream_t stream);

// Centroids and their table: distinct random queries where `initial`, else the means of the
// clusters in `sums` (whose first step has run); an empty cluster keeps its centroid.
void weigh_centroids(const AttentionCall& call, const ClusterSums& sums, bool initial,
                     const KeyMetricBuffers& buffers, cudaStream_t stream);

// All passes of the k-means in the keys' metric as one kernel, for 16-bit queries of
// up to 64 elements and up to 256 clusters on Hopper. key_kmeans_sm90a.cu

// fits: the kernel can run a call of this shape, with enough blocks to be worth it. serves: it can
// also run this very call, whose rows must be aligned.
bool key_kmeans_fits(const AttentionCall& call, const ClusterShape& shape);
bool key_kmeans_serves(const AttentionCall& call, const ClusterShape& shape);

struct KeyKMeansPlan {
  ClusterShape shape;
  Teams teams;
  float* sums = nullptr;            // (blocks, 256, 64)
  unsigned char* tables = nullptr;  // of centroids, for each team
  std::int32_t* counts = nullptr;   // (blocks, 256)
  std::int32_t* ranks = nullptr;    // (B, H, N): of a row among those of its block and cluster

  KeyKMeansPlan(Arena& arena, const AttentionCall& call, const ClusterShape& shape);
};

struct KeyKMeansRun {
  int passes;
  ClusterLists out;
  float* means;        // (items, H, C, Dk) of the final clusters, or null
  ZeroedWords zeroed;  // also set to zero, for later kernels
};

// `metric` keeps the covariance and the centroids.
void key_kmeans(const AttentionCall& call, const KeyKMeansPlan& plan,
                const KeyMetricBuffers& metric, const KeyKMeansRun& run, cudaStream_t stream);

// The cluster with the largest x . m_c + b_c for every row x: a product of rows and centroids of
// which only the arg-max is kept.

// 16-bit parts into which the product splits rows and centroids of type T.
template <class T>
constexpr int kNearestParts = sizeof(T) == 2 ? 1 : 2;

struct NearestPlan {
  ClusterShape shape;
  Teams teams;                         // with the counters of the first pass
  std::int32_t* histograms = nullptr;  // (2, blocks, C)
  ZeroedWords zeroed;                  // counters of all passes, by an earlier kernel
  bool own_clusters = true;            // with at most C rows every row is its own cluster
  int lost = 0;                        // the cluster of rows with a NaN or infinite score

  NearestPlan(Arena& arena, const ClusterShape& shape, std::int64_t passes);
};

// Labels of the rows of x (B, H, N, D), then order and offsets. `pass` is the number of this
// launch, below the passes of the plan. Ties go to the lower cluster.
void nearest_clusters(const AttentionCall& call, const NearestPlan& plan,
                      const CentroidTable& table, std::int64_t pass, const ClusterLists& out,
                      cudaStream_t stream);

}  // namespace coterie::cuda
