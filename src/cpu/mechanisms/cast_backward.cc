// SPDX-License-Identifier: MIT
#include "cpu/mechanisms/cast_backward.h"

#include <algorithm>

#include "core/parallel.h"

namespace coterie::cpu {

template <class T>
CastBackward<T>::CastBackward(Arena& arena, const CastParams& cast, const AttentionCall& attention)
    : Base(arena, cast, attention) {
  for (T** scalars : {&inner_dot, &weight, &weighted_dot, &dgate_slots})
    *scalars = arena.take<T>(slots);
  dq_slots = arena.take<T>(slots * call.Dk);
  dk_slots = arena.take<T>(slots * call.Dk);
  dv_slots = arena.take<T>(slots * call.Dv);
  dgate_rows = arena.take<T>(call.B * call.H * call.N);
  dsummary = arena.take<T>(call.num_items() * call.H * clusters * call.Dv);
  dsurrogate = arena.take<T>(call.num_items() * call.H * clusters * call.Dk);
}

template <class T>
typename CastBackward<T>::Cluster CastBackward<T>::cluster_at(std::int64_t task,
                                                              const CastSaved<T>& saved) const {
  const std::int64_t cluster = task % clusters, head = task / clusters % call.H;
  const std::int64_t item = task / clusters / call.H;
  return {item, head, cluster, task, task * width, Base::members(saved, item, head, cluster)};
}

// Calls body(cluster, tiles) for every cluster that has members.
template <class T>
template <class Body>
void CastBackward<T>::for_clusters(const CastSaved<T>& saved, Body body) {
  parallel_for(call.num_items() * call.H * clusters, [&](std::int64_t task, int worker) {
    const Cluster at = cluster_at(task, saved);
    if (at.list.count > 0) body(at, tiles(worker));
  });
}

template <class T>
RowGradients<T> CastBackward<T>::inner_rows(const CastSaved<T>& saved, const TensorView& grad_out,
                                            const Cluster& at) const {
  RowGradients<T> rows;
  rows.gradient = list_rows(grad_out, call.item(at.item).q, at.head, at.list);
  if (saved.member_lse) rows.lse = saved.member_lse + at.slot;
  return rows;
}

template <class T>
RowGradients<T> CastBackward<T>::mix_rows(const CastSaved<T>& saved, const TensorView& grad_out,
                                          std::int64_t item, std::int64_t head) const {
  const Span& span = call.item(item).q;
  RowGradients<T> rows;
  rows.gradient = span_rows(grad_out, span, head);
  if (saved.combine_lse.present()) rows.lse = span_at<T>(saved.combine_lse, span, head);
  rows.delta = delta_at(span, head);
  return rows;
}

// For a token's own clusters the value is the inner output instead of the summary.
template <class T>
TileHook<T> CastBackward<T>::own_clusters(std::int64_t item, std::int64_t head) const {
  TileHook<T> hook;
  hook.backward = [=, this](std::int64_t token, std::int64_t begin, std::int64_t count, T* p,
                            T* dp) {
    this->for_own(item, head, token, {begin, begin + count},
                  [&](std::int64_t cluster, std::int64_t slot) {
                    dp[cluster - begin] = inner_dot[slot];
                    p[cluster - begin] = 0;
                  });
  };
  return hook;
}

template <class T>
void CastBackward<T>::find_inner_dots(const CastSaved<T>& saved, const TensorView& grad_out) {
  for_clusters(saved, [&](const Cluster& at, Tiles<T>& own) {
    const Segment<T> inner = Base::inner(at.item, at.head, at.list);
    const RowGradients<T> rows = inner_rows(saved, grad_out, at);
    for (std::int64_t first = 0; first < at.list.count; first += kQueryTile) {
      const std::int64_t count = std::min(kQueryTile, at.list.count - first);
      delta_tile(inner, rows, first, count, own);
      std::copy_n(own.delta, count, inner_dot + at.slot + first);
    }
  });
}

// The weights of the slots, and delta = gradient . output of every token. delta is summed from its
// parts instead of the output, which may have been rounded to half precision.
template <class T>
void CastBackward<T>::find_weights(const CastSaved<T>& saved, const TensorView& grad_out) {
  const std::vector<RowTile> row_list = span_tiles(query_spans(call), call.H);
  for_tiles(row_list, this->lists.tiles, [&](const RowTile& tile, Tiles<T>& own) {
    T* delta = delta_at(call.item(tile.item).q, tile.head);
    std::fill_n(delta + tile.first, tile.count, T(0));
    TileHook<T> hook;
    hook.backward = [&](std::int64_t token, std::int64_t begin, std::int64_t count, T* p, T* dp) {
      this->for_own(tile.item, tile.head, token, {begin, begin + count},
                    [&](std::int64_t cluster, std::int64_t slot) {
                      dp[cluster - begin] = inner_dot[slot];
                      weight[slot] = p[cluster - begin];
                      weighted_dot[slot] = p[cluster - begin] * inner_dot[slot];
                    });
      for (std::int64_t t = 0; t < count; ++t) delta[token] += p[t] * dp[t];
    };
    RowGradients<T> rows = mix_rows(saved, grad_out, tile.item, tile.head);
    rows.delta = nullptr;
    backward_query_tile(Base::mix(saved, tile.item, tile.head), rows, tile.first, tile.count, own,
                        &hook);
  });
}

// Gradients of summaries and, through the mix, of surrogates.
template <class T>
void CastBackward<T>::mix_to_clusters(const CastSaved<T>& saved, const TensorView& grad_out) {
  const auto length = [&](std::int64_t, std::int64_t, std::int64_t) { return clusters; };
  const std::vector<RowTile> row_list = list_tiles({call.num_items(), call.H}, kKeyTile, length);
  for_tiles(row_list, this->lists.tiles, [&](const RowTile& tile, Tiles<T>& own) {
    std::fill_n(own.dk, tile.count * own.key_row, T(0));
    std::fill_n(own.dv, tile.count * own.value_row, T(0));
    const TileHook<T> hook = own_clusters(tile.item, tile.head);
    backward_key_tile(Base::mix(saved, tile.item, tile.head),
                      mix_rows(saved, grad_out, tile.item, tile.head), tile.first, tile.count, own,
                      &hook);
    const std::int64_t number = block(tile.item, tile.head) * clusters + tile.first;
    kernels<T>().store(memory_rows(dsurrogate, call.Dk), number, tile.count, T(1), own.dk,
                       own.key_row);
    kernels<T>().store(memory_rows(dsummary, call.Dv), number, tile.count, T(1), own.dv,
                       own.value_row);
  });
}

// Adds the gradients of keys [first, first + count) of a summary to own.dk and own.dv, and writes
// their gates' gradients: with k' = psi(-phi) k, dk = psi(-phi) dk', dphi = -sigmoid(-phi) k . dk'.
template <class T>
void CastBackward<T>::outer_to_slots(const Segment<T>& outer, const RowGradients<T>& rows,
                                     const Cluster& at, std::int64_t first, std::int64_t count,
                                     Tiles<T>& own) {
  backward_key_tile(outer, rows, first, count, own);
  if (!params.gate_scale) return;
  const Kernels<T>& kernel = kernels<T>();
  const Span& span = call.item(at.item).k;
  const T* gate = gate_at<T>(call, span);
  kernel.load(list_rows(call.k, span, call.key_head(at.head), at.list), first, count, T(1), own.k,
              own.key_row);
  for (std::int64_t r = 0; r < count; ++r) {
    T* dk = own.dk + r * own.key_row;
    const T phi = gate[at.list.row(first + r)];
    dgate_slots[at.slot + first + r] =
        -sigmoid(-phi) * kernel.row_dot(dk, own.k + r * own.key_row, own.key_row);
    kernel.row_scale(dk, own.key_row, gate_factor(-phi));
  }
}

// Backward through the summaries and the attention inside clusters, into the slots.
template <class T>
void CastBackward<T>::clusters_to_slots(const CastSaved<T>& saved, const TensorView& grad_out) {
  const Kernels<T>& kernel = kernels<T>();
  for_clusters(saved, [&](const Cluster& at, Tiles<T>& own) {
    const Segment<T> inner = Base::inner(at.item, at.head, at.list);
    const Segment<T> outer = Base::outer(at.item, at.head, at.cluster, at.list);
    T* dout = dsummary + at.number * call.Dv;
    T dot = 0;
    for (std::int64_t d = 0; d < call.Dv; ++d)
      dot += dout[d] * saved.summary[at.number * call.Dv + d];
    RowGradients<T> outer_gradient;
    outer_gradient.gradient = memory_rows(dout, call.Dv);
    if (saved.summary_lse) outer_gradient.lse = saved.summary_lse + at.number;
    outer_gradient.delta = &dot;
    backward_query_tile(outer, outer_gradient, 0, 1, own);
    for (std::int64_t d = 0; d < call.Dk; ++d) dsurrogate[at.number * call.Dk + d] += own.dq[d];

    RowGradients<T> rows = inner_rows(saved, grad_out, at);
    rows.weight = weight + at.slot;
    rows.delta = weighted_dot + at.slot;
    for (std::int64_t first = 0; first < at.list.count; first += kQueryTile) {
      const std::int64_t count = std::min(kQueryTile, at.list.count - first);
      backward_query_tile(inner, rows, first, count, own);
      kernel.store(memory_rows(dq_slots, call.Dk), at.slot + first, count, T(1), own.dq,
                   own.key_row);
    }
    for (std::int64_t first = 0; first < at.list.count; first += kKeyTile) {
      const std::int64_t count = std::min(kKeyTile, at.list.count - first);
      std::fill_n(own.dk, kKeyTile * own.key_row, T(0));
      std::fill_n(own.dv, kKeyTile * own.value_row, T(0));
      outer_to_slots(outer, outer_gradient, at, first, count, own);
      backward_key_tile(inner, rows, first, count, own);
      kernel.store(memory_rows(dk_slots, call.Dk), at.slot + first, count, T(1), own.dk,
                   own.key_row);
      kernel.store(memory_rows(dv_slots, call.Dv), at.slot + first, count, T(1), own.dv,
                   own.value_row);
    }
  });
}

// dq = psi(phi) dq' + the slots, with q' = psi(phi) q; dphi = sigmoid(phi) q . dq'.
template <class T>
void CastBackward<T>::mix_to_tokens(const CastSaved<T>& saved, const TensorView& grad_out,
                                    const TensorView& dq) {
  const Kernels<T>& kernel = kernels<T>();
  if (dq.present()) fill_padding(dq, query_spans(call), 0);
  const std::vector<RowTile> row_list = span_tiles(query_spans(call), call.H);
  for_tiles(row_list, this->lists.tiles, [&](const RowTile& tile, Tiles<T>& own) {
    const Span& span = call.item(tile.item).q;
    const T* gate = gate_at<T>(call, span) + tile.first;
    const TileHook<T> hook = own_clusters(tile.item, tile.head);
    backward_query_tile(Base::mix(saved, tile.item, tile.head),
                        mix_rows(saved, grad_out, tile.item, tile.head), tile.first, tile.count,
                        own, &hook);
    if (params.gate_scale) {
      T* dgate = dgate_rows + (span.batch * call.H + tile.head) * call.N + span.begin + tile.first;
      kernel.load(span_rows(call.inputs.q, span, tile.head), tile.first, tile.count, T(1), own.k,
                  own.key_row);
      for (std::int64_t r = 0; r < tile.count; ++r) {
        T* row = own.dq + r * own.key_row;
        dgate[r] = sigmoid(gate[r]) * kernel.row_dot(row, own.k + r * own.key_row, own.key_row);
        kernel.row_scale(row, own.key_row, gate_factor(gate[r]));
      }
    }
    if (!dq.present()) return;
    add_slots<T>({&index, dq_slots, call.Dk, call.H}, tile, own.dq, own.key_row);
    kernel.store(span_rows(dq, span, tile.head), tile.first, tile.count, T(1), own.dq, own.key_row);
  });
}

template <class T>
void CastBackward<T>::fold_gate(const TensorView& dgate) {
  std::fill_n(static_cast<T*>(dgate.data), dgate.count(), T(0));
  if (!params.gate_scale) return;  // the gate only affects the selection
  for_tiles(span_tiles(query_spans(call), 1), [&](const RowTile& tile, int) {
    const Span& span = call.item(tile.item).q;
    const std::int64_t first = span.begin + tile.first;
    T* sums = static_cast<T*>(dgate.data) + span.batch * call.N + first;
    for (std::int64_t head = 0; head < call.H; ++head) {
      const T* rows = dgate_rows + (span.batch * call.H + head) * call.N + first;
      for (std::int64_t r = 0; r < tile.count; ++r) sums[r] += rows[r];
    }
    add_slots<T>({&index, dgate_slots, 1, 1}, tile, sums, 1);
  });
}

template <class T>
void CastBackward<T>::fold_surrogates(const TensorView& dcentroids) {
  const std::int64_t per_item = call.H * clusters * call.Dk;
  T* sums = static_cast<T*>(dcentroids.data);
  parallel_for(call.H * clusters, [&](std::int64_t row, int) {
    for (std::int64_t d = row * call.Dk; d < (row + 1) * call.Dk; ++d) {
      T sum = 0;
      for (std::int64_t item = 0; item < call.num_items(); ++item)
        sum += dsurrogate[item * per_item + d];
      sums[d] = sum;
    }
  });
}

template <class T>
void CastBackward<T>::run(const AttentionResult& result, const TensorView& grad_out,
                          const AttentionGradients& gradients) {
  const CastSaved<T> saved(params, result.saved);
  Base::prepare(saved);
  find_inner_dots(saved, grad_out);
  find_weights(saved, grad_out);
  mix_to_clusters(saved, grad_out);
  clusters_to_slots(saved, grad_out);
  if (gradients.dq.present() || gradients.dgate.present())
    mix_to_tokens(saved, grad_out, gradients.dq);
  if (gradients.dk.present())
    write_sums(slot_sums<T>({&index, dk_slots, call.Dk, call.key_heads}), key_spans(call),
               gradients.dk, this->lists.tiles);
  if (gradients.dv.present())
    write_sums(slot_sums<T>({&index, dv_slots, call.Dv, call.value_heads}), key_spans(call),
               gradients.dv, this->lists.tiles);
  if (gradients.dgate.present()) fold_gate(gradients.dgate);
  if (gradients.dcentroids.present()) fold_surrogates(gradients.dcentroids);
}

template struct CastBackward<float>;
template struct CastBackward<double>;

}  // namespace coterie::cpu
