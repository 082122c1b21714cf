// SPDX-License-Identifier: MIT
// Stages of routing attention on the GPU (docs/mechanisms.md: routing). Every stage launches on
// `stream`; stages with an arena launch nothing when it only counts.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <vector>

#include "core/arena.h"
#include "core/call.h"
#include "coterie/params.h"
#include "cuda/cluster/group.h"
#include "cuda/lists/lists.h"
#include "cuda/lists/slots.h"
#include "cuda/prim/splits.cuh"
#include "cuda/prim/team.cuh"
#include "cuda/prim/zero.cuh"

namespace coterie::cuda {

// Queries or keys: rows (B, heads, rows, Dk), of which `shape.group` heads share centroids, and the
// outputs of a selection for them.
struct RoutingSide {
  TensorView rows;
  ClusterShape shape{};
  RowStatistics* stats = nullptr;   // (B, heads, rows); null: not requested
  std::int32_t* labels = nullptr;   // strict: (B, heads, rows), the nearest cluster, -1 in padding
  SortedRuns runs, copy;            // strict, optional; copy receives the same
  std::int32_t* members = nullptr;  // top, balanced: (items, heads, C, width), ascending, then -1
  int width = 0;

  RoutingSide() = default;
  RoutingSide(const AttentionCall& call, const TensorView& rows, const Sequences& sequences,
              std::int64_t clusters);
  std::int64_t count() const { return rows.size(0) * rows.size(1) * rows.size(2); }
};

// Mean and 1 / sqrt(variance + 1e-6) of every row, zeros in padding; the bits of a row's result do
// not depend on its position. `keys` is null if keys are the queries. rows.cu
void row_statistics(const AttentionCall& call, const RoutingSide& queries, const RoutingSide* keys,
                    cudaStream_t stream);

// Centroids (Hkv, C, Dk) minus their means, in rows of `pitch`: for rows y of zero mean y .
// centroid = x . centred / sigma.
struct CentredCentroids {
  float* rows = nullptr;  // (Hkv, C, pitch), zeros beyond Dk
  int pitch = 0, clusters = 0;
  float* columns = nullptr;  // for balanced: (Hkv, pitch, C)

  CentredCentroids() = default;
  CentredCentroids(Arena& arena, const AttentionCall& call, std::int64_t clusters,
                   Membership membership);
};
// The kernel also zeroes words for later kernels.
void centre_centroids(const AttentionCall& call, const CentredCentroids& centroids,
                      const ZeroedWords& zeroed, cudaStream_t stream);

// The nearest `per_row` clusters of every row, by sums alone: score descending, then lower cluster;
// NaN ranks last. Scores are sums over Dk in ascending order, in fp32: a row's result depends only
// on the row and the centroids. Writes side.labels and, if per_row > 1, clusters (B, heads, rows,
// per_row). nearest.cu
void nearest_exact(const AttentionCall& call, const RoutingSide& side,
                   const CentredCentroids& centroids, int per_row, std::int32_t* clusters,
                   Arena& arena, cudaStream_t stream);

// The same labels for bf16 rows with tensor cores, which leave few rows and centroids to sum; also
// the statistics of these rows and their runs, if requested. For Hopper, and as many clusters as
// fit in shared memory. Centres the centroids itself; the counters need not be zero. `keys` may be
// null, and so may ends (see RunEnds), which otherwise need scan_finds_ends. scan_sm90a.cu
bool scan_fits(const AttentionCall& call, std::int64_t clusters);
bool scan_finds_ends(const AttentionCall& call);
void nearest_scan(const AttentionCall& call, const CentredCentroids& centroids,
                  const RoutingSide& queries, const RoutingSide* keys, std::int32_t* ends,
                  unsigned* arrivals, Arena& arena, cudaStream_t stream);

// What the runs of queries and keys imply (strict form), if they are not the same.
struct RunEnds {
  int per_row = 1;                   // slots per query
  std::int32_t* ends = nullptr;      // optional, by query slot: keys of its cluster that are not
                                     // after it
  std::uint8_t* own_row = nullptr;   // optional (B, H, N): kDropOwnKey, kAddOwnKey
  std::uint8_t* own_slot = nullptr;  // with several slots per query: the inputs of own_row

