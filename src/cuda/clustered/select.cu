// SPDX-License-Identifier: MIT
// Top keys of every cluster: the keys with the largest products with the cluster's mean, without
// storing the products. On Hopper, select_attend_sm90a.cu has the same steps in one kernel for
// 16-bit types; this file is for f32 and other devices.
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
//
// Block number of 1 and 2 = (part or chunk of the keys * H + head) * row tiles + tile; 4 warps of
// 32 means, 64 keys at a time. Shared memory: means and two stages of keys, one for rows of 512
// bytes; 32, 64 or 96 KiB. Step 3: a warp for two means, 36 KiB of a block.
#include "cuda/clustered/clustered.h"
#include "cuda/clustered/select.cuh"
#include "cuda/launch/dispatch.h"
#include "cuda/launch/launch.h"
#include "cuda/prim/dependent.cuh"

namespace coterie::cuda {
namespace {

constexpr int kThreads = 128;  // 4 warps of 32 rows
constexpr int kMergeWarps = 4;

template <class T, int kDim>
constexpr int kStages = Tile<T, kDim>::kRowBytes <= 256 ? 2 : 1;  // of keys
// Bytes of the means and the keys.
template <class T, int kDim>
constexpr int kTileBytes =
    (kCentroidRows + kStages<T, kDim> * kSelectKeys) * Tile<T, kDim>::kRowBytes;

// The products of a block's means with `total` tiles of keys, the t-th from key first(t) on and not
// beyond `end`. Calls body(t, products); products(visit) calls visit(n, s) with those of this
// warp's rows 16 m .. 16 m + 15, in s[m], and the keys 16 n .. 16 n + 15 of the tile.
template <class T, int kDim, class First, class Body>
__device__ __forceinline__ void walk_keys(unsigned char* memory, const SelectArgs<T>& args,
                                          const CentroidBlock& block, int item,
                                          const Rows<const T>& rows, int total, int end,
                                          const First& first, const Body& body) {
  const Tile<T, kDim> means{shared_address(memory)};
  constexpr int kPlaces = kStages<T, kDim>;
  const auto keys = [&](int t) { return means.below(kCentroidRows + t % kPlaces * kSelectKeys); };
  const auto load = [&](int t) {
    if (t < total) load_tile<kSelectKeys, kThreads>(keys(t), rows, first(t), end - first(t));
    cp_async_commit();
  };
  load(0);
  load_centroids<kCentroidRows, kThreads>(means, args.queries, item, block.head, block.first);
  __syncthreads();
  QueryFragments<T, kDim, sizeof(T) == 2 || kDim <= 32> fragments;
  fragments.load(means, static_cast<int>(threadIdx.x) / 32 * 32);
#pragma unroll 1
  for (int t = 0; t < total; ++t) {
    cp_async_wait<0>();
    __syncthreads();
    if (kPlaces > 1) load(t + 1);
    body(t, [&](const auto& visit) {
#pragma unroll
      for (int n = 0; n < kSelectKeys / 16; ++n) {
        Accumulator s[2];
        fragments.scores(s, keys(t), 16 * n);
        visit(n, s);
      }
    });
    if (kPlaces > 1) continue;
    __syncthreads();  // all have read the keys
    load(t + 1);
  }
}

template <class T, int kDim>
__global__ void __launch_bounds__(kThreads, sizeof(T) == 2 ? 3 : 2)
    centroid_threshold_kernel(const __grid_constant__ SelectArgs<T> args) {
  await_previous();
  extern __shared__ __align__(128) unsigned char memory[];
  const CentroidBlock block(args.queries, blockIdx.x);  // slot = item * kSamples + part
  const int item = block.slot / kSamples, part = block.slot % kSamples;
  const ItemSpan span = args.queries.spans.k.span(item);
  const KeySample sample(span.length, part);
  if (span.length <= 3 * args.capacity || sample.tiles == 0)  // every key is a candidate
    return write_thresholds(args, block, item, part, -FLT_MAX);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  float groups[2][2][8];
#pragma unroll
  for (int i = 0; i < 32; ++i) groups[i / 16][i / 8 % 2][i % 8] = -FLT_MAX;
  const auto first = [&](int t) { return sample.key(t); };
  const auto group_maxima = [&](int n, const Accumulator(&s)[2]) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      float& group = groups[i / 4][i / 2 % 2][2 * n + i % 2];
      const float* pair = s[i / 4][i % 2] + i / 2 % 2 * 2;
      group = fmaxf(group, fmaxf(pair[0], pair[1]));
    }
  };
  walk_keys<T, kDim>(memory, args, block, item, args.keys(span, block.head), sample.tiles,
                     span.length, first,
                     [&](int, const auto& products) { products(group_maxima); });
  __syncthreads();
  float(*maxima)[33] = reinterpret_cast<float(*)[33]>(memory);
  static_assert(sizeof(float) * 33 * kCentroidRows <= kTileBytes<T, kDim>, "room");
#pragma unroll
  for (int i = 0; i < 32; ++i)
    maxima[warp * 32 + i / 16 * 16 + i / 8 % 2 * 8 + lane / 4][lane % 4 * 8 + i % 8] =
        groups[i / 16][i / 8 % 2][i % 8];
  __syncthreads();
  write_thresholds(args, block, item, part, 0.0f, (args.wanted + kSamples - 1) / kSamples, maxima);
}

