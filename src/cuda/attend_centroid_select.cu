// SPDX-License-Identifier: MIT
// Top keys of every cluster: the keys with the largest products with the cluster's mean, without
// storing the products.
//
// 1. threshold: products with a sample of the keys. In each of kSamples parts of the sample a row's
//    keys fall into 32 groups; the j-th largest group maximum has at least j keys at or above it,
//    so the least of the parts' values has at least kSamples * j, and no top key is below it.
// 2. candidates: products with all keys, by chunks; those at or above the threshold go to lists of
//    the row and chunk. A list that could overflow is cut back to the best and raises the
//    threshold.
// 3. merge: the best of a row's lists, a few more than asked for because 1 and 2 use means rounded
//    to the element type; scored again in f32, ranked, and written in ascending order of index.
// The threshold only decides how much work is done, never what is selected. Steps 1 and 2 compute
// their scores by the same instructions, hence with the same bits.
#include "cuda/clustered.h"
#include "cuda/device/await.cuh"
#include "cuda/device/select.cuh"
#include "cuda/hopper.h"
#include "cuda/launch.h"
#include "cuda/tuning.h"

namespace coterie::cuda {
namespace {

constexpr int kThreads = 128;     // 4 warps of 32 rows
constexpr int kRankedSpare = 16;  // the cut before the ranking may leave so many more than wanted
constexpr int kMaxRanked = 176;
constexpr int kMergeWarps = 4;
constexpr int kStaged = 512;  // candidates of a row that the merge keeps on the chip

// Candidates beyond those asked for that are scored again.
constexpr int spare_keys(std::int64_t topk) { return static_cast<int>(topk / 8) + 4; }
static_assert(kMaxTopKeys + spare_keys(kMaxTopKeys) + kRankedSpare <= kMaxRanked, "room to rank");

template <class T, int kDim>
using Fragments = CentroidFragments<T, kDim, sizeof(T) == 2 || kDim <= 32>;

template <class T, int kDim>
struct SelectTiles {
  static constexpr int kRowBytes = Tile<T, kDim>::kRowBytes;
  static constexpr int kBytes = (kCentroidRows + 2 * kSelectKeys) * kRowBytes;

  Tile<T, kDim> queries;

