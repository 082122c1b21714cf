// SPDX-License-Identifier: MIT
// Decisions made once per call of routing attention, from its parameters, shapes and the device;
// and its saved tensors by name.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "core/call.h"
#include "coterie/params.h"
#include "cuda/api/padding.h"
#include "cuda/launch/device.h"
#include "cuda/routing/stages.h"

namespace coterie::cuda {

enum class RoutingSelection : std::uint8_t {
  scan,      // nearest clusters, statistics and sort in one kernel (scan_sm90a.cu)
  sums,      // sums for all clusters (nearest.cu), then the sort (cluster/group.cu)
  top,       // candidates where they pay off (candidates_sm90a.cu, choose.cu), then top.cu
  balanced,  // balanced.cu
};

struct RoutingPlan {
  bool fits_scan;    // shapes and types are supported by the scan
  bool strict;       // lists are runs of rows sorted by cluster; else members of clusters
  bool shared;       // keys are the queries
  bool same_runs;    // strict: and so are their runs
  bool saves_ends;   // the ends of queries are saved
  bool joint_scan;   // the scan would sort both sides together and find the ends
  bool demotes;      // a query sees its own key only if it sees no other
  bool rows_direct;  // every row has one slot and no own key: results by slot are results by row
  bool value_rows;   // if so: gradients of values are by row, too
  bool normalises;   // list kernels backpropagate through the normalisation, by row ...
  bool rounded;      // ... or by slot, of the inputs' type
  bool sparse;       // most tokens are usually in no list
  bool has_gaps;     // some slots have no token, or some rows are in no item
  int per_row;       // clusters per query
  std::int64_t q_width, k_width;  // rows of a member list
  std::int64_t q_slots, k_slots;

  RoutingPlan(const RoutingParams& params, const AttentionCall& call) {
    const bool balanced = params.membership == Membership::balanced;
    strict = params.membership == Membership::nearest;
    shared = params.shared();
    per_row = static_cast<int>(strict ? std::min(params.queries_in, params.clusters) : 1);
    same_runs = strict && shared && per_row == 1;
    demotes = params.self == SelfAttention::demote;
    saves_ends = strict ? !same_runs : call.causal && !shared;
    fits_scan = strict && per_row == 1 && call.N > 0 && scan_fits(call, params.clusters);
    joint_scan = fits_scan && !shared && !params.include_self && !demotes && scan_finds_ends(call);
    without_scan = strict     ? RoutingSelection::sums
                   : balanced ? RoutingSelection::balanced
                              : RoutingSelection::top;
    rows_direct = strict && per_row == 1 && !params.include_self;
    value_rows = rows_direct && call.key_heads == call.value_heads;
    normalises = rows_direct && !shared;
    rounded = !strict && call.key_heads == call.value_heads && !call.inputs.logit_scale.present();
    sparse = params.membership == Membership::top && params.clusters >= 32;
    const auto gaps = [&](const Sequences& sequences, std::int64_t rows) {
      return ragged(sequences) || (balanced && rows % params.clusters != 0);
    };
    has_gaps = gaps(call.inputs.q_sequences, call.N) || gaps(call.inputs.k_sequences, call.S);
    const auto width = [&](std::int64_t rows) {
      return balanced ? (rows + params.clusters - 1) / params.clusters
                      : std::min(params.window, rows);
    };
    q_width = strict ? 0 : width(call.N);
    k_width = strict ? 0 : width(call.S);
    q_slots = strict ? call.B * call.H * call.N * per_row
                     : call.num_items() * call.H * params.clusters * q_width;
    k_slots = strict ? call.B * call.key_heads * call.S
                     : call.num_items() * call.key_heads * params.clusters * k_width;
  }

  // These query the device; refusals work without one.
  RoutingSelection selection() const {
    return fits_scan && on_hopper() ? RoutingSelection::scan : without_scan;
  }
  // Whether the scan of a forward pass finds the ends of queries.
  bool scan_ends() const { return joint_scan && on_hopper(); }

 private:
  RoutingSelection without_scan;
};

// The slots of every token; see TokenSlots.
struct SavedSlots {
  TensorView first, count, slots;
};

// The saved tensors by name; if queries and keys are shared, those of keys are those of queries. A
// selection alone has only members, or labels, order and offsets.
struct RoutingSaved {
  TensorView q_members, k_members, member_lse;                                 // top, balanced
  TensorView q_labels, k_labels, q_order, q_offsets, k_order, k_offsets, lse;  // nearest
  TensorView q_statistics, k_statistics, ends;
  SavedSlots q_slots, k_slots;  // top, balanced
  TensorView weights;

  RoutingSaved(const RoutingPlan& plan, const std::vector<TensorView>& saved) {
    std::size_t next = 0;
    const auto take = [&](auto&... tensors) {
      for (TensorView* each : {&tensors...})
        if (next < saved.size()) *each = saved[next++];
    };
    const auto take_pair = [&](TensorView& queries, TensorView& keys) {
      take(queries);
      if (!plan.shared) take(keys);
      if (plan.shared) keys = queries;
    };
    take_pair(plan.strict ? q_labels : q_members, plan.strict ? k_labels : k_members);
    if (plan.strict)
      take(q_order, q_offsets, k_order, k_offsets, lse);
    else
      take(member_lse);
    take_pair(q_statistics, k_statistics);
    if (plan.saves_ends) take(ends);
    if (plan.strict) return;
    take(q_slots.first, q_slots.count, q_slots.slots);
    if (!plan.shared) take(k_slots.first, k_slots.count, k_slots.slots);
    if (plan.shared) k_slots = q_slots;
    take(weights);
  }
};

}  // namespace coterie::cuda
