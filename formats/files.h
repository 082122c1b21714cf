// SPDX-License-Identifier: MIT
// Atomic writes, and reads of untrusted files with a size limit. A process that is killed leaves at
// most entries whose names contain kPartial.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

namespace coterie::train {

constexpr std::string_view kPartial = ".partial-";

// Writes to a temporary name next to `path`, syncs to disk and renames; removes it and throws Error
// (with the system's reason: "No space left on device") when anything fails.
void write_file(const std::string& path, std::string_view content);
void write_file(const std::string& path, const std::vector<std::string_view>& parts);

// Calls `fill` with a temporary folder next to `path`, syncs its files and renames it to `path`;
// what was there before is removed afterwards. Removes the temporary folder when `fill` throws.
void write_folder(const std::string& path, const std::function<void(const std::string&)>& fill);

// "4G", "512k", "1000": a number of bytes as options take it, where k, M and G are 2^10, 2^20,
// 2^30.
std::string size_text(std::uint64_t bytes);

// The largest file that is read, and what its user can do about a larger one.
struct FileLimit {
  std::uint64_t bytes;
  const char* advice;
};
constexpr FileLimit kAnyFile = {std::uint64_t{1} << 30, "is it the right file?"};
constexpr FileLimit kSmallFile = {std::uint64_t{1} << 20, "is it the right file?"};
constexpr FileLimit kTaskFile = {std::uint64_t{1} << 28, "is it a vocabulary or tokenizer?"};
constexpr FileLimit kConfigFile = {std::uint64_t{1} << 16, "is it a config file?"};

// A regular file that is open for reading. Throws Error for everything else: reading a pipe may
// block for ever, and a device may be endless.
class InputFile {
 public:
  explicit InputFile(std::string path);
  ~InputFile();
  InputFile(const InputFile&) = delete;
  InputFile& operator=(const InputFile&) = delete;

  int descriptor() const { return number_; }
  std::uint64_t size() const { return size_; }    // when it was opened; 0 for files of /proc
  std::size_t read(char* to, std::size_t count);  // less than `count` only at the end

 private:
  std::string path_;
  int number_;
  std::uint64_t size_ = 0;
};

// Throws Error when the file cannot be read or is larger than the limit.
std::string read_file(const std::string& path, const FileLimit& limit = kAnyFile);

}  // namespace coterie::train
