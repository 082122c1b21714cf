// SPDX-License-Identifier: MIT
#include "block_ops.h"

#include <ATen/autocast_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>
#include <c10/core/DeviceGuard.h>
#include <torch/csrc/autograd/custom_function.h>

#include <atomic>

#include "bridge.h"
#include "coterie/block.h"

namespace coterie::torch_api {
namespace {

using ::torch::autograd::AutogradContext;
using ::torch::autograd::variable_list;
using Optional = std::optional<at::Tensor>;

std::atomic<bool> fused_on_cpu = false;

// (..., E) as contiguous rows.
at::Tensor rows_of(const at::Tensor& x) {
  if (!x.defined()) return x;
  return with_own_values(x).contiguous().view({-1, x.size(-1)});
}

Optional optional(const at::Tensor& tensor) {
  return tensor.defined() ? Optional(tensor) : std::nullopt;
}

at::Tensor empty_vector(const at::Tensor& like, std::int64_t size) {
  return at::empty({size}, like.options().dtype(at::kFloat));
}

// Inputs x, branch, branch_bias, gain, bias; returns the sum, if there is a branch, and the norm.
struct AddNormFunction : ::torch::autograd::Function<AddNormFunction> {
  static variable_list forward(AutogradContext* ctx, const at::Tensor& x, const Optional& branch,
                               const Optional& branch_bias, const at::Tensor& gain,
                               const at::Tensor& bias, double eps, at::ScalarType type) {
    const c10::DeviceGuard guard(x.device());
    const at::Tensor rows = rows_of(x), other = rows_of(branch.value_or(at::Tensor()));
    const at::Tensor y = branch ? at::empty_like(rows) : at::Tensor();
    const at::Tensor out = at::empty(rows.sizes(), x.options().dtype(type));
    const at::Tensor mean = empty_vector(x, rows.size(0)), scale = empty_vector(x, rows.size(0));
    coterie::add_norm({view(rows), view(other), view(branch_bias.value_or(at::Tensor())),
                       view(gain), view(bias), eps},
                      {view(y), view(out), view(mean), view(scale)}, Scratch(0, x).workspace());
    ctx->save_for_backward({branch ? y.view(x.sizes()) : x, mean, scale, gain});
    ctx->saved_data["branch"] = branch.has_value();
    ctx->saved_data["branch_bias"] = branch_bias.has_value();
    ctx->set_materialize_grads(false);
    if (!branch) return {out.view(x.sizes())};
    return {y.view(x.sizes()), out.view(x.sizes())};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grad_outputs) {
    const variable_list saved = ctx->get_saved_variables();
    const at::Tensor y = rows_of(saved[0]), &gain = saved[3];
    const bool branch = ctx->saved_data["branch"].toBool();
    const c10::DeviceGuard guard(y.device());
    const at::Tensor grad_y = branch ? rows_of(grad_outputs[0]) : at::Tensor();
    const at::Tensor& grad_normed = grad_outputs[branch ? 1 : 0];
    if (!grad_normed.defined()) {  // nothing used the norm
      return {grad_outputs[0], {}, {}, {}, {}, {}, {}};
    }
    const at::Tensor grad_out = rows_of(grad_normed);
    const std::int64_t E = y.size(1);
    const at::Tensor dx = at::empty_like(y);
    const at::Tensor dbranch = branch ? at::empty_like(grad_out) : at::Tensor();
    const bool with_bias = ctx->saved_data["branch_bias"].toBool();
    const at::Tensor dbranch_bias = with_bias ? empty_vector(y, E) : at::Tensor();
    const at::Tensor dgain = empty_vector(y, E), dbias = empty_vector(y, E);
    add_norm_backward(
        {view(y), view(saved[1]), view(saved[2]), view(gain), view(grad_y), view(grad_out)},
        {view(dx), view(dbranch), view(dbranch_bias), view(dgain), view(dbias)},
        Scratch(add_norm_workspace_bytes(view(y)), y).workspace());
    const auto shape = saved[0].sizes();
    // Autograd numbers the defined inputs only, but takes gradients for all arguments.
    return {dx.view(shape), branch ? dbranch.view(shape) : at::Tensor(),
            dbranch_bias,   dgain,
            dbias,          at::Tensor(),
            at::Tensor()};
  }
};

struct BiasGeluFunction : ::torch::autograd::Function<BiasGeluFunction> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& x, const Optional& bias) {
    const c10::DeviceGuard guard(x.device());
    const at::Tensor rows = rows_of(x), out = at::empty_like(rows);
    const at::Tensor shift = bias.value_or(at::Tensor());
    coterie::bias_gelu(view(rows), view(shift), view(out), Scratch(0, x).workspace());
    ctx->save_for_backward({x, shift});
    return out.view(x.sizes());
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grad_outputs) {
    const variable_list saved = ctx->get_saved_variables();
    const at::Tensor x = rows_of(saved[0]), &bias = saved[1];
    const c10::DeviceGuard guard(x.device());
    const at::Tensor grad_out = rows_of(grad_outputs[0]), dx = at::empty_like(x);
    const at::Tensor dbias = bias.defined() ? empty_vector(x, x.size(1)) : at::Tensor();
    bias_gelu_backward(view(x), view(bias), view(grad_out), view(dx), view(dbias),
                       Scratch(bias_gelu_workspace_bytes(view(x)), x).workspace());
    return {dx.view(saved[0].sizes()), dbias};
  }
};

}  // namespace

std::optional<at::ScalarType> fused_type(const at::Tensor& x) {
  const c10::DeviceType device = x.device().type();
  const bool here = x.is_cuda() || (x.is_cpu() && fused_on_cpu);
  if (!here || !at::autocast::is_autocast_enabled(device)) return std::nullopt;
  const std::int64_t E = x.size(-1);
  if (x.scalar_type() != at::kFloat || E % 4 != 0 || E > kMaxNormWidth || x.numel() == 0) {
    return std::nullopt;
  }
  const at::ScalarType type = at::autocast::get_autocast_dtype(device);
  if (type != at::kBFloat16 && type != at::kHalf) return std::nullopt;
  return type;
}

bool is_fused_type(const at::Tensor& x) {
  const bool narrow = x.scalar_type() == at::kBFloat16 || x.scalar_type() == at::kHalf;
  return narrow && (x.is_cuda() || (x.is_cpu() && fused_on_cpu));
}

void fuse_on_cpu(bool wanted) { fused_on_cpu = wanted; }

NormedSum add_norm(const ::torch::nn::LayerNorm& norm, const Residual& stream,
                   at::ScalarType type) {
  const variable_list found =
      AddNormFunction::apply(stream.x, optional(stream.branch), optional(stream.branch_bias),
                             norm->weight, norm->bias, norm->options.eps(), type);
  if (!stream.branch.defined()) return {stream.x, found[0]};
  return {found[0], found[1]};
}

at::Tensor bias_gelu(const at::Tensor& x, const at::Tensor& bias) {
  return BiasGeluFunction::apply(x, optional(bias));
}

}  // namespace coterie::torch_api
