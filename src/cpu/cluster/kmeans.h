// SPDX-License-Identifier: MIT
// k-means of rows in Euclidean distance (coterie/kmeans.h).
#pragma once

#include <cstdint>
#include <vector>

#include "core/arena.h"
#include "coterie/kmeans.h"
#include "cpu/engine/segment.h"

namespace coterie::cpu {

// Scratch memory for P problems of N rows of D elements and C clusters.
template <class T>
struct KMeansMemory {
  std::vector<Tiles<T>> tiles;
  T* reference;                   // (P, D): near the rows
  T *shifted, *bias;              // (P, C, D), (P, C): of the scores
  T* far;                         // (P, N): distances
  std::int32_t *order, *offsets;  // (P, N), (P, C + 1): rows by label
  std::int32_t* rows;             // (P, C): where centroids start

  KMeansMemory(Arena& arena, const TensorView& x, std::int64_t clusters);
};

// x (1, P, N, D).
template <class T>
void kmeans(const KMeansParams& params, const TensorView& x, const KMeansResult& result,
            KMeansMemory<T>& memory);

}  // namespace coterie::cpu
