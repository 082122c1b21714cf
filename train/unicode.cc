// SPDX-License-Identifier: MIT
#include "train/unicode.h"

#include <unicode/uchar.h>
#include <unicode/utf8.h>

namespace coterie::train {

Character character_at(std::string_view text, std::size_t at) {
  constexpr std::size_t kLongest = 4;
  const std::string_view rest = text.substr(at, kLongest);
  const auto length = static_cast<std::int32_t>(rest.size());
  std::int32_t end = 0;
  UChar32 character = 0;
  U8_NEXT(rest.data(), end, length, character);
  if (character < 0) return {CharClass::other, 1};
  const std::uint32_t category = U_GET_GC_MASK(character);
  const CharClass kind = (category & U_GC_L_MASK) != 0     ? CharClass::letter
                         : (category & U_GC_N_MASK) != 0   ? CharClass::number
                         : u_isUWhiteSpace(character) != 0 ? CharClass::space
                                                           : CharClass::other;
  return {kind, static_cast<std::size_t>(end)};
}

}  // namespace coterie::train
