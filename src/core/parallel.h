// SPDX-License-Identifier: MIT
// The library's threads. Tasks are handed out in order of their index to whichever thread is free;
// a task must write only what is its own, so that results do not depend on the number of threads.
#pragma once

#include <cstdint>
#include <functional>

namespace coterie {

// Calls task(index, worker) for every index in [0, count). `worker` < threads() names the calling
// thread's scratch memory. A call from inside a task runs in that task's thread, as worker 0 of its
// own. The first exception of a task is rethrown.
void parallel_for(std::int64_t count,
                  const std::function<void(std::int64_t index, int worker)>& task);

}  // namespace coterie
