// SPDX-License-Identifier: MIT
// The values of a problem's tensors: pure functions of case, seed and index.
#pragma once

#include <cstdint>
#include <functional>

#include "cases/cases.h"
#include "coterie/mechanism.h"
#include "coterie/random.h"
#include "coterie/tensor.h"

namespace coterie::cases {

// Numbers of a problem's random streams.
enum Tensor : std::uint32_t {
  kQ,
  kK,
  kV,
  kGradOut,
  kCentroids,
  kGate,
  kMask,
  kCentres,
  kLengths,
  kSpoilt,
  kTokens
};

// An element by its flat row-major index.
using Values = std::function<double(std::int64_t)>;

RandomStream stream(std::uint64_t seed, Tensor tensor);
Values normal_values(std::uint64_t seed, Tensor tensor);
Values integer_values(std::uint64_t seed, Tensor tensor);

// Values of q, k, v and the gradient of the output.
class TokenData {
 public:
  TokenData(const Case& c, const Mechanism& mechanism, std::uint64_t seed);
  Values values(Tensor tensor) const;

 private:
  Values centred_values(Tensor tensor) const;
  Values trained_values(Tensor tensor) const;

  Case case_;
  Mechanism mechanism_;
  std::uint64_t seed_;
};

// fill() of a (B, H, N, D) tensor, with several threads if there are many elements.
void fill_rows(const TensorView& tensor, const Values& values);

}  // namespace coterie::cases
