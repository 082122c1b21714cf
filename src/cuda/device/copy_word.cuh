// SPDX-License-Identifier: MIT
// Single words from global to shared memory, asynchronously.
#pragma once

#include <cstdint>

namespace coterie::cuda {

// Copies four bytes, or zeros where `there` is false.
__device__ __forceinline__ void cp_async4(std::uint32_t to, const void* from, bool there) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from),
               "r"(there ? 4 : 0)
               : "memory");
}

}  // namespace coterie::cuda
