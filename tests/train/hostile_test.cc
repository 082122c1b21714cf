// SPDX-License-Identifier: MIT
// Malicious files: each reader reports what is wrong, in bounded time and memory. Reads that may
// crash, hang or exhaust memory run in a child process.
#include <archive.h>
#include <archive_entry.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "coterie/error.h"
#include "formats/files.h"
#include "formats/json_lines.h"
#include "formats/safetensors.h"
#include "report/data.h"
#include "report/report.h"
#include "tests/support/tensors.h"
#include "tests/train/temporary_folder.h"
#include "train/checkpoint.h"
#include "train/corpus.h"
#include "train/log.h"
#include "train/options.h"

namespace coterie::train {
namespace {

namespace fs = std::filesystem;
using test::error_of;

constexpr std::uint64_t kMebi = std::uint64_t{1} << 20, kGibi = std::uint64_t{1} << 30;
constexpr unsigned kLongestSeconds = 60;  // sanitizers and busy machines are slow

#define EXPECT_HAS(text, part) EXPECT_NE((text).find(part), std::string::npos) << (text)

std::uint64_t peak_memory() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return static_cast<std::uint64_t>(usage.ru_maxrss) * 1024;
}

struct Outcome {
  std::string error;         // message of coterie::Error, or how else the child ended
  std::uint64_t memory = 0;  // increase of the peak memory
};

// The outcome of `act` in a child process that is killed if it hangs.
Outcome outcome_of(const std::function<void()>& act) {
  int ends[2] = {};
  if (pipe(ends) != 0) return {"no pipe"};
  const pid_t child = fork();
  if (child == 0) {
    alarm(kLongestSeconds);
    const std::uint64_t before = peak_memory();
    std::string error;
    try {
      error = error_of(act);
    } catch (const std::exception& other) {
      error = std::string("not an Error: ") + other.what();
    }
    const std::string report = std::to_string(peak_memory() - before) + " " + error;
    _exit(write(ends[1], report.data(), report.size()) < 0 ? 1 : 0);
  }
  close(ends[1]);
  std::string report(1 << 16, '\0');
  const ssize_t got = read(ends[0], report.data(), report.size());
  report.resize(static_cast<std::size_t>(std::max<ssize_t>(got, 0)));
  close(ends[0]);
  int status = 0;
  waitpid(child, &status, 0);
  if (WIFSIGNALED(status)) return {std::string("killed: ") + strsignal(WTERMSIG(status))};
  const std::size_t space = report.find(' ');
  return {report.substr(space + 1), std::stoull(report.substr(0, space))};
}

// The writer of an archive in memory.
class MemoryArchive {
 public:
  MemoryArchive(int (*format)(archive*), int (*filter)(archive*)) : writer_(archive_write_new()) {
    format(writer_);
    filter(writer_);
    archive_write_set_bytes_per_block(writer_, 0);
    const auto take = [](archive*, void* self, const void* data, std::size_t size) {
      static_cast<MemoryArchive*>(self)->bytes_.append(static_cast<const char*>(data), size);
      return static_cast<la_ssize_t>(size);
    };
    archive_write_open(writer_, this, nullptr, take, nullptr);
  }
  ~MemoryArchive() {
    archive_write_fail(writer_);  // entries may be unfinished
    archive_write_free(writer_);
  }
  MemoryArchive(const MemoryArchive&) = delete;
  MemoryArchive& operator=(const MemoryArchive&) = delete;

  void add(const std::string& name, std::uint64_t size, unsigned type = AE_IFREG,
           const std::string& link = "") {
    archive_entry* const entry = archive_entry_new();
    archive_entry_set_pathname(entry, name.c_str());
    archive_entry_set_size(entry, static_cast<la_int64_t>(size));
    archive_entry_set_filetype(entry, type);
    archive_entry_set_perm(entry, 0644);
    if (!link.empty() && type == AE_IFLNK) archive_entry_set_symlink(entry, link.c_str());
    if (!link.empty() && type == AE_IFREG) archive_entry_set_hardlink(entry, link.c_str());
    EXPECT_EQ(archive_write_header(writer_, entry), ARCHIVE_OK);
    archive_entry_free(entry);
  }
  void write(std::string_view data) { archive_write_data(writer_, data.data(), data.size()); }
  std::string finish() {
    archive_write_close(writer_);
    return bytes_;
  }
  const std::string& bytes() const { return bytes_; }

