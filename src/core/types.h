// SPDX-License-Identifier: MIT
// Element types that C++ does not have, and types as values for generic lambdas. Conversions:
// core/half.h on the host, cuda/prim/element.cuh on the device.
#pragma once

#include <cstdint>

namespace coterie {

struct Bf16 {
  std::uint16_t bits;
};
struct F16 {
  std::uint16_t bits;
};

template <class T>
struct TypeTag {
  using type = T;
};

}  // namespace coterie
