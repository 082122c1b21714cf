// SPDX-License-Identifier: MIT
// Inputs for a parser, a pure function of (seed, index): the examples as they are, then random
// bytes and mutated examples.
#pragma once

#include <cstdint>
#include <string>

#include "fuzz/fuzz.h"

namespace coterie::fuzz {

std::string make_input(const Target& target, std::uint64_t seed, std::uint64_t index);

}  // namespace coterie::fuzz
