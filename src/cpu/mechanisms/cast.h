// SPDX-License-Identifier: MIT
// CAST: surrogate tokens S_c attract clusters of tokens. With the gate logit phi_i of a token and
// psi(x) = 1 + log(1 + e^x) (1 without gate_scale), attention function f, three attentions:
//   inner  token i of cluster c over the cluster's members j:  scale q_i . k_j
//   outer  surrogate c over its members j:                     scale S_c . (psi(-phi_j) k_j)
//   mix    token i over the non-empty clusters c:              scale (psi(phi_i) q_i) . S_c,
//          with values: the inner output if i is in c, otherwise the outer output (a summary)
// A reconstruction of van Engelenhoven et al., "CAST", 2024.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "core/call.h"
#include "coterie/mechanism.h"
#include "cpu/engine/fold.h"
#include "cpu/engine/partition.h"
#include "cpu/kernels/laplace.h"

namespace coterie::cpu {

template <class T>
T sigmoid(T x) {
  return 1 / (1 + std::exp(-x));
}

// 1 + softplus, in a form that does not overflow.
template <class T>
T gate_factor(T x) {
  return 1 + std::max(x, T(0)) + std::log1p(std::exp(-std::abs(x)));
}

// Gate logits of an item.
template <class T>
const T* gate_at(const AttentionCall& call, const Span& span) {
  return static_cast<const T*>(call.inputs.gate.data) + span.batch * call.N + span.begin;
}

// The surrogate tokens of a head.
template <class T>
Rows surrogates(const AttentionCall& call, std::int64_t head) {
  const std::int64_t inner = call.inputs.centroids.size(1) * call.Dk;
  return memory_rows(static_cast<T*>(call.inputs.centroids.data) + head * inner, call.Dk);
}

// The saved tensors; the log-sum-exps are null with laplace.
template <class T>
struct CastSaved {
  TensorView members;        // (items, 1 or H, C, w)
  T* member_lse = nullptr;   // (items, H, C, w)
  T* summary = nullptr;      // (items, H, C, Dv)
  T* summary_lse = nullptr;  // (items, H, C)
  TensorView combine_lse;    // (B, H, N)

  CastSaved(const CastParams& params, const std::vector<TensorView>& saved);
};

// State of both passes. Slots are entries in the member lists of a head: (items, H, C, w).
template <class T>
struct CastPass {
  const CastParams& params;
  const AttentionCall& call;
  std::int64_t clusters, width, slots;
  ListWorkspace<T> lists;
  TensorView gated_q, gated_k;  // psi(phi) q, psi(-phi) k
  SlotIndex index;              // slots of each token

  CastPass(Arena& arena, const CastParams& params, const AttentionCall& call);
  void prepare(const CastSaved<T>& saved);

  Weighting weighting() const {
    const bool softmax = params.activation == CastActivation::softmax;
    return softmax ? Weighting::softmax : Weighting::laplace;
  }
  Tiles<T>& tiles(int worker) { return lists.tiles[static_cast<std::size_t>(worker)]; }
  std::int64_t block(std::int64_t item, std::int64_t head) const { return item * call.H + head; }
  RowList members(const CastSaved<T>& saved, std::int64_t item, std::int64_t head,
                  std::int64_t cluster) const;

  Segment<T> inner(std::int64_t item, std::int64_t head, const RowList& list) const;
  Segment<T> outer(std::int64_t item, std::int64_t head, std::int64_t cluster,
                   const RowList& list) const;
  Segment<T> mix(const CastSaved<T>& saved, std::int64_t item, std::int64_t head) const;

  // Calls visit(cluster, slot) for the clusters of a token that are in `range`.
  template <class Visit>
  void for_own(std::int64_t item, std::int64_t head, std::int64_t token, const Range& range,
               Visit visit) const {
    for (const std::int32_t slot : index.slots_of(item, head, token)) {
      const std::int64_t cluster = slot / width;
      if (cluster >= range.begin && cluster < range.end)
        visit(cluster, block(item, head) * clusters * width + slot);
    }
  }

 private:
  void scale_rows(const TensorView& from, T sign, const TensorView& to);
};

}  // namespace coterie::cpu
