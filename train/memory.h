// SPDX-License-Identifier: MIT
// Memory use of a run.
//
// On a GPU: the bytes allocated by torch's allocator. On the CPU: the growth of the process's
// resident memory since the meter was made. To make successive runs in one process comparable, the
// constructor returns freed memory to the system and resets the system's record of the peak (Linux;
// where that is not allowed, the peak is that of the whole process). On other systems: 0.
#pragma once

#include <c10/core/Device.h>

#include <cstdint>

namespace coterie::train {

class MemoryMeter {
 public:
  explicit MemoryMeter(c10::Device device);
  std::int64_t bytes() const;       // now
  std::int64_t peak_bytes() const;  // the most since the meter was made

 private:
  c10::Device device_;
  std::int64_t start_ = 0;
};

}  // namespace coterie::train
