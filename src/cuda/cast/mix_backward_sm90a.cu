// SPDX-License-Identifier: MIT
// The backward pass of CAST's mix with warpgroup products (walk.cuh), all tokens i as if they were
// in no cluster (row_backward.cu): for clusters c with surrogates S, summaries R and factor_i =
// scale psi,
//   dq_i = factor_i sum_c dlogit_ic S_c,
//   dsummary_c = sum_i alpha_ic g_i,   dsurrogate_c = sum_i factor_i dlogit_ic q_i.
//
// Tokens: a block of two warpgroups per part of an item's tokens and head; each handles 64 tokens
// at a time. Shared memory: tokens (two buffers for rows of 64 elements, one for 128) and 4 or 3
// stages of 64 clusters; 132 or 162 KiB. Clusters: a warpgroup per 64 clusters, head and chunk of
// tokens, two blocks per multiprocessor; own clusters and 4 or 2 stages of 64 tokens, 84 or 98 KiB.
// Chunks are summed in cast_totals.
// Preconditions: Hopper, 16-bit types, softmax, aligned rows of up to 128 elements. Else lists.cu.
#include "cuda/api/padding.h"
#include "cuda/cast/walk.cuh"
#include "cuda/launch/dispatch.h"
#include "cuda/launch/launch.h"
#include "cuda/prim/dependent.cuh"

namespace coterie::cuda {
namespace {

template <class T>
struct MixBackwardArgs {
  CastShape shape;
  CastBackward pass;
  Tensor4<const T> q, grad_out;
  Tensor4<T> dq;
  const T *surrogates, *summaries;

  __device__ Rows<const T> keys(int head) const {
    return dense_rows(surrogates + static_cast<std::int64_t>(head) * shape.clusters * shape.D,
                      shape.D);
  }
  __device__ Rows<const T> values(int item, int head) const {
    return dense_rows(summaries + shape.cluster(item, head, 0) * shape.D, shape.D);
  }
  __device__ const float* summary_lse(int item, int head) const {
    return shape.laplace ? nullptr : pass.saved.summary_lse + shape.cluster(item, head, 0);
  }
};

// Tokens own the rows. Their deltas are not known yet: derivatives use a guess, the mean over the
// first 64 clusters, and with e the error of the guess, known at the end,
//   dq = factor (sum_c alpha_c (dalpha_c - guess) S_c - e sum_c alpha_c S_c).
// A block's warpgroups handle 64 tokens each at a time and share the clusters, which either all
// stay in shared memory or are streamed through it.
template <class T, int kWidth>
struct TokenShape {
  static constexpr int kGroups = 2, kThreads = kGroups * kWarpgroup;
  static constexpr int kRows = 64 * kGroups;
  static constexpr int kBuffers = kWidth == 64 ? 2 : 1;  // of a warpgroup's tokens
  static constexpr int kStages = kWidth == 64 ? 4 : 3;   // of 64 clusters
  using Tiles = TilePair<T, kWidth>;
  static constexpr int kStage = kBuffers * kGroups * Tiles::kBytes;
  static constexpr int kFacts = kStage + kStages * Tiles::kBytes;
  static constexpr int kPresent = kFacts + kBuffers * kRows * 16;
};

template <class T, int kWidth>
struct TokenBlock {
  using S = TokenShape<T, kWidth>;
  const MixBackwardArgs<T>& args;
  unsigned char* memory;
  int head, group;
  ItemChunk part;

  __device__ TokenBlock(const MixBackwardArgs<T>& a, unsigned char* shared)
      : args(a),
        memory(shared),
        head(static_cast<int>(blockIdx.y)),
        group(__shfl_sync(~0u, static_cast<int>(threadIdx.x) / kWarpgroup, 0)),
        part(a.pass.plan.parts.find(a.shape.tokens, static_cast<int>(blockIdx.x))) {}

