// SPDX-License-Identifier: MIT
// Correctness before speed: every attention against the executable specification.
#pragma once

#include <string>
#include <vector>

#include "bench/attention.h"

namespace coterie::bench {

// Relative error of a result against the specification in double, in the Frobenius norm, for the
// selection that the attention made.
struct Check {
  std::string attention, tensor;  // "i-clustered(clusters=100)", "dq"
  double error = 0, bound = 0;

  bool passed() const { return error <= bound; }  // NaN does not pass
};

// Checks output and gradients of all entries on a short version of the problem (some 200 tokens).
std::vector<Check> gate(const std::vector<Entry>& entries, const Problem& problem,
                        const Progress& progress = {});

// Throws std::runtime_error that names the failed checks, unless all passed.
void refuse_wrong(const std::vector<Check>& checks);

}  // namespace coterie::bench
