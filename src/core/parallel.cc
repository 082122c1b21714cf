// SPDX-License-Identifier: MIT
#include "core/parallel.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <exception>
#include <mutex>
#include <new>
#include <thread>
#include <utility>
#include <vector>

#include "core/check.h"

namespace coterie {

namespace {

int initial_threads() {
  if (const char* text = std::getenv("COTERIE_THREADS")) {
    char* end = nullptr;
    const long count = std::strtol(text, &end, 10);
    COTERIE_CHECK(*text != '\0' && *end == '\0' && count >= 1 && count <= kMaxThreads,
                  "COTERIE_THREADS", "expected 1 to ", kMaxThreads, " threads; got '", text, "'");
    return static_cast<int>(count);
  }
  return std::clamp(static_cast<int>(std::thread::hardware_concurrency()), 1, kMaxThreads);
}

// Neither this nor the pool below has a constructor or destructor to run: other threads may be
// inside a call while the process starts, forks or exits.
std::atomic<int> thread_count{0};  // 0: not set yet
thread_local int fixed_count = 0;  // set by CallThreads; 0: none

using Task = std::function<void(std::int64_t, int)>;

// One batch of tasks: workers take indices until none is left.
struct Job {
  const Task* task = nullptr;
  std::int64_t count = 0;
  std::atomic<std::int64_t> next{0};
  std::mutex error_mutex;
  std::exception_ptr error;

  void work(int worker) {
    for (std::int64_t index; (index = next.fetch_add(1)) < count;) {
      try {
        (*task)(index, worker);
      } catch (...) {
        const std::lock_guard<std::mutex> lock(error_mutex);
        if (!error) error = std::current_exception();
        next = count;
      }
    }
  }
};

class Pool {
 public:
  ~Pool() {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      stopping_ = true;
    }
    wake_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }

  int size() const { return static_cast<int>(threads_.size()) + 1; }

  // Starts threads until there are `wanted` workers, or as many as the system grants.
  void grow(int wanted) {
    try {
      while (size() < wanted)
        threads_.emplace_back([this, worker = size(), seen = generation_] { serve(worker, seen); });
    } catch (const std::exception&) {  // out of memory or threads: use fewer workers
    }
  }

  void run(Job& job) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      job_ = &job;
      busy_ = static_cast<int>(threads_.size());
      ++generation_;
    }
    wake_.notify_all();
    job.work(0);
    std::unique_lock<std::mutex> lock(mutex_);
    done_.wait(lock, [this] { return busy_ == 0; });
    job_ = nullptr;
  }

  Pool* parent = nullptr;  // the pool of the parent process

 private:
  void serve(int worker, std::uint64_t seen);

  std::mutex mutex_;
  std::condition_variable wake_, done_;
  Job* job_ = nullptr;
  int busy_ = 0;
  std::uint64_t generation_ = 0;
  bool stopping_ = false;
  std::vector<std::thread> threads_;
};

thread_local bool inside_task = false;

// `seen` is the generation of the last job before this thread started.
void Pool::serve(int worker, std::uint64_t seen) {
  inside_task = true;
  for (;;) {
    Job* job = nullptr;
    {
      std::unique_lock<std::mutex> lock(mutex_);
      wake_.wait(lock, [&] { return stopping_ || generation_ != seen; });
      if (stopping_) return;
      seen = generation_;
      job = job_;
    }
    job->work(worker);
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (--busy_ == 0) done_.notify_one();
    }
  }
}

// One caller at a time owns the pool, so tasks of different callers never mix.
std::mutex pool_mutex;
Pool* pool = nullptr;

// A child process has only the thread that forked: it cannot use or join the pool's threads, and
// the mutex may be held by a thread that does not exist in it. The parent's pool stays in memory,
// unused but reachable for leak checkers.
Pool* parents_pool = nullptr;
void start_child() {
  new (&pool_mutex) std::mutex;
  if (!pool) return;
  pool->parent = parents_pool;
  parents_pool = pool;
  pool = nullptr;
}
[[maybe_unused]] const int at_fork = pthread_atfork(nullptr, nullptr, start_child);

void run_serially(std::int64_t count, const Task& task) {
  for (std::int64_t index = 0; index < count; ++index) task(index, 0);
}

}  // namespace

int threads() {
  if (const int count = thread_count) return count;
  int unset = 0;
  thread_count.compare_exchange_strong(unset, initial_threads());
  return thread_count;
}

void set_threads(int count) {
  COTERIE_CHECK(count >= 1 && count <= kMaxThreads, "set_threads", "expected 1 to ", kMaxThreads,
                " threads; got ", count);
  thread_count = count;
}

CallThreads::CallThreads(int most) : outer_(fixed_count) {
  if (outer_ == 0) fixed_count = std::min(most, threads());
}

CallThreads::CallThreads(std::int64_t bytes, const std::function<std::int64_t()>& needed, int most)
    : CallThreads(most) {
  while (outer_ == 0 && fixed_count > 1 && needed() > bytes) fixed_count /= 2;
}

CallThreads::~CallThreads() { fixed_count = outer_; }

int call_threads() {
  COTERIE_CHECK(fixed_count > 0, "internal", "call_threads() needs a CallThreads in scope");
  return fixed_count;
}

void parallel_for(std::int64_t count, const Task& task) {
  const int wanted = fixed_count > 0 ? fixed_count : threads();
  if (inside_task || wanted == 1 || count <= 1) return run_serially(count, task);
  const std::lock_guard<std::mutex> lock(pool_mutex);
  if (pool && pool->size() > wanted) delete std::exchange(pool, nullptr);
  if (!pool) pool = new Pool;
  pool->grow(wanted);
  Job job;
  job.task = &task;
  job.count = count;
  inside_task = true;
  pool->run(job);
  inside_task = false;
  if (job.error) std::rethrow_exception(job.error);
}

}  // namespace coterie
