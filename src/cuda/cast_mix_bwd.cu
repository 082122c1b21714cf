// SPDX-License-Identifier: MIT
// The backward pass of CAST's mix of clusters. With dalpha_ic = g_i . summary_c, for softmax
//   dlogit_ic = alpha_ic (dalpha_ic - delta_i), delta_i = sum_c alpha_ic dalpha_ic,
// for laplace dlogit_ic = laplace'(logit_ic) dalpha_ic. In its own clusters a token has
// g_i . inner_slot in the place of dalpha; `excess` is what that adds to dlogit.
#include "cuda/device/await.cuh"
#include "cuda/device/cast_bwd.cuh"
#include "cuda/device/cast_mix.cuh"
#include "cuda/launch.h"
#include "cuda/padding.h"
#include "cuda/tuning.h"

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

// Weights of the slots, and delta of every row.
template <class T, int kDim>
__global__ void __launch_bounds__(MixTile<T, kDim, true>::kThreads, MixTile<T, kDim, true>::kBlocks)
    mix_weights_kernel(const __grid_constant__ MixBackwardArgs<T> args) {
  extern __shared__ __align__(128) unsigned char memory[];
  await_previous();
  using Mix = MixTile<T, kDim, true>;
  constexpr int kM = Mix::kM;
  const CastShape& shape = args.shape;
  const CastBackward& pass = args.pass;
  const KeyChunk tile = args.tiles.find(shape.tokens, blockIdx.x);
  if (tile.begin >= tile.end) return;
  Mix mix(shape, memory, tile, args.surrogates, args.summaries);
  mix.load_tokens(0, args.q);
  mix.load_tokens(1, args.grad_out);
  mix.load_clusters(0);
  mix.load_facts(pass.saved.combine_lse, nullptr);
  float delta[kM][2] = {};
  if (shape.laplace) {
    cp_async_wait<0>();
    __syncthreads();
  } else {
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
  }
#pragma unroll
  for (int i = 0; i < 2 * kM; ++i) {
    const float total = quad_sum(delta[i / 2][i % 2]);
    if (mix.lane % 4 == 0) mix.fact(2, mix.row(i / 2, i % 2)) = total;
  }
  __syncwarp();

  using Own = OwnRows<Mix, T, kDim>;
  const Own own(mix, pass.slots);
  using Floats = typename Own::Floats;
  struct Cluster {
    Floats surrogate, summary;
    float dot;
  };
  own.for_slots(
      [&](std::int64_t slot, int cluster) {
        return Cluster{own.lanes.load(mix.keys, cluster), own.lanes.load(mix.values, cluster),
                       pass.dots[slot]};
      },
      [&](const Cluster& with, int k, bool there, std::int64_t slot) {
        const int row = own.row(k);
        const float product = own.lanes.dot(own.token_row(0, k), with.surrogate);
        const float dalpha = own.lanes.dot(own.token_row(1, k), with.summary);
        if (!there || !own.lanes.first()) return;
        const MixWeight weight(shape, product * mix.fact(0, row),
                               shape.laplace ? 0.0f : mix.fact(1, row));
        const float excess = weight.slope * (with.dot - dalpha);
        if (!shape.laplace) mix.fact(2, row) += excess;
        pass.weights[slot] = weight.value;
        pass.weighted[slot] = weight.value * with.dot;
        pass.excess[slot] = excess;
      });
#pragma unroll
  for (int k = 0; k < Own::kEach; ++k)
    if (own.lanes.first() && mix.there(own.row(k)))
      pass.delta[shape.row(tile.keys, mix.head) + mix.token(own.row(k))] = mix.fact(2, own.row(k));
}

