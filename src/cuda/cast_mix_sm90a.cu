// SPDX-License-Identifier: MIT
// CAST's mix on Hopper's warpgroup products. A block keeps the surrogates and summaries of an
// (item, head) in shared memory and goes over tiles of 64 tokens, which some warps load
// (device/cast_gather.cuh). A warpgroup takes a tile alone: the softmax over all clusters, then
// what the tokens' own clusters change.
#include "cuda/cast_mix.h"

#include <algorithm>

#include "cuda/device/await.cuh"
#include "cuda/device/cast_gather.cuh"
#include "cuda/device/cast_rows.cuh"
#include "cuda/launch.h"

namespace coterie::cuda {
namespace {

// 16 slots of a warp's rows: lane i has the row and the cluster of slot i % 16, of which `count`
// are there.
struct MixBatch {
  int row, cluster, count;
};

// The tokens of a warpgroup, by warps of 16; a thread has two rows.
template <class T, int kDim>
struct MixProducts {
  using Memory = MixMemory<T, kDim>;
  using Loader = MixLoader<T, kDim>;
  const MixArgs<T>& args;
  const Memory memory;
  const MixRun run;
  const Loader loader;
  RowSoftmax softmax[2];
  float factor;       // of the logits of row l % 16, to base 2 for a softmax
  float exponent[2];  // the same of this thread's rows, without the sign
  float out[kDim / 64][32];
  std::uint32_t q[kDim / 16][4];
  std::uint32_t queries;
  int lane;

  __device__ MixProducts(const MixArgs<T>& all, const Memory& shared, const MixRun& own)
      : args(all),
        memory(shared),
        run(own),
        loader(all, shared, own),
        lane(static_cast<int>(threadIdx.x) % 32) {}

