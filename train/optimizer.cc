// SPDX-License-Identifier: MIT
#include "train/optimizer.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/_foreach_mul.h>
#include <ATen/ops/_foreach_norm.h>
#include <ATen/ops/_fused_adamw.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/full.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <torch/optim/adamw.h>

#include <algorithm>
#include <map>
#include <numeric>
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
                                             const Options& options, SetDecay set_decay,
                                             const std::set<std::string>* only) {
  std::vector<at::Tensor> decaying, others;
  for (const auto& item : model.named_parameters()) {
    if (only != nullptr && only->count(item.key()) == 0) continue;
    (decays(item.key(), item.value()) ? decaying : others).push_back(item.value());
  }
  std::vector<OptimizerParamGroup> groups;
  groups.emplace_back(decaying, std::make_unique<Options>(options));
  auto without = std::make_unique<Options>(options);
  set_decay(*without, 0.0);
  groups.emplace_back(others, std::move(without));
  return groups;
}

std::unique_ptr<AdamWParamState> make_adamw_state(const at::Tensor& parameter) {
  auto state = std::make_unique<AdamWParamState>();
  const at::NoGradGuard guard;
  state->step(0);
  state->exp_avg(at::zeros_like(parameter));
  state->exp_avg_sq(at::zeros_like(parameter));
  return state;
}

// Parameters that have made as many steps, in the lists that torch's fused kernel takes.
struct AdamWLists {
  std::vector<at::Tensor> parameters, gradients, means, squares;
};

// AdamW with torch's fused kernel: a few launches instead of ten for each parameter. Equal to
// torch's AdamW up to rounding.
class FusedAdamW : public AdamW {
 public:
  using AdamW::AdamW;

  // A step that changes nothing if `norm` is not finite.
  void step_unless_bad(const at::Tensor& norm) {
    const at::NoGradGuard guard;
    const at::Tensor bad = at::isfinite(norm).logical_not().to(at::kFloat);
    for (OptimizerParamGroup& group : param_groups_) {
      const auto& options = static_cast<const AdamWOptions&>(group.options());
      for (auto& [step, lists] : lists_of(group)) update(step, lists, options, bad);
    }
  }

 private:
  // Counts the step.
  std::map<std::int64_t, AdamWLists> lists_of(const OptimizerParamGroup& group) {
    std::map<std::int64_t, AdamWLists> by_step;
    for (const at::Tensor& parameter : group.params()) {
      if (!parameter.grad().defined()) continue;
      auto& state = state_[parameter.unsafeGetTensorImpl()];
      if (state == nullptr) state = make_adamw_state(parameter);
      auto& own = static_cast<AdamWParamState&>(*state);
      own.step(own.step() + 1);
      AdamWLists& lists = by_step[own.step()];
      lists.parameters.push_back(parameter);
      lists.gradients.push_back(parameter.grad());
      lists.means.push_back(own.exp_avg());
      lists.squares.push_back(own.exp_avg_sq());
    }
    return by_step;
  }

  static void update(std::int64_t step, const AdamWLists& lists, const AdamWOptions& options,
                     const at::Tensor& bad) {
    const at::Tensor count = at::full({}, static_cast<double>(step), bad.options());
    const std::vector<at::Tensor> counts(lists.parameters.size(), count);
    at::_fused_adamw_(lists.parameters, lists.gradients, lists.means, lists.squares, {}, counts,
                      options.lr(), std::get<0>(options.betas()), std::get<1>(options.betas()),
                      options.weight_decay(), options.eps(), /*amsgrad=*/false, /*maximize=*/false,
                      /*grad_scale=*/{}, bad);
  }
};

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
  return make_adamw_state(parameter);
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
                                          const ::torch::nn::Module& model,
                                          const std::set<std::string>* only) {
  if (config.name == "adafactor") {
    AdafactorOptions options;
    options.lr = config.lr;
    options.weight_decay = config.weight_decay;
    options.relative = config.relative;
    const auto set_decay = [](AdafactorOptions& o, double value) { o.weight_decay = value; };
    return std::make_unique<Adafactor>(make_groups(model, options, set_decay, only), options);
  }
  if (config.name != "adamw") {
    throw Error("[optimizer] expected adamw or adafactor; got \"" + config.name + "\"");
  }
  AdamWOptions options(config.lr);
  options.betas({config.beta1, config.beta2}).eps(config.eps).weight_decay(config.weight_decay);
  const auto set_decay = [](AdamWOptions& o, double value) { o.weight_decay(value); };
  const std::vector<OptimizerParamGroup> groups = make_groups(model, options, set_decay, only);
  const bool gpu = !model.parameters().empty() && model.parameters().front().is_cuda();
  if (gpu) return std::make_unique<FusedAdamW>(groups, options);
  return std::make_unique<AdamW>(groups, options);
}

void set_learning_rate(Optimizer& optimizer, double rate) {
  for (OptimizerParamGroup& group : optimizer.param_groups()) group.options().set_lr(rate);
}

namespace {

std::vector<at::Tensor> gradients_of(const ::torch::nn::Module& model) {
  std::vector<at::Tensor> gradients;
  for (const at::Tensor& parameter : model.parameters()) {
    if (parameter.grad().defined()) gradients.push_back(parameter.grad());
  }
  return gradients;
}

}  // namespace

