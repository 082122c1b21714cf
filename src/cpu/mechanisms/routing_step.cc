// SPDX-License-Identifier: MIT
#include "cpu/mechanisms/routing_step.h"

#include <algorithm>
#include <cmath>

#include "core/parallel.h"
#include "cpu/engine/rows.h"

namespace coterie::cpu {

namespace {

// The rings of one batch entry and key head.
template <class T>
struct Rings {
  T *k, *v;
  std::int64_t* counts;
  std::int64_t window, Dk, Dv;

  // Slots of cluster c that have keys: the first ones.
  std::int64_t filled(std::int64_t c) const { return std::min(counts[c], window); }

  // Returns the slot that the token gets.
  std::int64_t add(std::int64_t c, const T* key, const T* value) const {
    const std::int64_t slot = c * window + counts[c]++ % window;
    std::copy_n(key, Dk, k + slot * Dk);
    std::copy_n(value, Dv, v + slot * Dv);
    return slot;
  }
};

// The slots that a query sees, which is in those clusters whose offsets differ.
template <class T>
std::vector<std::int64_t> slots_in_sight(const RoutingParams& params, const Rings<T>& rings,
                                         const std::int32_t* offsets, std::int64_t own_slot) {
  std::vector<std::int64_t> slots;
  for (std::int64_t c = 0; c < params.clusters; ++c)
    for (std::int64_t s = 0; offsets[c] < offsets[c + 1] && s < rings.filled(c); ++s)
      slots.push_back(c * params.window + s);
  const auto own = std::find(slots.begin(), slots.end(), own_slot);
  const bool found = own != slots.end();
  const bool others = static_cast<std::int64_t>(slots.size()) > (found ? 1 : 0);
  const bool demoted = params.self == SelfAttention::demote && others;
  if (found && demoted) slots.erase(own);
  if (!found && params.include_self && !demoted) slots.push_back(own_slot);
  return slots;
}

// out = softmax(factor q . k) v over the slots; 0 without any.
template <class T>
void attend_slots(const Rings<T>& rings, const std::vector<std::int64_t>& slots, const T* q,
                  T factor, T* out) {
  std::vector<T> weights;
  T largest = 0;
  for (const std::int64_t slot : slots) {
    const T* key = rings.k + slot * rings.Dk;
    T product = 0;
    for (std::int64_t d = 0; d < rings.Dk; ++d) product += q[d] * key[d];
    weights.push_back(product * factor);
    if (weights.size() == 1 || weights.back() > largest) largest = weights.back();
  }
  T sum = 0;
  for (T& weight : weights) sum += weight = std::exp(weight - largest);
  for (std::size_t i = 0; i < slots.size(); ++i) {
    const T* value = rings.v + slots[i] * rings.Dv;
    for (std::int64_t d = 0; d < rings.Dv; ++d) out[d] += weights[i] / sum * value[d];
  }
}

}  // namespace

template <class T>
void routing_step(const RoutingParams& params, const AttentionCall& call,
                  const std::vector<TensorView>& selection, const RoutingRings& rings,
                  const TensorView& out, RoutingRows<T>& rows) {
  const AttentionCall normalised = rows.normalise(call);
  const RoutingSaved at = saved_positions(params);
  const auto* k_labels = static_cast<const std::int32_t*>(selection[at.k_labels].data);
  const auto* head_scale = static_cast<const T*>(call.inputs.logit_scale.data);
  const std::int64_t sharing = call.H / call.key_heads;
  const std::int64_t of_value = call.key_heads / call.value_heads;
  parallel_for(call.B * call.key_heads, [&](std::int64_t task, int) {
    const std::int64_t b = task / call.key_heads, key_head = task % call.key_heads;
    const Span token{b, 0, 1};
    std::vector<T> row(static_cast<std::size_t>(padded(call.Dv)));
    kernels<T>().load(span_rows(call.inputs.v, token, key_head / of_value), 0, 1, T(1), row.data(),
                      padded(call.Dv));
    const Rings<T> own{block_at<T>(rings.k, b, key_head),
                       block_at<T>(rings.v, b, key_head),
                       block_at<std::int64_t>(rings.counts, b, key_head),
                       params.window,
                       call.Dk,
                       call.Dv};
    const std::int64_t slot =
        own.add(k_labels[task], block_at<const T>(normalised.k, b, key_head), row.data());
    for (std::int64_t h = key_head * sharing; h < (key_head + 1) * sharing; ++h) {
      const auto* offsets = block_at<const std::int32_t>(selection[at.q_offsets], b, h);
      const T factor = static_cast<T>(call.scale) * (head_scale ? head_scale[h] : T(1));
      std::fill(row.begin(), row.end(), T(0));
      attend_slots(own, slots_in_sight(params, own, offsets, slot),
                   block_at<const T>(normalised.inputs.q, b, h), factor, row.data());
      kernels<T>().store(span_rows(out, token, h), 0, 1, T(1), row.data(), padded(call.Dv));
    }
  });
}

#define COTERIE_INSTANTIATE(T)                                                    \
  template void routing_step(const RoutingParams&, const AttentionCall&,          \
                             const std::vector<TensorView>&, const RoutingRings&, \
                             const TensorView&, RoutingRows<T>&);
COTERIE_INSTANTIATE(float)
COTERIE_INSTANTIATE(double)
#undef COTERIE_INSTANTIATE

}  // namespace coterie::cpu
