// SPDX-License-Identifier: MIT
// Lists of candidates for a top-k selection. A candidate is one 64-bit key, larger for a better
// score and, among equal scores, for a lower index; keys are distinct, so every cut is exact.
#pragma once

#include <cstdint>

namespace coterie::cuda {

struct alignas(8) Candidate {
  float score;
  int index;
};
using CandidateKey = unsigned long long;

// Unsigned integers in the order of the floats (without NaN).
__device__ __forceinline__ std::uint32_t ordered(float score) {
  const std::uint32_t bits = __float_as_uint(score);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
__device__ __forceinline__ float from_ordered(std::uint32_t value) {
  return __uint_as_float(value & 0x80000000u ? value & 0x7fffffffu : ~value);
}

__device__ __forceinline__ CandidateKey candidate_key(float score, int index) {
  return static_cast<CandidateKey>(ordered(score)) << 32 | ~static_cast<std::uint32_t>(index);
}
__device__ __forceinline__ CandidateKey candidate_key(const Candidate& candidate) {
  return candidate_key(candidate.score, candidate.index);
}
__device__ __forceinline__ float score_of(CandidateKey key) {
  return from_ordered(static_cast<std::uint32_t>(key >> 32));
}
__device__ __forceinline__ int index_of(CandidateKey key) {
  return static_cast<int>(~static_cast<std::uint32_t>(key));
}

// count += a > b or a >= b. The compiler would emit a copy, an addition and a select.
__device__ __forceinline__ void count_greater(int& count, std::uint32_t a, std::uint32_t b) {
  asm("{.reg .pred p;\nsetp.gt.u32 p, %1, %2;\n@p add.s32 %0, %0, 1;}"
      : "+r"(count)
      : "r"(a), "r"(b));
}
__device__ __forceinline__ void count_greater(int& count, CandidateKey a, CandidateKey b) {
  asm("{.reg .pred p;\nsetp.gt.u64 p, %1, %2;\n@p add.s32 %0, %0, 1;}"
      : "+r"(count)
      : "l"(a), "l"(b));
}
__device__ __forceinline__ void count_reached(int& count, std::uint32_t a, std::uint32_t b) {
  asm("{.reg .pred p;\nsetp.ge.u32 p, %1, %2;\n@p add.s32 %0, %0, 1;}"
      : "+r"(count)
      : "r"(a), "r"(b));
}

__device__ __forceinline__ CandidateKey warp_max(CandidateKey key) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) key = max(key, __shfl_xor_sync(~0u, key, step));
  return key;
}

// A threshold that at least `least` and at most `most` of the keys reach. for_each(visit) calls
// visit(key) for this lane's share of the keys; there are more than `most` keys. If keys are
// repeated there may be no such threshold; fewer than `least` keys then reach the result.
template <class ForEach>
__device__ CandidateKey find_cut(const ForEach& for_each, int least, int most) {
  CandidateKey largest = 0, smallest = 0;  // of the complements
  for_each([&](CandidateKey key) {
    largest = max(largest, key);
    smallest = max(smallest, ~key);
  });
  CandidateKey low = ~warp_max(smallest), high = warp_max(largest) + 1;  // too many; too few
  while (high - low > 1) {
    const CandidateKey middle = low + (high - low) / 2;
    int count = 0;
    for_each([&](CandidateKey key) { count += key >= middle; });
    count = __reduce_add_sync(~0u, count);
    if (count > most)
      low = middle;
    else if (count < least)
      high = middle;
    else
      return middle;
  }
  return high;
}

// Sorts the lanes' values in descending order over the lanes of the warp.
__device__ __forceinline__ float warp_sort_descending(float value) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int size = 2; size <= 32; size *= 2)
#pragma unroll
    for (int step = size / 2; step > 0; step /= 2) {
      const float other = __shfl_xor_sync(~0u, value, step);
      const bool larger =
          ((lane & step) == 0) == ((lane & size) == 0);  // this lane keeps the larger
      value = larger ? fmaxf(value, other) : fminf(value, other);
    }
  return value;
}

}  // namespace coterie::cuda
