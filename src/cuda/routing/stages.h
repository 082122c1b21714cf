// SPDX-License-Identifier: MIT
// Stages of routing attention on the GPU (docs/mechanisms.md: routing). Every stage launches on
// `stream`; those that take an arena launch nothing when it only counts.
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

// Queries or keys: rows (B, heads, rows, Dk), of which `shape.group` heads share centroids, and
// what a selection writes for them.
struct RoutingSide {
  TensorView rows;
  ClusterShape shape{};
  RowStatistics* stats = nullptr;   // (B, heads, rows); null: not wanted
  std::int32_t* labels = nullptr;   // strict: (B, heads, rows), the nearest cluster, -1 in padding
  SortedRuns runs, copy;            // strict, optional; copy is to be the same
  std::int32_t* members = nullptr;  // top, balanced: (items, heads, C, width), ascending, then -1
  int width = 0;

  RoutingSide() = default;
  RoutingSide(const AttentionCall& call, const TensorView& rows, const Sequences& sequences,
              std::int64_t clusters);
  std::int64_t count() const { return rows.size(0) * rows.size(1) * rows.size(2); }
};

// Mean and 1 / sqrt(variance + 1e-6) of every row, zeros in padding; the same bits for a row
// wherever it stands. `keys` is null where keys are the queries. rows.cu
void row_statistics(const AttentionCall& call, const RoutingSide& queries, const RoutingSide* keys,
                    cudaStream_t stream);

// Centroids (Hkv, C, Dk) less their means, in rows of `pitch`: for rows y of zero mean
// y . centroid = x . centred / sigma.
struct CentredCentroids {
  float* rows = nullptr;  // (Hkv, C, pitch), zeros beyond Dk
  int pitch = 0, clusters = 0;
  float* columns = nullptr;  // for balanced: (Hkv, pitch, C)

  CentredCentroids() = default;
  CentredCentroids(Arena& arena, const AttentionCall& call, std::int64_t clusters,
                   Membership membership);
};
// The kernel also zeroes words for later ones.
void centre_centroids(const AttentionCall& call, const CentredCentroids& centroids,
                      const ZeroedWords& zeroed, cudaStream_t stream);

// The nearest clusters of every row, `per_row` of them, by sums alone: score descending, then lower
// cluster; NaN ranks last. Scores are sums over Dk in ascending order, in fp32: what a row gets
// depends on the row and the centroids alone. Writes side.labels, and with several of a row
// clusters (B, heads, rows, per_row). nearest.cu
void nearest_exact(const AttentionCall& call, const RoutingSide& side,
                   const CentredCentroids& centroids, int per_row, std::int32_t* clusters,
                   Arena& arena, cudaStream_t stream);

// The same labels of bf16 rows by tensor cores, which leave few rows and centroids to sum, the
// statistics of these rows and their runs, where they are wanted. For Hopper, and as many clusters
// as shared memory holds. Centres the centroids itself; the counters need not be zero. `keys` may
// be null; ends (see RunEnds) too, and else scan_finds_ends. scan_sm90a.cu
bool scan_fits(const AttentionCall& call, std::int64_t clusters);
bool scan_finds_ends(const AttentionCall& call);
void nearest_scan(const AttentionCall& call, const CentredCentroids& centroids,
                  const RoutingSide& queries, const RoutingSide* keys, std::int32_t* ends,
                  unsigned* arrivals, Arena& arena, cudaStream_t stream);

// What the runs of queries and keys imply (strict form).
struct RunEnds {
  int per_row = 1;                   // slots of a query
  std::int32_t* ends = nullptr;      // optional, by query slot: keys of its cluster that are not
                                     // after it; where runs are shared those are the ranks + 1
  std::uint8_t* own_row = nullptr;   // optional (B, H, N): kDropOwnKey, kAddOwnKey
  std::uint8_t* own_slot = nullptr;  // with several slots of a query: what own_row is made of

