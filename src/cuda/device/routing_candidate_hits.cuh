// SPDX-License-Identifier: MIT
// Hits of a warp in routing_candidates_sm90a.cu: scores of 16 tokens and 64 centroids that are not
// below the centroids' limits, on their way to the lists. Products start with the negative limits,
// so a hit is a number without a sign. Four scores of a lane, of two tokens and two neighbouring
// centroids, are looked at together; fours with hits go to a queue of the warp, from which each
// lane takes one when there are 32. Hits are uneven: some tokens have many.
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
  static constexpr int kFours = 8;                // of a lane and step
  static constexpr int kRoom = 32 * kFours + 32;  // fours in the queue
  static constexpr int kWarpBytes = kRoom * (16 + 4);
  static constexpr int kColumnBits = 8;  // of a four's name, rows are the others

  // Addresses in shared memory: of the queue, of all centroids' negative limits, two neighbours
  // twice, and of their counts.
  std::uint32_t queue, limits, counts;
  std::uint32_t before;  // lanes
  int count = 0;         // in the queue

  __device__ CandidateHits(std::uint32_t memory, std::uint32_t all_limits, std::uint32_t all_counts)
      : queue(memory),
        limits(all_limits),
        counts(all_counts),
        before((1u << threadIdx.x % 32) - 1) {}

  // What products with centroids from `column` on are added to.
  __device__ __forceinline__ void begin(float (&d)[4 * kFours], int column) const {
    const std::uint32_t at = limits + 8 * column + static_cast<int>(threadIdx.x) % 4 * 16;
#pragma unroll
    for (int i = 0; i < kFours; ++i)
      asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                   : "=f"(d[4 * i]), "=f"(d[4 * i + 1]), "=f"(d[4 * i + 2]), "=f"(d[4 * i + 3])
                   : "r"(at + i * 64));
  }

  // Takes what became of it to the queue, of which fewer than 32 places are taken: rows from
  // `first` on, which is the warp's, centroids from `column` on.
  __device__ __forceinline__ void push(const float (&d)[4 * kFours], int first, int column) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const std::uint32_t name = (first + lane / 4) << kColumnBits | (column + lane % 4 * 2);
#pragma unroll
    for (int i = 0; i < kFours; ++i)
      asm volatile(
          "{.reg .pred p, q;\n.reg .b32 t, u, votes;\n"
          "setp.ne.b32 q, 0, 0;\n"
          "lop3.b32 t, %1, %2, %3, 0x80;\n"
          "lop3.or.b32 t|p, t, %4, 0x80000000, 0x80, q;\n"  // no hit
          "vote.sync.ballot.b32 votes, !p, 0xffffffff;\n"
          "and.b32 t, votes, %7;\n"
          "popc.b32 t, t;\n"
          "add.s32 t, t, %0;\n"
          "mad.lo.u32 u, t, 16, %5;\n"
          "@!p st.shared.v4.b32 [u], {%1, %2, %3, %4};\n"
          "mad.lo.u32 u, t, 4, %5;\n"
          "@!p st.shared.b32 [u + %8], %6;\n"
          "popc.b32 t, votes;\n"
          "add.s32 %0, %0, t;}"
          : "+r"(count)
          : "r"(__float_as_uint(d[4 * i])), "r"(__float_as_uint(d[4 * i + 1])),
            "r"(__float_as_uint(d[4 * i + 2])), "r"(__float_as_uint(d[4 * i + 3])), "r"(queue),
            "r"(name + 8 * i), "r"(before), "n"(kRoom * 16)
          : "memory");
  }

  // The last 32 fours of the queue, or all, to the lists.
  __device__ __forceinline__ void flush(const HitTarget& target) {
    const volatile HitTarget& to = target;
    __syncwarp();
    const int place = count - 1 - static_cast<int>(threadIdx.x) % 32;
    if (place >= 0) {
      float above[4];
      std::uint32_t name;
      asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                   : "=f"(above[0]), "=f"(above[1]), "=f"(above[2]), "=f"(above[3])
                   : "r"(queue + 16 * place));
      asm volatile("ld.shared.b32 %0, [%1];" : "=r"(name) : "r"(queue + 4 * place + kRoom * 16));
      const int capacity = to.capacity, rows = to.rows, stride = to.stride;
      const auto row = static_cast<int>(name >> kColumnBits);
      const auto column = static_cast<int>(name & ((1 << kColumnBits) - 1));
      int at[4] = {capacity, capacity, capacity, capacity};
#pragma unroll
      for (int e = 0; e < 4; ++e)
        asm volatile(
            "{.reg .pred p;\n"
            "setp.lt.s32 p, %2, %3;\n"
            "setp.ge.and.f32 p, %1, 0f00000000, p;\n"
            "@p atom.shared.add.u32 %0, [%4], 1;}"
            : "+r"(at[e])
            : "f"(above[e]), "r"(row + e / 2 * 8), "r"(rows), "r"(counts + 4 * column + e % 2 * 4)
            : "memory");
      uint2* entries = to.entries;
#pragma unroll
      for (int e = 0; e < 4; ++e)
        if (at[e] < capacity)
          entries[(column + e % 2) * stride + at[e]] =
              make_uint2(__float_as_uint(above[e]), row + e / 2 * 8);
    }
    __syncwarp();
    count = max(count - 32, 0);
  }
};

}  // namespace coterie::cuda
