// SPDX-License-Identifier: MIT
// Views of tensors (coterie/view.h), and tensors in host memory for programs without a tensor
// library.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "coterie/view.h"

namespace coterie {

// "f32 (2, 8, 128, 64)", for messages.
std::string describe(const TensorView& tensor);
std::string describe(Device device);  // "cpu", "cuda:0"

// Name, type and shape of a tensor the caller must provide.
struct TensorLayout {
  std::string name;
  DType dtype = DType::f32;
  std::vector<std::int64_t> sizes;
};

// The contiguous view of such a tensor in `data`.
TensorView view_of(const TensorLayout& layout, void* data, Device device = Device::cpu);

// An owning, contiguous tensor in host memory, zero-filled and aligned to 64 bytes.
class HostTensor {
 public:
  HostTensor() = default;
  HostTensor(DType dtype, std::vector<std::int64_t> sizes);
  explicit HostTensor(const TensorLayout& layout) : HostTensor(layout.dtype, layout.sizes) {}

  const TensorView& view() const { return view_; }
  operator const TensorView&() const { return view_; }  // NOLINT: a tensor is usable as its view
  operator ConstTensorView() const { return view_; }    // NOLINT: and as an input
  template <class T>
  T* data() {
    return static_cast<T*>(view_.data);
  }
  template <class T>
  const T* data() const {
    return static_cast<const T*>(view_.data);
  }

  HostTensor(const HostTensor& other);
  HostTensor(HostTensor&& other) noexcept
      : storage_(std::move(other.storage_)), view_(std::exchange(other.view_, {})) {}
  HostTensor& operator=(HostTensor other) noexcept {
    storage_ = std::move(other.storage_);
    view_ = other.view_;
    return *this;
  }
  ~HostTensor() = default;

 private:
  static constexpr std::size_t kAlignment = 64;
  struct Free {
    void operator()(std::byte* memory) const { std::free(memory); }
  };
  std::unique_ptr<std::byte, Free> storage_;
  TensorView view_;
};

// Elements of host tensors of any type and strides, as doubles in row-major order of the view's
// sizes. Writing rounds to nearest even.
std::vector<double> read_values(const TensorView& tensor);
void write_values(const TensorView& tensor, const std::vector<double>& values);
// Writes value(flat row-major index) to every element.
void fill(const TensorView& tensor, const std::function<double(std::int64_t)>& value);

}  // namespace coterie
