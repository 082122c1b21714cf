// SPDX-License-Identifier: MIT
// Problems of the shared cases as torch tensors on the same memory.
#pragma once

#include <ATen/ATen.h>

#include <string>
#include <vector>

#include "cases/problem.h"
#include "coterie/spec.h"
#include "coterie/torch/functional.h"
#include "torch/src/bridge.h"

namespace coterie::torch_api {

// A tensor on the memory of a view; undefined if the view is absent.
inline at::Tensor tensor_on(const TensorView& view) {
  if (!view.present()) return {};
  return at::from_blob(view.data, at::IntArrayRef(view.sizes, view.rank),
                       at::IntArrayRef(view.strides, view.rank),
                       at::TensorOptions(scalar_type_of(view.dtype)));
}

struct TorchProblem {
  at::Tensor q, k, v, grad_out;
  Mechanism mechanism;
  AttentionOptions options;

  explicit TorchProblem(const cases::Problem& problem)
      : q(tensor_on(problem.inputs.q)),
        k(tensor_on(problem.inputs.k)),
        v(tensor_on(problem.inputs.v)),
        grad_out(tensor_on(problem.grad_out)),
        mechanism(problem.mechanism) {
    const AttentionInputs& inputs = problem.inputs;
    options.q_lengths = tensor_on(inputs.q_sequences.lengths);
    options.k_lengths = tensor_on(inputs.k_sequences.lengths);
    options.cu_seqlens_q = tensor_on(inputs.q_sequences.cu_seqlens);
    options.cu_seqlens_k = tensor_on(inputs.k_sequences.cu_seqlens);
    options.mask = tensor_on(inputs.mask);
    if (options.mask.defined()) options.mask = options.mask.to(at::kBool);
    options.centroids = tensor_on(inputs.centroids);
    options.gate = tensor_on(inputs.gate);
    options.logit_scale = tensor_on(inputs.logit_scale);
    options.scale = inputs.scale;
    options.causal = inputs.causal;
    options.seed = inputs.seed;
    options.dropout = inputs.dropout;
    options.dropout_seed = inputs.dropout_seed;
    options.part = inputs.part;
  }

  // Inputs that have gradients.
  std::vector<at::Tensor> differentiable() const {
    std::vector<at::Tensor> all = {q, k, v, options.gate, options.logit_scale};
    if (std::holds_alternative<CastParams>(mechanism)) all.push_back(options.centroids);
    std::vector<at::Tensor> present;
    for (const at::Tensor& tensor : all) {
      if (tensor.defined()) present.push_back(tensor);
    }
    return present;
  }

  void require_gradients() const {
    for (at::Tensor tensor : differentiable()) tensor.requires_grad_();
  }

  at::Tensor attend() const { return attention(q, k, v, mechanism, options); }
};

inline Mechanism mechanism_of(const std::string& spec) {
  return AttentionSpec::parse(spec).groups.at(0).mechanism;
}

}  // namespace coterie::torch_api
