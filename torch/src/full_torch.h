// SPDX-License-Identifier: MIT
// Full attention by torch's own kernels: on CUDA the core has none. The contract is attention()'s.
#pragma once

#include <ATen/core/Tensor.h>

#include "coterie/torch/functional.h"

namespace coterie::torch_api {

// Without packed sequences.
at::Tensor full_attention_of_torch(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                   const AttentionOptions& options);

}  // namespace coterie::torch_api
