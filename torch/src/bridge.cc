// SPDX-License-Identifier: MIT
#include "bridge.h"

#include <ATen/ops/empty.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <string>

#include "coterie/error.h"

namespace coterie::torch_api {
namespace {

struct TypePair {
  at::ScalarType torch;
  DType core;
};
// bool comes last: the core has no bool type, and u8 must map back to kByte.
constexpr TypePair kTypes[] = {
    {at::kFloat, DType::f32},  {at::kDouble, DType::f64}, {at::kBFloat16, DType::bf16},
    {at::kHalf, DType::f16},   {at::kInt, DType::i32},    {at::kLong, DType::i64},
    {at::kUInt64, DType::u64}, {at::kByte, DType::u8},    {at::kBool, DType::u8}};

Device core_device(const at::Tensor& tensor) {
  if (tensor.is_cpu()) return Device::cpu;
  if (tensor.is_cuda()) return {Device::cuda, tensor.device().index()};
  throw Error("[torch] expected tensors on cpu or cuda; got one on " + tensor.device().str());
}

// Uses the guard that torch registers for the device, so no CUDA header is needed.
void* current_stream(const at::Device& device) {
  if (!device.is_cuda()) return nullptr;
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device).native_handle();
}

}  // namespace

DType dtype_of(at::ScalarType type) {
  for (const TypePair& pair : kTypes) {
    if (pair.torch == type) return pair.core;
  }
  throw Error(std::string("[torch] expected float, double, bfloat16, half, int32, int64, uint64, "
                          "uint8 or bool; got ") +
              c10::toString(type));
}

at::ScalarType scalar_type_of(DType dtype) {
  for (const TypePair& pair : kTypes) {
    if (pair.core == dtype) return pair.torch;
  }
  throw Error("[internal] torch has no type for a dtype of the core");
}

at::ScalarType accumulator_of(const at::Tensor& x) {
  return scalar_type_of(accumulator_dtype(dtype_of(x.scalar_type())));
}

TensorView view(const at::Tensor& tensor) {
  TensorView view;
  if (!tensor.defined()) return view;
  if (tensor.layout() != at::kStrided || tensor.dim() < 1 || tensor.dim() > kMaxRank) {
    throw Error("[torch] expected dense tensors with 1 to " + std::to_string(kMaxRank) +
                " dimensions; got one with " + std::to_string(tensor.dim()));
  }
  if (tensor.is_neg() || tensor._is_zerotensor()) {
    throw Error("[torch] expected tensors whose memory holds their values; got " +
                std::string(tensor.is_neg() ? "a lazily negated view: call resolve_neg()"
                                            : "a lazy zero tensor: call clone()"));
  }
  view.data = tensor.data_ptr();
  view.dtype = dtype_of(tensor.scalar_type());
  view.device = core_device(tensor);
  view.rank = static_cast<int>(tensor.dim());
  for (int dim = 0; dim < view.rank; ++dim) {
    view.sizes[dim] = tensor.size(dim);
    view.strides[dim] = tensor.stride(dim);
  }
  return view;
}

at::Tensor with_own_values(const at::Tensor& tensor) {
  if (!tensor.defined()) return tensor;
  return tensor._is_zerotensor() ? tensor.clone() : tensor.resolve_neg();
}

at::Tensor with_contiguous_rows(const at::Tensor& tensor) {
  const at::Tensor own = with_own_values(tensor);
  const bool rows = !own.defined() || own.dim() == 0 || own.size(-1) <= 1 || own.stride(-1) == 1;
  return rows ? own : own.contiguous();
}

at::Tensor with_type(const at::Tensor& tensor, at::ScalarType type) {
  return tensor.defined() ? with_own_values(tensor).to(type).contiguous() : tensor;
}

at::Tensor empty(const TensorLayout& layout, const at::Tensor& like) {
  return at::empty(layout.sizes, like.options().dtype(scalar_type_of(layout.dtype)));
}

at::Tensor empty_rows(const at::Tensor& like, std::int64_t D) {
  const std::int64_t B = like.size(0), H = like.size(1), N = like.size(2);
  if (like.stride(1) >= like.stride(2)) return at::empty({B, H, N, D}, like.options());
  return at::empty({B, N, H, D}, like.options()).transpose(1, 2);
}

Scratch::Scratch(std::int64_t bytes, const at::Tensor& like)
    : memory_(at::empty({bytes}, like.options().dtype(at::kByte))),
      workspace_{memory_.data_ptr(), bytes, current_stream(like.device())} {}

}  // namespace coterie::torch_api