  RunEnds() = default;
  RunEnds(Arena& arena, const RoutingParams& params, const AttentionCall& call);
};
constexpr std::uint8_t kDropOwnKey = 1;  // it is in a run, and other keys are visible
constexpr std::uint8_t kAddOwnKey = 2;   // it is in no run, and is requested

// `slots` are those of the queries, read if a query has several. ends.cu
void find_run_ends(const RoutingParams& params, const AttentionCall& call,
                   const SortedRuns& queries, const SortedRuns& keys, const TokenSlots& slots,
                   const RunEnds& ends, cudaStream_t stream);

// Rows that may be among the `width` best of a centroid: those whose rounded score is not below the
// threshold. Every list has several parts, which may count more rows than they store.
struct CandidateLists {
  std::int32_t* count = nullptr;  // (B, heads, C, parts)
  uint2* entries = nullptr;  // (B, heads, C, parts, capacity): bits of score - threshold, times
                             // centroid_scale (top.cuh); row
  int parts = 0, capacity = 0;
};
struct CandidateRun {
  RoutingSide side;
  bool wanted = false;  // see candidates_pay
  CandidateLists lists;
};
// For long bf16 sequences on Hopper. candidates_sm90a.cu
bool candidates_pay(const RoutingSide& side);
// Fills the lists of the wanted runs, and the statistics of their rows; zeroes words for later
// kernels. arrivals: one word per item and head of either side, zeroed.
void find_candidates(const AttentionCall& call, const CentredCentroids& centroids,
                     CandidateRun& queries, CandidateRun& keys, const ZeroedWords& zeroed,
                     unsigned* arrivals, Arena& arena, cudaStream_t stream);

// The members of both sides: the `width` best rows of every centroid; and the statistics of the
// rows. `keys` may be null. top.cu
void select_top(const AttentionCall& call, const CentredCentroids& centroids,
                const RoutingSide& queries, const RoutingSide* keys, unsigned* arrivals,
                Arena& arena, cudaStream_t stream);

// The same for a partition of the rows into clusters of equal size; reads the statistics.
// balanced.cu
void select_balanced(const AttentionCall& call, const RoutingSide& side,
                     const CentredCentroids& centroids, Arena& arena, cudaStream_t stream);

// Derived from member lists, by query slot: ends (causal form with separate keys) are the keys of
// the list that are not after the query; bit 0 of a flag says that a query sees more than one key.
// Either may be null. `beside_slots`: launched right after find_token_slots. ends.cu
void find_member_ends(const AttentionCall& call, const RoutingSide& queries,
                      const RoutingSide& keys, std::int32_t* ends, std::uint8_t* flags,
                      bool beside_slots, cudaStream_t stream);

// From slots back to tokens (tokens.cu): one softmax over several clusters and the own key, sums of
// gradients, and the backward pass of the row normalisation.

// Rows by slot, which are summed per token.
struct SlotRows {
  TokenSlots tokens;
  const void* values = nullptr;  // (slots, width); null: none
};

// Gradients of the rows of one of q, k and v from those of slots.
struct TokenGradient {
  SlotRows first, second;                // summed; only `first` counts for dlogit_scale
  TensorView rows;                       // q or k, for the normalisation; absent: none (values)
  const RowStatistics* stats = nullptr;  // of the rows
  TensorView gradient;                   // absent: only the sums for dlogit_scale
  const float* own_factor = nullptr;     // optional (B, H, N): factors of the own keys' rows ...
  TensorView own_rows;                   // ... namely these
  SequenceSpans own_spans{};
  const RowStatistics* own_stats = nullptr;  // null: not normalised
  float* products = nullptr;                 // optional (B, heads, rows): gradient . normalised row
};
// Up to three gradients in one launch. tokens.cu
void token_gradients(const AttentionCall& call, const std::vector<TokenGradient>& gradients,
                     cudaStream_t stream);

// Strict routing's data of queries whose own key is added separately (include_self).
struct OwnKeys {
  const std::uint8_t* flags = nullptr;         // (B, H, N), see kAddOwnKey; null: no own keys
  float *weight = nullptr, *dlogit = nullptr;  // (B, H, N), backward: weight of the own value, and
                                               // the gradient of its logit times the scale
  const RowStatistics *q_stats = nullptr, *k_stats = nullptr;
  float scale = 1.0f;
  const float* head_scale = nullptr;
  Dropout dropout;
};

// out (B, H, N, Dv) and lse (B, H, N): one softmax over a query's slots and its own key.
void merge_slots(const AttentionCall& call, const SlotRows& slots, const float* slot_lse,
                 const OwnKeys& own, const TensorView& out, float* lse, cudaStream_t stream);

// delta (B, H, N) = sum of the parts by slot and of the own key; own.weight and own.dlogit.
void merge_deltas(const AttentionCall& call, const TokenSlots& slots, const float* parts,
                  const float* lse, const TensorView& grad_out, const OwnKeys& own, float* delta,
                  cudaStream_t stream);

// dlogit_scale (H): per head, the sum over its rows of q . dq, divided by its factor.
void logit_scale_gradient(const AttentionCall& call, const float* products, const float* head_scale,
                          const TensorView& dlogit_scale, cudaStream_t stream);

// Copies the factors of the logits (H); replaces 0 by a number so small that no weight changes,
// because the gradient of a factor divides by it.
void nonzero_scale(const AttentionCall& call, float* scale, cudaStream_t stream);

}  // namespace coterie::cuda
