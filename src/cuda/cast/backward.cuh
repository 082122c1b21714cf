// SPDX-License-Identifier: MIT
// What the kernels of the backward pass of CAST's mix share (mix_backward.cu).
#pragma once

#include "cuda/cast/cast.cuh"
#include "cuda/cast/rows.cuh"

namespace coterie::cuda {

// A weight of the mix, and what makes dlogit of (dalpha - delta).
struct MixWeight {
  float value, slope;

  __device__ MixWeight(const CastShape& shape, float logit, float lse) {
    value = cast_weight(shape, logit, lse);
    slope = shape.laplace ? laplace_slope(logit) : value;
  }
};

// What 16 bytes of a row's type are to a lane; nothing beyond the row. Several are fetched before
// the first is looked at: with kAligned there is no branch between them.
template <bool kAligned, class T>
__device__ __forceinline__ uint4 fetch(const Rows<const T>& rows, int row, int column, bool there) {
  uint4 words = make_uint4(0, 0, 0, 0);
  if (there && column < rows.width) {
    if constexpr (kAligned)
      words = *reinterpret_cast<const uint4*>(rows.row(row) + column);
    else
      words = load_chunk(rows.row(row), column, rows.width);
  }
  return words;
}

template <class T>
struct MixBackwardArgs {
  CastShape shape;
  CastBackward pass;
  ItemChunks tiles;
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

// The gradient of a cluster's surrogate (`which` 0) or summary (1) by the mix, in parts that add up
// in their order: what members add, then the parts of the tokens.
struct MixParts {
  int members, chunks;  // parts of the members, of the tokens
  std::int64_t member_step, step;
  const float *of_members, *of_tokens;

  __device__ MixParts(const CastShape& shape, const CastBackward& pass, int number, int which) {
    const int heads = shape.H * shape.clusters, item = number / heads;
    members = pass.member_tiles;
    chunks = pass.chunks.count(shape.tokens.span(item).length);
    member_step = 2 * shape.D;
    step = heads * member_step;
    of_members = pass.member_parts + number * member_step * members + which * shape.D;
    of_tokens = pass.partials + pass.chunks.first_slot(shape.tokens, item) * step +
                number % heads * member_step + which * shape.D;
  }
  __device__ float sum(int column) const {
    float value = 0.0f;
#pragma unroll 4
    for (int i = 0; i < members; ++i) value += of_members[i * member_step + column];
#pragma unroll 8
    for (int i = 0; i < chunks; ++i) value += of_tokens[i * step + column];
    return value;
  }
};

// For thread blocks of `rows` tokens.
template <class T>
MixBackwardArgs<T> mix_args(const CastShape& shape, const AttentionCall& call,
                            const CastBackward& pass, int rows) {
  MixBackwardArgs<T> args{};
  args.shape = shape;
  args.pass = pass;
  args.tiles = token_tiles(shape, rows);
  args.q = tensor4<const T>(call.inputs.q);
  args.grad_out = tensor4<const T>(pass.grad_out);
  if (pass.gradients.dq.present()) args.dq = tensor4<T>(pass.gradients.dq);
  args.surrogates = static_cast<const T*>(pass.surrogates);
  args.summaries = static_cast<const T*>(pass.summaries);
  return args;
}

// For 16-bit types. mix_backward_sm90a.cu
template <class T>
void cast_tokens_sm90a(const MixBackwardArgs<T>& args, cudaStream_t stream);
// cluster_backward_sm90a.cu
template <class T>
void cast_clusters_sm90a(const MixBackwardArgs<T>& args, cudaStream_t stream);

}  // namespace coterie::cuda
