// SPDX-License-Identifier: MIT
// CAST's mix: a token's output is its attention over the clusters,
//   out_i = sum_c alpha_ic summary_c + sum over its slots of alpha_ic (inner_slot - summary_c).
#include "cuda/api/padding.h"
#include "cuda/cast/mix.cuh"
#include "cuda/cast/mix.h"
#include "cuda/launch/device.h"
#include "cuda/launch/dispatch.h"
#include "cuda/launch/launch.h"
#include "cuda/prim/dependent.cuh"

namespace coterie::cuda {
namespace {

template <class T>
__global__ void round_kernel(const float* from, T* to, std::int64_t count) {
  await_previous();
  const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < count) to[i] = from_float<T>(from[i]);
}

// Weights of the rows of a warp, base 2. The shift follows the largest logit only when that is far
// above it, so that sums are hardly ever rescaled.
template <int kM>
struct MixSoftmax {
  float shift[kM][2], sum[kM][2];

  __device__ MixSoftmax() {
#pragma unroll
    for (int i = 0; i < 2 * kM; ++i) {
      shift[i / 2][i % 2] = -INFINITY;
      sum[i / 2][i % 2] = 0.0f;
    }
  }
  // Makes room for the logits; scales the sums of all columns with them.
  template <int kTiles, int kSums>
  __device__ void raise(const Accumulator (&s)[kTiles][kM], Accumulator (&out)[kM][kSums]) {
    float largest[kM][2];
    bool far = false;
#pragma unroll
    for (int i = 0; i < 2 * kM; ++i) {
      const int m = i / 2, half = i % 2;
      largest[m][half] = -INFINITY;
#pragma unroll
      for (int j = 0; j < 4 * kTiles; ++j)
        largest[m][half] = fmaxf(largest[m][half], s[j / 4][m][j / 2 % 2][2 * half + j % 2]);
      far |= largest[m][half] > shift[m][half] + RowSoftmax::kSlack;
    }
    if (!__any_sync(~0u, far)) return;
#pragma unroll
    for (int i = 0; i < 2 * kM; ++i) {
      const int m = i / 2, half = i % 2;
      const float old = shift[m][half], now = fmaxf(old, quad_max(largest[m][half]));
      const float factor = now == -INFINITY ? 1.0f : exp2_approximate(old - now);
      shift[m][half] = now;
      sum[m][half] *= factor;
#pragma unroll
      for (int d = 0; d < 4 * kSums; ++d) out[m][d / 4][d / 2 % 2][2 * half + d % 2] *= factor;
    }
  }
  __device__ float weight(int m, int half, float logit) {
    const float p = logit == -INFINITY ? 0.0f : exp2_approximate(logit - shift[m][half]);
    sum[m][half] += p;
    return p;
  }
};

// out = sum of weights and summaries, not normalised; for softmax the rows' log-sum-exps go to
// fact(1, row).
template <class T, int kDim, class Mix>
__device__ __forceinline__ void mix_summaries(Mix& mix, const float* summary_lse,
                                              Accumulator (&out)[Mix::kM][kDim / 16]) {
  constexpr int kM = Mix::kM, kTiles = 2;  // times 16 clusters between rescalings
  const CastShape& shape = mix.shape;
  MixSoftmax<kM> softmax;
  float factor[kM][2];
  for (int step = 0; step < mix.steps(); ++step) {
    mix.begin(step, factor);
    const ClusterBits there(summary_lse, step * Mix::kColumns, shape.clusters);
#pragma unroll 1
    for (int first = 0; first < Mix::kColumns; first += 16 * kTiles) {
      Accumulator s[kTiles][kM];
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
        mix.products(s[n], 0, step, first + 16 * n);
#pragma unroll
        for (int i = 0; i < 8 * kM; ++i) {
          float& value = s[n][i / 8][i / 4 % 2][i % 4];
          const int column = first + 16 * n + i / 4 % 2 * 8 + mix.lane % 4 * 2 + i % 2;
          const float logit = value * factor[i / 8][i / 2 % 2];
          if (shape.laplace)
            value = laplace(logit);
          else
            value = there.has(column) ? logit * kLog2e : -INFINITY;
        }
      }
      if (!shape.laplace) softmax.raise(s, out);
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
        if (!shape.laplace)
#pragma unroll
          for (int i = 0; i < 8 * kM; ++i) {
            float& value = s[n][i / 8][i / 4 % 2][i % 4];
            value = softmax.weight(i / 8, i / 2 % 2, value);
          }
        add_values(out, s[n], mix.stage(step, 1), first + 16 * n);
      }
    }
  }
  if (shape.laplace) return;
#pragma unroll
  for (int i = 0; i < 2 * kM; ++i) {
    const int m = i / 2, half = i % 2;
    const float total = quad_sum(softmax.sum[m][half]);
    const float inverse = total > 0.0f ? 1.0f / total : 0.0f;
#pragma unroll
    for (int d = 0; d < kDim / 4; ++d) out[m][d / 4][d / 2 % 2][2 * half + d % 2] *= inverse;
    if (mix.lane % 4 == 0)
      mix.fact(1, mix.row(m, half)) = (softmax.shift[m][half] + log2f(total)) * kLn2;
  }
}