  __device__ typename S::Tiles own(int buffer) const {
    return typename S::Tiles(shared_address(memory) +
                             (buffer * S::kGroups + group) * S::Tiles::kBytes);
  }
  __device__ typename S::Tiles stage(int number) const {
    return typename S::Tiles(shared_address(memory) + S::kStage +
                             number % S::kStages * S::Tiles::kBytes);
  }
  __device__ float4* facts(int buffer) const {
    return reinterpret_cast<float4*>(memory + S::kFacts) + (buffer * S::kGroups + group) * 64;
  }
  // One bit per cluster: whether it takes part in the mix.
  __device__ unsigned long long present(int step) const {
    return reinterpret_cast<const unsigned long long*>(memory + S::kPresent)[step];
  }
  __device__ void find_present(int steps) const {
    const float* lse = args.summary_lse(part.item, head);
    const int warp = static_cast<int>(threadIdx.x) / 32;
    for (int step = warp; step < steps; step += S::kThreads / 32) {
      const ClusterBits found(lse, step * 64, args.shape.clusters);
      if (threadIdx.x % 32 == 0)
        reinterpret_cast<unsigned long long*>(memory + S::kPresent)[step] = found.bits;
    }
  }
  __device__ std::int64_t place(int token) const { return args.shape.row(part.span, head) + token; }

  // Loads the warpgroup's tokens from `first` on.
  __device__ void load_tokens(int buffer, int first) const {
    load_rows(buffer, first);
    load_facts(buffer, first);
  }
  __device__ void load_rows(int buffer, int first) const {
    own(buffer).template load<kWarpgroup>(
        args.q.rows(part.span.batch, head, part.span.begin),
        args.grad_out.rows(part.span.batch, head, part.span.begin), first, part.end - first);
  }
  __device__ void load_facts(int buffer, int first) const {
    const int row = static_cast<int>(threadIdx.x) % kWarpgroup;
    const bool there = first + row < part.end;
    if (row < 64)
      cp_async16(shared_address(facts(buffer) + row),
                 args.pass.facts + (there ? place(first + row) : 0), there ? 16 : 0);
  }
  // Warpgroups take turns.
  __device__ void load_clusters(int number, int step) const {
    if (number % S::kGroups != group) return;
    stage(number).template load<kWarpgroup>(args.keys(head), args.values(part.item, head),
                                            step * 64, args.shape.clusters - step * 64);
  }

  // Stores dq, delta and the gate's part of the warpgroup's tokens.
  __device__ void store(int buffer, int start, TileSum<kWidth>& sum, const TileSum<kWidth>& mean,
                        const float (&error)[2], const float (&guess)[2]) const {
    const float4* own_facts = facts(buffer);
    const auto queries = own(buffer).first;
    const int lane = static_cast<int>(threadIdx.x) % 4;
#pragma unroll
    for (int side = 0; side < 2; ++side) {
      const int row = group_row(side);
      const bool there = start + row < part.end;
      const float4 fact = own_facts[row];
      const float e = quad_sum(error[side]) + fact.z, delta = guess[side] + e;
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
          value *= fact.x * kLn2;
        }
      }
      product = quad_sum(product);
      if (there && lane == 0) {
        args.pass.facts[place(start + row)] = make_float4(fact.x, fact.y, fact.x, delta * fact.x);
        args.pass.dgate_rows[place(start + row)] = product;
      }
    }
    if (!args.dq.data) return;
    // The gradients' tiles have been read.
    const int row = static_cast<int>(threadIdx.x) % kWarpgroup / 32 * 16;
    const Rows<T> rows = args.dq.rows(part.span.batch, head, part.span.begin + start + row);
    sync_group();
#pragma unroll
    for (int band = 0; band < kWidth / 64; ++band)
      store_rows(rows.data + 64 * band, rows.pitch, part.end - start - row, rows.width - 64 * band,
                 own(buffer).second.base + band * S::Tiles::Matrix::kBandBytes, sum[band]);
  }
};

