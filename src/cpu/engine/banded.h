// SPDX-License-Identifier: MIT
// Strictly causal attention inside clusters: queries and keys are sorted by (cluster, position).
// In each of its clusters a query sees the `window` latest keys that are not after it. In sorted
// order that is a band, clipped at cluster boundaries. Tiles restart at every cluster, so the order
// of a row's sums does not depend on the number of later tokens.
#pragma once

#include <cstdint>
#include <vector>

#include "core/arena.h"
#include "core/call.h"
#include "coterie/mechanism.h"
#include "cpu/engine/fold.h"
#include "cpu/engine/members.h"

namespace coterie::cpu {

struct BandedParams {
  std::int64_t window = 0;
  std::int64_t clusters_per_query = 1;
  // demote: a query sees its own key only if it sees no other in all its clusters.
  SelfAttention self = SelfAttention::keep;
  bool include_self = false;  // a query also sees its own key when that is in none of its clusters
};

// Tokens sorted by cluster, and the start of each cluster. q_order contains (query, cluster) pairs;
// those of an item start at begin * clusters_per_query.
struct BandedRuns {
  TensorView q_order, q_offsets;  // (B, H, N * clusters_per_query), (items, H, C+1)
  TensorView k_order, k_offsets;  // (B, key heads, S), (items, key heads, C+1)
};

// The call must be causal, and its items must have as many keys as queries.
template <class T>
struct BandedProblem {
  const AttentionCall& call;
  BandedParams params;
  BandedRuns runs;
  const T* head_scale = nullptr;  // optional (H) factors
};

// Index data that depends only on the runs.
struct BandedLayout {
  std::int32_t* key_ends;  // per query slot: keys of the cluster that are not after the query
  std::uint8_t* own_key;   // (B, H, N): kDropOwnKey, kAddOwnKey
  SlotIndex query_slots;

  BandedLayout(Arena& arena, const BandedParams& params, const AttentionCall& call);

  std::uint8_t* own_key_at(const AttentionCall& call, const Span& span, std::int64_t head) const {
    return own_key + (span.batch * call.H + head) * call.N + span.begin;
  }
};
constexpr std::uint8_t kDropOwnKey = 1;  // it is in a run, but other keys are visible
constexpr std::uint8_t kAddOwnKey = 2;   // it is in no run, but must be seen

// Fills the layout. The plan refers to the problem and the layout, which must outlive it.
template <class T>
GroupPlan<T> banded_plan(const BandedProblem<T>& problem, BandedLayout& layout);

template <class T>
struct BandedForward {
  BandedLayout layout;
  T *slot_out, *slot_lse;  // (query slots, Dv), (query slots)

  BandedForward(Arena& arena, const BandedParams& params, const AttentionCall& call);
};

// out (B, H, N, Dv) and lse (B, H, N) over the union of a query's clusters.
template <class T>
void banded_forward(const BandedProblem<T>& problem, const TensorView& out, const TensorView& lse,
                    BandedForward<T>& workspace, std::vector<Tiles<T>>& tiles);

// Dropout of the weight of a query's own key: 0 or 1 / (1 - p).
template <class T>
T own_key_factor(const AttentionCall& call, std::int64_t item, std::int64_t head,
                 std::int64_t query) {
  T factor = 1;
  if (call.dropout.on()) dropout_of(call, item, head, {}, {}).apply(query, query, 1, &factor);
  return factor;
}

// Results of the forward pass, and the gradient of `out`.
struct BandedResult {
  TensorView out, lse, grad_out;
};

template <class T>
struct BandedBackward {
  BandedLayout layout;
  SlotIndex key_slots;
  T* delta;                    // (B, H, N)
  T *own_weight, *own_dlogit;  // (B, H, N), for kAddOwnKey; null without include_self
  T *dq, *dk, *dv;             // slot gradients

  BandedBackward(Arena& arena, const BandedParams& params, const AttentionCall& call);
};

struct WantedGradients {
  bool dq, dk, dv;
};

// Computes slot gradients and returns functions that sum them per token; these refer to the
// arguments.
template <class T>
GradientSums<T> banded_backward(const BandedProblem<T>& problem, const BandedResult& result,
                                const WantedGradients& wanted, BandedBackward<T>& workspace,
                                std::vector<Tiles<T>>& tiles);

}  // namespace coterie::cpu
