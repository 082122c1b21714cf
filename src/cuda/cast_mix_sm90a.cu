// SPDX-License-Identifier: MIT
// CAST's mix on Hopper's warpgroup products. A block keeps the surrogates and summaries of an
// (item, head) in shared memory and goes over tiles of 64 tokens, with pairs of warpgroups: one
// gathers what the tokens' own clusters change (device/cast_gather.cuh), the other adds to that the
// softmax over all clusters.
#include "cuda/cast_mix.h"

#include <algorithm>

#include "cuda/device/await.cuh"
#include "cuda/device/cast_gather.cuh"
#include "cuda/device/cast_rows.cuh"
#include "cuda/launch.h"

namespace coterie::cuda {
namespace {

// The tokens of a warpgroup that multiplies; a thread has two rows.
template <class T, int kDim>
struct MixProducts {
  using Stages = MixStages<T, kDim>;
  const MixArgs<T>& args;
  const Stages& stages;
  const MixRun& run;
  RowSoftmax softmax[2];
  float exponent[2];  // factor of the logits
  float out[kDim / 64][32];
  std::uint32_t q[kDim / 16][4];
  std::uint32_t queries;
  int warp_row, row;  // first row of the warp, first of the thread

  __device__ MixProducts(const MixArgs<T>& all, const Stages& memory, const MixRun& own)
      : args(all),
        stages(memory),
        run(own),
        warp_row(static_cast<int>(threadIdx.x) % kWarpgroup / 32 * 16),
        row(warp_row + static_cast<int>(threadIdx.x) % 32 / 4) {}

  // What the other warpgroup made.
  __device__ void begin(int turn) {
    queries = stages.queries(turn);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int own = row + 8 * half;
      exponent[half] = stages.facts(turn, 0)[own];
      softmax[half].shift = stages.facts(turn, 1)[own];
      softmax[half].sum = 0.0f;
    }
#pragma unroll
    for (int j = 0; j < kDim / 8; ++j) {
      const float4 four = *stages.sums(turn, j);
      float* to = out[j / 8] + j % 8 * 4;
      to[0] = four.x;
      to[1] = four.y;
      to[2] = four.z;
      to[3] = four.w;
    }
    const std::uint32_t sign = args.shape.scale < 0.0f ? 0x80008000u : 0u;
#pragma unroll
    for (int d = 0; d < kDim / 16; ++d) {
      FragmentA<T> a;
      load_a(a, Tile<T, 64>{queries + d / 4 * Stages::kBand}, warp_row, d % 4 * 16);
#pragma unroll
      for (int i = 0; i < 4; ++i) q[d][i] = a.r[i] ^ sign;
    }
  }
  // Starts s = Q Sᵀ.
  __device__ void scores(float (&s)[32], int tile) const {
    const std::uint64_t b = matrix_descriptor(stages.clusters(tile, 0));
#pragma unroll
    for (int d = 0; d < kDim / 16; ++d) {
      const std::uint64_t right = descriptor_behind(b, d / 4 * Stages::kBand + d % 4 * 32);
      if (d == 0)
        wgmma<T, 0, 0>(s, q[d], right);
      else
        wgmma<T, 1, 0>(s, q[d], right);
    }
  }
  // Starts out += P R.
  __device__ void add_products(const std::uint32_t (&p)[4][4], int tile) {
    const std::uint64_t first = matrix_descriptor(stages.clusters(tile, 1));
#pragma unroll
    for (int k = 0; k < 4; ++k)
#pragma unroll
      for (int band = 0; band < kDim / 64; ++band)
        wgmma<T, 1, 1>(out[band], p[k],
                       descriptor_behind(first, band * Stages::kBand + k * (16 * 128)));
  }
  __device__ void rescale(const float (&s)[32]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float top = -INFINITY;
#pragma unroll
      for (int i = 0; i < 16; ++i)
        top = fmaxf(top, s[i / 2 * 4 + 2 * half + i % 2] * exponent[half]);
      const float factor = softmax[half].raise(quad_max(top), 1.0f);
#pragma unroll
      for (int i = 0; i < kDim / 4; ++i) out[i / 16][i % 16 / 2 * 4 + 2 * half + i % 2] *= factor;
    }
  }
  // Weights as left factors. The shift stays while no weight is large; else, or where there is none
  // yet, they are computed again.
  __device__ void weigh(std::uint32_t (&p)[4][4], float (&s)[32], int tile) {
    constexpr float kLarge = 8192.0f;  // two weights are far from the largest f16
    const unsigned long long bits = stages.bits()[tile];
    if (bits != ~0ull) {
      __syncwarp();  // keeps the compiler from doing this for all tiles
      const unsigned long long own = bits >> (threadIdx.x % 4 * 2);
#pragma unroll
      for (int i = 0; i < 32; ++i)
        if (!(own >> (i / 4 * 8 + i % 2) & 1)) s[i] = -INFINITY;
    }
    float sums[2];
#pragma unroll 1
    for (int attempt = 0; attempt < 2; ++attempt) {
      sums[0] = sums[1] = 0.0f;
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        const int half = i % 2;
        const float low = exp2_approximate(fmaf(s[2 * i], exponent[half], -softmax[half].shift));
        const float high =
            exp2_approximate(fmaf(s[2 * i + 1], exponent[half], -softmax[half].shift));
        sums[half] += low + high;
        p[i / 4][i % 4] = pack2<T>(low, high);
      }
      const bool fine = sums[0] <= kLarge && sums[1] <= kLarge;
      if (attempt == 1 || __all_sync(~0u, fine)) break;
      rescale(s);
    }
    softmax[0].sum += sums[0];
    softmax[1].sum += sums[1];
  }
  __device__ void sum_clusters() {
    float s[32];
    std::uint32_t p[4][4];
    wgmma_fence();
    scores(s, 0);
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_settle(s);
#pragma unroll 1
    for (int tile = 0; tile < stages.tiles; ++tile) {
      weigh(p, s, tile);
      wgmma_fence();
      add_products(p, tile);
      scores(s, min(tile + 1, stages.tiles - 1));
      wgmma_commit();
      wgmma_wait<0>();
      wgmma_settle(s);
#pragma unroll
      for (int band = 0; band < kDim / 64; ++band) wgmma_settle(out[band]);
    }
  }
  // Rows go through the queries' place, which this warp has read.
  __device__ void finish(int tile) {
    const int lane = threadIdx.x % 32, left = run.span.length - tile * kMixRows;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int own = row + 8 * half;
      const float total = quad_sum(softmax[half].sum);
      const float inverse = total > 0.0f ? __fdividef(1.0f, total) : 0.0f;
      if (lane % 4 == 0 && own < left)
        args.lse[args.shape.row(run.span, run.head) + tile * kMixRows + own] =
            (softmax[half].shift + __log2f(total)) * kLn2;
#pragma unroll
      for (int j = 0; j < kDim / 8; ++j) {
        const float* two = out[j / 8] + j % 8 * 4 + 2 * half;
        const std::uint32_t word = pack2<T>(two[0] * inverse, two[1] * inverse);
        const std::uint32_t to =
            Tile<T, 64>{queries + j / 8 * Stages::kBand}.chunk(own, j % 8) + lane % 4 * 4;
        asm volatile("st.shared.b32 [%0], %1;" ::"r"(to), "r"(word) : "memory");
      }
    }
    __syncwarp();
    Rows<T> rows = args.out.rows(run.span.batch, run.head, run.span.begin);
