// SPDX-License-Identifier: MIT
// The best tokens of every cluster of CAST: by score, then lower index. A block per cluster. The
// scores of some tokens give a bound that a few times as many pass as are wanted; those that pass
// are kept in shared memory, then in registers, where the last of the best is found by halving.
// When too few or too many pass, or more are wanted than there is room for, digits are counted over
// all tokens.
#include "cuda/cast_select.h"
#include "cuda/device/await.cuh"
#include "cuda/launch.h"

namespace coterie::cuda {
namespace {

constexpr int kThreads = 1024, kWarps = kThreads / 32;
constexpr int kPassing = 2048, kEach = kPassing / kThreads;  // keys in registers, of a thread
constexpr int kMostWanted = 1024;                            // of the quick way

struct TopMemory {
  union {
    DigitMemory digits;
    CandidateKey keys[kPassing];  // of what passes
  };
  int chosen[kMostWanted];
  int count, taken;  // of what passes, of the chosen
  int warps[2][kWarps];
};

// A key that at least `least` and at most `most` of all threads' keys are not below; `low` has that
// property or has more, `high` fewer. Keys are distinct. By all threads of a block.
__device__ CandidateKey find_key(const CandidateKey (&keys)[kEach], CandidateKey low,
                                 CandidateKey high, int least, int most, TopMemory& memory) {
  for (int turn = 0;; turn ^= 1) {
    const CandidateKey middle = low + (high - low) / 2;
    int count = 0;
#pragma unroll
    for (int i = 0; i < kEach; ++i) count += keys[i] >= middle;
    count = __reduce_add_sync(~0u, count);
    if (threadIdx.x % 32 == 0) memory.warps[turn][threadIdx.x / 32] = count;
    __syncthreads();
    count = __reduce_add_sync(~0u, memory.warps[turn][threadIdx.x % 32]);
    if ((count >= least && count <= most) || middle == low) return middle;
    (count > most ? low : high) = middle;
  }
}
// All scores are below.
__device__ __forceinline__ CandidateKey above_scores() { return candidate_key(INFINITY, 0) + 1; }

// Keys of tokens that are not below a bound which all of the `wanted` best pass, to memory.keys;
// their number, or -1 if they were too few or have no room. Their order is any.
template <bool kScored>
__device__ int find_passing(const ScoreRow& row, int tokens, int wanted, TopMemory& memory) {
  constexpr int kBatch = kScored ? 16 : 4;  // scores of a thread on their way at a time
  const auto sampled = [&](int i) {
    return static_cast<int>((static_cast<std::int64_t>(i) * kThreads + threadIdx.x) * tokens /
                            kPassing);
  };
  float values[kEach];
  row.template scores<kScored>(values, sampled, tokens);
  CandidateKey sample[kEach];
#pragma unroll
  for (int i = 0; i < kEach; ++i) sample[i] = candidate_key(values[i], sampled(i));
  // In the sample the best are so many on average; four standard deviations and some more.
  const float share = static_cast<float>(wanted) * kPassing / static_cast<float>(tokens);
  const int rank = static_cast<int>(share + 4.0f * sqrtf(share) + 4.0f);
  if (rank >= kPassing) return -1;
  const float bound = score_of(find_key(sample, 1, above_scores(), rank, rank + rank / 4, memory));
  for (int first = threadIdx.x; first < tokens; first += kBatch * kThreads) {
    float scores[kBatch];
    row.template scores<kScored>(
        scores, [&](int i) { return first + i * kThreads; }, tokens);
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (scores[i] < bound || first + i * kThreads >= tokens) continue;
      const int place = atomicAdd(&memory.count, 1);
      if (place < kPassing) memory.keys[place] = candidate_key(scores[i], first + i * kThreads);
    }
  }
  __syncthreads();
  const int count = memory.count;
  return count >= wanted && count <= kPassing ? count : -1;
}

// Writes the `wanted` best of all threads' keys, ascending by token; a key of 0 is none.
__device__ void list_best(const CandidateKey (&keys)[kEach], int wanted, TopMemory& memory,
                          std::int32_t* list) {
  const CandidateKey last = find_key(keys, 1, above_scores(), wanted, wanted, memory);
#pragma unroll
  for (int i = 0; i < kEach; ++i)
    if (keys[i] >= last) memory.chosen[atomicAdd(&memory.taken, 1)] = index_of(keys[i]);
  __syncthreads();
  // Pairs of neighbouring threads take the places of one token.
  for (int i = threadIdx.x / 2; i < wanted; i += kThreads / 2) {
    const int token = memory.chosen[i];
    int place = 0;
#pragma unroll 16
    for (int j = threadIdx.x % 2; j < wanted; j += 2) place += memory.chosen[j] < token;
    place += __shfl_xor_sync(3u << (threadIdx.x & 30u), place, 1);
    if (threadIdx.x % 2 == 0) list[place] = token;
  }
}

// Writes the tokens whose keys are not below `last`, ascending.
__device__ void list_tokens(const ScoreRow& row, int tokens, CandidateKey last, TopMemory& memory,
                            std::int32_t* list) {
  constexpr int kBatch = 8;  // tokens of a thread at a time
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int written = 0;
  for (int begin = 0; begin < tokens; begin += kThreads * kBatch) {
    const int first = begin + warp * 32 * kBatch;
    std::uint32_t votes[kBatch];
    int count = 0;
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      const int token = first + 32 * j + lane;
      votes[j] = __ballot_sync(~0u, token < tokens && row.key(token) >= last);
      count += __popc(votes[j]);
    }
    if (lane == 0) memory.warps[0][warp] = count;
    __syncthreads();
    int place = written;
    for (int w = 0; w < kWarps; ++w) {
      place += w < warp ? memory.warps[0][w] : 0;
      written += memory.warps[0][w];
    }
    __syncthreads();
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      if (votes[j] >> lane & 1u)
        list[place + __popc(votes[j] & ((1u << lane) - 1))] = first + 32 * j + lane;
      place += __popc(votes[j]);
    }
  }
}

template <bool kScored>
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
  if (threadIdx.x == 0) memory.count = memory.taken = 0;
  const ScoreRow row(scores, span, list_head, cluster);
  if (wanted <= kMostWanted) {
    const int passing =
        tokens > kPassing ? find_passing<kScored>(row, tokens, wanted, memory) : tokens;
    if (passing >= 0) {
      CandidateKey keys[kEach];
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        const int place = i * kThreads + static_cast<int>(threadIdx.x);
        keys[i] = place >= passing ? 0 : tokens <= kPassing ? row.key(place) : memory.keys[place];
      }
      return list_best(keys, wanted, memory, list);
    }
    __syncthreads();  // the keys' memory is that of the digits
  }
  const CandidateKey last =
      find_last<kThreads>([&](int token) { return row.key(token); }, tokens, wanted, memory.digits);
  list_tokens(row, tokens, last, memory, list);
}

}  // namespace

void cast_top(const CastScores& scores, int units, std::int32_t* members, cudaStream_t stream) {
  launch_early("cast top", scores.norms ? top_kernel<false> : top_kernel<true>,
               dim3(static_cast<unsigned>(units * kUnitClusters) *
                    static_cast<unsigned>(scores.shape.items)),
               kThreads, 0, stream, scores, units, members);
}

}  // namespace coterie::cuda
