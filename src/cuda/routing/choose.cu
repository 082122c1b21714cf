// SPDX-License-Identifier: MIT
// Members from candidates (candidates_sm90a.cu): the `width` best rows of a centroid, ascending.
// Rounded scores separate most candidates from the cut; those too close to it are scored exactly.
//
// Grid and block: a warp per list, 16 blocks per multiprocessor (__launch_bounds__(32, 16)). A
// histogram bounds the score of the last member, close candidates are cut by bisection, and one bit
// per row gives every member its rank. Shared memory: ChooseSizes, about 12 KB for a width of 256
// and 64k rows. Preconditions: bf16 rows with candidates. Lists that are too short, too long or too
// close to the threshold are recorded as undecided and handled by top.cu.
//
// The error of a rounded score is at most e: |y|_2 <= sqrt(Dk) times the rounding error of the
// centroid, plus 1.3 * 2^-11 |y|_2 |m|_2 for rounding y (2^-11), sums on tensor cores and the
// rounding of the exact score, for rows whose mean is at most 64 times their deviation.
#include "cuda/launch/dispatch.h"
#include "cuda/launch/launch.h"
#include "cuda/prim/dependent.cuh"
#include "cuda/prim/warp.cuh"
#include "cuda/routing/top.cuh"

namespace coterie::cuda {
namespace {

using ChooseElement = Bf16;

constexpr int kChooseThreads = 32;  // per block and list: a warp needs no barriers
constexpr int kChooseBins = 512;
constexpr int kChooseRows = 64 * 1024;  // rows that are sorted at a time, one bit each

struct ChooseSizes {
  int capacity, width;
  int vectors;  // of 128 rows, a bit each

  // Maximum close candidates; lists with more stay undecided.
  __host__ __device__ int close() const { return 256 + capacity / 8; }
  __host__ __device__ int first_bytes() const { return max(capacity * 8, vectors * 18) + 15 & ~15; }
  __host__ __device__ int second_bytes() const { return max(close() * 8, kChooseBins * 4); }
  std::size_t bytes() const {
    return static_cast<std::size_t>(first_bytes() + second_bytes() + width * 4);
  }
};

// Shared memory of a block, for lists of up to `capacity` candidates.
struct ChooseMemory {
  // Scores, less the threshold, and rows of all candidates; then a bit for every row, and the
  // number of bits set before each 128.
  float* score;
  std::int32_t* row;
  uint4* bits;
  std::uint16_t* before;
  // Bins of the scores, then keys of close candidates.
  int* bins;
  CandidateKey* keys;
  std::int32_t* chosen;  // [width]
  int vectors, close;

