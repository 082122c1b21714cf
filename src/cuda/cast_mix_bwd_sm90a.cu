// SPDX-License-Identifier: MIT
// The backward pass of CAST's mix by warpgroup products, for 16-bit types and softmax: what
// cast_mix_bwd.cu and cast_cluster_bwd.cu compute. A block is one warpgroup. It owns rows of two
// matrices, 64 at a time, and walks 64 rows of two others: tokens (queries, gradients) over
// clusters (surrogates, summaries), or clusters over tokens.
#include "cuda/device/await.cuh"
#include "cuda/device/bands.cuh"
#include "cuda/device/cast_bwd.cuh"
#include "cuda/device/store.cuh"
#include "cuda/launch.h"

namespace coterie::cuda {
namespace {

constexpr int kThreads = kWarpgroup;
constexpr float kLn2 = 0.6931471806f;

template <class T, int kWidth>
struct Pair {
  using Matrix = Bands<T, kWidth, 64>;
  static constexpr int kBytes = 2 * Matrix::kBytes;
  Matrix first, second;

  __device__ explicit Pair(std::uint32_t base) : first{base}, second{base + Matrix::kBytes} {}
  // Rows from `row` on, of which `count` are there.
  __device__ void load(const Rows<const T>& a, const Rows<const T>& b, int row, int count) const {
    first.template load<64, kThreads>(0, a, row, count);
    second.template load<64, kThreads>(0, b, row, count);
  }
};

template <int kWidth>
using Sum = float[kWidth / 64][32];

template <int kWidth>
__device__ __forceinline__ void clear(Sum<kWidth>& sum) {
#pragma unroll
  for (int i = 0; i < kWidth / 2; ++i) sum[i / 32][i % 32] = 0.0f;
#pragma unroll
  for (int band = 0; band < kWidth / 64; ++band) wgmma_settle(sum[band]);
}
template <int kWidth>
__device__ __forceinline__ void settle(Sum<kWidth>& sum) {
#pragma unroll
  for (int band = 0; band < kWidth / 64; ++band) wgmma_settle(sum[band]);
}

// Products of own with others; weigh(s) makes weights of those of the first matrices, derive(d, s)
// derivatives of those of the second. Starts sums of both with rows of the others.
template <class T, int kWidth, class Weigh, class Derive>
__device__ __forceinline__ void walk(const Pair<T, kWidth>& own, const Pair<T, kWidth>& other,
                                     const Bands<T, kWidth, 64>& weighted, Sum<kWidth>& derivatives,
                                     Sum<kWidth>& weights, const Weigh& weigh,
                                     const Derive& derive) {
  float s[32], d[32];
  std::uint32_t s_factor[4][4], d_factor[4][4];
  wgmma_fence();
  row_products(s, own.first, 0, other.first, 0);
  wgmma_commit();
  row_products(d, own.second, 0, other.second, 0);
  wgmma_commit();
  wgmma_wait<1>();  // also for the sums before, which read the factors
  wgmma_settle(s);
  weigh(s);
  wgmma_wait<0>();
  wgmma_settle(d);
  derive(d, s);
  pack_factor<T>(s_factor, s);
  pack_factor<T>(d_factor, d);
  wgmma_fence();
  add_products(weights, s_factor, weighted, 0);
  add_products(derivatives, d_factor, other.first, 0);
  wgmma_commit();
}

// 32 columns of a row from two neighbouring parts of a sum.
template <class U>
__device__ __forceinline__ void store_part(const Rows<U>& rows, int row, bool there, int part,
                                           const float* values, float factor, int side) {
  Accumulator pair[2];
#pragma unroll
  for (int i = 0; i < 16; ++i) pair[i / 8][i / 4 % 2][i % 4] = values[i] * factor;
  store_columns(rows, row, there, 32 * part, pair, side);
}

// Tokens own the rows. Their deltas are not known yet: derivatives take a guess, and with e the
// error of the guess, known at the end,
//   dq = factor (sum_c alpha_c (dalpha_c - guess) S_c - e sum_c alpha_c S_c).
template <class T, int kWidth, int kTiles>
struct TokenShape {
  static constexpr int kRows = 64 * kTiles, kBuffers = kWidth == 64 ? 2 : 1, kStages = 2;
  using Tiles = Pair<T, kWidth>;
  static constexpr int kStage = kBuffers * kTiles * Tiles::kBytes;
  static constexpr int kFacts = kStage + kStages * Tiles::kBytes;
  static constexpr int kPresent = kFacts + kBuffers * kRows * 16;
};

template <class T, int kWidth, int kTiles>
struct TokenBlock {
  using S = TokenShape<T, kWidth, kTiles>;
  const MixBackwardArgs<T>& args;
  unsigned char* memory;
  int head;
  KeyChunk part;

