// SPDX-License-Identifier: MIT
#include "cuda/launch/device.h"

#include <algorithm>
#include <cstdlib>
#include <mutex>
#include <string>

#include "core/check.h"
#include "cuda/launch/image.h"
#include "cuda/launch/launch.h"

namespace coterie::cuda {
namespace {

constexpr int kMostDevices = 64;
constexpr int kHopperShared = 227 * 1024;

// The limit of COTERIE_GPU_SHARED_KB in bytes, or `most`.
int shared_limit(int most) {
  const char* text = std::getenv("COTERIE_GPU_SHARED_KB");
  if (!text || !*text) return most;
  char* end = nullptr;
  const long value = std::strtol(text, &end, 10);
  if (*end != '\0' || value < kLeastShared / 1024 || value > most / 1024)
    fail("cuda", "expected COTERIE_GPU_SHARED_KB from ", kLeastShared / 1024, " to ", most / 1024,
         ", the shared memory of a block in KiB; got \"", text, '"');
  return static_cast<int>(value) * 1024;
}

[[noreturn]] void refuse_device(int device, int major, int minor) {
  cudaGetLastError();  // otherwise the next call reports the error
  cudaDeviceProp properties{};
  const bool named = cudaGetDeviceProperties(&properties, device) == cudaSuccess;
  fail("cuda", "expected a GPU for which this library was compiled; got ",
       named ? properties.name : "a GPU", " with compute capability ", major, ".", minor,
       ", and it has kernels for architectures ", COTERIE_CUDA_ARCHITECTURES,
       major < 8
           ? "; kernels need 8.0 or later"
           : "; compile it with -DCMAKE_CUDA_ARCHITECTURES=" + std::to_string(10 * major + minor));
}

DeviceLimits ask(int device) {
  const auto attribute = [&](cudaDeviceAttr which) {
    int value = 0;
    check_cuda(cudaDeviceGetAttribute(&value, which, device), "asking for a limit of the device");
    return value;
  };
  DeviceLimits limits{};
  limits.major = attribute(cudaDevAttrComputeCapabilityMajor);
  limits.minor = attribute(cudaDevAttrComputeCapabilityMinor);
  limits.multiprocessors = attribute(cudaDevAttrMultiProcessorCount);
  const int most = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
  Image image{};
  const cudaError_t found = find_image(image);
  if (most < kLeastShared || found == cudaErrorNoKernelImageForDevice ||
      found == cudaErrorInvalidDeviceFunction || found == cudaErrorUnsupportedPtxVersion ||
      found == cudaErrorInvalidPtx)
    refuse_device(device, limits.major, limits.minor);
  check_cuda(found, "asking for the attributes of a kernel");
  limits.shared_per_block = shared_limit(most);
  // Kernels compiled for earlier GPUs do not wait for each other, whatever runs them.
  limits.early = limits.major >= 9 && image.waits_early;
  limits.hopper =
      limits.major == 9 && limits.shared_per_block >= kHopperShared && has_sm90a_kernels();
  return limits;
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
