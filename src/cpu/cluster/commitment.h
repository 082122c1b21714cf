// SPDX-License-Identifier: MIT
// Commitment loss of routing: the mean of (y - centroid of its label)^2 over the elements of
// normalised rows y; centroids are constants.
#pragma once

#include <cstdint>
#include <vector>

#include "core/items.h"
#include "cpu/engine/segment.h"

namespace coterie::cpu {

// x (B, H, N, D), centroids (Hc, C, D) contiguous of type T, labels (B, H, N).
struct CommitmentProblem {
  TensorView x, centroids, labels;
  std::vector<Span> spans;
};

// Returns 0 if there are no rows.
template <class T>
T commitment_loss(const CommitmentProblem& problem, std::vector<Tiles<T>>& tiles);

// Adds weight times the gradient to dx.
template <class T>
void commitment_backward(const CommitmentProblem& problem, double weight, const TensorView& dx,
                         std::vector<Tiles<T>>& tiles);

}  // namespace coterie::cpu