#pragma unroll
    for (int i = 0; i < kDim / 16; ++i) {
      const int band = i % (kDim / 64), own = warp_row + i / (kDim / 64) * 4 + lane / 8;
      if (own < left)
        store_chunk(rows, tile * kMixRows + own, band * 64 + lane % 8 * 8,
                    Tile<T, 64>{queries + band * Stages::kBand}.chunk(own, lane % 8));
    }
    __syncwarp();
  }
  // 8 elements from shared memory.
  __device__ static void store_chunk(const Rows<T>& rows, int row, int column, std::uint32_t from) {
    uint4 words;
    asm volatile("ld.shared.v4.b32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
                 : "r"(from)
                 : "memory");
    if (column < rows.width) *reinterpret_cast<uint4*>(rows.row(row) + column) = words;
  }

  __device__ int work(int turn) {
    for (int tile = run.first + stages.pair; tile < run.end; tile += Stages::kPairs, ++turn) {
      mbarrier_wait(stages.full(turn), stages.phase(turn));
      begin(turn);
      sum_clusters();
      finish(tile);
      if (threadIdx.x % 32 == 0) mbarrier_arrive(stages.free(turn));
    }
    return turn;
  }
};

// Surrogates and summaries of a run, by all threads; what was there before is done with.
template <class T, int kDim>
__device__ void load_clusters(const MixArgs<T>& args, const MixStages<T, kDim>& stages,
                              const MixRun& run) {
  using Stages = MixStages<T, kDim>;
  constexpr int kThreads = 2 * Stages::kPairs * kWarpgroup;
  const CastShape& shape = args.shape;
  const T* tables[2] = {
      args.surrogates + static_cast<std::int64_t>(run.head) * shape.clusters * shape.D,
      args.summaries + shape.cluster(run.item, run.head, 0) * shape.D};
  __syncthreads();
  for (int i = 0; i < 2 * stages.tiles; ++i)
#pragma unroll
    for (int band = 0; band < kDim / 64; ++band) {
      Rows<const T> rows = dense_rows(tables[i % 2], shape.D);
      rows.data += band * 64;
      rows.width -= band * 64;
      load_tile<kMixRows, kThreads>(
          Tile<T, 64>{stages.clusters(i / 2, i % 2) + band * Stages::kBand}, rows, i / 2 * kMixRows,
          shape.clusters - i / 2 * kMixRows);
    }
  cp_async_commit();
  if (threadIdx.x < 32)
    for (int tile = 0; tile < stages.tiles; ++tile) {
      const ClusterBits there(
          args.summary_lse ? args.summary_lse + shape.cluster(run.item, run.head, 0) : nullptr,
          tile * kMixRows, shape.clusters);
      if (threadIdx.x == 0) stages.bits()[tile] = there.bits;
    }
  cp_async_wait<0>();
  fence_async_proxy();
  __syncthreads();
}

