// SPDX-License-Identifier: MIT
// What the kernels of CAST's forward mix take.
#pragma once

#include <cuda_runtime.h>

#include "cuda/cast/stages.h"

namespace coterie::cuda {

template <class T>
struct MixArgs {
  CastShape shape;
  TokenSlots slots;
  ItemChunks tiles;
  Tensor4<const T> q;
  Tensor4<T> out;
  const T *surrogates, *summaries;  // (H, C, D), (items, H, C, D)
  const T* inner;                   // (slots, D)
  const float* summary_lse;         // (items, H, C), or null
  float* lse;                       // (B, H, N), or null
};

// By Hopper's warpgroup products: for softmax, 16-bit types and aligned rows, where the clusters of
// a head have room in shared memory. Sets the tiles. mix_sm90a.cu
template <class T>
bool mix_suits_sm90a(const MixArgs<T>& args);
template <class T>
void mix_sm90a(MixArgs<T> args, cudaStream_t stream);

}  // namespace coterie::cuda
