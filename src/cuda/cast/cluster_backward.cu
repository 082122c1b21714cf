// SPDX-License-Identifier: MIT
// Gradients of CAST's summaries and surrogates by the mix: for cluster c, over all tokens i as if
// they were in no cluster (see mix_backward.cu),
//   dsummary_c = sum_i alpha_ic g_i,   dsurrogate_c = sum_i scale psi(phi_i) dlogit_ic q_i.
// A block owns some clusters and walks a part of the tokens; parts are added in token_sum.cu.
#include "cuda/cast/backward.cuh"
#include "cuda/launch/dispatch.h"
#include "cuda/launch/launch.h"
#include "cuda/prim/dependent.cuh"
#include "cuda/prim/fragments.cuh"
#include "cuda/prim/store.cuh"

namespace coterie::cuda {
namespace {

constexpr int kWarps = 4, kThreads = kWarps * 32, kClusters = 16 * kWarps;

template <class T>
constexpr int kTokens = sizeof(T) == 2 ? 64 : 32;  // of a step

// What the products need of a token.
struct TokenFacts {
  float factor, lse, delta;
};

template <class T, int kDim>
struct ClusterMemory {
  using Shape = Tile<T, kDim>;
  static constexpr int kTiles = (2 * kClusters + 4 * kTokens<T>)*Shape::kRowBytes;
  static constexpr int kBytes = kTiles + 2 * kTokens<T> * static_cast<int>(sizeof(TokenFacts));
  unsigned char* memory;

