// SPDX-License-Identifier: MIT
// The optimiser of a config, and its state as named tensors for checkpoints.
#pragma once

#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include <memory>
#include <string>

#include "train/checkpoint.h"
#include "train/config.h"

namespace coterie::train {

// AdamW or Adafactor over the parameters of `model`. Weights decay only where decays() says so.
std::unique_ptr<::torch::optim::Optimizer> make_optimizer(const OptimizerConfig& config,
                                                          const ::torch::nn::Module& model);

// Matrices decay; biases, norms, positions, surrogate tokens and logit scales do not.
bool decays(const std::string& name, const at::Tensor& parameter);

void set_learning_rate(::torch::optim::Optimizer& optimizer, double rate);

// The norm of all gradients together; they are scaled to `limit` where it is larger (0: never).
double clip_gradients(const ::torch::nn::Module& model, double limit);

// PARAMETER.step, and PARAMETER.exp_avg and PARAMETER.exp_avg_sq (AdamW), or PARAMETER.row and
// PARAMETER.column or PARAMETER.second (Adafactor), for parameters that have taken a step. Copies.
NamedTensors optimizer_tensors(const ::torch::optim::Optimizer& optimizer,
                               const ::torch::nn::Module& model);
// Puts them back, bit by bit; throws, naming them, on tensors that are missing, shaped differently
// or of no parameter. `source` is what messages call them.
void load_optimizer(::torch::optim::Optimizer& optimizer, const ::torch::nn::Module& model,
                    const NamedTensors& tensors, const std::string& source);

}  // namespace coterie::train
