// SPDX-License-Identifier: MIT
// The backward pass of CAST's mix of clusters. With dalpha_ic = g_i . summary_c, for softmax
//   dlogit_ic = alpha_ic (dalpha_ic - delta_i), delta_i = sum_c alpha_ic dalpha_ic,
// for laplace dlogit_ic = laplace'(logit_ic) dalpha_ic. In its own clusters a token has
// g_i . inner_slot in the place of dalpha; `excess` is what that adds to dlogit. Here all tokens
// are as if they were in no cluster, up to delta.
#include "cuda/api/padding.h"
#include "cuda/cast/backward.cuh"
#include "cuda/cast/mix.cuh"
#include "cuda/launch/dispatch.h"
#include "cuda/launch/launch.h"
#include "cuda/prim/dependent.cuh"

namespace coterie::cuda {
namespace {

// Calls body(step, column, s, d) with logits and dalpha of a warp's tokens and 16 clusters at a
// time.
template <class Mix, class Body>
__device__ __forceinline__ void for_clusters(Mix& mix, const float* summary_lse, const Body& body) {
  constexpr int kM = Mix::kM;
  float factor[kM][2];
  for (int step = 0; step < mix.steps(); ++step) {
    mix.begin(step, factor);
    const ClusterBits present(summary_lse, step * Mix::kColumns, mix.shape.clusters);
#pragma unroll Mix::kHeld ? 2 : 1
    for (int column = 0; column < Mix::kColumns; column += 16) {
      Accumulator s[kM], d[kM];
      mix.products(s, 0, step, column);
      mix.products(d, 1, step, column);
#pragma unroll
      for (int i = 0; i < 8 * kM; ++i) {
        const int own = column + i / 4 % 2 * 8 + mix.lane % 4 * 2 + i % 2;
        float& logit = s[i / 8][i / 4 % 2][i % 4];
        logit = present.has(own) ? logit * factor[i / 8][i / 2 % 2] : -INFINITY;
      }
      body(step, column, s, d);
    }
  }
}

template <class Mix, class T>
__device__ __forceinline__ Mix load_mix(const MixBackwardArgs<T>& args, unsigned char* memory,
                                        const ItemChunk& tile, const float* delta) {
  Mix mix(args.shape, memory, tile, args.surrogates, args.summaries);
  mix.load_tokens(0, args.q);
  mix.load_tokens(1, args.grad_out);
  mix.load_clusters(0);
  mix.load_facts(args.pass.saved.combine_lse, delta);
  return mix;
}

// delta of every row.
template <class T, int kDim>
__global__ void __launch_bounds__(MixTile<T, kDim, true>::kThreads, MixTile<T, kDim, true>::kBlocks)
    mix_delta_kernel(const __grid_constant__ MixBackwardArgs<T> args) {
  extern __shared__ __align__(128) unsigned char memory[];
  await_previous();
  using Mix = MixTile<T, kDim, true>;
  constexpr int kM = Mix::kM;
  const CastShape& shape = args.shape;
  const CastBackward& pass = args.pass;
  const ItemChunk tile = args.tiles.find(shape.tokens, blockIdx.x);
  if (tile.begin >= tile.end) return;
  Mix mix = load_mix<Mix>(args, memory, tile, nullptr);
  float delta[kM][2] = {};
  for_clusters(mix, args.summary_lse(tile.item, mix.head),
               [&](int, int, const Accumulator(&s)[kM], const Accumulator(&d)[kM]) {
#pragma unroll
                 for (int i = 0; i < 8 * kM; ++i) {
                   const int m = i / 8, half = i / 2 % 2;
                   const float lse = mix.fact(1, mix.row(m, half));
                   const float weight = exp2_approximate((s[m][i / 4 % 2][i % 4] - lse) * kLog2e);
                   delta[m][half] = fmaf(weight, d[m][i / 4 % 2][i % 4], delta[m][half]);
                 }
               });
#pragma unroll
  for (int i = 0; i < 2 * kM; ++i) {
    const float total = quad_sum(delta[i / 2][i % 2]);
    const int row = mix.row(i / 2, i % 2);
    const std::int64_t place = shape.row(tile.span, mix.head) + mix.token(row);
    if (mix.lane % 4 == 0 && mix.there(row)) pass.delta[place] = total + pass.facts[place].z;
  }
}

// dq = scale psi sum_c dlogit_c S_c; the sum's product with q is that of the gate.
template <class T, int kDim>
__global__ void __launch_bounds__(MixTile<T, kDim, true>::kThreads, MixTile<T, kDim, true>::kBlocks)
    mix_tokens_kernel(const __grid_constant__ MixBackwardArgs<T> args) {
  extern __shared__ __align__(128) unsigned char memory[];
  await_previous();
  using Mix = MixTile<T, kDim, true>;
  constexpr int kM = Mix::kM;
  const CastShape& shape = args.shape;
  const CastBackward& pass = args.pass;
  const ItemChunk tile = args.tiles.find(shape.tokens, blockIdx.x);
  if (tile.begin >= tile.end) return;
  Mix mix = load_mix<Mix>(args, memory, tile, shape.laplace ? nullptr : pass.delta);
  Accumulator sum[kM][kDim / 16] = {};
  for_clusters(mix, args.summary_lse(tile.item, mix.head),
               [&](int step, int column, Accumulator(&s)[kM], const Accumulator(&d)[kM]) {
#pragma unroll
                 for (int i = 0; i < 8 * kM; ++i) {
                   const int m = i / 8, row = mix.row(m, i / 2 % 2);
                   float& value = s[m][i / 4 % 2][i % 4];
                   const float lse = shape.laplace ? 0.0f : mix.fact(1, row);
                   const float delta = shape.laplace ? 0.0f : mix.fact(2, row);
                   value = MixWeight(shape, value, lse).slope * (d[m][i / 4 % 2][i % 4] - delta);
                 }
                 add_values(sum, s, mix.stage(step, 0), column);
               });
  mix.spread(sum);
  const CastLanes<T, kDim> lanes;
  constexpr int kGroups = 32 / CastLanes<T, kDim>::kLanes;
  Rows<T> to{};
  if (args.dq.data) to = args.dq.rows(tile.span.batch, mix.head, tile.span.begin);
  for (int r = mix.lane / lanes.kLanes; r < 16 * kM; r += kGroups) {
    const int row = mix.warp_row + r;
    typename CastLanes<T, kDim>::Floats values{};
#pragma unroll
    for (int i = 0; i < lanes.kVector; ++i)
      if (lanes.column() + i < kDim) values.value[i] = mix.row_floats(row)[lanes.column() + i];
    const float dot = lanes.dot(values, lanes.load_shared(mix.tokens(0).chunk(row, lanes.lane)));
    values.scale(mix.fact(0, row));
    if (!mix.there(row)) continue;
    if (lanes.first()) pass.dgate_rows[shape.row(tile.span, mix.head) + mix.token(row)] = dot;
    if (args.dq.data) lanes.store(to, mix.token(row), values);
  }
}

}  // namespace

void cast_tokens_backward(const CastShape& shape, const AttentionCall& call,
                          const CastBackward& pass, cudaStream_t stream) {
  dispatch_element(call.op, call.inputs.q.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    if constexpr (sizeof(T) == 2)
      if (pass.hopper) return cast_tokens_sm90a(mix_args<T>(shape, call, pass, 64), stream);
    dispatch_head_dim(call.op, call.Dk, [&](auto width) {
      constexpr int kDim = decltype(width)::value;
      using Mix = MixTile<T, kDim, true>;
      const MixBackwardArgs<T> args = mix_args<T>(shape, call, pass, Mix::kRows);
      if (args.tiles.slots == 0) return;
      const dim3 grid(static_cast<unsigned>(args.tiles.slots), static_cast<unsigned>(shape.H));
      if (!shape.laplace)
        launch_early("cast delta", mix_delta_kernel<T, kDim>, grid, Mix::kThreads, Mix::kBytes,
                     stream, args);
      launch_early("cast tokens", mix_tokens_kernel<T, kDim>, grid, Mix::kThreads, Mix::kBytes,
                   stream, args);
    });
  });
  if (pass.gradients.dq.present())
    zero_padding(pass.gradients.dq, call.inputs.q_sequences, call.num_items(), stream);
}

}  // namespace coterie::cuda
