// SPDX-License-Identifier: MIT
// Kernel launches and checks of CUDA calls. Failures throw coterie::Error.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>

#include "coterie/view.h"
#include "cuda/launch/device.h"
#include "cuda/launch/fail.h"

namespace coterie::cuda {

inline void check_cuda(cudaError_t status, const char* what) {
  if (status != cudaSuccess) fail_cuda(status, what);
}

inline cudaStream_t stream_of(const Workspace& workspace) {
  return static_cast<cudaStream_t>(workspace.stream);
}

// Lets a kernel use all the dynamic shared memory of the current device: more than 48 KiB, static
// arrays included, must be requested. The limit belongs to the kernel, not to a launch, and other
// host threads may launch the same kernel with other shapes: it must not depend on the bytes of one
// call. Requested once per kernel and device.
void allow_shared_memory(const void* kernel);

template <class Kernel>
void allow_shared_memory(Kernel* kernel, std::size_t bytes) {
  if (bytes > static_cast<std::size_t>(shared_per_block())) fail_shared_memory(bytes);
  if (bytes > 32 * 1024) allow_shared_memory(reinterpret_cast<const void*>(kernel));
}

struct LaunchMode {
  bool early;     // may start before the previous kernel in the stream has finished, if it can
  bool together;  // cooperative: all blocks are resident at once
};

template <class... Parameters, class... Arguments>
void launch_kernel(const char* name, LaunchMode mode, void (*kernel)(Parameters...), dim3 grid,
                   int threads, std::size_t shared, cudaStream_t stream,
                   const Arguments&... arguments) {
  allow_shared_memory(kernel, shared);
  cudaLaunchAttribute attributes[2]{};
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = shared;
  config.stream = stream;
  config.attrs = attributes;
  if (mode.early && device_limits().early) {
    cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
  }
  if (mode.together) {
    cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
    attribute.id = cudaLaunchAttributeCooperative;
    attribute.val.cooperative = 1;
  }
  check_cuda(cudaLaunchKernelEx(&config, kernel, arguments...), name);
}

// For kernels that themselves wait for earlier ones (dependent.cuh). Every block has to wait, at
// its end at the latest: a kernel that waits for this one relies on all earlier ones too.
template <class... Parameters, class... Arguments>
void launch_early(const char* name, void (*kernel)(Parameters...), dim3 grid, int threads,
                  std::size_t shared, cudaStream_t stream, const Arguments&... arguments) {
  launch_kernel(name, {true, false}, kernel, grid, threads, shared, stream, arguments...);
}

}  // namespace coterie::cuda

// Around every call of the CUDA runtime: COTERIE_CUDA(cudaMemsetAsync(...)).
#define COTERIE_CUDA(call) ::coterie::cuda::check_cuda((call), #call)

// After every kernel launch: COTERIE_LAUNCH("centroid_attend").
#define COTERIE_LAUNCH(name) ::coterie::cuda::check_cuda(cudaGetLastError(), "launching " name)
