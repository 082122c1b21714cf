// SPDX-License-Identifier: MIT
// The functions of coterie/block.h on the CPU, for checked tensors.
#pragma once

#include "coterie/block.h"

namespace coterie::cpu {

void add_norm(const AddNorm& inputs, const AddNormResult& result);
void add_norm_backward(const AddNormBackward& inputs, const AddNormGradients& gradients,
                       float* partial);
void bias_gelu(const TensorView& x, const TensorView& bias, const TensorView& out);
void bias_gelu_backward(const TensorView& x, const TensorView& bias, const TensorView& grad_out,
                        const TensorView& dx, const TensorView& dbias, float* partial);
void sum_rows(const TensorView& x, const TensorView& sums, float* partial);

}  // namespace coterie::cpu
