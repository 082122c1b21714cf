// SPDX-License-Identifier: MIT
// Clustered attention with exact near keys on the GPU. A query's near keys are those of its block
// of `near` positions and the two blocks beside it. With c its cluster, T_c the cluster's top keys,
// s the query's logits and z those of the mean,
//   w_j = exp(s_j) if j is near or in T_c, else exp(z_cj)      out = sum w_j v_j / sum w_j
//
// Far keys are summed in one of two ways. Subtracting: the attention of the mean over all keys
// outside T_c (centroid.cu), minus the mean's weights of the near keys. That is precise as long as
// the mean's sum is not much larger than the query's sum of weights; the forward pass checks it for
// every query. Adding: the blocks before the near ones plus the blocks
// after them (far_forward.cu, far_backward.cu); slower, and precise for all data. Heads of an item
// in which one query fails the check are computed again by adding, and so are short sequences, of
// which near keys are a large part. With dropout all heads add.
#pragma once

#include <cuda_runtime.h>

#include "cuda/clustered/clustered.h"
#include "cuda/launch/device.h"

namespace coterie::cuda {

// Sequences shorter than this many blocks of positions are computed by adding.
constexpr std::int64_t kLeastBlocks = 16;

// Outputs and lse after the selection, from the centroids. near_forward.cu
void attend_near(const ClusteredForward& pass, Arena& arena);

// Scratch memory of far_key_gradients: running sums over the members of clusters that are before or
// after a member, in the sorted order (B, H, N).
struct MemberRuns {
  float2* rows;      // shift (base 2) and the sum of exp2(shift - lse_i) delta_i
  float* gradients;  // (.., pitch): the sum of exp2(shift - lse_i) g_i
};
struct FarMembers {
  MemberRuns before, after;
};

// The first stage of the backward pass: top_bits, delta, near_dmean and the near keys' part of dq,
// to which the later stages add. near_backward.cu, or near_backward_sm90a.cu
template <class T>
void near_query_gradients(const BackwardArgs<T>& args, const CentroidQueries& queries, bool sm90a,
                          cudaStream_t stream);
// After the gradients of the centroids: adds to dk and dv, or writes them for heads that add their
// far keys. Same files.
template <class T>
void near_key_gradients(const BackwardArgs<T>& args, const CentroidQueries& queries, bool sm90a,
                        cudaStream_t stream);
// Before broadcast_gradients: far keys of heads that add. Adds to dk and dv, writes mean_slices.
// far_backward.cu
template <class T>
void far_key_gradients(const BackwardArgs<T>& args, const CentroidQueries& queries,
                       const FarMembers& sums, cudaStream_t stream);

// Blocks, in each of `rows` rows of a grid, of kernels of the heads that add: these walk their
// work, because there usually is none, and blocks that find nothing to do take time as well.
inline int few_blocks(int rows) { return max(8 * multiprocessors() / rows, 1); }

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
