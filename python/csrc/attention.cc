// SPDX-License-Identifier: MIT
#include "attention.h"

#include <torch/csrc/stable/ops.h>

#include <algorithm>

#include "coterie/attention.h"
#include "coterie/error.h"
#include "coterie/input_list.h"
#include "coterie/quality.h"
#include "platform.h"
#include "spec.h"

namespace coterie::stable_api {
namespace {

constexpr auto kView = [](const OptionalTensor& tensor) { return view(tensor); };

// The arguments that the operators share, in the order of their schemas.
struct Call {
  std::vector<OptionalTensor> tensors;  // in the order of coterie/input_list.h
  OptionalTensor dropout_seed;          // one int64 on the CPU
  std::string mechanism_text;
  double scale;
  bool causal;
  std::uint64_t seed;
  double dropout;
  CallPart part;

  explicit Call(Arguments& arguments) {
    tensors.reserve(kInputs);
    for (std::size_t place = 0; place < kInputs; ++place) {
      const bool required = place == kQ || place == kV;
      tensors.push_back(required ? arguments.tensor() : arguments.optional_tensor());
    }
    dropout_seed = arguments.optional_tensor();
    mechanism_text = arguments.text();
    scale = arguments.number();
    causal = arguments.flag();
    seed = arguments.seed();
    dropout = arguments.number();
    part.head_part = arguments.integer();
    part.head_parts = arguments.integer();
  }

  const Tensor& q() const { return *tensors[kQ]; }
  PlatformCall platform() const {
    return {*tensors[kQ], *tensors[kK], *tensors[kV], causal, scale};
  }

  // Views that are valid as long as this object.
  AttentionInputs inputs() {
    for (std::size_t place = 0; place < kMask; ++place) {
      tensors[place] = with_contiguous_rows(tensors[place]);
    }
    AttentionInputs inputs = listed_inputs(tensors, kView);
    inputs.scale = scale;
    inputs.causal = causal;
    inputs.seed = seed;
    inputs.dropout = dropout;
    inputs.delta_from_output = true;  // as torch's own attention
    inputs.part = part;
    if (dropout != 0) inputs.dropout_seed = drawn_seed();
    return inputs;
  }

 private:
  // A tensor, because graphs of torch.compile draw it.
  std::uint64_t drawn_seed() const {
    const TensorView given = view(dropout_seed);
    if (given.device != Device::cpu || given.dtype != DType::i64 || given.count() != 1) {
      throw Error("[attention] expected dropout_seed, one int64 on the cpu; got " +
                  (given.present() ? describe(given) : std::string("none")));
    }
    return static_cast<std::uint64_t>(*static_cast<const std::int64_t*>(given.data));
  }
};

std::vector<TensorView> views(const std::vector<Tensor>& tensors) {
  std::vector<TensorView> result;
  for (const Tensor& tensor : tensors) result.push_back(view(tensor));
  return result;
}

// The first `count` tensors that the mechanism saves.
std::vector<Tensor> allocate_saved(const SavedLayout& layout, std::size_t count, const Tensor& q) {
  std::vector<Tensor> saved;
  for (std::size_t i = 0; i < count; ++i) {
    saved.push_back(empty(layout.tensors[i].dtype, layout.tensors[i].sizes, q));
  }
  return saved;
}

void check_selection(const std::vector<Tensor>& given, const std::vector<Tensor>& expected,
                     std::size_t count) {
  bool same = given.size() == count;
  for (std::size_t i = 0; same && i < count; ++i) {
    const auto sizes = given[i].sizes(), wanted = expected[i].sizes();
    same = view(given[i]).dtype == DType::i32 &&
           std::equal(sizes.begin(), sizes.end(), wanted.begin(), wanted.end());
  }
  if (same) return;
  std::string got, wanted;
  for (const Tensor& tensor : given) got += " " + describe(view(tensor));
  for (std::size_t i = 0; i < count; ++i) wanted += " " + describe(view(expected[i]));
  throw Error("[attention_attend] expected the selection" + wanted + ", as attention_select " +
              "returns it; got" + (got.empty() ? " none" : got));
}

// The gradients that `needs` requests, one bit per place in coterie/input_list.h from bit 0 on.
struct Gradients {
  std::vector<Tensor> tensors;
  AttentionGradients views;

  Gradients(const Call& call, std::int64_t needs) {
    std::vector<OptionalTensor> all(kDifferentiable);
    for (std::size_t place = 0; place < kDifferentiable; ++place) {
      if (!(needs >> place & 1)) continue;
      if (!call.tensors[place]) {
        throw Error("[attention_backward] needs has a bit of an input that is absent; got " +
                    std::to_string(needs));
      }
      all[place] = tensors.emplace_back(empty_like(*call.tensors[place]));
    }
    views = listed_gradients(all, kView);
  }