 private:
  archive* writer_;
  std::string bytes_;
};

// `text` repeated `times` times, compressed as one frame.
std::string zstd(std::string_view text, std::uint64_t times = 1) {
  MemoryArchive frame(archive_write_set_format_raw, archive_write_add_filter_zstd);
  frame.add("data", text.size() * times);
  for (std::uint64_t i = 0; i < times; ++i) frame.write(text);
  return frame.finish();
}

std::string repeated(const std::string& text, int times) {
  std::string all;
  for (int i = 0; i < times; ++i) all += text;
  return all;
}

// One GiB of one character, compressed.
const std::string& gibibyte_of(char c) {
  static const std::string zeros = zstd(std::string(kMebi, '\0'), 1024);
  static const std::string letters = zstd(std::string(kMebi, 'x'), 1024);
  return c == 'x' ? letters : zeros;
}

std::string tar_header(const std::string& name, std::uint64_t size) {
  MemoryArchive tar(archive_write_set_format_gnutar, archive_write_add_filter_none);
  tar.add(name, size);
  return tar.bytes();
}

// An entry with a hole of eight TiB before its text, in the old GNU tar format.
std::string sparse_tar() {
  constexpr std::size_t kText = 512;
  std::string header = tar_header("sparse.txt", kText);
  const auto number = [](std::uint64_t value) {  // in base 256
    std::string bytes = "\x80" + std::string(11, '\0');
    for (std::size_t i = 11; value > 0; --i, value >>= 8) bytes[i] = static_cast<char>(value);
    return bytes;
  };
  header[156] = 'S';
  header.replace(386, 12, number(8192 * kGibi));  // offset and length of the only piece
  header.replace(398, 12, number(kText));
  header.replace(483, 12, number(8192 * kGibi + kText));
  header.replace(148, 8, "        ");  // the checksum is computed with blanks in its field
  unsigned sum = 0;
  for (const char c : header) sum += static_cast<unsigned char>(c);
  char digits[8];
  std::snprintf(digits, sizeof digits, "%06o", sum);
  header.replace(148, 8, std::string(digits, 7) + " ");
  return header + std::string(kText, 'x') + std::string(1024, '\0');
}

std::string zip_of(std::uint64_t mebibytes) {
  MemoryArchive zip(archive_write_set_format_zip, archive_write_add_filter_none);
  zip.add("a.txt", mebibytes * kMebi);
  for (std::uint64_t i = 0; i < mebibytes; ++i) zip.write(std::string(kMebi, 'x'));
  return zip.finish();
}

void make_sparse(const std::string& path, std::string_view start, std::uint64_t size) {
  write_file(path, start);
  fs::resize_file(path, size);
}

std::string as_length(std::uint64_t value) {
  std::string bytes;
  for (int i = 0; i < 8; ++i) bytes += static_cast<char>(value >> (8 * i));
  return bytes;
}

constexpr std::size_t kDepth = 1'000'000;
std::string deep_list() { return std::string(kDepth, '[') + std::string(kDepth, ']'); }
std::string deep_object() { return repeated("{\"a\":", kDepth) + "1" + std::string(kDepth, '}'); }

TEST(Hostile, ArchivesThatUnpackWithoutEndStopAtTheLimit) {
  const TemporaryFolder folder;
  constexpr int kManyGibi = 256;
  const std::string zeros = repeated(gibibyte_of('\0'), kManyGibi);
  const std::string letters = repeated(gibibyte_of('x'), kManyGibi);
  const std::string empty = tar_header("a.txt", 0);
  const std::pair<const char*, std::string> bombs[] = {
      {"a single file", letters},
      {"a text", zstd(tar_header("a.txt", kManyGibi * kGibi)) + letters},
      {"a binary file", zstd(tar_header("a.txt", kManyGibi * kGibi)) + zeros},
      {"a hidden file", zstd(tar_header(".hidden", kManyGibi * kGibi)) + letters},
      {"names", repeated(zstd(repeated(empty, 2048), 1024), kManyGibi)},
      {"holes", sparse_tar()},
      {"a zip", zip_of(256)}};
  for (const auto& [name, bytes] : bombs) {
    EXPECT_LT(bytes.size(), 32 * kMebi) << name;
    write_file(folder.path("bomb"), bytes);
    const Outcome outcome = outcome_of([&] { read_corpus(folder.path("bomb"), 64 * kMebi); });
    EXPECT_EQ(outcome.error, "[data] cannot read " + folder.path("bomb") +
                                 ": expected at most 64M bytes of text after decompression; got "
                                 "more (raise --data-limit, or data-limit in the config file)")
        << name;
    // A string that grows is copied to one of twice the size; the rest is the decoder's window.
    EXPECT_LT(outcome.memory, 2 * 64 * kMebi + 64 * kMebi) << name;
  }
}

// Empty files, compressed several times over: decompression would run on without any output.
TEST(Hostile, ManyCompressionsAreRefused) {
  const TemporaryFolder folder;
  std::string bytes = repeated(zstd(""), 4096);
  for (int layer = 0; layer < 3; ++layer) {
    bytes = zstd(bytes, 256);
    write_file(folder.path("bomb"), bytes);
    EXPECT_EQ(outcome_of([&] { read_corpus(folder.path("bomb")); }).error,
              "[data] cannot read " + folder.path("bomb") +
                  ": expected one layer of compression; got two (decompress it once)");
  }
}

TEST(Hostile, TheLimitIsTheLastNumberThatIsAllowed) {
  const TemporaryFolder folder;
  fs::create_directory(folder.path("data"));
  write_file(folder.path("data/a"), std::string(70'000, 'a'));
  write_file(folder.path("data/b"), std::string(30'000, 'b'));
  write_file(folder.path("data/binary"), std::string(50'000, '\0'));
  write_file(folder.path("file"), std::string(100'000, 'a'));
  for (const char* const name : {"data", "file"}) {
    EXPECT_EQ(read_corpus(folder.path(name), 100'000).size(), 100'000u) << name;
    EXPECT_HAS(error_of([&] { read_corpus(folder.path(name), 99'999); }),
               "expected at most 99999 bytes");
  }
}

TEST(Hostile, NamesAndLinksThatLeaveAnArchiveAreRefused) {
  const TemporaryFolder folder;
  struct Case {
    std::string name, link;
    unsigned type;
    bool good;
  };
  const Case cases[] = {{"../a.txt", "", AE_IFREG, false},
                        {"b/../../a.txt", "", AE_IFREG, false},
                        {"../", "", AE_IFDIR, false},
                        {"/etc/passwd", "", AE_IFREG, false},
                        {"a.txt", "/etc/passwd", AE_IFLNK, false},
                        {"b/a.txt", "../../etc/passwd", AE_IFLNK, false},
                        {"a.txt", "../text", AE_IFREG, false},
                        {"a.txt", "/etc/passwd", AE_IFREG, false},
                        {"b/../a..txt", "", AE_IFREG, true},
                        {"b/a.txt", "../text", AE_IFLNK, true},
                        {"a.txt", "a.txt", AE_IFLNK, true},
                        {"a.txt", "text", AE_IFREG, true}};
  for (const Case& one : cases) {
    MemoryArchive tar(archive_write_set_format_gnutar, archive_write_add_filter_none);
    tar.add("text", 2);
    tar.write("ab");
    tar.add(one.name, 0, one.type, one.link);
    write_file(folder.path("a.tar"), tar.finish());
    const std::string error = error_of([&] { read_corpus(folder.path("a.tar")); });
    if (one.good) {
      EXPECT_EQ(error, "") << one.name;
      EXPECT_EQ(read_corpus(folder.path("a.tar")), "ab") << one.name;
    } else {
      EXPECT_HAS(error, "expected names and links inside the archive; got \"" +
                            (one.link.empty() ? one.name : one.link) + "\"");
    }
  }
}

// Each function that reads a file at a path.
std::vector<std::pair<const char*, std::function<void(const std::string&)>>> readers() {
  return {{"data", [](const std::string& path) { read_corpus(path); }},
          {"file", [](const std::string& path) { read_file(path); }},
          {"tensors", [](const std::string& path) { read_safetensors(path); }},
          {"lines", [](const std::string& path) { for_each_json_line(path, [](auto) {}); }},
          {"bench", [](const std::string& path) { read_bench(path); }},
          {"log", [](const std::string& path) { const Log log(path, 3); }},
          {"config", [](const std::string& path) {
             Config config;
             CLI::App app;
             add_options(app, config);
             app.parse("--config " + path);
           }}};
}

TEST(Hostile, PipesAndDevicesAreNoFiles) {
  const TemporaryFolder folder;
  const std::string pipe = folder.path("pipe");
  ASSERT_EQ(mkfifo(pipe.c_str(), 0666), 0);
  for (const auto& [name, reader] : readers()) {
    for (const auto& [path, kind] :
         {std::pair<std::string, std::string>{pipe, "pipe"}, {"/dev/zero", "device"}}) {
      const Outcome outcome = outcome_of([&] { reader(path); });
      EXPECT_EQ(outcome.error,
                "[files] cannot read " + path + ": expected a regular file; got a " + kind)
          << name;
    }
    if (name != std::string("data")) {
      EXPECT_EQ(outcome_of([&] { reader(folder.path()); }).error,
                "[files] cannot read " + folder.path() + ": Is a directory")
          << name;
    }
  }
  // In a folder of texts they are skipped.
  write_file(folder.path("a.txt"), "text");
  fs::create_symlink("/dev/zero", folder.path("zero"));
  fs::create_symlink(folder.path(), folder.path("again"));
  Outcome outcome = outcome_of([&] {
    if (read_corpus(folder.path()) != "text") throw Error("another text");
  });
  EXPECT_EQ(outcome.error, "");
}

TEST(Hostile, HugeFilesAreRefusedBeforeTheyAreRead) {
  const TemporaryFolder folder;
  const std::string huge = folder.path("huge");
  make_sparse(huge, "{}\n", 3 * kGibi);
  for (const auto& [name, reader] : readers()) {
    const Outcome outcome = outcome_of([&] { reader(huge); });
    const bool text = name == std::string("data");
    EXPECT_HAS(outcome.error, text                             ? "expected at most 1G bytes of text"
                              : name == std::string("tensors") ? "expected a JSON header"
                              : name == std::string("config")
                                  ? "expected at most 64k bytes; got 3G (is it a config file?)"
                                  : "expected at most 1G bytes; got 3G");
    EXPECT_LT(outcome.memory, 16 * kMebi) << name;
  }
}

TEST(Hostile, TensorFilesTakeNoMemoryBeforeTheyAreChecked) {
  const TemporaryFolder folder;
  const std::string path = folder.path("a.safetensors");
  const auto refusal = [&](std::string_view start, std::uint64_t size) {
    make_sparse(path, start, size);
    const Outcome outcome = outcome_of([&] { read_safetensors(path); });
    EXPECT_LT(outcome.memory, 16 * kMebi);
    return outcome.error;
  };
  const auto with_shape = [](std::uint64_t size) {
    const std::string text = std::to_string(size);
    const std::string header =
        R"({"w":{"dtype":"U8","shape":[)" + text + R"(],"data_offsets":[0,)" + text + "]}}";
    return as_length(header.size()) + header;
  };
  EXPECT_HAS(refusal(as_length(kGibi) + "{", 2 * kGibi),
             "expected a header of at most 100000000 bytes, the limit of the format; got one of "
             "1073741824");
  EXPECT_HAS(refusal(as_length(kGibi) + "{", 100),
             "bytes left (not a safetensors file, or cut off)");
  EXPECT_HAS(refusal(with_shape(8), 4 * kGibi), "expected 8 bytes of tensors; got ");
  EXPECT_HAS(refusal(with_shape(4 * kGibi), 100), "(the file is cut off)");
  const std::uint64_t memory = static_cast<std::uint64_t>(sysconf(_SC_PHYS_PAGES)) *
                               static_cast<std::uint64_t>(sysconf(_SC_PAGESIZE));
  const std::string start = with_shape(memory);
  EXPECT_HAS(refusal(start, start.size() + memory), "half of this machine's memory; got ");
}

TEST(Hostile, ALongHeaderTakesNoMoreMemoryThanItsText) {
  const TemporaryFolder folder;
  const std::string path = folder.path("a.safetensors");
  constexpr std::size_t kLength = 20'000'000;
  const std::string lists = R"({"w":{"shape":[)" + repeated("[],", kLength / 3) + "0]}}";
  const std::string objects = R"({"w":{"shape":[)" + repeated("{},", kLength / 3) + "0]}}";
  const std::string numbers = R"({"w":{"shape":[)" + repeated("0,", kLength / 2) + "0]}}";
  for (const std::string& header : {lists, objects, numbers}) {
    write_file(path, as_length(header.size()) + header);
    const Outcome outcome = outcome_of([&] { read_safetensors(path); });
    EXPECT_HAS(outcome.error, "[safetensors] " + path + ": ");
    EXPECT_LT(outcome.memory, 2 * kLength) << header.substr(0, 30);
  }
}

TEST(Hostile, DeepJsonIsRefused) {
  const TemporaryFolder folder;
  const std::string run = folder.path("run"), state = folder.path("step");
  fs::create_directory(run);
  for (const std::string& deep : {deep_list(), deep_object()}) {
    for (const std::string& fields :
         {"\"run\",\"machine\":{\"a\":" + deep + "}", "\"clusters\",\"layers\":[" + deep + "]",
          "\"eval\",\"step\":1,\"strata\":" + deep, "\"measurement\",\"forward_ms\":" + deep}) {
      const std::string log = run + "/log.jsonl";
      write_file(log, "{\"kind\":\"run\"}\n{\"kind\":" + fields + "}\n");
      const std::string expected =
          "[json] " + log + ", line 2: expected JSON of at most 64 nested levels; got 100000";
      EXPECT_HAS(outcome_of([&] { make_report({.runs = {run}, .bench = "", .title = ""}); }).error,
                 expected);
      EXPECT_HAS(outcome_of([&] { make_report({.runs = {}, .bench = log, .title = ""}); }).error,
                 expected);
      EXPECT_HAS(outcome_of([&] { const Log resumed(log, 3); }).error, expected);
    }
    fs::create_directory(state);
    write_file(state + "/state.json", deep.substr(0, kMebi));
    EXPECT_HAS(outcome_of([&] { load_checkpoint(state); }).error, "64 nested levels");
    write_file(state + "/state.json", std::string(2 * kMebi, ' '));
    EXPECT_HAS(outcome_of([&] { load_checkpoint(state); }).error, "expected at most 1M bytes");
    fs::remove_all(state);
    const std::string header = "{\"w\":" + deep + "}";
    write_file(folder.path("a"), as_length(header.size()) + header);
    EXPECT_HAS(outcome_of([&] { read_safetensors(folder.path("a")); }).error, "deeper nesting");
  }
}

TEST(Hostile, BracketsInStringsAreNoNesting) {
  EXPECT_EQ(error_of([] { check_json("\"" + std::string(100, '[') + "\\\"[[\"", "here"); }), "");
  const auto nested = [](int depth) {
    return std::string(static_cast<std::size_t>(depth), '[') + "\"]]\"" +
           std::string(static_cast<std::size_t>(depth), ']');
  };
  EXPECT_EQ(error_of([&] { check_json(nested(kDeepestJson), "here"); }), "");
  EXPECT_EQ(error_of([&] { check_json(nested(kDeepestJson + 1), "here"); }),
            "here: expected JSON of at most 64 nested levels; got 65");
  EXPECT_EQ(error_of([&] { check_json(std::string(kLongestJson + 1, ' '), "here"); }),
            "here: expected at most 16M bytes of JSON in a line; got 16777217");
}

// Configs of the largest accepted size, in each shape that might be slow to parse.
TEST(Hostile, TheLargestConfigIsReadInTime) {
  const int bytes = static_cast<int>(kConfigFile.bytes);
  for (const std::string& text :
       {"attention = \"" + repeated("full+", bytes / 5) + "full\"\n",
        "attention-at = [" + repeated("\"0\",\"full\",", bytes / 11) + "]\n",
        "attention-at = [" + repeated("'','',", bytes / 6) + "]\n",
        "attention-at = [" + repeated("[", bytes), "data = \"" + repeated("\\", bytes),
        repeated("[a]\n", bytes / 4), repeated("a.b.c = 1\n", bytes / 10),
        "length = [" + repeated("9,", bytes / 2) + "]", "length = " + repeated("9", bytes)}) {
    const Outcome outcome = outcome_of([&] { parse_config(text, "a.toml"); });
    EXPECT_EQ(outcome.error.find("killed"), std::string::npos) << text.substr(0, 20);
    EXPECT_EQ(outcome.error.find("not an Error"), std::string::npos) << outcome.error.substr(0, 99);
    EXPECT_LT(outcome.memory, 256 * kMebi) << text.substr(0, 20);
  }
}

}  // namespace
}  // namespace coterie::train
