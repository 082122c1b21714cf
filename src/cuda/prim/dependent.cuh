// SPDX-License-Identifier: MIT
// Programmatic dependent launch: kernels that start before the previous one in the stream has
// finished (launch_early in launch/launch.h). Every block of such a kernel waits, at its end at the
// latest. Before sm_90 both functions do nothing and the stream orders the kernels.
#pragma once

namespace coterie::cuda {

// Lets the next kernel start once all blocks of this one have reached this point or ended.
__device__ __forceinline__ void release_next() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Waits for all writes of earlier kernels of the stream; they may be overwritten. By all threads.
__device__ __forceinline__ void await_writes() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Both: the first statement of kernels that have nothing to do before they wait.
__device__ __forceinline__ void await_previous() {
  release_next();
  await_writes();
}

}  // namespace coterie::cuda
