// SPDX-License-Identifier: MIT
// Selects the members of the clusters of CAST by the scores
//   A_g(i, c) = sigmoid(phi_i) f_c(A_q(i)) + (1 - sigmoid(phi_i)) f_c(A_k(i)),
// A_q(i, c) = q_i . S_c and A_k(i, c) = k_i . S_c, summed over the heads that share a clustering.
// Scores are recomputed tile by tile whenever they are needed, and never stored.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "cpu/cluster/balanced.h"
#include "cpu/engine/top.h"
#include "cpu/mechanisms/cast.h"

namespace coterie::cpu {

template <class T>
struct CastSelectWorkspace {
  std::vector<Tiles<T>> tiles;    // one per thread
  T *q_lse, *k_lse;               // (list heads, B, N): the normalisers of the two f_c
  std::vector<TopBuffer<T>> top;  // topk: one per thread
  // single
  std::optional<BalancedWorkspace<T>> balanced;
  std::int32_t* labels = nullptr;  // (list heads, B, N)

  CastSelectWorkspace(Arena& arena, const CastParams& params, const AttentionCall& call);
};

// The scores of one item for one list head, which heads [first_head, end_head) share.
template <class T>
struct CastScores {
  const CastParams& params;
  const AttentionCall& call;
  std::int64_t item, first_head, end_head;
  T *q_lse, *k_lse;  // of the item's tokens

  CastScores(const CastParams& params, const AttentionCall& call, std::int64_t item,
             std::int64_t list_head, CastSelectWorkspace<T>& workspace);

  // tiles.s = A_q and tiles.dp = A_k of entries `tokens` of the list, as rows of kKeyTile clusters
  // that begin with clusters.begin.
  void affinities(const RowList& list, const Range& tokens, const Range& clusters,
                  Tiles<T>& tiles) const;
  // tiles.s = A_g, from the normalisers.
  void scores(const RowList& list, const Range& tokens, const Range& clusters,
              Tiles<T>& tiles) const;
  // The normalisers of tokens [begin, end) of the item.
  void normalisers(const Range& tokens, Tiles<T>& tiles) const;
};

// Fills members (items, 1 or H, C, w).
template <class T>
void cast_select(const CastParams& params, const AttentionCall& call, const TensorView& members,
                 CastSelectWorkspace<T>& workspace);

}  // namespace coterie::cpu