  __device__ explicit SelectTiles(const void* memory) : queries{shared_address(memory)} {}
  __device__ Tile<T, kDim> keys(int stage) const {
    return queries.below(kCentroidRows + stage * kSelectKeys);
  }
};

// Calls visit(n, s) with the products of this warp's rows 16 m .. 16 m + 15, in s[m], and the keys
// 16 n .. 16 n + 15 of a tile.
template <class T, int kDim, class Visit>
__device__ __forceinline__ void for_scores(Fragments<T, kDim>& fragments, const Tile<T, kDim>& keys,
                                           const Visit& visit) {
#pragma unroll
  for (int n = 0; n < kSelectKeys / 16; ++n) {
    Accumulator s[2];
    fragments.scores(s, keys, 16 * n);
    visit(n, s);
  }
}

template <class T, int kDim>
__global__ void __launch_bounds__(kThreads, sizeof(T) == 2 ? 3 : 2)
    centroid_threshold_kernel(const __grid_constant__ SelectArgs<T> args) {
  await_previous();
  extern __shared__ __align__(128) unsigned char memory[];
  const SelectTiles<T, kDim> tiles(memory);
  const CentroidBlock block(args.queries, blockIdx.x);  // slot = item * kSamples + part
  const int item = block.slot / kSamples, part = block.slot % kSamples;
  const ItemSpan span = args.queries.spans.k.span(item);
  const Sample sample(span.length, part);
  const int rank = sample.rank(args.wanted);
  if (span.length <= 3 * args.capacity || rank > 32)
    return write_thresholds(args, block, item, part, -FLT_MAX);
  if (part >= sample.parts) return write_thresholds(args, block, item, part, FLT_MAX);

  const Rows<const T> rows = args.keys(span, block.head);
  load_tile<kSelectKeys, kThreads>(tiles.keys(0), rows, sample.key(0), kSelectKeys);
  cp_async_commit();
  load_centroids<kCentroidRows, kThreads>(tiles.queries, args.queries, item, block.head,
                                          block.first);
  __syncthreads();
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  Fragments<T, kDim> fragments;
  fragments.load(tiles.queries, warp * 32);
  float groups[2][2][8];
#pragma unroll
  for (int i = 0; i < 32; ++i) groups[i / 16][i / 8 % 2][i % 8] = -FLT_MAX;
#pragma unroll 1
  for (int j = 0; j < sample.tiles; ++j) {
    cp_async_wait<0>();
    __syncthreads();
    if (j + 1 < sample.tiles)
      load_tile<kSelectKeys, kThreads>(tiles.keys((j + 1) % 2), rows, sample.key(j + 1),
                                       kSelectKeys);
    cp_async_commit();
    for_scores(fragments, tiles.keys(j % 2), [&](int n, const Accumulator(&s)[2]) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        float& group = groups[i / 4][i / 2 % 2][2 * n + i % 2];
        group =
            fmaxf(group, fmaxf(s[i / 4][i % 2][i / 2 % 2 * 2], s[i / 4][i % 2][i / 2 % 2 * 2 + 1]));
      }
    });
  }
  __syncthreads();
  float(*maxima)[33] = reinterpret_cast<float(*)[33]>(memory);
  static_assert(sizeof(float) * 33 * kCentroidRows <= SelectTiles<T, kDim>::kBytes + 1024, "room");
#pragma unroll
  for (int i = 0; i < 32; ++i)
    maxima[warp * 32 + i / 16 * 16 + i / 8 % 2 * 8 + lane / 4][lane % 4 * 8 + i % 8] =
        groups[i / 16][i / 8 % 2][i % 8];
  __syncthreads();
  write_thresholds(args, block, item, part, rank, maxima);
}

template <class T, int kDim>
__global__ void __launch_bounds__(kThreads, sizeof(T) == 2 ? 3 : 2)
    centroid_candidates_kernel(const __grid_constant__ SelectArgs<T> args) {
  await_previous();
  extern __shared__ __align__(128) unsigned char memory[];
  const SelectTiles<T, kDim> tiles(memory);
  const CentroidBlock block(args.queries, blockIdx.x);
  const KeyChunk chunk = args.queries.chunks.find(args.queries.spans.k, block.slot);
  if (chunk.begin >= chunk.end) return;  // nobody reads the lists of an unused slot

  const Rows<const T> rows = args.keys(chunk.keys, block.head);
  load_tile<kSelectKeys, kThreads>(tiles.keys(0), rows, chunk.begin, chunk.end - chunk.begin);
  cp_async_commit();
  load_centroids<kCentroidRows, kThreads>(tiles.queries, args.queries, chunk.item, block.head,
                                          block.first);
  __syncthreads();
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int cluster = block.first + warp * 32 + lane / 4;
  Fragments<T, kDim> fragments;
  fragments.load(tiles.queries, warp * 32);
  LaneList lists[4];  // rows cluster, + 8, + 16, + 24
  const std::int64_t first_list =
      args.queries.row(block.slot, block.head, cluster) * args.lists + lane % 4;
#pragma unroll
  for (int r = 0; r < 4; ++r) {
    lists[r].list = args.candidates + (first_list + r * 8 * args.lists) * args.capacity;
    lists[r].count = 0;
    lists[r].floor = row_threshold(args, chunk.item, block.head, cluster + 8 * r);
  }
#pragma unroll 1
  for (int begin = chunk.begin, stage = 0; begin < chunk.end; begin += kSelectKeys, stage ^= 1) {
    cp_async_wait<0>();
    __syncthreads();
    if (begin + kSelectKeys < chunk.end)
      load_tile<kSelectKeys, kThreads>(tiles.keys(stage ^ 1), rows, begin + kSelectKeys,
                                       chunk.end - begin - kSelectKeys);
    cp_async_commit();
    for_scores(fragments, tiles.keys(stage), [&](int n, const Accumulator(&s)[2]) {
#pragma unroll
      for (int r = 0; r < 4; ++r)
        offer4(lists[r], s[r / 2][0][r % 2 * 2], s[r / 2][0][r % 2 * 2 + 1], s[r / 2][1][r % 2 * 2],
               s[r / 2][1][r % 2 * 2 + 1], begin + 16 * n + lane % 4 * 2, chunk.end);
    });
    make_room(lists, args.capacity, args.wanted, begin + kSelectKeys);
  }
#pragma unroll
  for (int r = 0; r < 4; ++r)
    if (cluster + 8 * r < args.queries.clusters)
      args.counts[first_list + r * 8 * args.lists] = lists[r].count;
}

