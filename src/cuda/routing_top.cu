// SPDX-License-Identifier: MIT
// Routing's members: the rows with the largest scores y . centroid = x . centred / sigma of every
// centroid, ties by lower row, listed in ascending order.
#include "cuda/device/await.cuh"
#include "cuda/device/candidates.cuh"
#include "cuda/device/group.cuh"
#include "cuda/device/row_lanes.cuh"
#include "cuda/launch.h"
#include "cuda/routing.h"
#include "cuda/tuning.h"

namespace coterie::cuda {

namespace {

constexpr int kThreads = 256;
constexpr int kBins = 256, kBits = 8;  // of a digit of the radix selection
constexpr int kRoom = 24 * 1024;       // scores that a block keeps

template <class T>
struct TopArgs {
  ClusterShape shape;
  Tensor4<const T> x;
  const RowStatistics* stats;
  CentredCentroids centroids;
  std::int32_t* members;  // (items, heads, C, width)
  int width;
  int room;  // of `scores` below
  CandidateLists candidates;
};

// In the order of the scores; NaN is the last, and -0 is 0.
__device__ __forceinline__ std::uint32_t order_key(float score) {
  return ordered(isnan(score) ? -INFINITY : score + 0.0f);
}

// The scores of one centroid, in shared memory as far as there is room: else made again chunk by
// chunk whenever they are visited.
template <class T, int kWidth>
struct ScoreList {
  using Lanes = RowLanes<T, kWidth>;
  Rows<const T> rows;
  const RowStatistics* stats;
  int length;
  typename Lanes::Values centroid;
  float* scores;
  bool resident;
  const std::int32_t* index = nullptr;  // of the rows; null: all of them

  // scores[i] of rows first + i, i < count. By all threads.
  __device__ void fill(int first, int count) {
    constexpr int kGroups = kThreads / Lanes::kLanes, kRows = 4;  // rows on their way at a time
    for (int base = 0; base < count; base += kGroups * kRows) {
      typename Lanes::Values x[kRows];
      int row[kRows];
#pragma unroll
      for (int j = 0; j < kRows; ++j) {
        const int i = base + j * kGroups + static_cast<int>(threadIdx.x) / Lanes::kLanes;
        row[j] = i < count ? (index ? index[first + i] : first + i) : -1;
        Lanes::load(rows, row[j], row[j] >= 0, x[j]);
      }
#pragma unroll
      for (int j = 0; j < kRows; ++j) {
        const float product = Lanes::dot(x[j], centroid);
        const int i = base + j * kGroups + static_cast<int>(threadIdx.x) / Lanes::kLanes;
        if (row[j] >= 0 && Lanes::column() == 0) scores[i] = product * stats[row[j]].inverse;
      }
    }
  }

