// SPDX-License-Identifier: MIT
#include "train/pictures.h"

namespace coterie::train {

Picture contact_sheet(const std::vector<Picture>& pictures, std::int64_t columns,
                      std::int64_t scale) {
  const std::int64_t gap = 2 * scale, count = static_cast<std::int64_t>(pictures.size());
  const std::int64_t rows = (count + columns - 1) / columns;
  const std::int64_t height = pictures.at(0).height * scale, width = pictures[0].width * scale;
  Picture sheet{.height = rows * (height + gap) + gap,
                .width = columns * (width + gap) + gap,
                .channels = 3,
                .values = {}};
  sheet.values.assign(static_cast<std::size_t>(sheet.height * sheet.width * 3), '\xFF');
  for (std::int64_t i = 0; i < count; ++i) {
    const Picture& one = pictures[static_cast<std::size_t>(i)];
    const std::int64_t top = gap + i / columns * (height + gap);
    const std::int64_t left = gap + i % columns * (width + gap);
    for (std::int64_t y = 0; y < height; ++y) {
      for (std::int64_t x = 0; x < width; ++x) {
        const std::int64_t from = (y / scale * one.width + x / scale) * one.channels;
        const std::int64_t to = ((top + y) * sheet.width + left + x) * 3;
        for (std::int64_t c = 0; c < 3; ++c) {
          sheet.values[static_cast<std::size_t>(to + c)] =
              one.values[static_cast<std::size_t>(from + (one.channels == 1 ? 0 : c))];
        }
      }
    }
  }
  return sheet;
}

}  // namespace coterie::train