// sign * mean . key for 4 keys at a time, by 8 lanes each.
template <class T>
struct ExactScores {
  static constexpr int kVector = 16 / sizeof(T);
  Rows<const T> rows;
  const float* mean;

  __device__ uint4 load(int key, int column) const {
    if (column >= rows.width) return make_uint4(0, 0, 0, 0);
    const T* row = rows.row(key);
    return rows.aligned ? *reinterpret_cast<const uint4*>(row + column)
                        : load_chunk(row, column, rows.width);
  }
  __device__ float dot(const uint4& words, int column) const {
    union {
      uint4 words;
      T elements[kVector];
    } chunk;
    chunk.words = words;
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kVector; ++i)
      sum = fmaf(mean[column + i], to_float(chunk.elements[i]), sum);
    return sum;
  }
  // Replaces keys' scores; mean has zeros up to kMaxHeadDim.
  __device__ void rescore(CandidateKey* keys, int count) const {
    constexpr int kUnroll = 4;
    const int lane = threadIdx.x % 32, column = lane % 8 * kVector;
    for (int first = 0; first < count; first += 4 * kUnroll) {
      float sums[kUnroll] = {};
      int indices[kUnroll];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u)
        indices[u] = index_of(keys[min(first + 4 * u + lane / 8, count - 1)]);
      for (int shift = 0; shift < rows.width; shift += 8 * kVector) {
        uint4 words[kUnroll];
#pragma unroll
        for (int u = 0; u < kUnroll; ++u) words[u] = load(indices[u], shift + column);
#pragma unroll
        for (int u = 0; u < kUnroll; ++u) sums[u] += dot(words[u], shift + column);
      }
      __syncwarp();
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        float sum = sums[u];
#pragma unroll
        for (int step = 4; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
        const int i = first + 4 * u + lane / 8;
        if (lane % 8 == 0 && i < count)
          keys[i] = candidate_key(isnan(sum) ? -INFINITY : sum, indices[u]);
      }
      __syncwarp();
    }
  }
};

// Writes the indices of the best `topk` of `count` keys, ascending, -1 beyond them.
__device__ void write_best(CandidateKey* keys, int count, int topk, std::int32_t* top) {
  const int lane = threadIdx.x % 32;
  unsigned kept = 0;  // bit i: this lane's i-th key
  for (int i = lane, bit = 0; i < count; i += 32, ++bit) {
    int rank = 0;
    for (int j = 0; j < count; ++j) rank += keys[j] > keys[i];
    kept |= static_cast<unsigned>(rank < topk) << bit;
  }
  __syncwarp();
  for (int i = lane, bit = 0; i < count; i += 32, ++bit)
    if (!(kept >> bit & 1)) keys[i] = 0;  // has the largest index of all
  __syncwarp();
  for (int i = lane, bit = 0; i < count; i += 32, ++bit) {
    if (!(kept >> bit & 1)) continue;
    int place = 0;
    for (int j = 0; j < count; ++j)
      place += static_cast<std::uint32_t>(keys[j]) > static_cast<std::uint32_t>(keys[i]);
    top[place] = index_of(keys[i]);
  }
  for (int i = min(count, topk) + lane; i < topk; i += 32) top[i] = -1;
}

