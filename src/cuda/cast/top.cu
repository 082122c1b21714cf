// SPDX-License-Identifier: MIT
// The best tokens of every cluster of CAST: by score, then lower index.
//
// The scores of a sample of tokens give a bound that a few times the wanted number pass; those that
// pass are kept in shared memory, then in registers, where the last of the best is found by
// counting in bins. If too few or too many pass, or more are wanted than fit, digits are counted
// over all tokens.
//
// Grid: a block of 512 threads per (item, list head, cluster), or of 1024 if every cluster has its
// own multiprocessor; 256 of them search. Shared memory: 2048 keys of 8 bytes, 1024 chosen tokens
// and the bins, 24 KiB. No preconditions.
#include <cstdint>

#include "cuda/cast/select.h"
#include "cuda/launch/launch.h"
#include "cuda/prim/dependent.cuh"
#include "cuda/prim/mbarrier.cuh"
#include "cuda/prim/tile.cuh"

namespace coterie::cuda {
namespace {

// Finds the n-th largest of words held by part of a block's threads, by counting in bins.

// Threads that search, the first of a block. Barriers are faster with few warps.
constexpr int kSearch = 256, kSearchWarps = kSearch / 32;

struct SearchMemory {
  alignas(16) int bins[3][kSearch];
  std::uint32_t least[3][kSearchWarps], most[3][kSearchWarps];
  std::uint64_t barrier;

  __device__ PartBarrier<kSearch> searchers() { return {1, shared_address(&barrier)}; }
  // Called by one thread before the block synchronises.
  __device__ void init() { searchers().init(); }
};

// A search by kSearch threads, each of which holds some of the words. Three buffers alternate: a
// step needs one barrier, and threads still reading its counts may be overtaken by one step.
template <int kEach>
struct WordSearch {
  SearchMemory& memory;
  int turn = 0;

  __device__ int next_turn() const { return turn == 2 ? 0 : turn + 1; }

  // The range of all words; zeros are ignored.
  __device__ void find_range(const std::uint32_t (&words)[kEach], std::uint32_t& low,
                             std::uint32_t& high) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    low = ~0u;
    high = 0;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      low = min(low, words[i] - 1);  // 0 wraps around to the maximum
      high = max(high, words[i]);
    }
    low = __reduce_min_sync(~0u, low);
    high = __reduce_max_sync(~0u, high);
    if (lane == 0) {
      memory.least[turn][warp] = low;
      memory.most[turn][warp] = high;
    }
    memory.bins[turn][threadIdx.x] = 0;
    memory.searchers().sync();
    low = __reduce_min_sync(~0u, memory.least[turn][lane % kSearchWarps]) + 1;
    high = __reduce_max_sync(~0u, memory.most[turn][lane % kSearchWarps]) + 1;
  }

  // Finds the largest word that at least `wanted` of all `count` words are not below, or one that
  // no more than `enough` are not below. Sets `count` to the words not below the result and, if
  // these are more than enough, `above` to those above it.
  __device__ std::uint32_t find(const std::uint32_t (&words)[kEach], int wanted, int enough,
                                int& count, int& above) {
    const int lane = threadIdx.x % 32;
    std::uint32_t low, high;
    find_range(words, low, high);
    above = 0;
    while (high - low > 1 && count > enough) {
      const int shift = max(32 - __clz(high - low - 1) - 8, 0);
#pragma unroll
      for (int i = 0; i < kEach; ++i)
        if (words[i] - low < high - low)
          atomicAdd(&memory.bins[turn][(words[i] - low) >> shift], 1);
      memory.bins[next_turn()][threadIdx.x] = 0;
      memory.searchers().sync();
      // Every warp finds the bin of the last wanted word; a lane has eight bins.
      const int4* own = reinterpret_cast<const int4*>(memory.bins[turn]) + 2 * lane;
      const int4 first = own[0], second = own[1];
      const int sizes[8] = {first.x,  first.y,  first.z,  first.w,
                            second.x, second.y, second.z, second.w};
      int sum = 0;
#pragma unroll
      for (int i = 0; i < 8; ++i) sum += sizes[i];
      int after = sum;
#pragma unroll
      for (int step = 1; step < 32; step *= 2) {
        const int other = __shfl_down_sync(~0u, after, step);
        after += lane + step < 32 ? other : 0;
      }
      after += above;
      const unsigned reached = __ballot_sync(~0u, after >= wanted);
      const int source = 31 - __clz(reached);
      int running = after - sum, bin = 0, beyond = 0;
#pragma unroll
      for (int i = 7; i >= 0; --i) {
        if (running < wanted) {
          bin = 8 * lane + i;
          beyond = running;
          running += sizes[i];
        }
      }
      above = __shfl_sync(~0u, beyond, source);
      count = __shfl_sync(~0u, running, source);
      low += static_cast<std::uint32_t>(__shfl_sync(~0u, bin, source)) << shift;
      high = min(high - low, 1u << shift) + low;
      turn = next_turn();
    }
    turn = next_turn();
    return low;
  }
};