  __device__ void begin(int turn, float gate) {
    queries = memory.queries(turn);
    factor = args.shape.scale * kLog2e * gate_factor(args.shape, gate);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      exponent[half] = fmaxf(fabsf(__shfl_sync(~0u, factor, lane / 4 + 8 * half)), 1e-30f);
      softmax[half] = {};
    }
#pragma unroll
    for (int i = 0; i < kDim / 2; ++i) out[i / 32][i % 32] = 0.0f;
    const std::uint32_t sign = args.shape.scale < 0.0f ? 0x80008000u : 0u;
#pragma unroll
    for (int d = 0; d < kDim / 16; ++d) {
      FragmentA<T> a;
      load_a(a, Tile<T, 64>{queries + d / 4 * Memory::kQueryBand}, 0, d % 4 * 16);
#pragma unroll
      for (int i = 0; i < 4; ++i) q[d][i] = a.r[i] ^ sign;
    }
  }
  // Starts s = Q Sᵀ.
  __device__ void scores(float (&s)[32], int tile) const {
    const std::uint64_t b = matrix_descriptor(memory.clusters(tile, 0));
#pragma unroll
    for (int d = 0; d < kDim / 16; ++d) {
      const std::uint64_t right = descriptor_behind(b, d / 4 * Memory::kBand + d % 4 * 32);
      if (d == 0)
        wgmma<T, 0, 0>(s, q[d], right);
      else
        wgmma<T, 1, 0>(s, q[d], right);
    }
  }
  // Starts out += P R.
  __device__ void add_products(const std::uint32_t (&p)[4][4], int tile) {
    const std::uint64_t first = matrix_descriptor(memory.clusters(tile, 1));
#pragma unroll
    for (int k = 0; k < 4; ++k)
#pragma unroll
      for (int band = 0; band < kDim / 64; ++band)
        wgmma<T, 1, 1>(out[band], p[k],
                       descriptor_behind(first, band * Memory::kBand + k * (16 * 128)));
  }
  __device__ void raise(const float (&s)[32]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float top[2] = {-INFINITY, -INFINITY};
#pragma unroll
      for (int i = 0; i < 16; ++i) top[i % 2] = fmaxf(top[i % 2], s[i / 2 * 4 + 2 * half + i % 2]);
      const float factor = softmax[half].raise(quad_max(fmaxf(top[0], top[1])), exponent[half]);
#pragma unroll
      for (int i = 0; i < kDim / 4; ++i) out[i / 16][i % 16 / 2 * 4 + 2 * half + i % 2] *= factor;
    }
  }
  // Weights as left factors. The first clusters set the shift, which stays while no weight is
  // large; else they are computed again.
  __device__ void weigh(std::uint32_t (&p)[4][4], float (&s)[32], int tile) {
    constexpr float kLarge = 8192.0f;  // two weights are far from the largest f16
    const unsigned long long bits = memory.bits()[tile];
    if (bits != ~0ull) {
      __syncwarp();  // keeps the compiler from doing this for all tiles
      const unsigned long long own = bits >> (threadIdx.x % 4 * 2);
#pragma unroll
      for (int i = 0; i < 32; ++i)
        if (!(own >> (i / 4 * 8 + i % 2) & 1)) s[i] = -INFINITY;
    }
    if (tile == 0) raise(s);
    float sums[2][2];
#pragma unroll 1
    for (int attempt = 0; attempt < 2; ++attempt) {
      sums[0][0] = sums[0][1] = sums[1][0] = sums[1][1] = 0.0f;
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        const int half = i % 2;
        const float low = exp2_approximate(fmaf(s[2 * i], exponent[half], -softmax[half].shift));
        const float high =
            exp2_approximate(fmaf(s[2 * i + 1], exponent[half], -softmax[half].shift));
        sums[half][0] += low;
        sums[half][1] += high;
        p[i / 4][i % 4] = pack2<T>(low, high);
      }
      const bool fine = sums[0][0] + sums[0][1] <= kLarge && sums[1][0] + sums[1][1] <= kLarge;
      if (attempt == 1 || __all_sync(~0u, fine)) break;
      raise(s);
    }
    softmax[0].sum += sums[0][0] + sums[0][1];
    softmax[1].sum += sums[1][0] + sums[1][1];
  }
  __device__ void sum_clusters() {
    float s[32];
    std::uint32_t p[4][4];
    wgmma_fence();
    scores(s, 0);
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_settle(s);
    int tile = 0;
#pragma unroll 1
    for (; tile + 1 < memory.tiles; ++tile) {
      weigh(p, s, tile);
      wgmma_fence();
      add_products(p, tile);
      scores(s, tile + 1);
      wgmma_commit();
      wgmma_wait<0>();
      wgmma_settle(s);
      settle_out();
    }
    weigh(p, s, tile);
    wgmma_fence();
    add_products(p, tile);
    wgmma_commit();
    wgmma_wait<0>();
    settle_out();
  }
  __device__ void settle_out() {
#pragma unroll
    for (int band = 0; band < kDim / 64; ++band) wgmma_settle(out[band]);
  }

  // The address of this lane's 16 bytes of a row, for ldmatrix of rows that the lanes know.
  template <int kRows>
  __device__ static std::uint32_t row_chunk(std::uint32_t tile, int row, int chunk) {
    return Tile<T, 64>{tile + chunk / 8 * (kRows * 128)}.chunk(row, chunk % 8);
  }
  // The weight of slot i % 16: products of gathered rows, of which the diagonal counts.
  __device__ float slot_weight(const MixBatch& batch) const {
    const std::uint32_t table = memory.clusters(batch.cluster / kMixRows, 0);
    Accumulator product = {};
#pragma unroll
    for (int d = 0; d < kDim / 16; ++d) {
      FragmentA<T> a;
      std::uint32_t s[4];
      ldmatrix_x4(a.r, row_chunk<16>(queries, batch.row, 2 * d + lane / 16));
      ldmatrix_x4(s, row_chunk<kMixRows>(table, batch.cluster % kMixRows, 2 * d + lane / 16));
      const FragmentB<T> b{{s[0], s[2], s[1], s[3]}};
      multiply_add(product, a, b);
    }
    // Lane 4 r + r / 2 has the elements of rows r and r + 8.
    const bool odd = lane / 4 % 2;
    const int from = lane % 8 * 4 + lane % 8 / 2;
    const float low = __shfl_sync(~0u, odd ? product[0][1] : product[0][0], from);
    const float high = __shfl_sync(~0u, odd ? product[1][3] : product[1][2], from);
    const float dot = lane % 16 < 8 ? low : high;
    const int owner = batch.row % 8 * 4;
    const float first = __shfl_sync(~0u, softmax[0].shift, owner);
    const float second = __shfl_sync(~0u, softmax[1].shift, owner);
    const float shift = batch.row < 8 ? first : second;
    const float weight = exp2_approximate(fmaf(dot, __shfl_sync(~0u, factor, batch.row), -shift));
    return lane % 16 < batch.count ? weight : 0.0f;
  }
  // Adds weight times (inner output - summary) of 16 slots; inner(d) are columns 16 d and on.
  template <class Inner>
  __device__ void add_slots(const MixBatch& batch, const Inner& inner) {
    const T weight = from_float<T>(slot_weight(batch));
    const std::uint32_t own =
        static_cast<std::uint32_t>(reinterpret_cast<const std::uint16_t&>(weight)) << 16 |
        batch.row;
    FragmentA<T> plus, minus;  // one weight in each column
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const std::uint32_t even = __shfl_sync(~0u, own, lane % 4 * 2 + 8 * i);
      const std::uint32_t odd = __shfl_sync(~0u, own, lane % 4 * 2 + 1 + 8 * i);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int at = lane / 4 + 8 * half;
        plus.r[2 * i + half] =
            ((even & 15) == at ? even >> 16 : 0) | ((odd & 15) == at ? odd & 0xffff0000u : 0);
        minus.r[2 * i + half] = plus.r[2 * i + half] ^ 0x80008000u;
      }
    }
    const std::uint32_t table = memory.clusters(batch.cluster / kMixRows, 1);
