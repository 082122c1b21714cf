// SPDX-License-Identifier: MIT
#include "packed.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/DeviceGuard.h>
#include <torch/csrc/autograd/custom_function.h>

#include <utility>

#include "bridge.h"
#include "coterie/attention.h"
#include "coterie/block.h"
#include "coterie/error.h"
#include "coterie/input_list.h"
#include "coterie/positions.h"
#include "coterie/routing.h"
#include "coterie/torch/centroids.h"
#include "coterie/torch/fast.h"
#include "platform.h"

namespace coterie::torch_api {
namespace {

using ::torch::autograd::AutogradContext;
using ::torch::autograd::variable_list;

constexpr auto kPackedView = [](const at::Tensor& tensor) { return view(tensor); };

// A CustomClassHolder: autograd stores it. Tensors are in save_for_backward.
struct Layer : ::torch::CustomClassHolder {
  PackedHeads heads;
  bool bias = false;
  std::vector<PackedGroup> groups;    // after the forward pass without tensors
  std::vector<variable_list> labels;  // of the forward pass, for the caller
};
using LayerPointer = c10::intrusive_ptr<Layer>;

const RoutingParams* routing_of(const PackedGroup& group) {
  return std::get_if<RoutingParams>(&group.mechanism);
}

// Slices of rows (B, N, all heads, D), as (B, h, N, D).
HeadRows slices(const at::Tensor& rows, const PackedHeads& heads, const PackedGroup& group) {
  const auto slice = [&](std::int64_t first, std::int64_t count) {
    return rows.narrow(2, first, count).transpose(1, 2);
  };
  const HeadSlice& own = group.slice;
  const at::Tensor keys =
      own.key_count == 0 ? at::Tensor() : slice(heads.queries + own.first_key, own.key_count);
  return {slice(own.first, own.count), keys,
          slice(heads.queries + heads.keys + own.first_kv, own.kv_count)};
}

at::Tensor out_slice(const at::Tensor& out, const PackedGroup& group) {
  return out.narrow(2, group.slice.first, group.slice.count).transpose(1, 2);
}

// Turns queries and keys of a group in place; together, if the layer has no others.
void rotate(const at::Tensor& rows, const PackedHeads& heads, const PackedGroup& group,
            bool inverse) {
  if (!group.rotary) return;
  const HeadSlice& own = group.slice;
  std::vector<at::Tensor> parts;
  if (own.count == heads.queries && own.key_count == heads.keys) {
    parts.push_back(rows.narrow(2, 0, heads.queries + heads.keys));
  } else {
    parts.push_back(rows.narrow(2, own.first, own.count));
    if (own.key_count > 0) {
      parts.push_back(rows.narrow(2, heads.queries + own.first_key, own.key_count));
    }
  }
  for (const at::Tensor& part : parts) {
    const at::Tensor x = part.transpose(1, 2);
    rotate_rows(view(x), {0, group.rotary_base, inverse}, view(x), Scratch(0, x).workspace());
  }
}

// The tensors of a group's call in the order of coterie/input_list.h.
variable_list inputs_of(const HeadRows& rows, const PackedGroup& group) {
  const AttentionOptions& options = group.options;
  const at::ScalarType wide = accumulator_of(rows.q);
  const at::Tensor lengths = with_type(options.q_lengths, at::kInt), none;
  return {rows.q,  rows.k,
          rows.v,  with_type(options.centroids, wide),
          none,    with_type(options.logit_scale, wide),
          lengths, lengths,
          none,    none,
          none};
}

AttentionInputs make_inputs(const PackedGroup& group, const variable_list& tensors) {
  AttentionInputs inputs = listed_inputs(tensors, kPackedView);
  inputs.scale = group.options.scale;
  inputs.causal = group.options.causal;
  inputs.seed = group.options.seed;
  inputs.dropout = group.options.dropout;
  inputs.dropout_seed = group.options.dropout_seed;
  inputs.part = group.options.part;
  inputs.delta_from_output = true;  // as torch's own attention
  return inputs;
}

AttentionResult make_result(const at::Tensor& out, at::TensorList saved) {
  AttentionResult result;
  result.out = view(out);
  for (const at::Tensor& tensor : saved) result.saved.push_back(view(tensor));
  return result;
}

// What the backward pass of a group needs: inputs from kCentroids on, tensors that the core saved,
// and for routing the labels of queries and keys.
struct GroupPass {
  variable_list constants, saved, labels;
  at::Tensor commitment;
};

at::Tensor labels_of(const PackedGroup& group, const at::Tensor& x, const char* name,
                     const SavedLayout& layout, const variable_list& saved) {
  if (routing_of(group)->membership == Membership::nearest) {  // saves the labels
    for (std::size_t i = 0; i < layout.tensors.size(); ++i) {
      if (layout.tensors[i].name == std::string(name)) return saved[i];
    }
  }
  return nearest_centroids(x, group.options.centroids, group.options.q_lengths);
}

// The loss of shared queries and keys counts twice.
double commitment_weight(const RoutingParams& routing) {
  return routing.shared() ? 2 * routing.commitment : routing.commitment;
}

// Without gradients: the backward pass has its own.
void add_commitment(const PackedGroup& group, const HeadRows& rows, const SavedLayout& layout,
                    GroupPass& pass) {
  const RoutingParams& routing = *routing_of(group);
  const auto loss = [&](const at::Tensor& x, const char* name) {
    pass.labels.push_back(labels_of(group, x, name, layout, pass.saved));
    return commitment_loss(x, group.options.centroids, pass.labels.back(), group.options.q_lengths);
  };
  pass.commitment = loss(rows.q, "q_labels");
  if (!routing.shared()) pass.commitment = pass.commitment + loss(rows.k, "k_labels");
  pass.commitment = pass.commitment * commitment_weight(routing);
}

// The output of cuDNN goes to `out`, which is replaced if this is the layer's only group. The
// backward pass is the core's (delta_from_output), unless speed comes before equal bits: then there
// are no constants.
GroupPass run_platform(const PackedGroup& group, const HeadRows& rows, bool only, at::Tensor& out) {
  const PlatformPass found = platform_forward(rows, group.options.causal, group.options.scale);
  const at::Tensor found_BNHD = found.out.transpose(1, 2);
  if (only && found_BNHD.is_contiguous()) {
    out = found_BNHD;
  } else {
    out_slice(out, group).copy_(found.out);
  }
  if (fast()) return {{}, {found.lse, found.philox_seed, found.philox_offset}, {}, {}};
  const variable_list tensors = inputs_of(rows, group);
  return {{tensors.begin() + kCentroids, tensors.end()}, {found.lse}, {}, {}};
}

GroupPass run_group(const PackedGroup& group, const HeadRows& rows, const at::Tensor& out) {
  const variable_list tensors = inputs_of(rows, group);
  const AttentionInputs inputs = make_inputs(group, tensors);
  const SavedLayout layout = attention_saved(group.mechanism, inputs);
  GroupPass pass;
  for (const TensorLayout& saved : layout.tensors) pass.saved.push_back(empty(saved, rows.q));
  const Scratch scratch(attention_workspace_bytes(group.mechanism, inputs), rows.q);
  attention_forward(group.mechanism, inputs, make_result(out, pass.saved), scratch.workspace());
  pass.constants.assign(tensors.begin() + kCentroids, tensors.end());
  if (routing_of(group)) add_commitment(group, rows, layout, pass);
  return pass;
}

at::Tensor bias_gradient(const at::Tensor& drows) {
  const at::Tensor rows = drows.view({drows.size(0) * drows.size(1), -1});
  const at::Tensor sums = at::empty({rows.size(1)}, rows.options().dtype(at::kFloat));
  const Scratch scratch(bias_gelu_workspace_bytes(view(rows)), rows);
  sum_rows(view(rows), view(sums), scratch.workspace());
  return sums;
}

struct Forward {
  at::Tensor out, commitment;
  std::vector<GroupPass> passes;
};

Forward run_forward(const at::Tensor& rows, const Layer& layer) {
  const at::NoGradGuard no_grad;
  const c10::DeviceGuard guard(rows.device());
  Forward result;
  result.out =
      at::empty({rows.size(0), rows.size(1), layer.heads.queries, rows.size(3)}, rows.options());
  for (const PackedGroup& group : layer.groups) {
    const HeadRows own = slices(rows, layer.heads, group);
    rotate(rows, layer.heads, group, /*inverse=*/false);
    const bool platform = platform_attends(group.mechanism, own, group.options);
    result.passes.push_back(platform
                                ? run_platform(group, own, layer.groups.size() == 1, result.out)
                                : run_group(group, own, out_slice(result.out, group)));
    const at::Tensor& loss = result.passes.back().commitment;
    if (!loss.defined()) continue;
    result.commitment = result.commitment.defined() ? result.commitment + loss : loss;
  }
  return result;
}

std::vector<variable_list> labels_of(const Forward& found) {
  std::vector<variable_list> labels;
  for (const GroupPass& pass : found.passes) labels.push_back(pass.labels);
  return labels;
}

// Adds weight * scale * the gradient of the commitment loss of x to dx.
void add_commitment_gradient(const at::Tensor& x, const at::Tensor& labels,
                             const variable_list& constants, double weight, const at::Tensor& scale,
                             const at::Tensor& dx) {
  const at::Tensor& lengths = constants[kQLengths - kCentroids];
  commitment_loss_backward(view(x), {view(lengths), {}}, view(constants[0]), view(labels), weight,
                           view(dx), Scratch(0, x).workspace(),
                           view(with_own_values(scale).reshape({1})));
}

// Reads the saved tensors one after the other.
struct Reader {
  const variable_list& tensors;
  std::size_t next = 0;

