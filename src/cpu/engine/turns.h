// SPDX-License-Identifier: MIT
// A fixed order for sums that several tasks add to: a task waits until all earlier ones have added
// their part. Sums are then the same for any number of threads.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <thread>

namespace coterie::cpu {

// One counter per sum: the number of the task whose turn it is, initially 0. Tasks must start in
// the order of their numbers; otherwise one could wait for another that never starts.
class Turns {
 public:
  explicit Turns(std::int64_t sums)
      : next_(new std::atomic<std::int64_t>[static_cast<std::size_t>(sums)]()) {}

  void start(std::int64_t sum, std::int64_t task) { next_[static_cast<std::size_t>(sum)] = task; }
  std::int64_t next(std::int64_t sum) const {
    return next_[static_cast<std::size_t>(sum)].load(std::memory_order_acquire);
  }

  // Runs a task. If it throws, results are invalid and no other task waits for it.
  template <class Task>
  void run(const Task& task) {
    try {
      task();
    } catch (...) {
      failed_ = true;
      throw;
    }
  }

  // A task's turn at a sum: lasts from the end of the constructor to the destructor.
  class Turn {
   public:
    Turn(Turns& turns, std::int64_t sum, std::int64_t task)
        : turns_(turns), sum_(sum), task_(task) {
      while (turns_.next(sum_) < task_ && !turns_.failed_) std::this_thread::yield();
    }
    ~Turn() {
      turns_.next_[static_cast<std::size_t>(sum_)].store(task_ + 1, std::memory_order_release);
    }
    Turn(const Turn&) = delete;
    Turn& operator=(const Turn&) = delete;

   private:
    Turns& turns_;
    std::int64_t sum_, task_;
  };

 private:
  std::unique_ptr<std::atomic<std::int64_t>[]> next_;
  std::atomic<bool> failed_{false};
};

}  // namespace coterie::cpu
