// SPDX-License-Identifier: MIT
// The attention of one item and head: the inputs of a mechanism's formulas, and the functions that
// each mechanism provides. Parameters are resolved: none is `automatic`.
#pragma once

#include <functional>
#include <vector>

#include "core/dropout.h"
#include "coterie/mechanism.h"
#include "ref/views.h"

namespace coterie::ref {

template <class T>
struct Problem {
  Matrix<T> q, k;             // valid rows; k is q when queries and keys are shared
  Matrix<std::uint8_t> mask;  // nonzero = may attend; empty = everywhere
  Matrix<T> centroids;        // routing, cast: (C, Dk)
  std::vector<T> gate;        // cast: logits of the tokens
  T scale = 1;
  T logit_scale = 1;  // routing
  bool causal = false;
  std::uint64_t seed = 0;
  Dropout dropout;
  Place place;
  std::vector<TensorView> saved;  // of the whole call

  // Factors that dropout gives to the weight of query i and key j, and to that of cluster c, which
  // its members share.
  T kept(Index i, Index j) const { return factor(dropout.query(place.problem(), i), j); }
  T cluster_kept(Index c, Index j) const { return factor(dropout.cluster(place.problem(), c), j); }
  T factor(DropoutRow row, Index j) const {
    return dropout.drops(row, j) ? T{0} : static_cast<T>(dropout.keep_scale);
  }

  // Position of query i among the keys.
  Index position(Index i) const { return causal ? i + k.rows - q.rows : i; }
};

// Gradients of one problem, with the shapes of its inputs. If queries and keys are shared, dq
// contains both gradients.
template <class T>
struct ProblemGradients {
  Matrix<T> dq, dk, dcentroids;
  std::vector<T> dgate;
  T dlogit_scale = 0;
};

// A mechanism: its weights W (queries x keys) for the selection in problem.saved; the backward pass
// from a gradient of W, added to `gradients`; and the selection, written to problem.saved. CAST
// selects for all heads of an item at once. `shares` tells the weights that the members of a
// cluster share: the cluster of (i, j), or -1; null: there are none. Dropout multiplies W, except
// for CAST, whose weights are sums of both kinds.
template <class T>
struct Formula {
  std::function<Matrix<T>(const Problem<T>& problem)> weights;
  std::function<void(const Problem<T>& problem, const Matrix<T>& dweights,
                     ProblemGradients<T>& gradients)>
      backward;
  std::function<void(const Problem<T>& problem)> select = nullptr;
  std::function<void(const std::vector<Problem<T>>& heads)> select_item = nullptr;
  std::function<Matrix<Index>(const Problem<T>& problem)> shares = nullptr;
  bool drops_itself = false;
};

template <class T>
Formula<T> formula(const FullParams& params);
template <class T>
Formula<T> formula(const LocalParams& params);
template <class T>
Formula<T> formula(const StridedParams& params);
template <class T>
Formula<T> formula(const OracleTopParams& params);
template <class T>
Formula<T> formula(const ClusteredParams& params);
template <class T>
Formula<T> formula(const ImprovedClusteredParams& params);
template <class T>
Formula<T> formula(const LshParams& params);
template <class T>
Formula<T> formula(const RoutingParams& params);
template <class T>
Formula<T> formula(const CastParams& params);

}  // namespace coterie::ref