  __device__ TokenBlock(const MixBackwardArgs<T>& a, unsigned char* shared)
      : args(a),
        memory(shared),
        head(static_cast<int>(blockIdx.y)),
        part(a.pass.parts.find(a.shape.tokens, static_cast<int>(blockIdx.x))) {}

  __device__ typename S::Tiles own(int buffer, int tile) const {
    return typename S::Tiles(shared_address(memory) + (buffer * kTiles + tile) * S::Tiles::kBytes);
  }
  __device__ typename S::Tiles stage(int number) const {
    return typename S::Tiles(shared_address(memory) + S::kStage + number * S::Tiles::kBytes);
  }
  __device__ float4* facts(int buffer) const {
    return reinterpret_cast<float4*>(memory + S::kFacts) + buffer * S::kRows;
  }
  // One bit a cluster: whether it is there to be mixed.
  __device__ unsigned long long present(int step) const {
    return reinterpret_cast<const unsigned long long*>(memory + S::kPresent)[step];
  }
  __device__ void find_present(int steps) const {
    const float* lse = args.summary_lse(part.item, head);
    const int warp = static_cast<int>(threadIdx.x) / 32;
    for (int step = warp; step < steps; step += kThreads / 32) {
      const ClusterBits found(lse, step * 64, args.shape.clusters);
      if (threadIdx.x % 32 == 0)
        reinterpret_cast<unsigned long long*>(memory + S::kPresent)[step] = found.bits;
    }
  }
  __device__ std::int64_t place(int token) const { return args.shape.row(part.keys, head) + token; }

  __device__ void load_tokens(int buffer, int first) const {
    const Rows<const T> q = args.q.rows(part.keys.batch, head, part.keys.begin);
    const Rows<const T> g = args.grad_out.rows(part.keys.batch, head, part.keys.begin);
#pragma unroll
    for (int i = 0; i < kTiles; ++i)
      own(buffer, i).load(q, g, first + 64 * i, part.end - first - 64 * i);
    const int row = static_cast<int>(threadIdx.x);
    const bool there = first + row < part.end;
    if (row < S::kRows)
      cp_async16(shared_address(facts(buffer) + row),
                 args.pass.facts + (there ? place(first + row) : 0), there ? 16 : 0);
  }
  __device__ void load_clusters(int number, int step) const {
    stage(number).load(args.keys(head), args.values(part.item, head), step * 64,
                       args.shape.clusters - step * 64);
  }

