// SPDX-License-Identifier: MIT
#include "core/parallel.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <exception>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "core/check.h"
#include "coterie/runtime.h"

namespace coterie {

namespace {

constexpr int kMaxThreads = 1024;

int initial_threads() {
  if (const char* text = std::getenv("COTERIE_THREADS")) {
    const int count = std::atoi(text);
    if (count >= 1 && count <= kMaxThreads) return count;
  }
  return std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
}

std::atomic<int>& thread_count() {
  static std::atomic<int> count{initial_threads()};
  return count;
}

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
  explicit Pool(int size) : pid_(getpid()) {
    for (int worker = 1; worker < size; ++worker)
      threads_.emplace_back([this, worker] { serve(worker); });
  }

  ~Pool() {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      stopping_ = true;
    }
    wake_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }

  int size() const { return static_cast<int>(threads_.size()) + 1; }
  // Threads do not survive a fork: a pool made by another process must not be used or destroyed.
  bool alive() const { return pid_ == getpid(); }

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

 private:
  void serve(int worker);

  const pid_t pid_;
  std::mutex mutex_;
  std::condition_variable wake_, done_;
  Job* job_ = nullptr;
  int busy_ = 0;
  std::uint64_t generation_ = 0;
  bool stopping_ = false;
  std::vector<std::thread> threads_;
};

thread_local bool inside_task = false;

void Pool::serve(int worker) {
  inside_task = true;
  std::uint64_t seen = 0;
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

// One caller at a time owns the pool; its tasks see no other caller's.
std::mutex pool_mutex;
std::unique_ptr<Pool> pool;

void run_serially(std::int64_t count, const Task& task) {
  for (std::int64_t index = 0; index < count; ++index) task(index, 0);
}

}  // namespace

int threads() { return thread_count().load(); }

void set_threads(int count) {
  COTERIE_CHECK(count >= 1 && count <= kMaxThreads, "set_threads", "expected 1 to ", kMaxThreads,
                " threads; got ", count);
  thread_count() = count;
}

void parallel_for(std::int64_t count, const Task& task) {
  const int wanted = threads();
  if (inside_task || wanted == 1 || count <= 1) return run_serially(count, task);
  const std::lock_guard<std::mutex> lock(pool_mutex);
  if (pool && !pool->alive()) pool.release();
  if (!pool || pool->size() != wanted) pool = std::make_unique<Pool>(wanted);
  Job job;
  job.task = &task;
  job.count = count;
  inside_task = true;
  pool->run(job);
  inside_task = false;
  if (job.error) std::rethrow_exception(job.error);
}

}  // namespace coterie
