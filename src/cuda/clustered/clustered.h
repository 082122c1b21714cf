// SPDX-License-Identifier: MIT
// Clustered and improved clustered attention on the GPU: the decisions of a call and the stages of
// the two passes. pass.cu contains their order, plan.cu the decisions.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "core/arena.h"
#include "core/call.h"
#include "coterie/params.h"
#include "cuda/clustered/backward.h"
#include "cuda/prim/splits.cuh"
#include "cuda/prim/team.cuh"

namespace coterie::cuda {

// The saved tensors by name, in the order of ops/saved.cc. Plain clustered attention has no
// top_keys, mass and lse; the causal form of the improved one only has lse after top_keys. During a
// selection all after top_keys are absent.
struct ClusteredTensors {
  TensorView labels;        // int32 (B, H, N)
  TensorView order;         // int32 (B, H, N)
  TensorView offsets;       // int32 (items, H, C+1)
  TensorView top_keys;      // int32 (items, H, C, k), ascending, -1 beyond the last
  TensorView centroids;     // f32 (items, H, C, Dk)
  TensorView centroid_lse;  // f32 (items, H, C), natural logarithm, scale applied
  TensorView mass;          // f32 (items, H, C)
  TensorView out;           // f32 (items, H, C, Dv): centroid_out, or bottom
  TensorView lse;           // f32 (B, H, N)
  TensorView cancels;       // int32 (items, key heads): which heads add far keys (near.h)
};
inline std::int32_t* ints(const TensorView& view) { return static_cast<std::int32_t*>(view.data); }
inline float* floats(const TensorView& view) { return static_cast<float*>(view.data); }

// The first `count` of them; `top`: improved clustered attention. With near keys there are only
// centroids, lse, centroid_lse and cancels after the selection.
ClusteredTensors clustered_tensors(const TensorView* saved, std::size_t count, bool top,
                                   bool causal, bool near = false);

constexpr int kCentroidRows = 128;  // of a block of the kernels for all architectures

// The cluster means of a call as queries over all keys. "Row" of a cluster: (item * H + h) * C + c.
struct CentroidQueries {
  ItemSpans spans;
  ItemChunks chunks;
  const float* centroids;       // (items, H, C, width)
  const std::int32_t* offsets;  // (items, H, C + 1)
  int H, group, clusters, width;
  int block_rows, row_tiles;      // means of a thread block; blocks for all of them
  float sign, exponent, inverse;  // sign of the scale; |scale| log2(e), and 1 over it
  Dropout dropout;

  __device__ std::int64_t row(int item, int head, int cluster) const {
    return (static_cast<std::int64_t>(item) * H + head) * clusters + cluster;
  }
  __device__ bool empty(int item, int head, int cluster) const {
    const std::int64_t first = (static_cast<std::int64_t>(item) * H + head) * (clusters + 1);
    return offsets[first + cluster] >= offsets[first + cluster + 1];
  }
};

// The blocks of select_attend_sm90a.cu. Thresholds, counts and candidates have block_rows rows a
// team.
struct SelectTeams {
  Teams teams;    // of up to kSelectParts blocks, a power of two; no teams: select.cu runs
  int problems;   // (item, head, tile of means)
  float* maxima;  // (teams, block rows, kSelectParts, 32)
};
constexpr int kSelectParts = 8;  // of the keys, for one or several blocks of a team

struct ClusteredPlan {
  const AttentionCall& call;
  int clusters, topk;  // topk 0 for plain clustered attention; else at most the keys
  std::int64_t clustering_bytes;
  bool clusters_with_means;  // the clustering writes the means of the clusters
  // The means against all keys: their attention, and the selection of top keys.
  bool sm90a;              // by warpgroup products, in the backward pass as well; not with dropout
  CentroidQueries means;   // tiles of means and chunks of keys; the pointers are null
  SelectTeams selection;   // without memory
  Teams attention;         // that add up their chunks; size 0: centroid_combine_kernel does
  bool selection_attends;  // both in one kernel, where a pass needs both
  BackwardShape backward;
  int near;        // block length of near keys (near.h); 0: none
  bool subtracts;  // their far keys are subtracted, unless they cancel; not with dropout

  std::int64_t num_means() const { return call.num_items() * call.H * clusters; }
  std::int64_t counters() const { return selection.teams.count + attention.count; }
  CentroidQueries queries(const ClusteredTensors& tensors) const {
    CentroidQueries queries = means;
    queries.centroids = floats(tensors.centroids);
    queries.offsets = ints(tensors.offsets);
    return queries;
  }
};

// Queries the limits of the current device.
ClusteredPlan clustered_plan(const AttentionCall& call, const ClusteringParams& clustering,
                             std::int64_t topk, bool mass_grad, std::int64_t near = 0);

// Every stage launches on `stream` and takes its scratch memory from `arena`; if that only counts,
// it launches nothing, so the same function computes how much it needs. Tensors may then be absent.
struct ClusteredForward {
  const ClusteredPlan& plan;
  ClusteredTensors tensors;
  TensorView out;
  unsigned* counters = nullptr;  // of teams: plan.counters(), zeroed by the kernel of the means
  bool selection_attends = false;
  cudaStream_t stream = nullptr;
};

// top_keys from the centroids and the keys; with selection_attends also the results of
// attend_means. select.cu
void select_top_keys(const ClusteredForward& pass, Arena& arena);
// centroid_lse, out and (with top keys) mass from the centroids. centroid.cu
void attend_means(const ClusteredForward& pass, Arena& arena);
// Rows of `out` and lse: attention over the cluster's top keys (causal: those not after the query),
// topk.cu, or the cluster's row, broadcast.cu.
void attend_top_keys(const ClusteredForward& pass);
void broadcast_means(const ClusteredForward& pass);

}  // namespace coterie::cuda
