// SPDX-License-Identifier: MIT
// What the kernels of CAST's backward pass share. With dalpha_ic = g_i . summary_c, for softmax
//   dlogit_ic = alpha_ic (dalpha_ic - delta_i), delta_i = sum_c alpha_ic dalpha_ic,
// for laplace dlogit_ic = laplace'(logit_ic) dalpha_ic. In its own clusters a token has
// g_i . inner_slot in the place of dalpha; `excess` is what that adds to dlogit. The mix takes all
// tokens as if they were in no cluster, up to delta.
#pragma once

#include "cuda/cast/cast.cuh"
#include "cuda/cast/rows.cuh"

namespace coterie::cuda {

// The gradient of a cluster's surrogate (`which` 0) or summary (1) by the mix, in parts that add up
// in their order: what members add, then the parts of the tokens. These are (chunks, H, C, 2, D)
// with warpgroups, else (2, items, H, runs, C, D).
struct MixParts {
  int members, chunks;  // parts of the members, of the tokens
  std::int64_t member_step, step;
  const float *of_members, *of_tokens;

  __device__ MixParts(const CastShape& shape, const CastBackward& pass, int number, int which) {
    const CastPlan& plan = pass.plan;
    const int heads = shape.H * shape.clusters, item = number / heads;
    const int length = shape.tokens.span(item).length;
    members = plan.member_tiles;
    member_step = 2 * shape.D;
    of_members = pass.member_parts + number * member_step * members + which * shape.D;
    if (plan.warpgroups) {
      chunks = plan.chunks.count(length);
      step = heads * member_step;
      of_tokens = pass.partials + plan.chunks.first_slot(shape.tokens, item) * step +
                  number % heads * member_step + which * shape.D;
      return;
    }
    const int row = number / shape.clusters * plan.mix_runs * shape.clusters +
                    number % shape.clusters;  // of the first run
    chunks = (length + plan.mix_chunk - 1) / plan.mix_chunk;
    step = static_cast<std::int64_t>(shape.clusters) * shape.D;
    of_tokens = pass.partials + row * static_cast<std::int64_t>(shape.D) +
                which * step * shape.items * shape.H * plan.mix_runs;
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

}  // namespace coterie::cuda
