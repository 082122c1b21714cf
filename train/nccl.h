// SPDX-License-Identifier: MIT
// NCCL's back end of a process group; builds for a torch without CUDA have no_nccl.cc instead.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>

namespace coterie::train {

// Throws Error if there is none.
c10::intrusive_ptr<c10d::Backend> make_nccl(const c10::intrusive_ptr<c10d::Store>& store, int rank,
                                            int size, std::chrono::milliseconds timeout);

}  // namespace coterie::train
