// SPDX-License-Identifier: MIT
// Attention of a warpgroup's 64 means over tiles of 64 keys: two rows of a thread, and the state of
// their softmax. Shifts are whole numbers: weights that were rounded under another shift differ by
// a power of two and nothing else.
#pragma once

#include <cstdint>

#include "cuda/device/centroid_attend.cuh"
#include "cuda/device/softmax.cuh"
#include "cuda/device/wgmma.cuh"

namespace coterie::cuda {

template <class T, int kDim>
struct MeanRows {
  float shift[2] = {-INFINITY, -INFINITY};
  float sum[2] = {}, mass[2] = {};  // of this lane's weights, and of those moved to the mass
  float out[kDim / 64][32] = {};

  // The largest of each four scores that belong to 16 keys, of both rows.
  __device__ static void largest(const float (&s)[32], float (&fours)[2][4]) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float* four = s + i / 2 * 8 + i % 2 * 2;
      fours[i % 2][i / 2] = fmaxf(fmaxf(four[0], four[1]), fmaxf(four[4], four[5]));
    }
  }

  // Raises the shifts if a row's largest score is far above. By all lanes of the warp.
  __device__ void follow(const float (&top)[2], bool first, float exponent, float inverse) {
    const bool above = first || top[0] > (shift[0] + RowSoftmax::kSlack) * inverse ||
                       top[1] > (shift[1] + RowSoftmax::kSlack) * inverse;
    if (!__any_sync(~0u, above)) return;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float old = shift[half];
      shift[half] = fmaxf(old, ceilf(quad_max(top[half]) * exponent));
      if (shift[half] == -INFINITY) shift[half] = 0.0f;
      const float factor = exp2_approximate(old - shift[half]);
      sum[half] *= factor;
      mass[half] *= factor;
#pragma unroll
      for (int i = 0; i < kDim / 4; ++i) out[i / 16][i % 16 / 2 * 4 + 2 * half + i % 2] *= factor;
    }
  }

  // Scores become weights.
  __device__ void weigh(float (&s)[32], float exponent) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float part[4] = {};
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        float& score = s[i / 2 * 4 + 2 * half + i % 2];
        score = exp2_approximate(fmaf(score, exponent, -shift[half]));
        part[i % 4] += score;
      }
      sum[half] += (part[0] + part[1]) + (part[2] + part[3]);
    }
  }

  // Starts out += P V.
  __device__ void add_products(const std::uint32_t (&p)[4][4], std::uint32_t values) {
    const std::uint64_t first = matrix_descriptor(values);
#pragma unroll
    for (int k = 0; k < 4; ++k)
#pragma unroll
      for (int band = 0; band < kDim / 64; ++band)
        wgmma<T, 1, 1>(out[band], p[k],
                       descriptor_behind(first, band * (64 * 128) + k * (16 * 128)));
  }
  __device__ void settle() {
#pragma unroll
    for (int band = 0; band < kDim / 64; ++band) wgmma_settle(out[band]);
  }

  // To places row and row + 8 of the partial results, as far as there are `rows` of them.
  __device__ void write(PartialRow* to, float* outs, int pitch, std::int64_t row, int rows) const {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float all = quad_sum(sum[half]), listed = quad_sum(mass[half]);
      if (8 * half >= rows) continue;
      if (lane % 4 == 0) to[row + 8 * half] = {shift[half], all, listed, 0.0f};
      float* place = outs + (row + 8 * half) * pitch + lane % 4 * 2;
#pragma unroll
      for (int j = 0; j < kDim / 8; ++j) {
        const float* pair = out[j / 8] + j % 8 * 4 + 2 * half;
        *reinterpret_cast<float2*>(place + 8 * j) = make_float2(pair[0], pair[1]);
      }
    }
  }
};

}  // namespace coterie::cuda
