// SPDX-License-Identifier: MIT
// Routing: which tokens meet.
#include "cuda/routing/pass.h"

namespace coterie::cuda {

bool RoutingPass::select_lists(const NormalisedSides& sides, const std::vector<TensorView>& saved,
                               const TensorView& cleared, Arena& arena, cudaStream_t stream) const {
  const RoutingSaved at = tensors_of(saved);
  const CentredCentroids centroids(arena, call_, params_.clusters, params_.membership);
  const ZeroedWords counters = team_counters(arena, call_);
  if (strict_ && scans()) {
    scan(sides, centroids, at, counters.data, arena, stream);
    return false;
  }
  if (!arena.counting()) centre_centroids(call_, centroids, counters, stream);
  if (!strict_) return select_members(sides, centroids, at, cleared, counters.data, arena, stream);
  sum_and_sort(sides, centroids, at, arena, stream);
  return false;
}

void RoutingPass::scan(const NormalisedSides& sides, const CentredCentroids& centroids,
                       const RoutingSaved& at, unsigned* arrivals, Arena& arena,
                       cudaStream_t stream) const {
  ScanSide q{sides.q, ints(at.q_labels), {ints(at.q_order), ints(at.q_offsets)}, {}};
  const ScanSide k{sides.k, ints(at.k_labels), {ints(at.k_order), ints(at.k_offsets)}, {}};
  if (params_.share_qk) q.copy = k.runs;
  if (scan_has_ends()) q.ends = ints(at.ends);
  nearest_scan(call_, centroids, q, params_.share_qk ? nullptr : &k, arrivals, arena, stream);
}

void RoutingPass::sum_and_sort(const NormalisedSides& sides, const CentredCentroids& centroids,
                               const RoutingSaved& at, Arena& arena, cudaStream_t stream) const {
  const bool shared = params_.share_qk;
  if (!arena.counting() && (sides.q.stats || sides.k.stats)) statistics(sides, stream);
  NearestClusters queries{ints(at.q_labels), nullptr, static_cast<int>(per_row_)};
  if (per_row_ > 1) queries.clusters = arena.take<std::int32_t>(sides.q.count() * per_row_);
  nearest_exact(call_, sides.q, centroids, queries, arena, stream);
  if (!shared)
    nearest_exact(call_, sides.k, centroids, {ints(at.k_labels), nullptr, 1}, arena, stream);
  SortSide q{sides.q.shape,
             per_row_ > 1 ? queries.clusters : queries.labels,
             queries.per_row,
             {ints(at.q_order), ints(at.q_offsets)},
             {}};
  const SortSide k{sides.k.shape, ints(at.k_labels), 1, {ints(at.k_order), ints(at.k_offsets)}, {}};
  const bool same = shared && per_row_ == 1;
  if (same) q.copy = k.runs;
  sort_by_cluster(q, same ? nullptr : &k, arena, stream);
}

bool RoutingPass::select_members(const NormalisedSides& sides, const CentredCentroids& centroids,
                                 const RoutingSaved& at, const TensorView& cleared,
                                 unsigned* arrivals, Arena& arena, cudaStream_t stream) const {
  const bool shared = params_.share_qk;
  if (params_.membership == Membership::balanced) {
    if (!arena.counting()) statistics(sides, stream);
    select_balanced(call_, sides.q, centroids, at.q_members, arena, stream);
    if (!shared) select_balanced(call_, sides.k, centroids, at.k_members, arena, stream);
    return false;
  }
  const TopSide q{sides.q, width(call_.N), at.q_members};
  const TopSide k{sides.k, width(call_.S), at.k_members};
  return select_top(call_, centroids, q, shared ? nullptr : &k, cleared, arrivals, arena, stream);
}

}  // namespace coterie::cuda
