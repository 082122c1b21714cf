// SPDX-License-Identifier: MIT
// Random problems of every mechanism: a pure function of a seed. The same generator serves the CPU,
// where problems are small enough for the specification, and GPUs, where they are larger.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "cases/cases.h"

namespace coterie::test {

enum class Form : std::uint8_t { cpu, gpu };

// The completed problem of a seed: mechanism (seed % 9), all of its parameters, sizes, type,
// layout, lengths, mask, scale, dropout and data.
cases::Case draw_case(std::uint64_t seed, Form form);

// Estimated cost of a pass: pairs of query and key, times the row width.
double work_of(const cases::Case& c);

// Cases that once made a kernel hang, and similar ones.
std::vector<cases::Case> known_hangs();

// One line: the spec and the words that cases::make_case reads.
std::string describe(const cases::Case& c);

// The number in an environment variable, or `otherwise` if it is not set.
std::uint64_t number_from(const char* variable, std::uint64_t otherwise);

}  // namespace coterie::test
