// SPDX-License-Identifier: MIT
// Backward pass of lists (lists.h): the arguments of its kernels.
#pragma once

#include <array>
#include <cstdint>
#include <type_traits>

#include "cuda/lists/plan.h"
#include "cuda/prim/element.cuh"
#include "cuda/prim/softmax.cuh"

namespace coterie::cuda {

// fp16 weights are scaled by a power of two to keep them in range.
constexpr int kHalfWeightBits = 8;
constexpr float kHalfWeightScale = 1 << kHalfWeightBits;

// Where gradients of a side go: rows of a tensor, slots, or nowhere.
template <class T>
struct ListSums {
  Tensor4<T> rows;
  void* slots;
  bool rounded;  // slots are of T, else floats

  __host__ __device__ bool wanted() const { return rows.data || slots; }
  // Base of type T that rows or slots are counted from.
  __device__ Rows<T> rows_of(const ItemSpan& span, int head, int width) const {
    if (rows.data) return rows.rows(span.batch, head, span.begin);
    return {static_cast<T*>(slots), width, width, width * sizeof(T) % 16 == 0};
  }
};

template <class T>
struct ListBackwardArgs {
  ListProblem problem;
  ListTiles q_tiles, k_tiles;
  Tensor4<const T> q, k, v, g;
  ListValues weight, lse, delta;
  float* delta_out;  // written here if delta is not given
  bool delta_out_by_slot;
  ListSums<T> dq, dk, dv;
  bool normalise;      // dq and dk are with respect to the rows before normalisation
  float* dq_products;  // if so, optional, by query row: dq . normalised row
  float weight_scale;  // kHalfWeightScale for fp16; 1 for other types
};

// Arguments of full_backward_sm90a.cu. Its tiles of queries and keys have other sizes.
template <class T>
struct FullBackwardArgs {
  ListBackwardArgs<T> lists;
  Tensor4<const T> out;
  FullScratch scratch;
};

// Factors of a head's scores.
struct ScoreScale {
  float score;     // to logits
  float exponent;  // to logits in base 2
  float gradient;  // factor of dS in dk, if it differs between heads
  bool laplace;

  __device__ ScoreScale(const ListProblem& problem, int head)
      : score(problem.score_scale(head)),
        exponent(score * kLog2e),
        gradient(problem.head_scale ? score : 1.0f),
        laplace(problem.laplace) {}
};

// 1 / sigma of a row as a factor of weights and their derivatives, which are then rounded to T and
// multiplied by the row. For a row without variance it is 0, as is the normalised row: 1000 times a
// scaled weight overflows f16, and infinity times 0 is NaN.
template <class T>
__device__ __forceinline__ float inverse_factor(float inverse) {
  return std::is_same_v<T, F16> && fabsf(inverse - 1000.0f) < 0.01f ? 0.0f : inverse;
}

// Launches, as planned. The first three compute the gradients of queries or of keys, the others all
// gradients at once. All but the first are for 16-bit types.
template <class T>
void launch_list_tiles(const ListBackwardArgs<T>& args, bool keys, cudaStream_t stream);
template <class T>
void launch_wide_tiles_sm90a(const ListBackwardArgs<T>& args, bool keys, cudaStream_t stream);
template <class T>
void launch_list_stream_sm90a(const ListBackwardArgs<T>& args, const ListBackwardPlan& plan,
                              bool keys, cudaStream_t stream);
template <class T>
void launch_whole_lists_sm90a(const ListBackwardArgs<T>& args, const ListBackwardPlan& plan,
                              const std::array<TensorView, 3>& cleared, cudaStream_t stream);
template <class T>
void launch_windows_sm90a(const ListBackwardArgs<T>& args, const WalkCut& cut, cudaStream_t stream);
template <class T>
void launch_full_sm90a(const FullBackwardArgs<T>& args, cudaStream_t stream);

}  // namespace coterie::cuda
