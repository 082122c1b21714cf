// SPDX-License-Identifier: MIT
// Members from candidates (routing_candidates_sm90a.cu). Rounded scores tell most candidates apart
// from the cut; those that are too close to it are scored exactly.
//
// A rounded score is off by at most e: |y|_2 <= sqrt(Dk) times what rounding did to the centroid,
// and 1.3 * 2^-11 |y|_2 |m|_2 for rounding y (2^-11), sums on tensor cores and the exact score's
// own rounding, for rows whose mean is at most 64 times their deviation.
#include "cuda/device/await.cuh"
#include "cuda/device/block_scan.cuh"
#include "cuda/device/routing_top.cuh"
#include "cuda/device/warp.cuh"
#include "cuda/launch.h"
#include "cuda/tuning.h"

namespace coterie::cuda {

namespace {

using Element = Bf16;

constexpr int kThreads = 128, kWarps = kThreads / 32;
constexpr int kBins = 1024;
constexpr int kChunkRows = 64 * 1024;  // rows that are sorted at a time, a bit each

struct ChooseSizes {
  int capacity, width;
  int vectors;  // of 128 rows, a bit each; a power of two

  // Of the two parts of memory that are used for several things.
  __host__ __device__ int first_bytes() const {
    return max(max(kBins * 4, (capacity + 1) * 8), vectors * 16);
  }
  __host__ __device__ int second_bytes() const { return max(capacity * 8, vectors * 8); }
  std::size_t bytes() const {
    return static_cast<std::size_t>(first_bytes() + second_bytes() + width * 4);
  }
};

// Shared memory of a block, for lists of up to `capacity` candidates.
struct ChooseMemory {
  // One after the other: bins [kBins] of the scores, keys [capacity] of close candidates, a bit for
  // every row; scores and rows of all candidates, numbers of rows for every word of bits.
  unsigned char *first, *second;
  std::int32_t* row;     // [capacity]
  std::int32_t* chosen;  // [width]
  int vectors;

  __device__ ChooseMemory(unsigned char* memory, const ChooseSizes& sizes)
      : first(memory),
        second(memory + sizes.first_bytes()),
        row(reinterpret_cast<std::int32_t*>(second) + sizes.capacity),
        chosen(reinterpret_cast<std::int32_t*>(second + sizes.second_bytes())),
        vectors(sizes.vectors) {}

  __device__ int* bins() const { return reinterpret_cast<int*>(first); }
  __device__ CandidateKey* keys() const { return reinterpret_cast<CandidateKey*>(first); }
  __device__ uint4* bits() const { return reinterpret_cast<uint4*>(first); }
  // Of all candidates, less the threshold.
  __device__ float* score() const { return reinterpret_cast<float*>(second); }
  // Rows of a thread's words before each of them.
  __device__ std::uint16_t* before() const { return reinterpret_cast<std::uint16_t*>(second); }
};

// The largest `value` of the block; not negative.
__device__ __forceinline__ float block_max(float value) {
  __shared__ unsigned warps[kWarps];
  const unsigned most = __reduce_max_sync(~0u, __float_as_uint(value));
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = most;
  __syncthreads();
  unsigned all = 0;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) all = max(all, warps[w]);
  return __uint_as_float(all);
}

// How far rounded scores of a list are off, times the centroid's scale.
template <int kWidth>
__device__ float score_error(const ExactScores<Element, kWidth>& scores) {
  using Lanes = RowLanes<Element, kWidth>;
  float most = 0.0f;
#pragma unroll
  for (int i = 0; i < Lanes::kVector; ++i) most = fmaxf(most, fabsf(scores.centroid[i]));
#pragma unroll
  for (int step = 1; step < Lanes::kLanes; step *= 2)
    most = fmaxf(most, __shfl_xor_sync(~0u, most, step));
  const float scale = centroid_scale(most);
  typename Lanes::Values scaled, lost;
#pragma unroll
  for (int i = 0; i < Lanes::kVector; ++i) {
    scaled[i] = scores.centroid[i] * scale;
    lost[i] = scaled[i] - to_float(from_float<F16>(scaled[i]));
  }
  const float length = sqrtf(static_cast<float>(scores.rows.width));
  return length * (1.001f * sqrtf(Lanes::dot(lost, lost)) +
                   1.3f * 0x1p-11f * sqrtf(Lanes::dot(scaled, scaled)));
}

struct Bounds {
  float low, high;  // of the `wanted`-th largest score
};

// From a histogram of the scores, all in [0, most].
__device__ Bounds find_bounds(const ChooseMemory& memory, int count, int wanted, float most) {
  __shared__ int found;
  int* bins = memory.bins();
  constexpr int kEach = kBins / kThreads;
  const float factor = most > 0.0f ? static_cast<float>(kBins) / most : 0.0f;
  for (int i = threadIdx.x; i < kBins / 4; i += kThreads)
    reinterpret_cast<uint4*>(bins)[i] = make_uint4(0, 0, 0, 0);
  __syncthreads();
  for (int i = threadIdx.x; i < count; i += kThreads)
    atomicAdd(&bins[kBins - 1 - min(static_cast<int>(memory.score()[i] * factor), kBins - 1)], 1);
  __syncthreads();
  int each[kEach], sum = 0, carry = 0;  // largest scores first
#pragma unroll
  for (int i = 0; i < kEach; ++i) sum += each[i] = bins[static_cast<int>(threadIdx.x) * kEach + i];
  int before = block_exclusive_scan(sum, carry);
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    if (before < wanted && before + each[i] >= wanted)
      found = kBins - 1 - (static_cast<int>(threadIdx.x) * kEach + i);
    before += each[i];
  }
  __syncthreads();
  const float width = most / static_cast<float>(kBins), bin = static_cast<float>(found);
  return {bin * width * (1.0f - 0x1p-20f), (bin + 1.0f) * width * (1.0f + 0x1p-20f)};
}

