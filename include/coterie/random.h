// SPDX-License-Identifier: MIT
// Counter-based random numbers (Philox 4x32-10, Salmon et al. 2011): every draw is a pure function
// of a key and a counter, so any thread, device or recomputation sees the same numbers.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define COTERIE_HOST_DEVICE __host__ __device__
#else
#define COTERIE_HOST_DEVICE
#endif

namespace coterie {

// Purpose of a stream. It is part of the counter, so different uses never share numbers.
enum class RandomUse : std::uint32_t {
  hash_plane = 1,
  hash_threshold = 2,
  initial_centroid = 3,
  empty_cluster = 4,
  key_pair = 5,
  lsh_rotation = 6,
  centroid_init = 7,
  data = 8,
  sample = 9,
  dropout = 10,
  cluster_dropout = 11,
  kmeans_start = 12,
  kmeans_draw = 13,
};

struct RandomBits {
  std::uint32_t word[4];
};

// Ten rounds of Philox 4x32.
COTERIE_HOST_DEVICE inline RandomBits philox(RandomBits counter, std::uint32_t key0,
                                             std::uint32_t key1) {
  for (int round = 0; round < 10; ++round) {
    const std::uint64_t product0 = 0xD2511F53ull * counter.word[0];
    const std::uint64_t product1 = 0xCD9E8D57ull * counter.word[2];
    counter = {{static_cast<std::uint32_t>(product1 >> 32) ^ counter.word[1] ^ key0,
                static_cast<std::uint32_t>(product1),
                static_cast<std::uint32_t>(product0 >> 32) ^ counter.word[3] ^ key1,
                static_cast<std::uint32_t>(product0)}};
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  return counter;
}

// The stream of (seed, use, problem). `problem` numbers the (item, head) or another unit with its
// own numbers. `at(index)` returns four words; index counts within the stream.
struct RandomStream {
  std::uint64_t seed = 0;
  RandomUse use = RandomUse::data;
  std::uint32_t problem = 0;

  COTERIE_HOST_DEVICE RandomBits at(std::uint64_t index) const {
    return philox({{static_cast<std::uint32_t>(index), static_cast<std::uint32_t>(index >> 32),
                    problem, static_cast<std::uint32_t>(use)}},
                  static_cast<std::uint32_t>(seed), static_cast<std::uint32_t>(seed >> 32));
  }
};

// 64 random bits.
COTERIE_HOST_DEVICE inline std::uint64_t random_u64(const RandomStream& stream,
                                                    std::uint64_t index) {
  const RandomBits bits = stream.at(index);
  return (static_cast<std::uint64_t>(bits.word[1]) << 32) | bits.word[0];
}

// A uniform integer in [0, bound), bound >= 1 (multiply-shift; the bias is below bound / 2^32).
COTERIE_HOST_DEVICE inline std::uint32_t random_below(const RandomStream& stream,
                                                      std::uint64_t index, std::uint32_t bound) {
  return static_cast<std::uint32_t>(
      (static_cast<std::uint64_t>(stream.at(index).word[0]) * bound) >> 32);
}

// Uniform in (0, 1), multiples of 2^-23 shifted by half a step: exact in float.
COTERIE_HOST_DEVICE inline double random_unit(std::uint32_t word) {
  return (static_cast<double>(word >> 9) + 0.5) * (1.0 / 8388608.0);
}

// Which part of a larger call a call is. Its streams have the numbers that its items and heads have
// in the larger call, so a call on some rows or heads of a batch draws what the call on all draws.
struct CallPart {
  std::int64_t first_item = 0;                 // number of its first item
  std::int64_t head_part = 0, head_parts = 1;  // its heads are this part of equal parts

  // The number of problem item * heads + head of this call.
  COTERIE_HOST_DEVICE std::uint32_t stream(std::int64_t problem, std::int64_t heads) const {
    if (first_item == 0 && head_parts == 1) return static_cast<std::uint32_t>(problem);
    const std::int64_t item = problem / heads;
    const std::int64_t whole_item = (first_item + item) * head_parts + head_part;
    return static_cast<std::uint32_t>(problem + (whole_item - item) * heads);
  }
};

// A standard normal number (Box-Muller in double).
double random_normal(const RandomStream& stream, std::uint64_t index);

// Image of `index` < n under a random permutation of [0, n), for draws without replacement. Needs
// no table: four Feistel rounds on the next even number of bits, repeated until below n.
COTERIE_HOST_DEVICE inline std::uint32_t random_permutation(const RandomStream& stream,
                                                            std::uint32_t index, std::uint32_t n) {
  int half = 1;
  while (half < 16 && (1ull << (2 * half)) < n) ++half;
  const std::uint32_t mask = (1u << half) - 1;
  do {
    std::uint32_t left = index >> half, right = index & mask;
    for (std::uint32_t round = 0; round < 4; ++round) {
      const std::uint32_t mixed =
          stream.at((static_cast<std::uint64_t>(round) << 32) | right).word[0];
      const std::uint32_t next = left ^ (mixed & mask);
      left = right;
      right = next;
    }
    index = (left << half) | right;
  } while (index >= n);
  return index;
}

}  // namespace coterie
