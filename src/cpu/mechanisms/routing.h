// SPDX-License-Identifier: MIT
// Shared by all forms of routing attention: normalised rows, selection by centroids, and the
// backward pass of the normalisation.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "core/arena.h"
#include "core/call.h"
#include "coterie/mechanism.h"
#include "cpu/cluster/balanced.h"
#include "cpu/cluster/normalise.h"
#include "cpu/engine/fold.h"
#include "cpu/engine/top.h"

namespace coterie::cpu {

template <class T>
struct RoutingRows {
  std::vector<Tiles<T>> tiles;
  NormalisedRows<T> q;
  std::optional<NormalisedRows<T>> k;  // absent when queries and keys are shared

  RoutingRows(Arena& arena, const RoutingParams& params, const AttentionCall& call);

  // Fills the copies and returns the call with them in place of q and k.
  AttentionCall normalise(const AttentionCall& call);
};

// Queries or keys as inputs of the selection.
struct RoutingSide {
  TensorView rows;  // normalised (B, heads, rows, Dk)
  std::vector<Span> spans;
  std::int64_t heads;
};
RoutingSide query_side(const AttentionCall& normalised);
RoutingSide key_side(const AttentionCall& normalised);

template <class T>
struct SelectBuffers {
  std::vector<TopBuffer<T>> top;  // top: for the larger window; nearest: for queries_in
  std::optional<BalancedWorkspace<T>> balanced;
  std::int32_t* clusters = nullptr;  // nearest, if several: (B, H, N, queries_in)
  std::int32_t* labels = nullptr;    // balanced: (B, H, N) or (B, key heads, S)

  SelectBuffers(Arena& arena, const RoutingParams& params, const AttentionCall& call);
};

// Writes the selection tensors of attention_saved, in its order.
template <class T>
void routing_select(const RoutingParams& params, const AttentionCall& normalised,
                    const std::vector<TensorView>& saved, SelectBuffers<T>& buffers,
                    std::vector<Tiles<T>>& tiles);

// Turns gradients of the normalised rows into those of the inputs. For dlogit_scale, `head_scale`
// must be the factors that the backward pass used.
template <class T>
void write_gradients(const AttentionCall& call, RoutingRows<T>& rows, const GradientSums<T>& sums,
                     const T* head_scale, const AttentionGradients& gradients);

// Positions in `saved`; keys have the positions of queries if the two are shared.
struct RoutingSaved {
  std::size_t q_members, k_members, member_lse;                                 // top, balanced
  std::size_t q_labels, k_labels, q_order, q_offsets, k_order, k_offsets, lse;  // nearest
};
RoutingSaved saved_positions(const RoutingParams& params);

}  // namespace coterie::cpu
