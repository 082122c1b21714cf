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
// The centroid kernels treat all keys alike (dA = G . v everywhere). The slots, which hold the sums
// over i, correct the error that this makes for top keys (member_backward.cu), except with near
// keys (TopKeyBits).
// The causal form has only the top keys, of which a query sees those not after it, and mass 1:
// ds_ij, dq_i and the sums over i of dk_j and dv_j remain.
// No float atomics: every sum has one writer and a fixed order.
//
// With near keys (near.h), one normaliser Z_i, lse_i = log Z_i, delta_i = g_i . out_i, lse_c and
// A_cj those of the keys outside T_c, and w_i = exp(lse_c - lse_i) their sum in units of Z_i:
//   p_ij = exp(s_ij - lse_i), r_ij = exp(z_cj - lse_i)   for near keys, r_ij = 0 if j is in T_c
//   ds_ij = p_ij (g_i . v_j - delta_i)   for near keys and keys of T_c
//   dr_ij = r_ij (g_i . v_j - delta_i)   what the mean's row must not contribute to near keys
//   G_c = sum w_i g_i, D_c = sum w_i delta_i, dS_cj = A_cj (G_c . v_j - D_c) outside T_c
//   dmean_c = scale (sum_j dS_cj k_j - sum_i sum_j dr_ij k_j) / n_c
//   dk_j = scale (sum_c dS_cj mean_c + sum_i ds_ij q_i - sum_i dr_ij mean_c)
//   dv_j = sum over c with j outside T_c of A_cj G_c + sum_i (p_ij - r_ij) g_i
// Heads that add have r_ij = 0, and far_backward.cu instead of the centroid kernels.
//
// With dropout, g_i . v_j and G_c . v_j are multiplied by the factors of the pairs (i, j) and (c,
// j), and so are the weights in dv; masses, lse and the weights in dS are those before dropout.
#pragma once

#include <cuda_runtime.h>
#include <cstdint>

#include "core/dropout.h"
#include "cuda/prim/splits.cuh"
#include "cuda/prim/tensor.cuh"

namespace coterie::cuda {

// Clusters are cut into units, one per thread block. The first unit of a cluster is found by the
// cluster's number, the others by the multiples of kUnitRows that lie inside the cluster's range of
// the sorted rows: there are at least as many of these.

constexpr int kUnitBits = 10, kUnitRows = 1 << kUnitBits;  // members of a unit, at most

// Members [first, first + count) of a cluster in the sorted order of its item; count 0: none.
struct ClusterUnit {
  int item, cluster, first, count;
  int size;   // members of the whole cluster
  int part;   // number of the unit in its cluster
  int place;  // of the unit in scratch memory
  ItemSpan span;
};

// Places: a first unit has the number of its cluster, (item * H + head) * clusters + cluster; the
// others follow, by head and multiple.
struct ClusterUnits {
  int items, heads, clusters, rows;  // rows: of a batch entry
  int more;                          // multiples of kUnitRows below the rows of all batch entries

  __host__ __device__ int blocks() const { return items * clusters + more; }  // of a head
  __host__ __device__ int first_units() const { return items * heads * clusters; }
  __host__ __device__ int places() const { return first_units() + heads * more; }

  __device__ int row(int item, int head, int cluster) const {
    return (item * heads + head) * clusters + cluster;
  }
  // Multiples up to row `at` of an item's sorted rows.
  __device__ int multiples(const ItemSpan& span, int at) const {
    return static_cast<int>((static_cast<std::int64_t>(span.batch) * rows + span.begin + at) >>
                            kUnitBits);
  }
  // Place of unit 1 of a cluster that starts at row `first`, which unit 2 follows.
  __device__ int second_place(int head, const ItemSpan& span, int first) const {
    return first_units() + head * more + multiples(span, first);
  }

