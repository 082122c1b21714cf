// SPDX-License-Identifier: MIT
// centroid.cu with Hopper's warpgroup products, for 16-bit types. Runs for plain clustered
// attention, for improved clustered attention whose top keys are given (attention_attend) or that
// has near keys, and for its forward passes if the teams of select_attend_sm90a.cu would leave over
// a quarter of the device idle, such as 16 heads of up to 128 clusters on 132 multiprocessors.
//
// Block number as in centroid.cu, or by teams: team * size + chunk. Two or four warpgroups of 64
// means walk a chunk of the keys, 64 at a time; the output of one tile and the scores of the next
// are computed together. If all blocks are resident, they are launched as teams: those of a mean
// combine their chunks themselves, after a barrier in global memory. Otherwise
// centroid_combine_kernel does. Shared memory: means and 6 (rows of 128 elements: 4) stages of keys
// and values; 112 KiB for 2 warpgroups, 128 KiB for 4, 160 KiB for rows of 128. Launch bounds: 128
// registers for rows of 64, all registers for 128.
#include "cuda/clustered/centroid.cuh"
#include "cuda/clustered/means_sm90a.cuh"
#include "cuda/launch/launch.h"
#include "cuda/prim/dependent.cuh"
#include "cuda/prim/team.cuh"

namespace coterie::cuda {
namespace {

// Rows whose top keys are known, and left out of the sums.
template <class T, int kDim>
struct GroupMeans : MeanSums<T, kDim> {
  RowSoftmax softmax[2];
  float mass[2] = {};

  // whole: see RowSoftmax::raise_whole.
  __device__ void rescale(const float (&s)[32], float exponent, bool whole) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float top = -INFINITY;
#pragma unroll
      for (int i = 0; i < 16; ++i) top = fmaxf(top, s[i / 2 * 4 + 2 * half + i % 2]);
      top = quad_max(top);
      const float factor =
          whole ? softmax[half].raise_whole(top, exponent) : softmax[half].raise(top, exponent);
      mass[half] *= factor;
      this->scale(half, factor);
    }
  }

  // Calls body(half, element) for the elements of top keys. `bits`: the masks of the two rows,
  // shifted to this lane's first column.
  template <class Body>
  __device__ static void for_top_keys(float (&s)[32], const unsigned long long (&bits)[2],
                                      const Body& body) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if ((bits[half] & 0x0303030303030303ull) == 0) continue;
#pragma unroll
      for (int i = 0; i < 16; ++i)
        if (bits[half] >> (i / 2 * 8 + i % 2) & 1) body(half, s[i / 2 * 4 + 2 * half + i % 2]);
    }
  }
  // Scores become weights, as left factors of P V; those of top keys are moved to the mass.
  __device__ void weigh(float (&s)[32], const unsigned long long (&bits)[2], float exponent) {
#pragma unroll
    for (int i = 0; i < 32; ++i) s[i] = softmax[i / 2 % 2].weight(s[i], exponent);
    for_top_keys(s, bits, [&](int half, float& weight) {
      mass[half] += weight;
      weight = 0.0f;
    });
  }

  __device__ void write(const AttendArgs<T>& args, std::int64_t row, int rows) const {
    this->write_sums(args.rows, args.outs, args.pitch, row, rows,
                     {{softmax[0].shift, softmax[0].sum, mass[0], 0.0f},
                      {softmax[1].shift, softmax[1].sum, mass[1], 0.0f}});
  }
};

