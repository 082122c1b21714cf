// SPDX-License-Identifier: MIT
// The optimiser of a config, and its state as named tensors for checkpoints.
#pragma once

#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include <cstdint>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "train/checkpoint.h"
#include "train/config.h"
#include "train/ranks.h"

namespace coterie::train {

// The rank that keeps the state of each parameter and steps it (ZeRO-1): the largest parameters
// first, each to the rank with the fewest elements so far.
std::vector<std::int64_t> parameter_owners(const ::torch::nn::Module& model, std::int64_t ranks);

// Names of the parameters of `model` that `rank` owns.
std::set<std::string> owned_parameters(const ::torch::nn::Module& model,
                                       const std::vector<std::int64_t>& owners, std::int64_t rank);

// AdamW or Adafactor over the parameters of `model`, with weight decay only where decays() is true;
// with `only`, over the parameters of these names.
std::unique_ptr<::torch::optim::Optimizer> make_optimizer(
    const OptimizerConfig& config, const ::torch::nn::Module& model,
    const std::set<std::string>* only = nullptr);

// Gives every rank the parameters that their owners have stepped.
void share_parameters(const ::torch::nn::Module& model, const std::vector<std::int64_t>& owners,
                      Ranks& ranks);

// Matrices decay; biases, norms, positions, surrogate tokens and logit scales do not.
bool decays(const std::string& name, const at::Tensor& parameter);

void set_learning_rate(::torch::optim::Optimizer& optimizer, double rate);

// The norm of all gradients together, 0-dimensional, on their device.
at::Tensor gradient_norm(const ::torch::nn::Module& model);
// Scales gradients of that norm to `limit` if it is larger (0: never). On a GPU the host does not
// wait for the norm.
void clip_gradients(const ::torch::nn::Module& model, const at::Tensor& norm, double limit);

// Whether steps of the optimiser change nothing if the gradients' norm is not finite.
bool skips_bad_gradients(const ::torch::optim::Optimizer& optimizer);
// One step. The norm is for optimisers that skip bad gradients.
void step_optimizer(::torch::optim::Optimizer& optimizer, const at::Tensor& norm);

// PARAMETER.step, and PARAMETER.exp_avg and PARAMETER.exp_avg_sq (AdamW), or PARAMETER.row and
// PARAMETER.column or PARAMETER.second (Adafactor), for parameters that have taken a step. Copies.
NamedTensors optimizer_tensors(const ::torch::optim::Optimizer& optimizer,
                               const ::torch::nn::Module& model);
// Restores them exactly; throws an Error with the name of a tensor that is missing, has another
// shape or belongs to no parameter. Messages call their origin `source`.
void load_optimizer(::torch::optim::Optimizer& optimizer, const ::torch::nn::Module& model,
                    const NamedTensors& tensors, const std::string& source);

// optimizer_tensors of a state that is spread over ranks, on rank 0; others get nothing. On the
// CPU. Collective.
NamedTensors gathered_optimizer_tensors(const ::torch::optim::Optimizer& optimizer,
                                        const ::torch::nn::Module& model,
                                        const std::vector<std::int64_t>& owners, Ranks& ranks);
// The tensors of these parameters only.
NamedTensors tensors_of_parameters(const NamedTensors& tensors, const ::torch::nn::Module& model,
                                   const std::set<std::string>& names);

}  // namespace coterie::train
