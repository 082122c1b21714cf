// SPDX-License-Identifier: MIT
// Folders are read with std::filesystem, everything else with libarchive, which treats a plain file
// as an archive of one entry.
#include "train/corpus.h"

#include <archive.h>
#include <archive_entry.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <clocale>
#include <filesystem>
#include <memory>
#include <system_error>
#include <utility>

#include "coterie/error.h"
#include "formats/files.h"

namespace coterie::train {

extern const std::string_view kBuiltinText;  // made by cmake/builtin_text.cmake

namespace {

namespace fs = std::filesystem;

constexpr std::size_t kPiece = 1 << 16;

[[noreturn]] void fail(const std::string& path, const std::string& reason) {
  throw Error("[data] cannot read " + path + ": " + reason);
}

// Limit on the number of bytes read.
class Budget {
 public:
  Budget(std::string path, std::uint64_t limit) : path_(std::move(path)), limit_(limit) {}

  // `bytes`: total read so far plus what is about to be read.
  void check(std::uint64_t bytes) const {
    if (bytes <= limit_) return;
    fail(path_, "expected at most " + size_text(limit_) +
                    " bytes of text after decompression; got more (raise --data-limit, or "
                    "data-limit in the config file)");
  }
  void take(std::uint64_t bytes) { check(taken_ += bytes); }