template <class T, int kWidth>
__global__ void __launch_bounds__(TokenShape<T, kWidth>::kThreads, 1)
    mix_tokens_sm90a_kernel(const __grid_constant__ MixBackwardArgs<T> args) {
  extern __shared__ __align__(1024) unsigned char memory[];
  release_next();
  using S = TokenShape<T, kWidth>;
  const TokenBlock<T, kWidth> block(args, memory);
  if (block.part.begin >= block.part.end) return await_writes();
  const int steps = (args.shape.clusters + 63) / 64;
  const bool resident = steps <= S::kStages;
  int first = block.part.begin + 64 * block.group;
  block.load_rows(0, first);
  const int ahead = resident ? steps : S::kStages - 1;
  for (int number = 0; number < ahead; ++number) block.load_clusters(number, number);
  block.find_present(steps);
  await_writes();  // the search of slots has waited for what was read here
  block.load_facts(0, first);
  cp_async_commit();
  cp_async_wait<0>();
  fence_async_proxy();
  __syncthreads();
  TileSum<kWidth> sum, mean;
  int number = 0, buffer = 0;  // of the clusters and tokens in use
#pragma unroll 1
  for (int base = block.part.begin; base < block.part.end; base += S::kRows, first += S::kRows) {
    if (S::kBuffers == 2) block.load_tokens(buffer ^ 1, first + S::kRows);
    cp_async_commit();
    declare<kWidth>(sum);
    declare<kWidth>(mean);
    float error[2] = {0.0f, 0.0f}, guess[2] = {0.0f, 0.0f};
    const typename S::Tiles own = block.own(buffer);
    const float4 above = block.facts(buffer)[group_row(0)],
                 below = block.facts(buffer)[group_row(1)];
#pragma unroll 1
    for (int step = 0; step < steps; ++step, ++number) {
      if (!resident) {
        wgmma_wait<0>();
        cp_async_wait<0>();
        fence_async_proxy();
        __syncthreads();
        block.load_clusters(number + ahead, (step + ahead) % steps);
        cp_async_commit();
      }
      const typename S::Tiles clusters = block.stage(resident ? step : number);
      const auto weigh = [&](float(&s)[32]) {
#pragma unroll
        for (int j = 0; j < 32; ++j)
          s[j] = exp2_approximate(j / 2 % 2 ? fmaf(s[j], below.x, -below.y)
                                            : fmaf(s[j], above.x, -above.y));
        const unsigned long long present = block.present(step);
        if (present == ~0ull) return;
#pragma unroll
        for (int j = 0; j < 32; ++j)
          if (!(present >> (j / 4 * 8 + threadIdx.x % 4 * 2 + j % 2) & 1ull)) s[j] = 0.0f;
      };
      const auto derive = [&](float(&d)[32], const float(&s)[32]) {
        if (step == 0) guess_deltas(guess, d, s);
#pragma unroll
        for (int j = 0; j < 32; ++j) {
          d[j] = s[j] * (d[j] - guess[j / 2 % 2]);
          error[j / 2 % 2] += d[j];
        }
      };
      walk<T, kWidth>(own, clusters, clusters.first, sum, mean, step, weigh, derive);
      if (kWidth > 64) wgmma_wait<0>();  // too few registers for both
    }
    wgmma_wait<0>();
    settle<kWidth>(sum);
    settle<kWidth>(mean);
    block.store(buffer, first, sum, mean, error, guess);
    if (S::kBuffers == 2) {
      buffer ^= 1;
    } else {
      sync_group();
      block.load_tokens(0, first + S::kRows);
      cp_async_commit();
    }
    cp_async_wait<0>();
    fence_async_proxy();
    sync_group();
  }
}

// Clusters own the rows; deltas are known.
template <class T, int kWidth>
struct ClusterStages {
  static constexpr int kStages = kWidth == 64 ? 4 : 2;
  using Tiles = TilePair<T, kWidth>;
  static constexpr int kStage = Tiles::kBytes;
  static constexpr int kFacts = kStage + kStages * Tiles::kBytes;
  static constexpr int kBytes = kFacts + kStages * 64 * 16;
};

