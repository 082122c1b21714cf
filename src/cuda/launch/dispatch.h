// SPDX-License-Identifier: MIT
// The element types, head sizes and counts that the CUDA kernels support, and the dispatch to them.
#pragma once

#include <cstdint>
#include <type_traits>

#include "core/types.h"
#include "coterie/view.h"
#include "cuda/launch/fail.h"

namespace coterie::cuda {

constexpr int kMaxHeadDim = 128;
constexpr int kMaxTopKeys = 128;
// Rows of a sequence times the 32 lanes or vectors of a row are counted in 32 bits.
constexpr std::int64_t kMaxRows = (std::int64_t{1} << 26) - 1;
constexpr std::int64_t kMaxSlots = std::int64_t{1} << 30;  // as are slots of a head's lists
constexpr std::int64_t kMaxLists = std::int64_t{1} << 30;  // and all lists, with their tiles
constexpr std::int64_t kMaxBlocks = 65535;                 // along y and z of a grid

constexpr bool supports(DType dtype) {
  return dtype == DType::f32 || dtype == DType::bf16 || dtype == DType::f16;
}

// Calls body(TypeTag<float | Bf16 | F16>).
template <class Body>
decltype(auto) dispatch_element(const char* op, DType dtype, Body&& body) {
  switch (dtype) {
    case DType::f32:
      return body(TypeTag<float>{});
    case DType::bf16:
      return body(TypeTag<Bf16>{});
    case DType::f16:
      return body(TypeTag<F16>{});
    default:
      fail_element(op, dtype);
  }
}

// Calls body(std::integral_constant<int, P>) with P = 64 or 128, the smallest that fits a row; rows
// are padded inside the tiles.
template <class Body>
decltype(auto) dispatch_head_dim(const char* op, std::int64_t head_dim, Body&& body) {
  if (head_dim <= 64) return body(std::integral_constant<int, 64>{});
  if (head_dim <= 128) return body(std::integral_constant<int, 128>{});
  fail_more_than(op, kMaxHeadDim, "elements of a row", head_dim);
}

}  // namespace coterie::cuda
