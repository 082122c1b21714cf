// SPDX-License-Identifier: MIT
// Queries, keys and values of a model, saved in a file.
#pragma once

#include <string>

#include "bench/attention.h"

namespace coterie::cli {

// Reads q, k and v of a safetensors file into the problem and sets its shape accordingly. Throws
// Error if they are missing, not floating-point or of inconsistent shapes.
void use_saved_rows(const std::string& path, bench::Problem& problem);

}  // namespace coterie::cli
