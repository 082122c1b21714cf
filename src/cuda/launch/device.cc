// SPDX-License-Identifier: MIT
#include "cuda/launch/device.h"

#include <mutex>

#include "cuda/launch/launch.h"

namespace coterie::cuda {
namespace {

constexpr int kMostDevices = 64;

DeviceLimits ask(int device) {
  const auto attribute = [&](cudaDeviceAttr which) {
    int value = 0;
    check_cuda(cudaDeviceGetAttribute(&value, which, device), "asking for a limit of the device");
    return value;
  };
  return {attribute(cudaDevAttrComputeCapabilityMajor),
          attribute(cudaDevAttrComputeCapabilityMinor), attribute(cudaDevAttrMultiProcessorCount),
          attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin),
          attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor)};
}

}  // namespace

const DeviceLimits& device_limits() {
  static std::once_flag asked[kMostDevices];
  static DeviceLimits limits[kMostDevices];
  int device = 0;
  check_cuda(cudaGetDevice(&device), "asking for the device");
  if (device >= kMostDevices) fail_more_than("cuda", kMostDevices, "devices", device + 1);
  std::call_once(asked[device], [&] { limits[device] = ask(device); });
  return limits[device];
}

}  // namespace coterie::cuda
