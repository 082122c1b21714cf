// SPDX-License-Identifier: MIT
#include <png.h>

#include "coterie/error.h"
#include "train/pictures.h"

namespace coterie::train {

std::string encode_png(const Picture& picture) {
  png_image image{};
  image.version = PNG_IMAGE_VERSION;
  image.height = static_cast<png_uint_32>(picture.height);
  image.width = static_cast<png_uint_32>(picture.width);
  image.format = picture.channels == 1 ? PNG_FORMAT_GRAY : PNG_FORMAT_RGB;
  png_alloc_size_t bytes = 0;
  const auto write = [&](char* to) {  // null: only counts
    if (png_image_write_to_memory(&image, to, &bytes, 0, picture.values.data(), 0, nullptr) != 0) {
      return;
    }
    throw Error(std::string("[picture] libpng: ") + image.message);
  };
  write(nullptr);
  std::string file(bytes, '\0');
  write(file.data());
  return file;
}

}  // namespace coterie::train
