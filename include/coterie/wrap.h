// SPDX-License-Identifier: MIT
// Help texts for terminals of 80 columns.
#pragma once

#include <cstddef>
#include <string>

namespace coterie {

// Adds words and a line break to `text`: from column `indent` of its last line on, or of a new line
// if that one is longer, in lines of up to 80 columns.
void append_wrapped(std::string& text, const std::string& words, std::size_t indent);

}  // namespace coterie
