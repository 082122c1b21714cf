// SPDX-License-Identifier: MIT
#include "cuda/launch/device.h"

namespace coterie::cuda {

bool has_sm90a_kernels() { return true; }

}  // namespace coterie::cuda
