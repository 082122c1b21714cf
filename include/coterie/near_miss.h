// SPDX-License-Identifier: MIT
// Suggestions for misspelled names in messages.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace coterie {

// "; did you mean \"full\"?" if one of `names` is nearly `text`, otherwise empty.
std::string near_miss(std::string_view text, const std::vector<std::string>& names);

}  // namespace coterie
