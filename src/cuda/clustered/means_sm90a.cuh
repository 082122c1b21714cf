// SPDX-License-Identifier: MIT
// Cluster means against tiles of keys by warpgroup products: tiles loaded ahead (KeyPipeline),
// means as left factors (GroupQueries), and the sums of their attention (MeanSums, MeanRows). The
// warps of a block load a share of every tile, or take tiles in turn, and wait for each other only
// through barriers in shared memory, a few tiles apart: `full` when a tile has arrived, `free` when
// all warps have read it. 4 to 6 stages of 64 keys, 8 KiB for each matrix of 64 columns.
#pragma once

#include <cstdint>

#include "cuda/clustered/centroid.cuh"
#include "cuda/prim/bands.cuh"
#include "cuda/prim/load.cuh"
#include "cuda/prim/softmax.cuh"
#include "cuda/prim/wgmma.cuh"

namespace coterie::cuda {

// load_tile for consecutive rows in a loop of products: unaligned rows are copied slowly, by few
// instructions, because more would cost the loop registers.
template <int kRows, int kThreads, class T>
__device__ __forceinline__ void stream_tile(const Tile<T, 64>& tile, const Rows<const T>& rows,
                                            std::int64_t first, int count) {
  constexpr int kChunks = Tile<T, 64>::kChunks, kStep = kThreads / kChunks;
  static_assert(kStep % 8 == 0 && kRows % kStep == 0, "steps of whole eights of rows");
  const int r = static_cast<int>(threadIdx.x) % kThreads / kChunks, chunk = threadIdx.x % kChunks;
  const int column = chunk * Tile<T, 64>::kVector;
  const std::uint32_t to = tile.chunk(r, chunk);
  if (!rows.aligned) {
#pragma unroll 1
    for (int step = 0; step < kRows; step += kStep) {
      const int left = r + step < count ? rows.width - column : 0;
      const T* row = rows.row(first + r + step) + column;
#pragma unroll 1
      for (int i = 0; i < Tile<T, 64>::kVector; ++i) {
        const T value = i < left ? row[i] : from_float<T>(0.0f);
        asm volatile("st.shared.b16 [%0], %1;" ::"r"(to + step * Tile<T, 64>::kRowBytes + 2 * i),
                     "h"(*reinterpret_cast<const unsigned short*>(&value))
                     : "memory");
      }
    }
    return;
  }
  const T* from = rows.row(first + r) + column;
#pragma unroll
  for (int step = 0; step < kRows; step += kStep) {
    const bool there = column < rows.width && r + step < count;
    cp_async16(to + step * Tile<T, 64>::kRowBytes, there ? from + step * rows.pitch : rows.data,
               there ? 16 : 0);
  }
}

// kMatrices: 1 for keys, 2 for keys and values. kAhead of the kStages tiles in shared memory are
// loaded before they are needed; a thread waits for its own share of a tile kReady tiles ahead.
// kTurns: groups of warps that load tiles in turn, so each of them loads less often.
template <class T, int kDim, int kMatrices, int kWarps, int kKeys = 64, int kTurns = 1>
struct KeyPipeline {
  static constexpr int kLoaders = kWarps / kTurns;
  static constexpr int kBands = kDim / 64;  // tiles of 128-byte rows side by side
  static constexpr int kBandBytes = kKeys * 128;
  static constexpr int kStageBytes = kMatrices * kBands * kBandBytes;
  static constexpr bool kLarge = kStageBytes > 16 * 1024;
  static constexpr int kStages = kLarge ? 4 : 6, kAhead = kLarge ? 2 : 4, kReady = kLarge ? 1 : 2;
  static constexpr int kPending = (kAhead - kReady) / kTurns;  // a warp's tiles after a published
  static constexpr int kBytes = kStages * kStageBytes + kStages * 16;

  std::uint32_t base;
  Rows<const T> rows[kMatrices];
  int total;  // tiles

  __device__ std::uint32_t full(int tile) const {
    return base + kStages * kStageBytes + tile % kStages * 8;
  }
  __device__ std::uint32_t free(int tile) const { return full(tile) + kStages * 8; }
  __device__ std::uint32_t tile(int number, int matrix) const {
    return base + number % kStages * kStageBytes + matrix * kBands * kBandBytes;
  }

  // Called by all threads, before a __syncthreads.
  __device__ void init() const {
    if (threadIdx.x > 0) return;  // threads with different addresses would be serialised
#pragma unroll
    for (int stage = 0; stage < kStages; ++stage) {
      mbarrier_init(full(stage), kLoaders * kWarpArrivals);
      mbarrier_init(free(stage), kWarps * kWarpArrivals);
    }
  }

  // Called after the last tile and a __syncthreads; init may follow.
  __device__ void close() const {
    if (threadIdx.x < 2 * kStages) mbarrier_invalidate(full(0) + threadIdx.x * 8);
  }

