// SPDX-License-Identifier: MIT
// From a run-time element type to a compile-time one; the unsupported case throws.
#pragma once

#include "core/check.h"
#include "core/half.h"
#include "coterie/tensor.h"

namespace coterie {

// Calls body(TypeTag<float | double | Bf16 | F16>).
template <class Body>
decltype(auto) dispatch_floating(const char* op, DType dtype, Body&& body) {
  switch (dtype) {
    case DType::f32:
      return body(TypeTag<float>{});
    case DType::f64:
      return body(TypeTag<double>{});
    case DType::bf16:
      return body(TypeTag<Bf16>{});
    case DType::f16:
      return body(TypeTag<F16>{});
    default:
      fail(op, "expected an element type among f32, f64, bf16, f16; got ", dtype_name(dtype));
  }
}

// Calls body(TypeTag<float | double>): the type computed in for inputs of `dtype`.
template <class Body>
decltype(auto) dispatch_accumulator(DType dtype, Body&& body) {
  if (accumulator_dtype(dtype) == DType::f64) return body(TypeTag<double>{});
  return body(TypeTag<float>{});
}

}  // namespace coterie