  // dq, delta and the gate's part of the 64 tokens of a tile.
  __device__ void store(int buffer, int tile, int first, Sum<kWidth>& sum, const Sum<kWidth>& mean,
                        float (&error)[2]) const {
    const float4* own_facts = facts(buffer) + 64 * tile;
    const auto queries = own(buffer, tile).first;
    const ItemSpan& span = part.keys;
    const int start = first + 64 * tile, lane = static_cast<int>(threadIdx.x) % 4;
    Rows<T> rows{};
    if (args.dq.data) rows = args.dq.rows(span.batch, head, span.begin + start);
#pragma unroll
    for (int side = 0; side < 2; ++side) {
      const int row = group_row(side);
      const bool there = start + row < part.end;
      const float4 fact = own_facts[row];
      const float e = quad_sum(error[side]) + fact.w, delta = fact.z + e;
      float product = 0.0f;
#pragma unroll
      for (int n = 0; n < kWidth / 8; ++n) {
        const Tile<T, 64> band{queries.base + n / 8 * S::Tiles::Matrix::kBandBytes};
        std::uint32_t word;
        asm volatile("ld.shared.b32 %0, [%1];"
                     : "=r"(word)
                     : "r"(band.address(row, n % 8 * 8 + 2 * lane)));
        const T* q = reinterpret_cast<const T*>(&word);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          float& value = sum[n / 8][n % 8 * 4 + 2 * side + i];
          value = fmaf(-e, mean[n / 8][n % 8 * 4 + 2 * side + i], value);
          product = fmaf(value, to_float(q[i]), product);
        }
      }
      product = quad_sum(product);
      if (there && lane == 0) {
        args.pass.facts[place(start + row)] = make_float4(fact.x, fact.y, fact.x, delta * fact.x);
        args.pass.dgate_rows[place(start + row)] = product;
      }
      if (args.dq.data)
#pragma unroll
        for (int p = 0; p < kWidth / 32; ++p)
          store_part(rows, row, there, p, sum[p / 2] + p % 2 * 16, fact.x * kLn2, side);
    }
  }
};

template <class T, int kWidth, int kTiles>
__global__ void __launch_bounds__(kThreads, kTiles* kWidth == 64 ? 3 : 2)
    mix_tokens_sm90a_kernel(const __grid_constant__ MixBackwardArgs<T> args) {
  extern __shared__ __align__(1024) unsigned char memory[];
  await_previous();
  using S = TokenShape<T, kWidth, kTiles>;
  const TokenBlock<T, kWidth, kTiles> block(args, memory);
  const int begin = block.part.begin, end = block.part.end;
  if (begin >= end) return;
  const int steps = (args.shape.clusters + 63) / 64;
  const bool resident = steps <= S::kStages;
  block.load_tokens(0, begin);
  block.load_clusters(0, 0);
  cp_async_commit();
  block.find_present(steps);
  Sum<kWidth> sum[kTiles], mean[kTiles];
  float error[kTiles][2];
  int number = 0, buffer = 0;  // of the stage and the tokens in use
#pragma unroll 1
  for (int first = begin; first < end; first += S::kRows) {
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      clear<kWidth>(sum[i]);
      clear<kWidth>(mean[i]);
      error[i][0] = error[i][1] = 0.0f;
    }
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
      cp_async_wait<0>();
      fence_async_proxy();
      __syncthreads();
      const int next = step + 1 < steps ? step + 1 : 0;
      if (resident ? first == begin && next > 0 : true) block.load_clusters(number ^ 1, next);
      if (S::kBuffers == 2 && step == 0 && first + S::kRows < end)
        block.load_tokens(buffer ^ 1, first + S::kRows);
      cp_async_commit();
      const auto clusters = block.stage(number);
      const unsigned long long present = block.present(step);
#pragma unroll
      for (int i = 0; i < kTiles; ++i) {
        const float4* facts = block.facts(buffer) + 64 * i;
        const auto weigh = [&](float(&s)[32]) {
          const float4 above = facts[group_row(0)], below = facts[group_row(1)];
#pragma unroll
          for (int j = 0; j < 32; ++j)
            s[j] = exp2_approximate(j / 2 % 2 ? fmaf(s[j], below.x, -below.y)
                                              : fmaf(s[j], above.x, -above.y));
          if (present == ~0ull) return;
#pragma unroll
          for (int j = 0; j < 32; ++j)
            if (!(present >> (j / 4 * 8 + threadIdx.x % 4 * 2 + j % 2) & 1ull)) s[j] = 0.0f;
        };
        const auto derive = [&](float(&d)[32], const float(&s)[32]) {
          const float guess[2] = {facts[group_row(0)].z, facts[group_row(1)].z};
#pragma unroll
          for (int j = 0; j < 32; ++j) {
            d[j] = s[j] * (d[j] - guess[j / 2 % 2]);
            error[i][j / 2 % 2] += d[j];
          }
        };
        walk<T, kWidth>(block.own(buffer, i), clusters, clusters.first, sum[i], mean[i], weigh,
                        derive);
      }
      wgmma_wait<0>();
      if (!resident || steps == 2) number ^= 1;
    }
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      settle<kWidth>(sum[i]);
      settle<kWidth>(mean[i]);
      block.store(buffer, i, first, sum[i], mean[i], error[i]);
    }
    if (S::kBuffers == 2) {
      buffer ^= 1;
    } else {
      __syncthreads();
      block.load_tokens(0, first + S::kRows);
      cp_async_commit();
    }
  }
  cp_async_wait<0>();
}

