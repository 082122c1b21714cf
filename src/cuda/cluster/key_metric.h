// SPDX-License-Identifier: MIT
// The metric of the keys' covariance (docs/mechanisms.md: clustering by keys) and centroids
// prepared for it.
//
// With S the covariance and r a fixed query, argmax_c x.S mu_c - mu_c.S mu_c / 2 is argmax_c of
// x.m_c + b_c with m_c = S (mu_c - r) and b_c = -(mu_c + r).m_c / 2: what all clusters share is
// left out, which keeps rounding small. m_c is rounded to m'_c in the type of the product; b_c
// takes back the change at x = mu_c, -mu_c.(m'_c - m_c).
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "core/arena.h"
#include "core/call.h"
#include "cuda/cluster/sums.h"
#include "cuda/prim/zero.cuh"

namespace coterie::cuda {

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

}  // namespace coterie::cuda
