// SPDX-License-Identifier: MIT
#include "train/optimizer.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros_like.h>
#include <torch/optim/adamw.h>

#include <utility>
#include <vector>

#include "coterie/error.h"
#include "train/adafactor.h"

namespace coterie::train {
namespace {

using ::torch::optim::AdamW;
using ::torch::optim::AdamWOptions;
using ::torch::optim::AdamWParamState;
using ::torch::optim::Optimizer;
using ::torch::optim::OptimizerParamGroup;
using ::torch::optim::OptimizerParamState;

// Two groups: parameters that decay, then the others.
template <class Options, class SetDecay>
std::vector<OptimizerParamGroup> make_groups(const ::torch::nn::Module& model,
                                             const Options& options, SetDecay set_decay) {
  std::vector<at::Tensor> decaying, others;
  for (const auto& item : model.named_parameters()) {
    (decays(item.key(), item.value()) ? decaying : others).push_back(item.value());
  }
  std::vector<OptimizerParamGroup> groups;
  groups.emplace_back(decaying, std::make_unique<Options>(options));
  auto without = std::make_unique<Options>(options);
  set_decay(*without, 0.0);
  groups.emplace_back(others, std::move(without));
  return groups;
}

// The tensors of a state by name. The step count is handled separately.
using Members = std::vector<std::pair<const char*, at::Tensor*>>;

Members members_of(AdamWParamState& state) {
  return {{"exp_avg", &state.exp_avg()}, {"exp_avg_sq", &state.exp_avg_sq()}};
}

Members members_of(AdafactorState& state) {
  if (state.second.defined()) return {{"second", &state.second}};
  return {{"row", &state.row}, {"column", &state.column}};
}

std::int64_t& step_of(AdamWParamState& state) { return state.step(); }
std::int64_t& step_of(AdafactorState& state) { return state.step; }

std::unique_ptr<OptimizerParamState> make_state(const Optimizer& optimizer,
                                                const at::Tensor& parameter) {
  if (dynamic_cast<const Adafactor*>(&optimizer) != nullptr) return make_adafactor_state(parameter);
  auto state = std::make_unique<AdamWParamState>();
  const at::NoGradGuard guard;
  state->exp_avg(at::zeros_like(parameter));
  state->exp_avg_sq(at::zeros_like(parameter));
  return state;
}

// Calls `use` with the state cast to its actual type.
template <class Use>
void with_state(const Optimizer& optimizer, OptimizerParamState& state, Use use) {
  if (dynamic_cast<const Adafactor*>(&optimizer) != nullptr) {
    use(static_cast<AdafactorState&>(state));
  } else {
    use(static_cast<AdamWParamState&>(state));
  }
}

// Takes one named tensor out of `left`, on the CPU.
at::Tensor take(NamedTensors& left, const std::string& name, const std::string& source) {
  const auto found = left.find(name);
  if (found == left.end()) throw Error("[optimizer] " + name + " is missing in " + source);
  at::Tensor tensor = found->second;
  left.erase(found);
  return tensor;
}

void copy_member(at::Tensor& member, const at::Tensor& stored, const std::string& name) {
  if (member.sizes() != stored.sizes() || member.scalar_type() != stored.scalar_type()) {
    std::ostringstream message;
    message << "[optimizer] expected " << name << " of " << member.scalar_type() << " "
            << member.sizes() << "; got " << stored.scalar_type() << " " << stored.sizes();
    throw Error(message.str());
  }
  member.copy_(stored);
}

}  // namespace

bool decays(const std::string& name, const at::Tensor& parameter) {
  if (parameter.dim() < 2 || name.ends_with("bias")) return false;
  for (const char* part : {"positions.", "relative.", "surrogates"}) {
    if (name.find(part) != std::string::npos) return false;
  }
  return true;
}

std::unique_ptr<Optimizer> make_optimizer(const OptimizerConfig& config,
                                          const ::torch::nn::Module& model) {
  if (config.name == "adafactor") {
    AdafactorOptions options;
    options.lr = config.lr;
    options.weight_decay = config.weight_decay;
    options.relative = config.relative;
    const auto set_decay = [](AdafactorOptions& o, double value) { o.weight_decay = value; };
    return std::make_unique<Adafactor>(make_groups(model, options, set_decay), options);
  }
  if (config.name != "adamw") {
    throw Error("[optimizer] expected adamw or adafactor; got \"" + config.name + "\"");
  }
  AdamWOptions options(config.lr);
  options.betas({config.beta1, config.beta2}).eps(config.eps).weight_decay(config.weight_decay);
  const auto set_decay = [](AdamWOptions& o, double value) { o.weight_decay(value); };
  return std::make_unique<AdamW>(make_groups(model, options, set_decay), options);
}

void set_learning_rate(Optimizer& optimizer, double rate) {
  for (OptimizerParamGroup& group : optimizer.param_groups()) group.options().set_lr(rate);
}

double clip_gradients(const ::torch::nn::Module& model, double limit) {
  const at::NoGradGuard guard;
  std::vector<at::Tensor> norms;
  for (const at::Tensor& parameter : model.parameters()) {
    if (parameter.grad().defined()) norms.push_back(at::linalg_vector_norm(parameter.grad()));
  }
  if (norms.empty()) return 0.0;
  const double norm = at::linalg_vector_norm(at::stack(norms)).item<double>();
  if (limit <= 0.0 || !(norm > limit)) return norm;
  for (const at::Tensor& parameter : model.parameters()) {
    if (parameter.grad().defined()) parameter.grad().mul_(limit / norm);
  }
  return norm;
}

NamedTensors optimizer_tensors(const Optimizer& optimizer, const ::torch::nn::Module& model) {
  NamedTensors tensors;
  for (const auto& item : model.named_parameters()) {
    const auto found = optimizer.state().find(item.value().unsafeGetTensorImpl());
    if (found == optimizer.state().end()) continue;
    with_state(optimizer, *found->second, [&](auto& state) {
      tensors[item.key() + ".step"] = at::scalar_tensor(step_of(state), at::kLong);
      for (const auto& [name, member] : members_of(state)) {
        tensors[item.key() + "." + name] = member->detach().clone();
      }
    });
  }
  return tensors;
}

void load_optimizer(Optimizer& optimizer, const ::torch::nn::Module& model,
                    const NamedTensors& tensors, const std::string& source) {
  const at::NoGradGuard guard;
  NamedTensors left = tensors;
  optimizer.state().clear();
  for (const auto& item : model.named_parameters()) {
    const std::string prefix = item.key() + ".";
    if (left.count(prefix + "step") == 0) continue;  // has not taken a step yet
    auto state = make_state(optimizer, item.value());
    with_state(optimizer, *state, [&](auto& typed) {
      const at::Tensor step = take(left, prefix + "step", source);
      if (step.numel() != 1)
        throw Error("[optimizer] expected " + prefix + "step to be one number");
      step_of(typed) = step.item<std::int64_t>();
      for (const auto& [name, member] : members_of(typed)) {
        copy_member(*member, take(left, prefix + name, source), prefix + name);
      }
    });
    optimizer.state()[item.value().unsafeGetTensorImpl()] = std::move(state);
  }
  if (!left.empty()) {
    throw Error("[optimizer] " + left.begin()->first + " in " + source +
                " belongs to no parameter of this optimiser");
  }
}

}  // namespace coterie::train
