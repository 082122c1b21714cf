// SPDX-License-Identifier: MIT
// Characters of UTF-8 text and their Unicode classes, by ICU; no_unicode.cc replaces unicode.cc in
// builds without it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace coterie::train {

enum class CharClass : std::uint8_t { letter, number, space, other };  // \p{L}, \p{N}, \s

struct Character {
  CharClass kind = CharClass::other;
  std::size_t bytes = 0;
};

// The character that begins at `at`, which is inside the text. A byte that is not part of valid
// UTF-8 is a character of class other.
Character character_at(std::string_view text, std::size_t at);

}  // namespace coterie::train