  // visit(row, key), key 0 beyond the last row: rows ascend with the threads and from call to call.
  template <class Visit>
  __device__ void for_each(const Visit& visit) {
    for (int first = 0; first < length; first += kThreads) {
      if (!resident) {
        __syncthreads();
        fill(first, min(kThreads, length - first));
        __syncthreads();
      }
      const int i = first + static_cast<int>(threadIdx.x);
      visit(i, i < length ? order_key(scores[resident ? i : i - first]) : 0u);
    }
  }
};

// The digit in which the `rank`-th largest entry of a histogram falls; rank becomes that among the
// entries of the digit. By one warp.
__device__ __forceinline__ int find_digit(const int* bins, int& rank) {
  constexpr int kEach = kBins / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32, top = kBins - 1 - lane * kEach;
  int sum = 0;
#pragma unroll
  for (int i = 0; i < kEach; ++i) sum += bins[top - i];
  int before = sum;  // entries in this lane's digits and above
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int other = __shfl_up_sync(~0u, before, step);
    if (lane >= step) before += other;
  }
  before -= sum;
  const int owner = __ffs(__ballot_sync(~0u, before + sum >= rank)) - 1;
  int digit = 0, left = 0;
  if (lane == owner) {
    left = rank - before;
    for (digit = top; left > bins[digit]; --digit) left -= bins[digit];
  }
  rank = __shfl_sync(~0u, left, owner);
  return __shfl_sync(~0u, digit, owner);
}

// The key of the `rank`-th largest; `rank` becomes the number of rows with that key to take.
template <class Scores>
__device__ std::uint32_t find_key(Scores& scores, int& rank) {
  __shared__ int bins[kBins];
  __shared__ int found[2];
  std::uint32_t prefix = 0, mask = 0;
  for (int shift = 32 - kBits; shift >= 0; shift -= kBits) {
    for (int i = threadIdx.x; i < kBins; i += kThreads) bins[i] = 0;
    __syncthreads();
    scores.for_each([&](int row, std::uint32_t key) {
      if (row < scores.length && (key & mask) == prefix)
        atomicAdd(&bins[key >> shift & (kBins - 1)], 1);
    });
    __syncthreads();
    if (threadIdx.x < 32) {
      int left = rank;
      const int digit = find_digit(bins, left);
      if (threadIdx.x == 0) found[0] = digit, found[1] = left;
    }
    __syncthreads();
    prefix |= static_cast<std::uint32_t>(found[0]) << shift;
    mask |= static_cast<std::uint32_t>(kBins - 1) << shift;
    rank = found[1];
    __syncthreads();
  }
  return prefix;
}

// Sorts `count` integers, a power of two, in shared memory.
__device__ void sort_shared(std::int32_t* values, int count) {
  for (int size = 2; size <= count; size *= 2)
    for (int step = size / 2; step > 0; step /= 2) {
      __syncthreads();
      for (int i = threadIdx.x; i < count / 2; i += kThreads) {
        const int low = i / step * 2 * step + i % step, high = low + step;
        const std::int32_t a = values[low], b = values[high];
        if ((a > b) == ((low & size) == 0)) values[low] = b, values[high] = a;
      }
    }
  __syncthreads();
}

// Members from the candidates of a centroid; false where they do not decide. Rounded scores are off
// by at most 2^-7 of |y|_2 |m|_2, with |y|_2 <= sqrt(Dk), and little more: whoever is no candidate
// stays below the threshold by more than that.
template <class T, int kWidth>
__device__ bool select_candidates(const TopArgs<T>& args, ScoreList<T, kWidth> scores,
                                  std::int64_t list, int wanted, std::int32_t* members) {
  using Lanes = RowLanes<T, kWidth>;
  __shared__ int taken, equal;
  const CandidateLists& candidates = args.candidates;
  const int count = candidates.count[list];
  if (count < wanted || count > candidates.capacity) return false;
  const std::int32_t* rows = candidates.rows + list * candidates.capacity;
  scores.index = rows;
  scores.length = count;
  scores.resident = true;
  scores.fill(0, count);
  if (threadIdx.x == 0) taken = equal = 0;
  __syncthreads();
  int ties = wanted;
  const std::uint32_t cut = find_key(scores, ties);
  const float norm =
      sqrtf(Lanes::dot(scores.centroid, scores.centroid) * static_cast<float>(scores.rows.width));
  if (!(from_ordered(cut) >= candidates.thresholds[list] + 0x1.1p-7f * norm)) return false;
  auto* sorted = reinterpret_cast<std::int32_t*>(scores.scores + candidates.capacity);
  int size = 1;
  while (size < wanted) size *= 2;
  scores.for_each([&](int i, std::uint32_t key) {
    if (i >= count || key < cut) return;
    if (key == cut) atomicAdd(&equal, 1);
    const int place = atomicAdd(&taken, 1);
    if (place < wanted) sorted[place] = rows[i];
  });
  for (int i = wanted + threadIdx.x; i < size; i += kThreads) sorted[i] = 0x7fffffff;
  __syncthreads();
  if (equal != ties) return false;  // which of them are the lower rows is not known here
  sort_shared(sorted, size);
  for (int i = threadIdx.x; i < wanted; i += kThreads) members[i] = sorted[i];
  return true;
}

// A block per centroid of an item and head.
template <class T, int kWidth>
__global__ void __launch_bounds__(kThreads)
    select_top_kernel(const __grid_constant__ TopArgs<T> args) {
  await_previous();
  extern __shared__ float shared[];
  const ClusterShape& shape = args.shape;
  const int cluster = static_cast<int>(blockIdx.x), head = static_cast<int>(blockIdx.y);
  const int item = static_cast<int>(blockIdx.z);
  const ItemSpan span = shape.q.span(item);
  std::int32_t* members =
      args.members +
      ((static_cast<std::int64_t>(item) * shape.heads + head) * shape.clusters + cluster) *
          args.width;
  const int wanted = min(args.width, span.length);
  for (int i = wanted + threadIdx.x; i < args.width; i += kThreads) members[i] = -1;
  if (span.length <= args.width) {
    for (int i = threadIdx.x; i < wanted; i += kThreads) members[i] = i;
    return;
  }
  ScoreList<T, kWidth> scores;
  scores.rows = args.x.rows(span.batch, head, span.begin);
  scores.stats = args.stats + shape.start(span, head);
  scores.length = span.length;
  scores.scores = shared;
  scores.resident = span.length <= args.room;
  const float* centroid =
      args.centroids.rows +
      (static_cast<std::int64_t>(head / shape.group) * shape.clusters + cluster) *
          args.centroids.pitch;
  RowLanes<T, kWidth>::load_floats(centroid, args.centroids.pitch, scores.centroid);
  if (args.candidates.rows) {
    const std::int64_t list =
        (static_cast<std::int64_t>(item) * shape.heads + head) * shape.clusters + cluster;
    if (select_candidates(args, scores, list, wanted, members)) return;
    __syncthreads();
  }
  if (scores.resident) {
    scores.fill(0, span.length);
    __syncthreads();
  }
  int ties = wanted;
  const std::uint32_t cut = find_key(scores, ties);
  int above = 0, equal = 0;  // rows before this chunk
  scores.for_each([&](int row, std::uint32_t key) {
    const bool there = row < span.length;
    const int better = block_exclusive_scan(there && key > cut, above);
    const int level = block_exclusive_scan(there && key == cut, equal);
    if (there && (key > cut || (key == cut && level < ties)))
      members[better + min(level, ties)] = row;
  });
}

}  // namespace

