// SPDX-License-Identifier: MIT
// The memory that a run takes.
//
// On a GPU it is what torch's allocator has given out, as that allocator counts it. On the CPU it
// is the resident memory of the process above what it was when the meter was made, so that runs one
// after the other in one process can be compared: before, freed memory is given back to the system
// and the system's record of the peak is reset (Linux; where that is not allowed the peak is the
// process's, which an earlier, larger run may have set). Elsewhere it is 0.
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
