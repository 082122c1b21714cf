// SPDX-License-Identifier: MIT
// Text from a file, a folder (its regular files, recursively) or an archive (tar, zip, 7z, cpio,
// also compressed, and single files compressed with gzip, bzip2, xz, zstd, lz4, ...).
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

// The files by name. In folders and archives hidden ones (a name with a dot in front) and binary
// ones (a zero byte in the first 8 KiB) are left out, and links in archives; a single file is taken
// as it is. Throws Error when there is no text, when a folder has more than `limit` bytes of it or
// an archive unpacks to more, and when names or links of an archive lead out of it.
std::vector<CorpusFile> read_corpus_files(const std::string& path,
                                          std::uint64_t limit = kDataLimit);

// All their bytes, one file after the other.
std::string read_corpus(const std::string& path, std::uint64_t limit = kDataLimit);

// The project's own sources and documents, as they were when the program was built; each after a
// line with its name.
std::string_view builtin_corpus();

}  // namespace coterie::train
