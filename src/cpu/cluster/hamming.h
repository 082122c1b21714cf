// SPDX-License-Identifier: MIT
// k-means of codes in Hamming distance.
#pragma once

#include <cstdint>
#include <vector>

#include "core/arena.h"

namespace coterie::cpu {

// One (item, head): `count` codes and their labels, `clusters` centroids.
struct CodeProblem {
  const std::uint64_t* codes = nullptr;
  std::int64_t count = 0;
  std::uint32_t stream = 0;  // selects the problem's random numbers
  std::uint64_t* centroids = nullptr;
  std::int32_t* labels = nullptr;
};

struct CodeKMeans {
  std::int64_t clusters = 0, iterations = 0, bits = 0;
  std::uint64_t seed = 0;
};

// Memory for the votes of every chunk, for `problems` problems of at most `rows` codes.
struct VoteBuffer {
  std::int64_t chunks = 0;        // per problem
  std::int32_t* votes = nullptr;  // problems x chunks x clusters x 64
  std::int32_t* sizes = nullptr;  // problems x chunks x clusters

  VoteBuffer(Arena& arena, std::int64_t problems, std::int64_t rows, std::int64_t clusters);
};

void hamming_kmeans(const CodeKMeans& params, const std::vector<CodeProblem>& problems,
                    VoteBuffer& buffer);

}  // namespace coterie::cpu
