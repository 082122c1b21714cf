// SPDX-License-Identifier: MIT
// The keys of a block of attend_improved_sm90a.cu, and thresholds from a sample of them.
#pragma once

#include <cstdint>

#include "cuda/device/select.cuh"
#include "cuda/device/team.cuh"

namespace coterie::cuda {

constexpr int kPartKeys = 64;       // of a tile
constexpr int kGroupMaxima = 32;    // of a row in each part: 8 for each of the lanes that share it
constexpr int kLeastSample = 1024;  // keys of a part's sample, if it has as many
constexpr int kCloseEnough = 8;     // thresholds may leave so many more than wanted

// The keys of one block: whole tiles but for the end, and a sample of them in equal segments.
struct KeyPart {
  int begin, end;
  int segments, each, stride,
      apart;  // tiles sampled in a segment, their and the segments' distance

  __device__ KeyPart(int keys, const Team& team) {
    const int bits = __ffs(team.size) - 1;  // the size is a power of two
    const int own = static_cast<int>(
        (static_cast<unsigned>(keys) + (kPartKeys << bits) - 1) / kPartKeys >> bits);
    const auto clamped = [&](std::int64_t part) {
      return static_cast<int>(min(part * own * kPartKeys, static_cast<std::int64_t>(keys)));
    };
    begin = clamped(team.rank);
    end = clamped(team.rank + 1);
    segments = kSelectParts >> bits;
    apart = (end - begin) / kPartKeys * team.size / kSelectParts;
    each = min(apart, max(apart / kSampleShare, kLeastSample / kPartKeys));
    stride = apart / max(each, 1);
  }
  __device__ int tiles() const { return (end - begin + kPartKeys - 1) / kPartKeys; }
  __device__ int key(int tile) const { return begin + tile * kPartKeys; }
  __device__ int sample_key(int tile) const {
    if (segments == 1) return key(tile * stride);
    return key(tile / max(each, 1) * apart + tile % max(each, 1) * stride);
  }
};

// A value that about `rank` of the warp's values of each row reach: at least as many, and not many
// more if they differ.
template <int kRows, int kValues>
__device__ __forceinline__ void ranked_values(const std::uint32_t (&values)[kRows][kValues],
                                              int rank, std::uint32_t (&found)[kRows]) {
  std::uint32_t high[kRows];  // fewer reach it
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    std::uint32_t least = ~0u, most = 0;
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      least = min(least, values[r][i]);
      most = max(most, values[r][i]);
    }
    found[r] = __reduce_min_sync(~0u, least);
    high[r] = __reduce_max_sync(~0u, most) + 1;
  }
  bool open = true;
#pragma unroll 1
  while (open) {
    open = false;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const std::uint32_t probe = found[r] + (high[r] - found[r]) / 2;
      int count = 0;
#pragma unroll
      for (int i = 0; i < kValues; ++i) count_reached(count, values[r][i], probe);
      count = __reduce_add_sync(~0u, count);
      if (count >= rank)
        found[r] = probe;
      else
        high[r] = probe;
      if (count >= rank && count <= rank + kCloseEnough) high[r] = probe + 1;
      open |= high[r] - found[r] > 1;
    }
  }
}

}  // namespace coterie::cuda