  __device__ ChooseMemory(unsigned char* memory, const ChooseSizes& sizes)
      : score(reinterpret_cast<float*>(memory)),
        row(reinterpret_cast<std::int32_t*>(score + sizes.capacity)),
        bits(reinterpret_cast<uint4*>(memory)),
        before(reinterpret_cast<std::uint16_t*>(bits + sizes.vectors)),
        bins(reinterpret_cast<int*>(memory + sizes.first_bytes())),
        keys(reinterpret_cast<CandidateKey*>(bins)),
        chosen(
            reinterpret_cast<std::int32_t*>(memory + sizes.first_bytes() + sizes.second_bytes())),
        vectors(sizes.vectors),
        close(sizes.close()) {}
};

// Error of the rounded scores of a list, times the centroid's scale.
template <int kWidth>
__device__ float rounded_error(const ExactScores<ChooseElement, kWidth>& scores) {
  using Lanes = RowLanes<ChooseElement, kWidth>;
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

struct ChooseBounds {
  float low, high;  // of the `wanted`-th largest score
};

// From a histogram of the scores, all in [0, most].
__device__ inline ChooseBounds find_bounds(const ChooseMemory& memory, int count, int wanted,
                                           float most) {
  constexpr int kEach = kChooseBins / kChooseThreads;
  const int lane = static_cast<int>(threadIdx.x);
  const float factor = most > 0.0f ? static_cast<float>(kChooseBins) / most : 0.0f;
#pragma unroll
  for (int i = 0; i < kEach / 4; ++i)
    reinterpret_cast<uint4*>(memory.bins)[i * kChooseThreads + lane] = make_uint4(0, 0, 0, 0);
  __syncwarp();
#pragma unroll 4
  for (int i = lane; i < count; i += kChooseThreads)
    atomicAdd(&memory.bins[kChooseBins - 1 -
                           min(static_cast<int>(memory.score[i] * factor), kChooseBins - 1)],
              1);
  __syncwarp();
  int each[kEach], sum = 0;  // largest scores first
#pragma unroll
  for (int i = 0; i < kEach; ++i) sum += each[i] = memory.bins[lane * kEach + i];
  int before = warp_inclusive_scan(sum) - sum, found = 0;
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    if (before < wanted && before + each[i] >= wanted) found = kChooseBins - 1 - (lane * kEach + i);
    before += each[i];
  }
  found = __reduce_max_sync(~0u, found);  // one lane has it
  __syncwarp();
  const float width = most / static_cast<float>(kChooseBins), bin = static_cast<float>(found);
  return {bin * width * (1.0f - 0x1p-20f), (bin + 1.0f) * width * (1.0f + 0x1p-20f)};
}

// Writes `count` distinct rows in ascending order: one bit per row, chunk by chunk; the rank of a
// row is the number of bits before it.
__device__ inline void write_ascending(const ChooseMemory& memory, int count, int rows,
                                       std::int32_t* members) {
  const int lane = static_cast<int>(threadIdx.x);
  auto* words = reinterpret_cast<std::uint32_t*>(memory.bits);
  int place = 0;
#pragma unroll 1
  for (int first = 0; first < rows; first += kChooseRows) {
    __syncwarp();
#pragma unroll 2
    for (int i = lane; i < memory.vectors; i += kChooseThreads)
      memory.bits[i] = make_uint4(0, 0, 0, 0);
    __syncwarp();
#pragma unroll 1
    for (int i = lane; i < count; i += kChooseThreads) {
      const int row = memory.chosen[i] - first;
      if (row >= 0 && row < kChooseRows) atomicOr(&words[row / 32], 1u << row % 32);
    }
    __syncwarp();
#pragma unroll 1
    for (int base = 0; base < memory.vectors; base += kChooseThreads) {
      const int i = base + lane;
      const uint4 four = i < memory.vectors ? memory.bits[i] : make_uint4(0, 0, 0, 0);
      const int mine = __popc(four.x) + __popc(four.y) + __popc(four.z) + __popc(four.w);
      const int behind = place + warp_inclusive_scan(mine);
      if (i < memory.vectors) memory.before[i] = static_cast<std::uint16_t>(behind - mine);
      place = __shfl_sync(~0u, behind, 31);
    }
    __syncwarp();
#pragma unroll 1
    for (int i = lane; i < count; i += kChooseThreads) {
      const int row = memory.chosen[i] - first;
      if (row < 0 || row >= kChooseRows) continue;
      const uint4 four = memory.bits[row / 128];
      // Bits before the row's own, in its word and in those before it.
      const int word = row % 128 / 32;
      const std::uint32_t own = word < 2    ? (word == 0 ? four.x : four.y)
                                : word == 2 ? four.z
                                            : four.w;
      int rank = memory.before[row / 128] + __popc(own & ((1u << row % 32) - 1));
      rank += word > 0 ? __popc(four.x) : 0;
      rank += word > 1 ? __popc(four.y) : 0;
      rank += word > 2 ? __popc(four.z) : 0;
      members[rank] = first + row;
    }
  }
}

// Concatenates the parts of a list; returns the number of rows, or -1 if a part has more than it
// stores.
__device__ __forceinline__ int gather_candidates(const CandidateLists& lists, std::int64_t number,
                                                 const ChooseMemory& memory, float& most) {
  const int lane = static_cast<int>(threadIdx.x);
  const int count = lane < lists.parts ? lists.count[number * lists.parts + lane] : 0;
  if (__any_sync(~0u, count > lists.capacity)) return -1;
  const int behind = warp_inclusive_scan(count);  // the end of part `lane`
  // Entries of a part are stored while those of the next one are in flight.
  constexpr int kAhead = 6;
  uint2 entry[2][kAhead];
  const auto part_of = [&](int part) {
    return lists.entries + (number * lists.parts + part) * lists.capacity;
  };
  const auto load = [&](int part, uint2(&to)[kAhead]) {
    const uint2* from = part_of(part);
    const int own = __shfl_sync(~0u, count, part);
#pragma unroll
    for (int j = 0; j < kAhead; ++j)
      if (lane + kChooseThreads * j < own) to[j] = from[lane + kChooseThreads * j];
  };
  const auto store = [&](int part, const uint2(&from)[kAhead]) {
    const int own = __shfl_sync(~0u, count, part), first = __shfl_sync(~0u, behind, part) - own;
    const auto put = [&](int i, const uint2& one) {
      memory.score[first + i] = __uint_as_float(one.x);
      memory.row[first + i] = static_cast<std::int32_t>(one.y);
      most = fmaxf(most, __uint_as_float(one.x));
    };
#pragma unroll
    for (int j = 0; j < kAhead; ++j)
      if (lane + kChooseThreads * j < own) put(lane + kChooseThreads * j, from[j]);
#pragma unroll 1
    for (int i = lane + kChooseThreads * kAhead; i < own; i += kChooseThreads)
      put(i, part_of(part)[i]);
  };
  load(0, entry[0]);
#pragma unroll 1
  for (int part = 0; part < lists.parts; part += 2) {
    const bool two = part + 1 < lists.parts;
    if (two) load(part + 1, entry[1]);
    store(part, entry[0]);
    if (part + 2 < lists.parts) load(part + 2, entry[0]);
    if (two) store(part + 1, entry[1]);
  }
  return __shfl_sync(~0u, behind, 31);
}

// Candidates above the bounds are chosen; the rows of those between the bounds go to the keys.
// Returns the number of both.
__device__ __forceinline__ int2 split_candidates(const ChooseMemory& memory, int count, float low,
                                                 float high) {
  const int lane = static_cast<int>(threadIdx.x);
  const unsigned before = (1u << lane) - 1;
  int2 places = {0, 0};
#pragma unroll 1
  for (int base = 0; base < count; base += kChooseThreads) {
    const int i = base + lane;
    const float score = i < count ? memory.score[i] : -1.0f;
    const unsigned in = __ballot_sync(~0u, score > high);
    const unsigned near = __ballot_sync(~0u, score >= low) & ~in;
    if (in >> lane & 1) memory.chosen[places.x + __popc(in & before)] = memory.row[i];
    const int place = places.y + __popc(near & before);
    if ((near >> lane & 1) && place < memory.close)
      memory.keys[place] = static_cast<CandidateKey>(memory.row[i]);
    places.x += __popc(in);
    places.y += __popc(near);
  }
  __syncwarp();
  return places;
}

// The best `wanted` of `total` close candidates, by their exact scores.
template <int kWidth>
__device__ __forceinline__ void choose_close(const ExactScores<ChooseElement, kWidth>& scores,
                                             const ChooseMemory& memory, int total, int wanted,
                                             std::int32_t* chosen) {
  const int lane = static_cast<int>(threadIdx.x);
  CandidateKey* keys = memory.keys;
  scores.template compute<kChooseThreads, 8>(
      total, [&](int i) { return static_cast<int>(keys[i]); },
      [&](int i, int row, float score) { keys[i] = candidate_key(score, row); });
  __syncwarp();
  CandidateKey cut = 0;
  if (total > wanted)
    cut = find_cut(
        [&](const auto& visit) {
#pragma unroll 2
          for (int i = lane; i < total; i += kChooseThreads) visit(keys[i]);
        },
        wanted, wanted);
  int place = 0;
#pragma unroll 1
  for (int base = 0; base < total; base += kChooseThreads) {
    const CandidateKey key = base + lane < total ? keys[base + lane] : 0;
    const bool in = base + lane < total && key >= cut;
    const unsigned votes = __ballot_sync(~0u, in);
    if (in) chosen[place + __popc(votes & ((1u << lane) - 1))] = index_of(key);
    place += __popc(votes);
  }
  __syncwarp();
}

// Returns whether the candidates decide a list; if so, its members are written.
template <int kWidth>
__device__ bool choose(const TopArgs<ChooseElement>& args, const TopList<ChooseElement>& list,
                       const ChooseMemory& memory) {
  const int wanted = list.wanted;
  const ExactScores<ChooseElement, kWidth> scores(list, args.centroids.pitch);
  float most = 0.0f;
  const int count = gather_candidates(list.side.candidates, list.number, memory, most);
  if (count < wanted) return false;
  const float error = rounded_error<kWidth>(scores);
  most = __uint_as_float(__reduce_max_sync(~0u, __float_as_uint(most)));  // not negative
  __syncwarp();
  const ChooseBounds bounds = find_bounds(memory, count, wanted, most);
  const float low = bounds.low - 2.0f * error, high = bounds.high + 2.0f * error;
  if (!(low > 0.0f)) return false;  // rows below the threshold may be members
  const int2 places = split_candidates(memory, count, low, high);
  if (places.y > memory.close) return false;
  choose_close<kWidth>(scores, memory, places.y, wanted - places.x, memory.chosen + places.x);
  write_ascending(memory, wanted, list.span.length, list.members);
  return true;
}

// One block of one warp per list.
template <int kWidth>
__global__ void __launch_bounds__(kChooseThreads, 16)
    choose_kernel(const __grid_constant__ TopArgs<ChooseElement> args, const ChooseSizes sizes) {
  await_previous();
  extern __shared__ __align__(16) unsigned char shared[];
  const TopList<ChooseElement> list(args, static_cast<int>(blockIdx.x));
  if (list.write_ends()) return;
  const ChooseMemory memory(shared, sizes);
  if (choose<kWidth>(args, list, memory) || threadIdx.x != 0) return;
  const int clusters = list.side.shape.clusters;
  const unsigned problem = blockIdx.x / clusters, cluster = blockIdx.x % clusters;
  unsigned* counts = args.undecided.words.data;
  atomicAdd(counts, 1u);
  args.undecided.clusters[problem * clusters + atomicAdd(counts + 1 + problem, 1u)] =
      static_cast<std::int32_t>(cluster);
}

}  // namespace

void choose_candidates(const AttentionCall& call, const TopArgs<ChooseElement>& args,
                       cudaStream_t stream) {
  ChooseSizes sizes{};
  for (const TopRows<ChooseElement>& side : args.sides) {
    if (side.lists == 0) continue;
    sizes.capacity = max(sizes.capacity, side.candidates.parts * side.candidates.capacity);
    sizes.width = max(sizes.width, side.width);
    sizes.vectors = max(sizes.vectors, (min(side.shape.rows, kChooseRows) + 127) / 128);
  }
  dispatch_head_dim(call.op, call.Dk, [&](auto dim) {
    launch_early("choose_candidates", choose_kernel<decltype(dim)::value>,
                 dim3(static_cast<unsigned>(args.sides[0].lists + args.sides[1].lists)),
                 kChooseThreads, sizes.bytes(), stream, args, sizes);
  });
}

}  // namespace coterie::cuda