// Clusters own the rows; deltas are known.
template <class T, int kWidth, int kTiles>
struct ClusterShape {
  static constexpr int kRows = 64 * kTiles, kStages = kWidth == 64 ? 4 : 2;
  using Tiles = Pair<T, kWidth>;
  static constexpr int kStage = kTiles * Tiles::kBytes;
  static constexpr int kFacts = kStage + kStages * Tiles::kBytes;
  static constexpr int kBytes = kFacts + kStages * 64 * 16;
};

template <class T, int kWidth, int kTiles>
__global__ void __launch_bounds__(kThreads, kTiles* kWidth == 64 ? 3 : 2)
    mix_clusters_sm90a_kernel(const __grid_constant__ MixBackwardArgs<T> args) {
  extern __shared__ __align__(1024) unsigned char memory[];
  await_previous();
  using S = ClusterShape<T, kWidth, kTiles>;
  using Tiles = typename S::Tiles;
  const CastShape& shape = args.shape;
  const int head = static_cast<int>(blockIdx.y), first = static_cast<int>(blockIdx.z) * S::kRows;
  const KeyChunk part = args.pass.chunks.find(shape.tokens, static_cast<int>(blockIdx.x));
  if (part.begin >= part.end) return;
  const std::uint32_t base = shared_address(memory);
  const auto own = [&](int i) { return Tiles(base + i * Tiles::kBytes); };
  const auto stage = [&](int number) {
    return Tiles(base + S::kStage + number % S::kStages * Tiles::kBytes);
  };
  const auto stage_facts = [&](int number) {
    return reinterpret_cast<float4*>(memory + S::kFacts) + number % S::kStages * 64;
  };
  const Rows<const T> q = args.q.rows(part.keys.batch, head, part.keys.begin);
  const Rows<const T> g = args.grad_out.rows(part.keys.batch, head, part.keys.begin);
  const float4* row_facts = args.pass.facts + shape.row(part.keys, head);
  // Rows beyond the last are zeros with facts of 0: a weight of 1 of nothing.
  const auto load_stage = [&](int number) {
    const int token = part.begin + 64 * number, row = static_cast<int>(threadIdx.x);
    if (token < part.end) {
      stage(number).load(q, g, token, part.end - token);
      const bool there = token + row < part.end;
      if (row < 64)
        cp_async16(shared_address(stage_facts(number) + row), row_facts + (there ? token + row : 0),
                   there ? 16 : 0);
    }
    cp_async_commit();
  };
  bool present[kTiles][2], all_present[kTiles];
#pragma unroll
  for (int i = 0; i < kTiles; ++i) {
    own(i).load(args.keys(head), args.values(part.item, head), first + 64 * i,
                shape.clusters - first - 64 * i);
#pragma unroll
    for (int side = 0; side < 2; ++side) {
      const int c = first + 64 * i + group_row(side);
      present[i][side] = c < shape.clusters && args.summary_lse(part.item, head)[c] > -INFINITY;
    }
    all_present[i] = __all_sync(~0u, present[i][0] && present[i][1]);
  }
#pragma unroll
  for (int number = 0; number < S::kStages - 1; ++number) load_stage(number);
  Sum<kWidth> dsurrogate[kTiles], dsummary[kTiles];
#pragma unroll
  for (int i = 0; i < kTiles; ++i) {
    clear<kWidth>(dsurrogate[i]);
    clear<kWidth>(dsummary[i]);
  }
  const int steps = (part.end - part.begin + 63) / 64;
#pragma unroll 1
  for (int number = 0; number < steps; ++number) {
    cp_async_wait<S::kStages - 2>();
    fence_async_proxy();
    wgmma_wait<0>();
    __syncthreads();
    load_stage(number + S::kStages - 1);
    const Tiles tokens = stage(number);
    const float2* facts = reinterpret_cast<const float2*>(stage_facts(number));
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      if (i > 0 && first + 64 * i >= shape.clusters) continue;
      const auto weigh = [&](float(&s)[32]) {
#pragma unroll
        for (int n = 0; n < 8; ++n)
#pragma unroll
          for (int column = 0; column < 2; ++column) {
            const float2 fact = facts[2 * (8 * n + threadIdx.x % 4 * 2 + column)];
#pragma unroll
            for (int side = 0; side < 2; ++side) {
              float& value = s[4 * n + 2 * side + column];
              value = exp2_approximate(fmaf(value, fact.x, -fact.y));
            }
          }
        if (all_present[i]) return;
#pragma unroll
        for (int j = 0; j < 32; ++j)
          if (!present[i][j / 2 % 2]) s[j] = 0.0f;
      };
      const auto derive = [&](float(&d)[32], const float(&s)[32]) {
#pragma unroll
        for (int n = 0; n < 8; ++n)
#pragma unroll
          for (int column = 0; column < 2; ++column) {
            const float2 fact = facts[2 * (8 * n + threadIdx.x % 4 * 2 + column) + 1];
#pragma unroll
            for (int side = 0; side < 2; ++side) {
              const int j = 4 * n + 2 * side + column;
              d[j] = s[j] * fmaf(d[j], fact.x, -fact.y);
            }
          }
      };
      walk<T, kWidth>(own(i), tokens, tokens.second, dsurrogate[i], dsummary[i], weigh, derive);
    }
  }
  cp_async_wait<0>();
  wgmma_wait<0>();
  const std::int64_t problem = static_cast<std::int64_t>(blockIdx.x) * shape.H + head;
  float* to = args.pass.partials + problem * shape.clusters * 2 * shape.D;
  const bool aligned = shape.D % 4 == 0;
  const Rows<float> surrogates{to, 2 * shape.D, shape.D, aligned};
  const Rows<float> summaries{to + shape.D, 2 * shape.D, shape.D, aligned};
