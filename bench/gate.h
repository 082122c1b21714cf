// SPDX-License-Identifier: MIT
// Correctness before speed: every attention against the executable specification.
#pragma once

#include <string>
#include <vector>

#include "bench/attention.h"

namespace coterie::bench {

// How far a result is from the specification in double, on the selection that the attention itself
// made: relative, in the Frobenius norm.
struct Check {
  std::string attention, tensor;  // "i-clustered(clusters=100)", "dq"
  double error = 0, bound = 0;

  bool passed() const { return error <= bound; }  // NaN does not pass
};

// Output and gradients of all entries on a short form of the problem (some hundred tokens).
std::vector<Check> gate(const std::vector<Entry>& entries, const Problem& problem,
                        const Progress& progress = {});

// Throws std::runtime_error, naming the worst, unless all passed.
void refuse_wrong(const std::vector<Check>& checks);

}  // namespace coterie::bench
