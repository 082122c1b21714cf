// SPDX-License-Identifier: MIT
// Stages of routing attention on the GPU (docs/mechanisms.md: routing). Every stage launches on
// `stream`; those that take an arena launch nothing when it only counts.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "core/arena.h"
#include "core/call.h"
#include "coterie/params.h"
#include "cuda/lists/lists.h"
#include "cuda/lists/slots.h"
#include "cuda/prim/splits.cuh"
#include "cuda/prim/team.cuh"
#include "cuda/prim/zero.cuh"

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
// wherever it stands. `keys` is null where keys are the queries. rows.cu
void row_statistics(const AttentionCall& call, const RoutingSide& queries, const RoutingSide* keys,
                    cudaStream_t stream);

// Centroids (Hkv, C, Dk) less their means, in rows of `pitch`: for rows y of zero mean
// y . centroid = x . centred / sigma.
struct CentredCentroids {
  float* rows = nullptr;   // (Hkv, C, pitch), zeros beyond Dk
  float* norms = nullptr;  // (Hkv, C)
  int pitch = 0, clusters = 0;
  float* columns = nullptr;  // for balanced: (Hkv, pitch, C)

  CentredCentroids() = default;
  CentredCentroids(Arena& arena, const AttentionCall& call, std::int64_t clusters,
                   Membership membership);
};
// The kernel also zeroes words for later ones.
void centre_centroids(const AttentionCall& call, const CentredCentroids& centroids,
                      const ZeroedWords& zeroed, cudaStream_t stream);

// Counters for as many teams as there are problems, to be zeroed.
ZeroedWords team_counters(Arena& arena, const AttentionCall& call);

// The nearest clusters of every row, `per_row` of them: score descending, then lower cluster; NaN
// ranks last. Scores are sums over Dk in ascending order, in fp32: what a row gets depends on the
// row and the centroids alone.
struct NearestClusters {
  std::int32_t* labels = nullptr;    // (B, heads, rows): the first one, -1 in padding
  std::int32_t* clusters = nullptr;  // (B, heads, rows, per_row), where that is above 1
  int per_row = 1;
};

// By sums alone. nearest.cu
void nearest_exact(const AttentionCall& call, const RoutingSide& side,
                   const CentredCentroids& centroids, const NearestClusters& nearest, Arena& arena,
                   cudaStream_t stream);

// order (B, heads, rows * per_row) and offsets (items, heads, C + 1): pairs (row, cluster) by
// cluster, then row. runs.cu
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

// The first cluster of bf16 rows by tensor cores, which leave few rows and centroids to sum, and
// the statistics of these rows and their runs where they are wanted. For Hopper, and as many
// clusters as shared memory holds. Centres the centroids itself. `keys` may be null.
// scan_sm90a.cu
struct ScanSide {
  RoutingSide side;        // its statistics are written where there is room
  std::int32_t* labels;    // (B, heads, rows)
  RoutingRuns runs, copy;  // optional
  // Optional, of queries where scan_finds_ends, if both sides have runs: see RunEnds.
  std::int32_t* ends = nullptr;
};
bool scan_fits(const AttentionCall& call, std::int64_t clusters);
bool scan_finds_ends(const AttentionCall& call);
// The counters need not be zero.
void nearest_scan(const AttentionCall& call, const CentredCentroids& centroids,
                  const ScanSide& queries, const ScanSide* keys, unsigned* arrivals, Arena& arena,
                  cudaStream_t stream);

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

// `slots` are those of the queries, needed where they have several.
void find_run_ends(const RoutingParams& params, const AttentionCall& call,
                   const RoutingRuns& queries, const RoutingRuns& keys, const TokenSlots* slots,
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
  int width;
  bool wanted;  // see candidates_pay
  CandidateLists lists;
};
// For long bf16 sequences on Hopper. candidates_sm90a.cu
bool candidates_pay(const RoutingSide& side, std::int64_t width);
// Fills the lists of the wanted runs, and the statistics of their rows; zeroes words for later
// kernels. arrivals are team_counters.
void find_candidates(const AttentionCall& call, const CentredCentroids& centroids,
                     CandidateRun& queries, CandidateRun& keys, const ZeroedWords& zeroed,
                     unsigned* arrivals, Arena& arena, cudaStream_t stream);

// members (items, heads, C, width): the `width` best rows of every centroid, ascending, -1 beyond
// them; and the statistics of the rows. top.cu
struct TopSide {
  RoutingSide side;
  std::int64_t width;
  TensorView members;
};
// `keys` may be null.
void select_top(const AttentionCall& call, const CentredCentroids& centroids,
                const TopSide& queries, const TopSide* keys, unsigned* arrivals, Arena& arena,
                cudaStream_t stream);

// The same for a partition of the rows into clusters of equal size. balanced.cu
void select_balanced(const AttentionCall& call, const RoutingSide& side,
                     const CentredCentroids& centroids, const TensorView& members, Arena& arena,
                     cudaStream_t stream);

// What follows from member lists, by query slot: ends (of the causal form with separate keys) are
// the keys of the list that are not after the query; bit 0 of a flag says that a query sees more
// than one key. Both may be null. member_ends.cu
struct MemberEnds {
  ItemSpans spans;
  bool causal;
  int items, heads, group, clusters, q_width, k_width;
  const std::int32_t *q_members, *k_members;
  std::int32_t* ends;
  std::uint8_t* flags;

  bool wanted() const { return ends || flags; }
};
MemberEnds member_ends(const AttentionCall& call, const TensorView& q_members,
                       const TensorView& k_members, std::int32_t* ends, std::uint8_t* flags);
void find_member_ends(const MemberEnds& ends, cudaStream_t stream);

}  // namespace coterie::cuda
