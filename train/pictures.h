// SPDX-License-Identifier: MIT
// Pictures and their files: JPEG by libjpeg (jpeg.cc), PNG by libpng (png.cc); no_jpeg.cc and
// no_png.cc are in builds without these libraries.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace coterie::train {

struct Picture {
  std::int64_t height = 0, width = 0, channels = 0;  // one channel: grey; three: RGB
  std::string values;                                // by row, column and channel
};

// Throws an Error that names the file if it is damaged or larger than 4096 x 4096.
Picture decode_jpeg(std::string_view bytes, const std::string& name);

std::string encode_png(const Picture& picture);

// Pictures of equal size on one white sheet, `columns` in a row; every pixel becomes a square of
// `scale` pixels.
Picture contact_sheet(const std::vector<Picture>& pictures, std::int64_t columns,
                      std::int64_t scale);

}  // namespace coterie::train
