// SPDX-License-Identifier: MIT
// CAST on the GPU, as described in cpu/mechanisms/cast.h: the mechanism's shape, its plan and its
// stages. Slots are places in the members of a head: (items, H, C, w).
//
// The contribution of the clusters to a token (the mix) is computed for all tokens as if they were
// in no cluster; slots then add the difference that membership makes. Mix and attention inside
// clusters have kernels for Hopper (*_sm90a.cu), for softmax, 16-bit types and aligned rows;
// otherwise both are attention over lists (lists.cu).
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <vector>

#include "core/arena.h"
#include "core/call.h"
#include "coterie/inputs.h"
#include "coterie/params.h"
#include "coterie/result.h"
#include "cuda/lists/lists.h"
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
  Dropout dropout;

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

// As listed by attention_saved; the log-sum-exps are null with laplace.
struct CastSaved {
  std::int32_t* members = nullptr;
  float *member_lse = nullptr, *summary = nullptr, *summary_lse = nullptr, *combine_lse = nullptr;
};

// Maximum members of a cluster for the kernels of inner_backward_sm90a.cu.
constexpr int kCastResident = 256;

// The choices of a forward or backward pass. forward.cu
struct CastPlan {
  ItemChunks parts, chunks;  // of the tokens, with warpgroups: for gradients of tokens, of clusters
  bool warpgroups = false;   // the mix uses the kernels of mix*_sm90a.cu
  bool resident = false;     // backward: attention inside clusters uses inner_backward_sm90a.cu
  int mix_runs, mix_chunk;   // the mix as lists: runs of mix_chunk tokens of an item
  int key_slot_heads;        // for the gradients of keys and values by slot
  int member_tiles;          // parts of a cluster's members

  CastPlan(const CastShape& shape, const AttentionCall& call);
  void choose_forward(const CastShape& shape, const AttentionCall& call, const TensorView& out);
  void choose_backward(const CastShape& shape, const AttentionCall& call,
                       const TensorView& grad_out, const AttentionGradients& gradients);
};

// With an arena that only counts, the stages launch nothing.

// Fills members. select.cu
void cast_select(const CastParams& params, const AttentionCall& call, std::int32_t* members,
                 Arena& arena, cudaStream_t stream);
// The slots of every token. lists.cu
TokenSlots cast_token_slots(const CastShape& shape, const AttentionCall& call, Arena& arena,
                            cudaStream_t stream);

// A part of CAST as attention over lists.
struct CastLists {
  AttentionCall call;
  ListCall plan;
};
// The attention inside clusters. If query heads of one key head have separate lists, keys and
// values are copied for each. lists.cu
CastLists cast_inner_lists(const CastShape& shape, const AttentionCall& call, Arena& arena,
                           cudaStream_t stream);
// The mix: runs of tokens over all clusters, gates as factors of the queries. Surrogates and
// summaries are copied in the inputs' type. lists.cu
CastLists cast_mix_lists(const CastShape& shape, const CastPlan& plan, const AttentionCall& call,
                         const CastSaved& saved, Arena& arena, cudaStream_t stream);

struct CastForward {
  CastSaved saved;
  TokenSlots slots;
  const void *surrogates, *summaries;  // of the inputs' type, with warpgroups
  void* inner;                         // (slots, D), likewise
  TensorView out;
};

// The summary of every cluster. `rounded` receives surrogates (H, C, D) and summaries (items, H, C,
// D) in the inputs' type, one after the other; or null. Overlaps the preceding search of the slots,
// which waits for what is read here. summary.cu
void cast_summaries(const CastShape& shape, const AttentionCall& call, const CastSaved& saved,
                    void* rounded, cudaStream_t stream);
// Outputs from summaries and inner outputs; cast_mix overwrites these. mix_sm90a.cu, lists.cu
void cast_mix_sm90a(const CastShape& shape, const AttentionCall& call, const CastForward& pass,
                    cudaStream_t stream);
void cast_mix(const CastShape& shape, const AttentionCall& call, const CastLists& mix,
              const CastForward& pass, cudaStream_t stream);
// Whether a head's clusters fit into the shared memory of cast_mix_sm90a. mix_sm90a.cu
bool cast_mix_fits_sm90a(const CastShape& shape);