#pragma unroll
    for (int d = 0; d < kDim / 16; ++d) {
      Accumulator sums;
      float* to = out[d / 4] + d % 4 * 8;
#pragma unroll
      for (int i = 0; i < 8; ++i) sums[i / 4][i % 4] = to[i];
      FragmentB<T> b;
      ldmatrix_x4_trans(b.r,
                        row_chunk<kMixRows>(table, batch.cluster % kMixRows, 2 * d + lane / 16));
      multiply_add(sums, minus, b);
      multiply_add(sums, plus, inner(d));
#pragma unroll
      for (int i = 0; i < 8; ++i) to[i] = sums[i / 4][i % 4];
    }
  }
  // What the tokens' own clusters give them instead of their summaries.
  __device__ void sum_slots(int turn, const typename Loader::Lanes& own) {
    const int cluster = max(own.entry, 0) / args.shape.width, here = min(own.range.count, 32);
#pragma unroll 1
    for (int slot = 0; slot < here; slot += 16) {
      const int count = min(here - slot, 16), from = slot + min(lane % 16, count - 1);
      const MixBatch batch{__shfl_sync(~0u, own.token, from) % 16, __shfl_sync(~0u, cluster, from),
                           count};
      add_slots(batch, [&](int d) {
        FragmentB<T> b;
        ldmatrix_x4_trans(b.r,
                          row_chunk<Memory::kSlots>(memory.inner(turn), from, 2 * d + lane / 16));
        return b;
      });
    }
    if (own.range.count > here) sum_rest(own.range, here);
  }
  // Slots that have no room, straight from memory.
  __device__ __forceinline__ void sum_rest(const typename Loader::Range& range, int slot) {
    const int D = args.shape.D;
#pragma unroll 1
    for (; slot < range.count; slot += 16) {
      const int count = min(range.count - slot, 16);
      const int entry = loader.fetch_entry(range, slot + min(lane % 16, count - 1));
      const T* rows[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int other = __shfl_sync(~0u, entry, lane % 4 * 2 + i % 2 + i / 2 * 8);
        rows[i] = loader.inner + static_cast<std::int64_t>(other) * D;
      }
      add_slots({loader.tokens[entry] % 16, entry / args.shape.width, count}, [&](int d) {
        FragmentB<T> b;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int column = 16 * d + i / 2 * 8 + lane / 4;
          const auto element = [&](const T* from) {
            return column < D ? *reinterpret_cast<const std::uint16_t*>(from + column)
                              : std::uint16_t{0};
          };
          b.r[i] = element(rows[i % 2 * 2]) |
                   static_cast<std::uint32_t>(element(rows[i % 2 * 2 + 1])) << 16;
        }
        return b;
      });
    }
  }
  // Rows go through the queries' place, which this warp has read.
  __device__ void finish(int tile) {
    const int first = loader.first_row(tile), left = run.span.length - first;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int own = lane / 4 + 8 * half;
      const float total = quad_sum(softmax[half].sum);
      const float inverse = total > 0.0f ? __fdividef(1.0f, total) : 0.0f;
      if (lane % 4 == 0 && own < left)
        args.lse[args.shape.row(run.span, run.head) + first + own] =
            (softmax[half].shift + __log2f(total)) * kLn2;
#pragma unroll
      for (int j = 0; j < kDim / 8; ++j) {
        const float* two = out[j / 8] + j % 8 * 4 + 2 * half;
        const std::uint32_t word = pack2<T>(two[0] * inverse, two[1] * inverse);
        const std::uint32_t to =
            Tile<T, 64>{queries + j / 8 * Memory::kQueryBand}.chunk(own, j % 8) + lane % 4 * 4;
        asm volatile("st.shared.b32 [%0], %1;" ::"r"(to), "r"(word) : "memory");
      }
    }
    __syncwarp();
    const Rows<T> rows = args.out.rows(run.span.batch, run.head, run.span.begin);
