// SPDX-License-Identifier: MIT
// Takes the place of unicode.cc in a build without ICU.
#include "coterie/error.h"
#include "train/unicode.h"

namespace coterie::train {
namespace {

[[noreturn]] void refuse() {
  throw Error(
      "[tokenizer] this program was built without ICU, which the tokenizer needs: install "
      "libicu-dev (scripts/setup does) and build again");
}

}  // namespace

Character character_at(std::string_view /*text*/, std::size_t /*at*/) { refuse(); }
CodePoint code_point_at(std::string_view /*text*/, std::size_t /*at*/) { refuse(); }
void append_utf8(char32_t /*c*/, std::string& /*text*/) { refuse(); }
bool is_white_space(char32_t /*c*/) { refuse(); }
bool is_punctuation(char32_t /*c*/) { refuse(); }
bool is_nonspacing_mark(char32_t /*c*/) { refuse(); }
bool is_control(char32_t /*c*/) { refuse(); }
char32_t lower_case(char32_t /*c*/) { refuse(); }
std::u32string decomposed(char32_t /*c*/) { refuse(); }

}  // namespace coterie::train
