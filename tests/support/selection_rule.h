// SPDX-License-Identifier: MIT
// Checks selections of any size by their own rule: completely where that is fast (labels in range,
// ascending lists, grouping orders), by samples where scores must be recomputed.
#pragma once

#include <string>
#include <vector>

#include "cases/problem.h"

namespace coterie::test {

// Returns "" or a description of the error. `selection`: the first tensors of `saved`, in host
// memory. For clusters of queries only the form is checked, because the centroids are not saved.
std::string check_selection(const cases::Problem& problem, const std::vector<TensorView>& selection,
                            std::uint64_t seed);

}  // namespace coterie::test
