// SPDX-License-Identifier: MIT
// A warpgroup's part of CAST's mix (cast_mix_sm90a.cu): the slots of its tokens, the outputs, and
// the walk over tiles.
#pragma once

#include <cstdint>

#include "cuda/device/cast_clusters.cuh"

namespace coterie::cuda {

template <class T, int kDim>
struct MixTokens : MixClusters<T, kDim> {
  using Base = MixClusters<T, kDim>;
  using Base::args;
  using Base::lane;
  using Base::loader;
  using Base::memory;
  using Base::out;
  using Base::queries;
  using Base::slot_row;
  using Base::slot_weight;
  using Base::softmax;
  using typename Base::Loader;
  using typename Base::Memory;

  __device__ MixTokens(const MixArgs<T>& all, const Memory& shared, const MixRun& run)
      : Base(all, shared, run) {}

  // Weights of 16 slots as a left factor, one in each column; lane i has weight and row of slot
  // i % 16.
  __device__ FragmentA<T> spread(float weight, int row) const {
    const T rounded = from_float<T>(weight);
    const std::uint32_t own =
        static_cast<std::uint32_t>(reinterpret_cast<const std::uint16_t&>(rounded)) << 16 | row;
    FragmentA<T> a;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const std::uint32_t even = __shfl_sync(~0u, own, lane % 4 * 2 + 8 * i);
      const std::uint32_t odd = __shfl_sync(~0u, own, lane % 4 * 2 + 1 + 8 * i);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const std::uint32_t at = lane / 4 + 8 * half;
        a.r[2 * i + half] =
            ((even & 15u) == at ? even >> 16 : 0u) | ((odd & 15u) == at ? odd & 0xffff0000u : 0u);
      }
    }
    return a;
  }
  // Adds weights times rows, of which rows(d) are columns 16 d and on.
  template <class Values>
  __device__ void add_rows(const FragmentA<T>& weights, const Values& rows) {
#pragma unroll
    for (int d = 0; d < kDim / 16; ++d) {
      Accumulator sums;
      float* to = out[d / 4] + d % 4 * 8;
#pragma unroll
      for (int i = 0; i < 8; ++i) sums[i / 4][i % 4] = to[i];
      multiply_add(sums, weights, rows(d));
#pragma unroll
      for (int i = 0; i < 8; ++i) to[i] = sums[i / 4][i % 4];
    }
  }
  // What the tokens' own clusters give them.
  __device__ void sum_slots(const typename Loader::Range& range) {
    const int here = min(range.count, Memory::kSlots);
#pragma unroll 1
    for (int slot = 0; slot < here; slot += 16) {
      const int from = slot + lane % 16, last = min(from, here - 1);
      const float weight = __shfl_sync(~0u, slot_weight, from);
      const FragmentA<T> weights = spread(weight, __shfl_sync(~0u, slot_row, from));
      add_rows(weights, [&](int d) {
        FragmentB<T> b;
        ldmatrix_x4_trans(
            b.r, Base::template row_chunk<Memory::kSlots>(memory.inner(), last, 2 * d + lane / 16));
        return b;
      });
    }
    if (range.count > here) sum_rest(range, here);
  }
  // The weight of slot i % 16 by its row and cluster: products of gathered rows, of which the
  // diagonal counts.
  __device__ float weight_of(int row, int cluster) const {
    const std::uint32_t table = memory.clusters(cluster / kMixRows, 0);
    Accumulator product = {};
#pragma unroll
    for (int d = 0; d < kDim / 16; ++d) {
      FragmentA<T> a;
      std::uint32_t s[4];
      ldmatrix_x4(a.r, Base::template row_chunk<kMixRows>(queries, loader.warp_row + row,
                                                          2 * d + lane / 16));
      ldmatrix_x4(s,
                  Base::template row_chunk<kMixRows>(table, cluster % kMixRows, 2 * d + lane / 16));
      const FragmentB<T> b{{s[0], s[2], s[1], s[3]}};
      multiply_add(product, a, b);
    }
    // Lane 4 r + r / 2 has the elements of rows r and r + 8.
    const bool odd = lane / 4 % 2;
    const int from = lane % 8 * 4 + lane % 8 / 2;
    const float low = __shfl_sync(~0u, odd ? product[0][1] : product[0][0], from);
    const float high = __shfl_sync(~0u, odd ? product[1][3] : product[1][2], from);
    const float shifts[2] = {softmax[0].shift, softmax[1].shift};
    return exp2_approximate(fmaf(lane % 16 < 8 ? low : high, __shfl_sync(~0u, this->factor, row),
                                 -Base::of_row(shifts, row)));
  }
  // Slots that have no room, straight from memory; their clusters' summaries are in the sums.
  __device__ __forceinline__ void sum_rest(const typename Loader::Range& range, int slot) {
    const int D = args.shape.D;
    const T* inner = loader.pointers.template get<const T*>(MixPointers::inner);
#pragma unroll 1
    for (; slot < range.count; slot += 16) {
      const int count = min(range.count - slot, 16);
      const int entry = loader.fetch_entry(range, slot + min(lane % 16, count - 1));
      const int row = loader.fetch_token(entry) % 16, cluster = entry / args.shape.width;
      const float weight = weight_of(row, cluster);
      FragmentA<T> weights = spread(lane % 16 < count ? weight : 0.0f, row);
      const T* rows[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int other = __shfl_sync(~0u, entry, lane % 4 * 2 + i % 2 + i / 2 * 8);
        rows[i] = inner + static_cast<std::int64_t>(other) * D;
      }
      add_rows(weights, [&](int d) {
        FragmentB<T> b;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int column = 16 * d + i / 2 * 8 + lane / 4;
          const auto element = [&](const T* from) {
            return column < D ? *reinterpret_cast<const std::uint16_t*>(from + column)
                              : std::uint16_t{0};
          };
          b.r[i] = element(rows[i % 2 * 2]) |
                   static_cast<std::uint32_t>(element(rows[i % 2 * 2 + 1])) << 16;
        }
        return b;
      });
#pragma unroll
      for (int i = 0; i < 4; ++i) weights.r[i] ^= 0x80008000u;
      const std::uint32_t table = memory.clusters(cluster / kMixRows, 1);
      add_rows(weights, [&](int d) {
        FragmentB<T> b;
        ldmatrix_x4_trans(
            b.r, Base::template row_chunk<kMixRows>(table, cluster % kMixRows, 2 * d + lane / 16));
        return b;
      });
    }
  }
  // Rows go through the queries' place, which this warp has read.
  __device__ void finish(int tile) {
    const int first = loader.first_row(tile), left = loader.length - first;
    float* lse = loader.pointers.template get<float*>(MixPointers::lse) + first + lane / 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float total = quad_sum(softmax[half].sum);
      float inverse = reciprocal_approximate(total);
      const float log2 = log2_approximate(total);
      if (!(total > 0.0f)) inverse = 0.0f;
      if (lane % 4 == 0 && lane / 4 + 8 * half < left)
        lse[8 * half] = (softmax[half].shift + log2) * kLn2;
#pragma unroll
      for (int j = 0; j < kDim / 4; ++j) out[j / 16][j % 16 / 2 * 4 + 2 * half + j % 2] *= inverse;
    }
