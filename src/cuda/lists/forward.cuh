// SPDX-License-Identifier: MIT
// Arguments of the forward kernels of list attention, and which of them takes a plan.
#pragma once

#include <cstdint>

#include "cuda/lists/problem.cuh"
#include "cuda/prim/tensor.cuh"

namespace coterie::cuda {

template <class T>
struct ListForwardArgs {
  ListProblem problem;
  ListTiles tiles;
  Tensor4<const T> q, k, v;
  Tensor4<T> out;
  T* slot_rows;  // null: results by row
  float* lse;
};

// Plans without filters and with softmax weights, of aligned rows, on Hopper
// (forward_sm90a.cu): true, and launched, when the kernel takes the plan; 16-bit types
// only.
template <class T>
bool list_forward_sm90a(const AttentionCall& call, const ListCall& plan,
                        const ListForwardArgs<T>& args, cudaStream_t stream);

}  // namespace coterie::cuda
