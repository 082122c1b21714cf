// SPDX-License-Identifier: MIT
// The scores of CAST's clusters (cast_select.h) on Hopper, where one block can hold all clusters
// and weights are softmaxes:
// 64 tokens against up to 256 clusters, queries by one warpgroup and keys by another, while a third
// one loads. Two blocks side by side share the surrogates: each fetches half of them for both. At
// the end the softmaxes are complete, and only their mix is written.
#include <algorithm>

#include "cuda/cast_select.h"
#include "cuda/device/await.cuh"
#include "cuda/device/wgmma.cuh"
#include "cuda/launch.h"

namespace coterie::cuda {
namespace {

constexpr int kRows = 64, kThreads = 3 * kWarpgroup, kPair = 2;
constexpr int kDepth = 64;  // elements of a row that are multiplied at a time: 128 bytes
constexpr int kPitch = kRows + 4;

template <class T>
struct ScoreArgs {
  CastScores scores;
  KeyChunks tiles;
  int first_head;
  unsigned slots;  // blocks of a list head
  Tensor4<const T> q, k;
  const T* surrogates;  // (H, chunks, kClusters, 64), rows permuted as in tiles
};

template <class T, int kClusters>
__global__ void surrogate_tiles_kernel(const float* from, T* to, int clusters, int width) {
  await_previous();
  const int chunks = (width + kDepth - 1) / kDepth;
  const int number = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);  // of 8 elements
  const int piece = number % 8, row = number / 8 % kClusters;
  const int chunk = number / 8 / kClusters % chunks, head = number / 8 / kClusters / chunks;
  union {
    uint4 words;
    T elements[8];
  } eight;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int column = chunk * kDepth + piece * 8 + i;
    const bool there = row < clusters && column < width;
    eight.elements[i] = from_float<T>(
        there ? from[(static_cast<std::int64_t>(head) * clusters + row) * width + column] : 0.0f);
  }
  reinterpret_cast<uint4*>(to)[number - piece + (piece ^ row % 8)] = eight.words;
}

// d += a b, 64 x 16 by 16 x 128, both in shared memory.
template <class T>
__device__ __forceinline__ void wgmma_wide(float (&d)[64], std::uint64_t a, std::uint64_t b) {
#define COTERIE_WIDE(type)                                                                         \
  asm volatile(                                                                                    \
      "{.reg .pred p; setp.ne.b32 p, 1, 0;\n"                                                      \
      "wgmma.mma_async.sync.aligned.m64n128k16.f32." type "." type                                 \
      " {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"                                   \
      "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"                           \
      "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,"                           \
      "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63}"                           \
      ", %64, %65, p, 1, 1, 0, 0;}"                                                                \
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),        \
        "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]),    \
        "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), \
        "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), \
        "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), \
        "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), "+f"(d[41]), \
        "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]), \
        "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]), \
        "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), \
        "+f"(d[63])                                                                                \
      : "l"(a), "l"(b))
  if constexpr (std::is_same_v<T, __nv_bfloat16>)
    COTERIE_WIDE("bf16");
  else
    COTERIE_WIDE("f16");
#undef COTERIE_WIDE
}

__device__ __forceinline__ unsigned pair_rank() {
  unsigned rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
__device__ __forceinline__ void pair_sync() {
  asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
}
// The same where nothing but barriers was written.
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
// Bytes that copies will bring, besides an arrival.
__device__ __forceinline__ void expect_bytes(std::uint32_t barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}
// An arrival once this thread's copies by cp.async are there.
__device__ __forceinline__ void arrive_after_copies(std::uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}
// To the same place in both blocks; each one's barrier counts.
__device__ __forceinline__ void copy_to_pair(std::uint32_t to, const void* from, int bytes,
                                             std::uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
      "[%0], [%1], %2, [%3], %4;" ::"r"(to),
      "l"(from), "r"(bytes), "r"(barrier), "h"(static_cast<std::uint16_t>((1 << kPair) - 1))
      : "memory");
}

template <int kClusters>
struct ScoreStages {
  static constexpr int kStages = 4;
  static constexpr int kTokens = kRows * 128, kTable = kClusters * 128;  // bytes
  static constexpr int kStage = 2 * kTokens + kTable;
  static constexpr int kBytes = kStages * kStage + kStages * 16;
  static_assert(kPitch * kClusters * 4 <= kStages * kStage, "scores in the stages' place");

  std::uint32_t base;

  __device__ std::uint32_t tokens(int step, int side) const {
    return base + step % kStages * kStage + side * kTokens;
  }
  __device__ std::uint32_t table(int step) const { return tokens(step, 2); }
  __device__ std::uint32_t full(int step) const {
    return base + kStages * kStage + step % kStages * 16;
  }
  __device__ std::uint32_t free(int step) const { return full(step) + 8; }
  __device__ static int phase(int step) { return step / kStages & 1; }
  __device__ void init() const {
    if (threadIdx.x < kStages) {
      mbarrier_init(full(threadIdx.x), kWarpgroup + 1);
      mbarrier_init(free(threadIdx.x), kPair * 2 * kWarpgroup / 32);
    }
  }
};

