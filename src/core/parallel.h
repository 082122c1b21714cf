// SPDX-License-Identifier: MIT
// The library's threads. Tasks are handed out in order of their index to whichever thread is free;
// a task must write only what is its own, so that results do not depend on the number of threads.
// A process has one set of threads. The child of a fork starts without and makes its own.
#pragma once

#include <cstdint>
#include <functional>

namespace coterie {

// Fixes the number of threads of one operation for the lifetime of the object, in the thread that
// made it: scratch memory is sized by call_threads(), and parallel_for has no more workers than
// that, whatever set_threads does meanwhile. Inside another CallThreads it changes nothing.
class CallThreads {
 public:
  CallThreads();  // threads()
  // For memory of `bytes` that the caller counted: fewer threads where needed() exceeds it, because
  // it was counted for fewer.
  CallThreads(std::int64_t bytes, const std::function<std::int64_t()>& needed);
  ~CallThreads();
  CallThreads(const CallThreads&) = delete;
  CallThreads& operator=(const CallThreads&) = delete;

 private:
  const int outer_;
};
int call_threads();  // throws outside of a CallThreads

// Calls task(index, worker) for every index in [0, count). `worker` < call_threads() names the
// calling thread's scratch memory. A call from inside a task runs in that task's thread, as worker
// 0 of its own. The first exception of a task is rethrown. Where the system grants fewer threads,
// fewer do the work.
void parallel_for(std::int64_t count,
                  const std::function<void(std::int64_t index, int worker)>& task);

}  // namespace coterie