// Calls body(run) for the runs of this block, with their clusters in shared memory.
template <class T, int kDim, class Body>
__device__ __forceinline__ void for_runs(const MixArgs<T>& args, const MixStages<T, kDim>& stages,
                                         const Body& body) {
  const KeyChunks& tiles = args.tiles;
  const std::int64_t units = static_cast<std::int64_t>(tiles.slots) * args.shape.H;
  int unit = static_cast<int>(units * blockIdx.x / gridDim.x);
  const int last = static_cast<int>(units * (blockIdx.x + 1) / gridDim.x);
  while (unit < last) {
    const int slot = unit % tiles.slots;
    const KeyChunk tile = tiles.find(args.shape.tokens, slot);
    MixRun run{tile.item, unit / tiles.slots, tile.split, 0, tile.keys};
    // The slots of an item, of which the last may be unused.
    const int next = tile.item + 1 < tiles.items
                         ? tiles.first_slot(args.shape.tokens, tile.item + 1)
                         : tiles.slots;
    const int here = min(last - unit, next - slot);
    unit += here;
    run.end = min(run.first + here, tiles.count(run.span.length));
    if (run.first >= run.end) continue;
    load_clusters(args, stages, run);
    body(run);
  }
}

template <class T, int kDim>
__global__ void __launch_bounds__(2 * MixStages<T, kDim>::kPairs * kWarpgroup, 1)
    mix_sm90a_kernel(const __grid_constant__ MixArgs<T> args) {
  await_previous();
  extern __shared__ __align__(1024) unsigned char memory[];
  using Stages = MixStages<T, kDim>;
  const int group = static_cast<int>(threadIdx.x) / kWarpgroup;
  const Stages stages{memory, (args.shape.clusters + kMixRows - 1) / kMixRows,
                      group % Stages::kPairs};
  stages.init();
  int turn = 0;
  // Registers move to the warpgroups that multiply.
  constexpr bool kMove = Stages::kPairs == 2;
  if (group >= Stages::kPairs) {
    if constexpr (kMove) asm volatile("setmaxnreg.dec.sync.aligned.u32 112;");
    for_runs(args, stages,
             [&](const MixRun& run) { turn = MixGather<T, kDim>(args, stages, run).work(turn); });
  } else {
    if constexpr (kMove) asm volatile("setmaxnreg.inc.sync.aligned.u32 144;");
    for_runs(args, stages,
             [&](const MixRun& run) { turn = MixProducts<T, kDim>(args, stages, run).work(turn); });
  }
}

template <class T, int kDim>
void launch(const MixArgs<T>& args, cudaStream_t stream) {
  using Stages = MixStages<T, kDim>;
  const int tiles = (args.shape.clusters + kMixRows - 1) / kMixRows;
  const std::int64_t units = static_cast<std::int64_t>(args.tiles.slots) * args.shape.H;
  const std::int64_t most = (units + Stages::kPairs - 1) / Stages::kPairs;
  launch_early("cast mix", mix_sm90a_kernel<T, kDim>,
               static_cast<unsigned>(std::min<std::int64_t>(multiprocessors(), most)),
               2 * Stages::kPairs * kWarpgroup, Stages::bytes(tiles), stream, args);
}

}  // namespace

template <class T>
bool mix_suits_sm90a(const MixArgs<T>& args) {
  constexpr int kMost = 227 * 1024;
  const int tiles = (args.shape.clusters + kMixRows - 1) / kMixRows;
  const int bytes =
      args.shape.D > 64 ? MixStages<T, 128>::bytes(tiles) : MixStages<T, 64>::bytes(tiles);
  return !args.shape.laplace && args.q.aligned && args.out.aligned && bytes <= kMost;
}

template <class T>
void mix_sm90a(MixArgs<T> args, cudaStream_t stream) {
  args.tiles = token_tiles(args.shape, kMixRows);
  if (args.tiles.slots == 0) return;
  if (args.shape.D > 64)
    launch<T, 128>(args, stream);
  else
    launch<T, 64>(args, stream);
}

template bool mix_suits_sm90a(const MixArgs<__nv_bfloat16>&);
template bool mix_suits_sm90a(const MixArgs<__half>&);
template void mix_sm90a(MixArgs<__nv_bfloat16>, cudaStream_t);
template void mix_sm90a(MixArgs<__half>, cudaStream_t);

}  // namespace coterie::cuda