void select_top(const AttentionCall& call, const RoutingSide& side,
                const CentredCentroids& centroids, const CandidateLists& candidates,
                const TensorView& members, cudaStream_t stream) {
  if (members.count() == 0) return;
  dispatch_element(call.op, side.rows.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const int width = static_cast<int>(members.size(3));
    // A block that finds its members among candidates needs little room, and many are resident.
    const int most = candidates.rows ? kRoom / 4 : kRoom;
    const int room = side.shape.rows <= most ? side.shape.rows : 0;
    const TopArgs<T> args{side.shape,
                          tensor4<const T>(side.rows),
                          side.stats,
                          centroids,
                          static_cast<std::int32_t*>(members.data),
                          width,
                          room,
                          candidates};
    const std::size_t bytes =
        sizeof(float) *
        static_cast<std::size_t>(std::max({room, kThreads, candidates.capacity + 2 * width}));
    const dim3 grid(static_cast<unsigned>(side.shape.clusters),
                    static_cast<unsigned>(side.shape.heads),
                    static_cast<unsigned>(side.shape.items));
    dispatch_wide_dim(call.op, call.Dk, [&](auto dim) {
      launch_early("select_top", select_top_kernel<T, decltype(dim)::value>, grid, kThreads, bytes,
                   stream, args);
    });
  });
}

}  // namespace coterie::cuda