constexpr int kPassing = 2048;     // keys that fit; also the sample size
constexpr int kMostWanted = 1024;  // limit of the fast path

struct TopMemory {
  union {
    DigitMemory digits;
    CandidateKey keys[kPassing];  // of the sample, then of tokens that pass
  };
  alignas(16) int chosen[kMostWanted];
  int count, taken;  // of tokens that pass, of the chosen
  int warps[32];
  CandidateKey found;
  SearchMemory search;
};

// A key that at least `wanted` and at most `enough` of memory.keys[0, count) are not below; these
// are distinct, and at least `wanted`. Called by all threads of a block.
__device__ CandidateKey find_key(int count, int wanted, int enough, TopMemory& memory) {
  if (threadIdx.x < kSearch) {
    constexpr int kEach = kPassing / kSearch;
    std::uint32_t scores[kEach], indices[kEach];
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int place = i * kSearch + static_cast<int>(threadIdx.x);
      const CandidateKey key = place < count ? memory.keys[place] : 0;
      scores[i] = static_cast<std::uint32_t>(key >> 32);
      indices[i] = static_cast<std::uint32_t>(key);
    }
    WordSearch<kEach> search{memory.search};
    int above;
    const std::uint32_t score = search.find(scores, wanted, enough, count, above);
    std::uint32_t index = 0;
    if (count > enough) {  // equal scores
#pragma unroll
      for (int i = 0; i < kEach; ++i)
        if (scores[i] != score) indices[i] = 0;
      const int taken = above;
      count -= taken;
      index = search.find(indices, wanted - taken, enough - taken, count, above);
    }
    if (threadIdx.x == 0) memory.found = static_cast<CandidateKey>(score) << 32 | index;
  }
  __syncthreads();
  return memory.found;
}

// Stores the keys of tokens that pass a bound, which should let all of the `wanted` best pass, in
// memory.keys, in any order; returns their number, or -1 if they are too few or do not fit.
template <int kThreads>
__device__ int find_passing(const ScoreRow& row, int tokens, int wanted, TopMemory& memory) {
  constexpr int kSampled = kPassing / kThreads;  // per thread
  constexpr int kBatch = 16;                     // scores per thread in flight
  const auto sampled = [&](int i) {
    return static_cast<int>((static_cast<std::int64_t>(i) * kThreads + threadIdx.x) * tokens /
                            kPassing);
  };
  float sample[kSampled];
#pragma unroll
  for (int i = 0; i < kSampled; ++i) sample[i] = row.scores[min(sampled(i), tokens - 1)];
#pragma unroll
  for (int i = 0; i < kSampled; ++i)
    memory.keys[i * kThreads + threadIdx.x] = candidate_key(sample[i], sampled(i));
  __syncthreads();
  // Expected number of the best in the sample, plus four standard deviations and a margin.
  const float share = static_cast<float>(wanted) * kPassing / static_cast<float>(tokens);
  const int rank = static_cast<int>(share + 4.0f * sqrtf(share) + 4.0f);
  if (rank >= kPassing) return -1;
  const float bound = score_of(find_key(kPassing, rank, rank + rank / 4, memory));
  // From the end, which was written last and may still be in the cache.
  constexpr int kStep = kBatch * kThreads;
  for (int begin = (tokens - 1) / kStep * kStep; begin >= 0; begin -= kStep) {
    const int first = begin + static_cast<int>(threadIdx.x);
    float scores[kBatch];
    if (begin + kStep <= tokens) {
#pragma unroll
      for (int i = 0; i < kBatch; ++i) scores[i] = row.scores[first + i * kThreads];
    } else {
#pragma unroll
      for (int i = 0; i < kBatch; ++i)
        scores[i] = first + i * kThreads < tokens ? row.scores[first + i * kThreads] : -INFINITY;
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (scores[i] < bound) continue;
      const int place = atomicAdd(&memory.count, 1);
      if (place < kPassing) memory.keys[place] = candidate_key(scores[i], first + i * kThreads);
    }
  }
  __syncthreads();
  const int count = memory.count;
  return count >= wanted && count <= kPassing ? count : -1;
}

