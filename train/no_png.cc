// SPDX-License-Identifier: MIT
// Takes the place of png.cc in a build without libpng.
#include "coterie/error.h"
#include "train/pictures.h"

namespace coterie::train {

std::string encode_png(const Picture& /*picture*/) {
  throw Error(
      "[picture] this program was built without libpng, which pictures need: install libpng-dev "
      "(scripts/setup does) and build again");
}

}  // namespace coterie::train
