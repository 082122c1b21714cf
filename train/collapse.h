// SPDX-License-Identifier: MIT
// Heads whose clusters collapsed during training: such heads cost time and contribute nothing.
#pragma once

#include <string>
#include <vector>

#include "report/data.h"  // has_collapsed
#include "train/inspect.h"

namespace coterie::train {

// One line for each group with such heads; heads are counted over the groups of a layer.
// "layer 1, heads 2 and 3, routing(...): one cluster holds 98 % of the tokens"
std::vector<std::string> collapse_warnings(const std::vector<GroupReport>& groups);

}  // namespace coterie::train
