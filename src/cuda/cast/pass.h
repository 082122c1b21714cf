// SPDX-License-Identifier: MIT
// CAST as a pass: what its files attend_cast*.cu share.
#pragma once

#include <cuda_runtime.h>

#include <vector>

#include "coterie/result.h"
#include "cuda/cast/stages.h"
#include "cuda/lists/lists.h"

namespace coterie::cuda {

// forward.cu
CastSaved cast_saved(const CastParams& params, const std::vector<TensorView>& saved);

// With an arena that only counts these launch nothing.

// The attention inside clusters as one of lists. Where query heads of one key head have lists of
// their own, keys and values are copied for each.
struct CastInner {
  AttentionCall call;
  ListCall plan;
};
CastInner cast_inner_lists(const CastShape& shape, const AttentionCall& call, Arena& arena,
                           cudaStream_t stream);

// The slots of every token.
TokenSlots cast_token_slots(const CastShape& shape, const AttentionCall& call, Arena& arena,
                            cudaStream_t stream);

// backward.cu
void cast_backward(const CastParams& params, const AttentionCall& call,
                   const AttentionResult& result, const TensorView& grad_out,
                   const AttentionGradients& gradients, Arena& arena, cudaStream_t stream);

}  // namespace coterie::cuda
