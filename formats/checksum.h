// SPDX-License-Identifier: MIT
// Checksums of files and text: XXH3 with 64 bits. They find bytes that changed on the disk, which
// sizes and shapes do not show; they are no protection against somebody who changes both.
#pragma once

#include <string>
#include <string_view>

namespace coterie::train {

constexpr std::string_view kChecksumKind = "xxh3:";

// "xxh3:0123456789abcdef". Throws Error when the file cannot be read.
std::string file_checksum(const std::string& path);
std::string text_checksum(std::string_view text);

}  // namespace coterie::train
