// SPDX-License-Identifier: MIT
// The library's threads. Tasks are handed out in order of their index to whichever thread is free;
// a task must write only its own data, so that results do not depend on the number of threads. A
// process has one set of threads. The child of a fork starts with none and makes its own.
#pragma once

#include <cstdint>
#include <functional>

#include "coterie/runtime.h"

namespace coterie {

// Fixes the number of threads of one operation for the lifetime of the object, in the thread that
// made it: scratch memory is sized by call_threads(), and parallel_for has no more workers than
// that, even if set_threads is called meanwhile. Inside another CallThreads it has no effect.
class CallThreads {
 public:
  explicit CallThreads(int most = kMaxThreads);  // threads(), at most `most`
  // For a workspace of `bytes` bytes, which may have been sized for fewer threads: halves their
  // number until needed() fits.
  CallThreads(std::int64_t bytes, const std::function<std::int64_t()>& needed,
              int most = kMaxThreads);
  ~CallThreads();
  CallThreads(const CallThreads&) = delete;
  CallThreads& operator=(const CallThreads&) = delete;

 private:
  const int outer_;
};
int call_threads();  // throws outside of a CallThreads

// Calls task(index, worker) for every index in [0, count). `worker` < call_threads() selects the
// thread's scratch memory. A call from inside a task runs serially in that task's thread, as worker
// 0. The first exception of a task is rethrown. If the system grants fewer threads, fewer do the
// work.
void parallel_for(std::int64_t count,
                  const std::function<void(std::int64_t index, int worker)>& task);

}  // namespace coterie
