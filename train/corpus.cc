// SPDX-License-Identifier: MIT
// Folders through std::filesystem, everything else through libarchive, for which a plain file is an
// archive of one entry.
#include "train/corpus.h"

#include <archive.h>
#include <archive_entry.h>

#include <algorithm>
#include <filesystem>
#include <memory>
#include <system_error>
#include <utility>

#include "coterie/error.h"
#include "train/files.h"

namespace coterie::train {

extern const std::string_view kBuiltinText;  // made by cmake/builtin_text.cmake

namespace {

namespace fs = std::filesystem;

constexpr std::size_t kPiece = 1 << 16;

[[noreturn]] void fail(const std::string& path, const std::string& reason) {
  throw Error("[data] cannot read " + path + ": " + reason);
}

// Adds a file of a folder or archive, unless it is empty or binary.
void add_text(std::vector<CorpusFile>& files, const fs::path& name, std::string text) {
  const bool binary = std::string_view(text).substr(0, 8192).find('\0') != std::string_view::npos;
  if (!binary && !text.empty()) files.push_back({name.generic_string(), std::move(text)});
}

bool is_hidden(const fs::path& name) {
  return std::any_of(name.begin(), name.end(), [](const fs::path& part) {
    const std::string text = part.string();
    return text.size() > 1 && text[0] == '.' && text != "..";
  });
}

std::vector<CorpusFile> read_folder(const std::string& path) {
  std::vector<CorpusFile> files;
  try {
    for (auto entry = fs::recursive_directory_iterator(path);
         entry != fs::recursive_directory_iterator(); ++entry) {
      if (is_hidden(entry->path().filename())) {
        entry.disable_recursion_pending();
      } else if (entry->is_regular_file()) {
        add_text(files, entry->path().lexically_relative(path), read_file(entry->path().string()));
      }
    }
  } catch (const fs::filesystem_error& error) {
    fail(path, error.code().message());
  }
  return files;
}

[[noreturn]] void fail(const std::string& path, archive* reader) {
  const char* reason = archive_error_string(reader);
  fail(path, std::string(reason == nullptr ? "unknown reason" : reason));
}

struct CloseArchive {
  void operator()(archive* reader) const { archive_read_free(reader); }
};
using Archive = std::unique_ptr<archive, CloseArchive>;

// Only formats with an unmistakable signature: text must not be taken for an archive, and none may
// start another program.
Archive open_archive(const std::string& path) {
  Archive reader(archive_read_new());
  if (!reader) throw std::bad_alloc();
  for (const auto support : {archive_read_support_filter_gzip, archive_read_support_filter_bzip2,
                             archive_read_support_filter_xz, archive_read_support_filter_lzma,
                             archive_read_support_filter_zstd, archive_read_support_filter_lz4,
                             archive_read_support_filter_compress, archive_read_support_format_tar,
                             archive_read_support_format_zip, archive_read_support_format_7zip,
                             archive_read_support_format_cpio, archive_read_support_format_empty,
                             archive_read_support_format_raw}) {
    support(reader.get());
  }
  if (archive_read_open_filename(reader.get(), path.c_str(), kPiece) != ARCHIVE_OK) {
    fail(path, reader.get());
  }
  return reader;
}

std::string read_entry(archive* reader, const std::string& path) {
  std::string text;
  std::vector<char> piece(kPiece);
  for (;;) {
    const la_ssize_t got = archive_read_data(reader, piece.data(), piece.size());
    if (got < 0) fail(path, reader);
    if (got == 0) return text;
    text.append(piece.data(), static_cast<std::size_t>(got));
  }
}

std::vector<CorpusFile> read_archive(const std::string& path) {
  const Archive reader = open_archive(path);
  std::vector<CorpusFile> files;
  for (archive_entry* entry = nullptr;;) {
    const int status = archive_read_next_header(reader.get(), &entry);
    if (status == ARCHIVE_EOF) return files;
    if (status < ARCHIVE_WARN) fail(path, reader.get());
    if (archive_format(reader.get()) == ARCHIVE_FORMAT_RAW) {
      return {{fs::path(path).filename().string(), read_entry(reader.get(), path)}};
    }
    const char* name = archive_entry_pathname(entry);
    if (archive_entry_filetype(entry) != AE_IFREG || name == nullptr || is_hidden(name)) continue;
    add_text(files, fs::path(name).lexically_normal(), read_entry(reader.get(), path));
  }
}

}  // namespace

std::vector<CorpusFile> read_corpus_files(const std::string& path) {
  std::error_code error;
  const bool folder = fs::is_directory(path, error);
  if (!fs::exists(path, error)) fail(path, "there is no such file or folder");
  std::vector<CorpusFile> files = folder ? read_folder(path) : read_archive(path);
  if (files.empty() || files.front().text.empty()) fail(path, "there is no text in it");
  std::sort(files.begin(), files.end(),
            [](const CorpusFile& a, const CorpusFile& b) { return a.name < b.name; });
  return files;
}

std::string read_corpus(const std::string& path) {
  std::string text;
  for (const CorpusFile& file : read_corpus_files(path)) text += file.text;
  return text;
}

std::string_view builtin_corpus() { return kBuiltinText; }

}  // namespace coterie::train
