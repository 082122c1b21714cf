// SPDX-License-Identifier: MIT
// What the kernels of hash codes share (hash_planes.cu, hash.cu).
#pragma once

#include <cstdint>

#include "coterie/params.h"
#include "cuda/device/team.cuh"
#include "cuda/device/zero.cuh"

namespace coterie::cuda {

struct HashShape {
  ClusterShape shape;
  int bits, width;
  int splits, split_rows;  // of the sums over queries
  int blocks;              // of the hash kernel, per problem
  float *planes, *thresholds, *query_sums;
  std::uint64_t* codes;
  ZeroedWords zeroed;
  std::uint32_t zero;  // 0, unknown to the compiler: see RowFragments
};

// Planes and thresholds of params.method; sums of queries where thresholds need their mean.
void make_planes(const ClusteringParams& params, const AttentionCall& call, const HashShape& args,
                 cudaStream_t stream);

}  // namespace coterie::cuda