#pragma unroll
    for (int d = 0; d < kDim / 16; ++d) {
      const float* eight = out[d / 4] + d % 4 * 8;
      const std::uint32_t words[4] = {pack2<T>(eight[0], eight[1]), pack2<T>(eight[2], eight[3]),
                                      pack2<T>(eight[4], eight[5]), pack2<T>(eight[6], eight[7])};
      this->store_matrices(queries, loader.warp_row, 2 * d, words);
    }
    __syncwarp();
    uint4 words[kDim / 16];
#pragma unroll
    for (int i = 0; i < kDim / 16; ++i) {
      const int band = i % (kDim / 64), row = i / (kDim / 64) * 4 + lane / 8;
      asm volatile(
          "ld.shared.v4.b32 {%0,%1,%2,%3}, [%4];"
          : "=r"(words[i].x), "=r"(words[i].y), "=r"(words[i].z), "=r"(words[i].w)
          : "r"(Tile<T, 64>{queries + band * Memory::kBand}.chunk(loader.warp_row + row, lane % 8))
          : "memory");
    }
    const auto pitch = static_cast<unsigned>(args.out.row * sizeof(T));
    char* to = loader.pointers.template get<char*>(MixPointers::out) + lane % 8 * 16 +
               static_cast<std::uint64_t>(pitch) * static_cast<unsigned>(first + lane / 8);
#pragma unroll
    for (int i = 0; i < kDim / 16; ++i) {
      const int band = i % (kDim / 64), row = i / (kDim / 64) * 4;
      if (row + lane / 8 < left && band * 64 + lane % 8 * 8 < args.shape.D)
        *reinterpret_cast<uint4*>(to + static_cast<std::uint64_t>(pitch) * row + band * 128) =
            words[i];
    }
    __syncwarp();
  }

  // The tiles that this warpgroup has, from `tile` on; clusters() waits until the clusters are
  // there.
  template <class Clusters>
  __device__ void work(int tile, const Clusters& clusters) {
    const int step = static_cast<int>(blockDim.x) / kWarpgroup;
    typename Loader::Range range = loader.range(loader.fetch_bounds(tile));
    typename Loader::Range next = loader.range(loader.fetch_bounds(tile + step));
    int bounds = loader.fetch_bounds(tile + 2 * step);
    int entry = loader.fetch_entry(range, lane), next_entry = loader.fetch_entry(next, lane);
    int token = loader.fetch_token(entry);
    float gate = loader.fetch_gate(tile);
    loader.copy_queries(0, tile);
    clusters();
#pragma unroll 1
    for (int turn = 0; tile < loader.end; tile += step, ++turn) {
      cp_async_wait<0>();
      __syncwarp();
      loader.copy_inner(range.count, entry);
      if (Memory::kQueries == 2) loader.copy_queries(turn + 1, tile + step);
      slot_row = token % 16;
      this->begin(turn, gate, lane < min(range.count, Memory::kSlots) ? entry : -1);
      const typename Loader::Range own = range;
      range = next;
      entry = next_entry;
      token = loader.fetch_token(entry);
      gate = loader.fetch_gate(tile + step);
      next = loader.range(bounds);
      next_entry = loader.fetch_entry(next, lane);
      bounds = loader.fetch_bounds(tile + 3 * step);
      this->sum_clusters();
      cp_async_wait<Memory::kQueries - 1>();
      __syncwarp();
      sum_slots(own);
      finish(tile);
      if (Memory::kQueries == 1) loader.copy_queries(turn + 1, tile + step);
    }
    cp_async_wait<0>();
  }
};

}  // namespace coterie::cuda
