// SPDX-License-Identifier: MIT
// Views of densely packed row-major memory whose rank is known at run time only.
#pragma once

#include <cstdint>

#include "coterie/view.h"

namespace coterie {

// Throws Error on more than kMaxRank sizes and on negative ones.
TensorView dense_view(void* data, DType dtype, const std::int64_t* sizes, int rank, Device device);

}  // namespace coterie