template <class T, int kDim>
__global__ void __launch_bounds__(kThreads, sizeof(T) == 2 ? 3 : 2)
    centroid_candidates_kernel(const __grid_constant__ SelectArgs<T> args) {
  await_previous();
  extern __shared__ __align__(128) unsigned char memory[];
  const CentroidBlock block(args.queries, blockIdx.x);
  const ItemChunk chunk = args.queries.chunks.find(args.queries.spans.k, block.slot);
  if (chunk.begin >= chunk.end) return;  // the lists of an unused slot are never read

  const int lane = threadIdx.x % 32;
  const int cluster = block.first + static_cast<int>(threadIdx.x) / 32 * 32 + lane / 4;
  const auto lists_of = [&](int r) {
    return separate_lists(args.queries.row(block.slot, block.head, cluster + 8 * r), 1, 0,
                          args.capacity);
  };
  LaneList lists[4];  // rows cluster, + 8, + 16, + 24
#pragma unroll
  for (int r = 0; r < 4; ++r)
    lists[r] = LaneList(args.candidates, lists_of(r), 0, lane % 4,
                        row_threshold(args, chunk.item, block.head, cluster + 8 * r));
  const auto first = [&](int t) { return chunk.begin + t * kSelectKeys; };
  const int total = (chunk.end - chunk.begin + kSelectKeys - 1) / kSelectKeys;
  const auto offer_tile = [&](int t, const auto& products) {
    products([&](int n, Accumulator(&s)[2]) {
      const int key = first(t) + 16 * n + lane % 4 * 2;
      if (first(t + 1) > chunk.end)
#pragma unroll
        for (int i = 0; i < 16; ++i)
          if (key + i / 4 % 2 * 8 + i % 2 >= chunk.end) s[i / 8][i / 4 % 2][i % 4] = -INFINITY;
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        const float *low = s[r / 2][0] + r % 2 * 2, *high = s[r / 2][1] + r % 2 * 2;
        offer4(lists[r], fmaxf(fmaxf(low[0], low[1]), fmaxf(high[0], high[1])), low[0], low[1],
               high[0], high[1], key);
      }
    });
    make_room(lists, args.capacity, args.wanted, first(t + 1));
  };
  walk_keys<T, kDim>(memory, args, block, chunk.item, args.keys(chunk.span, block.head), total,
                     chunk.end, first, offer_tile);
#pragma unroll
  for (int r = 0; r < 4; ++r)
    if (cluster + 8 * r < args.queries.clusters)
      args.counts[lists_of(r).count(0, lane % 4)] = lists[r].count;
}

// One warp per two clusters of an item and head.
template <class T>
__global__ void __launch_bounds__(kMergeWarps * 32, 4)
    centroid_merge_kernel(const __grid_constant__ SelectArgs<T> args) {
  await_previous();
  __shared__ MergeMemory memory[kMergeWarps][2];
  const CentroidQueries& queries = args.queries;
  const int warp = threadIdx.x / 32, pairs = (queries.clusters + 1) / 2;
  const std::int64_t pair = static_cast<std::int64_t>(blockIdx.x) * kMergeWarps + warp;
  const std::int64_t problem = pair / pairs;
  if (problem >= static_cast<std::int64_t>(queries.chunks.items) * queries.H) return;
  const int cluster =
      static_cast<int>(pair % pairs) * 2 + static_cast<int>(threadIdx.x) / kRowLanes % 2;
  const int item = static_cast<int>(problem / queries.H);
  const int head = static_cast<int>(problem % queries.H);
  const bool there = cluster < queries.clusters;
  const SelectRow row{item, head, cluster, there, there && !queries.empty(item, head, cluster)};
  const int slot = queries.chunks.first_slot(queries.spans.k, item);
  const int parts = queries.chunks.count(queries.spans.k.span(item).length);
  const RowLists lists = separate_lists(queries.row(slot, head, there ? cluster : 0), parts,
                                        queries.row(1, 0, 0), args.capacity);
  merge_lists(args, row, lists, memory[warp]);
}

