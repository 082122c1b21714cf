// SPDX-License-Identifier: MIT
#include "cpu/mechanisms/routing_step.h"

#include <algorithm>
#include <limits>

#include "cpu/engine/row_tiles.h"
#include "cpu/engine/rows.h"

namespace coterie::cpu {

namespace {

// The keys of one batch entry and key head: those in the rings, then those of the call, of which
// `order` lists the tokens of cluster c from offsets[c] to offsets[c + 1], ascending.
template <class T>
struct Keys {
  T *ring_k, *ring_v;
  std::int64_t* counts;
  const T *k, *v;
  const std::int32_t *order, *offsets;
  std::int64_t window, Dk, Dv;

  std::int64_t slot(std::int64_t cluster, std::int64_t number) const {
    return cluster * window + number % window;
  }
  const T* key(std::int64_t token) const { return k + token * Dk; }
  const T* value(std::int64_t token) const { return v + token * padded(Dv); }

  // The latest `window` tokens of each cluster stay in the rings.
  void join_rings(std::int64_t clusters) const {
    for (std::int64_t c = 0; c < clusters; ++c) {
      const std::int64_t count = offsets[c + 1] - offsets[c];
      for (std::int64_t i = std::max<std::int64_t>(0, count - window); i < count; ++i) {
        const std::int64_t token = order[offsets[c] + i], to = slot(c, counts[c] + i);
        std::copy_n(key(token), Dk, ring_k + to * Dk);
        std::copy_n(value(token), Dv, ring_v + to * Dv);
      }
      counts[c] += count;
    }
  }
};

// The keys that a query attends to.
template <class T>
struct VisibleKeys {
  std::vector<const T*> keys, values;
  std::vector<T> weights;

  void clear() {
    keys.clear();
    values.clear();
  }
  void add(const T* key, const T* value) {
    keys.push_back(key);
    values.push_back(value);
  }

  // Adds the latest keys of a cluster up to the token, except its own; returns whether that is
  // among them.
  bool add_cluster(const Keys<T>& all, std::int64_t cluster, std::int64_t token) {
    const std::int32_t *run = all.order + all.offsets[cluster],
                       *end = all.order + all.offsets[cluster + 1];
    const std::int64_t here = std::upper_bound(run, end, token) - run, count = all.counts[cluster];
    const std::int64_t newer = std::min(here, all.window);
    const std::int64_t older = std::min(count, all.window - newer);
    for (std::int64_t i = count - older; i < count; ++i) {
      const std::int64_t slot = all.slot(cluster, i);
      add(all.ring_k + slot * all.Dk, all.ring_v + slot * all.Dv);
    }
    const bool own = here > 0 && run[here - 1] == token;
    for (std::int64_t i = here - newer; i < here - (own ? 1 : 0); ++i)
      add(all.key(run[i]), all.value(run[i]));
    return own;
  }

  // out += softmax(factor q . k) v; nothing without keys.
  void attend(const Keys<T>& all, const T* q, T factor, T* out) {
    if (keys.empty()) return;
    const Kernels<T>& kernel = kernels<T>();
    const std::int64_t whole = all.Dk / kColumnPad * kColumnPad;
    weights.assign(static_cast<std::size_t>(padded(static_cast<std::int64_t>(keys.size()))),
                   -std::numeric_limits<T>::infinity());
    for (std::size_t i = 0; i < keys.size(); ++i) {
      T product = kernel.row_dot(q, keys[i], whole);
      for (std::int64_t d = whole; d < all.Dk; ++d) product += q[d] * keys[i][d];
      weights[i] = product * factor;
    }
    const auto columns = static_cast<std::int64_t>(weights.size());
    const T largest = kernel.row_max(weights.data(), columns);
    const T sum = kernel.row_exp(weights.data(), columns, largest);
    for (std::size_t i = 0; i < keys.size(); ++i)
      kernel.row_add(out, values[i], all.Dv, weights[i] / sum);
  }
};

// Finds the clusters of ascending tokens: the runs of queries in which they are next.
class ClusterCursor {
 public:
  ClusterCursor(const std::int32_t* order, const std::int32_t* offsets, std::int64_t clusters,
                std::int64_t first) {
    for (std::int64_t c = 0; c < clusters; ++c) {
      const std::int32_t *run = order + offsets[c], *end = order + offsets[c + 1];
      runs_.push_back({std::lower_bound(run, end, first), end});
    }
  }