  variable_list take(std::size_t count) {
    const auto first = tensors.begin() + static_cast<std::ptrdiff_t>(next);
    next += count;
    return {first, first + static_cast<std::ptrdiff_t>(count)};
  }
};

void run_platform_backward(const PackedGroup& group, const HeadRows& rows, const PlatformPass& pass,
                           const at::Tensor& grad_out, const HeadRows& down) {
  const auto [dq, dk, dv] =
      platform_backward(grad_out, rows, pass, group.options.causal, group.options.scale);
  down.v.copy_(dv);
  for (const auto& [from, to] : {std::pair(dq, down.q), std::pair(dk, down.k)}) {
    if (group.rotary) {
      rotate_rows(view(from), {0, group.rotary_base, /*inverse=*/true}, view(to),
                  Scratch(0, to).workspace());
    } else {
      to.copy_(from);
    }
  }
}

// Inputs are the rows, the bias, if there is one, then the logit scales of routing groups; returns
// the output and, with routing groups, the commitment.
struct PackedFunction : ::torch::autograd::Function<PackedFunction> {
  static variable_list forward(AutogradContext* ctx, at::TensorList inputs,
                               const LayerPointer& layer) {
    const at::Tensor& rows = inputs[0];
    const Forward result = run_forward(rows, *layer);
    layer->labels = labels_of(result);
    variable_list kept = {rows, result.out};
    std::vector<std::int64_t> counts;
    for (std::size_t g = 0; g < layer->groups.size(); ++g) {
      const GroupPass& pass = result.passes[g];
      for (const variable_list* part : {&pass.constants, &pass.saved, &pass.labels}) {
        counts.push_back(static_cast<std::int64_t>(part->size()));
        kept.insert(kept.end(), part->begin(), part->end());
      }
      AttentionOptions& options = layer->groups[g].options;
      for (at::Tensor* tensor :
           {&options.centroids, &options.logit_scale, &options.q_lengths, &options.k_lengths}) {
        *tensor = at::Tensor();  // kept above
      }
    }
    ctx->save_for_backward(std::move(kept));
    ctx->set_materialize_grads(false);
    ctx->saved_data["layer"] = c10::IValue::make_capsule(layer);
    ctx->saved_data["counts"] = counts;
    if (!result.commitment.defined()) return {result.out};
    return {result.out, result.commitment};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grad_outputs) {
    if (at::GradMode::is_enabled()) {
      throw Error("[attention] double backward is not supported; set create_graph to false");
    }
    const auto layer =
        c10::static_intrusive_pointer_cast<Layer>(ctx->saved_data["layer"].toCapsule());
    const std::vector<std::int64_t> counts = ctx->saved_data["counts"].toIntVector();
    const variable_list tensors = ctx->get_saved_variables();
    const at::Tensor &rows = tensors[0], &out = tensors[1];
    const c10::DeviceGuard guard(rows.device());
    const at::Tensor grad_out =
        grad_outputs[0].defined() ? with_contiguous_rows(grad_outputs[0]) : at::zeros_like(out);
    const at::Tensor drows = at::empty(rows.sizes(), rows.options());
    variable_list gradients = {drows};
    Reader reader{tensors, 2};
    for (std::size_t g = 0; g < layer->groups.size(); ++g) {
      const PackedGroup& group = layer->groups[g];
      const auto take = [&](std::size_t part) {
        return reader.take(static_cast<std::size_t>(counts[3 * g + part]));
      };
      const variable_list constants = take(0), saved = take(1), labels = take(2);
      const HeadRows own = slices(rows, layer->heads, group);
      const HeadRows down = slices(drows, layer->heads, group);
      if (constants.empty()) {
        run_platform_backward(group, own, {out_slice(out, group), saved[0], saved[1], saved[2]},
                              out_slice(grad_out, group), down);
        continue;
      }
      const at::Tensor& scale = constants[kLogitScale - kCentroids];
      const at::Tensor dscale = scale.defined() ? at::empty_like(scale) : at::Tensor();
      variable_list inputs = {own.q, own.k, own.v};
      inputs.insert(inputs.end(), constants.begin(), constants.end());
      const AttentionInputs call = make_inputs(group, inputs);
      const variable_list wanted = {down.q, down.k, down.v, {}, {}, dscale};
      const Scratch scratch(attention_workspace_bytes(group.mechanism, call), rows);
      attention_backward(group.mechanism, call, make_result(out_slice(out, group), saved),
                         view(out_slice(grad_out, group)), listed_gradients(wanted, kPackedView),
                         scratch.workspace());
      if (const RoutingParams* routing = routing_of(group)) {
        gradients.push_back(dscale);
        if (grad_outputs.size() > 1 && grad_outputs[1].defined()) {
          const double weight = commitment_weight(*routing);
          add_commitment_gradient(own.q, labels[0], constants, weight, grad_outputs[1], down.q);
          if (!routing->shared()) {
            add_commitment_gradient(own.k, labels[1], constants, weight, grad_outputs[1], down.k);
          }
        }
      }
      rotate(drows, layer->heads, group, /*inverse=*/true);
    }
    if (layer->bias) gradients.insert(gradients.begin() + 1, bias_gradient(drows));
    gradients.emplace_back();  // of the layer
    return gradients;
  }
};

}  // namespace

PackedOutput packed_attention(const at::Tensor& rows, const at::Tensor& bias,
                              const PackedHeads& heads, const std::vector<PackedGroup>& groups) {
  auto layer = c10::make_intrusive<Layer>();
  layer->heads = heads;
  layer->bias = bias.defined();
  layer->groups = groups;
  PackedOutput result;
  for (const PackedGroup& group : groups) {
    result.rows.push_back(slices(rows.detach(), heads, group));
  }
  if (!at::GradMode::is_enabled()) {
    const Forward found = run_forward(rows, *layer);
    result.out = found.out;
    result.commitment = found.commitment;
    result.labels = labels_of(found);
    return result;
  }
  variable_list inputs = {rows};
  if (bias.defined()) inputs.push_back(bias);
  for (const PackedGroup& group : groups) {
    if (routing_of(group)) inputs.push_back(group.options.logit_scale);
  }
  const variable_list found = PackedFunction::apply(at::TensorList(inputs), layer);
  result.out = found[0];
  result.labels = std::exchange(layer->labels, {});
  if (found.size() > 1) result.commitment = found[1];
  return result;
}

}  // namespace coterie::torch_api
