// SPDX-License-Identifier: MIT
#include "platform.h"

#include <dlfcn.h>
#include <torch/csrc/stable/ops.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <optional>

#include "coterie/runtime.h"

namespace coterie::stable_api {
namespace {

using torch::stable::detail::from;
using torch::stable::detail::to;

std::atomic<bool> is_fast = false;

bool is_hopper_with_cudnn() {
  static const bool found = [] {
    const std::vector<CudaDevice> devices = cuda_devices();
    for (const CudaDevice& device : devices) {
      if (device.major != 9) return false;
    }
    return !devices.empty() && dlopen("libcudnn.so.9", RTLD_LAZY | RTLD_NOLOAD) != nullptr;
  }();
  return found;
}

// cuDNN reads 16 bytes at a time.
bool is_aligned(const ConstTensorView& rows) {
  bool aligned = reinterpret_cast<std::uintptr_t>(rows.data) % 16 == 0;
  for (int dim = 0; dim < 3; ++dim) aligned = aligned && rows.strides[dim] % 8 == 0;
  return aligned;
}

bool are_alike(const ConstTensorView& a, const ConstTensorView& b) {
  bool alike = a.dtype == b.dtype;
  for (int dim = 0; dim < 4; ++dim) alike = alike && a.sizes[dim] == b.sizes[dim];
  return alike;
}

StableIValue scale_of(const PlatformCall& call) {
  return from(call.scale == 0.0 ? std::optional<double>() : std::optional<double>(call.scale));
}

template <std::size_t kSize>
void run(const char* op, std::array<StableIValue, kSize>& stack) {
  TORCH_ERROR_CODE_CHECK(torch_call_dispatcher(op, "", stack.data(), TORCH_ABI_VERSION));
}

Tensor undefined() {
  AtenTensorHandle handle = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_new_uninitialized_tensor(&handle));
  return Tensor(handle);
}

// The rows with the memory order of `like`, which tracing has promised.
Tensor in_order(const Tensor& rows, const Tensor& like) {
  Tensor wanted = empty_rows(like, rows.size(3));
  for (int dim = 0; dim < 4; ++dim) {
    if (rows.size(dim) > 1 && rows.stride(dim) != wanted.stride(dim)) {
      return torch::stable::copy_(wanted, rows);
    }
  }
  return rows;
}

}  // namespace

void set_fast(bool allowed) { is_fast = allowed; }

bool fast() { return is_fast; }

bool platform_attends(const Mechanism& mechanism, const AttentionInputs& inputs) {
  const ConstTensorView &q = inputs.q, &k = inputs.k, &v = inputs.v;
  if (!std::holds_alternative<FullParams>(mechanism) || q.device.kind != Device::cuda) return false;
  if (!k.present() || q.rank != 4 || k.rank != 4 || v.rank != 4) return false;
  const bool narrow = q.dtype == DType::bf16 || q.dtype == DType::f16;
  bool whole = !inputs.mask.present() && inputs.dropout == 0;
  for (const Sequences* sequences : {&inputs.q_sequences, &inputs.k_sequences})
    whole = whole && !sequences->lengths.present() && !sequences->cu_seqlens.present();
  const std::int64_t N = q.sizes[2], D = q.sizes[3];
  return narrow && whole && are_alike(q, k) && are_alike(q, v) && N > 0 && N % 64 == 0 &&
         q.sizes[0] > 0 && D % 8 == 0 && D <= 128 && is_aligned(q) && is_aligned(k) &&
         is_aligned(v) && is_hopper_with_cudnn();
}

PlatformPass platform_forward(const PlatformCall& call) {
  std::array<StableIValue, 9> stack{from(call.q),       from(call.k), from(call.v),
                                    from(std::nullopt),  // attn_bias
                                    from(true),          // compute_log_sumexp
                                    from(0.0),           // dropout_p
                                    from(call.causal),
                                    from(false),  // return_debug_mask
                                    scale_of(call)};
  run("aten::_scaled_dot_product_cudnn_attention", stack);
  // Taken from the stack, which owns them: also those that are not wanted.
  const Tensor out = to<Tensor>(stack[0]), lse = to<Tensor>(stack[1]);
  for (const std::size_t place : {2, 3, 6, 7, 8}) to<Tensor>(stack[place]);
  const std::array<std::int64_t, 3> sizes{out.size(0), out.size(1), out.size(2)};
  return {in_order(out, call.q), torch::stable::reshape(lse, {sizes.data(), sizes.size()})};
}

std::vector<Tensor> platform_backward(const PlatformCall& call, const PlatformPass& pass,
                                      const Tensor& grad_out) {
  const Tensor none = undefined();
  const Tensor unused = empty(DType::i64, {}, call.q);  // a seed of dropout
  const std::int64_t tokens = call.q.size(2);
  std::array<StableIValue, 16> stack{from(grad_out),    from(call.q),
                                     from(call.k),      from(call.v),
                                     from(pass.out),    from(torch::stable::unsqueeze(pass.lse, 3)),
                                     from(unused),      from(unused),
                                     from(none),  // attn_bias
                                     from(none),  // cum_seq_q
                                     from(none),  // cum_seq_k
                                     from(tokens),      from(tokens),
                                     from(0.0),  // dropout_p
                                     from(call.causal), scale_of(call)};
  run("aten::_scaled_dot_product_cudnn_attention_backward", stack);
  const Tensor dq = to<Tensor>(stack[0]), dk = to<Tensor>(stack[1]), dv = to<Tensor>(stack[2]);
  return {in_order(dq, call.q), in_order(dk, call.k), in_order(dv, call.v)};
}

}  // namespace coterie::stable_api
