// SPDX-License-Identifier: MIT
// The saved tensors of clustered and improved clustered attention by name. forward.cu
#pragma once

#include <vector>

#include "coterie/params.h"
#include "cuda/clustered/clustered.h"

namespace coterie::cuda {

ClusteredTensors clustered_tensors(const ClusteredParams& params,
                                   const std::vector<TensorView>& saved);
ClusteredTensors clustered_tensors(const ImprovedClusteredParams& params,
                                   const std::vector<TensorView>& saved);

}  // namespace coterie::cuda
