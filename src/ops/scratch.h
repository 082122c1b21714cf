// SPDX-License-Identifier: MIT
// Host memory for operations that take no workspace from the caller.
#pragma once

#include "core/arena.h"
#include "core/parallel.h"
#include "coterie/tensor.h"

namespace coterie::ops {

// The memory, and the number of threads it is sized for.
struct Scratch {
  CallThreads threads;
  HostTensor memory;
};

// Calls take(arena) twice: to count, then with memory that `scratch` owns.
template <class Take>
auto take_scratch(Scratch& scratch, Take take) {
  Arena counting;
  take(counting);
  scratch.memory = HostTensor(DType::u8, {counting.used()});
  Arena arena("scratch", {scratch.memory.view().data, counting.used(), nullptr}, counting.used());
  return take(arena);
}

}  // namespace coterie::ops
