// SPDX-License-Identifier: MIT
// Clustered and improved clustered attention on the GPU: what their stages hand to each other.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "core/arena.h"
#include "core/call.h"
#include "coterie/inputs.h"
#include "coterie/params.h"

namespace coterie::cuda {

// The saved tensors by name, in the order of ops/saved.cc. Plain clustered attention has no
// top_keys, mass and lse; the causal form of the improved one only has lse after top_keys. During a
// selection all after top_keys are absent.
struct ClusteredTensors {
  TensorView labels;        // int32 (B, H, N)
  TensorView order;         // int32 (B, H, N)
  TensorView offsets;       // int32 (items, H, C+1)
  TensorView top_keys;      // int32 (items, H, C, k), ascending, -1 beyond the last
  TensorView centroids;     // f32 (items, H, C, Dk)
  TensorView centroid_lse;  // f32 (items, H, C), natural logarithm, scale applied
  TensorView mass;          // f32 (items, H, C)
  TensorView out;           // f32 (items, H, C, Dv): centroid_out, or bottom
  TensorView lse;           // f32 (B, H, N)

  std::int64_t clusters() const { return offsets.size(2) - 1; }
  std::int64_t topk() const { return top_keys.present() ? top_keys.size(3) : 0; }
};

// Sizes that decide how much memory a call takes.
struct ClusteredSizes {
  std::int64_t clusters = 0;
  std::int64_t topk = 0;  // 0 for plain clustered attention; else at most the number of keys
};

// Every stage launches on `stream` and takes its scratch memory from `arena`; with an arena that
// only counts it launches nothing, so that the same function tells how much it needs. `tensors` may
// be empty then.

// Counters of the teams of blocks of the next two stages, which an earlier kernel sets to zero: how
// many they need.
std::int64_t select_arrivals(const AttentionCall& call, const ClusteredSizes& sizes);
std::int64_t centroid_arrivals(const AttentionCall& call, const ClusteredSizes& sizes);

// top_keys from the centroids (f32, (items, H, C, Dk)) and the keys; with `attend` what
// centroid_forward gives besides, where selects_and_attends(). `inputs_ready`: no kernel that may
// still run when the one before this starts writes the inputs. select.cu
bool selects_and_attends(const AttentionCall& call, const ClusteredSizes& sizes);
void centroid_select(const AttentionCall& call, const ClusteredSizes& sizes,
                     const ClusteredTensors& tensors, unsigned* arrivals, Arena& arena,
                     cudaStream_t stream, bool attend = false, bool inputs_ready = false);

// centroid_lse, out and (with top keys) mass from the centroids. centroid.cu
void centroid_forward(const AttentionCall& call, const ClusteredSizes& sizes,
                      const ClusteredTensors& tensors, unsigned* arrivals, Arena& arena,
                      cudaStream_t stream);

// Rows of `out` and lse: attention over the cluster's top keys (causal: those not after the query),
// or the cluster's row. `after_select`: the kernel before is centroid_select with attention.
// topk.cu
void topk_forward(const AttentionCall& call, const ClusteredSizes& sizes,
                  const ClusteredTensors& tensors, const TensorView& out, cudaStream_t stream,
                  bool after_select = false);
void broadcast_forward(const AttentionCall& call, const ClusteredTensors& tensors,
                       const TensorView& out, cudaStream_t stream);

// Gradients of clustered and improved clustered attention. backward.cu
struct ClusteredBackward {
  ClusteredTensors tensors;
  bool mass_grad = true;
  TensorView grad_out;
  AttentionGradients gradients;
};
void clustered_backward(const AttentionCall& call, const ClusteredSizes& sizes,
                        const ClusteredBackward& pass, Arena& arena, cudaStream_t stream);

}  // namespace coterie::cuda
