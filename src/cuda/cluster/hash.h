// SPDX-License-Identifier: MIT
// Hash codes of queries on the GPU (see coterie/hash.h).
#pragma once

#include <cuda_runtime.h>
#include <cstdint>

#include "core/arena.h"
#include "core/call.h"
#include "coterie/params.h"
#include "cuda/prim/team.cuh"
#include "cuda/prim/zero.cuh"

namespace coterie::cuda {

// Members are null when the arena only counts, and where a method does not need them.
struct HashBuffers {
  std::uint64_t* codes = nullptr;  // (B, H, N); padding is not written
  float* planes = nullptr;         // (bits, Dk), or (items, Hkv, bits, Dk) for hamming_keys
  float* thresholds = nullptr;     // (bits); hamming only
  float* query_sums = nullptr;     // (items, H, splits, Dk): partial sums; hamming_keys only

  HashBuffers() = default;
  HashBuffers(Arena& arena, const ClusteringParams& params, const AttentionCall& call);
};

// Fills buffers.codes by the planes of params.method, hamming or hamming_keys.
void hash_queries(const ClusteringParams& params, const AttentionCall& call,
                  const HashBuffers& buffers, const ZeroedWords& zeroed, cudaStream_t stream);

}  // namespace coterie::cuda