 private:
  std::string path_;
  std::uint64_t limit_, taken_ = 0;
};

bool is_hidden(const fs::path& name) {
  return std::any_of(name.begin(), name.end(), [](const fs::path& part) {
    const std::string text = part.string();
    return text.size() > 1 && text[0] == '.' && text != "..";
  });
}

bool is_binary(std::string_view start) {
  return start.substr(0, 8192).find('\0') != std::string_view::npos;
}

enum class Keep : std::uint8_t { all, text, nothing };

// Reads everything that `read` returns and returns the part to keep. Charges the budget for the
// kept bytes or, with `count_all`, for all bytes.
template <class Read>
std::string read_pieces(const Read& read, Keep keep, Budget& budget, bool count_all) {
  std::string text;
  std::vector<char> piece(kPiece);
  for (bool first = true;; first = false) {
    const std::size_t got = read(piece.data(), piece.size());
    if (got == 0) return text;
    if (first && keep == Keep::text && is_binary({piece.data(), got})) keep = Keep::nothing;
    if (keep == Keep::nothing && !count_all) return "";
    budget.take(got);
    if (keep != Keep::nothing) text.append(piece.data(), got);
  }
}

std::vector<CorpusFile> read_folder(const std::string& path, Keep keep, Budget& budget) {
  std::vector<CorpusFile> files;
  try {
    for (auto entry = fs::recursive_directory_iterator(path);
         entry != fs::recursive_directory_iterator(); ++entry) {
      if (is_hidden(entry->path().filename())) {
        entry.disable_recursion_pending();
      } else if (entry->is_regular_file()) {
        InputFile file(entry->path().string());
        const auto read = [&](char* to, std::size_t count) { return file.read(to, count); };
        std::string text = read_pieces(read, keep, budget, /*count_all=*/false);
        const std::string name = entry->path().lexically_relative(path).generic_string();
        if (!text.empty()) files.push_back({name, std::move(text)});
      }
    }
  } catch (const fs::filesystem_error& error) {
    fail(error.path1().empty() ? path : error.path1().string(), error.code().message());
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

// For non-ASCII names: libarchive converts them to the charset of the locale, and fails in "C".
class Utf8 {
 public:
  Utf8() : own_(newlocale(LC_CTYPE_MASK, "C.UTF-8", nullptr)), before_(uselocale(own_)) {}
  ~Utf8() {
    uselocale(before_);
    if (own_ != nullptr) freelocale(own_);
  }
  Utf8(const Utf8&) = delete;
  Utf8& operator=(const Utf8&) = delete;

 private:
  locale_t own_, before_;
};

// The decompression filter for data that begins with `start`.
int filter_of(std::string_view start) {
  using std::string_view_literals::operator""sv;
  constexpr std::pair<int, std::string_view> kStarts[] = {
      {ARCHIVE_FILTER_GZIP, "\x1f\x8b\x08"sv},    {ARCHIVE_FILTER_XZ, "\xfd\x37zXZ\0"sv},
      {ARCHIVE_FILTER_LZMA, "\x5d\0\0"sv},        {ARCHIVE_FILTER_ZSTD, "\x28\xb5\x2f\xfd"sv},
      {ARCHIVE_FILTER_LZ4, "\x04\x22\x4d\x18"sv}, {ARCHIVE_FILTER_COMPRESS, "\x1f\x9d"sv}};
  for (const auto& [filter, bytes] : kStarts) {
    if (start.starts_with(bytes)) return filter;
  }
  // bzip2: a level, then the digits of pi (a block) or of its square root (an empty file).
  const bool bzip2 = start.size() >= 10 && start.starts_with("BZh") &&
                     (start.substr(4, 6) == "\x31\x41\x59\x26\x53\x59"sv ||
                      start.substr(4, 6) == "\x17\x72\x45\x38\x50\x90"sv);
  return bzip2 ? ARCHIVE_FILTER_BZIP2 : ARCHIVE_FILTER_NONE;
}

// Only formats with an unambiguous signature, because text must not be read as an archive, and none
// that starts another program. Only one layer of compression: libarchive would undo any number of
// layers, and a few nested empty ones keep it busy for hours.
template <class Open>
Archive open_archive(const std::string& path, std::string_view start, const Open& open) {
  Archive reader(archive_read_new());
  if (!reader) throw std::bad_alloc();
  const int filter = filter_of(start);
  const int status = filter == ARCHIVE_FILTER_NONE ? ARCHIVE_OK
                     : filter == ARCHIVE_FILTER_COMPRESS  // crashes in archive_read_append_filter
                         ? archive_read_support_filter_compress(reader.get())
                         : archive_read_append_filter(reader.get(), filter);
  if (status != ARCHIVE_OK) fail(path, reader.get());
  for (const auto support : {archive_read_support_format_tar, archive_read_support_format_zip,
                             archive_read_support_format_7zip, archive_read_support_format_cpio,
                             archive_read_support_format_empty, archive_read_support_format_raw}) {
    support(reader.get());
  }
  if (open(reader.get()) != ARCHIVE_OK) fail(path, reader.get());
  return reader;
}

Archive open_file(const std::string& path, int descriptor) {
  char start[16] = {};
  if (::pread(descriptor, start, sizeof start, 0) < 0) {
    fail(path, std::generic_category().message(errno));
  }
  return open_archive(path, {start, sizeof start}, [&](archive* reader) {
    return archive_read_open_fd(reader, descriptor, kPiece);
  });
}

Archive open_memory(const std::string& path, const std::string& content) {
  return open_archive(path, content, [&](archive* reader) {
    return archive_read_open_memory(reader, content.data(), content.size());
  });
}

// Reads an entry to its end even if nothing is kept: libarchive would unpack it anyway to reach the
// next one, without a limit.
std::string read_entry(archive* reader, const std::string& path, Keep keep, Budget& budget) {
  const auto read = [&](char* to, std::size_t count) -> std::size_t {
    const la_ssize_t got = archive_read_data(reader, to, count);
    if (got < 0 && (keep != Keep::nothing || got == ARCHIVE_FATAL)) fail(path, reader);
    return static_cast<std::size_t>(std::max<la_ssize_t>(got, 0));
  };
  return read_pieces(read, keep, budget, /*count_all=*/true);
}

// Refuses paths that leave the archive. They are harmless here because nothing is written to disk,
// but not where the archive is unpacked, and nobody creates them by accident.
void check_inside(const std::string& path, const fs::path& place, const char* name) {
  const fs::path normal = place.lexically_normal();
  if (normal.is_absolute() || (!normal.empty() && *normal.begin() == "..")) {
    fail(path, std::string("expected names and links inside the archive; got \"") + name +
                   "\" (pack its folder again with relative names)");
  }
}

void check_names(const std::string& path, archive_entry* entry, const char* name) {
  check_inside(path, name, name);
  if (const char* const link = archive_entry_hardlink(entry)) check_inside(path, link, link);
  if (const char* const link = archive_entry_symlink(entry)) {
    check_inside(path, fs::path(name).parent_path() / link, link);
  }
}

std::vector<CorpusFile> read_entries(const std::string& path, const Archive& reader, Keep keep,
                                     Budget& budget) {
  std::vector<CorpusFile> files;
  for (archive_entry* entry = nullptr;;) {
    const int status = archive_read_next_header(reader.get(), &entry);
    if (status == ARCHIVE_EOF) return files;
    if (status < ARCHIVE_WARN) fail(path, reader.get());
    if (archive_format(reader.get()) == ARCHIVE_FORMAT_RAW) {
      std::string text = read_entry(reader.get(), path, Keep::all, budget);
      if (filter_of(text) != ARCHIVE_FILTER_NONE)
        fail(path, "expected one layer of compression; got two (decompress it once)");
      return {{fs::path(path).filename().string(), std::move(text)}};
    }
    budget.check(static_cast<std::uint64_t>(archive_filter_bytes(reader.get(), 0)));  // of headers
    const char* const name = archive_entry_pathname(entry);
    if (name == nullptr) fail(path, "a file name in it cannot be converted to UTF-8");
    check_names(path, entry, name);
    const bool wanted = archive_entry_filetype(entry) == AE_IFREG && !is_hidden(name);
    std::string text = read_entry(reader.get(), path, wanted ? keep : Keep::nothing, budget);
    if (!text.empty()) {
      files.push_back({fs::path(name).lexically_normal().generic_string(), std::move(text)});
    }
  }
}

std::vector<CorpusFile> read_archive(const std::string& path, Keep keep, Budget& budget) {
  const Utf8 locale;
  const InputFile file(path);
  budget.check(file.size());
  return read_entries(path, open_file(path, file.descriptor()), keep, budget);
}

// Reads all of it before it is unpacked: libarchive needs to go back in some formats.
std::vector<CorpusFile> read_standard_input(std::uint64_t limit, Keep keep) {
  const std::string name = "standard input";
  const Utf8 locale;
  Budget packed(name, limit), budget(name, limit);
  const auto read = [&](char* to, std::size_t count) {
    for (;;) {
      const ssize_t got = ::read(STDIN_FILENO, to, count);
      if (got >= 0) return static_cast<std::size_t>(got);
      if (errno != EINTR) fail(name, std::generic_category().message(errno));
    }
  };
  const std::string content = read_pieces(read, Keep::all, packed, /*count_all=*/true);
  return read_entries(name, open_memory(name, content), keep, budget);
}

std::vector<CorpusFile> read_path(const std::string& path, std::uint64_t limit, Keep keep) {
  std::error_code error;
  const bool folder = fs::is_directory(path, error);
  if (!fs::exists(path, error)) fail(path, "no such file or folder");
  Budget budget(path, limit);
  return folder ? read_folder(path, keep, budget) : read_archive(path, keep, budget);
}

}  // namespace

std::vector<CorpusFile> read_corpus_files(const std::string& path, std::uint64_t limit,
                                          FileKind kind) {
  const Keep keep = kind == FileKind::text ? Keep::text : Keep::all;
  std::vector<CorpusFile> files =
      path == kStandardInput ? read_standard_input(limit, keep) : read_path(path, limit, keep);
  if (files.empty() || files.front().text.empty()) fail(path, "it contains no text");
  std::sort(files.begin(), files.end(),
            [](const CorpusFile& a, const CorpusFile& b) { return a.name < b.name; });
  return files;
}

std::string read_corpus(const std::string& path, std::uint64_t limit) {
  std::string text;
  for (const CorpusFile& file : read_corpus_files(path, limit)) text += file.text;
  return text;
}

std::string_view builtin_corpus() { return kBuiltinText; }

}  // namespace coterie::train
