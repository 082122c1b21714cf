// SPDX-License-Identifier: MIT
// One autograd function for all mechanisms: the core's forward and backward pass. The tensors that
// the core saves between them are torch tensors.
#include "coterie/torch/functional.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/tensor.h>
#include <c10/core/DeviceGuard.h>
#include <torch/csrc/autograd/custom_function.h>

#include <cstdint>
#include <optional>
#include <utility>

#include "bridge.h"
#include "coterie/attention.h"
#include "coterie/error.h"
#include "coterie/input_list.h"
#include "coterie/layer.h"
#include "coterie/quality.h"

namespace coterie::torch_api {
namespace {

using ::torch::autograd::AutogradContext;
using ::torch::autograd::variable_list;
using Optional = std::optional<at::Tensor>;  // autograd accepts no undefined tensors

// A call without the tensors that gradients flow to. A CustomClassHolder: autograd stores it.
struct Call : ::torch::CustomClassHolder {
  Mechanism mechanism;
  double scale = 0.0;
  bool causal = false;
  std::uint64_t seed = 0;
  double dropout = 0.0;
  std::uint64_t dropout_seed = 0;
  CallPart part;
  variable_list selection;  // given, or empty
  variable_list constants;  // from index kDifferentiable on; empty once saved
};
using CallPointer = c10::intrusive_ptr<Call>;

constexpr auto kView = [](const at::Tensor& tensor) { return view(tensor); };

// The tensors are in the order of coterie/input_list.h.
AttentionInputs make_inputs(const Call& call, const variable_list& tensors) {
  AttentionInputs inputs = listed_inputs(tensors, kView);
  inputs.scale = call.scale;
  inputs.causal = call.causal;
  inputs.seed = call.seed;
  inputs.dropout = call.dropout;
  inputs.dropout_seed = call.dropout_seed;
  inputs.part = call.part;
  inputs.delta_from_output = true;  // as torch's own attention
  return inputs;
}

// The requested gradients, and views of them for the core.
struct Gradients {
  variable_list tensors = variable_list(kDifferentiable);
  AttentionGradients views;

  Gradients(const AutogradContext& ctx, const variable_list& inputs) {
    std::size_t edge = 0;  // autograd numbers the defined inputs only
    for (std::size_t place = 0; place < kDifferentiable; ++place) {
      if (!inputs[place].defined()) continue;
      if (ctx.needs_input_grad(edge++)) tensors[place] = empty_like(inputs[place]);
    }
    views = listed_gradients(tensors, kView);
  }