#pragma unroll
    for (int i = 0; i < kDim / 16; ++i) {
      const int band = i % (kDim / 64), own = i / (kDim / 64) * 4 + lane / 8;
      if (own < left)
        store_chunk(rows, first + own, band * 64 + lane % 8 * 8,
                    Tile<T, 64>{queries + band * Memory::kQueryBand}.chunk(own, lane % 8));
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

  // The run's tiles that this warpgroup has; clusters() waits until the clusters are there.
  template <class Clusters>
  __device__ void work(const Clusters& clusters) {
    const int step = static_cast<int>(blockDim.x) / kWarpgroup;
    int tile = run.first + static_cast<int>(threadIdx.x) / kWarpgroup;
    const int first = loader.fetch_bounds(tile), second = loader.fetch_bounds(tile + step);
    int bounds = loader.fetch_bounds(tile + 2 * step);
    typename Loader::Lanes own, next;
    own.range = loader.range(first);
    own.entry = loader.fetch_entry(own.range, lane);
    next.range = loader.range(second);
    next.entry = loader.fetch_entry(next.range, lane);
    loader.fetch_facts(own, tile);
    loader.copy(0, tile, own);
    clusters();
#pragma unroll 1
    for (int turn = 0; tile < run.end; tile += step, turn ^= 1) {
      cp_async_wait<0>();
      __syncwarp();
      typename Loader::Lanes after;
      after.range = loader.range(bounds);
      after.entry = loader.fetch_entry(after.range, lane);
      bounds = loader.fetch_bounds(tile + 3 * step);
      if (tile + step < run.end) {
        loader.copy(turn + 1, tile + step, next);
        loader.fetch_facts(next, tile + step);
      }
      begin(turn, own.gate);
      sum_clusters();
      sum_slots(turn, own);
      finish(tile);
      own = next;
      next = after;
    }
  }
};

