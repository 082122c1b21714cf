// SPDX-License-Identifier: MIT
// Steps 1 and 2 of attend_centroid_select.cu on Hopper's warpgroup products: each warpgroup holds
// 64 means in registers and takes the products with 64 keys at a time, the next ones under way
// while these are looked at.
#include "cuda/device/await.cuh"
#include "cuda/device/key_pipeline.cuh"
#include "cuda/device/select.cuh"
#include "cuda/launch.h"

namespace coterie::cuda {
namespace {

// Calls visit(t, s) for tiles 0 .. pipeline.total - 1 in order, with the products of their keys and
// this warpgroup's means. first(t) is the first key of a tile.
template <class T, int kDim, int kWarps, class First, class Visit>
__device__ __forceinline__ void for_tiles(const KeyPipeline<T, kDim, 1, kWarps>& pipeline, int end,
                                          const std::uint32_t (&q)[kDim / 16][4],
                                          const First& first, const Visit& visit) {
  pipeline.start(first, end);
#pragma unroll 1
  for (int t = 0; t < pipeline.total; ++t) {
    float s[32];
    pipeline.wait(t);
    wgmma_fence();
    score_products<T, kDim>(s, q, pipeline.tile(t, 0));
    wgmma_commit();
    pipeline.advance(t, first, end);
    wgmma_wait<0>();
    wgmma_settle(s);
    pipeline.release(t);
    visit(t, s);
  }
}

template <class T, int kDim, int kGroups>
__global__ void __launch_bounds__(kGroups* kWarpgroup, 4 / kGroups)
    centroid_threshold_sm90a_kernel(const __grid_constant__ SelectArgs<T> args) {
  await_previous();
  extern __shared__ __align__(1024) unsigned char memory[];
  const CentroidBlock block(args.queries, blockIdx.x);  // slot = item * kSamples + part
  const int item = block.slot / kSamples, part = block.slot % kSamples;
  const ItemSpan span = args.queries.spans.k.span(item);
  const Sample sample(span.length, part);
  const int rank = sample.rank(args.wanted);
  if (span.length <= 3 * args.capacity || rank > 32)
    return write_thresholds(args, block, item, part, -FLT_MAX);
  if (part >= sample.parts) return write_thresholds(args, block, item, part, FLT_MAX);

  const KeyPipeline<T, kDim, 1, 4 * kGroups> pipeline{
      shared_address(memory), {args.keys(span, block.head)}, sample.tiles};
  pipeline.init();
  __syncthreads();
  const int lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16 + lane / 4;
  std::uint32_t q[kDim / 16][4];
  load_mean_rows<T, kDim>(q, args.queries, item, block.head, block.first + row);
  float groups[2][8];
#pragma unroll
  for (int i = 0; i < 16; ++i) groups[i / 8][i % 8] = -FLT_MAX;
  for_tiles<T, kDim>(
      pipeline, span.length, q, [&](int t) { return sample.key(min(t, sample.tiles - 1)); },
      [&](int, float(&s)[32]) {
#pragma unroll
        for (int i = 0; i < 16; ++i) {
          float& group = groups[i % 2][i / 2];
          group = fmaxf(group, fmaxf(s[2 * i], s[2 * i + 1]));
        }
      });
  __syncthreads();
  float(*maxima)[33] = reinterpret_cast<float(*)[33]>(memory);
#pragma unroll
  for (int i = 0; i < 16; ++i) maxima[row + i / 8 * 8][lane % 4 * 8 + i % 8] = groups[i / 8][i % 8];
  __syncthreads();
  write_thresholds(args, block, item, part, rank, maxima);
}

template <class T, int kDim, int kGroups>
__global__ void __launch_bounds__(kGroups* kWarpgroup, 4 / kGroups)
    centroid_candidates_sm90a_kernel(const __grid_constant__ SelectArgs<T> args) {
  await_previous();
  extern __shared__ __align__(1024) unsigned char memory[];
  const CentroidBlock block(args.queries, blockIdx.x);
  const KeyChunk chunk = args.queries.chunks.find(args.queries.spans.k, block.slot);
  if (chunk.begin >= chunk.end) return;  // nobody reads the lists of an unused slot

  const KeyPipeline<T, kDim, 1, 4 * kGroups> pipeline{
      shared_address(memory),
      {args.keys(chunk.keys, block.head)},
      (chunk.end - chunk.begin + kSelectKeys - 1) / kSelectKeys};
  pipeline.init();
  __syncthreads();
  const int lane = threadIdx.x % 32;
  const int cluster = block.first + static_cast<int>(threadIdx.x) / 32 * 16 + lane / 4;
  std::uint32_t q[kDim / 16][4];
  load_mean_rows<T, kDim>(q, args.queries, chunk.item, block.head, cluster);
  LaneList lists[2];  // rows cluster and cluster + 8
  const std::int64_t first_list =
      args.queries.row(block.slot, block.head, cluster) * args.lists + lane % 4;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    lists[r].list = args.candidates + (first_list + r * 8 * args.lists) * args.capacity;
    lists[r].count = 0;
    lists[r].floor = row_threshold(args, chunk.item, block.head, cluster + 8 * r);
  }
  for_tiles<T, kDim>(
      pipeline, chunk.end, q, [&](int t) { return chunk.begin + t * kSelectKeys; },
      [&](int t, float(&s)[32]) {
        const int begin = chunk.begin + t * kSelectKeys;
#pragma unroll
        for (int n = 0; n < 4; ++n)
#pragma unroll
          for (int r = 0; r < 2; ++r) {
            const float* scores = s + 8 * n + 2 * r;
            offer4(lists[r], scores[0], scores[1], scores[4], scores[5],
                   begin + 16 * n + lane % 4 * 2, chunk.end);
          }
        make_room(lists, args.capacity, args.wanted, begin + kSelectKeys);
      });
#pragma unroll
  for (int r = 0; r < 2; ++r)
    if (cluster + 8 * r < args.queries.clusters)
      args.counts[first_list + r * 8 * args.lists] = lists[r].count;
}

template <class T, int kDim, int kGroups>
void launch(const SelectArgs<T>& args, cudaStream_t stream) {
  constexpr int kThreads = kGroups * kWarpgroup, kMaxima = kGroups * 64 * 33 * 4;
  constexpr int kPipeline = KeyPipeline<T, kDim, 1, 4 * kGroups>::kBytes;
  constexpr int kBytes = kPipeline > kMaxima ? kPipeline : kMaxima;
  const CentroidQueries& queries = args.queries;
  const unsigned tiles = static_cast<unsigned>(queries.H * queries.row_tiles);
  launch_early("centroid_threshold_sm90a", centroid_threshold_sm90a_kernel<T, kDim, kGroups>,
               tiles * kSamples * queries.chunks.items, kThreads, kBytes, stream, args);
  launch_early("centroid_candidates_sm90a", centroid_candidates_sm90a_kernel<T, kDim, kGroups>,
               tiles * queries.chunks.slots, kThreads, kBytes, stream, args);
}

template <class T, int kDim>
void launch(const SelectArgs<T>& args, cudaStream_t stream) {
  if (args.queries.block_rows == 256)
    launch<T, kDim, 4>(args, stream);
  else
    launch<T, kDim, 2>(args, stream);
}

}  // namespace

template <class T>
void find_candidates_sm90a(const SelectArgs<T>& args, cudaStream_t stream) {
  if (args.queries.width <= 64)
    launch<T, 64>(args, stream);
  else
    launch<T, 128>(args, stream);
}

template void find_candidates_sm90a(const SelectArgs<__nv_bfloat16>&, cudaStream_t);
template void find_candidates_sm90a(const SelectArgs<__half>&, cudaStream_t);

}  // namespace coterie::cuda
