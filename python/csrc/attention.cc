// SPDX-License-Identifier: MIT
#include "attention.h"

#include <algorithm>

#include "coterie/attention.h"
#include "coterie/error.h"
#include "coterie/quality.h"
#include "spec.h"

namespace coterie::stable_api {
namespace {

// The arguments that all three operators take, in the order of their schemas.
struct Call {
  Tensor q;
  OptionalTensor k;
  Tensor v;
  OptionalTensor centroids, gate, logit_scale;
  OptionalTensor q_lengths, k_lengths, cu_seqlens_q, cu_seqlens_k, mask;
  std::string mechanism_text;
  double scale;
  bool causal;
  std::uint64_t seed;

  explicit Call(Arguments& arguments)  // in the order of the members
      : q(arguments.tensor()),
        k(arguments.optional_tensor()),
        v(arguments.tensor()),
        centroids(arguments.optional_tensor()),
        gate(arguments.optional_tensor()),
        logit_scale(arguments.optional_tensor()),
        q_lengths(arguments.optional_tensor()),
        k_lengths(arguments.optional_tensor()),
        cu_seqlens_q(arguments.optional_tensor()),
        cu_seqlens_k(arguments.optional_tensor()),
        mask(arguments.optional_tensor()),
        mechanism_text(arguments.text()),
        scale(arguments.number()),
        causal(arguments.flag()),
        seed(arguments.seed()) {}

  // Views that are valid as long as this object.
  AttentionInputs inputs() {
    q = with_contiguous_rows(q);
    k = with_contiguous_rows(k);
    v = with_contiguous_rows(v);
    for (OptionalTensor* ints : {&q_lengths, &k_lengths, &cu_seqlens_q, &cu_seqlens_k}) {
      *ints = with_contiguous_rows(*ints);
    }
    AttentionInputs inputs;
    inputs.q = view(q);
    inputs.k = view(k);
    inputs.v = view(v);
    inputs.q_sequences = {view(q_lengths), view(cu_seqlens_q)};
    inputs.k_sequences = {view(k_lengths), view(cu_seqlens_k)};
    inputs.mask = view(mask);
    inputs.centroids = view(centroids);
    inputs.gate = view(gate);
    inputs.logit_scale = view(logit_scale);
    inputs.scale = scale;
    inputs.causal = causal;
    inputs.seed = seed;
    return inputs;
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

// The gradients that `needs` requests: q, k, v, centroids, gate, logit_scale from bit 0 on.
struct Gradients {
  std::vector<Tensor> tensors;
  AttentionGradients views;

  Gradients(const Call& call, std::int64_t needs) {
    const auto add = [&](int bit, TensorView& place, const OptionalTensor& input) {
      if (!(needs >> bit & 1)) return;
      if (!input) {
        throw Error("[attention_backward] needs has a bit of an input that is absent; got " +
                    std::to_string(needs));
      }
      tensors.push_back(empty_like(*input));
      place = view(tensors.back());
    };
    add(0, views.dq, call.q);
    add(1, views.dk, call.k);
    add(2, views.dv, call.v);
    add(3, views.dcentroids, call.centroids);
    add(4, views.dgate, call.gate);
    add(5, views.dlogit_scale, call.logit_scale);
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
  Scratch scratch(call.q);
  const Mechanism mechanism = mechanism_of(call.mechanism_text);
  const AttentionInputs inputs = call.inputs();
  const SavedLayout layout = attention_saved(mechanism, inputs);
  const Tensor out = empty_rows(call.q, inputs.v.size(3));
  const std::vector<Tensor> saved = allocate_saved(layout, layout.tensors.size(), call.q);
  attention_forward(mechanism, inputs, {view(out), views(saved)},
                    scratch.allocate(attention_workspace_bytes(mechanism, inputs)));
  give(stack, out, saved);
}

void attention_select(StableIValue* stack, std::uint64_t, std::uint64_t) {
  Arguments arguments(stack);
  Call call(arguments);
  Scratch scratch(call.q);
  const Mechanism mechanism = mechanism_of(call.mechanism_text);
  const AttentionInputs inputs = call.inputs();
  const SavedLayout layout = attention_saved(mechanism, inputs);
  const std::vector<Tensor> selection = allocate_saved(layout, layout.selection_count, call.q);
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
  Scratch scratch(call.q);
  grad_out = with_contiguous_rows(grad_out);
  const Mechanism mechanism = mechanism_of(call.mechanism_text);
  const AttentionInputs inputs = call.inputs();
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
  std::vector<Tensor> results;
  for (const auto* values : {&quality.error, &quality.norm, &quality.mass, &quality.bound}) {
    const Tensor all = empty(DType::f64, {call.q.size(0), call.q.size(1), quality.rows}, call.q);
    results.push_back(values->empty() ? empty(DType::f64, {0}, call.q) : all);
    std::copy(values->begin(), values->end(), static_cast<double*>(results.back().data_ptr()));
  }
  give(stack, results);
}

}  // namespace coterie::stable_api