  RunEnds() = default;
  RunEnds(Arena& arena, const RoutingParams& params, const AttentionCall& call);
};
constexpr std::uint8_t kDropOwnKey = 1;  // it is in a run, and other keys are in sight
constexpr std::uint8_t kAddOwnKey = 2;   // it is in no run, and is wanted

// `slots` are those of the queries, read where they have several. ends.cu
void find_run_ends(const RoutingParams& params, const AttentionCall& call,
                   const SortedRuns& queries, const SortedRuns& keys, const TokenSlots& slots,
                   const RunEnds& ends, cudaStream_t stream);

// Rows that may be among the `width` best of a centroid: those whose rounded score is not below the
// threshold. Every list has several parts, which may count more rows than they hold.
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
// kernels. arrivals: a word for each item and head of either side, zero.
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

// What follows from member lists, by query slot: ends (of the causal form with separate keys) are
// the keys of the list that are not after the query; bit 0 of a flag says that a query sees more
// than one key. Either may be null. `beside_slots`: launched right behind find_token_slots. ends.cu
void find_member_ends(const AttentionCall& call, const RoutingSide& queries,
                      const RoutingSide& keys, std::int32_t* ends, std::uint8_t* flags,
                      bool beside_slots, cudaStream_t stream);

// From slots back to tokens (tokens.cu): one softmax over several clusters and the own key,
// gradients that add up, and the way back through the normalisation of rows.

// Rows by slot, which tokens add up.
struct SlotRows {
  TokenSlots tokens;
  const void* values = nullptr;  // (slots, width); null: none
};

// Gradients of the rows of one of q, k and v from those of slots.
struct TokenGradient {
  SlotRows first, second;                // added up; only `first` counts for dlogit_scale
  TensorView rows;                       // q or k, for the normalisation; absent: none (values)
  const RowStatistics* stats = nullptr;  // of the rows
  TensorView gradient;                   // absent: only the sums for dlogit_scale
  const float* own_factor = nullptr;     // optional (B, H, N): factors of the own keys' rows ...
  TensorView own_rows;                   // ... which these are
  SequenceSpans own_spans{};
  const RowStatistics* own_stats = nullptr;  // null: as they are
  float* products = nullptr;                 // optional (B, heads, rows): gradient . normalised row
};
// Up to three of them in one launch. tokens.cu
void token_gradients(const AttentionCall& call, const std::vector<TokenGradient>& gradients,
                     cudaStream_t stream);

// What strict routing knows of a query whose own key counts apart (include_self).
struct OwnKeys {
  const std::uint8_t* flags = nullptr;         // (B, H, N), see kAddOwnKey; null: no own keys
  float *weight = nullptr, *dlogit = nullptr;  // (B, H, N), backward: softmax weight of the own
                                               // key, and the gradient of its logit times the scale
  const RowStatistics *q_stats = nullptr, *k_stats = nullptr;
  float scale = 1.0f;
  const float* head_scale = nullptr;
};

// out (B, H, N, Dv) and lse (B, H, N): one softmax over a query's slots and its own key.
void merge_slots(const AttentionCall& call, const SlotRows& slots, const float* slot_lse,
                 const OwnKeys& own, const TensorView& out, float* lse, cudaStream_t stream);

// delta (B, H, N) = sum of the parts by slot and of the own key's; own.weight and own.dlogit.
void merge_deltas(const AttentionCall& call, const TokenSlots& slots, const float* parts,
                  const float* lse, const TensorView& grad_out, const OwnKeys& own, float* delta,
                  cudaStream_t stream);

// dlogit_scale (H): for every head the sum over its rows of q . dq, divided by its factor.
void logit_scale_gradient(const AttentionCall& call, const float* products, const float* head_scale,
                          const TensorView& dlogit_scale, cudaStream_t stream);

// Copies the factors of the logits (H); in place of 0 a number so small that no weight changes, for
// their own gradient divides by them.
void nonzero_scale(const AttentionCall& call, float* scale, cudaStream_t stream);

}  // namespace coterie::cuda
