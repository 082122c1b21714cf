// SPDX-License-Identifier: MIT
// 64 tokens against all clusters in CAST's mix (cast_mix_sm90a.cu): the softmax, whose weights for
// a token's own clusters are kept, and the sum of all others times their summaries.
#pragma once

#include <cstdint>

#include "cuda/device/bands.cuh"
#include "cuda/device/cast_gather.cuh"
#include "cuda/device/cast_rows.cuh"

namespace coterie::cuda {

// The tokens of a warpgroup, by warps of 16; a thread has two rows.
template <class T, int kDim>
struct MixClusters {
  using Memory = MixMemory<T, kDim>;
  using Loader = MixLoader<T, kDim>;
  const MixArgs<T>& args;
  const Memory memory;
  const Loader loader;
  RowSoftmax softmax[2];
  float factor;       // of the logits of row l % 16, to base 2 for a softmax
  float exponent[2];  // the same of this thread's rows, without the sign
  float out[kDim / 64][32];
  std::uint32_t queries, q[kDim / 16][4];
  int lane;
  // Of slot l of the warp's tokens, where there is one: row, cluster, and the weight once it is
  // known.
  int slot_row, slot_cluster;
  float slot_weight;

  __device__ MixClusters(const MixArgs<T>& all, const Memory& shared, const MixRun& run)
      : args(all),
        memory(shared),
        loader(all, shared, run),
        lane(static_cast<int>(threadIdx.x) % 32) {}

