// SPDX-License-Identifier: MIT
// What cluster_backward.cu computes by warpgroup products, for 16-bit types and softmax (see
// walk.cuh).
#include "cuda/cast/walk.cuh"
#include "cuda/launch/dispatch.h"
#include "cuda/launch/launch.h"
#include "cuda/prim/dependent.cuh"

namespace coterie::cuda {
namespace {

constexpr int kThreads = kWarpgroup;

// Clusters own the rows; deltas are known.
template <class T, int kWidth>
struct ClusterShape {
  static constexpr int kStages = kWidth == 64 ? 4 : 2;
  using Tiles = Pair<T, kWidth>;
  static constexpr int kStage = Tiles::kBytes;
  static constexpr int kFacts = kStage + kStages * Tiles::kBytes;
  static constexpr int kBytes = kFacts + kStages * 64 * 16;
};

template <class T, int kWidth>
__global__ void __launch_bounds__(kThreads, 2)
    mix_clusters_sm90a_kernel(const __grid_constant__ MixBackwardArgs<T> args) {
  extern __shared__ __align__(1024) unsigned char memory[];
  release_next();
  using S = ClusterShape<T, kWidth>;
  using Tiles = typename S::Tiles;
  const CastShape& shape = args.shape;
  const int head = static_cast<int>(blockIdx.y), first = static_cast<int>(blockIdx.z) * 64;
  const ItemChunk part = args.pass.chunks.find(shape.tokens, static_cast<int>(blockIdx.x));
  if (part.begin >= part.end) return await_writes();
  const std::uint32_t base = shared_address(memory);
  const Tiles own(base);
  const auto stage = [&](int number) {
    return Tiles(base + S::kStage + number % S::kStages * Tiles::kBytes);
  };
  // Of 64 tokens the first halves of their facts, then the second ones.
  const auto stage_facts = [&](int number) {
    return reinterpret_cast<float2*>(memory + S::kFacts) + number % S::kStages * 128;
  };
  const Rows<const T> q = args.q.rows(part.span.batch, head, part.span.begin);
  const Rows<const T> g = args.grad_out.rows(part.span.batch, head, part.span.begin);
  const float2* row_facts =
      reinterpret_cast<const float2*>(args.pass.facts + shape.row(part.span, head));
  // Rows beyond the last are zeros with facts of 0: a weight of 1 of nothing.
  const auto load_rows = [&](int number) {
    const int token = part.begin + 64 * number;
    if (token < part.end) stage(number).template load<kThreads>(q, g, token, part.end - token);
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
  own.template load<kThreads>(args.keys(head), args.values(part.item, head), first,
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
  Sum<kWidth> dsurrogate, dsummary;
  declare<kWidth>(dsurrogate);
  declare<kWidth>(dsummary);
  const int steps = (part.end - part.begin + 63) / 64;
#pragma unroll 1
  for (int number = 0; number < steps; ++number) {
    cp_async_wait<S::kStages - 2>();
    fence_async_proxy();
    __syncthreads();
    const Tiles tokens = stage(number);
    // Of two tokens side by side.
    const float4* facts = reinterpret_cast<const float4*>(stage_facts(number)) + threadIdx.x % 4;
    const auto weigh = [&](float(&s)[32]) {
      // All warps' sums of the stage before are complete.
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

template <class T, int kWidth>
void launch_clusters(const MixBackwardArgs<T>& args, cudaStream_t stream) {
  using S = ClusterShape<T, kWidth>;
  const CastShape& shape = args.shape;
  const dim3 grid(static_cast<unsigned>(args.pass.chunks.slots), static_cast<unsigned>(shape.H),
                  static_cast<unsigned>((shape.clusters + 63) / 64));
  launch_early("cast clusters", mix_clusters_sm90a_kernel<T, kWidth>, grid, kThreads, S::kBytes,
               stream, args);
}

}  // namespace

template <class T>
void cast_clusters_sm90a(const MixBackwardArgs<T>& args, cudaStream_t stream) {
  if (args.pass.chunks.slots == 0) return;
  dispatch_head_dim("cast", args.shape.D,
                    [&](auto width) { launch_clusters<T, decltype(width)::value>(args, stream); });
}

template void cast_clusters_sm90a(const MixBackwardArgs<Bf16>&, cudaStream_t);
template void cast_clusters_sm90a(const MixBackwardArgs<F16>&, cudaStream_t);

}  // namespace coterie::cuda
