// SPDX-License-Identifier: MIT
// Selections of any size by their own rule: whole where that is quick (labels in range, lists that
// ascend, orders that group), by samples where scores must be computed again.
#pragma once

#include <string>
#include <vector>

#include "cases/problem.h"

namespace coterie::test {

// "" or what is wrong. `selection`: the first tensors of `saved`, in host memory. Of clusters of
// queries only the form is checked, for labels alone do not tell which centroids they are near to.
std::string check_selection(const cases::Problem& problem, const std::vector<TensorView>& selection,
                            std::uint64_t seed);

}  // namespace coterie::test
