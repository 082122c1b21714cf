// SPDX-License-Identifier: MIT
// Threads for work outside the library: peaks, data, reference outputs.
#pragma once

#include <cstdint>
#include <functional>

namespace coterie::bench {

// Runs task(0) .. task(count - 1) at the same time, each in its own thread, the first one in the
// caller's.
void run_in_threads(int count, const std::function<void(int)>& task);

// Runs task(0) .. task(count - 1) in any order on all cores.
void run_on_all_cores(std::int64_t count, const std::function<void(std::int64_t)>& task);

}  // namespace coterie::bench
