// SPDX-License-Identifier: MIT
// The GPUs that the CUDA runtime reports.
#include <cuda_runtime_api.h>

#include "core/check.h"
#include "coterie/tensor.h"
#include "cuda/api/entry.h"
#include "cuda/launch/guard.h"
#include "cuda/launch/launch.h"

namespace coterie::cuda {
namespace {

// Also 0 without a driver: a machine without a GPU is not an error.
int device_count() {
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess) {
    cudaGetLastError();  // otherwise the next call reports this error
    return 0;
  }
  return count;
}

}  // namespace

bool available() { return device_count() > 0; }

std::vector<CudaDevice> devices() {
  std::vector<CudaDevice> found;
  const int count = device_count();
  for (int device = 0; device < count; ++device) {
    cudaDeviceProp properties;
    if (cudaGetDeviceProperties(&properties, device) != cudaSuccess) {
      cudaGetLastError();
      continue;  // listed by the driver, but does not respond
    }
    CudaDevice info;
    info.name = properties.name;
    info.major = properties.major;
    info.minor = properties.minor;
    info.multiprocessors = properties.multiProcessorCount;
    info.memory_bytes = static_cast<std::int64_t>(properties.totalGlobalMem);
    found.push_back(info);
  }
  return found;
}

DeviceGuard::DeviceGuard(const char* op, Device device) {
  int current = -1;
  if (cudaGetDevice(&current) == cudaSuccess && current == device.index) return;
  if (device.index < 0 || device.index >= device_count() ||
      cudaSetDevice(device.index) != cudaSuccess) {
    cudaGetLastError();
    fail(op, "expected tensors on a GPU that exists; got them on ", describe(device), " of ",
         device_count());
  }
  before_ = current;
}

DeviceGuard::~DeviceGuard() {
  if (before_ >= 0) cudaSetDevice(before_);
}

const char* toolkit() {
  static const std::string version =
      std::to_string(CUDART_VERSION / 1000) + "." + std::to_string(CUDART_VERSION % 1000 / 10);
  return version.c_str();
}

}  // namespace coterie::cuda
