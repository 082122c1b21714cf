// SPDX-License-Identifier: MIT
// Which tokens form the clusters of CAST: by the scores
//   A_g(i, c) = sigmoid(phi_i) f_c(A_q(i)) + (1 - sigmoid(phi_i)) f_c(A_k(i)),
// A_q(i, c) = q_i . S_c and A_k(i, c) = k_i . S_c, added up over the heads that share a clustering.
// Scores are made tile by tile, as often as they are needed, and never stored.
#pragma once

#include <cstdint>
#include <vector>

#include "cpu/cast.h"
#include "cpu/top.h"

namespace coterie::cpu {

// A cluster that a token may join.
template <class T>
struct CastChoice {
  T score;
  std::int32_t cluster;
};

template <class T>
struct CastSelectWorkspace {
  static constexpr std::int64_t kChoices = 8;

  std::vector<Tiles<T>> tiles;    // one per thread
  T *q_lse, *k_lse;               // (list heads, B, N): the normalisers of the two f_c
  std::vector<TopBuffer<T>> top;  // topk: one per thread
  // single: by token of the item at hand
  CastChoice<T>* choices = nullptr;  // its kChoices best clusters among those not tried yet
  std::int32_t* num_choices = nullptr;
  std::int32_t* next_choice = nullptr;
  T* held = nullptr;  // its score in the cluster that holds it
  std::int32_t *waiting = nullptr, *still_waiting = nullptr;  // tokens to place
  std::int32_t* sizes = nullptr;                              // of the clusters

  CastSelectWorkspace(Arena& arena, const CastParams& params, const AttentionCall& call);
};

// The scores of one item for one list head: heads [first_head, end_head) share it.
template <class T>
struct CastScores {
  const CastParams& params;
  const AttentionCall& call;
  std::int64_t item, first_head, end_head;
  T *q_lse, *k_lse;  // of the item's tokens

  CastScores(const CastParams& params, const AttentionCall& call, std::int64_t item,
             std::int64_t list_head, CastSelectWorkspace<T>& workspace);

  // tiles.s = A_q and tiles.dp = A_k of tokens [first, first + count) of the list, as rows of
  // kKeyTile clusters beginning with clusters.begin.
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

// Mode single: each token of the item joins one cluster. `members` (C, w).
template <class T>
void cast_assign(const CastScores<T>& scores, std::int32_t* members, std::int64_t width,
                 CastSelectWorkspace<T>& workspace);

}  // namespace coterie::cpu