 private:
  // Gradients of rows have the rows' memory order; the others are dense.
  static at::Tensor empty_like(const at::Tensor& input) {
    if (input.dim() == 4) return empty_rows(input, input.size(3));
    return empty({"", dtype_of(input.scalar_type()), input.sizes().vec()}, input);
  }
};

AttentionResult make_result(const at::Tensor& out, const at::Tensor* saved, std::size_t count) {
  AttentionResult result;
  result.out = view(out);
  for (std::size_t i = 0; i < count; ++i) result.saved.push_back(view(saved[i]));
  return result;
}

void check_selection(const Call& call, const SavedLayout& layout, const at::Tensor& q) {
  const auto refuse = [&](const std::string& message) {
    throw Error(std::string("[") + mechanism_name(call.mechanism) + "] selection: " + message);
  };
  if (call.selection.size() != layout.selection_count) {
    refuse("expected " + std::to_string(layout.selection_count) + " tensors; got " +
           std::to_string(call.selection.size()));
  }
  for (std::size_t i = 0; i < call.selection.size(); ++i) {
    const at::Tensor& given = call.selection[i];
    if (given.scalar_type() == at::kInt && given.sizes() == layout.tensors[i].sizes &&
        given.is_contiguous() && given.device() == q.device()) {
      continue;
    }
    refuse(std::string(layout.tensors[i].name) + " must be what attention_select returns for " +
           "these lengths; got " + describe(view(given)));
  }
}

// The output, then the saved tensors.
variable_list forward_outputs(const Call& call, const variable_list& tensors) {
  const at::Tensor& q = tensors[kQ];
  const c10::DeviceGuard guard(q.device());
  const AttentionInputs inputs = make_inputs(call, tensors);
  const SavedLayout layout = attention_saved(call.mechanism, inputs);
  variable_list outputs = {empty_rows(q, tensors[kV].size(3))};
  const bool given = !call.selection.empty();
  if (given) check_selection(call, layout, q);
  for (std::size_t i = 0; i < layout.tensors.size(); ++i) {
    const bool selected = given && i < layout.selection_count;
    outputs.push_back(selected ? call.selection[i] : empty(layout.tensors[i], q));
  }
  const Scratch scratch(attention_workspace_bytes(call.mechanism, inputs), q);
  (given ? attention_attend : attention_forward)(
      call.mechanism, inputs, make_result(outputs[0], outputs.data() + 1, layout.tensors.size()),
      scratch.workspace());
  return outputs;
}

struct AttentionFunction : ::torch::autograd::Function<AttentionFunction> {
  // Returns out, then the saved tensors.
  static variable_list forward(AutogradContext* ctx, const at::Tensor& q, const Optional& k,
                               const at::Tensor& v, const Optional& centroids, const Optional& gate,
                               const Optional& logit_scale, const CallPointer& call) {
    variable_list tensors = {q};
    for (const Optional& tensor : {k, Optional(v), centroids, gate, logit_scale}) {
      tensors.push_back(tensor.value_or(at::Tensor()));
    }
    tensors.insert(tensors.end(), call->constants.begin(), call->constants.end());
    call->constants.clear();
    const variable_list outputs = forward_outputs(*call, tensors);
    call->selection.clear();
    ctx->mark_non_differentiable(variable_list(outputs.begin() + 1, outputs.end()));
    tensors.insert(tensors.end(), outputs.begin(), outputs.end());
    ctx->save_for_backward(std::move(tensors));
    ctx->set_materialize_grads(false);
    ctx->saved_data["call"] = c10::IValue::make_capsule(call);
    return outputs;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grad_outputs) {
    constexpr std::size_t kArguments = kDifferentiable + 1;
    if (!grad_outputs[0].defined()) return variable_list(kArguments);
    if (at::GradMode::is_enabled()) {
      throw Error("[attention] double backward is not supported; set create_graph to false");
    }
    const auto call = c10::static_intrusive_pointer_cast<Call>(ctx->saved_data["call"].toCapsule());
    const variable_list tensors = ctx->get_saved_variables();
    const at::Tensor& q = tensors[kQ];
    const c10::DeviceGuard guard(q.device());
    const AttentionInputs inputs = make_inputs(*call, tensors);
    const AttentionResult result =
        make_result(tensors[kInputs], tensors.data() + kInputs + 1, tensors.size() - kInputs - 1);
    const at::Tensor grad_out = with_contiguous_rows(grad_outputs[0]);
    Gradients gradients(*ctx, tensors);
    const Scratch scratch(attention_workspace_bytes(call->mechanism, inputs), q);
    attention_backward(call->mechanism, inputs, result, view(grad_out), gradients.views,
                       scratch.workspace());
    gradients.tensors.resize(kArguments);
    return gradients.tensors;
  }
};

[[noreturn]] void refuse_call(const Mechanism& mechanism, const std::string& message) {
  throw Error(std::string("[") + mechanism_name(mechanism) + "] " + message);
}

// Checks what the core cannot see: gradients and device indices.
void check(const Mechanism& mechanism, const variable_list& tensors) {
  const at::Tensor &q = tensors[kQ], &k = tensors[kK], &centroids = tensors[kCentroids];
  if (!q.defined() || !tensors[kV].defined()) {
    refuse_call(mechanism, "expected q and v; got an undefined tensor");
  }
  if (keys_are_queries(mechanism) && k.defined() && !k.is_same(q)) {
    refuse_call(mechanism, "the keys are the queries, but k is another tensor; leave k undefined");
  }
  if (std::holds_alternative<RoutingParams>(mechanism) && centroids.defined() &&
      centroids.requires_grad() && at::GradMode::is_enabled()) {
    refuse_call(mechanism,
                "centroids must not require a gradient; detach them, update_centroids moves them");
  }
  for (const at::Tensor& tensor : tensors) {
    if (tensor.defined() && tensor.device() != q.device()) {
      refuse_call(mechanism, "expected all tensors on " + q.device().str() + "; got one on " +
                                 tensor.device().str());
    }
  }
}

at::Tensor as_int32(const Mechanism& mechanism, const at::Tensor& lengths) {
  if (lengths.defined() && !at::isIntegralType(lengths.scalar_type(), false)) {
    refuse_call(mechanism, std::string("expected integer lengths and cu_seqlens; got ") +
                               at::toString(lengths.scalar_type()));
  }
  return with_type(lengths, at::kInt);
}

// Broadcasts without a copy. If q or v has another rank, the core reports it.
at::Tensor as_mask(const Mechanism& mechanism, const at::Tensor& mask, const at::Tensor& q,
                   const at::Tensor& v) {
  if (!mask.defined() || q.dim() != 4 || v.dim() != 4) return mask;
  if (mask.scalar_type() != at::kBool) {
    refuse_call(mechanism,
                std::string("expected a bool mask; got ") + at::toString(mask.scalar_type()));
  }
  return mask.expand({q.size(0), q.size(1), q.size(2), v.size(2)});
}

// The tensors of a call in the form the core requires, by differentiable operations.
variable_list prepare(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                      const Mechanism& mechanism, const AttentionOptions& options) {
  check(mechanism,
        {q, k, v, options.centroids, options.gate, options.logit_scale, options.q_lengths,
         options.k_lengths, options.cu_seqlens_q, options.cu_seqlens_k, options.mask});
  const at::ScalarType wide = accumulator_of(q);
  return {with_contiguous_rows(q),
          keys_are_queries(mechanism) ? at::Tensor() : with_contiguous_rows(k),
          with_contiguous_rows(v),
          with_type(options.centroids, wide),
          with_type(options.gate, wide),
          with_type(options.logit_scale, wide),
          as_int32(mechanism, options.q_lengths),
          as_int32(mechanism, options.k_lengths),
          as_int32(mechanism, options.cu_seqlens_q),
          as_int32(mechanism, options.cu_seqlens_k),
          as_mask(mechanism, options.mask, q, v)};
}

CallPointer make_call(const Mechanism& mechanism, const AttentionOptions& options) {
  auto call = c10::make_intrusive<Call>();
  call->mechanism = mechanism;
  call->scale = options.scale;
  call->causal = options.causal;
  call->seed = options.seed;
  call->dropout = options.dropout;
  call->dropout_seed = options.dropout_seed;
  call->part = options.part;
  call->selection = options.selection;
  return call;
}

// The output, then the saved tensors.
variable_list run(const CallPointer& call, const variable_list& tensors) {
  if (!at::GradMode::is_enabled()) return forward_outputs(*call, tensors);  // cheaper
  call->constants.assign(tensors.begin() + kDifferentiable, tensors.end());
  const auto optional = [&](InputPlace place) {
    return tensors[place].defined() ? Optional(tensors[place]) : std::nullopt;
  };
  return AttentionFunction::apply(tensors[kQ], optional(kK), tensors[kV], optional(kCentroids),
                                  optional(kGate), optional(kLogitScale), call);
}

}  // namespace

at::Tensor attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                     const Mechanism& mechanism, const AttentionOptions& options) {
  const variable_list tensors = prepare(q, k, v, mechanism, options);
  return run(make_call(mechanism, options), tensors)[0];
}