// Writes the `wanted` best of memory.keys[0, count), ascending by token.
template <int kThreads>
__device__ void list_best(int count, int wanted, TopMemory& memory, std::int32_t* list) {
  const CandidateKey last = find_key(count, wanted, wanted, memory);
  for (int i = threadIdx.x; i < count; i += kThreads)
    if (memory.keys[i] >= last)
      memory.chosen[atomicAdd(&memory.taken, 1)] = index_of(memory.keys[i]);
  if (threadIdx.x < (4 - wanted % 4) % 4) memory.chosen[wanted + threadIdx.x] = INT32_MAX;
  __syncthreads();
  // Four neighbouring threads find the place of one token, comparing four others at a time.
  constexpr int kTogether = 4;
  const int groups = (wanted + 3) / 4;
  for (int i = threadIdx.x / kTogether; i < wanted; i += kThreads / kTogether) {
    const int token = memory.chosen[i];
    int place = 0;
#pragma unroll 4
    for (int j = threadIdx.x % kTogether; j < groups; j += kTogether) {
      const int4 others = reinterpret_cast<const int4*>(memory.chosen)[j];
      place += (others.x < token) + (others.y < token) + (others.z < token) + (others.w < token);
    }
    const unsigned together = 0xfu << (threadIdx.x & 28u);
    place += __shfl_xor_sync(together, place, 1);
    place += __shfl_xor_sync(together, place, 2);
    if (threadIdx.x % kTogether == 0) list[place] = token;
  }
}

// Writes the tokens whose keys are not below `last`, ascending.
template <int kThreads>
__device__ void list_tokens(const ScoreRow& row, int tokens, CandidateKey last, TopMemory& memory,
                            std::int32_t* list) {
  constexpr int kBatch = 8;  // tokens per thread at a time
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
    if (lane == 0) memory.warps[warp] = count;
    __syncthreads();
    int place = written;
    for (int w = 0; w < kThreads / 32; ++w) {
      place += w < warp ? memory.warps[w] : 0;
      written += memory.warps[w];
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

template <int kThreads>
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
  if (threadIdx.x == 0) {
    memory.count = memory.taken = 0;
    memory.search.init();
  }
  const ScoreRow row(scores, span, list_head, cluster);
  if (wanted <= kMostWanted) {
    const int passing =
        tokens > kPassing ? find_passing<kThreads>(row, tokens, wanted, memory) : tokens;
    if (tokens <= kPassing) {
      for (int i = threadIdx.x; i < tokens; i += kThreads) memory.keys[i] = row.key(i);
      __syncthreads();
    }
    if (passing >= 0) return list_best<kThreads>(passing, wanted, memory, list);
    __syncthreads();  // keys and digits share memory
  }
  const CandidateKey last =
      find_last<kThreads>([&](int token) { return row.key(token); }, tokens, wanted, memory.digits);
  list_tokens<kThreads>(row, tokens, last, memory, list);
}

}  // namespace

void cast_top(const CastScores& scores, int units, std::int32_t* members, cudaStream_t stream) {
  const CastShape& shape = scores.shape;
  const auto launch = [&](auto kernel, int threads) {
    launch_early(
        "cast top", kernel,
        dim3(static_cast<unsigned>(units * kUnitClusters) * static_cast<unsigned>(shape.items)),
        threads, 0, stream, scores, units, members);
  };
  // If every cluster has its own multiprocessor, more threads read its tokens faster.
  if (shape.problems() * shape.clusters <= multiprocessors())
    launch(top_kernel<1024>, 1024);
  else
    launch(top_kernel<512>, 512);
}

}  // namespace coterie::cuda