template <class T, int kWidth>
__global__ void __launch_bounds__(kWarpgroup, 2)
    mix_clusters_sm90a_kernel(const __grid_constant__ MixBackwardArgs<T> args) {
  extern __shared__ __align__(1024) unsigned char memory[];
  release_next();
  using S = ClusterStages<T, kWidth>;
  using Tiles = typename S::Tiles;
  const CastShape& shape = args.shape;
  const int head = static_cast<int>(blockIdx.y), first = static_cast<int>(blockIdx.z) * 64;
  const ItemChunk part = args.pass.plan.chunks.find(shape.tokens, static_cast<int>(blockIdx.x));
  if (part.begin >= part.end) return await_writes();
  const std::uint32_t base = shared_address(memory);
  const Tiles own(base);
  const auto stage = [&](int number) {
    return Tiles(base + S::kStage + number % S::kStages * Tiles::kBytes);
  };
  // For 64 tokens, the first halves of their facts, then the second halves.
  const auto stage_facts = [&](int number) {
    return reinterpret_cast<float2*>(memory + S::kFacts) + number % S::kStages * 128;
  };
  const Rows<const T> q = args.q.rows(part.span.batch, head, part.span.begin);
  const Rows<const T> g = args.grad_out.rows(part.span.batch, head, part.span.begin);
  const float2* row_facts =
      reinterpret_cast<const float2*>(args.pass.facts + shape.row(part.span, head));
  // Rows beyond the last are zeros with facts of 0: their weight of 1 multiplies zeros.
  const auto load_rows = [&](int number) {
    const int token = part.begin + 64 * number;
    if (token < part.end) stage(number).template load<kWarpgroup>(q, g, token, part.end - token);
  };
  const auto load_facts = [&](int number) {
    const int token = part.begin + 64 * number, row = static_cast<int>(threadIdx.x);
    if (token < part.end) {
      const bool there = token + row % 64 < part.end;
      asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(
                       shared_address(stage_facts(number) + row)),
                   "l"(row_facts + 2 * (there ? token + row % 64 : 0) + row / 64),
                   "r"(there ? 8 : 0)
                   : "memory");
    }
    cp_async_commit();
  };
  own.template load<kWarpgroup>(args.keys(head), args.values(part.item, head), first,
                                shape.clusters - first);
  bool present[2];
#pragma unroll
  for (int side = 0; side < 2; ++side) {
    const int c = first + group_row(side);
    present[side] = c < shape.clusters && args.summary_lse(part.item, head)[c] > -INFINITY;
  }
  const bool all_present = __all_sync(~0u, present[0] && present[1]);
#pragma unroll
  for (int number = 0; number < S::kStages - 1; ++number) load_rows(number);
  await_writes();  // the search of slots has waited for what was read here
#pragma unroll
  for (int number = 0; number < S::kStages - 1; ++number) load_facts(number);
  TileSum<kWidth> dsurrogate, dsummary;
  declare<kWidth>(dsurrogate);
  declare<kWidth>(dsummary);
  const int steps = (part.end - part.begin + 63) / 64;
