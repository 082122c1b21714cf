// SPDX-License-Identifier: MIT
// From a run-time element type to a compile-time one.
#pragma once

#include "core/types.h"
#include "coterie/tensor.h"

namespace coterie {

// Calls body with a TypeTag of the accumulator type, float or double, of inputs of `dtype`.
template <class Body>
decltype(auto) dispatch_accumulator(DType dtype, Body&& body) {
  if (accumulator_dtype(dtype) == DType::f64) return body(TypeTag<double>{});
  return body(TypeTag<float>{});
}

}  // namespace coterie