template <class T, int kClusters>
struct ScoreBlock {
  using Stages = ScoreStages<kClusters>;
  const ScoreArgs<T>& args;
  Stages stages;
  KeyChunk tile;
  int list_head, chunks, steps;

  __device__ ScoreBlock(const ScoreArgs<T>& all, std::uint32_t base)
      : args(all),
        stages{base},
        tile(all.tiles.find(all.scores.shape.tokens,
                            min(static_cast<int>(blockIdx.x % all.slots), all.tiles.slots - 1))),
        list_head(all.first_head + static_cast<int>(blockIdx.x / all.slots)),
        chunks((all.scores.shape.D + kDepth - 1) / kDepth),
        steps(chunks * (all.scores.shape.list_heads == 1 ? all.scores.shape.H : 1)) {
    if (static_cast<int>(blockIdx.x % all.slots) >= all.tiles.slots) tile.end = tile.begin;
  }

  // By the third warpgroup.
  __device__ void load() const {
    const CastShape& shape = args.scores.shape;
    const int half = static_cast<int>(pair_rank()) * (Stages::kTable / kPair);
    for (int step = 0; step < steps; ++step) {
      if (step >= Stages::kStages) mbarrier_wait(stages.free(step), Stages::phase(step) ^ 1);
      const int head = list_head + step / chunks, column = step % chunks * kDepth;
      if (threadIdx.x % kWarpgroup == 0) {
        expect_bytes(stages.full(step), Stages::kTable);
        copy_to_pair(
            stages.table(step) + half,
            reinterpret_cast<const unsigned char*>(args.surrogates) +
                (static_cast<std::int64_t>(head) * chunks + step % chunks) * Stages::kTable + half,
            Stages::kTable / kPair, stages.full(step));
      }
      const auto load_side = [&](int side, Rows<const T> rows) {
        rows.data += column;
        rows.width -= column;
        load_tile<kRows, kWarpgroup>(Tile<T, 64>{stages.tokens(step, side)}, rows, tile.begin,
                                     tile.end - tile.begin);
      };
      load_side(0, args.q.rows(tile.keys.batch, head, tile.keys.begin));
      load_side(1, args.k.rows(tile.keys.batch, head / shape.group, tile.keys.begin));
      if (args.q.aligned && args.k.aligned) {
        arrive_after_copies(stages.full(step));
      } else {
        cp_async_wait<0>();  // one of them may be aligned
        fence_async_proxy();
        mbarrier_arrive(stages.full(step));
      }
    }
  }

  // Products of this warpgroup's side.
  template <int kTiles, int kCount>
  __device__ __forceinline__ void multiply(float (&sums)[kTiles][kCount], int side) const {
    for (int step = 0; step < steps; ++step) {
      mbarrier_wait(stages.full(step), Stages::phase(step));
      fence_async_proxy();
      const std::uint64_t a = matrix_descriptor(stages.tokens(step, side));
      const std::uint64_t b = matrix_descriptor(stages.table(step));
      wgmma_fence();
#pragma unroll
      for (int depth = 0; depth < 4; ++depth)
#pragma unroll
        for (int t = 0; t < kTiles; ++t) {
          const std::uint64_t right = descriptor_behind(b, t * (128 * 128) + depth * 32);
          if constexpr (kCount == 64)
            wgmma_wide<T>(sums[t], descriptor_behind(a, depth * 32), right);
          else
            wgmma<T, 1, 0>(sums[t], descriptor_behind(a, depth * 32), right);
        }
      wgmma_commit();
      wgmma_wait<1>();
      if (step > 0) release(step - 1);
    }
    wgmma_wait<0>();
#pragma unroll
    for (int t = 0; t < kTiles; ++t) wgmma_settle(sums[t]);
  }
  __device__ void release(int step) const {
    if (threadIdx.x % 32 < kPair) pair_arrive(stages.free(step), threadIdx.x % 32);
  }

