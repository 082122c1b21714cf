// SPDX-License-Identifier: MIT
// Attention of 16 queries of a warp over keys and values in shared memory (attend_topk_fwd.cu).
//
// Lanes read rows of queries in pieces of 16 bytes. That deals columns to lanes in another order
// than the products do; keys are read from shared memory in the same way, and products do not care
// in which order depths are added.
#pragma once

#include <cstdint>

#include "cuda/device/load.cuh"
#include "cuda/device/mma.cuh"
#include "cuda/device/softmax.cuh"

namespace coterie::cuda {

constexpr int kTopKeys = 32;  // multiplied at a time

// Keys in shared memory, of which a lane reads the piece of 16 bytes that it holds of a query.
// Neighbouring rows lie in different halves of 128 bytes, so that 8 lanes meet no bank twice.
template <class T, int kDim>
struct TopKeyTile {
  static constexpr int kChunks = Tile<T, kDim>::kChunks;
  std::uint32_t base;

  __device__ std::uint32_t chunk(int row, int index) const {
    const int moved = kChunks % 8 == 0 ? index ^ (row & 1) << 2 : index;
    return base + row * Tile<T, kDim>::kRowBytes + moved * 16;
  }
  __device__ TopKeyTile below(int row) const { return {base + row * Tile<T, kDim>::kRowBytes}; }
  __device__ uint4 piece(int row, int index) const {
    uint4 words;
    asm volatile("ld.shared.v4.b32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
                 : "r"(chunk(row, index))
                 : "memory");
    return words;
  }
};

// Starts to copy the rows of a list of `topk` to shared memory, zeros up to a multiple of kTopKeys,
// which is not 0; returns how many there are. Where kAligned, pitches have 32 bits: an address is
// one instruction then. By all threads; the caller commits, waits and synchronises.
template <bool kAligned, class T, int kDim, int kBlockThreads>
__device__ __forceinline__ int gather(const TopKeyTile<T, kDim>& keys, const Tile<T, kDim>& values,
                                      const Rows<const T>& k, const Rows<const T>& v,
                                      const std::int32_t* top, int topk) {
  constexpr int kChunks = Tile<T, kDim>::kChunks;
  static_assert(kTopKeys * kChunks % kBlockThreads == 0, "lanes stay together for the shuffles");
  constexpr int kSteps = kTopKeys * kChunks / kBlockThreads;
  // All at once where it matters: others would be many instructions.
  constexpr int kUnrolled = !kAligned ? 1 : sizeof(T) == 4 ? 4 : kSteps;
  const int lane = threadIdx.x % 32;
  int count = 0;
#pragma unroll 1
  for (int first = 0; first == 0 || first < topk; first += kTopKeys) {
    const int own = first + lane < topk ? top[first + lane] : -1;
    count += __popc(__ballot_sync(~0u, own >= 0));
#pragma unroll kUnrolled
    for (int step = 0; step < kSteps; ++step) {
      const int number = step * kBlockThreads + static_cast<int>(threadIdx.x);
      const int r = number / kChunks, chunk = number % kChunks;
      const int column = chunk * Tile<T, kDim>::kVector, row = __shfl_sync(~0u, own, r);
      const bool there = row >= 0 && column < k.width;
      const auto place = static_cast<std::uint64_t>(max(row, 0));
      const std::uint32_t to_k = keys.chunk(first + r, chunk),
                          to_v = values.chunk(first + r, chunk);
      if constexpr (kAligned) {
        cp_async16(to_k, k.data + column + place * static_cast<unsigned>(k.pitch), there ? 16 : 0);
        cp_async16(to_v, v.data + column + place * static_cast<unsigned>(v.pitch), there ? 16 : 0);
      } else {
        const uint4 zero = make_uint4(0, 0, 0, 0);
        store_shared16(to_k, there ? load_chunk(k.row(row), column, k.width) : zero);
        store_shared16(to_v, there ? load_chunk(v.row(row), column, v.width) : zero);
      }
    }
  }
  return count;
}

// 16 queries of a warp in registers: lane l has pieces l % 4, l % 4 + 4, ... of rows l / 4 and
// l / 4 + 8.
template <class T, int kDim>
struct QueryRows {
  static constexpr int kPieces = Tile<T, kDim>::kChunks / 4;
  static constexpr int kVector = Tile<T, kDim>::kVector;
  int rows[2];  // numbers of the queries, -1 for none
  uint4 pieces[2][kPieces];

  __device__ void load(const Rows<const T>& from) {
    if (from.aligned)
      load_all<true>(from);
    else
      load_all<false>(from);
  }
  template <bool kAligned>
  __device__ __forceinline__ void load_all(const Rows<const T>& from) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const T* row = from.row(max(rows[half], 0));
#pragma unroll
      for (int i = 0; i < kPieces; ++i) {
        const int column = (4 * i + static_cast<int>(threadIdx.x) % 4) * kVector;
        const bool there = rows[half] >= 0 && column < from.width;
        pieces[half][i] = make_uint4(0, 0, 0, 0);
        if (kAligned && there)
          pieces[half][i] = __ldcs(reinterpret_cast<const uint4*>(row + column));
        if (!kAligned && there) pieces[half][i] = load_chunk(row, column, from.width);
      }
    }
  }
  // Step `step` of the depths in pieces i: two steps of 16-bit elements, one of fp32.
  __device__ FragmentA<T> fragment(int i, int step) const {
    FragmentA<T> a;
    const uint4 &low = pieces[0][i], &high = pieces[1][i];
    if constexpr (sizeof(T) == 2) {
      a.r[0] = step == 0 ? low.x : low.z;
      a.r[1] = step == 0 ? high.x : high.z;
      a.r[2] = step == 0 ? low.y : low.w;
      a.r[3] = step == 0 ? high.y : high.w;
    } else {
      a.r[0] = low.x;
      a.r[1] = high.x;
      a.r[2] = low.y;
      a.r[3] = high.y;
      a.r[4] = low.z;
      a.r[5] = high.z;
      a.r[6] = low.w;
      a.r[7] = high.w;
    }
    return a;
  }
};

