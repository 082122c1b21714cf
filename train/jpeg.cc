// SPDX-License-Identifier: MIT
#include "train/pictures.h"

#include <cstddef>
#include <cstdio>
// Needs the two above.
#include <jpeglib.h>

#include "coterie/error.h"

namespace coterie::train {
namespace {

constexpr std::int64_t kLargest = 4096;  // pixels of a side

[[noreturn]] void refuse_jpeg(const std::string& name, const std::string& reason) {
  throw Error("[data] " + name + ": " + reason);
}

// Errors leave libjpeg as exceptions, which pass through C code on x86-64; its memory is freed by
// the destructor.
class Decoder {
 public:
  explicit Decoder(const std::string& name) : name_(name) {
    info_.err = jpeg_std_error(&errors_);
    info_.client_data = this;
    errors_.error_exit = [](j_common_ptr info) { fail_with_message(info); };
    // Warnings are about damaged data.
    errors_.emit_message = [](j_common_ptr info, int level) {
      if (level < 0) fail_with_message(info);
    };
    jpeg_create_decompress(&info_);
  }
  ~Decoder() { jpeg_destroy_decompress(&info_); }
  Decoder(const Decoder&) = delete;
  Decoder& operator=(const Decoder&) = delete;

  Picture decode(std::string_view bytes) {
    jpeg_mem_src(&info_, reinterpret_cast<const unsigned char*>(bytes.data()), bytes.size());
    jpeg_read_header(&info_, TRUE);
    Picture picture{.height = info_.image_height,
                    .width = info_.image_width,
                    .channels = info_.num_components == 1 ? 1 : 3,
                    .values = {}};
    if (picture.height > kLargest || picture.width > kLargest) {
      refuse_jpeg(name_, "expected at most 4096 x 4096 pixels; got " +
                             std::to_string(picture.width) + " x " +
                             std::to_string(picture.height));
    }
    info_.out_color_space = picture.channels == 1 ? JCS_GRAYSCALE : JCS_RGB;
    info_.dct_method = JDCT_ISLOW;
    jpeg_start_decompress(&info_);
    const auto row_bytes = static_cast<std::size_t>(picture.width * picture.channels);
    picture.values.resize(row_bytes * static_cast<std::size_t>(picture.height));
    while (info_.output_scanline < info_.output_height) {
      auto* row = reinterpret_cast<unsigned char*>(picture.values.data()) +
                  row_bytes * info_.output_scanline;
      jpeg_read_scanlines(&info_, &row, 1);
    }
    jpeg_finish_decompress(&info_);
    return picture;
  }

 private:
  [[noreturn]] static void fail_with_message(j_common_ptr info) {
    char message[JMSG_LENGTH_MAX];
    info->err->format_message(info, message);
    refuse_jpeg(static_cast<Decoder*>(info->client_data)->name_, message);
  }

  std::string name_;
  jpeg_error_mgr errors_{};
  jpeg_decompress_struct info_{};
};

}  // namespace

Picture decode_jpeg(std::string_view bytes, const std::string& name) {
  return Decoder(name).decode(bytes);
}

}  // namespace coterie::train
