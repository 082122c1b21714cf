// SPDX-License-Identifier: MIT
// Programmatic dependent launch: kernels that start while the one before them in the stream ends
// (launch_early in launch/launch.h). Every block of such a kernel waits, at its end at the latest.
// Before sm_90 both functions do nothing and the stream orders the kernels.
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
