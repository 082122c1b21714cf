// SPDX-License-Identifier: MIT
// Kernels that start while the one before them ends (launch_early in launch.h).
#pragma once

namespace coterie::cuda {

// The next kernel may take its place from here on: once all blocks came here or ended, it starts.
__device__ __forceinline__ void release_next() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// All that earlier kernels of the stream wrote is there, and may be overwritten. By all threads.
__device__ __forceinline__ void await_writes() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Both, for kernels that have nothing to do before they wait: their first statement.
__device__ __forceinline__ void await_previous() {
  release_next();
  await_writes();
}

}  // namespace coterie::cuda
