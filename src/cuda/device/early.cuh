// SPDX-License-Identifier: MIT
// await_previous (await.cuh) in two steps, for kernels that have something to do before they wait.
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

}  // namespace coterie::cuda
