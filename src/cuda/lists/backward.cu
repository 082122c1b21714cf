// SPDX-License-Identifier: MIT
// Backward pass of lists by mma.sync (backward_tiles.cuh): every type, width, rule and filter.
#include "cuda/launch/dispatch.h"
#include "cuda/lists/backward_products.cuh"
#include "cuda/lists/backward_tiles.cuh"

namespace coterie::cuda {

template <class T>
void launch_list_tiles(const ListBackwardArgs<T>& args, bool keys, cudaStream_t stream) {
  dispatch_head_dim("lists", args.problem.width, [&](auto width) {
    launch_tiles<WarpProducts<T, decltype(width)::value>>(args, keys, stream);
  });
}

template void launch_list_tiles(const ListBackwardArgs<float>&, bool, cudaStream_t);
template void launch_list_tiles(const ListBackwardArgs<Bf16>&, bool, cudaStream_t);
template void launch_list_tiles(const ListBackwardArgs<F16>&, bool, cudaStream_t);

}  // namespace coterie::cuda