  // Whether this warp loads the tile.
  __device__ bool loads(int number) const {
    return kTurns == 1 ||
           __shfl_sync(~0u, static_cast<int>(threadIdx.x) / (32 * kLoaders), 0) == number % kTurns;
  }
  // Starts to load a tile of keys first .. end - 1, once all warps are done with its place.
  __device__ void fill(int number, std::int64_t first, std::int64_t end) const {
    if (!loads(number)) return;
    if (number < total) {
      if (number >= kStages) mbarrier_wait(free(number), (number / kStages - 1) & 1);
#pragma unroll
      for (int matrix = 0; matrix < kMatrices; ++matrix)
#pragma unroll
        for (int band = 0; band < kBands; ++band) {
          Rows<const T> columns = rows[matrix];
          columns.data += band * 64;
          columns.width -= band * 64;
          stream_tile<kKeys, kLoaders * 32>(Tile<T, 64>{tile(number, matrix) + band * kBandBytes},
                                            columns, first, static_cast<int>(end - first));
        }
    }
    cp_async_commit();
  }
  // Starts to load the first tiles; first(t) is the first key of tile t. publish_first waits.
  template <class First>
  __device__ void begin(const First& first, std::int64_t end) const {
#pragma unroll 1  // short code is fetched sooner
    for (int t = 0; t < kAhead; ++t) fill(t, first(t), end);
  }
  __device__ void publish_first() const {
    cp_async_wait<kPending>();
    fence_async_proxy();
    const int part = static_cast<int>(threadIdx.x) / 32 / kLoaders;
#pragma unroll
    for (int tile = 0; tile < kReady; ++tile)
      if (tile < total && tile % kTurns == part) mbarrier_arrive_warp(full(tile));
  }
  // Loads tiles ahead; called at the start of the work on tile `number`.
  template <class First>
  __device__ void advance(int number, const First& first, std::int64_t end) const {
    fill(number + kAhead, first(number + kAhead), end);
    publish(number + kReady);
  }
  // After fill(number + kAhead - kReady): this warp's share of the tile has arrived.
  __device__ void publish(int number) const {
    if (!loads(number)) return;
    cp_async_wait<kPending>();
    fence_async_proxy();
    if (number < total) mbarrier_arrive_warp(full(number));
  }
  __device__ void wait(int number) const { mbarrier_wait(full(number), number / kStages & 1); }
  // This warp has read the tile.
  __device__ void release(int number) const { mbarrier_arrive_warp(free(number)); }
};

// The means of a block's warpgroups, 64 each, as left factors: rounded, in shared memory.
template <class T, int kDim, int kGroups>
struct GroupQueries {
  static constexpr int kBand = kGroups * 64 * 128;  // bytes of 64 columns
  static constexpr int kBytes = kDim / 64 * kBand;
  std::uint32_t memory;

  // `first`: cluster of the block's first row. The caller synchronises the threads.
  __device__ GroupQueries(std::uint32_t base, const CentroidQueries& queries, int item, int head,
                          int first)
      // The shuffle tells the compiler that the address is uniform in a warp.
      : memory(base + __shfl_sync(~0u, threadIdx.x / kWarpgroup, 0) * (64 * 128)) {
#pragma unroll
    for (int band = 0; band < kDim / 64; ++band)
      load_centroids<kGroups * 64, kGroups * kWarpgroup>(Tile<T, 64>{base + band * kBand}, queries,
                                                         item, head, first, band * 64);
    fence_async_proxy();
  }
  // Starts s = Q Kᵀ for this warpgroup's means and 64 keys.
  __device__ void scores(float (&s)[32], std::uint32_t keys) const {
    const std::uint64_t first_q = matrix_descriptor(memory), first_k = matrix_descriptor(keys);
#pragma unroll
    for (int d = 0; d < kDim / 16; ++d) {
      const std::uint64_t q = descriptor_behind(first_q, d / 4 * kBand + d % 4 * 32);
      const std::uint64_t k = descriptor_behind(first_k, d / 4 * (64 * 128) + d % 4 * 32);
      wgmma_step<T, 0>(d, s, q, k);
    }
  }
};

// Attention of a warpgroup's 64 means over tiles of 64 keys, two rows per thread: the sums of
// weights times values.
template <class T, int kDim>
struct MeanSums {
  float out[kDim / 64][32] = {};

  // Rescales a row for another shift.
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
  // Writes rows row and row + 8 of the partial results, if `rows` more exist. `sum` and `mass` are
  // those of this lane.
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

// Adds the state of the softmax. Shifts are whole numbers: weights that were rounded under another
// shift differ only by a power of two.
template <class T, int kDim>
struct MeanRows : MeanSums<T, kDim> {
  float shift[2] = {-INFINITY, -INFINITY};
  float sum[2] = {};  // of this lane's weights

  // The largest of the four scores of every 16 keys, for both rows.
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