// The three steps as separate kernels.
template <class T>
void select_keys(const AttentionCall& call, const SelectArgs<T>& args, cudaStream_t stream) {
  const CentroidQueries& queries = args.queries;
  const unsigned tiles = static_cast<unsigned>(queries.H * queries.row_tiles);
  dispatch_head_dim(call.op, call.Dk, [&](auto dim) {
    constexpr int kDim = decltype(dim)::value, kBytes = kTileBytes<T, kDim>;
    launch_early("centroid_threshold", centroid_threshold_kernel<T, kDim>,
                 tiles * kSamples * queries.chunks.items, kThreads, kBytes, stream, args);
    launch_early("centroid_candidates", centroid_candidates_kernel<T, kDim>,
                 tiles * queries.chunks.slots, kThreads, kBytes, stream, args);
  });
  const std::int64_t pairs = call.num_items() * call.H * ((queries.clusters + 1) / 2);
  launch_early("centroid_merge", centroid_merge_kernel<T>,
               static_cast<unsigned>((pairs + kMergeWarps - 1) / kMergeWarps), kMergeWarps * 32, 0,
               stream, args);
}

}  // namespace

void select_top_keys(const ClusteredForward& pass, Arena& arena) {
  const ClusteredPlan& plan = pass.plan;
  const AttentionCall& call = plan.call;
  SelectTeams teams = plan.selection;
  teams.teams.arrivals = pass.counters;
  const bool attend = pass.selection_attends;
  const int block_rows = plan.means.block_rows;
  const std::int64_t team_rows = static_cast<std::int64_t>(teams.teams.count) * block_rows;
  const std::int64_t part_rows = team_rows * teams.teams.size;
  const std::int64_t lists =
      kLaneLists * (plan.sm90a ? part_rows : plan.means.chunks.slots * call.H * plan.clusters);
  const int wanted = plan.topk + spare_keys(plan.topk);
  // A list can hold all that a cut leaves, and a lane's scores of one more tile.
  const int capacity = (wanted + kSelectKeys / 4 + 15) / 16 * 16;
  const int pitch = static_cast<int>(call.Dk + 63) / 64 * 64;
  float* thresholds = arena.take<float>(plan.sm90a ? team_rows : plan.num_means() * kSamples + 1);
  teams.maxima = arena.take<float>(team_rows * kSelectParts * 32);
  std::int32_t* counts = arena.take<std::int32_t>(lists + 1);
  Candidate* candidates = arena.take<Candidate>(lists * capacity + 1);
  PartialRow* partial_rows = arena.take<PartialRow>(attend ? part_rows : 0);
  float* outs = arena.take<float>(attend ? part_rows * pitch : 0);
  if (arena.counting() || plan.num_means() == 0 || plan.topk == 0) return;
  dispatch_element(call.op, call.inputs.q.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const SelectArgs<T> args{plan.queries(pass.tensors),
                             tensor4<const T>(call.k),
                             plan.topk,
                             wanted,
                             capacity,
                             thresholds,
                             counts,
                             candidates,
                             ints(pass.tensors.top_keys),
                             plan.clusters_with_means};
    if constexpr (sizeof(T) == 2)
      if (plan.sm90a) {
        const MeanOutputs<T> to{tensor4<const T>(call.inputs.v),
                                partial_rows,
                                outs,
                                pitch,
                                floats(pass.tensors.centroid_lse),
                                floats(pass.tensors.mass),
                                floats(pass.tensors.out),
                                static_cast<int>(call.Dv)};
        return select_sm90a(args, teams, attend ? &to : nullptr, pass.stream);
      }
    select_keys(call, args, pass.stream);
  });
}

}  // namespace coterie::cuda
