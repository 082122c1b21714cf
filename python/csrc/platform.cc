// SPDX-License-Identifier: MIT
#include "platform.h"

#include <dlfcn.h>
#include <torch/csrc/stable/ops.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <string>

#include "coterie/runtime.h"

namespace coterie::stable_api {
namespace {

std::atomic<bool> is_fast = false;

// torch's C functions, looked up at run time, so the same library also loads with a torch without
// CUDA. The dispatcher's C function cannot return tensors and numbers together.
using Forward = AOTITorchError(AtenTensorHandle q, AtenTensorHandle k, AtenTensorHandle v,
                               AtenTensorHandle* attn_bias, std::int32_t compute_log_sumexp,
                               double dropout_p, std::int32_t is_causal,
                               std::int32_t return_debug_mask, double* scale, AtenTensorHandle* out,
                               AtenTensorHandle* lse, AtenTensorHandle* cum_seq_q,
                               AtenTensorHandle* cum_seq_k, std::int64_t* max_q,
                               std::int64_t* max_k, AtenTensorHandle* philox_seed,
                               AtenTensorHandle* philox_offset, AtenTensorHandle* debug_mask);
using Backward = AOTITorchError(AtenTensorHandle grad_out, AtenTensorHandle q, AtenTensorHandle k,
                                AtenTensorHandle v, AtenTensorHandle out, AtenTensorHandle lse,
                                AtenTensorHandle philox_seed, AtenTensorHandle philox_offset,
                                AtenTensorHandle attn_bias, AtenTensorHandle cum_seq_q,
                                AtenTensorHandle cum_seq_k, std::int64_t max_q, std::int64_t max_k,
                                double dropout_p, std::int32_t is_causal, double* scale,
                                AtenTensorHandle* dq, AtenTensorHandle* dk, AtenTensorHandle* dv);

struct Functions {
  Forward* forward = nullptr;
  Backward* backward = nullptr;
};

// Null where cuDNN cannot be used: on other GPUs than Hopper, or with a torch without it.
const Functions& functions() {
  static const Functions found = [] {
    Functions functions;
    const std::vector<CudaDevice> devices = cuda_devices();
    bool hopper = !devices.empty();
    for (const CudaDevice& device : devices) hopper = hopper && device.major == 9;
    void* library = hopper && dlopen("libcudnn.so.9", RTLD_LAZY | RTLD_NOLOAD)
                        ? dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD)
                        : nullptr;
    if (!library) return functions;
    const std::string name = "aoti_torch_cuda__scaled_dot_product_cudnn_attention";
    functions.forward = reinterpret_cast<Forward*>(dlsym(library, name.c_str()));
    functions.backward = reinterpret_cast<Backward*>(dlsym(library, (name + "_backward").c_str()));
    return functions.forward && functions.backward ? functions : Functions{};
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
         is_aligned(v) && functions().forward;
}

PlatformPass platform_forward(const PlatformCall& call) {
  double scale = call.scale;
  std::array<AtenTensorHandle, 7> made{};
  std::int64_t max_q = 0, max_k = 0;
  TORCH_ERROR_CODE_CHECK(functions().forward(
      call.q.get(), call.k.get(), call.v.get(), /*attn_bias=*/nullptr, /*compute_log_sumexp=*/1,
      /*dropout_p=*/0.0, call.causal, /*return_debug_mask=*/0, scale == 0.0 ? nullptr : &scale,
      &made[0], &made[1], &made[2], &made[3], &max_q, &max_k, &made[4], &made[5], &made[6]));
  std::vector<Tensor> owned(made.begin(), made.end());
  const Tensor& out = owned[0];
  const std::array<std::int64_t, 3> sizes{out.size(0), out.size(1), out.size(2)};
  return {in_order(out, call.q), torch::stable::reshape(owned[1], {sizes.data(), sizes.size()})};
}

std::vector<Tensor> platform_backward(const PlatformCall& call, const PlatformPass& pass,
                                      const Tensor& grad_out) {
  const Tensor none = undefined();
  const Tensor unused = empty(DType::i64, {}, call.q);  // a seed of dropout
  const Tensor lse = torch::stable::unsqueeze(pass.lse, 3);
  const std::int64_t tokens = call.q.size(2);
  double scale = call.scale;
  std::array<AtenTensorHandle, 3> made{};
  TORCH_ERROR_CODE_CHECK(functions().backward(
      grad_out.get(), call.q.get(), call.k.get(), call.v.get(), pass.out.get(), lse.get(),
      unused.get(), unused.get(), /*attn_bias=*/none.get(), /*cum_seq_q=*/none.get(),
      /*cum_seq_k=*/none.get(), tokens, tokens, /*dropout_p=*/0.0, call.causal,
      scale == 0.0 ? nullptr : &scale, &made[0], &made[1], &made[2]));
  return {in_order(Tensor(made[0]), call.q), in_order(Tensor(made[1]), call.k),
          in_order(Tensor(made[2]), call.v)};
}

}  // namespace coterie::stable_api
