// SPDX-License-Identifier: MIT
// Clustered attention with exact near keys on the GPU. A query's near keys are those of its block
// of `near` positions and the two blocks beside it. With c its cluster, T_c the cluster's top keys,
// s the query's logits and z those of the mean,
//   w_j = exp(s_j) if j is near or in T_c, else exp(z_cj)      out = sum w_j v_j / sum w_j
// Near keys are attention over lists, top keys that are not near that of topk.cu. The sum over far
// keys is that of the blocks before the near ones plus that of the blocks after them, and so are
// the sums over the members of a cluster that are far from a block of keys: nothing is subtracted.
#pragma once

#include <cuda_runtime.h>

#include "cuda/clustered/clustered.h"

namespace coterie::cuda {

// Outputs and lse after the selection, from the centroids. near_forward.cu
void attend_near(const ClusteredForward& pass, Arena& arena);

// What the backward pass needs besides the tensors of the call.
struct NearBackward {
  const ClusteredPlan& plan;
  ClusteredTensors tensors;
  TensorView out, grad_out;
  TensorView dq, dk, dv;  // absent ones are not computed
  cudaStream_t stream = nullptr;
};
// near_backward.cu
void near_gradients(const NearBackward& pass, Arena& arena);

// Blocks of positions of a call: longer ones than the sequences change nothing.
inline int near_width(const AttentionCall& call, std::int64_t near) {
  const std::int64_t most = (max(call.N, std::int64_t{1}) + 15) / 16 * 16;
  return static_cast<int>(min(near, most));
}

// Chunks of about `rows` keys, of whole blocks and whole tiles of 64.
inline ItemChunks near_chunks(const AttentionCall& call, int near, int rows) {
  int unit = near;
  while (unit % 64 != 0) unit *= 2;  // near is a multiple of 16
  const int chunk = max((rows + unit / 2) / unit, 1) * unit;
  return row_tiles(sequence_spans(call.inputs.k_sequences, max(call.S, std::int64_t{1})),
                   static_cast<int>(call.num_items()), chunk);
}

}  // namespace coterie::cuda
