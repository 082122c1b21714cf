// SPDX-License-Identifier: MIT
// Oracle-top attention on the GPU: what its stages hand to each other.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "core/arena.h"
#include "core/call.h"
#include "coterie/inputs.h"

namespace coterie::cuda {

// Keys of one tile when gradients are added up key by key, and the most tiles that a stable sort
// can tell apart.
constexpr int kOracleTileBits = 6;
constexpr std::int64_t kMaxOracleTiles = 16384;

// Every stage launches on `stream` and takes its scratch memory from `arena`; with an arena that
// only counts it launches nothing. `topk` is at most the number of keys.

// top_keys (B, H, N, k): the keys with the largest scores, ascending, -1 beyond the last.
// select.cu
void oracle_select(const AttentionCall& call, std::int64_t topk, const TensorView& top_keys,
                   Arena& arena, cudaStream_t stream);

// dq, dk and dv. backward.cu
struct OracleBackward {
  TensorView top_keys, lse, grad_out;
  AttentionGradients gradients;
};
void oracle_backward(const AttentionCall& call, std::int64_t topk, const OracleBackward& pass,
                     Arena& arena, cudaStream_t stream);

}  // namespace coterie::cuda