  __device__ Shape clusters(int which) const {
    return {shared_address(memory) + which * kClusters * Shape::kRowBytes};
  }
  __device__ Shape tokens(int step, int which) const {
    return {shared_address(memory) +
            (2 * kClusters + (step % 2 * 2 + which) * kTokens<T>)*Shape::kRowBytes};
  }
  __device__ TokenFacts* facts(int step) const {
    return reinterpret_cast<TokenFacts*>(memory + kTiles) + step % 2 * kTokens<T>;
  }
};

template <class T, int kDim>
__device__ __forceinline__ void load_tokens(const MixBackwardArgs<T>& args,
                                            const ClusterMemory<T, kDim>& memory,
                                            const ItemChunk& part, int head, int step) {
  const CastShape& shape = args.shape;
  const int first = part.begin + step * kTokens<T>, count = part.end - first;
  load_tile<kTokens<T>, kThreads>(
      memory.tokens(step, 0), args.q.rows(part.span.batch, head, part.span.begin), first, count);
  load_tile<kTokens<T>, kThreads>(memory.tokens(step, 1),
                                  args.grad_out.rows(part.span.batch, head, part.span.begin), first,
                                  count);
  cp_async_commit();
  if (threadIdx.x >= kTokens<T>) return;
  // Rows beyond the last are zeros, and an infinite log-sum-exp takes their weights.
  TokenFacts facts{0.0f, INFINITY, 0.0f};
  const int token = first + static_cast<int>(threadIdx.x);
  if (token < part.end) {
    const std::int64_t place = shape.row(part.span, head) + token;
    facts.factor = shape.scale * gate_factor(shape, shape.gates(part.span)[token]);
    facts.lse = shape.laplace ? 0.0f : args.pass.saved.combine_lse[place];
    facts.delta = shape.laplace ? 0.0f : args.pass.delta[place];
  }
  memory.facts(step)[threadIdx.x] = facts;
}

template <class T, int kDim>
__global__ void __launch_bounds__(kThreads)
    mix_clusters_kernel(const __grid_constant__ MixBackwardArgs<T> args) {
  extern __shared__ __align__(128) unsigned char shared[];
  await_previous();
  const CastShape& shape = args.shape;
  const int head = static_cast<int>(blockIdx.y), lane = threadIdx.x % 32;
  const int first = static_cast<int>(blockIdx.z) * kClusters;
  const int row = static_cast<int>(threadIdx.x) / 32 * 16;
  const ItemChunk part = args.pass.chunks.find(shape.tokens, blockIdx.x);
  if (part.begin >= part.end) return;
  const ClusterMemory<T, kDim> memory{shared};
  load_tile<kClusters, kThreads>(memory.clusters(0), args.keys(head), first,
                                 shape.clusters - first);
  load_tile<kClusters, kThreads>(memory.clusters(1), args.values(part.item, head), first,
                                 shape.clusters - first);
  load_tokens(args, memory, part, head, 0);
  bool present[2];
#pragma unroll
  for (int side = 0; side < 2; ++side) {
    const int c = first + row + 8 * side + lane / 4;
    present[side] =
        c < shape.clusters && (shape.laplace || args.summary_lse(part.item, head)[c] > -INFINITY);
  }
  // The warp's clusters, in registers where they fit.
  QueryFragments<T, kDim, sizeof(T) == 2 && kDim <= 64, 1> own[2];
  Accumulator dsurrogate[kDim / 16] = {}, dsummary[kDim / 16] = {};
  const int steps = (part.end - part.begin + kTokens<T> - 1) / kTokens<T>;
  for (int step = 0; step < steps; ++step) {
    cp_async_wait<0>();
    __syncthreads();
    if (step + 1 < steps) load_tokens(args, memory, part, head, step + 1);
    if (step == 0)
#pragma unroll
      for (int which = 0; which < 2; ++which) own[which].load(memory.clusters(which), row);
    const TokenFacts* facts = memory.facts(step);
#pragma unroll sizeof(T) == 2 ? kTokens < T> / 16 : 1
    for (int n = 0; n < kTokens<T> / 16; ++n) {
      Accumulator s[1], d[1];
      own[0].scores(s, memory.tokens(step, 0), 16 * n);
      own[1].scores(d, memory.tokens(step, 1), 16 * n);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const TokenFacts& token = facts[16 * n + i / 4 * 8 + lane % 4 * 2 + i % 2];
        float &p = s[0][i / 4][i % 4], &ds = d[0][i / 4][i % 4];
        const MixWeight weight(shape, present[i / 2 % 2] ? p * token.factor : -INFINITY, token.lse);
        p = weight.value;
        ds = weight.slope * (ds - token.delta) * token.factor;
      }
      FragmentA<T> weights, dlogits;
      to_fragment(weights, s[0]);
      to_fragment(dlogits, d[0]);
#pragma unroll
      for (int c = 0; c < kDim / 16; ++c) {
        FragmentB<T> q, g;
        load_b_transposed(q, memory.tokens(step, 0), 16 * c, 16 * n);
        load_b_transposed(g, memory.tokens(step, 1), 16 * c, 16 * n);
        multiply_add(dsurrogate[c], dlogits, q);
        multiply_add(dsummary[c], weights, g);
      }
    }
  }
  const std::int64_t problem = static_cast<std::int64_t>(blockIdx.x) * shape.H + head;
  float* to = args.pass.partials + problem * shape.clusters * 2 * shape.D;
  const Rows<float> rows{to, 2 * shape.D, shape.D, shape.D % 4 == 0};
  const Rows<float> summary_rows{to + shape.D, 2 * shape.D, shape.D, shape.D % 4 == 0};
#pragma unroll
  for (int side = 0; side < 2; ++side) {
    const int c = first + row + 8 * side + lane / 4;
#pragma unroll
    for (int n = 0; n < kDim / 16; n += 2) {
      store_columns(rows, c, c < shape.clusters, 16 * n,
                    reinterpret_cast<const Accumulator(&)[2]>(dsurrogate[n]), side);
      store_columns(summary_rows, c, c < shape.clusters, 16 * n,
                    reinterpret_cast<const Accumulator(&)[2]>(dsummary[n]), side);
    }
  }
}

}  // namespace

void cast_cut_tokens(const CastShape& shape, const AttentionCall& call, CastBackward& pass) {
  const std::int64_t groups = (shape.clusters + kClusters - 1) / kClusters;
  const int blocks = call.inputs.q.dtype == DType::f32 ? 1 : 2;
  pass.parts = key_chunks(call, shape.H, multiprocessors());
  pass.chunks = key_chunks(call, groups * shape.H, blocks * multiprocessors());
}

void cast_clusters_backward(const CastShape& shape, const AttentionCall& call,
                            const CastBackward& pass, cudaStream_t stream) {
  dispatch_element(call.op, call.inputs.q.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const MixBackwardArgs<T> args = mix_args<T>(shape, call, pass, kTokens<T>);
    if constexpr (sizeof(T) == 2)
      if (pass.hopper) return cast_clusters_sm90a(args, stream);
    if (pass.chunks.slots == 0) return;
    const dim3 grid(static_cast<unsigned>(pass.chunks.slots), static_cast<unsigned>(shape.H),
                    static_cast<unsigned>((shape.clusters + kClusters - 1) / kClusters));
    dispatch_head_dim(call.op, call.Dk, [&](auto width) {
      constexpr int kDim = decltype(width)::value;
      launch_early("cast clusters", mix_clusters_kernel<T, kDim>, grid, kThreads,
                   ClusterMemory<T, kDim>::kBytes, stream, args);
    });
  });
}

}  // namespace coterie::cuda
