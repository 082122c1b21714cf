// SPDX-License-Identifier: MIT
// Host memory for operations that ask the caller for none.
#pragma once

#include "core/arena.h"
#include "core/parallel.h"
#include "coterie/tensor.h"

namespace coterie::ops {

// The memory, and the number of threads that it is for.
struct Scratch {
  CallThreads threads;
  HostTensor memory;
};

// take(arena), once to count and once with memory, which `scratch` then owns.
template <class Take>
auto take_scratch(Scratch& scratch, Take take) {
  Arena counting;
  take(counting);
  scratch.memory = HostTensor(DType::u8, {counting.used()});
  Arena arena("scratch", {scratch.memory.view().data, counting.used(), nullptr}, counting.used());
  return take(arena);
}

}  // namespace coterie::ops
