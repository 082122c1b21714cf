// SPDX-License-Identifier: MIT
#include "train/bpe_bytes.h"

#include <array>

namespace coterie::train {
namespace {

bool is_printable(int byte) {
  return (byte > 0x20 && byte < 0x7f) || (byte > 0xa0 && byte != 0xad);
}

struct Bytes {
  std::array<int, kBytes> characters{};    // by byte
  std::array<int, 2 * kBytes> bytes{};     // by character; -1: none
  std::array<std::int32_t, kBytes> ids{};  // by byte

  Bytes() {
    bytes.fill(-1);
    int other = kBytes;
    for (int byte = 0; byte < kBytes; ++byte) {
      const int character = is_printable(byte) ? byte : other++;
      characters[static_cast<std::size_t>(byte)] = character;
      bytes[static_cast<std::size_t>(character)] = byte;
    }
    std::int32_t id = 0;
    for (const int byte : bytes) {
      if (byte >= 0) ids[static_cast<std::size_t>(byte)] = id++;
    }
  }
};

const Bytes& table() {
  static const Bytes table;
  return table;
}

}  // namespace

std::int32_t first_id(unsigned char byte) { return table().ids[byte]; }

std::string to_printable(std::string_view bytes) {
  std::string text;
  for (const char byte : bytes) {
    const int character = table().characters[static_cast<unsigned char>(byte)];
    if (character < 0x80) {
      text += static_cast<char>(character);
    } else {  // two bytes of UTF-8
      text += static_cast<char>(0xc0 | character >> 6);
      text += static_cast<char>(0x80 | (character & 0x3f));
    }
  }
  return text;
}

std::optional<std::string> from_printable(std::string_view text) {
  std::string bytes;
  for (std::size_t i = 0; i < text.size(); ++i) {
    unsigned character = static_cast<unsigned char>(text[i]);
    if (character >= 0x80) {
      if (++i == text.size() || (character & 0xe0) != 0xc0) return std::nullopt;
      character = (character & 0x1f) << 6 | (static_cast<unsigned char>(text[i]) & 0x3f);
    }
    const int byte = character < table().bytes.size() ? table().bytes[character] : -1;
    if (byte < 0) return std::nullopt;
    bytes += static_cast<char>(byte);
  }
  return bytes;
}

}  // namespace coterie::train