// Writes `count` distinct rows in ascending order: a bit for each row, chunk by chunk, and every
// row counts those before it.
__device__ void write_ascending(const ChooseMemory& memory, int count, int rows,
                                std::int32_t* members) {
  __shared__ int starts[kThreads];  // rows before the words of a thread
  auto* words = reinterpret_cast<std::uint32_t*>(memory.bits());
  const int thread = static_cast<int>(threadIdx.x);
  const int each = max(memory.vectors / kThreads, 1), each_bits = 31 - __clz(each);
  int place = 0;
  for (int first = 0; first < rows; first += kChunkRows) {
    __syncthreads();
    for (int i = thread; i < memory.vectors; i += kThreads)
      memory.bits()[i] = make_uint4(0, 0, 0, 0);
    __syncthreads();
    for (int i = thread; i < count; i += kThreads) {
      const int row = memory.chosen[i] - first;
      if (row >= 0 && row < kChunkRows) atomicOr(&words[row / 32], 1u << row % 32);
    }
    __syncthreads();
    int mine = 0;
    for (int i = thread * each; i < min((thread + 1) * each, memory.vectors); ++i) {
      const uint4 four = memory.bits()[i];
      const unsigned second = mine + __popc(four.x), third = second + __popc(four.y),
                     fourth = third + __popc(four.z);
      reinterpret_cast<uint2*>(memory.before())[i] =
          make_uint2(mine | second << 16, third | fourth << 16);
      mine = static_cast<int>(fourth) + __popc(four.w);
    }
    starts[thread] = block_exclusive_scan(mine, place);
    __syncthreads();
    for (int i = thread; i < count; i += kThreads) {
      const int row = memory.chosen[i] - first, word = row / 32;
      if (row < 0 || row >= kChunkRows) continue;
      members[starts[word >> (2 + each_bits)] + memory.before()[word] +
              __popc(words[word] & ((1u << row % 32) - 1))] = first + row;
    }
  }
}

// The parts of a list one after the other, by all threads; returns how many rows there are, -1 when
// a part has more than it holds.
__device__ __forceinline__ int gather(const CandidateLists& lists, std::int64_t number,
                                      const ChooseMemory& memory, float& most) {
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int count = lane < lists.parts ? lists.count[number * lists.parts + lane] : 0;
  if (__any_sync(~0u, count > lists.capacity)) return -1;
  const int behind = warp_inclusive_scan(count);            // the end of part `lane`
  const int shares = max(1, kWarps / max(lists.parts, 1));  // warps of a part
  constexpr int kAhead = 4;                                 // entries of a lane on their way
#pragma unroll 1
  for (int unit = warp; unit < lists.parts * shares; unit += kWarps) {
    const int part = unit / shares, own = __shfl_sync(~0u, count, part);
    const int first = __shfl_sync(~0u, behind, part) - own;
    const uint2* entries = lists.entries + (number * lists.parts + part) * lists.capacity;
#pragma unroll 1
    for (int base = unit % shares * 32 + lane; base < own; base += 32 * kAhead * shares) {
      uint2 entry[kAhead];
#pragma unroll
      for (int j = 0; j < kAhead; ++j)
        if (base + 32 * j * shares < own) entry[j] = entries[base + 32 * j * shares];
#pragma unroll
      for (int j = 0; j < kAhead; ++j) {
        const int i = base + 32 * j * shares;
        if (i >= own) continue;
        memory.score()[first + i] = __uint_as_float(entry[j].x);
        memory.row[first + i] = static_cast<std::int32_t>(entry[j].y);
        most = fmaxf(most, __uint_as_float(entry[j].x));
      }
    }
  }
  return __shfl_sync(~0u, behind, 31);
}

