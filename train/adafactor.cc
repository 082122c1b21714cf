// SPDX-License-Identifier: MIT
#include "train/adafactor.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros.h>

#include <cmath>

namespace coterie::train {
namespace {

constexpr double kEpsilon = 1e-30, kSmallest = 1e-3;

at::Tensor root_mean_square(const at::Tensor& x) { return x.square().mean().sqrt(); }

// Moves the means of the squared gradient and returns G / sqrt(their estimate).
at::Tensor scaled_gradient(const at::Tensor& gradient, AdafactorState& state) {
  const double keep = 1.0 - std::pow(static_cast<double>(state.step), -0.8);
  const at::Tensor square = gradient.square().add_(kEpsilon);
  const auto move = [keep](const at::Tensor& mean, const at::Tensor& value) {
    mean.mul_(keep).add_(value, 1.0 - keep);
  };
  if (gradient.dim() < 2) {
    move(state.second, square);
    return gradient * state.second.rsqrt();
  }
  move(state.row, square.mean(-1));
  move(state.column, square.mean(-2));
  const at::Tensor row = (state.row / state.row.mean(-1, /*keepdim=*/true)).rsqrt();
  return gradient * row.unsqueeze(-1) * state.column.rsqrt().unsqueeze(-2);
}

void update(const at::Tensor& parameter, AdafactorState& state, const AdafactorOptions& options) {
  ++state.step;
  at::Tensor change = scaled_gradient(parameter.grad(), state);
  change = change / root_mean_square(change).clamp_min(1.0);
  if (options.weight_decay != 0.0) change = change.add(parameter, options.weight_decay);
  if (options.relative) change = change * root_mean_square(parameter).clamp_min(kSmallest);
  parameter.add_(change, -options.lr);
}

}  // namespace

Adafactor::Adafactor(const std::vector<::torch::optim::OptimizerParamGroup>& groups,
                     const AdafactorOptions& defaults)
    : Optimizer(groups, std::make_unique<AdafactorOptions>(defaults)) {}

at::Tensor Adafactor::step(LossClosure closure) {
  at::Tensor loss;
  if (closure) {
    at::AutoGradMode enabled(true);
    loss = closure();
  }
  at::NoGradGuard guard;
  for (const auto& group : param_groups_) {
    const auto& options = static_cast<const AdafactorOptions&>(group.options());
    for (const at::Tensor& parameter : group.params()) {
      if (!parameter.grad().defined()) continue;
      auto& state = state_[parameter.unsafeGetTensorImpl()];
      if (state == nullptr) state = make_adafactor_state(parameter);
      update(parameter, static_cast<AdafactorState&>(*state), options);
    }
  }
  return loss;
}

std::unique_ptr<AdafactorState> make_adafactor_state(const at::Tensor& parameter) {
  auto state = std::make_unique<AdafactorState>();
  const std::vector<std::int64_t> sizes = parameter.sizes().vec();
  if (sizes.size() < 2) {
    state->second = at::zeros(sizes, parameter.options().requires_grad(false));
    return state;
  }
  std::vector<std::int64_t> row(sizes.begin(), sizes.end() - 1), column = row;
  column.back() = sizes.back();
  state->row = at::zeros(row, parameter.options().requires_grad(false));
  state->column = at::zeros(column, parameter.options().requires_grad(false));
  return state;
}

}  // namespace coterie::train
