// SPDX-License-Identifier: MIT
// Forward pass of lists (lists.h): the arguments of its kernels, and their launches.
#pragma once

#include "cuda/lists/plan.h"

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

// All calls. forward.cu
template <class T>
void launch_list_forward(const ListForwardArgs<T>& args, cudaStream_t stream);

// 16-bit types, as planned. forward_sm90a.cu
template <class T>
void launch_list_forward_sm90a(const ListForwardArgs<T>& args, const ListForwardPlan& plan,
                               cudaStream_t stream);

}  // namespace coterie::cuda
