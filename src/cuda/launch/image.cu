// SPDX-License-Identifier: MIT
#include "cuda/launch/image.h"

namespace coterie::cuda {
namespace {

__global__ void empty_kernel() {}

}  // namespace

cudaError_t image_attributes(cudaFuncAttributes& attributes) {
  return cudaFuncGetAttributes(&attributes, empty_kernel);
}

}  // namespace coterie::cuda
