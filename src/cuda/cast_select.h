// SPDX-License-Identifier: MIT
// The scores by which CAST's clusters choose their tokens (cpu/cast_select.h), as the selection
// reads them: affinities are stored for some clusters at a time, what makes scores of them is
// stored per token.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/cast.h"
#include "cuda/device/candidates.cuh"
#include "cuda/device/cast.cuh"
#include "cuda/device/group.cuh"

namespace coterie::cuda {

// Clusters of a block of scores. A unit is one such block for one list head and all tokens.
constexpr int kUnitClusters = 128;

struct CastScores {
  CastShape shape;
  int blocks;           // units of a list head
  int first_unit;       // of those that are stored
  float* affinities;    // (units, 2, kUnitClusters, B, N): by queries and by keys
  const float2* norms;  // (list_heads, B, N): see score()

  __device__ std::int64_t rows() const { return static_cast<std::int64_t>(shape.B) * shape.N; }
  __device__ float* affinity(int unit, int side, int column) const {
    return affinities +
           ((static_cast<std::int64_t>(unit - first_unit) * 2 + side) * kUnitClusters + column) *
               rows();
  }
};

// One row of scores: those of a cluster with the tokens of an item.
struct ScoreRow {
  const float *by_q, *by_k;
  const float2* norms;
  bool laplace;

  __device__ ScoreRow(const CastScores& scores, const ItemSpan& span, int list_head, int cluster)
      : laplace(scores.shape.laplace) {
    const int unit = list_head * scores.blocks + cluster / kUnitClusters;
    const std::int64_t first = static_cast<std::int64_t>(span.batch) * scores.shape.N + span.begin;
    by_q = scores.affinity(unit, 0, cluster % kUnitClusters) + first;
    by_k = scores.affinity(unit, 1, cluster % kUnitClusters) + first;
    norms = scores.norms + list_head * scores.rows() + first;
  }
  // sigmoid(phi) f(A_q) + sigmoid(-phi) f(A_k). A softmax is exp(A - norm), with the log-sum-exp
  // and the logarithm of the factor in the norm; for laplace the norms are the factors.
  __device__ float score(int token) const {
    const float2 norm = norms[token];
    const float q = by_q[token], k = by_k[token];
    const float sum =
        laplace ? norm.x * ::coterie::cuda::laplace(q) + norm.y * ::coterie::cuda::laplace(k)
                : expf(q - norm.x) + expf(k - norm.y);
    return isnan(sum) ? -INFINITY : sum;
  }
  __device__ CandidateKey key(int token) const { return candidate_key(score(token), token); }
};

struct DigitMemory {
  static constexpr int kDigit = 11, kBins = 1 << kDigit;
  int bins[kBins];
  int found, left;
};

// By all threads of a block: the key that exactly `wanted` of key(0), ..., key(count - 1) are not
// below; they are distinct, and more than that. Digit by digit.
template <int kThreads, class Key>
__device__ CandidateKey find_last(const Key& key, int count, int wanted, DigitMemory& memory) {
  constexpr int kDigit = DigitMemory::kDigit, kBins = DigitMemory::kBins;
  CandidateKey prefix = 0;
  int left = wanted;
  for (int known = 64;;) {  // lowest bit of the prefix
    const int shift = max(known - kDigit, 0);
    for (int i = threadIdx.x; i < kBins; i += kThreads) memory.bins[i] = 0;
    __syncthreads();
    for (int i = threadIdx.x; i < count; i += kThreads) {
      const CandidateKey own = key(i);
      if (known == 64 || (own ^ prefix) >> known == 0)
        atomicAdd(&memory.bins[own >> shift & (kBins - 1)], 1);
    }
    __syncthreads();
    int carry = 0;
    for (int first = 0; first < kBins; first += kThreads) {
      const int bin = kBins - 1 - first - static_cast<int>(threadIdx.x), size = memory.bins[bin];
      const int before = block_exclusive_scan(size, carry);
      if (before < left && before + size >= left) {
        memory.found = bin;
        memory.left = left - before;
      }
    }
    __syncthreads();
    prefix |= static_cast<CandidateKey>(memory.found) << shift;
    left = memory.left;
    const bool whole = memory.bins[memory.found] == left;
    __syncthreads();
    if (whole || shift == 0) return prefix;
    known = shift;
  }
}

// Each cluster takes its `width` best tokens. cast_top.cu
void cast_top(const CastScores& scores, int units, std::int32_t* members, cudaStream_t stream);

// Every token joins one cluster (cpu/balanced.h). cast_single.cu
struct SingleBuffers {
  std::int32_t *labels, *order;  // (list_heads, B, N)
  std::int32_t* offsets;         // (problems, C + 1)
  std::int32_t* histograms;
  CandidateKey* bars;    // (problems, C): worse keys are turned away
  unsigned* arrivals;    // by team
  std::int32_t* turned;  // (problems, 2): tokens turned away in this round and the next

  SingleBuffers(Arena& arena, const CastShape& shape);
};
void cast_single(const CastScores& scores, int units, const SingleBuffers& buffers,
                 std::int64_t size, std::int32_t* members, cudaStream_t stream);

}  // namespace coterie::cuda
