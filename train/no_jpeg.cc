// SPDX-License-Identifier: MIT
// Takes the place of jpeg.cc in a build without libjpeg.
#include "coterie/error.h"
#include "train/pictures.h"

namespace coterie::train {

Picture decode_jpeg(std::string_view /*bytes*/, const std::string& name) {
  throw Error("[data] " + name +
              ": this program was built without libjpeg, which JPEG files need: install "
              "libjpeg-dev (scripts/setup does) and build again");
}

}  // namespace coterie::train