#pragma unroll
  for (int i = 0; i < kTiles; ++i) {
    settle<kWidth>(dsurrogate[i]);
    settle<kWidth>(dsummary[i]);
#pragma unroll
    for (int side = 0; side < 2; ++side) {
      const int c = first + 64 * i + group_row(side);
#pragma unroll
      for (int p = 0; p < kWidth / 32; ++p) {
        store_part(surrogates, c, c < shape.clusters, p, dsurrogate[i][p / 2] + p % 2 * 16, kLn2,
                   side);
        store_part(summaries, c, c < shape.clusters, p, dsummary[i][p / 2] + p % 2 * 16, 1.0f,
                   side);
      }
    }
  }
}

template <class T, int kWidth, int kTiles>
void launch_tokens(const MixBackwardArgs<T>& args, cudaStream_t stream) {
  const CastShape& shape = args.shape;
  const dim3 grid(static_cast<unsigned>(args.pass.parts.slots), static_cast<unsigned>(shape.H));
  const std::size_t bytes = TokenShape<T, kWidth, kTiles>::kPresent +
                            static_cast<std::size_t>(shape.clusters + 63) / 64 * 8;
  launch_early("cast tokens", mix_tokens_sm90a_kernel<T, kWidth, kTiles>, grid, kThreads, bytes,
               stream, args);
}

template <class T, int kWidth, int kTiles>
void launch_clusters(const MixBackwardArgs<T>& args, cudaStream_t stream) {
  using S = ClusterShape<T, kWidth, kTiles>;
  const CastShape& shape = args.shape;
  const dim3 grid(static_cast<unsigned>(args.pass.chunks.slots), static_cast<unsigned>(shape.H),
                  static_cast<unsigned>((shape.clusters + S::kRows - 1) / S::kRows));
  launch_early("cast clusters", mix_clusters_sm90a_kernel<T, kWidth, kTiles>, grid, kThreads,
               S::kBytes, stream, args);
}

}  // namespace

template <class T>
void cast_tokens_sm90a(const MixBackwardArgs<T>& args, cudaStream_t stream) {
  if (args.pass.parts.slots == 0) return;
  if (args.shape.D > 64)
    launch_tokens<T, 128, 1>(args, stream);
  else
    launch_tokens<T, 64, 1>(args, stream);
}
template <class T>
void cast_clusters_sm90a(const MixBackwardArgs<T>& args, cudaStream_t stream) {
  if (args.pass.chunks.slots == 0) return;
  if (args.shape.D > 64)
    launch_clusters<T, 128, 1>(args, stream);
  else
    launch_clusters<T, 64, 1>(args, stream);
}

template void cast_tokens_sm90a(const MixBackwardArgs<__nv_bfloat16>&, cudaStream_t);
template void cast_tokens_sm90a(const MixBackwardArgs<__half>&, cudaStream_t);
template void cast_clusters_sm90a(const MixBackwardArgs<__nv_bfloat16>&, cudaStream_t);
template void cast_clusters_sm90a(const MixBackwardArgs<__half>&, cudaStream_t);

}  // namespace coterie::cuda