  // Unit of block `number` of a head. labels, order: (B, H, rows); offsets (items, H, clusters +
  // 1).
  __device__ ClusterUnit find(const SequenceSpans& spans, const std::int32_t* offsets,
                              const std::int32_t* labels, const std::int32_t* order, int head,
                              int number) const {
    const int extra = number - items * clusters;
    ClusterUnit unit{};
    int multiple = 0;
    if (extra < 0) {
      unit.item = items > 1 ? number / clusters : 0;
      unit.cluster = number - unit.item * clusters;
      unit.span = spans.span(unit.item);
    } else {
      multiple = extra + 1;
      const std::int64_t at = static_cast<std::int64_t>(multiple) << kUnitBits;
      const int batch = static_cast<int>(at / rows), r = static_cast<int>(at % rows);
      unit.item = spans.item_of(batch, r, items);
      unit.part = 1;  // not a unit if no item has this row
      if (unit.item < 0) return unit;
      unit.span = spans.span(unit.item);
      const std::int64_t token = (static_cast<std::int64_t>(batch) * heads + head) * rows;
      unit.cluster = labels[token + unit.span.begin + order[token + r]];
    }
    const int own = row(unit.item, head, unit.cluster);
    const std::int32_t* offset =
        offsets + (static_cast<std::int64_t>(unit.item) * heads + head) * (clusters + 1) +
        unit.cluster;
    unit.first = offset[0];
    unit.size = offset[1] - unit.first;
    unit.count = min(unit.size, kUnitRows);
    unit.place = own;
    if (extra < 0) return unit;
    unit.part = multiple - multiples(unit.span, unit.first);
    unit.place = second_place(head, unit.span, unit.first) + unit.part - 1;
    const int skipped = unit.part << kUnitBits;
    unit.first += skipped;
    unit.count = unit.part > 0 ? min(max(unit.size - skipped, 0), kUnitRows) : 0;
    return unit;
  }
};

// Slots of top keys whose gradients a block sums up.
constexpr int kSlotTile = 32;

constexpr int kFusedCentroids = 256;  // of a key head, for centroid_gradient_sm90a_kernel
constexpr int kMeanRows = 128;        // of a block of mean_gradient_sm90a_kernel

struct BackwardShape {
  int items, B, H, group, N, S, clusters, topk;
  ClusterUnits units;     // the parts of clusters that blocks work on
  int pitch;              // of scratch rows: the head dim padded to 64 or 128
  bool fused;             // centroid_gradient_sm90a_kernel runs this call
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
  int near;        // block length of near keys (near.h); 0: none
  bool subtracts;  // far keys of heads whose sums do not cancel
  int top_words;   // of a key in TopKeyBits; 0: the centroid kernels treat all keys alike
  Dropout dropout;

  // Whether clusters have rows of their own: otherwise member_gradients computes the top keys only.
  __host__ __device__ bool tail() const { return !causal && (near == 0 || subtracts); }
  ItemChunks key_tiles(int size) const { return row_tiles(spans.k, items, size); }
};

// The saved tensors. A "row" is a cluster of an (item, head): row = (item * H + head) * C +
// cluster.
struct BackwardLists {
  const std::int32_t *order, *labels, *offsets, *top_keys;
  const float *centroids, *centroid_lse, *mass, *out, *lse;
  const std::int32_t* cancels;  // (items, key heads): heads that add far keys; with near keys only
};

struct NearTopKeys;  // near.cuh

// Which keys are top keys of which centroids: for each key a bit for every centroid of all query
// heads of its key head. With near keys the centroid kernels leave these pairs out. Elsewhere they
// add them, and the members' kernel corrects that, but the weight of top keys may be many times
// that of all others together.
struct TopKeyBits {
  static constexpr int kStep = 4;  // words of a key are a multiple of this: 16 bytes
  std::uint32_t* words;            // (B, key heads, S, count); null: none
  int key_heads, S, count;

