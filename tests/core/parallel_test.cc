// SPDX-License-Identifier: MIT
// Threads and scratch memory: an operation keeps its number of threads, each task runs once, and no
// allocation exceeds the workspace.
#include "core/parallel.h"

#include <gtest/gtest.h>

#include <atomic>
#include <limits>
#include <thread>
#include <vector>

#include "core/arena.h"
#include "coterie/runtime.h"
#include "coterie/tensor.h"
#include "tests/support/tensors.h"

namespace coterie {
namespace {

using test::error_of;

class ParallelTest : public ::testing::Test {
 protected:
  void TearDown() override { set_threads(2); }
};

TEST_F(ParallelTest, RunsEveryTaskOnceWithAWorkerBelowTheNumberOfThreads) {
  for (const int count : {1, 2, 7, 3, 64, 2}) {
    set_threads(count);
    std::vector<std::atomic<int>> runs(1000);
    std::atomic<int> most{0};
    parallel_for(1000, [&](std::int64_t index, int worker) {
      ++runs[static_cast<std::size_t>(index)];
      for (int seen = most; worker > seen && !most.compare_exchange_weak(seen, worker);) {
      }
    });
    for (const std::atomic<int>& run : runs) EXPECT_EQ(run, 1);
    EXPECT_LT(most, count);
  }
}

TEST_F(ParallelTest, AnOperationKeepsItsNumberOfThreads) {
  set_threads(3);
  {
    const CallThreads call;
    set_threads(16);
    EXPECT_EQ(call_threads(), 3);
    const CallThreads inner;
    EXPECT_EQ(call_threads(), 3);
    for (int repeat = 0; repeat < 20; ++repeat)
      parallel_for(200, [&](std::int64_t, int worker) { EXPECT_LT(worker, 3); });
    // An operation of another thread has its own number.
    std::thread([] {
      const CallThreads other;
      EXPECT_EQ(call_threads(), 16);
    }).join();
  }
  const CallThreads next;
  EXPECT_EQ(call_threads(), 16);
}

TEST_F(ParallelTest, ScratchMemoryOutsideOfAnOperationIsRefused) {
  EXPECT_NE(error_of([] { call_threads(); }), "");
}

TEST_F(ParallelTest, AnOperationHasAsManyThreadsAsItsMemory) {
  const auto threads_with = [](std::int64_t bytes) {
    const CallThreads call(bytes, [] { return std::int64_t{100} * call_threads() + 50; });
    return call_threads();
  };
  set_threads(8);
  EXPECT_EQ(threads_with(850), 8);
  EXPECT_EQ(threads_with(849), 4);
  EXPECT_EQ(threads_with(150), 1);
  EXPECT_EQ(threads_with(0), 1);  // the operation itself rejects the memory
}

TEST_F(ParallelTest, TheFirstExceptionOfATaskIsThrownAndThreadsGoOn) {
  set_threads(4);
  const auto fails = [] {
    parallel_for(100, [](std::int64_t index, int) {
      if (index == 50) throw Error("no");
    });
  };
  EXPECT_EQ(error_of(fails), "no");
  std::atomic<int> runs{0};
  parallel_for(100, [&](std::int64_t, int) { ++runs; });
  EXPECT_EQ(runs, 100);
}

// In all builds, with and without the library's assertions.
TEST(ArenaTest, RefusesPiecesThatTheWorkspaceHasNoRoomFor) {
  const HostTensor memory(DType::u8, {256});
  Arena arena("op", {memory.view().data, 256, nullptr}, 128);
  EXPECT_NE(arena.take<float>(16), nullptr);
  EXPECT_NE(arena.take<char>(1), nullptr);  // sizes are rounded up to the alignment
  const std::string message = error_of([&] { arena.take<double>(17); });
  EXPECT_TRUE(message.starts_with("[op] ")) << message;
  EXPECT_NE(message.find("128 of 256 bytes left"), std::string::npos) << message;
  EXPECT_NE(error_of([&] { arena.take<char>(-1); }), "");
  EXPECT_EQ(arena.used(), 128);
  EXPECT_NE(arena.take<double>(16), nullptr);
  EXPECT_NE(arena.take<double>(0), nullptr);
  EXPECT_NE(error_of([&] { arena.take<char>(1); }), "");
}

TEST(ArenaTest, RefusesSizesBeyondWhatCanBeCounted) {
  constexpr std::int64_t kMost = std::numeric_limits<std::int64_t>::max();
  Arena counting;
  counting.take<double>(1000);
  EXPECT_NE(error_of([&] { counting.take<double>(kMost / 8); }), "");
  EXPECT_NE(error_of([&] { counting.take<char>(kMost); }), "");
  EXPECT_NE(error_of([&] { counting.take<char>(-5); }), "");
  EXPECT_EQ(counting.used(), 8000);
}

TEST(ArenaTest, NoMemoryHasNoRoom) {
  Arena arena("op", {}, 0);
  EXPECT_NE(error_of([&] { arena.take<char>(1); }), "");
}

}  // namespace
}  // namespace coterie
