// SPDX-License-Identifier: MIT
#include "formats/checksum.h"

#include <fmt/core.h>

#include <vector>

#include "formats/files.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

namespace coterie::train {

std::string file_checksum(const std::string& path) {
  InputFile file(path);
  std::vector<char> piece(1 << 16);
  XXH3_state_t state;
  XXH3_64bits_reset(&state);
  for (std::size_t got = piece.size(); got == piece.size();) {
    got = file.read(piece.data(), piece.size());
    XXH3_64bits_update(&state, piece.data(), got);
  }
  return fmt::format("{}{:016x}", kChecksumKind, XXH3_64bits_digest(&state));
}

std::string text_checksum(std::string_view text) {
  return fmt::format("{}{:016x}", kChecksumKind, XXH3_64bits(text.data(), text.size()));
}

}  // namespace coterie::train