std::vector<at::Tensor> attention_select(const at::Tensor& q, const at::Tensor& k,
                                         const at::Tensor& v, const Mechanism& mechanism,
                                         const AttentionOptions& options) {
  const at::NoGradGuard no_grad;
  const variable_list tensors = prepare(q, k, v, mechanism, options);
  const c10::DeviceGuard guard(q.device());
  const AttentionInputs inputs = make_inputs(*make_call(mechanism, options), tensors);
  const SavedLayout layout = attention_saved(mechanism, inputs);
  variable_list selection;
  for (std::size_t i = 0; i < layout.selection_count; ++i) {
    selection.push_back(empty(layout.tensors[i], q));
  }
  const AttentionResult result = make_result({}, selection.data(), selection.size());
  const Scratch scratch(attention_workspace_bytes(mechanism, inputs), q);
  coterie::attention_select(mechanism, inputs, result.saved, scratch.workspace());
  return selection;
}

at::Tensor attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                     std::string_view spec, const AttentionOptions& options) {
  const AttentionSpec layer = AttentionSpec::parse(spec);
  const std::size_t groups = layer.groups.size();
  refuse_positions(layer);
  if (!q.defined() || q.dim() != 4 || !v.defined() || v.dim() != 4) {
    throw Error("[attention] q and v must be tensors of shape (B, heads, rows, width)");
  }
  if (groups > 1 && !options.selection.empty()) {
    throw Error("[attention] expected a selection for one head group; the spec has " +
                std::to_string(groups));
  }
  if (!options.state.empty() && options.state.size() != groups) {
    throw Error("[attention] expected state for " + std::to_string(groups) + " head groups; got " +
                std::to_string(options.state.size()));
  }
  const std::vector<HeadSlice> slices = head_slices(layer, q.size(1), v.size(1));
  check_key_heads(slices, k.defined() && k.dim() == 4 ? k.size(1) : 0);
  const auto heads = [](const at::Tensor& all, std::int64_t first, std::int64_t count) {
    return count > 0 ? all.narrow(1, first, count) : at::Tensor();
  };
  variable_list parts;
  for (std::size_t g = 0; g < groups; ++g) {
    const HeadSlice& slice = slices[g];
    const Mechanism& mechanism = layer.groups[g].mechanism;
    AttentionOptions own = options;
    if (!options.state.empty()) {
      own.centroids = options.state[g].centroids;
      own.gate = options.state[g].gate;
      own.logit_scale = options.state[g].logit_scale;
    }
    if (groups == 1) return attention(q, k, v, mechanism, own);
    own.dropout_seed = group_seed(options.dropout_seed, 0, static_cast<std::int64_t>(g));
    const bool by_head =
        options.mask.defined() && options.mask.dim() == 4 && options.mask.size(1) > 1;
    if (by_head) own.mask = heads(options.mask, slice.first, slice.count);
    parts.push_back(attention(heads(q, slice.first, slice.count),
                              heads(k, slice.first_key, slice.key_count),
                              heads(v, slice.first_kv, slice.kv_count), mechanism, own));
  }
  return at::cat(parts, 1);
}

