// SPDX-License-Identifier: MIT
// Kernels that start while the one before them ends (launch_early in launch.h).
#pragma once

namespace coterie::cuda {

// All that earlier kernels of the stream wrote is there, and may be overwritten. By all threads of
// the kernel, before anything else. The next kernel may take its place from here on.
__device__ __forceinline__ void await_previous() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

}  // namespace coterie::cuda