  __device__ void begin(int turn, float gate, int entry) {
    slot_cluster = entry >= 0 ? entry / args.shape.width : -1;
    slot_weight = 0.0f;
    queries = memory.queries(turn);
#pragma unroll
    for (int d = 0; d < kDim / 16; ++d)
      ldmatrix_x4(q[d],
                  row_chunk<kMixRows>(queries, loader.warp_row + lane % 16, 2 * d + lane / 16));
    if (args.shape.scale < 0.0f)
#pragma unroll
      for (int i = 0; i < kDim / 4; ++i) q[i / 4][i % 4] ^= 0x80008000u;
    const float soft = fmaxf(gate, 0.0f) + kLn2 * __log2f(1.0f + __expf(-fabsf(gate)));
    factor = args.shape.scale * kLog2e * (args.shape.gate_scale ? 1.0f + soft : 1.0f);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      exponent[half] = fmaxf(fabsf(__shfl_sync(~0u, factor, lane / 4 + 8 * half)), 1e-30f);
      softmax[half] = {};
    }
#pragma unroll
    for (int i = 0; i < kDim / 2; ++i) out[i / 32][i % 32] = 0.0f;
  }
  // Starts s = Q Sᵀ.
  __device__ void scores(float (&s)[32], int tile) const {
    row_products(s, q, Bands<T, kDim, kMixRows>{memory.clusters(tile, 0)}, 0);
  }
  // Starts out += P R.
  __device__ void add_products(const std::uint32_t (&p)[4][4], int tile) {
    cuda::add_products(out, p, Bands<T, kDim, kMixRows>{memory.clusters(tile, 1)}, 0);
  }
  __device__ void raise(const float (&s)[32]) {
    float factors[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float top[2] = {-INFINITY, -INFINITY};
#pragma unroll
      for (int i = 0; i < 16; ++i) top[i % 2] = fmaxf(top[i % 2], s[i / 2 * 4 + 2 * half + i % 2]);
      factors[half] = softmax[half].raise(quad_max(fmaxf(top[0], top[1])), exponent[half]);
#pragma unroll
      for (int i = 0; i < kDim / 4; ++i)
        out[i / 16][i % 16 / 2 * 4 + 2 * half + i % 2] *= factors[half];
    }
    slot_weight *= of_row(factors, slot_row);
  }
  // A row's shift from the first of its logits: the largest is rarely far above it.
  __device__ void set_shifts(const float (&s)[32]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float* few = s + 2 * half;
      const float top = fmaxf(fmaxf(few[0], few[1]), fmaxf(few[4], few[5]));
      softmax[half].shift = quad_max(top) * exponent[half];
    }
    const bool absent = softmax[0].shift == -INFINITY || softmax[1].shift == -INFINITY;
    if (__any_sync(~0u, absent)) raise(s);
  }
  // What the threads of a row have of two.
  __device__ static float of_row(const float (&values)[2], int row) {
    const float low = __shfl_sync(~0u, values[0], row % 8 * 4);
    const float high = __shfl_sync(~0u, values[1], row % 8 * 4);
    return row < 8 ? low : high;
  }
  // Weights as left factors. The shift stays while no weight is large; else they are computed
  // again.
  __device__ void weigh(std::uint32_t (&p)[4][4], float (&s)[32], int tile) {
    constexpr float kLarge = 8192.0f;  // two weights are far from the largest f16
    std::uint32_t low, high;
    load_shared64(low, high, memory.bits(tile));
    if ((low & high) != ~0u) {
      __syncwarp();  // keeps the compiler from doing this for all tiles
      const unsigned long long bits = static_cast<unsigned long long>(high) << 32 | low;
      const unsigned long long own = bits >> (lane % 4 * 2);
#pragma unroll
      for (int i = 0; i < 32; ++i)
        if (!(own >> (i / 4 * 8 + i % 2) & 1)) s[i] = -INFINITY;
    }
    if (tile == 0) set_shifts(s);
    float sums[2][2];
#pragma unroll 1
    for (int attempt = 0; attempt < 2; ++attempt) {
      sums[0][0] = sums[0][1] = sums[1][0] = sums[1][1] = 0.0f;
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        const int half = i % 2;
        const float low = exp2_approximate(fmaf(s[2 * i], exponent[half], -softmax[half].shift));
        const float high =
            exp2_approximate(fmaf(s[2 * i + 1], exponent[half], -softmax[half].shift));
        sums[half][0] += low;
        sums[half][1] += high;
        p[i / 4][i % 4] = pack2<T>(low, high);
      }
      const bool fine = sums[0][0] + sums[0][1] <= kLarge && sums[1][0] + sums[1][1] <= kLarge;
      if (attempt == 1 || __all_sync(~0u, fine)) break;
      raise(s);
    }
    softmax[0].sum += sums[0][0] + sums[0][1];
    softmax[1].sum += sums[1][0] + sums[1][1];
    if (__any_sync(~0u, slot_cluster / kMixRows == tile && slot_cluster >= 0))
      take_weights(p, tile);
  }
  // Takes the weights of the slots out of the others.
  __device__ void take_weights(std::uint32_t (&p)[4][4], int tile) {
    __syncwarp();
#pragma unroll
    for (int k = 0; k < 4; ++k) store_matrices(memory.weights(), 0, 2 * k, p[k]);
    __syncwarp();
    if (slot_cluster >= 0 && slot_cluster / kMixRows == tile) {
      const std::uint32_t place =
          Tile<T, 64>{memory.weights()}.address(slot_row, slot_cluster % kMixRows);
      std::uint16_t bits;
      asm volatile("ld.shared.b16 %0, [%1];" : "=h"(bits) : "r"(place) : "memory");
      asm volatile("st.shared.b16 [%0], %1;" ::"r"(place), "h"(std::uint16_t{0}) : "memory");
      slot_weight = to_float(reinterpret_cast<const T&>(bits));
    }
    __syncwarp();
#pragma unroll
    for (int k = 0; k < 4; ++k)
      ldmatrix_x4(p[k], row_chunk<16>(memory.weights(), lane % 16, 2 * k + lane / 16));
  }
  // 16 rows of a tile from `row` on, two chunks of each.
  __device__ void store_matrices(std::uint32_t tile, int row, int chunk,
                                 const std::uint32_t (&r)[4]) const {
    stmatrix_x4(row_chunk<kMixRows>(tile, row + lane % 16, chunk + lane / 16), r);
  }
  __device__ void sum_clusters() {
    float s[32];
    std::uint32_t p[4][4];
    wgmma_fence();
    scores(s, 0);
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_settle(s);
    int tile = 0;
#pragma unroll 1
    for (; tile + 1 < memory.tiles; ++tile) {
      weigh(p, s, tile);
      wgmma_fence();
      add_products(p, tile);
      scores(s, tile + 1);
      wgmma_commit();
      wgmma_wait<0>();
      wgmma_settle(s);
      settle_out();
    }
    weigh(p, s, tile);
    wgmma_fence();
    add_products(p, tile);
    wgmma_commit();
    wgmma_wait<0>();
    settle_out();
  }
  __device__ void settle_out() {
#pragma unroll
    for (int band = 0; band < kDim / 64; ++band) wgmma_settle(out[band]);
  }

  // The address of this lane's 16 bytes of a row, for ldmatrix of rows that the lanes know.
  template <int kRows>
  __device__ static std::uint32_t row_chunk(std::uint32_t tile, int row, int chunk) {
    return Tile<T, 64>{tile + chunk / 8 * (kRows * 128)}.chunk(row, chunk % 8);
  }
};

}  // namespace coterie::cuda