#pragma unroll 1
  for (int number = 0; number < steps; ++number) {
    cp_async_wait<S::kStages - 2>();
    fence_async_proxy();
    __syncthreads();
    const Tiles tokens = stage(number);
    // Facts of two neighbouring tokens.
    const float4* facts = reinterpret_cast<const float4*>(stage_facts(number)) + threadIdx.x % 4;
    const auto weigh = [&](float(&s)[32]) {
      // All warps have completed the sums of the previous stage.
      __syncthreads();
      load_rows(number + S::kStages - 1);
      load_facts(number + S::kStages - 1);
#pragma unroll
      for (int n = 0; n < 8; ++n) {
        const float4 fact = facts[4 * n];
#pragma unroll
        for (int side = 0; side < 2; ++side) {
          float* value = s + 4 * n + 2 * side;
          value[0] = exp2_approximate(fmaf(value[0], fact.x, -fact.y));
          value[1] = exp2_approximate(fmaf(value[1], fact.z, -fact.w));
        }
      }
      if (all_present) return;
#pragma unroll
      for (int j = 0; j < 32; ++j)
        if (!present[j / 2 % 2]) s[j] = 0.0f;
    };
    const auto derive = [&](float(&d)[32], const float(&s)[32]) {
#pragma unroll
      for (int n = 0; n < 8; ++n) {
        const float4 fact = facts[32 + 4 * n];
#pragma unroll
        for (int j = 4 * n; j < 4 * n + 4; j += 2) {
          d[j] = s[j] * fmaf(d[j], fact.x, -fact.y);
          d[j + 1] = s[j + 1] * fmaf(d[j + 1], fact.z, -fact.w);
        }
      }
    };
    walk<T, kWidth>(own, tokens, tokens.second, dsurrogate, dsummary, number, weigh, derive);
    if (kWidth > 64) wgmma_wait<0>();  // too few registers for more
  }
  cp_async_wait<0>();
  wgmma_wait<0>();
  const std::int64_t problem = static_cast<std::int64_t>(blockIdx.x) * shape.H + head;
  float* to = args.pass.partials + problem * shape.clusters * 2 * shape.D;
  const bool aligned = shape.D % 4 == 0;
  const Rows<float> surrogates{to, 2 * shape.D, shape.D, aligned};
  const Rows<float> summaries{to + shape.D, 2 * shape.D, shape.D, aligned};
  settle<kWidth>(dsurrogate);
  settle<kWidth>(dsummary);
#pragma unroll
  for (int side = 0; side < 2; ++side) {
    const int c = first + group_row(side);
#pragma unroll
    for (int p = 0; p < kWidth / 32; ++p) {
      store_part(surrogates, c, c < shape.clusters, p, dsurrogate[p / 2] + p % 2 * 16, kLn2, side);
      store_part(summaries, c, c < shape.clusters, p, dsummary[p / 2] + p % 2 * 16, 1.0f, side);
    }
  }
}

}  // namespace

void cast_mix_backward_sm90a(const CastShape& shape, const AttentionCall& call,
                             const CastBackward& pass, cudaStream_t stream) {
  if (pass.plan.parts.slots == 0) return;
  const auto heads = static_cast<unsigned>(shape.H);
  const auto tiles = static_cast<unsigned>(shape.clusters + 63) / 64;
  const auto run = [&](auto tag) {
    using T = decltype(tag);
    MixBackwardArgs<T> args{shape,
                            pass,
                            tensor4<const T>(call.inputs.q),
                            tensor4<const T>(pass.grad_out),
                            {},
                            static_cast<const T*>(pass.surrogates),
                            static_cast<const T*>(pass.summaries)};
    if (pass.gradients.dq.present()) args.dq = tensor4<T>(pass.gradients.dq);
    dispatch_head_dim(call.op, call.Dk, [&](auto width) {
      constexpr int kWidth = decltype(width)::value;
      using S = TokenShape<T, kWidth>;
      launch_early("cast tokens", mix_tokens_sm90a_kernel<T, kWidth>,
                   dim3(static_cast<unsigned>(pass.plan.parts.slots), heads), S::kThreads,
                   S::kPresent + tiles * 8, stream, args);
      if (args.dq.data)
        zero_padding(pass.gradients.dq, call.inputs.q_sequences, call.num_items(), stream);
      launch_early("cast clusters", mix_clusters_sm90a_kernel<T, kWidth>,
                   dim3(static_cast<unsigned>(pass.plan.chunks.slots), heads, tiles), kWarpgroup,
                   ClusterStages<T, kWidth>::kBytes, stream, args);
    });
  };
  if (call.inputs.q.dtype == DType::bf16)
    run(Bf16{});
  else
    run(F16{});
}

}  // namespace coterie::cuda
