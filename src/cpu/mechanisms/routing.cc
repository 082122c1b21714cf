// SPDX-License-Identifier: MIT
#include "cpu/mechanisms/routing.h"

#include <algorithm>

#include "cpu/engine/row_tiles.h"

namespace coterie::cpu {

template <class T>
RoutingRows<T>::RoutingRows(Arena& arena, const RoutingParams& params, const AttentionCall& call)
    : tiles(make_tiles<T>(arena, call.Dk, call.Dv)), q(arena, call.inputs.q) {
  if (!params.shared()) k.emplace(arena, call.k);
}

template <class T>
AttentionCall RoutingRows<T>::normalise(const AttentionCall& call) {
  AttentionCall normalised = call;
  normalise_rows(call.inputs.q, query_spans(call), q, tiles);
  if (k) normalise_rows(call.k, key_spans(call), *k, tiles);
  normalised.inputs.q = q.rows;
  normalised.k = k ? k->rows : q.rows;
  return normalised;
}

RoutingSide query_side(const AttentionCall& normalised) {
  return {normalised.inputs.q, query_spans(normalised), normalised.H};
}

RoutingSide key_side(const AttentionCall& normalised) {
  return {normalised.k, key_spans(normalised), normalised.key_heads};
}

RoutingSaved saved_positions(const RoutingParams& params) {
  const std::size_t keys = params.shared() ? 0 : 1;
  RoutingSaved at{};
  if (params.membership == Membership::nearest) {
    at.k_labels = keys;
    at.q_order = keys + 1;
    at.q_offsets = keys + 2;
    at.k_order = keys + 3;
    at.k_offsets = keys + 4;
    at.lse = keys + 5;
  } else {
    at.k_members = keys;
    at.member_lse = keys + 1;
  }
  return at;
}

namespace {

// Writes the gradients of a tile of input rows to tiles.dq: the sums `own` and, if given, `other`,
// backward through the normalisation. Returns the inner product of `own` with the normalised rows.
template <class T>
double input_gradients(const RowTile& tile, const Span& span, const NormalisedRows<T>& rows,
                       const RowSums<T>& own, const RowSums<T>* other, Tiles<T>& tiles) {
  const Kernels<T>& kernel = kernels<T>();
  kernel.load(span_rows(rows.rows, span, tile.head), tile.first, tile.count, T(1), tiles.q,
              tiles.key_row);
  std::fill_n(tiles.dq, tile.count * tiles.key_row, T(0));
  own(tile, tiles.dq, tiles.key_row);
  double product = 0;
  for (std::int64_t r = 0; r < tile.count; ++r)
    product += static_cast<double>(
        kernel.row_dot(tiles.q + r * tiles.key_row, tiles.dq + r * tiles.key_row, tiles.key_row));
  if (other) (*other)(tile, tiles.dq, tiles.key_row);
  normalise_backward_tile(tiles.q, rows.sigma_at(span, tile.head) + tile.first, tile.count,
                          rows.rows.size(3), tiles.key_row, tiles.dq);
  return product;
}

// dq, and the gradient of the factors: sum over rows of q . dq / factor.
template <class T>
void write_query_gradients(const AttentionCall& call, RoutingRows<T>& rows,
                           const GradientSums<T>& sums, const T* head_scale,
                           const AttentionGradients& gradients) {
  const std::vector<Span> spans = query_spans(call);
  const std::vector<RowTile> tiles = span_tiles(spans, call.H);
  std::vector<double> product(tiles.size());
  if (gradients.dq.present()) fill_padding(gradients.dq, spans, 0);
  for_tiles(tiles, rows.tiles, [&](const RowTile& tile, Tiles<T>& own) {
    const Span& span = spans[static_cast<std::size_t>(tile.item)];
    const bool both = !rows.k && gradients.dq.present();
    product[static_cast<std::size_t>(&tile - tiles.data())] =
        input_gradients(tile, span, rows.q, sums.dq, both ? &sums.dk : nullptr, own);
    if (gradients.dq.present())
      kernels<T>().store(span_rows(gradients.dq, span, tile.head), tile.first, tile.count, T(1),
                         own.dq, own.key_row);
  });
  if (!gradients.dlogit_scale.present()) return;
  std::vector<double> sum(static_cast<std::size_t>(call.H));
  for (std::size_t t = 0; t < tiles.size(); ++t)
    sum[static_cast<std::size_t>(tiles[t].head)] += product[t];
  for (std::int64_t head = 0; head < call.H; ++head)
    static_cast<T*>(gradients.dlogit_scale.data)[head] =
        static_cast<T>(sum[static_cast<std::size_t>(head)] / static_cast<double>(head_scale[head]));
}

}  // namespace

template <class T>
void write_gradients(const AttentionCall& call, RoutingRows<T>& rows, const GradientSums<T>& sums,
                     const T* head_scale, const AttentionGradients& gradients) {
  if (gradients.dq.present() || gradients.dlogit_scale.present())
    write_query_gradients(call, rows, sums, head_scale, gradients);
  const std::vector<Span> spans = key_spans(call);
  if (gradients.dk.present()) {
    fill_padding(gradients.dk, spans, 0);
    const std::vector<RowTile> row_list = span_tiles(spans, call.key_heads);
    for_tiles(row_list, rows.tiles, [&](const RowTile& tile, Tiles<T>& own) {
      const Span& span = spans[static_cast<std::size_t>(tile.item)];
      input_gradients<T>(tile, span, *rows.k, sums.dk, nullptr, own);
      kernels<T>().store(span_rows(gradients.dk, span, tile.head), tile.first, tile.count, T(1),
                         own.dq, own.key_row);
    });
  }
  if (gradients.dv.present()) write_sums(sums.dv, spans, gradients.dv, rows.tiles);
}

#define COTERIE_INSTANTIATE(T)                                                                 \
  template struct RoutingRows<T>;                                                              \
  template void write_gradients(const AttentionCall&, RoutingRows<T>&, const GradientSums<T>&, \
                                const T*, const AttentionGradients&);
COTERIE_INSTANTIATE(float)
COTERIE_INSTANTIATE(double)
#undef COTERIE_INSTANTIATE

}  // namespace coterie::cpu