struct CastBackward {
  CastPlan plan;
  CastSaved saved;
  TokenSlots slots;
  const void *surrogates, *summaries;  // of the inputs' type
  TensorView grad_out;
  AttentionGradients gradients;
  // By slot.
  float* dots;             // gradient . inner output
  float* excess;           // gradient of the mix's logit due to membership
  float* weights;          // of the cluster in the mix (alpha)
  float* weighted;         // product of weights and dots
  float* query_factors;    // multiples of the surrogate in the gradients of query and key, ...
  float* key_factors;      // ... through the mix and through the summary
  float* summary_weights;  // of the token in the summary (beta)
  float* dgate_slots;
  float* shifts;  // if resident: log-sum-exp inside the cluster - log of the weight, base 2
  // In the inputs' type. Keys and values: (items, key_slot_heads, C, w, D).
  void *dq_slots, *dk_slots, *dv_slots;
  float4* gates;  // (B, N): psi and sigmoid of the gate, and of its opposite
  // (B, H, N)
  float4* facts;        // see cast_facts
  float* delta;         // gradient . output
  float* dgate_rows;    // q . (gradient of q by the mix of no members) / factor of the logits
  float* mix_dq;        // (B, H, N, D): gradient of q / psi by lists; shares memory with the slots
  float* partials;      // of surrogates and summaries, see MixParts
  float* member_parts;  // (items, H, C, member_tiles, 2, D): parts of the members
  float* key_parts;     // (items, H, C, member_tiles, D): of surrogates, through the summaries
  float* dsummary;      // (items, H, C, D): by the mix
  float* summary_dots;  // (items, H, C): dsummary . summary
};

// backward.cu
void cast_backward(const CastParams& params, const AttentionCall& call, const CastSaved& saved,
                   const TensorView& grad_out, const AttentionGradients& gradients, Arena& arena,
                   cudaStream_t stream);

// Allocates and fills gates, surrogates and summaries. row_backward.cu
void cast_prepare(const CastShape& shape, const AttentionCall& call, CastBackward& pass,
                  Arena& arena, cudaStream_t stream);
// Computes weights, weighted, excess, query_factors, member_parts and the excess's part of
// dgate_slots from dots. member_backward.cu
void cast_members_backward(const CastShape& shape, const AttentionCall& call,
                           const CastBackward& pass, cudaStream_t stream);
// The same with the attention inside clusters: dots, shifts, excess, member_parts, the excess's
// part of dgate_slots and dq_slots. Overlaps the preceding search of the slots; both are done when
// the next kernel starts. inner_backward_sm90a.cu
void cast_inner_queries(const CastShape& shape, const AttentionCall& call, const CastBackward& pass,
                        cudaStream_t stream);
// Facts of a row, its logits in base 2: factor of q . surrogate, log-sum-exp, sum of the excess,
// which is added to delta if the mix uses lists. row_backward.cu
void cast_facts(const CastShape& shape, const CastBackward& pass, cudaStream_t stream);
// dq and dgate_rows by the mix, all tokens as if they were in no cluster. Also computes delta and
// replaces the last two facts by the factor and delta times the factor. Then gradients of summaries
// and surrogates likewise, in parts. mix_backward_sm90a.cu
void cast_mix_backward_sm90a(const CastShape& shape, const AttentionCall& call,
                             const CastBackward& pass, cudaStream_t stream);
// dq and dgate_rows from mix_dq. lists.cu
void cast_mix_rows(const CastShape& shape, const AttentionCall& call, const CastBackward& pass,
                   cudaStream_t stream);
// dsummary and summary_dots from partials and member_parts. row_backward.cu
void cast_totals(const CastShape& shape, const CastBackward& pass, cudaStream_t stream);
// Through the summaries to the members: key_factors, summary_weights, key_parts and their part of
// dgate_slots. member_backward.cu
void cast_summaries_backward(const CastShape& shape, const AttentionCall& call,
                             const CastBackward& pass, cudaStream_t stream);
// The same with the attention inside clusters: key_parts, the rest of dgate_slots, dk_slots and
// dv_slots. inner_backward_sm90a.cu
void cast_inner_keys(const CastShape& shape, const AttentionCall& call, const CastBackward& pass,
                     cudaStream_t stream);
// Adds the contributions of the mix and the summaries to the slots' gradients. lists.cu
void cast_complete_slots(const CastShape& shape, const AttentionCall& call,
                         const CastBackward& pass, cudaStream_t stream);
// dgate from rows and slots, dcentroids from items; returns whether there was anything to do. Waits
// for preceding kernels before it lets the next one start. row_backward.cu
bool cast_fold_heads(const CastShape& shape, const AttentionCall& call, const CastBackward& pass,
                     cudaStream_t stream);
// (batches, H, rows, D) in the inputs' type. If `from` has more heads, neighbours are added up; if
// it has fewer, each is repeated. lists.cu
TensorView cast_take_rows(const AttentionCall& call, Arena& arena, std::int64_t batches,
                          std::int64_t rows);
void cast_map_heads(const AttentionCall& call, const TensorView& from, const TensorView& to,
                    cudaStream_t stream);

}  // namespace coterie::cuda
