// SPDX-License-Identifier: MIT
#include "formats/files.h"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include <algorithm>
#include <csignal>
#include <string>
#include <vector>

#include "coterie/error.h"
#include "formats/checksum.h"
#include "tests/support/tensors.h"
#include "tests/train/temporary_folder.h"

namespace coterie::train {
namespace {

namespace fs = std::filesystem;

std::vector<std::string> names_in(const std::string& folder) {
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator(folder)) {
    names.push_back(entry.path().filename().string());
  }
  std::sort(names.begin(), names.end());
  return names;
}

using test::error_of;

// Limits the size of written files to `bytes` during its lifetime, to simulate a full disk.
class SmallDisk {
 public:
  explicit SmallDisk(rlim_t bytes) : handler_(std::signal(SIGXFSZ, SIG_IGN)) {
    getrlimit(RLIMIT_FSIZE, &before_);
    rlimit limit = before_;
    limit.rlim_cur = bytes;
    setrlimit(RLIMIT_FSIZE, &limit);
  }
  ~SmallDisk() {
    setrlimit(RLIMIT_FSIZE, &before_);
    std::signal(SIGXFSZ, handler_);
  }
  SmallDisk(const SmallDisk&) = delete;
  SmallDisk& operator=(const SmallDisk&) = delete;

 private:
  void (*handler_)(int);
  rlimit before_{};
};

// Known values of XXH3 without a seed.
TEST(Files, ChecksumsAreXxh3) {
  const TemporaryFolder folder;
  const std::string path = folder.path("a");
  const auto checksum = [&](const std::string& text) {
    write_file(path, text);
    return file_checksum(path);
  };
  EXPECT_EQ(checksum(""), "xxh3:2d06800538d394c2");
  EXPECT_EQ(checksum("a"), "xxh3:e6c632b61e964e1f");
  const std::string pieces(200'000, 'x');  // several reads
  EXPECT_EQ(checksum(pieces), checksum(pieces));
  EXPECT_NE(checksum(pieces), checksum(pieces + 'x'));
  std::string flipped = pieces;
  flipped[70'000] ^= 1;
  EXPECT_NE(checksum(pieces), checksum(flipped));
  fs::remove(path);
  EXPECT_EQ(error_of([&] { file_checksum(path); }),
            "[files] cannot read " + path + ": No such file or directory");
}

TEST(Files, WhatIsWrittenIsRead) {
  const TemporaryFolder folder;
  const std::string text = std::string("a\0b\n", 4) + std::string(200'000, 'x');
  write_file(folder.path("a.txt"), text);
  EXPECT_EQ(read_file(folder.path("a.txt")), text);
  write_file(folder.path("a.txt"), {"in ", "", "parts"});
  EXPECT_EQ(read_file(folder.path("a.txt")), "in parts");
  write_file(folder.path("a.txt"), "");
  EXPECT_EQ(read_file(folder.path("a.txt")), "");
  EXPECT_EQ(names_in(folder.path()), std::vector<std::string>{"a.txt"});
}

TEST(Files, OthersMayReadWhatIsWrittenAsTheUserWants) {
  const TemporaryFolder folder;
  const mode_t mask = umask(022);
  write_file(folder.path("a.txt"), "a");
  umask(mask);
  EXPECT_EQ(fs::status(folder.path("a.txt")).permissions(), fs::perms{0644});
}

TEST(Files, AFullDiskKeepsTheOldFile) {
  const TemporaryFolder folder;
  write_file(folder.path("a.txt"), "old");
  const std::string error = [&] {
    const SmallDisk disk(1000);
    return error_of([&] { write_file(folder.path("a.txt"), std::string(5000, 'x')); });
  }();
  EXPECT_NE(error.find("cannot write " + folder.path("a.txt") + ": "), std::string::npos) << error;
  EXPECT_EQ(read_file(folder.path("a.txt")), "old");
  EXPECT_EQ(names_in(folder.path()), std::vector<std::string>{"a.txt"});
}

TEST(Files, ErrorsNameTheFileAndTheReason) {
  const TemporaryFolder folder;
  const std::string missing = folder.path("no/a.txt");
  EXPECT_EQ(error_of([&] { write_file(missing, "a"); }),
            "[files] cannot write " + missing + ": No such file or directory");
  EXPECT_EQ(error_of([&] { write_folder(missing, [](const std::string&) {}); }),
            "[files] cannot write " + missing + ": No such file or directory");
  EXPECT_EQ(error_of([&] { read_file(missing); }),
            "[files] cannot read " + missing + ": No such file or directory");
  EXPECT_EQ(error_of([&] { read_file(folder.path()); }),
            "[files] cannot read " + folder.path() + ": Is a directory");
  EXPECT_EQ(error_of([&] { write_file(folder.path(), "a"); }),
            "[files] cannot write " + folder.path() + ": Is a directory");
}

TEST(Files, AFolderAppearsWithAllThatIsInIt) {
  const TemporaryFolder folder;
  const std::string path = folder.path("made");
  write_folder(path, [&](const std::string& inside) {
    EXPECT_FALSE(fs::exists(path));
    EXPECT_NE(inside.find(kPartial), std::string::npos);
    write_file(inside + "/a", "1");
    fs::create_directory(inside + "/deeper");
    write_file(inside + "/deeper/b", "2");
  });
  EXPECT_EQ(read_file(path + "/a"), "1");
  EXPECT_EQ(read_file(path + "/deeper/b"), "2");
  EXPECT_EQ(names_in(folder.path()), std::vector<std::string>{"made"});
}

TEST(Files, ANewFolderReplacesTheOldOne) {
  const TemporaryFolder folder;
  const std::string path = folder.path("made");
  write_folder(path, [](const std::string& inside) { write_file(inside + "/old", "1"); });
  write_folder(path, [](const std::string& inside) { write_file(inside + "/new", "2"); });
  EXPECT_EQ(names_in(path), std::vector<std::string>{"new"});
  EXPECT_EQ(names_in(folder.path()), std::vector<std::string>{"made"});
}

TEST(Files, AFolderThatFailsLeavesTheOldOne) {
  const TemporaryFolder folder;
  const std::string path = folder.path("made");
  write_folder(path, [](const std::string& inside) { write_file(inside + "/old", "1"); });
  EXPECT_THROW(write_folder(path,
                            [](const std::string& inside) {
                              write_file(inside + "/new", "2");
                              throw Error("in the middle");
                            }),
               Error);
  EXPECT_EQ(names_in(path), std::vector<std::string>{"old"});
  EXPECT_EQ(names_in(folder.path()), std::vector<std::string>{"made"});
}

}  // namespace
}  // namespace coterie::train
