// SPDX-License-Identifier: MIT
// The scores of CAST's clusters (select.h) on Hopper: 64 tokens against all clusters, 32 by each of
// two warpgroups, while a third one loads. Queries and keys of a token are rows of one product,
// arranged so that a thread gets both, and only the mix of their softmaxes is written.
//
// Grid: one block per multiprocessor, or two with up to 64 clusters, takes tiles of 64 tokens and a
// list head in turn. Two blocks form a thread block cluster and share the surrogates: each fetches
// half of them for both. Shared memory: four stages of 64 columns of tokens and clusters, 96 to 192
// KiB. Preconditions: Hopper, 16-bit types, softmax, up to 256 clusters (kMostScored). Else
// select.cu.
#include <cstdint>

#include "cuda/cast/select.h"
#include "cuda/launch/launch.h"
#include "cuda/prim/dependent.cuh"
#include "cuda/prim/mbarrier.cuh"
#include "cuda/prim/wgmma.cuh"

namespace coterie::cuda {
namespace {

// A pair of blocks (a thread block cluster) that fill each other's shared memory.

constexpr int kPair = 2;  // blocks

__device__ __forceinline__ unsigned pair_rank() {
  unsigned rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
__device__ __forceinline__ void pair_sync() {
  asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
}
// The same if only barriers were written.
__device__ __forceinline__ void pair_start() {
  asm volatile(
      "fence.mbarrier_init.release.cluster;\n"
      "barrier.cluster.arrive.relaxed.aligned;\nbarrier.cluster.wait.aligned;" ::
          : "memory");
}
// Arrives at the barrier of one of the pair's blocks.
__device__ __forceinline__ void pair_arrive(std::uint32_t barrier, int block) {
  asm volatile(
      "{.reg .b32 there;\n"
      "mapa.shared::cluster.u32 there, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [there];}" ::"r"(barrier),
      "r"(block)
      : "memory");
}
// Arrives and announces the bytes that copies will bring.
__device__ __forceinline__ void expect_bytes(std::uint32_t barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}
// Copies to the same place in both blocks; each block's barrier counts.
__device__ __forceinline__ void copy_to_pair(std::uint32_t to, const void* from, int bytes,
                                             std::uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
      "[%0], [%1], %2, [%3], %4;" ::"r"(to),
      "l"(from), "r"(bytes), "r"(barrier), "h"(static_cast<std::uint16_t>((1 << kPair) - 1))
      : "memory");
}

constexpr int kScoreRows = 64;
constexpr int kScoreGroups = 2, kScoreThreads = (kScoreGroups + 1) * kWarpgroup;  // one more loads
constexpr int kScoreDepth = 64;  // elements of a row multiplied at a time: 128 bytes

template <class T>
struct ScoreArgs {
  CastScores scores;
  ItemChunks tiles;
  int first_head;
  unsigned slots, units;  // tiles per list head, in total
  Tensor4<const T> q, k;
  const T* surrogates;  // (H, chunks, kClusters, 64), rows permuted as in tiles
};

template <int kClusters>
struct ScoreStages {
  static constexpr int kStages = 4;                                  // as many as loading warps
  static constexpr int kGroup = 64 * 128, kTable = kClusters * 128;  // bytes
  static constexpr int kStage = kScoreGroups * kGroup + kTable;
  static constexpr int kBytes = kStages * kStage + kStages * 16;

  std::uint32_t base;

  // Rows of a warpgroup: 8 queries, the keys of the same tokens, and so on.
  __device__ std::uint32_t tokens(unsigned step, int group) const {
    return base + step % kStages * kStage + group * kGroup;
  }
  __device__ std::uint32_t table(unsigned step) const { return tokens(step, kScoreGroups); }
  __device__ std::uint32_t full(unsigned step) const {
    return base + kStages * kStage + step % kStages * 16;
  }
  __device__ std::uint32_t free(unsigned step) const { return full(step) + 8; }
  __device__ static int phase(unsigned step) { return step / kStages & 1; }
  __device__ void init() const {
    if (threadIdx.x < kStages) {
      mbarrier_init(full(threadIdx.x), 32 + 1);
      mbarrier_init(free(threadIdx.x), kPair * kScoreGroups * kWarpgroup / 32);
    }
  }
};

// 64 tokens of an item for a list head.
struct ScoreTile {
  ItemChunk tokens;
  int list_head;

