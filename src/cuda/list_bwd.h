// SPDX-License-Identifier: MIT
// Launches of the kernels of device/list_bwd.cuh, for the files that instantiate them.
#pragma once

#include "cuda/device/list_bwd.cuh"
#include "cuda/launch.h"

namespace coterie::cuda {

struct ListKernels {
  bool queries, keys;  // which of the two run
};

template <class P, ListForm kForm>
void launch_lists(const ListBackwardArgs<typename P::T>& args, const ListKernels& wanted,
                  cudaStream_t stream) {
  using S = ListBlockShape<P>;
  const ListProblem& problem = args.problem;
  const dim3 queries(static_cast<unsigned>(args.q_tiles.total),
                     static_cast<unsigned>(problem.q.heads));
  const dim3 keys(static_cast<unsigned>(args.k_tiles.total),
                  static_cast<unsigned>(problem.k.heads));
  if (wanted.queries && queries.x > 0)
    launch_early("list_query_kernel", list_query_kernel<P, kForm>, queries, kListThreads,
                 S::template kBytes<KeyColumns<P::kColumns, kForm>>, stream, args);
  if (wanted.keys && keys.x > 0)
    launch_early("list_key_kernel", list_key_kernel<P, kForm>, keys, kListThreads,
                 S::template kBytes<QueryColumns<P::kColumns, kForm>>, stream, args);
}

// 16-bit types, aligned rows, forms plain and normalised. attend_list_bwd_sm90a.cu
template <class T, int kWidth>
void launch_lists_sm90a(const ListBackwardArgs<T>& args, ListForm form, const ListKernels& wanted,
                        cudaStream_t stream);

// Lists that fit a block as a whole, all gradients at once: calls that launch_lists_sm90a would
// serve, of which this one is taken; cleared tensors become 0. attend_whole_list_bwd_sm90a.cu
template <class T>
bool takes_whole_lists(const ListBackwardArgs<T>& args);
template <class T>
void launch_whole_lists_sm90a(const ListBackwardArgs<T>& args, const TensorView (&cleared)[3],
                              cudaStream_t stream);

// Windows along all rows of an item, all gradients at once: plain calls that launch_lists_sm90a
// would serve, of which this one is taken. attend_window_bwd_sm90a.cu
template <class T>
bool takes_windows(const ListBackwardArgs<T>& args);
template <class T>
void launch_windows_sm90a(const ListBackwardArgs<T>& args, cudaStream_t stream);

}  // namespace coterie::cuda
