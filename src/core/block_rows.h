// SPDX-License-Identifier: MIT
// Column sums of the block's steps (coterie/block.h): slices of rows are summed one after the
// other, then the slices. How rows are cut depends on the shape alone, so bits do not depend on
// the machine.
#pragma once

#include <cstdint>

namespace coterie {

constexpr std::int64_t kNormSlices = 264;   // of add_norm_backward
constexpr std::int64_t kGeluBlocks = 1056;  // of bias_gelu_backward, over rows and columns
constexpr std::int64_t kGeluColumns = 256;  // of one block
constexpr std::int64_t kWarpsOfSlice = 8;   // rows of a slice are dealt to warps in turn

inline std::int64_t norm_slices(std::int64_t rows) {
  const std::int64_t most = (rows + kWarpsOfSlice - 1) / kWarpsOfSlice;
  return most < kNormSlices ? most : kNormSlices;
}

inline std::int64_t gelu_slices(std::int64_t rows, std::int64_t columns) {
  const std::int64_t across = (columns + kGeluColumns - 1) / kGeluColumns;
  const std::int64_t wanted = (kGeluBlocks + across - 1) / across;
  const std::int64_t most = (rows + kWarpsOfSlice - 1) / kWarpsOfSlice;
  return most < wanted ? most : wanted;
}

}  // namespace coterie
