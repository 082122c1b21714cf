// SPDX-License-Identifier: MIT
// CAST on the GPU, as cpu/cast.h describes it: the mechanism's shape and its stages. Slots are
// places in the members of a head: (items, H, C, w).
//
// What a token takes from the clusters is computed for all of them as if it were in none; slots
// then add the difference that membership makes.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <vector>

#include "core/arena.h"
#include "core/call.h"
#include "coterie/attention.h"
#include "cuda/device/problem.cuh"
#include "cuda/device/splits.cuh"
#include "cuda/slots.h"

namespace coterie::cuda {

struct CastShape {
  SequenceSpans tokens;
  int items, B, H, group, N, D;  // `group` query heads share a key head
  int clusters, width, list_heads;
  float scale;
  bool laplace, gate_scale;
  const float* gate;            // (B, N)
  const float* surrogates;      // (H, C, D)
  const std::int32_t* members;  // (items, list_heads, C, w)

  __host__ __device__ int problems() const { return items * list_heads; }
  std::int64_t slots() const { return static_cast<std::int64_t>(items) * H * clusters * width; }
  __device__ int list_head(int head) const { return list_heads == 1 ? 0 : head; }
  __device__ const std::int32_t* list(int item, int head, int cluster) const {
    const std::int64_t problem = static_cast<std::int64_t>(item) * list_heads + list_head(head);
    return members + (problem * clusters + cluster) * width;
  }
  // Number of (item, head, cluster).
  __device__ std::int64_t cluster(int item, int head, int number) const {
    return (static_cast<std::int64_t>(item) * H + head) * clusters + number;
  }
  // First row of an item in (B, H, N).
  __device__ std::int64_t row(const ItemSpan& span, int head) const {
    return (static_cast<std::int64_t>(span.batch) * H + head) * N + span.begin;
  }
  __device__ const float* gates(const ItemSpan& span) const {
    return gate + static_cast<std::int64_t>(span.batch) * N + span.begin;
  }
};

CastShape cast_shape(const CastParams& params, const AttentionCall& call,
                     const std::int32_t* members);

// What attention_saved lists; the log-sum-exps are null with laplace.
struct CastSaved {
  std::int32_t* members = nullptr;
  float *member_lse = nullptr, *summary = nullptr, *summary_lse = nullptr, *combine_lse = nullptr;
};
CastSaved cast_saved(const CastParams& params, const std::vector<TensorView>& saved);

// Fills members. Scratch memory comes from the arena, here and below; with one that only counts
// nothing is launched. cast_select.cu
void cast_select(const CastParams& params, const AttentionCall& call, std::int32_t* members,
                 Arena& arena, cudaStream_t stream);

// Rows of floats as rows of the inputs' type; the memory itself where that is float. cast_fwd.cu
const void* cast_rounded(DType dtype, const float* from, std::int64_t count, Arena& arena,
                         cudaStream_t stream);

struct CastForward {
  CastSaved saved;
  TokenSlots slots;
  const void *surrogates, *summaries;  // of the inputs' type
  const void* inner;                   // (slots, D), likewise
  TensorView out;
};

// The summary of every cluster. `rounded` takes surrogates (H, C, D) and summaries (items, H, C, D)
// in the inputs' type, one behind the other; null where that is float. Runs beside the search of
// the slots, where that comes ahead of it, else `first`. cast_fwd.cu
void cast_summaries(const CastShape& shape, const AttentionCall& call, const CastSaved& saved,
                    void* rounded, bool first, cudaStream_t stream);
// Outputs from summaries and inner outputs. cast_fwd.cu
void cast_mix(const CastShape& shape, const AttentionCall& call, const CastForward& pass,
              cudaStream_t stream);

struct CastBackward {
  CastSaved saved;
  TokenSlots slots;
  const void *surrogates, *summaries;  // of the inputs' type
  TensorView grad_out;
  AttentionGradients gradients;
  // By slot.
  float* dots;             // gradient . inner output
  float* weights;          // of the cluster in the mix (alpha)
  float* weighted;         // their product
  float* excess;           // gradient of the mix's logit that comes from being a member
  float* summary_weights;  // of the token in the summary (beta)
  float* key_factors;      // gradient of the key is that many surrogates, through the summary
  float* dgate_slots;
  float *dq_slots, *dk_slots, *dv_slots;  // keys and values: (items, key_slot_heads, C, w, D)
  int key_slot_heads;
  // (B, H, N)
  float4* facts;      // see cast_members_backward
  float* delta;       // gradient . output
  float* dgate_rows;  // q . (gradient of q by the mix of no members) / factor of the logits
  float *dsummary, *dsurrogate;  // (items, H, C, D)
  bool hopper;                   // the mix takes the kernels of cast_*_bwd_sm90a.cu
  KeyChunks parts, chunks;       // of the tokens: for their gradients, for those of clusters
  float* partials;               // (chunks.slots, H, C, 2, D): of surrogates and summaries
};

// How tokens are cut: sets parts and chunks. cast_cluster_bwd.cu
void cast_cut_tokens(const CastShape& shape, const AttentionCall& call, CastBackward& pass);

// From dots to weights, weighted, excess and the excess's part of dgate_slots; what members change
// in dsummary and dsurrogate. Facts of a row, its logits in base 2: factor of q . surrogate,
// log-sum-exp, sum of the excess. cast_member_bwd.cu
void cast_members_backward(const CastShape& shape, const AttentionCall& call,
                           const CastBackward& pass, cudaStream_t stream);
// dq and dgate_rows by the mix, all tokens as if they were in no cluster; delta on the way, in the
// place of the facts' last two on Hopper: with the factor again, and times the factor.
// cast_mix_bwd.cu
void cast_tokens_backward(const CastShape& shape, const AttentionCall& call,
                          const CastBackward& pass, cudaStream_t stream);
// Gradients of summaries and surrogates by the mix likewise, in parts. cast_cluster_bwd.cu
void cast_clusters_backward(const CastShape& shape, const AttentionCall& call,
                            const CastBackward& pass, cudaStream_t stream);
// dsummary and dsurrogate from their parts, and through the summaries to the members.
// cast_member_bwd.cu
void cast_summaries_backward(const CastShape& shape, const AttentionCall& call,
                             const CastBackward& pass, cudaStream_t stream);
// What slots, rows and items have, added to dq and for dk, dv, dgate and dcentroids. cast_fold.cu
void cast_fold(const CastShape& shape, const AttentionCall& call, const CastBackward& pass,
               cudaStream_t stream);

}  // namespace coterie::cuda