  // Affinities of this thread's two rows become one side's part of the scores.
  template <int kTiles, int kCount>
  __device__ __forceinline__ void weigh(float (&sums)[kTiles][kCount], int side) const {
    const CastShape& shape = args.scores.shape;
    const int row = static_cast<int>(threadIdx.x) % kWarpgroup / 32 * 16 +
                    static_cast<int>(threadIdx.x) % 32 / 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int token = tile.begin + row + 8 * half;
      const float gate = token < tile.end ? shape.gates(tile.keys)[token] : 0.0f;
      const auto visit = [&](const auto& body) {
#pragma unroll
        for (int i = 0; i < kTiles * kCount / 2; ++i) {
          const int t = i / (kCount / 2), j = i % (kCount / 2);
          if (t * 2 * kCount + j / 2 * 8 + static_cast<int>(threadIdx.x) % 4 * 2 + j % 2 <
              shape.clusters)
            body(sums[t][j / 2 * 4 + 2 * half + j % 2]);
        }
      };
      float largest = -INFINITY, sum = 0.0f;
      visit([&](float& value) { largest = fmaxf(largest, value); });
      largest = quad_max(largest);
      visit([&](float& value) { sum += expf(value - largest); });
      const float norm = largest + logf(quad_sum(sum)) + softplus(side == 0 ? -gate : gate);
      visit([&](float& value) { value = expf(value - norm); });
    }
  }

  // Both sides' parts meet in shared memory, clusters by tokens, and are written from there.
  template <int kTiles, int kCount>
  __device__ __forceinline__ void write(const float (&sums)[kTiles][kCount], int side,
                                        float* shared) const {
    const auto wait_both = [] { asm volatile("bar.sync 1, %0;" ::"n"(2 * kWarpgroup) : "memory"); };
    const int row = static_cast<int>(threadIdx.x) % kWarpgroup / 32 * 16 +
                    static_cast<int>(threadIdx.x) % 32 / 4;
    for (int turn = 0; turn < 2; ++turn) {
      wait_both();
      if (turn == side)
#pragma unroll
        for (int i = 0; i < kTiles * kCount; ++i) {
          const int t = i / kCount, j = i % kCount;
          float& to = shared[(t * 2 * kCount + j / 4 * 8 + threadIdx.x % 4 * 2 + j % 2) * kPitch +
                             row + j / 2 % 2 * 8];
          to = turn == 0 ? sums[t][j] : to + sums[t][j];
        }
    }
    wait_both();
    const CastScores& scores = args.scores;
    const int lane = threadIdx.x % 16 * 4, left = tile.end - tile.begin - lane;
    const std::int64_t place = static_cast<std::int64_t>(tile.keys.batch) * scores.shape.N +
                               tile.keys.begin + tile.begin + lane;
    for (int c = threadIdx.x / 16; c < scores.shape.clusters; c += 2 * kWarpgroup / 16) {
      float four[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float score = shared[c * kPitch + lane + i];
        four[i] = isnan(score) ? -INFINITY : score;
      }
      float* to =
          scores.affinity(list_head * scores.blocks + c / kUnitClusters, 0, c % kUnitClusters) +
          place;
      if (left >= 4 && reinterpret_cast<std::uintptr_t>(to) % 16 == 0) {
        *reinterpret_cast<float4*>(to) = make_float4(four[0], four[1], four[2], four[3]);
        continue;
      }
#pragma unroll
      for (int i = 0; i < 4; ++i)
        if (i < left) to[i] = four[i];
    }
  }
};

template <class T, int kClusters>
__global__ void __cluster_dims__(kPair, 1, 1) __launch_bounds__(kThreads, kClusters == 64 ? 2 : 1)
    scores_sm90a_kernel(const __grid_constant__ ScoreArgs<T> args) {
  await_previous();
  extern __shared__ __align__(1024) unsigned char memory[];
  const ScoreBlock<T, kClusters> block(args, shared_address(memory));
  block.stages.init();
  pair_start();
  const int group = static_cast<int>(threadIdx.x) / kWarpgroup;
  if (group == 2) {
    block.load();
  } else {
    float sums[kClusters == 256 ? 2 : 1][kClusters == 64 ? 32 : 64] = {};
    block.multiply(sums, group);
    block.weigh(sums, group);
    block.write(sums, group, reinterpret_cast<float*>(memory));
  }
  pair_sync();  // the other block's arrivals come here
}

template <class T, int kClusters>
void launch(ScoreArgs<T> args, int heads, void* table, cudaStream_t stream) {
  const CastShape& shape = args.scores.shape;
  args.surrogates = static_cast<const T*>(table);
  constexpr int kEach = 256;
  const int chunks = (shape.D + kDepth - 1) / kDepth;
  if (args.first_head == 0)
    launch_early("cast surrogates", surrogate_tiles_kernel<T, kClusters>,
                 dim3(static_cast<unsigned>(shape.H * chunks * kClusters * 8 / kEach)), kEach, 0,
                 stream, shape.surrogates, static_cast<T*>(table), shape.clusters, shape.D);
  launch_early("cast scores", scores_sm90a_kernel<T, kClusters>,
               dim3(args.slots * static_cast<unsigned>(heads)), kThreads,
               ScoreStages<kClusters>::kBytes, stream, args);
}

}  // namespace

template <class T>
void scores_sm90a(const CastScores& scores, const AttentionCall& call, int first_head, int heads,
                  void* table, cudaStream_t stream) {
  const KeyChunks tiles = token_tiles(scores.shape, kRows);
  const ScoreArgs<T> args{scores,
                          tiles,
                          first_head,
                          static_cast<unsigned>((tiles.slots + kPair - 1) / kPair * kPair),
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

template void scores_sm90a<__nv_bfloat16>(const CastScores&, const AttentionCall&, int, int, void*,
                                          cudaStream_t);
template void scores_sm90a<__half>(const CastScores&, const AttentionCall&, int, int, void*,
                                   cudaStream_t);

}  // namespace coterie::cuda
