// SPDX-License-Identifier: MIT
// The backward pass of CAST: the three attentions of cast.h in reverse. Gradients that tokens get
// as members of clusters are kept per slot and summed per token at the end.
#pragma once

#include "coterie/attention.h"
#include "cpu/mechanisms/cast.h"

namespace coterie::cpu {

template <class T>
struct CastBackward : CastPass<T> {
  CastBackward(Arena& arena, const CastParams& params, const AttentionCall& call);
  void run(const AttentionResult& result, const TensorView& grad_out,
           const AttentionGradients& gradients);

 private:
  using Base = CastPass<T>;
  using Base::block;
  using Base::call;
  using Base::clusters;
  using Base::index;
  using Base::params;
  using Base::slots;
  using Base::tiles;
  using Base::width;

  // One cluster of one (item, head).
  struct Cluster {
    std::int64_t item, head, cluster;
    std::int64_t number, slot;  // index in (items, H, C) and (items, H, C, w)
    RowList list;
  };
  Cluster cluster_at(std::int64_t task, const CastSaved<T>& saved) const;
  template <class Body>
  void for_clusters(const CastSaved<T>& saved, Body body);

  RowGradients<T> inner_rows(const CastSaved<T>& saved, const TensorView& grad_out,
                             const Cluster& at) const;
  RowGradients<T> mix_rows(const CastSaved<T>& saved, const TensorView& grad_out, std::int64_t item,
                           std::int64_t head) const;
  TileHook<T> own_clusters(std::int64_t item, std::int64_t head) const;
  T* delta_at(const Span& span, std::int64_t head) const {
    return this->lists.delta + (span.batch * call.H + head) * call.N + span.begin;
  }

  void find_inner_dots(const CastSaved<T>& saved, const TensorView& grad_out);
  void find_weights(const CastSaved<T>& saved, const TensorView& grad_out);
  void mix_to_clusters(const CastSaved<T>& saved, const TensorView& grad_out);
  void clusters_to_slots(const CastSaved<T>& saved, const TensorView& grad_out);
  void outer_to_slots(const Segment<T>& outer, const RowGradients<T>& rows, const Cluster& at,
                      std::int64_t first, std::int64_t count, Tiles<T>& own);
  void mix_to_tokens(const CastSaved<T>& saved, const TensorView& grad_out, const TensorView& dq);
  void fold_gate(const TensorView& dgate);
  void fold_surrogates(const TensorView& dcentroids);

  // Per slot: grad_out . inner output; the token's weight for the cluster (alpha); their product.
  T *inner_dot, *weight, *weighted_dot;
  T *dq_slots, *dk_slots, *dv_slots;
  T* dgate_slots;  // gradient of the token's gate through its key
  T* dgate_rows;   // (B, H, N): through its query
  T* dsummary;     // (items, H, C, Dv)
  T* dsurrogate;   // (items, H, C, Dk)
};

}  // namespace coterie::cpu
