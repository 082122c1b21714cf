// SPDX-License-Identifier: MIT
// The scores by which CAST's clusters choose their tokens (cpu/mechanisms/cast_select.h), as the
// selection reads them: affinities are stored for some clusters at a time, what makes scores of
// them is stored per token.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/cast/cast.cuh"
#include "cuda/cast/stages.h"
#include "cuda/prim/candidates.cuh"
#include "cuda/prim/warp.cuh"

namespace coterie::cuda {

// Clusters of a block of scores. A unit is one such block for one list head and all tokens.
constexpr int kUnitClusters = 128;

struct CastScores {
  CastShape shape;
  int blocks;           // units of a list head
  int first_unit;       // of those that are stored
  int sides;            // 2: affinities by queries and by keys; 1: scores
  float* affinities;    // (units, sides, kUnitClusters, B, N)
  const float2* norms;  // (list_heads, B, N): see score(); null for scores

  __device__ std::int64_t rows() const { return static_cast<std::int64_t>(shape.B) * shape.N; }
  __device__ float* affinity(int unit, int side, int column) const {
    return affinities +
           ((static_cast<std::int64_t>(unit - first_unit) * sides + side) * kUnitClusters +
            column) *
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
    by_k = nullptr;
    norms = nullptr;
    if (scores.sides == 1) return;  // by_q is the score
    by_k = scores.affinity(unit, 1, cluster % kUnitClusters) + first;
    norms = scores.norms + list_head * scores.rows() + first;
  }
  // sigmoid(phi) f(A_q) + sigmoid(-phi) f(A_k). A softmax is exp(A - norm), with the log-sum-exp
  // and the logarithm of the factor in the norm; for laplace the norms are the factors.
  __device__ float score(int token) const {
    return norms ? score(by_q[token], by_k[token], norms[token]) : by_q[token];
  }
  __device__ float score(float q, float k, const float2& norm) const {
    const float sum =
        laplace ? norm.x * ::coterie::cuda::laplace(q) + norm.y * ::coterie::cuda::laplace(k)
                : expf(q - norm.x) + expf(k - norm.y);
    return isnan(sum) ? -INFINITY : sum;
  }
  __device__ CandidateKey key(int token) const { return candidate_key(score(token), token); }
  // Scores of several tokens, which are all fetched before any is used; for those not below `end`
  // the last one's. kScored: there are no norms.
  template <bool kScored, int kCount, class Token>
  __device__ __forceinline__ void scores(float (&q)[kCount], const Token& token, int end) const {
    float k[kCount];
    float2 norm[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const int place = min(token(i), end - 1);
      q[i] = by_q[place];
      if (!kScored) {
        k[i] = by_k[place];
        norm[i] = norms[place];
      }
    }
    if (!kScored)
#pragma unroll
      for (int i = 0; i < kCount; ++i) q[i] = score(q[i], k[i], norm[i]);
  }
};

struct DigitMemory {
  static constexpr int kDigit = 11, kBins = 1 << kDigit;
  int bins[kBins];
  int found, left;
};

// By all threads of a block: the key that exactly `wanted` of key(0), ..., key(count - 1) are not
// below; they are distinct, and more than that. Digit by digit, until one tells all of them apart.
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

// Scores by Hopper's warpgroup products for up to this many clusters and some list heads; softmax
// and 16-bit types only. The table has room for the surrogates with the clusters filled up.
// scores_sm90a.cu
constexpr int kMostScored = 256;
template <class T>
void scores_sm90a(const CastScores& scores, const AttentionCall& call, int first_head, int heads,
                  void* table, cudaStream_t stream);

// Each cluster takes its `width` best tokens. top.cu
void cast_top(const CastScores& scores, int units, std::int32_t* members, cudaStream_t stream);

// Every token joins one cluster (cpu/cluster/balanced.h). single.cu
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
