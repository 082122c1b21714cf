// SPDX-License-Identifier: MIT
// Clusters queries by any of the three clusterings (see coterie/mechanism.h).
#pragma once

#include <cstdint>
#include <vector>

#include "core/call.h"
#include "coterie/mechanism.h"
#include "cpu/cluster/hamming.h"
#include "cpu/engine/segment.h"

namespace coterie::cpu {

template <class T>
struct ClusteringWorkspace {
  std::vector<Tiles<T>> tiles;

  // Hamming forms.
  std::uint64_t *codes = nullptr, *code_centroids = nullptr;  // (B,H,N), (items,H,C)
  float *planes = nullptr,
        *thresholds = nullptr;  // (items,Hkv,bits,Dk) or (bits,Dk); (items,H,bits)
  T* mean = nullptr;            // threads x padded(Dk)
  VoteBuffer votes;

  // keys.
  T* covariance = nullptr;                            // (items,Hkv,Dk,padded Dk)
  T *centroids = nullptr, *weighted = nullptr;        // (items,H,C,Dk): mu and Sigma mu
  T* bias = nullptr;                                  // (items,H,C)
  std::int32_t *order = nullptr, *offsets = nullptr;  // (B,H,N), (items,H,C+1)

  ClusteringWorkspace(Arena& arena, const ClusteringParams& params, const AttentionCall& call);
};

// labels (B, H, N) i32, -1 in padding.
template <class T>
void cluster_queries(const ClusteringParams& params, const AttentionCall& call,
                     const TensorView& labels, ClusteringWorkspace<T>& workspace);

}  // namespace coterie::cpu