// Exclusive sum over the lanes of a warp.
__device__ __forceinline__ int sum_before(int value) {
  const int lane = threadIdx.x % 32;
  int sum = value;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int other = __shfl_up_sync(~0u, sum, step);
    if (lane >= step) sum += other;
  }
  return sum - value;
}

// The candidates of one cluster, seen by a warp: `lists` lists of every chunk.
template <class T>
struct ClusterCandidates {
  const SelectArgs<T>& args;
  int head, cluster, slot, total;  // total: number of lists

  __device__ std::int64_t list(int number) const {
    return args.queries.row(slot + number / args.lists, head, cluster) * args.lists +
           number % args.lists;
  }
  // Calls visit(key) for the lists lane, lane + 32, ...
  template <class Visit>
  __device__ void for_each(const Visit& visit) const {
    for (int number = threadIdx.x % 32; number < total; number += 32) {
      const std::int64_t at = list(number);
      const int count = args.counts[at];
#pragma unroll 4
      for (int i = 0; i < count; ++i) visit(candidate_key(args.candidates[at * args.capacity + i]));
    }
  }
  // Of this lane's lists.
  __device__ int count() const {
    int sum = 0;
    for (int number = threadIdx.x % 32; number < total; number += 32)
      sum += args.counts[list(number)];
    return sum;
  }
  // All keys; `before` are those of lower lanes.
  __device__ void copy(CandidateKey* to, int before) const {
    for_each([&](CandidateKey key) { to[before++] = key; });
    __syncwarp();
  }
};

// Copies the keys not below `cut` to memory; returns their number. for_each as in find_cut.
template <class ForEach>
__device__ int collect(const ForEach& for_each, CandidateKey cut, CandidateKey* to) {
  int count = 0;
  for_each([&](CandidateKey key) { count += key >= cut; });
  int place = sum_before(count);
  for_each([&](CandidateKey key) {
    if (key >= cut) to[place++] = key;
  });
  __syncwarp();
  return __reduce_add_sync(~0u, count);
}

// One warp per cluster.
template <class T>
__global__ void __launch_bounds__(kMergeWarps * 32, 8)
    centroid_merge_kernel(const __grid_constant__ SelectArgs<T> args) {
  await_previous();
  __shared__ CandidateKey staged[kMergeWarps][kStaged];
  __shared__ CandidateKey ranked[kMergeWarps][kMaxRanked];
  __shared__ float means[kMergeWarps][kMaxHeadDim];
  const CentroidQueries& queries = args.queries;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const std::int64_t row = static_cast<std::int64_t>(blockIdx.x) * kMergeWarps + warp;
  const std::int64_t problem = row / queries.clusters;
  if (problem >= static_cast<std::int64_t>(queries.chunks.items) * queries.H) return;
  const int cluster = static_cast<int>(row % queries.clusters);
  const int item = static_cast<int>(problem / queries.H);
  const int head = static_cast<int>(problem % queries.H);
  const ItemSpan span = queries.spans.k.span(item);
  const int parts = queries.empty(item, head, cluster) ? 0 : queries.chunks.count(span.length);
  const ClusterCandidates<T> candidates{
      args, head, cluster, queries.chunks.first_slot(queries.spans.k, item), parts * args.lists};
  for (int d = lane; d < kMaxHeadDim; d += 32)
    means[warp][d] =
        d < queries.width ? queries.centroids[row * queries.width + d] * queries.sign : 0.0f;

  const int own = candidates.count(), all = __reduce_add_sync(~0u, own);
  const int most = args.wanted + kRankedSpare;
  const auto listed = [&](const auto& visit) { candidates.for_each(visit); };
  int count = all;
  if (all <= most) {
    candidates.copy(ranked[warp], sum_before(own));
  } else if (all <= kStaged) {
    candidates.copy(staged[warp], sum_before(own));
    const auto kept = [&](const auto& visit) {
      for (int i = lane; i < all; i += 32) visit(staged[warp][i]);
    };
    count = collect(kept, find_cut(kept, args.wanted, most), ranked[warp]);
  } else {
    count = collect(listed, find_cut(listed, args.wanted, most), ranked[warp]);
  }
  const ExactScores<T> exact{args.keys(span, head), means[warp]};
  exact.rescore(ranked[warp], count);
  write_best(ranked[warp], count, args.topk, args.top_keys + row * args.topk);
}

