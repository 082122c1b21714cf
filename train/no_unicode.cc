// SPDX-License-Identifier: MIT
// Takes the place of unicode.cc in a build without ICU.
#include "coterie/error.h"
#include "train/unicode.h"

namespace coterie::train {

Character character_at(std::string_view /*text*/, std::size_t /*at*/) {
  throw Error(
      "[bpe] this program was built without ICU, which the tokenizer needs: install libicu-dev "
      "(scripts/setup does) and build again");
}

}  // namespace coterie::train
