// SPDX-License-Identifier: MIT
// Rows on their way into routing_scan_sm90a.cu, and what becomes of them there before the products.
#pragma once

#include "cuda/device/routing_scan.cuh"
#include "cuda/device/row_chunk.cuh"
#include "cuda/device/row_statistics.cuh"

namespace coterie::cuda {

// Rows of a tile that are on their way: this lane's parts of rows l/4 and l/4 + 8 of the warp's 16.
template <int kChunks>
struct RowsAhead {
  int end;
  bool full;  // rows of 32 * kChunks elements that can be read by 16 bytes
  RowTile<ScanElement, kChunks, 1> tile;

  __device__ RowsAhead(const Rows<const ScanElement>& rows, int last)
      : end(last), full(in_vectors(rows) && rows.width == 32 * kChunks) {}

  // Rows first .. first + 15; what becomes of those from `end` on does not matter.
  __device__ __forceinline__ void load(const Rows<const ScanElement>& rows, int first) {
    if (!full) {
      tile.load(rows, first, end);
      return;
    }
    const int row = first + static_cast<int>(threadIdx.x % 32u / 4u);
#pragma unroll
    for (int side = 0; side < 2; ++side) {
      const ScanElement* from = row_address(rows.data + threadIdx.x % 4u * 8u,
                                            min(row + 8 * side, end - 1), pitch_bytes(rows));
#pragma unroll
      for (int chunk = 0; chunk < kChunks; ++chunk)
        tile.words[0][side].word[chunk] = load_once(from + 32 * chunk, true);
    }
  }
};

// What a row needs besides its products; lane t of a row's four has that of row t % 2 of its two.
template <int kChunks>
struct RowFacts {
  RowStatistics stats;
  float scale;
  float
      bound;  // of the difference of two scores; -inf for zeros, +inf or NaN where scores are none

  // `x` becomes what is multiplied.
  __device__ __forceinline__ RowFacts(const ScanTable& table, int width,
                                      float (&x)[2][8 * kChunks]) {
    const int side = static_cast<int>(threadIdx.x % 2u), four = static_cast<int>(threadIdx.x & 28u);
    const RowSums parts[2] = {RowSums(x[0]), RowSums(x[1])};
    RowSums sums = side ? parts[1] : parts[0];
    sums.sum += __shfl_xor_sync(~0u, side ? parts[0].sum : parts[1].sum, 1);
    sums.squares += __shfl_xor_sync(~0u, side ? parts[0].squares : parts[1].squares, 1);
    sums.sum += __shfl_xor_sync(~0u, sums.sum, 2);
    sums.squares += __shfl_xor_sync(~0u, sums.squares, 2);
    const float mean = sums.mean(width);
    float variance;
    const bool good = sums.variance(width, mean, variance);
    if (__any_sync(~0u, !good)) {
#pragma unroll
      for (int s = 0; s < 2; ++s) {
        const float exact =
            sum_of_four(variance_part<kChunks>(x[s], width, __shfl_sync(~0u, mean, four + s)));
        if (!good && side == s) variance = exact;
      }
    }
    stats = {mean, inverse_sigma(variance)};
    float root;
    asm("sqrt.approx.ftz.f32 %0, %1;" : "=f"(root) : "f"(sums.squares));
    const float length = 1.001f * root;
    scale = row_scale(length);
    bound = 2.0f * length * table.slack;
    if (__any_sync(~0u, scale != 1.0f)) scale_rows(table, x, side, four);
  }

 private:
  // The rare part: rows that are scaled, or zero.
  __device__ void scale_rows(const ScanTable& table, float (&x)[2][8 * kChunks], int side,
                             int four) {
    bound = scale > 0.0f ? bound * scale : INFINITY;
#pragma unroll
    for (int s = 0; s < 2; ++s) {
      const float factor = __shfl_sync(~0u, scale, four + s);
      bool empty = true;
#pragma unroll
      for (int i = 0; i < 8 * kChunks; ++i) {
        empty = empty && x[s][i] == 0.0f;
        x[s][i] *= factor;
      }
      const unsigned lanes = __ballot_sync(~0u, empty);
      if (side == s && (lanes >> four & 15u) == 15u && table.usable) bound = -INFINITY;
    }
  }
};

}  // namespace coterie::cuda
