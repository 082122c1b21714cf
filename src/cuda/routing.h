// SPDX-License-Identifier: MIT
// Stages of routing attention on the GPU (mechanisms.md 10, 15.1). Every stage launches on
// `stream`; those that take an arena launch nothing when it only counts.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "core/arena.h"
#include "core/call.h"
#include "coterie/mechanism.h"
#include "cuda/device/team.cuh"
#include "cuda/device/zero.cuh"
#include "cuda/lists.h"
#include "cuda/slots.h"

namespace coterie::cuda {

// Queries or keys: rows (B, heads, rows, Dk), of which `shape.group` heads share centroids.
struct RoutingSide {
  TensorView rows;
  ClusterShape shape;
  RowStatistics* stats = nullptr;  // (B, heads, rows)

  std::int64_t count() const { return rows.size(0) * rows.size(1) * rows.size(2); }
};
RoutingSide query_side(const AttentionCall& call, std::int64_t clusters);
RoutingSide key_side(const AttentionCall& call, std::int64_t clusters);

// Mean and 1 / sqrt(variance + 1e-6) of every row, zeros in padding; the same bits for a row
// wherever it stands. `keys` is null where keys are the queries. routing_rows.cu
void row_statistics(const AttentionCall& call, const RoutingSide& queries, const RoutingSide* keys,
                    cudaStream_t stream);

// Centroids (Hkv, C, Dk) less their means, in rows of `pitch`: for rows y of zero mean
// y . centroid = x . centred / sigma.
struct CentredCentroids {
  float* rows = nullptr;     // (Hkv, C, pitch), zeros beyond Dk
  float* columns = nullptr;  // (Hkv, pitch, C)
  int pitch = 0, clusters = 0;
  // For bf16 rows: two bf16 parts of every element (device/row_fragments.cuh), C padded to `padded`
  // by zeros, and the sums of absolute values.
  void* table = nullptr;   // (Hkv, padded) columns
  float* norms = nullptr;  // (Hkv, C)
  int padded = 0;

  CentredCentroids() = default;
  CentredCentroids(Arena& arena, const AttentionCall& call, std::int64_t clusters);
};
// The kernel also zeroes words for later ones.
void centre_centroids(const AttentionCall& call, const CentredCentroids& centroids,
                      const ZeroedWords& zeroed, cudaStream_t stream);

// Words that a selection needs to be zero.
struct SelectCounters {
  ZeroedWords words;
  unsigned* arrivals = nullptr;  // for as many teams as there are problems
  std::int32_t *open_queries = nullptr, *open_keys = nullptr;  // (B, H), (B, key_heads)

  SelectCounters(Arena& arena, const AttentionCall& call);
};

// The nearest clusters of every row, `per_row` of them: score descending, then lower cluster; NaN
// ranks last. Scores are sums over Dk in ascending order, in fp32: what a row gets depends on the
// row and the centroids alone.
struct NearestClusters {
  std::int32_t* labels = nullptr;    // (B, heads, rows): the first one, -1 in padding
  std::int32_t* clusters = nullptr;  // (B, heads, rows, per_row), where that is above 1
  int per_row = 1;
};

// Of all rows. routing_nearest.cu
void nearest_exact(const AttentionCall& call, const RoutingSide& side,
                   const CentredCentroids& centroids, const NearestClusters& nearest, Arena& arena,
                   cudaStream_t stream);

// The first cluster of bf16 rows by tensor cores, with an error that is bounded: labels that are
// certain, and lists of the rows that are open, in any order. `keys` may be null. routing_scan.cu
struct ScanSide {
  RoutingSide side;
  std::int32_t* labels;      // (B, heads, rows)
  std::int32_t* open_count;  // (B, heads), zero before
  std::int32_t* open;        // (B, heads, rows)
};
void nearest_scan(const AttentionCall& call, const CentredCentroids& centroids,
                  const ScanSide& queries, const ScanSide* keys, cudaStream_t stream);
// Labels of the open rows. routing_nearest.cu
void nearest_open(const AttentionCall& call, const CentredCentroids& centroids,
                  const ScanSide& queries, const ScanSide* keys, cudaStream_t stream);

// order (B, heads, rows * per_row) and offsets (items, heads, C + 1): pairs (row, cluster) by
// cluster, then row. routing_runs.cu
struct RoutingRuns {
  std::int32_t *order = nullptr, *offsets = nullptr;
};
struct SortSide {
  RoutingSide side;
  const std::int32_t* clusters;  // (B, heads, rows, per_row)
  int per_row;
  RoutingRuns runs;
  RoutingRuns copy;  // optional: to be the same
};
// `keys` may be null.
void sort_runs(const SortSide& queries, const SortSide* keys, unsigned* arrivals, Arena& arena,
               cudaStream_t stream);

// What the runs of queries and keys imply (strict form).
struct RunEnds {
  int per_row = 1;                   // slots of a query
  std::int32_t* ends = nullptr;      // by query slot: keys of its cluster that are not after it
  std::uint8_t* own_row = nullptr;   // (B, H, N): kDropOwnKey, kAddOwnKey
  std::uint8_t* own_slot = nullptr;  // with several slots of a query: what own_row is made of