at::Tensor gradient_norm(const ::torch::nn::Module& model) {
  const at::NoGradGuard guard;
  const std::vector<at::Tensor> gradients = gradients_of(model);
  if (gradients.empty()) return at::zeros({});
  if (!gradients.front().is_cpu()) {
    return at::linalg_vector_norm(at::stack(at::_foreach_norm(gradients)));
  }
  std::vector<at::Tensor> norms;
  for (const at::Tensor& gradient : gradients) norms.push_back(at::linalg_vector_norm(gradient));
  return at::linalg_vector_norm(at::stack(norms));
}

void clip_gradients(const ::torch::nn::Module& model, const at::Tensor& norm, double limit) {
  const at::NoGradGuard guard;
  const std::vector<at::Tensor> gradients = gradients_of(model);
  if (limit <= 0.0 || gradients.empty()) return;
  if (!norm.is_cpu()) {
    at::_foreach_mul_(gradients, norm.reciprocal().mul_(limit).clamp_max_(1.0));
    return;
  }
  const double value = norm.item<double>();
  if (!(value > limit)) return;
  for (const at::Tensor& gradient : gradients) gradient.mul_(limit / value);
}

bool skips_bad_gradients(const Optimizer& optimizer) {
  return dynamic_cast<const FusedAdamW*>(&optimizer) != nullptr;
}

void step_optimizer(Optimizer& optimizer, const at::Tensor& norm) {
  if (auto* fused = dynamic_cast<FusedAdamW*>(&optimizer)) return fused->step_unless_bad(norm);
  optimizer.step();
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

std::vector<std::int64_t> parameter_owners(const ::torch::nn::Module& model, std::int64_t ranks) {
  const std::vector<at::Tensor> parameters = model.parameters();
  std::vector<std::size_t> order(parameters.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
    return parameters[a].numel() > parameters[b].numel();
  });
  std::vector<std::int64_t> owners(parameters.size()), elements(static_cast<std::size_t>(ranks));
  for (const std::size_t index : order) {
    const auto least = std::min_element(elements.begin(), elements.end());
    owners[index] = least - elements.begin();
    *least += parameters[index].numel();
  }
  return owners;
}

std::set<std::string> owned_parameters(const ::torch::nn::Module& model,
                                       const std::vector<std::int64_t>& owners, std::int64_t rank) {
  std::set<std::string> names;
  std::size_t index = 0;
  for (const auto& item : model.named_parameters()) {
    if (owners[index++] == rank) names.insert(item.key());
  }
  return names;
}

// One broadcast per rank.
void share_parameters(const ::torch::nn::Module& model, const std::vector<std::int64_t>& owners,
                      Ranks& ranks) {
  const at::NoGradGuard guard;
  const std::vector<at::Tensor> parameters = model.parameters();
  for (std::int64_t rank = 0; rank < ranks.size(); ++rank) {
    std::vector<at::Tensor> owned, rows;
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      if (owners[i] == rank) owned.push_back(parameters[i]);
    }
    if (owned.empty()) continue;
    for (const at::Tensor& parameter : owned) rows.push_back(parameter.reshape(-1));
    const at::Tensor flat = at::cat(rows);
    ranks.broadcast(flat, rank, "parameters");
    if (rank == ranks.rank()) continue;
    std::int64_t at = 0;
    for (const at::Tensor& parameter : owned) {
      parameter.copy_(flat.narrow(0, at, parameter.numel()).view_as(parameter));
      at += parameter.numel();
    }
  }
}

NamedTensors gathered_optimizer_tensors(const Optimizer& optimizer,
                                        const ::torch::nn::Module& model,
                                        const std::vector<std::int64_t>& owners, Ranks& ranks) {
  NamedTensors all = optimizer_tensors(optimizer, model);
  std::size_t index = 0;
  for (const auto& item : model.named_parameters()) {
    const std::int64_t owner = owners[index++];
    const bool sends = owner == ranks.rank();
    if (owner == 0 || (!sends && !ranks.first())) continue;
    const std::string prefix = item.key() + ".";
    const bool has_state = all.count(prefix + "step") != 0;
    const at::Tensor step =
        sends && has_state ? all.at(prefix + "step") : at::scalar_tensor(0, at::kLong);
    ranks.to_first(step, owner, "optimiser state");
    if (step.item<std::int64_t>() == 0) continue;  // it has not taken a step yet
    if (ranks.first()) all[prefix + "step"] = step;
    const auto state = make_state(optimizer, item.value());  // for names and shapes
    with_state(optimizer, *state, [&](auto& typed) {
      for (const auto& [name, member] : members_of(typed)) {
        const at::Tensor tensor = (sends ? all.at(prefix + name) : *member).cpu().contiguous();
        ranks.to_first(tensor, owner, "optimiser state");
        if (ranks.first()) all[prefix + name] = tensor;
      }
    });
  }
  if (!ranks.first()) all.clear();
  return all;
}

NamedTensors tensors_of_parameters(const NamedTensors& tensors, const ::torch::nn::Module& model,
                                   const std::set<std::string>& names) {
  NamedTensors kept = tensors;
  for (const auto& item : model.named_parameters()) {
    if (names.count(item.key()) != 0) continue;
    std::erase_if(kept,
                  [&](const auto& named) { return named.first.starts_with(item.key() + "."); });
  }
  return kept;
}

}  // namespace coterie::train
