// SPDX-License-Identifier: MIT
// Reasons why no kernel can run a call; "" where one can.
#pragma once

#include <cstdint>
#include <string>

#include "cuda/launch/dispatch.h"

namespace coterie::cuda {

inline std::string refuse_more_than(std::int64_t most, const char* what, std::int64_t got) {
  if (got <= most) return "";
  return "the CUDA kernels take at most " + std::to_string(most) + " " + what + "; got " +
         std::to_string(got);
}

inline std::string refuse_batches(std::int64_t batches) {
  return refuse_more_than(kMaxBlocks, "batch entries", batches);
}

inline std::string refuse_slots(std::int64_t slots) {
  return refuse_more_than(kMaxSlots, "members in the lists of a head", slots);
}

inline std::string refuse_lists(std::int64_t lists) {
  return refuse_more_than(kMaxLists, "lists and tiles of lists in all heads", lists);
}

inline std::string refuse_type(DType dtype) {
  if (supports(dtype)) return "";
  return std::string("the CUDA kernels take f32, bf16 and f16, not ") + dtype_name(dtype);
}

inline std::string refuse_width(std::int64_t width) {
  if (width <= kMaxHeadDim) return "";
  return "the CUDA kernels take rows of at most " + std::to_string(kMaxHeadDim) +
         " elements; got " + std::to_string(width);
}

}  // namespace coterie::cuda
