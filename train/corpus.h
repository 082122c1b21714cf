// SPDX-License-Identifier: MIT
// Text from a file, a folder (its regular files, recursively) or an archive (tar, zip, 7z, cpio,
// also compressed, and single files compressed with gzip, bzip2, xz, zstd, lz4, ...), or from
// standard input, which is read like a file.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "train/config.h"

namespace coterie::train {

struct CorpusFile {
  std::string name;  // path inside the folder or archive
  std::string text;
};

constexpr const char* kStandardInput = "-";  // as a path

enum class FileKind : std::uint8_t { text, any };

// The files sorted by name. In folders and archives, skips hidden files (name starts with a dot),
// links in archives and, if only text is wanted, binary files (a zero byte in the first 8 KiB); a
// single file is read as it is. Throws Error if there is nothing to read, if a folder has more than
// `limit` bytes of it or an archive unpacks to more, and if names or links of an archive point
// outside it.
std::vector<CorpusFile> read_corpus_files(const std::string& path, std::uint64_t limit = kDataLimit,
                                          FileKind kind = FileKind::text);

// Their concatenated bytes.
std::string read_corpus(const std::string& path, std::uint64_t limit = kDataLimit);

// The project's own sources and documents at build time, each preceded by a line with its name.
std::string_view builtin_corpus();

}  // namespace coterie::train