// Whether the candidates decide a list; if so its members are written.
template <int kWidth>
__device__ bool choose(const TopArgs<Element>& args, const TopList<Element>& list,
                       const ChooseMemory& memory) {
  __shared__ int places;  // taken so far: members, and << 16 close candidates
  const int wanted = list.wanted;
  float most = 0.0f;  // of this thread's scores
  const int count = gather(list.side.candidates, list.number, memory, most);
  if (count < wanted) return false;
  if (threadIdx.x == 0) places = 0;
  const ExactScores<Element, kWidth> scores(list, args.centroids.pitch);
  const float error = score_error<kWidth>(scores);
  const Bounds bounds = find_bounds(memory, count, wanted, block_max(most));
  const float low = bounds.low - 2.0f * error, high = bounds.high + 2.0f * error;
  if (!(low > 0.0f)) return false;     // rows below the threshold may be members
  CandidateKey* keys = memory.keys();  // of close candidates: first their rows
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const unsigned before = (1u << lane) - 1;
  for (int base = static_cast<int>(threadIdx.x) - lane; base < count; base += kThreads) {
    const int i = base + lane;
    const float score = i < count ? memory.score()[i] : -1.0f;
    const unsigned in = __ballot_sync(~0u, score > high);
    const unsigned near = __ballot_sync(~0u, score >= low) & ~in;
    int place = lane == 0 ? atomicAdd(&places, __popc(in) | __popc(near) << 16) : 0;
    place = __shfl_sync(~0u, place, 0);
    if (in >> lane & 1) memory.chosen[(place & 0xffff) + __popc(in & before)] = memory.row[i];
    if (near >> lane & 1)
      keys[(place >> 16) + __popc(near & before)] = static_cast<CandidateKey>(memory.row[i]);
  }
  __syncthreads();
  const int total = places >> 16, first = places & 0xffff;
  if (threadIdx.x == 0) keys[total] = 0;  // pairs are compared
  scores.template compute<kThreads>(
      total, [&](int i) { return static_cast<int>(keys[i]); },
      [&](int i, int row, float score) { keys[i] = candidate_key(score, row); });
  __syncthreads();
  for (int i = threadIdx.x; i < total; i += kThreads) {
    const CandidateKey key = keys[i];
    int place = first;
#pragma unroll 2
    for (int j = 0; j < total; j += 2) {
      const auto two = reinterpret_cast<const ulonglong2*>(keys)[j / 2];
      count_greater(place, two.x, key);
      count_greater(place, two.y, key);
    }
    if (place < wanted) memory.chosen[place] = index_of(key);
  }
  __syncthreads();
  write_ascending(memory, wanted, list.span.length, list.members);
  return true;
}

// A block per list.
template <int kWidth>
__global__ void __launch_bounds__(kThreads, 8)
    choose_kernel(const __grid_constant__ TopArgs<Element> args, ChooseSizes sizes) {
  await_previous();
  extern __shared__ __align__(16) unsigned char shared[];
  const TopList<Element> list(args, static_cast<int>(blockIdx.x));
  if (list.write_ends()) return;
  const ChooseMemory memory(shared, sizes);
  if (choose<kWidth>(args, list, memory) || threadIdx.x != 0) return;
  const int clusters = list.side.shape.clusters;
  const unsigned problem = blockIdx.x / clusters, cluster = blockIdx.x % clusters;
  unsigned* counts = args.open.words.data;
  atomicAdd(counts, 1u);
  args.open.clusters[problem * clusters + atomicAdd(counts + 1 + problem, 1u)] =
      static_cast<std::int32_t>(cluster);
}

}  // namespace

void choose_candidates(const AttentionCall& call, const TopArgs<Element>& args,
                       cudaStream_t stream) {
  ChooseSizes sizes{0, 0, 1};
  for (const TopRows<Element>& side : args.sides) {
    if (side.lists == 0) continue;
    sizes.capacity = max(sizes.capacity, side.candidates.parts * side.candidates.capacity);
    sizes.width = max(sizes.width, side.width);
    while (sizes.vectors * 128 < min(side.shape.rows, kChunkRows)) sizes.vectors *= 2;
  }
  dispatch_head_dim(call.op, call.Dk, [&](auto dim) {
    launch_early("choose_candidates", choose_kernel<decltype(dim)::value>,
                 dim3(static_cast<unsigned>(args.sides[0].lists + args.sides[1].lists)), kThreads,
                 sizes.bytes(), stream, args, sizes);
  });
}

}  // namespace coterie::cuda