// dq = scale psi (sum_c dlogit_c S_c) + the slots; the sum's product with q is that of the gate.
template <class T, int kDim>
__global__ void __launch_bounds__(MixTile<T, kDim, true>::kThreads, MixTile<T, kDim, true>::kBlocks)
    mix_tokens_kernel(const __grid_constant__ MixBackwardArgs<T> args) {
  extern __shared__ __align__(128) unsigned char memory[];
  await_previous();
  using Mix = MixTile<T, kDim, true>;
  constexpr int kM = Mix::kM;
  const CastShape& shape = args.shape;
  const CastBackward& pass = args.pass;
  const KeyChunk tile = args.tiles.find(shape.tokens, blockIdx.x);
  if (tile.begin >= tile.end) return;
  Mix mix(shape, memory, tile, args.surrogates, args.summaries);
  mix.load_tokens(0, args.q);
  mix.load_tokens(1, args.grad_out);
  mix.load_clusters(0);
  mix.load_facts(pass.saved.combine_lse, pass.delta);
  Accumulator sum[kM][kDim / 16] = {};
  for_clusters(mix, args.summary_lse(tile.item, mix.head),
               [&](int step, int column, Accumulator(&s)[kM], const Accumulator(&d)[kM]) {
                 FragmentA<T> ds[kM];
#pragma unroll
                 for (int m = 0; m < kM; ++m) {
#pragma unroll
                   for (int i = 0; i < 8; ++i) {
                     const int row = mix.row(m, i / 2 % 2);
                     float& value = s[m][i / 4][i % 4];
                     const float lse = shape.laplace ? 0.0f : mix.fact(1, row);
                     value = MixWeight(shape, value, lse).slope *
                             (d[m][i / 4][i % 4] - mix.fact(2, row));
                   }
                   to_fragment(ds[m], s[m]);
                 }
#pragma unroll
                 for (int n = 0; n < kDim / 16; ++n) {
                   FragmentB<T> k;
                   load_b_transposed(k, mix.stage(step, 0), 16 * n, column);
#pragma unroll
                   for (int m = 0; m < kM; ++m) multiply_add(sum[m][n], ds[m], k);
                 }
               });
  mix.spread(sum);
  using Own = OwnRows<Mix, T, kDim>;
  using Floats = typename Own::Floats;
  const Own own(mix, pass.slots);
  struct Excess {
    Floats surrogate;
    float factor;
  };
  own.for_slots(
      [&](std::int64_t slot, int cluster) {
        return Excess{own.lanes.load(mix.keys, cluster), pass.excess[slot]};
      },
      [&](const Excess& excess, int k, bool there, std::int64_t) {
        if (there) own.add(k, excess.factor, excess.surrogate);
      });
#pragma unroll
  for (int k = 0; k < Own::kEach; ++k) {
    const int row = own.row(k);
    Floats values = own.get(k);
    const float dot = own.lanes.dot(values, own.token_row(0, k));
    values.scale(mix.fact(0, row));
    own.set(k, values);
    if (shape.gate_scale && own.lanes.first() && mix.there(row))
      pass.dgate_rows[shape.row(tile.keys, mix.head) + mix.token(row)] =
          shape.scale * gate_sigmoid(mix.gate(row)) * dot;
  }
  if (!args.dq.data) return;
  own.for_slots([&](std::int64_t slot,
                    int) { return own.lanes.load_floats(pass.dq_slots + slot * shape.D, shape.D); },
                [&](const Floats& slot, int k, bool there, std::int64_t) {
                  if (there) own.add(k, 1.0f, slot);
                });
  const Rows<T> to = args.dq.rows(tile.keys.batch, mix.head, tile.keys.begin);
#pragma unroll
  for (int k = 0; k < Own::kEach; ++k)
    if (mix.there(own.row(k))) own.lanes.store(to, mix.token(own.row(k)), own.get(k));
}

}  // namespace

void cast_weights_backward(const CastShape& shape, const AttentionCall& call,
                           const CastBackward& pass, cudaStream_t stream) {
  dispatch_element(call.op, call.inputs.q.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    dispatch_wide_dim(call.op, call.Dk, [&](auto width) {
      constexpr int kDim = decltype(width)::value;
      using Mix = MixTile<T, kDim, true>;
      const MixBackwardArgs<T> args = mix_args<T>(shape, call, pass, Mix::kRows);
      if (args.tiles.slots == 0) return;
      launch_early("cast weights", mix_weights_kernel<T, kDim>,
                   dim3(static_cast<unsigned>(args.tiles.slots), static_cast<unsigned>(shape.H)),
                   Mix::kThreads, Mix::kBytes, stream, args);
    });
  });
}

void cast_tokens_backward(const CastShape& shape, const AttentionCall& call,
                          const CastBackward& pass, cudaStream_t stream) {
  dispatch_element(call.op, call.inputs.q.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    dispatch_wide_dim(call.op, call.Dk, [&](auto width) {
      constexpr int kDim = decltype(width)::value;
      using Mix = MixTile<T, kDim, true>;
      const MixBackwardArgs<T> args = mix_args<T>(shape, call, pass, Mix::kRows);
      if (args.tiles.slots == 0) return;
      launch_early("cast tokens", mix_tokens_kernel<T, kDim>,
                   dim3(static_cast<unsigned>(args.tiles.slots), static_cast<unsigned>(shape.H)),
                   Mix::kThreads, Mix::kBytes, stream, args);
    });
  });
  if (pass.gradients.dq.present())
    zero_padding(pass.gradients.dq, call.inputs.q_sequences, call.num_items(), stream);
}

}  // namespace coterie::cuda
