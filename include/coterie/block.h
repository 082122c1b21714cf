// SPDX-License-Identifier: MIT
// The steps of a transformer block between its matrix products, each in one pass over its memory:
// a residual sum with the layer norm that follows it, and GELU with the bias that precedes it. On
// the CPU or a GPU. Sums have a fixed order: equal inputs give equal bits.
#pragma once

#include <cstdint>

#include "coterie/view.h"

namespace coterie {

constexpr std::int64_t kMaxNormWidth = 1024;  // E below

// y = x + branch + branch_bias and out = (y - mean) scale gain + bias by rows, with the mean and
// the scale 1 / sqrt(variance + eps) of the row of y. All tensors are contiguous. E is a multiple
// of 4, at most kMaxNormWidth.
struct AddNorm {
  ConstTensorView x;            // (R, E) f32
  ConstTensorView branch;       // (R, E) of type T: f32, bf16 or f16; or absent
  ConstTensorView branch_bias;  // (E) f32; absent without a branch or a bias
  ConstTensorView gain, bias;   // (E) f32
  double eps = 1e-5;
};
struct AddNormResult {
  TensorView y;            // (R, E) f32; absent without a branch: y is x
  TensorView out;          // (R, E) of type T
  TensorView mean, scale;  // (R) f32
};
void add_norm(const AddNorm& inputs, const AddNormResult& result, const Workspace& workspace = {});

// Gradients; all but dx may be absent.
struct AddNormGradients {
  TensorView dx;                          // (R, E) f32; also the gradient of the branch
  TensorView dbranch;                     // (R, E) of type T: dx rounded
  TensorView dbranch_bias, dgain, dbias;  // (E) f32
};
// `y` is the result's, or x without a branch; grad_y (R, E) f32 may be absent. grad_out is (R, E)
// of type T.
struct AddNormBackward {
  ConstTensorView y, mean, scale, gain, grad_y, grad_out;
};
void add_norm_backward(const AddNormBackward& inputs, const AddNormGradients& gradients,
                       const Workspace& workspace);
std::int64_t add_norm_workspace_bytes(const ConstTensorView& y);

// out = gelu(x + bias) by rows, gelu(v) = v Phi(v) with the normal distribution Phi, which is
// computed to 1e-7. x and out are (R, F) of type T, bias is (F) f32 or absent. All tensors are
// contiguous; F is a multiple of 4. out may be x.
void bias_gelu(const ConstTensorView& x, const ConstTensorView& bias, const TensorView& out,
               const Workspace& workspace = {});
// dx (R, F) of type T, and dbias (F) f32, the sum of its rows before rounding, or absent. dx may be
// grad_out.
void bias_gelu_backward(const ConstTensorView& x, const ConstTensorView& bias,
                        const ConstTensorView& grad_out, const TensorView& dx,
                        const TensorView& dbias, const Workspace& workspace);
std::int64_t bias_gelu_workspace_bytes(const ConstTensorView& x);

// sums (F) f32 of the rows of x (R, F) of type T, contiguous, F a multiple of 4: the gradient of a
// bias. The workspace is that of bias_gelu_backward.
void sum_rows(const ConstTensorView& x, const TensorView& sums, const Workspace& workspace);

}  // namespace coterie
