// SPDX-License-Identifier: MIT
// The scores by which CAST's clusters choose their tokens (cpu/mechanisms/cast_select.h),
//   sigmoid(phi) f(A_q) + sigmoid(-phi) f(A_k), f a softmax over the clusters or laplace,
// stored for some of the clusters at a time.
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
  int blocks;         // units of a list head
  int first_unit;     // first stored unit
  int sides;          // 1: scores; 2: affinities by queries, which scores replace, and by keys
  float* affinities;  // (units, sides, kUnitClusters, B, N)

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
  const float* scores;

  __device__ ScoreRow(const CastScores& all, const ItemSpan& span, int list_head, int cluster)
      : scores(all.affinity(list_head * all.blocks + cluster / kUnitClusters, 0,
                            cluster % kUnitClusters) +
               static_cast<std::int64_t>(span.batch) * all.shape.N + span.begin) {}
  __device__ CandidateKey key(int token) const { return candidate_key(scores[token], token); }
};

struct DigitMemory {
  static constexpr int kDigit = 11, kBins = 1 << kDigit;
  int bins[kBins];
  int found, left;
};

// Finds the key that exactly `wanted` of the distinct key(0), ..., key(count - 1) are not below,
// with wanted < count, digit by digit. Called by all threads of a block.
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
// and 16-bit types only. The table has space for the surrogates with the clusters padded.
// scores_sm90a.cu
constexpr int kMostScored = 256;
void cast_scores_sm90a(const CastScores& scores, const AttentionCall& call, int first_head,
                       int heads, void* table, cudaStream_t stream);

// Each cluster takes its `width` best tokens. top.cu
void cast_top(const CastScores& scores, int units, std::int32_t* members, cudaStream_t stream);

// Every token joins one cluster (cpu/cluster/balanced.h). single.cu
struct SingleBuffers {
  std::int32_t *labels, *order;  // (list_heads, B, N)
  std::int32_t* offsets;         // (problems, C + 1)
  std::int32_t* histograms;
  CandidateKey* bars;    // (problems, C): lower keys are rejected
  unsigned* arrivals;    // by team
  std::int32_t* turned;  // (problems, 2): tokens rejected in this round and the next

  SingleBuffers(Arena& arena, const CastShape& shape);
};
void cast_single(const CastScores& scores, int units, const SingleBuffers& buffers,
                 std::int64_t size, std::int32_t* members, cudaStream_t stream);

}  // namespace coterie::cuda