 private:
  // Gradients of rows have the rows' memory order; the others are dense.
  static Tensor empty_like(const Tensor& input) {
    if (input.dim() == 4) return empty_rows(input, input.size(3));
    const auto sizes = input.sizes();
    return empty(view(input).dtype, {sizes.begin(), sizes.end()}, input);
  }
};

}  // namespace

void attention(StableIValue* stack, std::uint64_t, std::uint64_t) {
  Arguments arguments(stack);
  Call call(arguments);
  Scratch scratch(call.q());
  const Mechanism mechanism = mechanism_of(call.mechanism_text);
  const AttentionInputs inputs = call.inputs();
  if (platform_attends(mechanism, inputs)) {
    const PlatformPass pass = platform_forward(call.platform());
    give(stack, pass.out, std::vector<Tensor>{pass.lse});
    return;
  }
  const SavedLayout layout = attention_saved(mechanism, inputs);
  const Tensor out = empty_rows(call.q(), inputs.v.size(3));
  const std::vector<Tensor> saved = allocate_saved(layout, layout.tensors.size(), call.q());
  attention_forward(mechanism, inputs, {view(out), views(saved)},
                    scratch.allocate(attention_workspace_bytes(mechanism, inputs)));
  give(stack, out, saved);
}

void attention_attend(StableIValue* stack, std::uint64_t, std::uint64_t) {
  Arguments arguments(stack);
  Call call(arguments);
  const std::vector<Tensor> selection = arguments.tensors();
  Scratch scratch(call.q());
  const Mechanism mechanism = mechanism_of(call.mechanism_text);
  const AttentionInputs inputs = call.inputs();
  const SavedLayout layout = attention_saved(mechanism, inputs);
  const Tensor out = empty_rows(call.q(), inputs.v.size(3));
  std::vector<Tensor> saved = allocate_saved(layout, layout.tensors.size(), call.q());
  check_selection(selection, saved, layout.selection_count);
  // A result of an operator must not share memory with its arguments.
  for (std::size_t i = 0; i < selection.size(); ++i) torch::stable::copy_(saved[i], selection[i]);
  coterie::attention_attend(mechanism, inputs, {view(out), views(saved)},
                            scratch.allocate(attention_workspace_bytes(mechanism, inputs)));
  give(stack, out, saved);
}

void attention_select(StableIValue* stack, std::uint64_t, std::uint64_t) {
  Arguments arguments(stack);
  Call call(arguments);
  Scratch scratch(call.q());
  const Mechanism mechanism = mechanism_of(call.mechanism_text);
  const AttentionInputs inputs = call.inputs();
  const SavedLayout layout = attention_saved(mechanism, inputs);
  const std::vector<Tensor> selection = allocate_saved(layout, layout.selection_count, call.q());
  coterie::attention_select(mechanism, inputs, views(selection),
                            scratch.allocate(attention_workspace_bytes(mechanism, inputs)));
  give(stack, selection);
}

void attention_backward(StableIValue* stack, std::uint64_t, std::uint64_t) {
  Arguments arguments(stack);
  Tensor grad_out = arguments.tensor();
  Call call(arguments);
  const Tensor out = arguments.tensor();
  const std::vector<Tensor> saved = arguments.tensors();
  const std::int64_t needs = arguments.integer();
  Scratch scratch(call.q());
  grad_out = with_contiguous_rows(grad_out);
  const Mechanism mechanism = mechanism_of(call.mechanism_text);
  const AttentionInputs inputs = call.inputs();
  if (fast() && platform_attends(mechanism, inputs)) {
    std::vector<Tensor> wanted;
    const auto found = platform_backward(call.platform(), {out, saved.at(0)}, grad_out);
    for (const std::size_t place : {kQ, kK, kV}) {
      if (needs >> place & 1) wanted.push_back(found[place]);
    }
    give(stack, wanted);
    return;
  }
  const Gradients gradients(call, needs);
  coterie::attention_backward(mechanism, inputs, {view(out), views(saved)}, view(grad_out),
                              gradients.views,
                              scratch.allocate(attention_workspace_bytes(mechanism, inputs)));
  give(stack, gradients.tensors);
}

void attention_quality(StableIValue* stack, std::uint64_t, std::uint64_t) {
  Arguments arguments(stack);
  Call call(arguments);
  const Tensor out = arguments.tensor();
  const std::vector<Tensor> saved = arguments.tensors();
  const std::int64_t rows = arguments.integer();
  const bool from_gpu = arguments.flag();
  const AttentionQuality quality = coterie::attention_quality(
      mechanism_of(call.mechanism_text), call.inputs(), {view(out), views(saved)}, rows, from_gpu);
  const std::vector<std::int64_t> sizes = {call.q().size(0), call.q().size(1), quality.rows};
  std::vector<Tensor> results;
  for (const auto* values : {&quality.error, &quality.norm, &quality.mass, &quality.bound}) {
    const bool absent = values->empty() && !quality.error.empty();
    results.push_back(empty(DType::f64, absent ? std::vector<std::int64_t>{0} : sizes, call.q()));
    std::copy(values->begin(), values->end(), static_cast<double*>(results.back().data_ptr()));
  }
  give(stack, results);
}

}  // namespace coterie::stable_api
