// SPDX-License-Identifier: MIT
// Attention of a warpgroup's 64 means over tiles of 64 keys: two rows of a thread, and the state of
// their softmax.
#pragma once

#include <cstdint>

#include "cuda/clustered/centroid_attend.cuh"
#include "cuda/prim/bands.cuh"
#include "cuda/prim/softmax.cuh"

namespace coterie::cuda {

// What is summed up: weights times values.
template <class T, int kDim>
struct MeanSums {
  float out[kDim / 64][32] = {};

  // A row's, under another shift.
  __device__ void scale(int half, float factor) {
#pragma unroll
    for (int i = 0; i < kDim / 4; ++i) out[i / 16][i % 16 / 2 * 4 + 2 * half + i % 2] *= factor;
  }
  // Starts out += P V.
  __device__ void add_products(const std::uint32_t (&p)[4][4], std::uint32_t values) {
    cuda::add_products(out, p, Bands<T, kDim, 64>{values}, 0);
  }
  __device__ void settle() {
#pragma unroll
    for (int band = 0; band < kDim / 64; ++band) wgmma_settle(out[band]);
  }
  // To places row and row + 8 of the partial results, as far as there are `rows` of them. `sum` and
  // `mass` are those of this lane.
  __device__ void write_sums(PartialRow* to, float* outs, int pitch, std::int64_t row, int rows,
                             const PartialRow (&lane_rows)[2]) const {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      PartialRow partial = lane_rows[half];
      partial.sum = quad_sum(partial.sum);
      partial.mass = quad_sum(partial.mass);
      if (8 * half >= rows) continue;
      if (lane % 4 == 0) to[row + 8 * half] = partial;
      float* place = outs + (row + 8 * half) * pitch + lane % 4 * 2;
#pragma unroll
      for (int j = 0; j < kDim / 8; ++j) {
        const float* pair = out[j / 8] + j % 8 * 4 + 2 * half;
        store2(place + 8 * j, pair[0], pair[1]);
      }
    }
  }
};

// Shifts are whole numbers: weights that were rounded under another shift differ by a power of two
// and nothing else.
template <class T, int kDim>
struct MeanRows : MeanSums<T, kDim> {
  float shift[2] = {-INFINITY, -INFINITY};
  float sum[2] = {};  // of this lane's weights

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
      this->scale(half, factor);
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
        score = shifted_weight(score, exponent, shift[half]);
        part[i % 4] += score;
      }
      sum[half] += (part[0] + part[1]) + (part[2] + part[3]);
    }
  }

  __device__ void write(PartialRow* to, float* outs, int pitch, std::int64_t row, int rows) const {
    this->write_sums(to, outs, pitch, row, rows,
                     {{shift[0], sum[0], 0.0f, 0.0f}, {shift[1], sum[1], 0.0f, 0.0f}});
  }
};

}  // namespace coterie::cuda
