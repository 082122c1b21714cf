// SPDX-License-Identifier: MIT
// Backward pass of attention of lists over lists (attend_list_bwd.cu) by warpgroup products.
#include "cuda/device/list_bwd_wgmma.cuh"
#include "cuda/list_bwd.h"

namespace coterie::cuda {

template <class T, int kWidth>
void launch_lists_sm90a(const ListBackwardArgs<T>& args, ListForm form, const ListKernels& wanted,
                        cudaStream_t stream) {
  using P = GroupProducts<T, kWidth>;
  if (form == ListForm::plain)
    launch_lists<P, ListForm::plain>(args, wanted, stream);
  else
    launch_lists<P, ListForm::normalised>(args, wanted, stream);
}

#define COTERIE_INSTANTIATE(T, width)                                              \
  template void launch_lists_sm90a<T, width>(const ListBackwardArgs<T>&, ListForm, \
                                             const ListKernels&, cudaStream_t)
COTERIE_INSTANTIATE(__nv_bfloat16, 64);
COTERIE_INSTANTIATE(__nv_bfloat16, 128);
COTERIE_INSTANTIATE(__half, 64);
COTERIE_INSTANTIATE(__half, 128);
#undef COTERIE_INSTANTIATE

}  // namespace coterie::cuda
