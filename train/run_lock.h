// SPDX-License-Identifier: MIT
// A lock on the folder of a run: two processes that write into one folder would destroy each
// other's logs and checkpoints.
#pragma once

#include <string>

namespace coterie::train {

// Holds the file FOLDER/.lock, which names the process, until destruction or the end of the
// process. Throws Error with the owner's name if another process holds it.
class RunLock {
 public:
  explicit RunLock(const std::string& folder);
  ~RunLock();
  RunLock(const RunLock&) = delete;
  RunLock& operator=(const RunLock&) = delete;

 private:
  int file_ = -1;
};

}  // namespace coterie::train
