// SPDX-License-Identifier: MIT
// Shared by the passes of LSH attention. Rounds and parts run one after the other and add to sums
// per token: within a part each token has one writer, so sums have a fixed order.
#pragma once

#include <cstdint>

#include "coterie/attention.h"
#include "cpu/mechanisms/lsh.h"

namespace coterie::cpu {

// Sums per token, one padded row each: (B, heads, N, row).
template <class T>
struct TokenSums {
  std::int64_t batches, heads, tokens, row;
  T* sums;

  TokenSums(Arena& arena, const AttentionCall& call, std::int64_t num_heads, std::int64_t width);

  T* at(const Span& span, std::int64_t head, std::int64_t token) const {
    return sums + ((span.batch * heads + head) * tokens + span.begin + token) * row;
  }
  void clear();
  // Adds the rows of a tile of `list` to the sums of their tokens.
  void add(const Span& span, std::int64_t head, const RowList& list, const RowTile& tile,
           const T* rows);
  // Writes the sums times `factor` to a (B, heads, N, D) tensor, 0 in padding.
  void store(const AttentionCall& call, T factor, const TensorView& tensor) const;
};

template <class T>
struct LshPass {
  const LshParams& params;
  AttentionCall call;  // its keys are the unit queries
  ListWorkspace<T> lists;
  std::uint8_t* alone;  // see LshParts

  LshPass(Arena& arena, const LshParams& params, const AttentionCall& call);
  // Computes the unit keys, and `alone` from the order.
  void prepare(const TensorView& order);

  bool merges() const { return params.combine == LshCombine::lse; }
  // Weight of a round's output; merged rounds need none.
  T round_weight() const { return merges() ? T(1) : T(1) / static_cast<T>(params.rounds); }
  // The log-sum-exps of an item: of all rounds together when they merge.
  T* lse_at(const TensorView& lse, const Span& span, std::int64_t head, std::int64_t round) const {
    T* base = static_cast<T*>(lse.data);
    return merges() ? round_at(call, base, span, head, 1, 0)
                    : round_at(call, base, span, head, params.rounds, round);
  }

  // Calls body(round, plan) for every part of every round.
  template <class Body>
  void for_parts(const TensorView& order, Body body) {
    const LshParts<T> parts{params, call, order, alone};
    for (std::int64_t round = 0; round < params.rounds; ++round)
      for (int part = 0; part < parts.num_parts(); ++part) body(round, parts.plan(round, part));
  }
  // Calls body(tile, tiles) for all tiles of tokens of the query heads.
  template <class Body>
  void for_tokens(Body body) {
    for_tiles(span_tiles(query_spans(call), call.H), lists.tiles, body);
  }
  // The same for all tiles of `size` rows of lists; count(item, head) rows each.
  template <class Count, class Body>
  void for_lists(std::int64_t heads, std::int64_t size, Count count, Body body) {
    const std::vector<RowTile> tiles = list_tiles(
        {call.num_items(), heads}, size,
        [&](std::int64_t item, std::int64_t head, std::int64_t) { return count(item, head); });
    for_tiles(tiles, lists.tiles, body);
  }
};

// 1 / |x| of a padded row, or 0 for a zero row, whose key is zero and has no gradient.
template <class T>
T inverse_norm(const T* row, std::int64_t width);

template <class T>
struct LshBackward : LshPass<T> {
  LshBackward(Arena& arena, const LshParams& params, const AttentionCall& call);
  void run(const AttentionResult& result, const TensorView& grad_out,
           const AttentionGradients& gradients);

 private:
  using Base = LshPass<T>;
  using Base::call;
  using Base::lists;

  T* delta_at(const Span& span, std::int64_t head) const {
    return lists.delta + (span.batch * call.H + head) * call.N + span.begin;
  }
  // One part of one round.
  struct Part {
    std::int64_t round;
    const ListCall<T>& plan;
    const TensorView &lse, &grad_out;
  };
  RowGradients<T> rows(const Part& part, const Span& span, std::int64_t head,
                       const RowList& list) const;
  template <class Body>
  void for_queries(const Part& part, Body body);
  void add_deltas(const Part& part);
  void add_queries(const Part& part);
  void add_keys(const Part& part);
  void add_unit_gradient();

  TokenSums<T> dq, dk, dv;
};

}  // namespace coterie::cpu
