// SPDX-License-Identifier: MIT
// Content is written to a temporary name, synced and renamed, and the folder is synced: after a
// crash or on a full disk either the old or the new content is there.
#include "formats/files.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <filesystem>
#include <system_error>
#include <utility>

#include "coterie/error.h"

namespace coterie::train {
namespace {

namespace fs = std::filesystem;

[[noreturn]] void fail(const std::string& doing, const std::string& path, int error) {
  throw Error("[files] cannot " + doing + " " + path + ": " +
              std::generic_category().message(error));
}

class Descriptor {
 public:
  Descriptor(const std::string& path, int flags) : number_(::open(path.c_str(), flags, 0666)) {}
  ~Descriptor() {
    if (number_ >= 0) ::close(number_);
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;

  int number() const { return number_; }
  int close() { return ::close(std::exchange(number_, -1)); }

 private:
  int number_;
};

void write_all(int descriptor, std::string_view content, const std::string& path) {
  while (!content.empty()) {
    const ssize_t written = ::write(descriptor, content.data(), content.size());
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) fail("write", path, errno);
    content.remove_prefix(static_cast<std::size_t>(written));
  }
}

void sync(const std::string& path) {
  Descriptor entry(path, O_RDONLY | O_CLOEXEC);
  if (entry.number() < 0) fail("open", path, errno);
  // Some file systems cannot sync folders, and say so with EINVAL.
  if (::fsync(entry.number()) != 0 && errno != EINVAL) fail("sync", path, errno);
}

std::string parent_of(const std::string& path) {
  const std::string parent = fs::path(path).parent_path().string();
  return parent.empty() ? "." : parent;
}

std::string partial_name(const std::string& path, std::string_view kind) {
  std::string name = path;
  while (name.size() > 1 && name.back() == '/') name.pop_back();
  return name + std::string(kPartial) + std::to_string(::getpid()) + std::string(kind);
}

void rename_entry(const std::string& from, const std::string& to) {
  if (std::rename(from.c_str(), to.c_str()) != 0) fail("write", to, errno);
}

// Like rename_entry, but also replaces folders, which rename(2) does not.
void replace_entry(const std::string& from, const std::string& to, const std::string& aside) {
  std::error_code ignored;
  const bool replaces = fs::exists(to, ignored);
  if (replaces) rename_entry(to, aside);
  if (std::rename(from.c_str(), to.c_str()) == 0) return;
  const int error = errno;
  if (replaces) rename_entry(aside, to);
  fail("write", to, error);
}

// Removes what is left under a temporary name when it goes out of scope.
struct Remover {
  std::string path;
  ~Remover() {
    std::error_code ignored;
    fs::remove_all(path, ignored);
  }
};

}  // namespace

void write_file(const std::string& path, std::string_view content) {
  write_file(path, std::vector<std::string_view>{content});
}

void write_file(const std::string& path, const std::vector<std::string_view>& parts) {
  const Remover partial{partial_name(path, "")};
  Descriptor file(partial.path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC);
  if (file.number() < 0) fail("write", path, errno);
  for (const std::string_view part : parts) write_all(file.number(), part, path);
  if (::fsync(file.number()) != 0) fail("write", path, errno);
  if (file.close() != 0) fail("write", path, errno);
  rename_entry(partial.path, path);
  sync(parent_of(path));
}

void write_folder(const std::string& path, const std::function<void(const std::string&)>& fill) {
  const Remover partial{partial_name(path, "")};
  const Remover old{partial_name(path, "-old")};
  std::error_code error;
  fs::remove_all(partial.path, error);  // left by an earlier process with this id
  fs::remove_all(old.path, error);
  if (!fs::create_directory(partial.path, error)) fail("write", path, error.value());
  fill(partial.path);
  for (const fs::directory_entry& entry : fs::recursive_directory_iterator(partial.path)) {
    sync(entry.path().string());
  }
  sync(partial.path);
  replace_entry(partial.path, path, old.path);
  sync(parent_of(path));
}

std::string size_text(std::uint64_t bytes) {
  int units = 0;
  for (; units < 3 && bytes != 0 && bytes % 1024 == 0; ++units) bytes /= 1024;
  const char* const names[] = {"", "k", "M", "G"};
  return std::to_string(bytes) + names[units];
}

// Without O_NONBLOCK, opening a pipe waits for a writer.
InputFile::InputFile(std::string path)
    : path_(std::move(path)),
      number_(::open(path_.c_str(), O_RDONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC)) {
  struct stat status {};
  if (number_ < 0) fail("read", path_, errno);
  const int error = ::fstat(number_, &status) != 0 ? errno : S_ISDIR(status.st_mode) ? EISDIR : 0;
  if (error == 0 && S_ISREG(status.st_mode)) {
    size_ = static_cast<std::uint64_t>(status.st_size);
    return;
  }
  ::close(number_);
  if (error != 0) fail("read", path_, error);
  throw Error("[files] cannot read " + path_ + ": expected a regular file; got a " +
              (S_ISFIFO(status.st_mode)   ? "pipe"
               : S_ISSOCK(status.st_mode) ? "socket"
                                          : "device"));
}

InputFile::~InputFile() { ::close(number_); }

std::size_t InputFile::read(char* to, std::size_t count) {
  std::size_t done = 0;
  while (done < count) {
    const ssize_t got = ::read(number_, to + done, count - done);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) fail("read", path_, errno);
    if (got == 0) break;
    done += static_cast<std::size_t>(got);
  }
  return done;
}

std::string read_file(const std::string& path, const FileLimit& limit) {
  InputFile file(path);
  const auto check = [&](std::uint64_t size) {
    if (size > limit.bytes) {
      throw Error("[files] cannot read " + path + ": expected at most " + size_text(limit.bytes) +
                  " bytes; got " + size_text(size) + " (" + limit.advice + ")");
    }
  };
  check(file.size());
  std::string content;
  content.reserve(file.size());
  std::vector<char> piece(1 << 16);
  for (std::size_t got = piece.size(); got == piece.size();) {
    got = file.read(piece.data(), piece.size());
    content.append(piece.data(), got);
    check(content.size());  // the file may grow meanwhile
  }
  return content;
}

}  // namespace coterie::train
