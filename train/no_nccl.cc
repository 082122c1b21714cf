// SPDX-License-Identifier: MIT
#include "coterie/error.h"
#include "train/nccl.h"

namespace coterie::train {

c10::intrusive_ptr<c10d::Backend> make_nccl(const c10::intrusive_ptr<c10d::Store>&, int, int,
                                            std::chrono::milliseconds) {
  throw Error(
      "[train] this program was built for a torch without NCCL: ranks on GPUs need it. Use "
      "--device cpu, or build for a torch with CUDA");
}

}  // namespace coterie::train
