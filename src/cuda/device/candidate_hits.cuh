// SPDX-License-Identifier: MIT
// Hits of a warp in routing_candidates_sm90a.cu: scores of 16 tokens and 64 centroids that are not
// below the centroids' limits, on their way to the lists. Neighbouring scores are pairs. Each pair
// of a lane has a place in shared memory, and a bit says that a hit stands there; the pairs with
// hits of all lanes are collected in a queue, from which each lane takes one when there are 32.
#pragma once

#include <cstdint>

#include "cuda/device/tile.cuh"
#include "cuda/routing.h"

namespace coterie::cuda {

// Where the hits of a block go, in shared memory.
struct HitTarget {
  uint2* entries;              // of the block's first centroid
  int stride, capacity, rows;  // stride: between the centroids' entries
};

struct CandidateHits {
  static constexpr int kPairs = 16, kPushes = 2;  // of a push; pushes that are collected together
  static constexpr int kSlotBytes = kPushes * kPairs * 32 * 8, kQueueBytes = 64 * 16;
  static constexpr int kWarpBytes = kSlotBytes + kQueueBytes;

  // Addresses in shared memory: of this lane's first place, of the queue, and of all centroids'
  // limits and counts.
  std::uint32_t slots, queue, limits, counts;
  std::uint32_t mask = 0;
  int count = 0;  // in the queue

  __device__ CandidateHits(std::uint32_t memory, std::uint32_t all_limits, std::uint32_t all_counts)
      : slots(memory + static_cast<int>(threadIdx.x) % 32 * 8),
        queue(memory + kSlotBytes),
        limits(all_limits),
        counts(all_counts) {}

  // Takes scores of a warpgroup product with centroids from `column` on, as push `number`.
  __device__ __forceinline__ void push(const float (&d)[2 * kPairs], int column, int number) {
    const std::uint32_t at = limits + 4 * (column + static_cast<int>(threadIdx.x) % 4 * 2);
    const std::uint32_t to = slots + number * (kPairs * 256);
    float2 limit[kPairs / 2];
    std::uint32_t found = 0;
#pragma unroll
    for (int q = 0; q < kPairs / 2; ++q) limit[q] = load_pair(at + q * 32);
#pragma unroll
    for (int i = 0; i < kPairs; ++i)
      asm volatile(
          "{.reg .pred p;\n"
          "setp.ge.f32 p, %1, %3;\n"
          "setp.ge.or.f32 p, %2, %4, p;\n"
          "@p st.shared.v2.f32 [%5], {%1, %2};\n"
          "@p or.b32 %0, %0, %6;}"
          : "+r"(found)
          : "f"(d[2 * i]), "f"(d[2 * i + 1]), "f"(limit[i / 2].x), "f"(limit[i / 2].y),
            "r"(to + i * 256), "r"(1 << i));
    mask |= found << number * kPairs;
  }

  // The pairs of all pushes since the last time to the queue: rows from `first` on, which is the
  // warp's, centroids from `column` on.
  __device__ __forceinline__ void collect(const HitTarget& target, int first, int column) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    first += lane / 4;
    column += lane % 4 * 2;
    while (const unsigned lanes = __ballot_sync(~0u, mask != 0)) {
      const int i = __ffs(static_cast<int>(mask)) - 1;
      if (mask) {
        const float2 score = load_pair(slots + i * 256);
        const int place = count + __popc(lanes & ((1u << lane) - 1));
        asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(queue + 16 * place),
                     "r"(__float_as_uint(score.x)), "r"(__float_as_uint(score.y)),
                     "r"(first + i % 2 * 8), "r"(column + i / 2 * 8));
      }
      mask &= mask - 1;
      count += __popc(lanes);
      if (count >= 32) flush(target);
    }
  }

  // The last 32 pairs of the queue, or all, to the lists.
  __device__ __forceinline__ void flush(const HitTarget& target) {
    const volatile HitTarget& to = target;
    __syncwarp();
    const int place = count - 1 - static_cast<int>(threadIdx.x) % 32;
    if (place >= 0) {
      uint4 pair;
      asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(pair.x), "=r"(pair.y), "=r"(pair.z), "=r"(pair.w)
                   : "r"(queue + 16 * place));
      const float2 limit = load_pair(limits + 4 * pair.w);
      const float above[2] = {__uint_as_float(pair.x) - limit.x, __uint_as_float(pair.y) - limit.y};
      const int capacity = to.capacity;
      int at[2] = {capacity, capacity};
#pragma unroll
      for (int e = 0; e < 2; ++e)
        if (above[e] >= 0.0f && static_cast<int>(pair.z) < to.rows)
          asm volatile("atom.shared.add.u32 %0, [%1], 1;"
                       : "=r"(at[e])
                       : "r"(counts + 4 * pair.w + 4 * e));
      uint2* entries = to.entries + static_cast<std::int64_t>(pair.w) * to.stride;
#pragma unroll
      for (int e = 0; e < 2; ++e)
        if (at[e] < capacity)
          entries[at[e] + (e ? to.stride : 0)] = make_uint2(__float_as_uint(above[e]), pair.z);
    }
    __syncwarp();
    count = max(count - 32, 0);
  }

 private:
  __device__ static __forceinline__ float2 load_pair(std::uint32_t from) {
    float2 pair;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(pair.x), "=f"(pair.y) : "r"(from));
    return pair;
  }
};

}  // namespace coterie::cuda
