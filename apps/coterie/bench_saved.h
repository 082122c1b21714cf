// SPDX-License-Identifier: MIT
// Queries, keys and values that a model left in a file.
#pragma once

#include <string>

#include "bench/attention.h"

namespace coterie::cli {

// Reads q, k and v of a safetensors file into the problem, whose shape becomes theirs. Throws Error
// when they are not there, not floating-point or do not fit each other.
void use_saved_rows(const std::string& path, bench::Problem& problem);

}  // namespace coterie::cli
