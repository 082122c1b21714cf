// SPDX-License-Identifier: MIT
// The backward pass of LSH attention. If the rounds form one softmax, every part uses the total
// log-sum-exp and delta = gradient . output; if they are averaged, each round has its own.
#include <algorithm>

#include "cpu/mechanisms/lsh_pass.h"

namespace coterie::cpu {

template <class T>
LshBackward<T>::LshBackward(Arena& arena, const LshParams& lsh, const AttentionCall& attention)
    : Base(arena, lsh, attention),
      dq(arena, call, call.H, call.Dk),
      dk(arena, call, call.H, call.Dk),
      dv(arena, call, call.value_heads, call.Dv) {}

template <class T>
RowGradients<T> LshBackward<T>::rows(const Part& part, const Span& span, std::int64_t head,
                                     const RowList& list) const {
  RowGradients<T> rows;
  rows.gradient = list_rows(part.grad_out, span, head, list);
  rows.lse = this->lse_at(part.lse, span, head, part.round);
  rows.delta = delta_at(span, head);
  rows.index = list.index;
  return rows;
}

// Calls body(tile, pair, tiles) for all tiles of the queries of a part.
template <class T>
template <class Body>
void LshBackward<T>::for_queries(const Part& part, Body body) {
  const auto count = [&](std::int64_t item, std::int64_t head) {
    return part.plan.pair(item, head, 0).queries.count;
  };
  this->for_lists(call.H, kQueryTile, count, [&](const RowTile& tile, Tiles<T>& tiles) {
    body(tile, part.plan.pair(tile.item, tile.head, 0), tiles);
  });
}

// Adds a part's share of gradient . output, with the output recomputed.
template <class T>
void LshBackward<T>::add_deltas(const Part& part) {
  for_queries(part, [&](const RowTile& tile, const ListPair<T>& pair, Tiles<T>& tiles) {
    const Span& span = call.item(tile.item).q;
    RowGradients<T> gradients = rows(part, span, tile.head, pair.queries);
    gradients.delta = nullptr;
    delta_tile(make_segment(call, part.plan, tile.item, tile.head, pair), gradients, tile.first,
               tile.count, tiles);
    T* delta = delta_at(span, tile.head);
    for (std::int64_t r = 0; r < tile.count; ++r)
      delta[pair.queries.row(tile.first + r)] += tiles.delta[r];
  });
}

template <class T>
void LshBackward<T>::add_queries(const Part& part) {
  for_queries(part, [&](const RowTile& tile, const ListPair<T>& pair, Tiles<T>& tiles) {
    const Span& span = call.item(tile.item).q;
    backward_query_tile(make_segment(call, part.plan, tile.item, tile.head, pair),
                        rows(part, span, tile.head, pair.queries), tile.first, tile.count, tiles);
    dq.add(span, tile.head, pair.queries, tile, tiles.dq);
  });
}

// Query heads that share a value head add to the same dv, so they take turns.
template <class T>
void LshBackward<T>::add_keys(const Part& part) {
  const std::int64_t group = call.H / call.value_heads;
  for (std::int64_t turn = 0; turn < group; ++turn) {
    const auto count = [&](std::int64_t item, std::int64_t value_head) {
      return part.plan.pair(item, value_head * group + turn, 0).keys.count;
    };
    this->for_lists(call.value_heads, kKeyTile, count, [&](const RowTile& tile, Tiles<T>& tiles) {
      const Span& span = call.item(tile.item).q;
      const std::int64_t head = tile.head * group + turn;
      const ListPair<T> pair = part.plan.pair(tile.item, head, 0);
      std::fill_n(tiles.dk, kKeyTile * tiles.key_row, T(0));
      std::fill_n(tiles.dv, kKeyTile * tiles.value_row, T(0));
      backward_key_tile(make_segment(call, part.plan, tile.item, head, pair),
                        rows(part, span, head, pair.queries), tile.first, tile.count, tiles);
      dk.add(span, head, pair.keys, tile, tiles.dk);
      dv.add(span, tile.head, pair.keys, tile, tiles.dv);
    });
  }
}

// dq += (I - k k^T) dk / |q|.
template <class T>
void LshBackward<T>::add_unit_gradient() {
  const Kernels<T>& kernel = kernels<T>();
  this->for_tokens([&](const RowTile& tile, Tiles<T>& tiles) {
    const Span& span = call.item(tile.item).q;
    const std::int64_t width = tiles.key_row;
    kernel.load(span_rows(call.inputs.q, span, tile.head), tile.first, tile.count, T(1), tiles.q,
                width);
    kernel.load(span_rows(call.k, span, tile.head), tile.first, tile.count, T(1), tiles.k, width);
    for (std::int64_t r = 0; r < tile.count; ++r) {
      const T* unit = tiles.k + r * width;
      const T* dunit = dk.at(span, tile.head, tile.first + r);
      T* sum = dq.at(span, tile.head, tile.first + r);
      const T inverse = inverse_norm(tiles.q + r * width, width);
      const T along = kernel.row_dot(unit, dunit, width);
      kernel.row_add(sum, dunit, width, inverse);
      kernel.row_add(sum, unit, width, -along * inverse);
    }
  });
}

template <class T>
void LshBackward<T>::run(const AttentionResult& result, const TensorView& grad_out,
                         const AttentionGradients& gradients) {
  const TensorView &order = result.saved[0], &lse = result.saved[1];
  this->prepare(order);
  for (TokenSums<T>* sums : {&dq, &dk, &dv}) sums->clear();
  const auto clear_deltas = [&] { std::fill_n(lists.delta, call.B * call.H * call.N, T(0)); };
  if (this->merges() && result.out.dtype == lse.dtype) {
    lists_deltas(call, ListCall<T>{}, {result.out, lse, grad_out, {}, {}, {}}, lists);
  } else if (this->merges()) {
    // With outputs rounded to half precision, gradients that should be 0 would not be.
    clear_deltas();
    this->for_parts(order, [&](std::int64_t round, const ListCall<T>& plan) {
      add_deltas({round, plan, lse, grad_out});
    });
  }
  this->for_parts(order, [&](std::int64_t round, const ListCall<T>& plan) {
    const Part part{round, plan, lse, grad_out};
    if (!this->merges()) {  // a round is one part, and its output was not kept
      clear_deltas();
      add_deltas(part);
    }
    if (gradients.dq.present()) add_queries(part);
    add_keys(part);
  });
  if (gradients.dq.present()) {
    add_unit_gradient();
    dq.store(call, this->round_weight(), gradients.dq);
  }
  if (gradients.dv.present()) dv.store(call, this->round_weight(), gradients.dv);
}

template struct LshBackward<float>;
template struct LshBackward<double>;

}  // namespace coterie::cpu
