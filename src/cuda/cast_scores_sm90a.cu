// SPDX-License-Identifier: MIT
// The scores of CAST's clusters (cast_select.h) on Hopper, where one block can hold all clusters
// and weights are softmaxes: 64 tokens against up to 256 clusters, 32 by each of two warpgroups,
// while a third one loads. Queries and keys of a token are rows of one product such that a thread
// gets both, and only the mix of their softmaxes is written. Two blocks side by side share the
// surrogates: each fetches half of them for both.
#include "cuda/device/await.cuh"
#include "cuda/device/cast_scores.cuh"
#include "cuda/launch.h"

namespace coterie::cuda {
namespace {

template <int kClusters>
constexpr unsigned kBlocks = kClusters == 64 ? 2 : 1;  // on a multiprocessor

template <class T, int kClusters>
__global__ void surrogate_tiles_kernel(const float* from, T* to, int clusters, int width) {
  await_previous();
  const int chunks = (width + kScoreDepth - 1) / kScoreDepth;
  const int number = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);  // of 8 elements
  const int piece = number % 8, row = number / 8 % kClusters;
  const int chunk = number / 8 / kClusters % chunks, head = number / 8 / kClusters / chunks;
  union {
    uint4 words;
    T elements[8];
  } eight;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int column = chunk * kScoreDepth + piece * 8 + i;
    const bool there = row < clusters && column < width;
    eight.elements[i] = from_float<T>(
        there ? from[(static_cast<std::int64_t>(head) * clusters + row) * width + column] : 0.0f);
  }
  reinterpret_cast<uint4*>(to)[number - piece + (piece ^ row % 8)] = eight.words;
}

template <class T, int kClusters>
__global__ void __cluster_dims__(kPair, 1, 1) __launch_bounds__(kScoreThreads, kBlocks<kClusters>)
    scores_sm90a_kernel(const __grid_constant__ ScoreArgs<T> args) {
  release_next();
  extern __shared__ __align__(1024) unsigned char memory[];
  const ScoreBlock<T, kClusters> block(args, shared_address(memory));
  block.stages.init();
  pair_start();
  await_writes();
  const int group = static_cast<int>(threadIdx.x) / kWarpgroup;
  if (group == kScoreGroups)
    block.load();
  else
    block.work(group);
  pair_sync();  // the other block may still arrive at barriers here
}

template <class T, int kClusters>
void launch(ScoreArgs<T> args, int heads, void* table, cudaStream_t stream) {
  const CastShape& shape = args.scores.shape;
  args.surrogates = static_cast<const T*>(table);
  args.units = args.slots * static_cast<unsigned>(heads);
  constexpr int kEach = 256;
  const int chunks = (shape.D + kScoreDepth - 1) / kScoreDepth;
  if (args.first_head == 0)
    launch_early("cast surrogates", surrogate_tiles_kernel<T, kClusters>,
                 dim3(static_cast<unsigned>(shape.H * chunks * kClusters * 8 / kEach)), kEach, 0,
                 stream, shape.surrogates, static_cast<T*>(table), shape.clusters, shape.D);
  launch_early("cast scores", scores_sm90a_kernel<T, kClusters>,
               dim3(min(args.units, kBlocks<kClusters> * static_cast<unsigned>(multiprocessors()) /
                                        kPair * kPair)),
               kScoreThreads, ScoreStages<kClusters>::kBytes, stream, args);
}

}  // namespace

template <class T>
void scores_sm90a(const CastScores& scores, const AttentionCall& call, int first_head, int heads,
                  void* table, cudaStream_t stream) {
  const ItemChunks tiles = token_tiles(scores.shape, kScoreRows);
  const ScoreArgs<T> args{scores,
                          tiles,
                          first_head,
                          static_cast<unsigned>((tiles.slots + kPair - 1) / kPair * kPair),
                          0,
                          tensor4<const T>(call.inputs.q),
                          tensor4<const T>(call.k),
                          nullptr};
  if (scores.shape.clusters > 128)
    launch<T, 256>(args, heads, table, stream);
  else if (scores.shape.clusters > 64)
    launch<T, 128>(args, heads, table, stream);
  else
    launch<T, 64>(args, heads, table, stream);
}

template void scores_sm90a<Bf16>(const CastScores&, const AttentionCall&, int, int, void*,
                                 cudaStream_t);
template void scores_sm90a<F16>(const CastScores&, const AttentionCall&, int, int, void*,
                                cudaStream_t);

}  // namespace coterie::cuda