  template <class T>
  __device__ ScoreTile(const ScoreArgs<T>& args, unsigned number)
      : tokens(args.tiles.find(args.scores.shape.tokens,
                               min(static_cast<int>(number % args.slots), args.tiles.slots - 1))),
        list_head(args.first_head + static_cast<int>(number / args.slots)) {
    if (static_cast<int>(number % args.slots) >= args.tiles.slots) tokens.end = tokens.begin;
  }
};

template <class T, int kClusters>
struct ScoreBlock {
  using Stages = ScoreStages<kClusters>;
  using Sums = float[kClusters / 2];
  const ScoreArgs<T>& args;
  Stages stages;
  int chunks;
  unsigned steps;  // of a tile

  __device__ ScoreBlock(const ScoreArgs<T>& all, std::uint32_t base)
      : args(all), stages{base}, chunks((all.scores.shape.D + kScoreDepth - 1) / kScoreDepth) {
    steps = chunks * (all.scores.shape.list_heads == 1 ? all.scores.shape.H : 1);
  }

  // Called by a warp: loads queries (side 0) or keys of the tile's tokens to the rows of the
  // warpgroups that use them.
  __device__ void load_side(unsigned step, int side, const Rows<const T>& rows, int column,
                            const ItemChunk& tokens) const {
    const int lane = static_cast<int>(threadIdx.x) % 32, own = column + lane % 8 * 8;
    const int count = own < rows.width ? tokens.end - tokens.begin - lane / 8 : 0;
    const std::uint32_t even =
        Tile<T, 64>{stages.tokens(step, 0)}.chunk(lane / 8, lane % 8) + side * (8 * 128);
    const std::uint32_t odd = even ^ 64;  // four rows further
    const T* from = rows.row(tokens.begin + lane / 8) + own;
    const auto copy = [&](const auto& one) {
#pragma unroll
      for (int i = 0; i < kScoreRows; i += 4) {
        // Eight tokens of a side are 8 rows, followed by 8 of the other side.
        one((i % 8 == 0 ? even : odd) + i / 32 * Stages::kGroup + (i % 32 / 8 * 16 + i % 8) * 128,
            from, i < count);
        from += 4 * rows.pitch;
      }
    };
    if (rows.aligned)
      copy([&](std::uint32_t to, const T* source, bool there) {
        cp_async16(to, source, there ? 16 : 0);
      });
    else
      copy([&](std::uint32_t to, const T* source, bool there) {
        store_shared16(to,
                       there ? load_chunk(source - own, own, rows.width) : make_uint4(0, 0, 0, 0));
      });
  }

  // Called by the last warpgroup: the steps of the block's tiles, one warp per stage.
  __device__ void load() const {
    const CastShape& shape = args.scores.shape;
    const bool aligned = args.q.aligned && args.k.aligned;
    const int half = static_cast<int>(pair_rank()) * (Stages::kTable / kPair);
    const unsigned tiles = (args.units - blockIdx.x + gridDim.x - 1) / gridDim.x;
    for (unsigned number = threadIdx.x % kWarpgroup / 32; number < tiles * steps;
         number += Stages::kStages) {
      const ScoreTile tile(args, blockIdx.x + number / steps * gridDim.x);
      const ItemSpan& span = tile.tokens.span;
      const int step = static_cast<int>(number % steps), head = tile.list_head + step / chunks;
      const int column = step % chunks * kScoreDepth;
      if (number >= Stages::kStages) mbarrier_wait(stages.free(number), Stages::phase(number) ^ 1);
      if (threadIdx.x % 32 == 0) {
        expect_bytes(stages.full(number), Stages::kTable);
        copy_to_pair(
            stages.table(number) + half,
            reinterpret_cast<const unsigned char*>(args.surrogates) +
                (static_cast<std::int64_t>(tile.list_head) * chunks + step) * Stages::kTable + half,
            Stages::kTable / kPair, stages.full(number));
      }
      load_side(number, 0, args.q.rows(span.batch, head, span.begin), column, tile.tokens);
      load_side(number, 1, args.k.rows(span.batch, head / shape.group, span.begin), column,
                tile.tokens);
      if (aligned) {
        arrive_after_copies(stages.full(number));
      } else {
        cp_async_wait<0>();  // one of the tensors may be aligned
        fence_async_proxy();
        mbarrier_arrive(stages.full(number));
      }
    }
  }

