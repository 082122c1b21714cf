// SPDX-License-Identifier: MIT
#include "train/run_lock.h"

#include <fcntl.h>
#include <fmt/core.h>
#include <sys/file.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <system_error>

#include "coterie/error.h"

namespace coterie::train {
namespace {

std::string own_name() {
  std::array<char, 256> host{};
  if (::gethostname(host.data(), host.size() - 1) != 0) host[0] = '\0';
  return fmt::format("process {} on {}", ::getpid(), host.data());
}

std::string owner_name(int file) {
  std::array<char, 512> text{};
  const ssize_t got = ::pread(file, text.data(), text.size() - 1, 0);
  return got > 0 ? std::string(text.data(), static_cast<std::size_t>(got)) : "another process";
}

}  // namespace

// The kernel releases the lock when the process ends, however it ends. The file stays: removing it
// would let a third process lock a new file while a second one waits for the old one.
RunLock::RunLock(const std::string& folder) {
  const std::string path = folder + "/.lock";
  file_ = ::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0666);
  if (file_ < 0) {
    throw Error("[train] cannot open " + path + ": " + std::generic_category().message(errno));
  }
  if (::flock(file_, LOCK_EX | LOCK_NB) != 0) {
    const bool taken = errno == EWOULDBLOCK;
    const std::string reason = taken ? owner_name(file_) : std::generic_category().message(errno);
    ::close(file_);
    throw Error(taken ? "[train] " + folder + " is in use by " + reason +
                            ": wait for it, stop it or choose another --out"
                      : "[train] cannot lock " + path + ": " + reason);
  }
  const std::string name = own_name();
  const bool written = ::ftruncate(file_, 0) == 0 && ::pwrite(file_, name.data(), name.size(), 0) ==
                                                         static_cast<ssize_t>(name.size());
  if (!written) {
    const int error = errno;
    ::close(file_);
    throw Error("[train] cannot write " + path + ": " + std::generic_category().message(error));
  }
}

RunLock::~RunLock() {
  (void)!::ftruncate(file_, 0);
  ::close(file_);
}

}  // namespace coterie::train
