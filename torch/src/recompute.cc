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
  // Tensors are the inputs, then the parameters.
  static variable_list forward(AutogradContext* ctx, at::TensorList tensors,
                               const HeldPointer& held) {
    const variable_list inputs(tensors.begin(), tensors.end() - held->part.parameters.size());
    const c10::Device device = inputs[0].device();
    held->autocast = Autocast::current(device.type());
    if (held->part.random) held->generator = generator_state(device);
    held->versions = versions_of(held->part.state);
    const Autocasting autocasting(held->autocast);
    const variable_list outputs = held->part.first(inputs);
    held->part.first = nullptr;  // it refers to locals of the caller
    ctx->save_for_backward(inputs);
    ctx->set_materialize_grads(false);
    ctx->saved_data["held"] = c10::IValue::make_capsule(held);
    return outputs;
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
    variable_list inputs;
    for (const at::Tensor& saved : ctx->get_saved_variables()) inputs.push_back(saved.detach());
    variable_list tensors = inputs;
    tensors.insert(tensors.end(), held->part.parameters.begin(), held->part.parameters.end());
    variable_list wanted;
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      if (!ctx->needs_input_grad(i)) continue;
      if (i < inputs.size()) tensors[i].requires_grad_();
      wanted.push_back(tensors[i]);
    }
    const variable_list found = gradients(*held, inputs, wanted, grad_outputs);
    variable_list result(tensors.size() + 1);
    std::size_t next = 0;
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      if (ctx->needs_input_grad(i)) result[i] = found[next++];
    }
    return result;
  }

 private:
  static variable_list gradients(const Held& held, const variable_list& inputs,
                                 const variable_list& wanted, const variable_list& grad_outputs) {
    const at::AutoGradMode with_graph(true);
    const Rewound rewound(inputs[0].device(), held.generator);
    variable_list outputs;
    {
      const Autocasting autocasting(held.autocast);
      outputs = held.part.again(inputs);
    }
    variable_list reached, weights;
    for (std::size_t i = 0; i < outputs.size(); ++i) {
      // Some outputs may be constants, such as the commitment without routing heads.
      if (!grad_outputs[i].defined() || !outputs[i].requires_grad()) continue;
      reached.push_back(outputs[i]);
      weights.push_back(grad_outputs[i]);
    }
    return ::torch::autograd::grad(reached, wanted, weights, /*retain_graph=*/std::nullopt,
                                   /*create_graph=*/false, /*allow_unused=*/true);
  }
};

}  // namespace

variable_list recompute(const RecomputedPart& part, const variable_list& inputs) {
  auto held = c10::make_intrusive<Held>();
  held->part = part;
  variable_list tensors = inputs;
  tensors.insert(tensors.end(), part.parameters.begin(), part.parameters.end());
  return RecomputeFunction::apply(at::TensorList(tensors), held);
}

}  // namespace coterie::torch_api
