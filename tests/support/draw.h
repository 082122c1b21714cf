// SPDX-License-Identifier: MIT
// Random problems of every mechanism: a pure function of a seed. One generator for the CPU, where
// they are small enough for the specification, and for GPUs, where they are not.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "cases/cases.h"

namespace coterie::test {

enum class Form : std::uint8_t { cpu, gpu };

// The problem of a seed, completed: mechanism (seed % 9), all of its keys, sizes, type, layout,
// lengths, mask, scale and data.
cases::Case draw_case(std::uint64_t seed, Form form);

// Pairs of query and key that attention computes, times the width of rows: what a pass costs.
double work_of(const cases::Case& c);

// Cases that made a kernel hang, and others like them.
std::vector<cases::Case> known_hangs();

// In one line: the spec, and the words that cases::make_case reads.
std::string describe(const cases::Case& c);

// An environment variable's number, or another one.
std::uint64_t number_from(const char* variable, std::uint64_t otherwise);

}  // namespace coterie::test