AttentionDetails attention_details(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                   const Mechanism& mechanism, const AttentionOptions& options) {
  const variable_list tensors = prepare(q, k, v, mechanism, options);
  const CallPointer call = make_call(mechanism, options);
  const variable_list outputs = run(call, tensors);
  const SavedLayout layout = attention_saved(mechanism, make_inputs(*call, tensors));
  AttentionDetails details;
  details.out = outputs[0];
  details.selection_count = layout.selection_count;
  for (std::size_t i = 0; i < layout.tensors.size(); ++i) {
    details.saved.push_back({layout.tensors[i].name, outputs[i + 1]});
  }
  return details;
}

at::Tensor full_attention_weights(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                  const Mechanism& mechanism, const AttentionOptions& options) {
  const variable_list tensors = prepare(q, k, v, mechanism, options);
  const std::vector<double> weights = coterie::full_attention_weights(
      mechanism, make_inputs(*make_call(mechanism, options), tensors));
  return at::tensor(weights).view({q.size(0), q.size(1), q.size(2), v.size(2)});
}

const at::Tensor& AttentionDetails::get(const std::string& name) const {
  std::string names;
  for (const NamedTensor& named : saved) {
    if (named.name == name) return named.tensor;
    names += " " + named.name;
  }
  throw Error("[attention] expected one of" + names + "; got " + name);
}

}  // namespace coterie::torch_api
