// SPDX-License-Identifier: MIT
// Kernels of the table (kernels.h) that are in separate files, in the namespace of COTERIE_ISA.
#pragma once

#include "cpu/kernels/kernels.h"

namespace coterie::cpu::COTERIE_ISA {

template <class T>
void multiply(const Product<T>& product);

extern const PairKernels kPairs;  // only with __AVX512BF16__

void nearest_code(const std::uint64_t* codes, std::int64_t count, const std::uint64_t* centroids,
                  std::int64_t num_centroids, std::int32_t* labels);
void vote(const std::uint64_t* codes, const std::int32_t* labels, std::int64_t count,
          std::int32_t* votes, std::int32_t* sizes);

}  // namespace coterie::cpu::COTERIE_ISA
