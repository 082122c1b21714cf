// SPDX-License-Identifier: MIT
// Terminates the program and prints the name of the test when a kernel does not return. A hanging
// kernel cannot be stopped in any other way.
#pragma once

#include <gtest/gtest.h>

#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <string>
#include <thread>
#include <utility>

namespace coterie::gpu_test {

class Watchdog {
 public:
  explicit Watchdog(std::chrono::seconds limit = std::chrono::seconds(60),
                    std::string name = current_test())
      : name_(std::move(name)), thread_([this, limit] {
          std::unique_lock<std::mutex> lock(mutex_);
          if (done_.wait_for(lock, limit, [this] { return over_; })) return;
          std::fprintf(stderr, "%s did not end within %lld s\n", name_.c_str(),
                       static_cast<long long>(limit.count()));
          std::fflush(nullptr);
          std::_Exit(3);
        }) {}
  ~Watchdog() {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      over_ = true;
    }
    done_.notify_all();
    thread_.join();
  }
  Watchdog(const Watchdog&) = delete;
  Watchdog& operator=(const Watchdog&) = delete;

 private:
  static std::string current_test() {
    const ::testing::TestInfo* test = ::testing::UnitTest::GetInstance()->current_test_info();
    return test ? std::string(test->test_suite_name()) + "." + test->name() : "the program";
  }

  const std::string name_;
  std::mutex mutex_;
  std::condition_variable done_;
  bool over_ = false;
  std::thread thread_;  // last, because it uses the other members
};

}  // namespace coterie::gpu_test
