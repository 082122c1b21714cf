// SPDX-License-Identifier: MIT
// Between torch's stable ABI and the core: arguments of boxed calls, tensors as views, memory and
// stream of a call.
#pragma once

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "coterie/attention.h"
#include "coterie/tensor.h"

namespace coterie::stable_api {

using Tensor = torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;

// The arguments of a boxed call in the order of its schema. All must be read before anything can
// throw, because reading takes ownership of them.
class Arguments {
 public:
  explicit Arguments(StableIValue* stack) : next_(stack) {}

  Tensor tensor() { return take<Tensor>(); }
  OptionalTensor optional_tensor() { return take<OptionalTensor>(); }
  std::vector<Tensor> tensors() { return take<std::vector<Tensor>>(); }
  std::int64_t integer() { return take<std::int64_t>(); }
  std::uint64_t seed() { return static_cast<std::uint64_t>(integer()); }
  double number() { return take<double>(); }
  bool flag() { return take<bool>(); }
  std::string text();

 private:
  template <class T>
  T take() {
    return torch::stable::detail::to<T>(*next_++);
  }
  StableIValue* next_;
};

// Puts results on the stack, in the order of the schema.
template <class... Results>
void give(StableIValue* stack, const Results&... results) {
  ((*stack++ = torch::stable::detail::from<Results>(results)), ...);
}

// The boxed form of an operator.
using Kernel = void(StableIValue* stack, std::uint64_t num_inputs, std::uint64_t num_outputs);

TensorView view(const Tensor& tensor);
TensorView view(const OptionalTensor& tensor);  // absent if the tensor is

// The tensor, or a copy with a contiguous last dimension.
Tensor with_contiguous_rows(const Tensor& tensor);
OptionalTensor with_contiguous_rows(const OptionalTensor& tensor);

// Uninitialised and dense, on the device of `like`.
Tensor empty(DType dtype, const std::vector<std::int64_t>& sizes, const Tensor& like);
// (B, H, N, D) with the type of `like` (B, H, N, any) and its memory order of heads and tokens.
Tensor empty_rows(const Tensor& like, std::int64_t D);

// Makes the device of `like` current, and provides the scratch memory and stream of one call.
class Scratch {
 public:
  explicit Scratch(const Tensor& like);
  // Call once.
  const Workspace& allocate(std::int64_t bytes);
  const Workspace& workspace() const { return workspace_; }

 private:
  Tensor like_;
  std::optional<torch::stable::accelerator::DeviceGuard> guard_;
  OptionalTensor memory_;
  Workspace workspace_;
};

}  // namespace coterie::stable_api