  static int words_of(int centroids) { return (centroids + 127) / 128 * kStep; }
  // The words of the first key of a sequence.
  __device__ std::uint32_t* rows(const ItemSpan& span, int key_head) const {
    if (!words) return nullptr;
    return words +
           ((static_cast<std::int64_t>(span.batch) * key_heads + key_head) * S + span.begin) *
               count;
  }
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
  // With near keys:
  TopKeyBits top_bits;
  NearTopKeys* near_top;  // (B, H, N), with top keys
  float* delta;           // (B, H, N): output gradient . output
  T* near_dmean;          // (B, H, N, pitch): what the near keys of a query add to dmean
  float* unit_dmean;      // (units, pitch): its partial sums
};

template <class T>
struct BackwardArgs {
  BackwardShape shape;
  BackwardLists lists;
  BackwardScratch<T> scratch;
  Tensor4<const T> q, k, v, g;
  Tensor4<T> dq, dk, dv;  // data is null when absent
  Tensor4<const T> out;   // with near keys only

  // Whether far keys of a head are added and not subtracted.
  __device__ bool adds(int item, int head) const {
    return shape.near > 0 &&
           (!shape.subtracts || lists.cancels[item * (shape.H / shape.group) + head / shape.group]);
  }
};

// The centroids of all query heads of a key head, one after the other, against a chunk of its keys.
struct StackedCentroids {
  ItemChunk keys;
  int slot, key_head, key_heads, total;  // centroids
  std::int64_t first_row;                // of the centroids

  // `number`: slot of `chunks` * key heads + key head.
  __device__ StackedCentroids(const BackwardShape& shape, const ItemChunks& chunks, int number) {
    key_heads = shape.H / shape.group;
    slot = number / key_heads;
    key_head = number % key_heads;
    keys = chunks.find(shape.spans.k, slot);
    total = shape.group * shape.clusters;
    first_row =
        (static_cast<std::int64_t>(keys.item) * shape.H + key_head * shape.group) * shape.clusters;
  }
  // The rows of their means (tensor 0) or dout.
  template <class T>
  __device__ Rows<const T> operand(const BackwardArgs<T>& args, int tensor) const {
    const int pitch = args.shape.pitch;
    const T* rows = tensor == 0 ? args.scratch.mean : args.scratch.dout;
    return {rows + first_row * pitch, pitch, pitch, true};
  }
  // Where the sums of dmean over the chunk go.
  template <class T>
  __device__ float* mean_slice(const BackwardArgs<T>& args) const {
    return args.scratch.mean_slices +
           (static_cast<std::int64_t>(slot) * key_heads + key_head) * total * args.shape.pitch;
  }
};

// The stages, in order; with near keys those of near.h come first and before the last two. Each is
// instantiated for float, Bf16 and F16. The first one waits for all earlier launches, then lets the
// next one start: the later ones may read inputs and saved tensors before they wait
// (prim/dependent.cuh).

// slots, the top keys' part of dq, mean, dout, row_lse, row_delta and top_dmean. member_backward.cu
template <class T>
void member_gradients(const BackwardArgs<T>& args, cudaStream_t stream);
// dk and dv, and mean_slices, as if there were no top keys, or without them (TopKeyBits).
// centroid_backward.cu
template <class T>
void centroid_gradients(const BackwardArgs<T>& args, cudaStream_t stream);
// The same by Hopper's warpgroup products, for 16-bit types. centroid_backward_sm90a.cu
template <class T>
void centroid_gradients_sm90a(const BackwardArgs<T>& args, cudaStream_t stream);
// What the mean adds to dq. broadcast.cu
template <class T>
void broadcast_gradients(const BackwardArgs<T>& args, cudaStream_t stream);
// Adds the slots to dk and dv; at the same time as broadcast_gradients, if that was launched just
// before. topk_backward_sum.cu
template <class T>
void sum_top_key_gradients(const BackwardArgs<T>& args, bool beside_broadcast, cudaStream_t stream);

}  // namespace coterie::cuda
