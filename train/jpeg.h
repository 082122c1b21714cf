// SPDX-License-Identifier: MIT
// JPEG files by libjpeg (jpeg.cc; no_jpeg.cc in a build without it).
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace coterie::train {

struct Picture {
  std::int64_t height = 0, width = 0, channels = 0;
  std::string values;  // by row, column and channel
};

// Grey (one channel) or RGB (three). Throws an Error that names the file if it is damaged or larger
// than 4096 x 4096.
Picture decode_jpeg(std::string_view bytes, const std::string& name);

}  // namespace coterie::train
