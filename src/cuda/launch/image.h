// SPDX-License-Identifier: MIT
// Which machine code of this build the current device runs.
#pragma once

#include <cuda_runtime_api.h>

namespace coterie::cuda {

// The attributes of an empty kernel, compiled like all others.
cudaError_t image_attributes(cudaFuncAttributes& attributes);

}  // namespace coterie::cuda
