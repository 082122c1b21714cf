// SPDX-License-Identifier: MIT
#include "platform.h"

#include <ATen/Context.h>
#include <ATen/ops/_scaled_dot_product_cudnn_attention.h>
#include <ATen/ops/_scaled_dot_product_cudnn_attention_backward.h>

#include <atomic>
#include <optional>
#include <string>

#include "coterie/runtime.h"
#include "coterie/torch/fast.h"

namespace coterie::torch_api {
namespace {

std::atomic<bool> is_fast = false;

bool is_hopper_with_cudnn() {
  static const bool found = [] {
    if (!at::hasCUDA() || !at::globalContext().hasCuDNN()) return false;
    const std::vector<CudaDevice> devices = cuda_devices();
    for (const CudaDevice& device : devices) {
      if (device.major != 9) return false;
    }
    return !devices.empty();
  }();
  return found;
}

std::optional<double> given(double scale) {
  return scale == 0.0 ? std::nullopt : std::optional(scale);
}

}  // namespace

void set_fast(bool allowed) { is_fast = allowed; }

bool fast() { return is_fast; }

bool platform_attends(const Mechanism& mechanism, const HeadRows& rows,
                      const AttentionOptions& options) {
  if (!std::holds_alternative<FullParams>(mechanism) || !rows.q.is_cuda()) return false;
  const at::ScalarType type = rows.q.scalar_type();
  const bool narrow = type == at::kBFloat16 || type == at::kHalf;
  const bool whole =
      !options.q_lengths.defined() && !options.mask.defined() && options.dropout == 0;
  const bool heads = rows.k.defined() && rows.k.size(1) == rows.q.size(1);
  return narrow && whole && heads && rows.q.size(3) % 8 == 0 && rows.q.size(3) <= 128 &&
         is_hopper_with_cudnn();
}

PlatformPass platform_forward(const HeadRows& rows, bool causal, double scale) {
  const auto found = at::_scaled_dot_product_cudnn_attention(
      rows.q, rows.k, rows.v, std::nullopt, /*compute_log_sumexp=*/true, /*dropout_p=*/0.0, causal,
      /*return_debug_mask=*/false, given(scale));
  const auto sizes = rows.q.sizes().slice(0, 3);
  return {std::get<0>(found), std::get<1>(found).reshape(sizes), std::get<6>(found),
          std::get<7>(found)};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> platform_backward(const at::Tensor& grad_out,
                                                                 const HeadRows& rows,
                                                                 const PlatformPass& pass,
                                                                 bool causal, double scale) {
  const at::Tensor none;
  return at::_scaled_dot_product_cudnn_attention_backward(
      grad_out, rows.q, rows.k, rows.v, pass.out, pass.lse.unsqueeze(-1), pass.philox_seed,
      pass.philox_offset, none, none, none, rows.q.size(2), rows.k.size(2), /*dropout_p=*/0.0,
      causal, given(scale));
}

}  // namespace coterie::torch_api
