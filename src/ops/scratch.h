// SPDX-License-Identifier: MIT
// Host memory for operations that ask the caller for none.
#pragma once

#include "core/arena.h"

namespace coterie::ops {

// take(arena), once to count and once with memory, which `memory` then owns.
template <class Take>
auto take_scratch(HostTensor& memory, Take take) {
  Arena counting;
  take(counting);
  memory = HostTensor(DType::u8, {counting.used()});
  Arena arena("scratch", {memory.view().data, counting.used(), nullptr}, counting.used());
  return take(arena);
}

}  // namespace coterie::ops
