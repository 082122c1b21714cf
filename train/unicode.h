// SPDX-License-Identifier: MIT
// Characters of UTF-8 text, their Unicode classes and forms, by ICU; no_unicode.cc replaces
// unicode.cc in builds without it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
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

// A code point and its length in bytes. A byte that is not part of valid UTF-8 is U+FFFD.
struct CodePoint {
  char32_t value = 0;
  std::size_t bytes = 0;
};
CodePoint code_point_at(std::string_view text, std::size_t at);
void append_utf8(char32_t c, std::string& text);

bool is_white_space(char32_t c);  // the property White_Space
char32_t lower_case(char32_t c);  // the simple mapping
// Categories P*, Mn, and Cc, Cf and Co as of Unicode 8, whose tables BERT's tokenizer has in
// Hugging Face's library `tokenizers`: no for characters that were added later.
bool is_punctuation(char32_t c);
bool is_nonspacing_mark(char32_t c);
bool is_control(char32_t c);
std::u32string decomposed(char32_t c);  // canonically, as in NFD

}  // namespace coterie::train
