// SPDX-License-Identifier: MIT
#include "bench/threads.h"

#include <algorithm>
#include <atomic>
#include <thread>
#include <vector>

namespace coterie::bench {

void run_in_threads(int count, const std::function<void(int)>& task) {
  std::vector<std::thread> others;
  for (int t = 1; t < count; ++t) others.emplace_back(task, t);
  task(0);
  for (std::thread& other : others) other.join();
}

void run_on_all_cores(std::int64_t count, const std::function<void(std::int64_t)>& task) {
  std::atomic<std::int64_t> next{0};
  const std::int64_t cores = std::max(1u, std::thread::hardware_concurrency());
  run_in_threads(static_cast<int>(std::min(cores, std::max<std::int64_t>(count, 1))), [&](int) {
    for (std::int64_t i = next++; i < count; i = next++) task(i);
  });
}

}  // namespace coterie::bench
