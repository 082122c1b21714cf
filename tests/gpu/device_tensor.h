// SPDX-License-Identifier: MIT
// Tensors in GPU memory for the GPU test programs.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "coterie/tensor.h"
#include "cuda/launch/launch.h"

namespace coterie::gpu_test {

// Device memory followed by a guard area, all filled with 0xff: NaN in every floating-point type,
// -1 in integers.
class DeviceMemory {
 public:
  DeviceMemory() = default;
  explicit DeviceMemory(std::int64_t bytes) : bytes_(bytes) {
    void* data = nullptr;
    COTERIE_CUDA(cudaMalloc(&data, static_cast<std::size_t>(bytes) + kGuard));
    memory_.reset(data, [](void* p) { cudaFree(p); });
    COTERIE_CUDA(cudaMemset(data, 0xff, static_cast<std::size_t>(bytes) + kGuard));
  }
  void poison(int byte = 0xff) const {
    COTERIE_CUDA(cudaMemset(memory_.get(), byte, static_cast<std::size_t>(bytes_)));
  }
  // Whether nothing was written past the end.
  bool intact() const {
    std::vector<unsigned char> guard(kGuard);
    COTERIE_CUDA(cudaMemcpy(guard.data(), static_cast<char*>(data()) + bytes_, kGuard,
                            cudaMemcpyDeviceToHost));
    return guard == std::vector<unsigned char>(kGuard, 0xff);
  }
  void* data() const { return memory_.get(); }
  std::int64_t bytes() const { return bytes_; }

 private:
  static constexpr std::size_t kGuard = 256;
  std::shared_ptr<void> memory_;
  std::int64_t bytes_ = 0;
};

// A tensor in device memory, contiguous unless it copies a strided host tensor.
class DeviceTensor {
 public:
  DeviceTensor() = default;
  explicit DeviceTensor(const TensorLayout& layout) {
    std::int64_t stride = 1;
    view_.dtype = layout.dtype;
    view_.device = Device::cuda;
    view_.rank = static_cast<int>(layout.sizes.size());
    for (int dim = view_.rank - 1; dim >= 0; --dim) {
      view_.sizes[dim] = layout.sizes[static_cast<std::size_t>(dim)];
      view_.strides[dim] = stride;
      stride *= view_.sizes[dim];
    }
    memory_ = DeviceMemory(stride * dtype_bytes(layout.dtype));
    view_.data = memory_.data();
  }
  // A copy of the memory that a host view spans, with the same strides.
  explicit DeviceTensor(const TensorView& host) : view_(host) {
    if (!host.present()) return;
    memory_ = DeviceMemory(span(host));
    view_.data = memory_.data();
    view_.device = Device::cuda;
    if (host.count() > 0)
      COTERIE_CUDA(cudaMemcpy(view_.data, host.data, static_cast<std::size_t>(span(host)),
                              cudaMemcpyHostToDevice));
  }

  const TensorView& view() const { return view_; }
  const DeviceMemory& memory() const { return memory_; }

  // The values as a contiguous host tensor.
  HostTensor download() const {
    HostTensor all(DType::u8, {span(view_)});
    COTERIE_CUDA(cudaMemcpy(all.data<std::uint8_t>(), view_.data,
                            static_cast<std::size_t>(span(view_)), cudaMemcpyDeviceToHost));
    TensorView strided = view_;
    strided.device = Device::cpu;
    strided.data = all.data<std::uint8_t>();
    HostTensor values(view_.dtype,
                      std::vector<std::int64_t>(view_.sizes, view_.sizes + view_.rank));
    write_values(values, read_values(strided));
    return values;
  }
  // Copies the bytes to a host view of the same sizes and strides.
  void copy_to(const TensorView& host) const {
    if (view_.count() > 0)
      COTERIE_CUDA(cudaMemcpy(host.data, view_.data, static_cast<std::size_t>(span(view_)),
                              cudaMemcpyDeviceToHost));
  }
  std::vector<std::uint8_t> bytes() const {
    std::vector<std::uint8_t> copy(static_cast<std::size_t>(memory_.bytes()));
    COTERIE_CUDA(cudaMemcpy(copy.data(), view_.data, copy.size(), cudaMemcpyDeviceToHost));
    return copy;
  }

 private:
  static std::int64_t span(const TensorView& view) {
    std::int64_t last = 0;
    for (int dim = 0; dim < view.rank; ++dim) {
      if (view.sizes[dim] == 0) return 0;
      last += (view.sizes[dim] - 1) * view.strides[dim];
    }
    return (last + 1) * dtype_bytes(view.dtype);
  }

  TensorView view_;
  DeviceMemory memory_;
};

}  // namespace coterie::gpu_test