  template <class Visit>
  void for_clusters_of(std::int64_t token, Visit visit) {
    for (std::size_t c = 0; c < runs_.size(); ++c)
      if (runs_[c].next != runs_[c].end && *runs_[c].next == token) {
        ++runs_[c].next;
        visit(static_cast<std::int64_t>(c));
      }
  }

 private:
  struct Run {
    const std::int32_t *next, *end;
  };
  std::vector<Run> runs_;
};

template <class T>
void load_values(const AttentionCall& call, T* values) {
  for_tiles(span_tiles(key_spans(call), call.value_heads), [&](const RowTile& tile, int) {
    const Span span{tile.item, 0, call.S};
    const std::int64_t row = (tile.item * call.value_heads + tile.head) * call.S + tile.first;
    kernels<T>().load(span_rows(call.inputs.v, span, tile.head), tile.first, tile.count, T(1),
                      values + row * padded(call.Dv), padded(call.Dv));
  });
}

}  // namespace

template <class T>
RoutingStepBuffers<T>::RoutingStepBuffers(Arena& arena, const RoutingParams& params,
                                          const AttentionCall& call)
    : rows(arena, params, call),
      select(arena, params, call),
      values(arena.take<T>(call.B * call.value_heads * call.S * padded(call.Dv))) {}

template <class T>
void routing_step(const RoutingParams& params, const AttentionCall& call,
                  const std::vector<TensorView>& selection, const RoutingRings& rings,
                  const TensorView& out, RoutingStepBuffers<T>& buffers) {
  const AttentionCall normalised = buffers.rows.normalise(call);
  routing_select(params, normalised, selection, buffers.select, buffers.rows.tiles);
  load_values(call, buffers.values);
  const RoutingSaved at = saved_positions(params);
  const auto keys_of = [&](std::int64_t b, std::int64_t key_head) {
    const std::int64_t value_head = key_head / (call.key_heads / call.value_heads);
    return Keys<T>{block_at<T>(rings.k, b, key_head),
                   block_at<T>(rings.v, b, key_head),
                   block_at<std::int64_t>(rings.counts, b, key_head),
                   block_at<const T>(normalised.k, b, key_head),
                   buffers.values + (b * call.value_heads + value_head) * call.S * padded(call.Dv),
                   block_at<const std::int32_t>(selection[at.k_order], b, key_head),
                   block_at<const std::int32_t>(selection[at.k_offsets], b, key_head),
                   params.window,
                   call.Dk,
                   call.Dv};
  };
  const auto* head_scale = static_cast<const T*>(call.inputs.logit_scale.data);
  for_tiles(span_tiles(query_spans(call), call.H), [&](const RowTile& tile, int) {
    const std::int64_t b = tile.item, h = tile.head;
    const Keys<T> keys = keys_of(b, call.key_head(h));
    const T factor = static_cast<T>(call.scale) * (head_scale ? head_scale[h] : T(1));
    const T* q = block_at<const T>(normalised.inputs.q, b, h);
    const Rows out_rows = span_rows(out, {b, 0, call.N}, h);
    ClusterCursor cursor(block_at<const std::int32_t>(selection[at.q_order], b, h),
                         block_at<const std::int32_t>(selection[at.q_offsets], b, h),
                         params.clusters, tile.first);
    VisibleKeys<T> sight;
    std::vector<T> row(static_cast<std::size_t>(padded(call.Dv)));
    for (std::int64_t token = tile.first; token < tile.first + tile.count; ++token) {
      sight.clear();
      bool own = params.include_self;
      cursor.for_clusters_of(token, [&](std::int64_t c) {
        if (sight.add_cluster(keys, c, token)) own = true;
      });
      const bool demoted = params.self == SelfAttention::demote && !sight.keys.empty();
      if (own && !demoted) sight.add(keys.key(token), keys.value(token));
      std::fill(row.begin(), row.end(), T(0));
      sight.attend(keys, q + token * call.Dk, factor, row.data());
      kernels<T>().store(out_rows, token, 1, T(1), row.data(), padded(call.Dv));
    }
  });
  parallel_for(call.B * call.key_heads, [&](std::int64_t task, int) {
    keys_of(task / call.key_heads, task % call.key_heads).join_rings(params.clusters);
  });
}

#define COTERIE_INSTANTIATE(T)                                                    \
  template struct RoutingStepBuffers<T>;                                          \
  template void routing_step(const RoutingParams&, const AttentionCall&,          \
                             const std::vector<TensorView>&, const RoutingRings&, \
                             const TensorView&, RoutingStepBuffers<T>&);
COTERIE_INSTANTIATE(float)
COTERIE_INSTANTIATE(double)
#undef COTERIE_INSTANTIATE

}  // namespace coterie::cpu