// Surrogates and summaries of a run, by all threads; what was there before is done with.
template <class T, int kDim>
__device__ void load_clusters(const MixArgs<T>& args, const MixMemory<T, kDim>& memory,
                              const MixRun& run) {
  using Memory = MixMemory<T, kDim>;
  const CastShape& shape = args.shape;
  const T* tables[2] = {
      args.surrogates + static_cast<std::int64_t>(run.head) * shape.clusters * shape.D,
      args.summaries + shape.cluster(run.item, run.head, 0) * shape.D};
  __syncthreads();
  for (int i = 0; i < 2 * memory.tiles; ++i)
#pragma unroll
    for (int band = 0; band < kDim / 64; ++band) {
      const Tile<T, 64> to{memory.clusters(i / 2, i % 2) + band * Memory::kBand};
      const int chunk = static_cast<int>(threadIdx.x) % 8, column = band * 64 + chunk * 8;
      for (int r = static_cast<int>(threadIdx.x) / 8; r < kMixRows; r += blockDim.x / 8) {
        const int row = i / 2 * kMixRows + r;
        const bool there = row < shape.clusters && column < shape.D;
        cp_async16(to.chunk(r, chunk),
                   tables[i % 2] + (there ? static_cast<std::int64_t>(row) * shape.D + column : 0),
                   there ? 16 : 0);
      }
    }
  cp_async_commit();
  if (threadIdx.x < 32)
    for (int tile = 0; tile < memory.tiles; ++tile) {
      const ClusterBits there(
          args.summary_lse ? args.summary_lse + shape.cluster(run.item, run.head, 0) : nullptr,
          tile * kMixRows, shape.clusters);
      if (threadIdx.x == 0) memory.bits()[tile] = there.bits;
    }
  cp_async_wait<0>();
  fence_async_proxy();
  __syncthreads();
}

// Calls body(run) for the runs of this block.
template <class T, class Body>
__device__ __forceinline__ void for_runs(const MixArgs<T>& args, const Body& body) {
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
    body(run);
  }
}

template <class T, int kDim>
__global__ void __launch_bounds__(MixMemory<T, kDim>::kMost* kWarpgroup, 1)
    mix_sm90a_kernel(const __grid_constant__ MixArgs<T> args) {
  await_previous();
  extern __shared__ __align__(1024) unsigned char shared[];
  const MixMemory<T, kDim> memory{shared, (args.shape.clusters + kMixRows - 1) / kMixRows};
  for_runs(args, [&](const MixRun& run) {
    MixProducts<T, kDim>(args, memory, run).work([&] { load_clusters(args, memory, run); });
  });
}

template <class T, int kDim>
void launch(const MixArgs<T>& args, cudaStream_t stream) {
  using Memory = MixMemory<T, kDim>;
  const int tiles = (args.shape.clusters + kMixRows - 1) / kMixRows;
  const int groups = Memory::groups(tiles);
  const std::int64_t units = static_cast<std::int64_t>(args.tiles.slots) * args.shape.H;
  const std::int64_t most = (units + groups - 1) / groups;
  launch_early("cast mix", mix_sm90a_kernel<T, kDim>,
               static_cast<unsigned>(std::min<std::int64_t>(multiprocessors(), most)),
               groups * kWarpgroup, Memory::bytes(tiles, groups), stream, args);
}

}  // namespace

template <class T>
bool mix_suits_sm90a(const MixArgs<T>& args) {
  const int tiles = (args.shape.clusters + kMixRows - 1) / kMixRows;
  const int groups =
      args.shape.D > 64 ? MixMemory<T, 128>::groups(tiles) : MixMemory<T, 64>::groups(tiles);
  return !args.shape.laplace && args.q.aligned && args.out.aligned && groups > 0;
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
