// SPDX-License-Identifier: MIT
// Tensors in host or GPU memory.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "coterie/tensor.h"

namespace coterie::bench {

// An owning, contiguous tensor on either device. Views of it stay valid when it is moved.
class Tensor {
 public:
  Tensor() = default;
  Tensor(const TensorLayout& layout, Device device);  // contents are unspecified
  Tensor(HostTensor values, Device device);           // on the cpu without a copy

  const TensorView& view() const { return view_; }
  operator const TensorView&() const { return view_; }  // NOLINT: a tensor is usable as its view

 private:
  HostTensor host_;
  std::shared_ptr<void> device_;
  TensorView view_;
};

std::vector<std::int64_t> sizes_of(const TensorView& view);
std::int64_t bytes_of(const TensorView& view);

// The values of a view on either device, in host memory.
HostTensor host_copy(const TensorView& view);

// Sets every byte of a contiguous view to 0xff: NaN in floating types, -1 in signed integers.
void poison(const TensorView& view);

}  // namespace coterie::bench