template <class T, int kDim>
void launch_candidates(const SelectArgs<T>& args, cudaStream_t stream) {
  const CentroidQueries& queries = args.queries;
  constexpr int kBytes = SelectTiles<T, kDim>::kBytes + 1024;
  const unsigned tiles = static_cast<unsigned>(queries.H * queries.row_tiles);
  launch_early("centroid_threshold", centroid_threshold_kernel<T, kDim>,
               tiles * kSamples * queries.chunks.items, kThreads, kBytes, stream, args);
  launch_early("centroid_candidates", centroid_candidates_kernel<T, kDim>,
               tiles * queries.chunks.slots, kThreads, kBytes, stream, args);
}

template <class T>
void find_candidates(const AttentionCall& call, const SelectArgs<T>& args, cudaStream_t stream) {
  if constexpr (sizeof(T) == 2)
    if (on_hopper()) return find_candidates_sm90a(args, stream);
  dispatch_head_dim(call.op, call.Dk,
                    [&](auto dim) { launch_candidates<T, decltype(dim)::value>(args, stream); });
}

}  // namespace

void centroid_select(const AttentionCall& call, const ClusteredSizes& sizes,
                     const ClusteredTensors& tensors, Arena& arena, cudaStream_t stream) {
  const CentroidBlocks blocks = centroid_blocks(call, sizes);
  const CentroidQueries queries = centroid_queries(call, sizes, tensors, blocks);
  constexpr int kLists = 4;
  const std::int64_t rows = call.num_items() * call.H * sizes.clusters;
  const std::int64_t lists = queries.chunks.slots * call.H * sizes.clusters * kLists;
  const int wanted = static_cast<int>(sizes.topk) + spare_keys(sizes.topk);
  // A list can hold all that a cut leaves, and a lane's scores of one tile more.
  const int capacity = (wanted + kSelectKeys / 4 + 15) / 16 * 16;
  float* thresholds = arena.take<float>(rows * kSamples + 1);
  std::int32_t* counts = arena.take<std::int32_t>(lists + 1);
  Candidate* candidates = arena.take<Candidate>(lists * capacity + 1);
  if (!thresholds || rows == 0 || sizes.topk == 0) return;
  dispatch_element(call.op, call.inputs.q.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    SelectArgs<T> args;
    args.queries = queries;
    args.k = tensor4<const T>(call.k);
    args.topk = static_cast<int>(sizes.topk);
    args.wanted = wanted;
    args.lists = kLists;
    args.capacity = capacity;
    args.thresholds = thresholds;
    args.counts = counts;
    args.candidates = candidates;
    args.top_keys = static_cast<std::int32_t*>(tensors.top_keys.data);
    find_candidates(call, args, stream);
    launch_early("centroid_merge", centroid_merge_kernel<T>,
                 static_cast<unsigned>((rows + kMergeWarps - 1) / kMergeWarps), kMergeWarps * 32, 0,
                 stream, args);
  });
}

}  // namespace coterie::cuda
