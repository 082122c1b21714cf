// SPDX-License-Identifier: MIT
// Core views of torch tensors, memory from torch's allocator, torch's current stream.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "coterie/tensor.h"

namespace coterie::torch_api {

DType dtype_of(at::ScalarType type);  // bool is u8; throws Error on types the core lacks
at::ScalarType scalar_type_of(DType dtype);
at::ScalarType accumulator_of(const at::Tensor& x);  // the type the core accumulates in

// A view of the tensor's memory; absent if the tensor is undefined. The tensor must outlive the
// view. Throws for tensors whose values are not in memory (negated views, lazy zeros).
TensorView view(const at::Tensor& tensor);

// The tensor itself if its values are in memory, otherwise a copy.
at::Tensor with_own_values(const at::Tensor& tensor);
// The same, with a contiguous last dimension.
at::Tensor with_contiguous_rows(const at::Tensor& tensor);
// The same, contiguous and of type `type`.
at::Tensor with_type(const at::Tensor& tensor, at::ScalarType type);

// Uninitialised memory on the device of `like`.
at::Tensor empty(const TensorLayout& layout, const at::Tensor& like);
// (B, H, N, D) with the type of `like` (B, H, N, any) and its memory order of heads and tokens.
at::Tensor empty_rows(const at::Tensor& like, std::int64_t D);

// Scratch memory, and the stream that is current on the device of `like`.
class Scratch {
 public:
  Scratch(std::int64_t bytes, const at::Tensor& like);
  const Workspace& workspace() const { return workspace_; }

 private:
  at::Tensor memory_;
  Workspace workspace_;
};

}  // namespace coterie::torch_api
