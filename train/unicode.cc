// SPDX-License-Identifier: MIT
#include "train/unicode.h"

#include <unicode/uchar.h>
#include <unicode/unorm2.h>
#include <unicode/utf16.h>
#include <unicode/utf8.h>

#include "coterie/error.h"

namespace coterie::train {
namespace {

bool in_unicode_8(char32_t c, std::uint32_t categories) {
  const auto point = static_cast<UChar32>(c);
  if ((U_GET_GC_MASK(point) & categories) == 0) return false;
  UVersionInfo age;
  u_charAge(point, age);
  return age[0] <= 8;
}

}  // namespace

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

CodePoint code_point_at(std::string_view text, std::size_t at) {
  constexpr char32_t kReplacement = 0xFFFD;
  const std::string_view rest = text.substr(at, 4);
  std::int32_t used = 0;
  UChar32 point = 0;
  U8_NEXT(rest.data(), used, static_cast<std::int32_t>(rest.size()), point);
  if (point < 0) return {kReplacement, 1};
  return {static_cast<char32_t>(point), static_cast<std::size_t>(used)};
}

void append_utf8(char32_t c, std::string& text) {
  char bytes[4];
  std::int32_t used = 0;
  U8_APPEND_UNSAFE(bytes, used, static_cast<UChar32>(c));
  text.append(bytes, static_cast<std::size_t>(used));
}

bool is_white_space(char32_t c) { return u_isUWhiteSpace(static_cast<UChar32>(c)) != 0; }

bool is_punctuation(char32_t c) { return in_unicode_8(c, U_GC_P_MASK); }

bool is_nonspacing_mark(char32_t c) { return in_unicode_8(c, U_GC_MN_MASK); }

bool is_control(char32_t c) { return in_unicode_8(c, U_GC_CC_MASK | U_GC_CF_MASK | U_GC_CO_MASK); }

char32_t lower_case(char32_t c) {
  return static_cast<char32_t>(u_tolower(static_cast<UChar32>(c)));
}

std::u32string decomposed(char32_t c) {
  constexpr std::int32_t kLongest = 32;
  UChar units[kLongest];
  UErrorCode status = U_ZERO_ERROR;
  const UNormalizer2* const form = unorm2_getNFDInstance(&status);
  const std::int32_t count =
      unorm2_getDecomposition(form, static_cast<UChar32>(c), units, kLongest, &status);
  if (U_FAILURE(status)) throw Error(std::string("[unicode] ICU failed: ") + u_errorName(status));
  if (count < 0) return {c};
  std::u32string parts;
  for (std::int32_t at = 0; at < count;) {
    UChar32 part = 0;
    U16_NEXT(units, at, count, part);
    parts += static_cast<char32_t>(part);
  }
  return parts;
}

}  // namespace coterie::train
