// SPDX-License-Identifier: MIT
// Which machine code of this build the current device runs.
#pragma once

#include <cuda_runtime_api.h>

namespace coterie::cuda {

struct Image {
  bool waits_early;  // compiled with the instructions of prim/dependent.cuh
};
// Asks for a kernel that is compiled like all others.
cudaError_t find_image(Image& image);

}  // namespace coterie::cuda
