// SPDX-License-Identifier: MIT
// Backward pass of lists by mma.sync (formulas, grid and shared memory: backward_tiles.cuh): every
// type, width, rule and filter, and dropout. A warp handles 16 of the 64 owned rows; 220 to 255
// registers. Which 16-bit calls run other kernels on Hopper: plan.cu.
#include "cuda/launch/dispatch.h"
#include "cuda/lists/backward_tiles.cuh"
#include "cuda/prim/mma.cuh"

namespace coterie::cuda {
namespace {

// Products by mma.sync: a warp handles 16 owned rows against kColumns rows of the other side at a
// time. GroupProducts of backward_sm90a.cu has the same interface, but its functions only start the
// work; these complete it.
template <class Type, int kRowWidth, bool kDrop>
struct WarpProducts {
  using T = Type;
  static constexpr bool kDropout = kDrop;
  static constexpr int kWidth = kRowWidth;
  static constexpr bool kFilters = true;                     // and laplace weights
  static constexpr int kColumns = sizeof(T) == 2 ? 32 : 16;  // as many as fit in registers
  static constexpr int kUnit = 16;                           // rows that advance in lockstep
  static constexpr int kRowBytes = kWidth * static_cast<int>(sizeof(T));
  // Blocks per multiprocessor.
  static constexpr int kBlocks = sizeof(T) == 2 ? 2 : 1;
  using Scores =
      float[kColumns / 2];         // columns 8 j + 2 (l%4) + e%2 of row l/4 + 8 (e/2): [4 j + e]
  using Sums = float[kWidth / 2];  // the same
  using Factor = FragmentA<T>[kColumns / 16];
  using Matrix = Tile<T, kWidth>;

  __device__ static Accumulator& part(float* values, int n) {
    return *reinterpret_cast<Accumulator*>(values + 8 * n);
  }

  // Loads rows of two tensors with the 128 threads of a block: `count` ranks from `first` on, then
  // zeros.
  template <int kRows>
  __device__ static void load(const Matrix (&to)[2], const Rows<const T> (&rows)[2], int first,
                              int count, const std::int32_t* index) {
#pragma unroll
    for (int tensor = 0; tensor < 2; ++tensor)
      load_tile<kRows, 128>(to[tensor], rows[tensor], first, count, index);
  }

  // s = this warp's rows of a times the transposed rows of b.
  __device__ static void start_scores(Scores& s, const Matrix& a, const Matrix& b) {
#pragma unroll
    for (int i = 0; i < kColumns / 2; ++i) s[i] = 0.0f;
    for_depths<T, kWidth / 16>([&](int d) {
      FragmentA<T> left;
      load_a(left, a, static_cast<int>(threadIdx.x) / 32 * 16, 16 * d);
#pragma unroll
      for (int n = 0; n < kColumns / 16; ++n) {
        FragmentB<T> right;
        load_b(right, b, 16 * n, 16 * d);
        multiply_add(part(s, n), left, right);
      }
    });
  }
  // sum += p times rows of b.
  __device__ static void start_sums(Sums& sum, const Factor& p, const Matrix& b) {
#pragma unroll
    for (int n = 0; n < kColumns / 16; ++n)
#pragma unroll
      for (int d = 0; d < kWidth / 16; ++d) {
        FragmentB<T> right;
        load_b_transposed(right, b, 16 * d, 16 * n);
        multiply_add(part(sum, d), p[n], right);
      }
  }
  __device__ static void round(FragmentA<T>& factor, Scores& s, int n) {
    to_fragment(factor, part(s, n));
  }

  // An element of a matrix in an even column, and the next element.
  __device__ static float2 pair(const Matrix& matrix, int row, int column) {
    return load_pair<T>(matrix.address(row, column));
  }

  __device__ static void fence() {}
  __device__ static void publish() {}
  template <int kPending>
  __device__ static void wait() {}
  template <int kCount>
  __device__ static void settle(float (&)[kCount]) {}
};
}  // namespace

template <class T>
void launch_list_tiles(const ListBackwardArgs<T>& args, bool keys, cudaStream_t stream) {
  dispatch_head_dim("lists", args.problem.width, [&](auto width) {
    constexpr int kWidth = decltype(width)::value;
    if (args.problem.dropout.on())
      launch_tiles<WarpProducts<T, kWidth, true>>(args, keys, stream);
    else
      launch_tiles<WarpProducts<T, kWidth, false>>(args, keys, stream);
  });
}

template void launch_list_tiles(const ListBackwardArgs<float>&, bool, cudaStream_t);
template void launch_list_tiles(const ListBackwardArgs<Bf16>&, bool, cudaStream_t);
template void launch_list_tiles(const ListBackwardArgs<F16>&, bool, cudaStream_t);

}  // namespace coterie::cuda