template <class T, int kDim>
__global__ void __launch_bounds__(MixTile<T, kDim, false>::kThreads,
                                  MixTile<T, kDim, false>::kBlocks)
    mix_kernel(const __grid_constant__ MixArgs<T> args) {
  extern __shared__ __align__(128) unsigned char memory[];
  await_previous();
  using Mix = MixTile<T, kDim, false>;
  const CastShape& shape = args.shape;
  const ItemChunk tile = args.tiles.find(shape.tokens, blockIdx.x);
  if (tile.begin >= tile.end) return;
  Mix mix(shape, memory, tile, args.surrogates, args.summaries);
  mix.load_tokens(0, args.q);
  mix.load_clusters(0);
  mix.load_facts(nullptr, nullptr);
  Accumulator out[Mix::kM][kDim / 16] = {};
  mix_summaries<T, kDim>(
      mix, args.summary_lse ? args.summary_lse + shape.cluster(tile.item, mix.head, 0) : nullptr,
      out);
  mix.spread(out);

  // What the token's own clusters give it instead of their summaries.
  using Own = OwnRows<Mix, T, kDim>;
  const Own own(mix, args.slots);
  using Floats = typename Own::Floats;
  struct Cluster {
    Floats surrogate, summary, inner;
  };
  own.for_slots(
      [&](std::int64_t slot, int cluster) {
        return Cluster{own.lanes.load(mix.keys, cluster), own.lanes.load(mix.values, cluster),
                       own.lanes.load(dense_rows(args.inner, shape.D), slot)};
      },
      [&](Cluster& with, int k, bool there, std::int64_t) {
        const int row = own.row(k);
        const float product = own.lanes.dot(own.token_row(0, k), with.surrogate);
        const float weight =
            cast_weight(shape, product * mix.fact(0, row), shape.laplace ? 0.0f : mix.fact(1, row));
        own.lanes.add(with.inner, -1.0f, with.summary);
        if (there) own.add(k, weight, with.inner);
      });
  const Rows<T> to = args.out.rows(tile.span.batch, mix.head, tile.span.begin);
#pragma unroll
  for (int k = 0; k < Own::kEach; ++k) {
    const int row = own.row(k);
    if (!mix.there(row)) continue;
    own.lanes.store(to, mix.token(row), own.get(k));
    if (args.lse && own.lanes.first())
      args.lse[shape.row(tile.span, mix.head) + mix.token(row)] = mix.fact(1, row);
  }
}

}  // namespace

const void* cast_rounded(DType dtype, const float* from, std::int64_t count, Arena& arena,
                         cudaStream_t stream) {
  if (dtype == DType::f32) return from;
  void* to = arena.take<std::uint16_t>(count);
  if (arena.counting() || count == 0) return to;
  constexpr int kThreads = 256;
  const dim3 grid(static_cast<unsigned>((count + kThreads - 1) / kThreads));
  dispatch_element("cast", dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    launch_early("cast rounding", round_kernel<T>, grid, kThreads, 0, stream, from,
                 static_cast<T*>(to), count);
  });
  return to;
}

void cast_mix(const CastShape& shape, const AttentionCall& call, const CastForward& pass,
              cudaStream_t stream) {
  dispatch_element(call.op, call.inputs.q.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    MixArgs<T> args{shape,
                    pass.slots,
                    {},
                    tensor4<const T>(call.inputs.q),
                    tensor4<T>(pass.out),
                    static_cast<const T*>(pass.surrogates),
                    static_cast<const T*>(pass.summaries),
                    static_cast<const T*>(pass.inner),
                    pass.saved.summary_lse,
                    pass.saved.combine_lse};
    if constexpr (sizeof(T) == 2) {
      if (on_hopper() && mix_suits_sm90a(args)) return mix_sm90a(args, stream);
    }
    dispatch_head_dim(call.op, call.Dk, [&](auto width) {
      constexpr int kDim = decltype(width)::value;
      using Mix = MixTile<T, kDim, false>;
      args.tiles = token_tiles(shape, Mix::kRows);
      if (args.tiles.slots == 0) return;
      launch_early("cast mix", mix_kernel<T, kDim>,
                   dim3(static_cast<unsigned>(args.tiles.slots), static_cast<unsigned>(shape.H)),
                   Mix::kThreads, Mix::kBytes, stream, args);
    });
  });
  zero_padding(pass.out, call.inputs.q_sequences, call.num_items(), stream);
  if (pass.saved.combine_lse)
    fill_padding(pass.saved.combine_lse, call.B, call.H, call.N, call.inputs.q_sequences,
                 call.num_items(), -INFINITY, stream);
}

}  // namespace coterie::cuda