// The right factors of the same steps: pieces of keys l / 4 and l / 4 + 8 of 16.
template <class T>
__device__ __forceinline__ FragmentB<T> key_fragment(const uint4& low, const uint4& high,
                                                     int step) {
  FragmentB<T> b;
  if constexpr (sizeof(T) == 2) {
    b.r[0] = step == 0 ? low.x : low.z;
    b.r[1] = step == 0 ? low.y : low.w;
    b.r[2] = step == 0 ? high.x : high.z;
    b.r[3] = step == 0 ? high.y : high.w;
  } else {
    const uint4* halves[] = {&low, &high};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      b.r[4 * half] = halves[half]->x;
      b.r[4 * half + 1] = halves[half]->y;
      b.r[4 * half + 2] = halves[half]->z;
      b.r[4 * half + 3] = halves[half]->w;
    }
  }
  return b;
}

// Attention of 16 queries of a warp over the cluster's top keys.
template <class T, int kDim>
struct TopKeyRows {
  Accumulator out[kDim / 16];
  float shift[2], sum[2];

  __device__ void clear() {
#pragma unroll
    for (int i = 0; i < kDim / 2; ++i) out[i / 8][i / 4 % 2][i % 4] = 0.0f;
#pragma unroll
    for (int half = 0; half < 2; ++half) shift[half] = -INFINITY, sum[half] = 0.0f;
  }

  // The weights of kTopKeys keys, of which the lane's two rows see the first left[], from their
  // scores. kStart: they are the first ones.
  template <bool kStart>
  __device__ __forceinline__ void weigh(Accumulator (&s)[2], const int (&left)[2], float exponent) {
#pragma unroll
    for (int i = 0; i < 16; ++i) s[i / 8][i / 4 % 2][i % 4] *= exponent;
    if (__any_sync(~0u, min(left[0], left[1]) < kTopKeys)) {
      __syncwarp();  // keeps the compiler from doing this where all are seen
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        const int key = i / 8 * 16 + i / 4 % 2 * 8 + threadIdx.x % 4 * 2 + i % 2;
        if (key >= left[i / 2 % 2]) s[i / 8][i / 4 % 2][i % 4] = -INFINITY;
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float four[4];
#pragma unroll
      for (int i = 0; i < 4; ++i)
        four[i] = fmaxf(s[i / 2][i % 2][2 * half], s[i / 2][i % 2][2 * half + 1]);
      float largest = quad_max(fmaxf(fmaxf(four[0], four[1]), fmaxf(four[2], four[3])));
      if (!kStart) largest = fmaxf(largest, shift[half]);
      if (largest == -INFINITY) largest = 0.0f;
      if (!kStart) {
        const float factor = exp2_approximate(shift[half] - largest);
        sum[half] *= factor;
#pragma unroll
        for (int i = 0; i < kDim / 4; ++i) out[i / 4][i / 2 % 2][2 * half + i % 2] *= factor;
      }
      shift[half] = largest;
      float part[4] = {};
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        float& score = s[i / 4][i / 2 % 2][2 * half + i % 2];
        score = exp2_approximate(score - largest);
        part[i % 4] += score;
      }
      const float total = (part[0] + part[1]) + (part[2] + part[3]);
      sum[half] = kStart ? total : sum[half] + total;
    }
  }

  template <bool kStart>
  __device__ __forceinline__ void attend(const QueryRows<T, kDim>& queries,
                                         const TopKeyTile<T, kDim>& keys,
                                         const Tile<T, kDim>& values, const int (&left)[2],
                                         float exponent) {
    constexpr int kSteps = sizeof(T) == 2 ? 2 : 1;
    const int lane = threadIdx.x % 32;
    Accumulator s[2];
#pragma unroll
    for (int i = 0; i < QueryRows<T, kDim>::kPieces; ++i)
#pragma unroll
      for (int b = 0; b < 2; ++b) {
        const uint4 low = keys.piece(16 * b + lane / 4, 4 * i + lane % 4);
        const uint4 high = keys.piece(16 * b + 8 + lane / 4, 4 * i + lane % 4);
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
          const FragmentB<T> k = key_fragment<T>(low, high, step);
          if (i == 0 && step == 0)
            multiply(s[b], queries.fragment(i, step), k);
          else
            multiply_add(s[b], queries.fragment(i, step), k);
        }
      }
    weigh<kStart>(s, left, exponent);
#pragma unroll
    for (int b = 0; b < 2; ++b) {
      FragmentA<T> p;
      to_fragment(p, s[b]);
#pragma unroll
      for (int d = 0; d < kDim / 16; ++d) {
        FragmentB<T> v;
        load_b_transposed(v, values, 16 * d, 16 * b);
        if (kStart && b == 0)
          multiply(out[d], p, v);
        else
          multiply_add(out[d], p, v);
      }
    }
  }
};

}  // namespace coterie::cuda
