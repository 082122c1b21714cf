// SPDX-License-Identifier: MIT
// Rows on their way into routing_scan_sm90a.cu, and what becomes of them there before the products.
#pragma once

#include "cuda/device/routing_scan.cuh"
#include "cuda/device/row_statistics.cuh"

namespace coterie::cuda {

// Rows of a tile that are on their way: this lane's parts of rows l/4 and l/4 + 8 of the warp's 16.
template <int kChunks>
struct RowsAhead {
  const Rows<const ScanElement>& rows;
  int end;
  const ScanElement* at;  // of the first row
  RowTile<ScanElement, kChunks, 1> tile;

  __device__ RowsAhead(const Rows<const ScanElement>& all, int first, int last)
      : rows(all),
        end(last),
        at(all.row(first + static_cast<int>(threadIdx.x % 32u / 4u)) + column(0)) {}

  __device__ static int column(int chunk) {
    return 32 * chunk + static_cast<int>(threadIdx.x % 4u * 8u);
  }
  // Rows first .. first + 15, at which `at` points.
  __device__ __forceinline__ void load(int first) {
    if (!rows.aligned) {
      tile.load(rows, first, end);
      return;
    }
    const int row = first + static_cast<int>(threadIdx.x % 32u / 4u);
    const ScanElement* below = at + 8 * rows.pitch;
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      const bool inside = column(chunk) < rows.width;
      tile.words[0][0].word[chunk] = load_once(at + 32 * chunk, inside && row < end);
      tile.words[0][1].word[chunk] = load_once(below + 32 * chunk, inside && row + 8 < end);
    }
  }
};

// What a row needs besides its products; lane t of a row's four has that of row t % 2 of its two.
template <int kChunks>
struct RowFacts {
  RowStatistics stats;
  float length, scale, bound;
  bool zero;

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
    length = 1.001f * sums.squares * rsqrtf(fmaxf(sums.squares, 0x1p-126f));
    scale = scale_of(length);
    bound = 2.0f * length * scale * table.slack;
    zero = false;
    if (__any_sync(~0u, scale != 1.0f)) scale_rows(table, x, side, four);
  }

 private:
  // The rare part: rows that are scaled, or zero.
  __device__ void scale_rows(const ScanTable& table, float (&x)[2][8 * kChunks], int side,
                             int four) {
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
      if (side == s) zero = (lanes >> four & 15u) == 15u && table.usable;
    }
  }
};

}  // namespace coterie::cuda
