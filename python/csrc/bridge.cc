// SPDX-License-Identifier: MIT
#include "bridge.h"

#include <dlfcn.h>
#include <torch/csrc/stable/ops.h>

#include "coterie/error.h"

namespace coterie::stable_api {
namespace {

using torch::headeronly::ScalarType;

struct TypePair {
  ScalarType torch;
  DType core;
};
// The first pair of a type counts. The core has no bool; codes (u64) have at most 63 bits, and
// torch supports few operations on uint64.
constexpr TypePair kTypes[] = {
    {ScalarType::Float, DType::f32},     {ScalarType::Double, DType::f64},
    {ScalarType::BFloat16, DType::bf16}, {ScalarType::Half, DType::f16},
    {ScalarType::Int, DType::i32},       {ScalarType::Long, DType::i64},
    {ScalarType::Long, DType::u64},      {ScalarType::Byte, DType::u8},
    {ScalarType::Bool, DType::u8}};

DType dtype_of(ScalarType type) {
  for (const TypePair& pair : kTypes) {
    if (pair.torch == type) return pair.core;
  }
  throw Error(
      std::string("[torch] expected float32, float64, bfloat16, float16, int32, int64, uint8 "
                  "or bool; got ") +
      torch::headeronly::toString(type));
}

// The number of a type in torch's C functions.
std::int32_t shim_dtype(DType dtype) {
  for (const TypePair& pair : kTypes) {
    if (pair.core != dtype) continue;
    return torch::stable::detail::to<std::int32_t>(torch::stable::detail::from(pair.torch));
  }
  throw Error("[internal] torch has no type for a dtype of the core");
}

Tensor empty_strided(DType dtype, const std::vector<std::int64_t>& sizes,
                     const std::vector<std::int64_t>& strides, const Tensor& like) {
  AtenTensorHandle handle = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(
      static_cast<std::int64_t>(sizes.size()), sizes.data(), strides.data(), shim_dtype(dtype),
      like.is_cuda() ? aoti_torch_device_type_cuda() : aoti_torch_device_type_cpu(),
      like.is_cuda() ? like.get_device_index() : 0, &handle));
  return Tensor(handle);
}

// Looked up at run time, so the same library also loads with a torch without CUDA.
void* current_cuda_stream(std::int32_t device) {
  using Getter = decltype(&aoti_torch_get_current_cuda_stream);
  static const Getter getter = [] {
    void* library = dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
    if (!library) throw Error("[torch] expected a torch with CUDA; got one without");
    return reinterpret_cast<Getter>(dlsym(library, "aoti_torch_get_current_cuda_stream"));
  }();
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(getter(device, &stream));
  return stream;
}

}  // namespace

// Uses the C functions because the conversion in torch's header leaks one string per call.
std::string Arguments::text() {
  const auto handle = take<StringHandle>();
  std::size_t length = 0;
  const char* data = nullptr;
  TORCH_ERROR_CODE_CHECK(torch_string_length(handle, &length));
  TORCH_ERROR_CODE_CHECK(torch_string_c_str(handle, &data));
  std::string text(data, length);
  TORCH_ERROR_CODE_CHECK(torch_delete_string(handle));
  return text;
}

TensorView view(const Tensor& tensor) {
  const std::int64_t rank = tensor.dim();
  if (rank < 1 || rank > kMaxRank) {
    throw Error("[torch] expected tensors with 1 to " + std::to_string(kMaxRank) +
                " dimensions; got one with " + std::to_string(rank));
  }
  TensorView view;
  view.data = tensor.data_ptr();
  view.dtype = dtype_of(tensor.scalar_type());
  if (tensor.is_cuda()) view.device = {Device::cuda, tensor.get_device_index()};
  view.rank = static_cast<int>(rank);
  const auto sizes = tensor.sizes(), strides = tensor.strides();
  for (std::size_t dim = 0; dim < static_cast<std::size_t>(rank); ++dim) {
    view.sizes[dim] = sizes[dim];
    view.strides[dim] = strides[dim];
  }
  return view;
}

TensorView view(const OptionalTensor& tensor) { return tensor ? view(*tensor) : TensorView{}; }

Tensor with_contiguous_rows(const Tensor& tensor) {
  const std::int64_t last = tensor.dim() - 1;
  const bool rows = last < 0 || tensor.size(last) <= 1 || tensor.stride(last) == 1;
  return rows ? tensor : torch::stable::contiguous(tensor);
}

OptionalTensor with_contiguous_rows(const OptionalTensor& tensor) {
  return tensor ? OptionalTensor(with_contiguous_rows(*tensor)) : std::nullopt;
}

Tensor empty(DType dtype, const std::vector<std::int64_t>& sizes, const Tensor& like) {
  std::vector<std::int64_t> strides(sizes.size());
  std::int64_t stride = 1;
  for (std::size_t dim = sizes.size(); dim-- > 0;) {
    strides[dim] = stride;
    stride *= sizes[dim] > 1 ? sizes[dim] : 1;
  }
  return empty_strided(dtype, sizes, strides, like);
}

Tensor empty_rows(const Tensor& like, std::int64_t D) {
  if (like.dim() != 4) {
    throw Error("[torch] expected rows with 4 dimensions; got " + std::to_string(like.dim()));
  }
  const std::int64_t B = like.size(0), H = like.size(1), N = like.size(2);
  const DType dtype = dtype_of(like.scalar_type());
  if (like.stride(1) >= like.stride(2)) return empty(dtype, {B, H, N, D}, like);
  return empty_strided(dtype, {B, H, N, D}, {N * H * D, D, H * D, 1}, like);
}

Scratch::Scratch(const Tensor& like) : like_(like) {
  if (!like.is_cuda()) return;
  guard_.emplace(like.get_device_index());
  workspace_.stream = current_cuda_stream(like.get_device_index());
}

const Workspace& Scratch::allocate(std::int64_t bytes) {
  memory_ = empty(DType::u8, {bytes}, like_);
  workspace_.data = memory_->data_ptr();
  workspace_.bytes = bytes;
  return workspace_;
}

}  // namespace coterie::stable_api
