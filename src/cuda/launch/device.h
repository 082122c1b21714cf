// SPDX-License-Identifier: MIT
// Whether the current device runs the kernels of *_sm90a.cu.
#pragma once

#include "cuda/launch/launch.h"

namespace coterie::cuda {

inline bool on_hopper() {
  int device = 0, major = 0;
  check_cuda(cudaGetDevice(&device), "asking for the device");
  check_cuda(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device),
             "asking for the compute capability");
  return major == 9;
}

}  // namespace coterie::cuda