  RunEnds() = default;
  RunEnds(Arena& arena, const RoutingParams& params, const AttentionCall& call);
};
constexpr std::uint8_t kDropOwnKey = 1;  // it is in a run, and other keys are in sight
constexpr std::uint8_t kAddOwnKey = 2;   // it is in no run, and is wanted

// `slots` are those of the queries, needed where they have several.
void find_run_ends(const RoutingParams& params, const AttentionCall& call,
                   const RoutingRuns& queries, const RoutingRuns& keys, const TokenSlots* slots,
                   const RunEnds& ends, cudaStream_t stream);

// Rows that may be among the `width` best of a centroid: those whose rounded score is not below the
// threshold. Of lists with more than `capacity` rows only the count is right. Without capacity
// where it does not pay. routing_candidates.cu
struct CandidateLists {
  float* thresholds = nullptr;    // (B, heads, C), times centroid_scale (device/routing_top.cuh)
  std::int32_t* count = nullptr;  // (B, heads, C)
  uint2* entries = nullptr;       // (B, heads, C, capacity): bits of score - threshold; row
  int capacity = 0;

  CandidateLists() = default;
  CandidateLists(Arena& arena, const RoutingSide& side, std::int64_t width);
};
struct CandidateRun {
  RoutingSide side;
  int width;
  CandidateLists lists;
};
// Runs without capacity are left out. `zeroed` is one more word to be zero.
void find_candidates(const AttentionCall& call, const CentredCentroids& centroids,
                     const CandidateRun& queries, const CandidateRun& keys, std::int32_t* zeroed,
                     cudaStream_t stream);

// members (items, heads, C, width): the `width` best rows of every centroid, ascending, -1 beyond
// them. routing_top.cu
struct TopSide {
  RoutingSide side;
  std::int64_t width;
  TensorView members;
};
// `keys` may be null.
void select_top(const AttentionCall& call, const CentredCentroids& centroids,
                const TopSide& queries, const TopSide* keys, Arena& arena, cudaStream_t stream);

// The same for a partition of the rows into clusters of equal size. routing_balanced.cu
void select_balanced(const AttentionCall& call, const RoutingSide& side,
                     const CentredCentroids& centroids, const TensorView& members, Arena& arena,
                     cudaStream_t stream);

// What follows from member lists, by query slot: ends (of the causal form with separate keys) are
// the keys of the list that are not after the query; bit 0 of a flag, where wanted, says that a
// query sees more than one key. Both may be null. routing_members.cu
void find_member_ends(const AttentionCall& call, const TensorView& q_members,
                      const TensorView& k_members, std::int32_t* ends, std::uint8_t* flags,
                      cudaStream_t stream);

}  // namespace coterie::cuda
