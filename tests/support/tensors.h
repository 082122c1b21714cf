// SPDX-License-Identifier: MIT
// Tensors of given, random or small integer values, for tests.
#pragma once

#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "coterie/attention.h"
#include "coterie/error.h"
#include "coterie/random.h"
#include "coterie/tensor.h"

namespace coterie::test {

using Shape = std::vector<std::int64_t>;

inline HostTensor tensor_of(DType dtype, const Shape& sizes, const std::vector<double>& values) {
  HostTensor tensor(dtype, sizes);
  write_values(tensor, values);
  return tensor;
}

inline HostTensor ints(const std::vector<double>& values) {
  return tensor_of(DType::i32, {static_cast<std::int64_t>(values.size())}, values);
}

// Standard normal numbers.
inline HostTensor normals(DType dtype, const Shape& sizes, std::uint64_t seed) {
  HostTensor tensor(dtype, sizes);
  const RandomStream stream{seed, RandomUse::data, 1000};
  fill(tensor,
       [&](std::int64_t i) { return random_normal(stream, static_cast<std::uint64_t>(i)); });
  return tensor;
}

// Integers in [-reach, reach]: sums of their products are exact and often equal.
inline HostTensor integers(DType dtype, const Shape& sizes, std::uint64_t seed, int reach = 2) {
  HostTensor tensor(dtype, sizes);
  const RandomStream stream{seed, RandomUse::data, 1001};
  const auto bound = static_cast<std::uint32_t>(2 * reach + 1);
  fill(tensor, [&](std::int64_t i) {
    return static_cast<double>(random_below(stream, static_cast<std::uint64_t>(i), bound)) - reach;
  });
  return tensor;
}

// Integers in [0, bound).
inline HostTensor labels_below(std::int64_t bound, const Shape& sizes, std::uint64_t seed) {
  HostTensor tensor(DType::i32, sizes);
  const RandomStream stream{seed, RandomUse::data, 1002};
  fill(tensor, [&](std::int64_t i) {
    return random_below(stream, static_cast<std::uint64_t>(i), static_cast<std::uint32_t>(bound));
  });
  return tensor;
}

inline Sequences padded(const TensorView& lengths) {
  Sequences sequences;
  sequences.lengths = lengths;
  return sequences;
}

inline Sequences packed(const TensorView& cu_seqlens) {
  Sequences sequences;
  sequences.cu_seqlens = cu_seqlens;
  return sequences;
}

// The message of the Error that a call throws; "" if it throws none.
template <class Call>
std::string error_of(const Call& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

}  // namespace coterie::test
