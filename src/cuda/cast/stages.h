// SPDX-License-Identifier: MIT
// CAST on the GPU, as cpu/mechanisms/cast.h describes it: the mechanism's shape and its stages.
// Slots are places in the members of a head: (items, H, C, w).
//
// What a token takes from the clusters is computed for all of them as if it were in none; slots
// then add the difference that membership makes.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "core/arena.h"
#include "core/call.h"
#include "coterie/inputs.h"
#include "coterie/params.h"
#include "cuda/lists/slots.h"
#include "cuda/prim/splits.cuh"
#include "cuda/prim/tensor.cuh"

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

// Fills members. Scratch memory comes from the arena, here and below; with one that only counts
// nothing is launched. select.cu
void cast_select(const CastParams& params, const AttentionCall& call, std::int32_t* members,
                 Arena& arena, cudaStream_t stream);

// Rows of floats as rows of the inputs' type; the memory itself where that is float. mix.cu
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
// the slots, which comes ahead of it and waits for what is read here. summary.cu
void cast_summaries(const CastShape& shape, const AttentionCall& call, const CastSaved& saved,
                    void* rounded, cudaStream_t stream);
// Outputs from summaries and inner outputs. mix.cu
void cast_mix(const CastShape& shape, const AttentionCall& call, const CastForward& pass,
              cudaStream_t stream);

// Members of a cluster that the kernels of cast_inner_*_bwd_sm90a.cu have room for.
constexpr int kCastResident = 256;

struct CastBackward {
  CastSaved saved;
  TokenSlots slots;
  const void *surrogates, *summaries;  // of the inputs' type
  TensorView grad_out;
  AttentionGradients gradients;
  bool hopper;    // the mix takes the kernels of cast_*_bwd_sm90a.cu
  bool resident;  // the attention inside clusters takes those of cast_inner_*_bwd_sm90a.cu
  // By slot.
  float* dots;             // gradient . inner output
  float* excess;           // gradient of the mix's logit that comes from being a member
  float* weights;          // of the cluster in the mix (alpha)
  float* weighted;         // their product with dots
  float* query_factors;    // gradients of query and key are so many surrogates, ...
  float* key_factors;      // ... through the mix and through the summary
  float* summary_weights;  // of the token in the summary (beta)
  float* dgate_slots;
  float* shifts;  // if resident: log-sum-exp inside the cluster - log of the weight, base 2
  // Of the inputs' type and complete if resident, else floats of the inner attention alone. Keys
  // and values: (items, key_slot_heads, C, w, D).
  void *dq_slots, *dk_slots, *dv_slots;
  int key_slot_heads;
  float4* gates;  // (B, N): psi and sigmoid of the gate, and of its opposite
  // (B, H, N)
  float4* facts;             // see cast_facts
  float* delta;              // gradient . output
  float* dgate_rows;         // q . (gradient of q by the mix of no members) / factor of the logits
  ItemChunks parts, chunks;  // of the tokens: for their gradients, for those of clusters
  float* partials;           // (chunks.slots, H, C, 2, D): of surrogates and summaries
  int member_tiles;          // parts of a cluster's members
  float* member_parts;       // (items, H, C, member_tiles, 2, D): what members add to the partials
  float* key_parts;          // (items, H, C, member_tiles, D): of surrogates, through the summaries
  float* dsummary;           // (items, H, C, D): by the mix
  float* summary_dots;       // (items, H, C): dsummary . summary
};

// How tokens are cut: sets parts and chunks. cluster_backward.cu
void cast_cut_tokens(const CastShape& shape, const AttentionCall& call, CastBackward& pass);

// Takes and fills gates, surrogates and summaries. row_backward.cu
void cast_prepare(const CastShape& shape, const AttentionCall& call, CastBackward& pass,
                  Arena& arena, cudaStream_t stream);
// From dots to weights, weighted, excess, query_factors, member_parts and the excess's part of
// dgate_slots. member_backward.cu
void cast_members_backward(const CastShape& shape, const AttentionCall& call,
                           const CastBackward& pass, cudaStream_t stream);
// The same with the attention inside clusters: dots, shifts, excess, member_parts, the excess's
// part of dgate_slots and dq_slots. Runs beside the search of the slots, which comes ahead of it;
// both are done when the next kernel starts. inner_query_backward_sm90a.cu
void cast_inner_queries(const CastShape& shape, const AttentionCall& call, const CastBackward& pass,
                        cudaStream_t stream);
// Facts of a row, its logits in base 2: factor of q . surrogate, log-sum-exp, sum of the excess.
// row_backward.cu
void cast_facts(const CastShape& shape, const CastBackward& pass, cudaStream_t stream);
// dq and dgate_rows by the mix, all tokens as if they were in no cluster; delta on the way, in the
// place of the facts' last two on Hopper: with the factor again, and times the factor.
// mix_backward.cu
void cast_tokens_backward(const CastShape& shape, const AttentionCall& call,
                          const CastBackward& pass, cudaStream_t stream);
// Gradients of summaries and surrogates by the mix likewise, in parts. cluster_backward.cu
void cast_clusters_backward(const CastShape& shape, const AttentionCall& call,
                            const CastBackward& pass, cudaStream_t stream);
// dsummary and summary_dots from partials and member_parts. row_backward.cu
void cast_totals(const CastShape& shape, const CastBackward& pass, cudaStream_t stream);
// Through the summaries to the members: key_factors, summary_weights, key_parts and their part of
// dgate_slots. member_backward.cu
void cast_summaries_backward(const CastShape& shape, const AttentionCall& call,
                             const CastBackward& pass, cudaStream_t stream);
// The same with the attention inside clusters: key_parts, the rest of dgate_slots, dk_slots and
// dv_slots. inner_key_backward_sm90a.cu
void cast_inner_keys(const CastShape& shape, const AttentionCall& call, const CastBackward& pass,
                     cudaStream_t stream);
// What slots add to dq, and make of dk and dv. token_sum.cu
void cast_fold(const CastShape& shape, const AttentionCall& call, const CastBackward& pass,
               cudaStream_t stream);
// dgate from rows and slots, dcentroids from items; whether there was something to do. It waits for
// what is ahead before it lets the next kernel start. row_backward.cu
bool cast_fold_heads(const CastShape& shape, const AttentionCall& call, const CastBackward& pass,
                     cudaStream_t stream);

}  // namespace coterie::cuda
