// SPDX-License-Identifier: MIT
// The backward pass of clustered and improved clustered attention: what its kernels share.
//
// With G_c the sum of the members' output gradients g_i, A_cj the weights of cluster c's mean, m_c
// the mass of its top keys T_c, and p_ij the weights of query i over T_c:
//   e_i   = sum_T p_ij (g_i . v_j)            dm_c = sum of e_i over the cluster (mass_grad)
//   dA_cj = G_c . v_j, or dm_c for j in T_c   delta_c = G_c . out_c + m_c dm_c
//   dS_cj = A_cj (dA_cj - delta_c)            ds_ij = m_c p_ij (g_i . v_j - e_i)
//   dmean_c = scale sum_j dS_cj k_j / n_c     dq_i = scale sum_T ds_ij k_j + dmean_c
//   dk_j = scale (sum_c dS_cj mean_c + sum_i ds_ij q_i)
//   dv_j = sum over c with j outside T_c of A_cj G_c + sum_i m_c p_ij g_i
// The centroid kernels treat all keys alike (dA = G . v everywhere); what that gets wrong for top
// keys is put right in the slots, which hold the sums over i (device/cluster_row.cuh).
// The causal form has the top keys only, of which a query sees those not after it, and mass 1:
// ds_ij, dq_i and the sums over i of dk_j and dv_j are what is left.
// No float atomics: every sum has one writer and a fixed order.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "core/arena.h"
#include "cuda/clustered.h"
#include "cuda/device/cluster_units.cuh"
#include "cuda/device/problem.cuh"
#include "cuda/device/splits.cuh"

namespace coterie::cuda {

// Slots of top keys whose gradients a block sums up.
constexpr int kSlotTile = 32;

struct BackwardShape {
  int items, B, H, group, N, S, clusters, topk;
  ClusterUnits units;     // the parts of clusters that blocks work on
  int pitch;              // of scratch rows: the head dim padded to 64 or 128
  bool sm90a;             // the kernels of *_sm90a.cu serve this call
  bool fused;             // centroid_gradients_sm90a serves this call
  ItemChunks chunks;      // of the keys, for the gradients of the means
  ItemChunks key_ranges;  // with sm90a: keys of a block, for the gradients of the keys
  bool mass_grad, causal;
  float scale;
  // fp16 operands are kept in range by powers of two: G and its products times gradient_scale,
  // centroid weights times weight_scale. 1 for other types.
  float gradient_scale, weight_scale;
  float weight_bits;  // log2(weight_scale)
  float unscale;      // 1 / (gradient_scale weight_scale)
  ItemSpans spans;

  ItemChunks key_tiles(int size) const { return row_tiles(spans.k, items, size); }
};

// The saved tensors. A "row" is a cluster of an (item, head): row = (item * H + head) * C +
// cluster.
struct BackwardLists {
  const std::int32_t *order, *labels, *offsets, *top_keys;
  const float *centroids, *centroid_lse, *mass, *out, *lse;
};

template <class T>
struct BackwardScratch {
  float* unit_dout;    // (units, pitch): partial sums of g
  float* unit_dmass;   // (units)
  T *mean, *dout;      // (rows, pitch): operands of the centroid kernels
  float* row_lse;      // (rows): base 2, so that A = exp2(scale s - lse); +inf for empty clusters
  float* row_delta;    // (rows), times gradient_scale
  float* mean_slices;  // (splits, rows, pitch)
  float* top_dmean;    // (rows, pitch): what top keys add to the sum of the slices
  T* slots;            // (units, topk, 2, pitch): dk and dv of the top keys of a unit
};

template <class T>
struct BackwardArgs {
  BackwardShape shape;
  BackwardLists lists;
  BackwardScratch<T> scratch;
  Tensor4<const T> q, k, v, g;
  Tensor4<T> dq, dk, dv;  // data is null when absent
};

// The stages, in order. Each is instantiated for float, Bf16 and F16. The first one
// waits for all that was launched before it, then lets the next one start: those behind it may read
// inputs and saved tensors before they wait (device/await.cuh).

// slots, dq as far as the top keys go, mean, dout, row_lse, row_delta and top_dmean.
// attend_member_bwd.cu
template <class T>
void member_gradients(const BackwardArgs<T>& args, cudaStream_t stream);
// dk and dv, and mean_slices, as if there were no top keys. attend_centroid_bwd.cu
template <class T>
void centroid_key_gradients(const BackwardArgs<T>& args, cudaStream_t stream);
template <class T>
void centroid_mean_gradients(const BackwardArgs<T>& args, cudaStream_t stream);
// The same by Hopper's warpgroup products, for 16-bit types and pitches of 64 and 128.
// attend_key_bwd_sm90a.cu, attend_mean_bwd_sm90a.cu
constexpr int kMeanRows = 128;  // centroids of a block of the latter
template <class T>
void centroid_key_gradients_sm90a(const BackwardArgs<T>& args, cudaStream_t stream);
template <class T>
void centroid_mean_gradients_sm90a(const BackwardArgs<T>& args, cudaStream_t stream);
// Both in one, for a pitch of 64 and at most kFusedCentroids of a key head.
// attend_centroid_bwd_sm90a.cu
constexpr int kFusedCentroids = 256;
template <class T>
void centroid_gradients_sm90a(const BackwardArgs<T>& args, cudaStream_t stream);
// What the mean adds to dq. attend_broadcast_bwd.cu
template <class T>
void broadcast_gradients(const BackwardArgs<T>& args, cudaStream_t stream);
// Adds the slots to dk and dv; at the same time as broadcast_gradients, if that was launched just
// before. fold.cu
template <class T>
void fold_slots(const BackwardArgs<T>& args, bool beside_broadcast, cudaStream_t stream);

}  // namespace coterie::cuda