  // Called by a multiplying warpgroup: its 32 tokens of the block's tiles.
  __device__ void work(int group) const {
    unsigned number = 0;
    for (unsigned unit = blockIdx.x; unit < args.units; unit += gridDim.x, number += steps) {
      Sums sums = {};
      multiply(sums, number, group);
      write(sums, ScoreTile(args, unit), group);
    }
  }
  __device__ __forceinline__ void multiply(Sums& sums, unsigned first, int group) const {
    for (unsigned step = 0; step < steps; ++step) {
      const unsigned number = first + step;
      mbarrier_wait(stages.full(number), Stages::phase(number));
      fence_async_proxy();
      const std::uint64_t a = matrix_descriptor(stages.tokens(number, group));
      const std::uint64_t b = matrix_descriptor(stages.table(number));
      wgmma_fence();
#pragma unroll
      for (int depth = 0; depth < 4; ++depth)
        wgmma_from<T, 0>(sums, descriptor_behind(a, depth * 32), descriptor_behind(b, depth * 32),
                         step > 0 || depth > 0);
      wgmma_commit();
      wgmma_wait<1>();
      if (step > 0) release(number - 1);
    }
    wgmma_wait<0>();
    release(first + steps - 1);
    wgmma_settle(sums);
  }
  __device__ void release(unsigned number) const {
    if (threadIdx.x % 32 < kPair) pair_arrive(stages.free(number), threadIdx.x % 32);
  }

  // Turns affinities of a thread's token with a quarter of the clusters, by queries and by keys,
  // into scores: the softmaxes and their mix.
  __device__ __forceinline__ void write(Sums& sums, const ScoreTile& tile, int group) const {
    const CastScores& scores = args.scores;
    const int lane = static_cast<int>(threadIdx.x) % 32, clusters = scores.shape.clusters;
    const int token = tile.tokens.begin + group * 32 +
                      static_cast<int>(threadIdx.x) % kWarpgroup / 32 * 8 + lane / 4;
    const bool there = token < tile.tokens.end, all = clusters == kClusters;
    if (!all) {
      __syncwarp();
#pragma unroll
      for (int i = 0; i < kClusters / 2; ++i)
        if (i / 4 * 8 + lane % 4 * 2 + i % 2 >= clusters) sums[i] = -INFINITY;
    }
    const float gate = there ? scores.shape.gates(tile.tokens.span)[token] : 0.0f;
    float factors[2];
#pragma unroll
    for (int side = 0; side < 2; ++side) {
      float top[4] = {-INFINITY, -INFINITY, -INFINITY, -INFINITY}, sum[4] = {};
#pragma unroll
      for (int i = 0; i < kClusters / 4; ++i)
        top[i % 4] = fmaxf(top[i % 4], sums[i / 2 * 4 + 2 * side + i % 2]);
      const float shift = quad_max(fmaxf(fmaxf(top[0], top[1]), fmaxf(top[2], top[3]))) * -kLog2e;
#pragma unroll
      for (int i = 0; i < kClusters / 4; ++i) {
        float& value = sums[i / 2 * 4 + 2 * side + i % 2];
        value = exp2_approximate(fmaf(value, kLog2e, shift));
        sum[i % 4] += value;
      }
      factors[side] =
          gate_sigmoid(side == 0 ? gate : -gate) / quad_sum((sum[0] + sum[1]) + (sum[2] + sum[3]));
    }
    if (!there) return;
    const bool bad = isnan(factors[0] + factors[1]);
    const std::int64_t pitch = scores.rows();
    const std::int64_t first =
        static_cast<std::int64_t>(tile.list_head * scores.blocks - scores.first_unit) *
            kUnitClusters +
        lane % 4 * 2;
    float* to = scores.affinities + first * pitch +
                static_cast<std::int64_t>(tile.tokens.span.batch) * scores.shape.N +
                tile.tokens.span.begin + token;
#pragma unroll
    for (int i = 0; i < kClusters / 4; ++i, to += i % 2 ? pitch : 7 * pitch) {
      const float* two = sums + i / 2 * 4 + i % 2;
      const float score = fmaf(two[0], factors[0], two[2] * factors[1]);
      if (all || i / 2 * 8 + lane % 4 * 2 + i % 2 < clusters) *to = bad ? -INFINITY : score;
    }
  }
};

template <int kClusters>
constexpr unsigned kBlocks = kClusters == 64 ? 2 : 1;  // per multiprocessor

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

void cast_scores_sm90a(const CastScores& scores, const AttentionCall& call, int first_head,
                       int heads, void* table, cudaStream_t stream) {
  const ItemChunks tiles = token_tiles(scores.shape, kScoreRows);
  const auto run = [&](auto tag) {
    using T = decltype(tag);
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
  };
  if (call.inputs.q.dtype == DType::bf16)
    run(Bf16{});
  else
    run(F16{});
}

}  // namespace coterie::cuda
