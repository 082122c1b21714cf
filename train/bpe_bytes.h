// SPDX-License-Identifier: MIT
// Bytes as printable characters, as the files of byte-level tokenizers write them: bytes that are
// printable in Latin-1 (! to ~, 0xa1 to 0xac, 0xae to 0xff) are the character of their number, the
// others, in their order, the characters from 256 on.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace coterie::train {

constexpr int kBytes = 256;

// The id of a byte in a new tokenizer: its place when bytes are sorted by their characters.
std::int32_t first_id(unsigned char byte);

std::string to_printable(std::string_view bytes);  // UTF-8
// std::nullopt if there is a character that is no byte's.
std::optional<std::string> from_printable(std::string_view text);

}  // namespace coterie::train
