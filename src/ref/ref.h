// SPDX-License-Identifier: MIT
// The executable specification: every mechanism in scalar code over dense matrices, one loop nest
// per formula. With T = double it is the oracle of the tests; with T = float it is the naive
// implementation whose error the kernels are measured against.
//
// Every mechanism is linear in the values, out = W v, so it is defined by the weight matrix
// W (queries x keys) of one item and head and by the derivative of W.
#pragma once

#include <cstdint>
#include <vector>

#include "core/clustering.h"
#include "coterie/attention.h"
#include "coterie/kmeans.h"
#include "coterie/routing.h"

namespace coterie::ref {

// Dense row-major tensors with the shapes of the inputs; empty if the mechanism has no such input.
template <class T>
struct Gradients {
  std::vector<T> dq, dk, dv, dcentroids, dgate, dlogit_scale;
};

// Fills the selection tensors (the first SavedLayout::selection_count of `saved`).
template <class T>
void select(const Mechanism& mechanism, const AttentionInputs& inputs,
            const std::vector<TensorView>& saved);

// Weights (B, H, N, S) that the mechanism implies, 0 for keys that are not attended; packed batches
// have B = 1 and weights only inside an item.
template <class T>
std::vector<T> weights(const Mechanism& mechanism, const AttentionInputs& inputs,
                       const std::vector<TensorView>& saved);

// Output (B, H, N, Dv) for the selection in `saved`.
template <class T>
std::vector<T> attend(const Mechanism& mechanism, const AttentionInputs& inputs,
                      const std::vector<TensorView>& saved);

// Gradients of sum(out * grad_out) for the selection in `saved`.
template <class T>
Gradients<T> backward(const Mechanism& mechanism, const AttentionInputs& inputs,
                      const std::vector<TensorView>& saved, const TensorView& grad_out);

// The operations of ops/parts.h and coterie/routing.h with arithmetic in T and the same arguments
// and contracts. Those without T have no floating-point arithmetic.
template <class T>
void isotropic_planes(std::uint64_t seed, bool bias, const TensorView& planes,
                      const TensorView& thresholds);
template <class T>
void key_difference_planes(const AttentionInputs& inputs, const TensorView& planes,
                           const TensorView& thresholds);
template <class T>
void hash_codes(const TensorView& x, const Sequences& sequences, const TensorView& planes,
                const TensorView& thresholds, const TensorView& codes);

void hamming_kmeans(const HammingKMeansParams& params, const TensorView& codes,
                    const Sequences& sequences, const TensorView& labels,
                    const TensorView& centroids);
template <class T>
void cluster_queries(const ClusteringParams& params, const AttentionInputs& inputs,
                     const TensorView& labels);
template <class T>
void nearest_centroid(const TensorView& x, const Sequences& sequences, const TensorView& centroids,
                      const TensorView& bias, const TensorView& labels);
template <class T>
void balanced_assign(const TensorView& x, const Sequences& sequences, const TensorView& centroids,
                     std::int64_t capacity, const TensorView& labels);
template <class T>
void select_top(const TensorView& rows, const TensorView& x, const Sequences& sequences,
                const TensorView& indices);
void group_by_cluster(const TensorView& labels, const Sequences& sequences, const Groups& groups);

template <class T>
void kmeans(const KMeansParams& params, const TensorView& x, const KMeansResult& result);

template <class T>
void spherical_kmeans(const SphericalKMeansParams& params, const TensorView& x,
                      const Sequences& sequences, const TensorView& centroids);
template <class T>
void add_centroid_statistics(const TensorView& x, const Sequences& sequences,
                             const TensorView& labels, const CentroidStatistics& statistics);
template <class T>
void move_centroids(double decay, const CentroidStatistics& statistics, const CentroidState& state);
template <class T>
T commitment_loss(const TensorView& x, const Sequences& sequences, const TensorView& centroids,
                  const TensorView& labels);
template <class T>
void commitment_loss_backward(const TensorView& x, const Sequences& sequences,
                              const TensorView& centroids, const TensorView& labels, double weight,
                              const TensorView& dx);

}  // namespace coterie::ref
