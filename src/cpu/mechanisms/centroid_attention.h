// SPDX-License-Identifier: MIT
// Attention of cluster means over all keys: the part that clustered and i-clustered share.
#pragma once

#include <cstdint>

#include "cpu/engine/shared.h"

namespace coterie::cpu {

// The saved tensors of centroid attention and the clusters they belong to.
struct CentroidTensors {
  ClusterLists lists;    // keys absent in plain clustered attention
  TensorView centroids;  // (items, H, C, Dk)
  TensorView lse;        // (items, H, C)
  TensorView out;        // (items, H, C, Dv): over all keys, or over those outside the list
  TensorView mass;       // (items, H, C): weight of the listed keys; absent without lists

  std::int64_t clusters() const { return lists.clusters(); }
};

// labels -> order, offsets, per (item, head); -1 in padding.
void group_queries(const AttentionCall& call, const TensorView& labels, const ClusterLists& lists);

// Means of the clusters' queries; 0 for empty clusters.
template <class T>
void cluster_means(const AttentionCall& call, const ClusterLists& lists,
                   const TensorView& centroids, std::vector<Tiles<T>>& tiles);

// Tiles of the clusters of every (item, head).
std::vector<RowTile> centroid_tiles(const AttentionCall& call, std::int64_t clusters);

// The means as queries over all keys of an (item, head); empty clusters see none.
template <class T>
Segment<T> centroid_segment(const AttentionCall& call, const ClusterLists& lists,
                            const TensorView& centroids, std::int64_t item, std::int64_t head);

// lse, out and mass from the centroids.
template <class T>
void centroid_forward(const AttentionCall& call, const CentroidTensors& tensors,
                      std::vector<Tiles<T>>& tiles);

// Intermediate gradients of the backward pass, all (items, H, C, ...).
template <class T>
struct CentroidGradients {
  T* dout = nullptr;   // (.., Dv): sum of the members' output gradients
  T* dmass = nullptr;  // (..): derivative by the mass
  T* delta = nullptr;  // (..): dout . out + mass * dmass
  T* dmean = nullptr;  // (.., Dk): derivative by the mean, divided by the cluster's size

  CentroidGradients(Arena& arena, const AttentionCall& call, std::int64_t clusters);
};

// dout and delta, from grad_out and (with lists) dmass.
template <class T>
void centroid_output_gradients(const AttentionCall& call, const CentroidTensors& tensors,
                               const TensorView& grad_out, CentroidGradients<T>& gradients,
                               std::vector<Tiles<T>>& tiles);

// Divides the gradients of means by the cluster sizes: the gradient of each member.
template <class T>
void share_means(const AttentionCall& call, const ClusterLists& lists, T* dmean);

template <class T>
void centroid_backward_means(const AttentionCall& call, const CentroidTensors& tensors,
                             CentroidGradients<T>& gradients, std::vector<Tiles<T>>& tiles);

// dk and dv (either may be absent) of centroid attention, plus those of the listed keys if slots
// are given. With `means` also computes dmean, with fewer products than centroid_backward_means.
template <class T>
void centroid_backward_keys(const AttentionCall& call, const CentroidTensors& tensors,
                            CentroidGradients<T>& gradients, const KeySlots<T>* slots, bool means,
                            const TensorView& dk, const TensorView& dv,
                            std::vector<Tiles<T>>& tiles);

}  // namespace coterie::cpu
