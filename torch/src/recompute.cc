// SPDX-License-Identifier: MIT
#include "recompute.h"

#include <ATen/Context.h>
#include <ATen/autocast_mode.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>

#include <mutex>
#include <utility>

#include "coterie/error.h"

namespace coterie::torch_api {
namespace {

using ::torch::autograd::AutogradContext;
using ::torch::autograd::variable_list;

at::Tensor generator_state(const at::Device& device) {
  at::Generator generator = at::globalContext().defaultGenerator(device);
  const std::lock_guard<std::mutex> lock(generator.mutex());
  return generator.get_state();
}

void set_generator_state(const at::Device& device, const at::Tensor& state) {
  at::Generator generator = at::globalContext().defaultGenerator(device);
  const std::lock_guard<std::mutex> lock(generator.mutex());
  generator.set_state(state);
}

// Sets the default generator to `state` in a scope; does nothing if `state` is undefined.
class Rewound {
 public:
  Rewound(const at::Device& device, const at::Tensor& state) : device_(device) {
    if (!state.defined()) return;
    present_ = generator_state(device);
    set_generator_state(device, state);
  }
  ~Rewound() {
    if (present_.defined()) set_generator_state(device_, present_);
  }
  Rewound(const Rewound&) = delete;
  Rewound& operator=(const Rewound&) = delete;

 private:
  at::Device device_;
  at::Tensor present_;
};

struct Autocast {
  at::DeviceType device = at::kCPU;
  bool enabled = false;
  at::ScalarType dtype = at::kFloat;

  static Autocast current(at::DeviceType device) {
    return {device, at::autocast::is_autocast_enabled(device),
            at::autocast::get_autocast_dtype(device)};
  }
  void set() const {
    at::autocast::set_autocast_enabled(device, enabled);
    at::autocast::set_autocast_dtype(device, dtype);
  }
};

// Sets autocasting in a scope, with its cache disabled: a weight that was cast without a graph must
// not be reused where its gradient is needed.
class Autocasting {
 public:
  explicit Autocasting(const Autocast& wanted)
      : present_(Autocast::current(wanted.device)),
        cache_(at::autocast::is_autocast_cache_enabled()) {
    wanted.set();
    at::autocast::set_autocast_cache_enabled(false);
  }
  ~Autocasting() {
    present_.set();
    at::autocast::set_autocast_cache_enabled(cache_);
  }
  Autocasting(const Autocasting&) = delete;
  Autocasting& operator=(const Autocasting&) = delete;

 private:
  Autocast present_;
  bool cache_;
};

// A CustomClassHolder: autograd stores it.
struct Held : ::torch::CustomClassHolder {
  RecomputedPart part;
  Autocast autocast;
  at::Tensor generator;                // state before the first run, if random
  std::vector<std::int64_t> versions;  // of the part's state in the first run
};
using HeldPointer = c10::intrusive_ptr<Held>;

std::vector<std::int64_t> versions_of(const std::vector<at::Tensor>& tensors) {
  std::vector<std::int64_t> versions;
  for (const at::Tensor& tensor : tensors) versions.push_back(tensor._version());
  return versions;
}

struct RecomputeFunction : ::torch::autograd::Function<RecomputeFunction> {
  // Inputs are x, then the parameters.
  static variable_list forward(AutogradContext* ctx, at::TensorList inputs,
                               const HeldPointer& held) {
    const at::Tensor& x = inputs[0];
    held->autocast = Autocast::current(x.device().type());
    if (held->part.random) held->generator = generator_state(x.device());
    held->versions = versions_of(held->part.state);
    const Autocasting autocasting(held->autocast);
    const PassOutput output = held->part.first(x);
    held->part.first = nullptr;  // it refers to locals of the caller
    ctx->save_for_backward({x});
    ctx->set_materialize_grads(false);
    ctx->saved_data["held"] = c10::IValue::make_capsule(held);
    return {output.out, output.commitment};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grad_outputs) {
    if (at::GradMode::is_enabled()) {
      throw Error("[recompute] double backward is not supported; set create_graph to false");
    }
    const auto held = c10::static_intrusive_pointer_cast<Held>(ctx->saved_data["held"].toCapsule());
    if (versions_of(held->part.state) != held->versions) {
      throw Error(
          "[recompute] parameters or centroids changed after the forward pass; call "
          "update_centroids and the optimiser after backward");
    }
    const at::Tensor x = ctx->get_saved_variables()[0].detach();
    variable_list inputs = {x};
    inputs.insert(inputs.end(), held->part.parameters.begin(), held->part.parameters.end());
    variable_list wanted;
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      if (ctx->needs_input_grad(i)) wanted.push_back(inputs[i]);
    }
    const variable_list found =
        gradients(*held, x.requires_grad_(ctx->needs_input_grad(0)), wanted, grad_outputs);
    variable_list result(inputs.size() + 1);
    std::size_t next = 0;
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      if (ctx->needs_input_grad(i)) result[i] = found[next++];
    }
    return result;
  }

 private:
  static variable_list gradients(const Held& held, const at::Tensor& x, const variable_list& wanted,
                                 const variable_list& grad_outputs) {
    const at::AutoGradMode with_graph(true);
    const Rewound rewound(x.device(), held.generator);
    PassOutput output;
    {
      const Autocasting autocasting(held.autocast);
      output = held.part.again(x);
    }
    const at::Tensor outputs[] = {output.out, output.commitment};
    variable_list reached, weights;
    for (std::size_t i = 0; i < 2; ++i) {
      // Without routing heads the commitment is a constant.
      if (!grad_outputs[i].defined() || !outputs[i].requires_grad()) continue;
      reached.push_back(outputs[i]);
      weights.push_back(grad_outputs[i]);
    }
    return ::torch::autograd::grad(reached, wanted, weights, /*retain_graph=*/std::nullopt,
                                   /*create_graph=*/false, /*allow_unused=*/true);
  }
};

}  // namespace

PassOutput recompute(const RecomputedPart& part, const at::Tensor& x) {
  auto held = c10::make_intrusive<Held>();
  held->part = part;
  variable_list inputs = {x};
  inputs.insert(inputs.end(), part.parameters.begin(), part.parameters.end());
  const variable_list outputs = RecomputeFunction::apply(at::TensorList(inputs), held);
  return {outputs[0], outputs[1]};
}

}  // namespace coterie::torch_api
