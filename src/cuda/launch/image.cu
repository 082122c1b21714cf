// SPDX-License-Identifier: MIT
#include "cuda/launch/image.h"

#include <cstddef>

namespace coterie::cuda {
namespace {

constexpr std::size_t kEarlyBytes = 256;

// Its shared memory says for which architecture it was compiled.
__global__ void image_kernel() {
#if __CUDA_ARCH__ >= 900
  __shared__ volatile char early[kEarlyBytes];
  early[threadIdx.x] = 0;
#endif
}

}  // namespace

cudaError_t find_image(Image& image) {
  cudaFuncAttributes attributes{};
  const cudaError_t status = cudaFuncGetAttributes(&attributes, image_kernel);
  image.waits_early = attributes.sharedSizeBytes >= kEarlyBytes;
  return status;
}

}  // namespace coterie::cuda