// Partial results of one chunk.
template <class T, int kDim, int kGroups>
__device__ __forceinline__ void attend_chunk(const AttendArgs<T>& args, const CentroidBlock& block,
                                             const ItemChunk& chunk, unsigned char* memory) {
  using Pipeline = KeyPipeline<T, kDim, 2, 4 * kGroups>;
  using Queries = GroupQueries<T, kDim, kGroups>;
  const CentroidQueries& queries = args.queries;
  const int kv_head = block.head / queries.group;
  const Pipeline pipeline{shared_address(memory) + Queries::kBytes,
                          {args.k.rows(chunk.span.batch, kv_head, chunk.span.begin),
                           args.v.rows(chunk.span.batch, kv_head, chunk.span.begin)},
                          (chunk.end - chunk.begin + kAttendKeys - 1) / kAttendKeys};
  pipeline.init();
  __syncthreads();
  const auto first = [&](int t) { return chunk.begin + t * kAttendKeys; };
  pipeline.begin(first, chunk.end);
  const Queries q(shared_address(memory), queries, chunk.item, block.head, block.first);

  const int lane = threadIdx.x % 32,
            warp_row = block.first + static_cast<int>(threadIdx.x) / 32 * 16;
  TopWalk walk;  // of row warp_row + lane, in the first 16 lanes
  if (args.top_keys && lane < 16 && warp_row + lane < queries.clusters)
    walk.start(args.top_keys + queries.row(chunk.item, block.head, warp_row + lane) * args.topk,
               args.topk, chunk.begin);
  pipeline.publish_first();
  __syncthreads();  // all threads have stored their means
  // Which of this lane's scores of tile t are of top keys.
  unsigned long long bits[2];
  const auto find_top = [&](int t) {
    const unsigned long long mask = walk.mask(first(t));
    bits[0] = __shfl_sync(~0u, mask, lane / 4) >> (lane % 4 * 2);
    bits[1] = __shfl_sync(~0u, mask, lane / 4 + 8) >> (lane % 4 * 2);
  };
  const bool hides = args.hides_top_keys();
  GroupMeans<T, kDim> rows;
  float s[32];
  std::uint32_t p[4][4];
  pipeline.wait(0);
  wgmma_fence();
  q.scores(s, pipeline.tile(0, 0));
  wgmma_commit();
  pipeline.advance(0, first, chunk.end);
  find_top(0);
  wgmma_wait<0>();
  wgmma_settle(s);
#pragma unroll 1
  for (int t = 0; t < pipeline.total; ++t) {
    const int left = chunk.end - first(t);
    if (left < kAttendKeys) {
      __syncwarp();  // keeps the compiler from doing this for all tiles
#pragma unroll
      for (int i = 0; i < 32; ++i)
        if (i / 4 * 8 + lane % 4 * 2 + i % 2 >= left) s[i] = -INFINITY;
    }
    if (hides) rows.for_top_keys(s, bits, [](int, float& score) { score = -INFINITY; });
    bool above = t == 0;
    const float limits[2] = {rows.softmax[0].limit(queries.inverse),
                             rows.softmax[1].limit(queries.inverse)};
#pragma unroll
    for (int i = 0; i < 32; ++i) above |= s[i] > limits[i / 2 % 2];
    if (__any_sync(~0u, above)) rows.rescale(s, queries.exponent, hides);
    rows.weigh(s, bits, queries.exponent);
    pack_factor<T>(p, s);
    // Products begin and end in one step: the assembler serialises them otherwise. After the last
    // tile its scores are computed again and ignored, which saves a branch here.
    const int next = min(t + 1, pipeline.total - 1);
    pipeline.wait(next);
    wgmma_fence();
    rows.add_products(p, pipeline.tile(t, 1));
    q.scores(s, pipeline.tile(next, 0));
    wgmma_commit();
    pipeline.advance(t + 1, first, chunk.end);
    find_top(t + 1);
    wgmma_wait<0>();
    wgmma_settle(s);
    rows.settle();
    pipeline.release(t);
  }
  const int row = warp_row + lane / 4;
  rows.write(args, queries.row(block.slot, block.head, row), queries.clusters - row);
}

template <class T, int kDim, int kGroups>
__global__ void __launch_bounds__(kGroups* kWarpgroup, kDim == 64 ? 4 / kGroups : 1)
    centroid_attend_sm90a_kernel(const __grid_constant__ AttendArgs<T> args) {
  await_previous();
  extern __shared__ __align__(1024) unsigned char memory[];
  const CentroidQueries& queries = args.queries;
  if (args.teams.size == 0) {
    const CentroidBlock block(queries, blockIdx.x);
    const ItemChunk chunk = queries.chunks.find(queries.spans.k, block.slot);
    if (chunk.begin < chunk.end) attend_chunk<T, kDim, kGroups>(args, block, chunk, memory);
    return;
  }
  Team team(args.teams);
  CentroidBlock block(queries, static_cast<unsigned>(team.number));  // slot = item
  const int item = block.slot;
  block.slot = item * team.size + team.rank;
  const ItemChunk chunk = queries.chunks.find(queries.spans.k, block.slot);
  if (chunk.begin < chunk.end) attend_chunk<T, kDim, kGroups>(args, block, chunk, memory);
  team.sync();
  const int rows = min(queries.block_rows, queries.clusters - block.first);
  for (int r = static_cast<int>(threadIdx.x) / 32 * team.size + team.rank; r < rows;
       r += 4 * kGroups * team.size)
    combine_row(args, item, block.head, block.first + r);
}

template <class T, int kDim, int kGroups>
void launch(const AttendArgs<T>& args, cudaStream_t stream) {
  constexpr int kBytes =
      KeyPipeline<T, kDim, 2, 4 * kGroups>::kBytes + GroupQueries<T, kDim, kGroups>::kBytes;
  const unsigned tiles = static_cast<unsigned>(args.queries.H * args.queries.row_tiles);
  const auto kernel = centroid_attend_sm90a_kernel<T, kDim, kGroups>;
  const unsigned blocks = tiles * args.queries.chunks.slots;
  if (args.teams.size > 0)
    launch_cooperative_early(kernel, static_cast<int>(blocks), kGroups * kWarpgroup, kBytes, stream,
                             args);
  else
    launch_early("centroid_attend_sm90a", kernel, blocks, kGroups * kWarpgroup, kBytes, stream,
                 args);
}

}  // namespace

template <class T>
void attend_chunks_sm90a(const AttendArgs<T>& args, cudaStream_t stream) {
  if (args.queries.width > 64) return launch<T, 128, 2>(args, stream);
  if (args.queries.block_rows == 256) return launch<T, 64, 4>(args, stream);
  return launch<T, 64, 2>(args, stream);
}

template void attend_chunks_sm90a(const AttendArgs<Bf16>&, cudaStream_t);
template void attend_chunks_sm90a(const AttendArgs<F16>&, cudaStream_t);

}  // namespace coterie::cuda
