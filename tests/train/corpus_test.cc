// SPDX-License-Identifier: MIT
#include "train/corpus.h"

#include <archive.h>
#include <archive_entry.h>
#include <gtest/gtest.h>

#include <clocale>
#include <string>
#include <utility>
#include <vector>

#include "coterie/error.h"
#include "formats/files.h"
#include "tests/train/temporary_folder.h"

namespace coterie::train {
namespace {

namespace fs = std::filesystem;
using Files = std::vector<std::pair<std::string, std::string>>;

std::string binary() { return std::string("\0\1text", 6); }

// Files in unsorted order, including a binary file and hidden ones.
Files some_files() {
  return {{"b.txt", "bb\n"},         {"a/z.txt", "zz"},       {"a/image", binary()},
          {".git/config", "hidden"}, {"a/.hidden", "hidden"}, {"c.txt", std::string(100'000, 'c')},
          {"empty.txt", ""}};
}

std::string expected_text() { return "zzbb\n" + std::string(100'000, 'c'); }

void write_files(const std::string& folder, const Files& files) {
  for (const auto& [name, text] : files) {
    fs::create_directories(fs::path(folder + "/" + name).parent_path());
    write_file(folder + "/" + name, text);
  }
}

struct Kind {
  const char* name;  // of the archive
  int (*format)(archive*);
  int (*filter)(archive*);
};

void write_archive(const std::string& path, const Kind& kind, const Files& files) {
  archive* const writer = archive_write_new();
  ASSERT_EQ(kind.format(writer), ARCHIVE_OK);
  ASSERT_EQ(kind.filter(writer), ARCHIVE_OK);
  ASSERT_EQ(archive_write_open_filename(writer, path.c_str()), ARCHIVE_OK);
  for (const auto& [name, text] : files) {
    archive_entry* const entry = archive_entry_new();
    archive_entry_set_pathname(entry, name.c_str());
    archive_entry_set_size(entry, static_cast<la_int64_t>(text.size()));
    archive_entry_set_filetype(entry, AE_IFREG);
    archive_entry_set_perm(entry, 0644);
    ASSERT_EQ(archive_write_header(writer, entry), ARCHIVE_OK);
    ASSERT_EQ(archive_write_data(writer, text.data(), text.size()),
              static_cast<la_ssize_t>(text.size()));
    archive_entry_free(entry);
  }
  ASSERT_EQ(archive_write_close(writer), ARCHIVE_OK);
  archive_write_free(writer);
}

std::string corpus_error(const std::string& path) {
  try {
    read_corpus(path);
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

TEST(Corpus, AFolderIsItsFilesByName) {
  const TemporaryFolder folder;
  write_files(folder.path("data"), some_files());
  EXPECT_EQ(read_corpus(folder.path("data")), expected_text());
  EXPECT_EQ(read_corpus(folder.path("data/")), expected_text());
  const std::vector<CorpusFile> files = read_corpus_files(folder.path("data"));
  ASSERT_EQ(files.size(), 3u);
  EXPECT_EQ(files[0].name, "a/z.txt");
  EXPECT_EQ(files[1].name, "b.txt");
  EXPECT_EQ(files[2].name, "c.txt");
}

TEST(Corpus, AHiddenFolderThatIsNamedIsRead) {
  const TemporaryFolder folder;
  write_files(folder.path(".data"), {{"a", "text"}});
  EXPECT_EQ(read_corpus(folder.path(".data")), "text");
}

TEST(Corpus, ArchivesReadLikeTheFolder) {
  const TemporaryFolder folder;
  for (const Kind& kind :
       {Kind{"a.tar", archive_write_set_format_pax, archive_write_add_filter_none},
        Kind{"a.tar.xz", archive_write_set_format_gnutar, archive_write_add_filter_xz},
        Kind{"a.tgz", archive_write_set_format_ustar, archive_write_add_filter_gzip},
        Kind{"a.zip", archive_write_set_format_zip, archive_write_add_filter_none},
        Kind{"a.7z", archive_write_set_format_7zip, archive_write_add_filter_none}}) {
    write_archive(folder.path(kind.name), kind, some_files());
    EXPECT_EQ(read_corpus(folder.path(kind.name)), expected_text()) << kind.name;
  }
}

TEST(Corpus, ASingleFileIsTakenAsItIs) {
  const TemporaryFolder folder;
  const Files one = {{"one", "#mtree\n" + binary()}};
  write_file(folder.path("plain"), one[0].second);
  EXPECT_EQ(read_corpus(folder.path("plain")), one[0].second);
  for (const Kind& kind :
       {Kind{"one.gz", archive_write_set_format_raw, archive_write_add_filter_gzip},
        Kind{"one.bz2", archive_write_set_format_raw, archive_write_add_filter_bzip2},
        Kind{"one.lzma", archive_write_set_format_raw, archive_write_add_filter_lzma},
        Kind{"one.zst", archive_write_set_format_raw, archive_write_add_filter_zstd},
        Kind{"one.lz4", archive_write_set_format_raw, archive_write_add_filter_lz4},
        Kind{"one.Z", archive_write_set_format_raw, archive_write_add_filter_compress},
        Kind{"one.xz", archive_write_set_format_raw, archive_write_add_filter_xz}}) {
    write_archive(folder.path(kind.name), kind, one);
    EXPECT_EQ(read_corpus(folder.path(kind.name)), one[0].second) << kind.name;
  }
}

TEST(Corpus, FilesWithNamesBeyondAsciiAreRead) {
  const TemporaryFolder folder;
  for (const Kind& kind :
       {Kind{"a.tar", archive_write_set_format_pax, archive_write_add_filter_none},
        Kind{"a.tgz", archive_write_set_format_ustar, archive_write_add_filter_gzip},
        Kind{"a.zip", archive_write_set_format_zip, archive_write_add_filter_none},
        Kind{"a.7z", archive_write_set_format_7zip, archive_write_add_filter_none}}) {
    ASSERT_NE(std::setlocale(LC_ALL, "C.UTF-8"), nullptr);
    write_archive(folder.path(kind.name), kind, {{"a.txt", "a"}, {"\u00e4.txt", "b"}});
    std::setlocale(LC_ALL, "C");  // as in the program
    EXPECT_EQ(read_corpus(folder.path(kind.name)), "ab") << kind.name;
    EXPECT_EQ(read_corpus_files(folder.path(kind.name)).back().name, "\u00e4.txt") << kind.name;
  }
}

TEST(Corpus, DamagedArchivesAreErrors) {
  const TemporaryFolder folder;
  std::string noise;
  for (unsigned i = 0; i < 100'000; ++i) {
    noise += static_cast<char>('a' + (i * i * 2654435761u >> 28));
  }
  for (const Kind& kind :
       {Kind{"a.tar.gz", archive_write_set_format_ustar, archive_write_add_filter_gzip},
        Kind{"a.tar.xz", archive_write_set_format_ustar, archive_write_add_filter_xz},
        Kind{"a.tar", archive_write_set_format_ustar, archive_write_add_filter_none},
        Kind{"a.xz", archive_write_set_format_raw, archive_write_add_filter_xz},
        Kind{"a.gz", archive_write_set_format_raw, archive_write_add_filter_gzip}}) {
    const std::string path = folder.path(kind.name);
    write_archive(path, kind, {{"a", noise}});
    EXPECT_EQ(read_corpus(path), noise);
    const std::string whole = read_file(path);
    write_file(path, std::string_view(whole).substr(0, whole.size() / 2));
    EXPECT_NE(corpus_error(path).find("[data] cannot read " + path + ": "), std::string::npos)
        << kind.name;
  }
}

TEST(Corpus, NoTextIsAnError) {
  const TemporaryFolder folder;
  fs::create_directory(folder.path("empty"));
  write_files(folder.path("binary"), {{"a", binary()}});
  write_file(folder.path("nothing"), "");
  for (const char* const name : {"empty", "binary", "nothing"}) {
    EXPECT_EQ(corpus_error(folder.path(name)),
              "[data] cannot read " + folder.path(name) + ": it contains no text");
  }
  EXPECT_EQ(corpus_error(folder.path("missing")),
            "[data] cannot read " + folder.path("missing") + ": no such file or folder");
}

TEST(Corpus, TheBuiltInTextIsTheProject) {
  const std::string_view text = builtin_corpus();
  EXPECT_GT(text.size(), 1'000'000u);
  EXPECT_LT(text.size(), 6'000'000u);  // no build results, no data
  EXPECT_TRUE(text.starts_with("=== CHANGELOG.md ===\n# Changelog\n")) << text.substr(0, 80);
  EXPECT_NE(
      text.find("=== train/corpus.h ===\n// SPDX-License-Identifier: MIT\n// Text from a file"),
      std::string_view::npos);
  EXPECT_EQ(text.find('\0'), std::string_view::npos);
}

}  // namespace
}  // namespace coterie::train
