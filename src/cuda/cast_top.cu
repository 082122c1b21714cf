// SPDX-License-Identifier: MIT
// The best tokens of every cluster of CAST: by score, then lower index. A block per cluster. The
// keys of some tokens give a bound that a few times as many pass as are wanted; those that pass are
// kept in shared memory, where the last of the best is found digit by digit. When too few or too
// many pass, or more are wanted than there is room for, digits are counted over all tokens.
#include "cuda/cast_select.h"
#include "cuda/device/await.cuh"
#include "cuda/launch.h"

namespace coterie::cuda {
namespace {

constexpr int kThreads = 512, kWarps = kThreads / 32;
constexpr int kSample = 2048, kPassing = 2048;
constexpr int kMostWanted = 1024;  // of the quick way

struct TopMemory {
  DigitMemory digits;
  CandidateKey keys[kPassing];  // of the sample, then of what passes
  int chosen[kMostWanted];
  int count;
  int warps[kWarps];
};
static_assert(kSample <= kPassing, "the sample in the same memory");

// Keys of tokens that are not below a bound which all of the `wanted` best pass; -1 if they were
// too few or have no room. Their order is any.
__device__ int find_passing(const ScoreRow& row, int tokens, int wanted, TopMemory& memory) {
  constexpr int kEach = kSample / kThreads, kBatch = 8;  // keys of a thread at a time
  CandidateKey sample[kEach];
  row.keys(
      sample,
      [&](int i) {
        return static_cast<int>((static_cast<std::int64_t>(i) * kThreads + threadIdx.x) * tokens /
                                kSample);
      },
      tokens);
#pragma unroll
  for (int i = 0; i < kEach; ++i) memory.keys[i * kThreads + threadIdx.x] = sample[i];
  if (threadIdx.x == 0) memory.count = 0;
  __syncthreads();
  // In the sample the best are so many on average; four standard deviations and some more.
  const float share = static_cast<float>(wanted) * kSample / static_cast<float>(tokens);
  const int rank = static_cast<int>(share + 4.0f * sqrtf(share) + 4.0f);
  if (rank >= kSample) return -1;
  // The score's leading digits are enough.
  const CandidateKey bound = find_last<kThreads>([&](int i) { return memory.keys[i]; }, kSample,
                                                 rank, memory.digits, 64 - 2 * DigitMemory::kDigit);
  for (int first = threadIdx.x; first < tokens; first += kBatch * kThreads) {
    CandidateKey keys[kBatch];
    row.keys(
        keys, [&](int i) { return first + i * kThreads; }, tokens);
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (keys[i] < bound || keys[i] == 0) continue;
      const int place = atomicAdd(&memory.count, 1);
      if (place < kPassing) memory.keys[place] = keys[i];
    }
  }
  __syncthreads();
  const int count = memory.count;
  return count >= wanted && count <= kPassing ? count : -1;
}

// Writes the `wanted` best of memory.keys[0, count), ascending by token.
__device__ void list_passing(int count, int wanted, TopMemory& memory, std::int32_t* list) {
  CandidateKey last = 0;
  if (count > wanted)
    last = find_last<kThreads>([&](int i) { return memory.keys[i]; }, count, wanted, memory.digits);
  if (threadIdx.x == 0) memory.count = 0;
  __syncthreads();
  for (int i = threadIdx.x; i < count; i += kThreads)
    if (memory.keys[i] >= last)
      memory.chosen[atomicAdd(&memory.count, 1)] = index_of(memory.keys[i]);
  __syncthreads();
  for (int i = threadIdx.x; i < wanted; i += kThreads) {
    const int token = memory.chosen[i];
    int place = 0;
#pragma unroll 16
    for (int j = 0; j < wanted; ++j) place += memory.chosen[j] < token;
    list[place] = token;
  }
}

// Writes the tokens whose keys are not below `last`, ascending.
__device__ void list_tokens(const ScoreRow& row, int tokens, CandidateKey last, TopMemory& memory,
                            std::int32_t* list) {
  constexpr int kEach = 8;  // tokens of a thread at a time
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int written = 0;
  for (int begin = 0; begin < tokens; begin += kThreads * kEach) {
    const int first = begin + warp * 32 * kEach;
    std::uint32_t votes[kEach];
    int count = 0;
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
      const int token = first + 32 * j + lane;
      votes[j] = __ballot_sync(~0u, token < tokens && row.key(token) >= last);
      count += __popc(votes[j]);
    }
    if (lane == 0) memory.warps[warp] = count;
    __syncthreads();
    int place = written;
    for (int w = 0; w < kWarps; ++w) {
      place += w < warp ? memory.warps[w] : 0;
      written += memory.warps[w];
    }
    __syncthreads();
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
      if (votes[j] >> lane & 1u)
        list[place + __popc(votes[j] & ((1u << lane) - 1))] = first + 32 * j + lane;
      place += __popc(votes[j]);
    }
  }
}

__global__ void __launch_bounds__(kThreads)
    top_kernel(const __grid_constant__ CastScores scores, int units, std::int32_t* members) {
  await_previous();
  __shared__ TopMemory memory;
  const CastShape& shape = scores.shape;
  const int item = static_cast<int>(blockIdx.x) / (units * kUnitClusters);
  const int column = static_cast<int>(blockIdx.x) % (units * kUnitClusters);
  const int unit = scores.first_unit + column / kUnitClusters, list_head = unit / scores.blocks;
  const int cluster = unit % scores.blocks * kUnitClusters + column % kUnitClusters;
  if (cluster >= shape.clusters) return;
  const ItemSpan span = shape.tokens.span(item);
  const int tokens = span.length, wanted = shape.width;
  std::int32_t* list =
      members +
      (static_cast<std::int64_t>(item * shape.list_heads + list_head) * shape.clusters + cluster) *
          wanted;
  if (tokens <= wanted) {
    for (int i = threadIdx.x; i < wanted; i += kThreads) list[i] = i < tokens ? i : -1;
    return;
  }
  const ScoreRow row(scores, span, list_head, cluster);
  if (wanted <= kMostWanted) {
    const int passing = tokens > kPassing ? find_passing(row, tokens, wanted, memory) : tokens;
    if (tokens <= kPassing) {
      for (int i = threadIdx.x; i < tokens; i += kThreads) memory.keys[i] = row.key(i);
      __syncthreads();
    }
    if (passing >= 0) return list_passing(passing, wanted, memory, list);
  }
  const CandidateKey last =
      find_last<kThreads>([&](int token) { return row.key(token); }, tokens, wanted, memory.digits);
  list_tokens(row, tokens, last, memory, list);
}

}  // namespace

void cast_top(const CastScores& scores, int units, std::int32_t* members, cudaStream_t stream) {
  launch_early("cast top", top_kernel,
               dim3(static_cast<unsigned>(units * kUnitClusters) *
                    static_cast<unsigned>(scores.shape.items)),
               kThreads, 0, stream, scores, units, members);
}

}  // namespace coterie::cuda
