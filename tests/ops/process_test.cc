// SPDX-License-Identifier: MIT
// Processes with threads: fork, exit, and limits on the number of threads.
#include <gtest/gtest.h>
#include <pthread.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <string>
#include <thread>

#include "cases/problem.h"
#include "coterie/runtime.h"
#include "tests/support/expect.h"

static bool in_child = false;

// Called by the leak sanitizer at exit. A child cannot free the memory that other threads of its
// parent were using.
extern "C" int __lsan_is_turned_off();
extern "C" int __lsan_is_turned_off() { return in_child; }

namespace coterie {
namespace {

using cases::Pass;
using cases::Problem;

constexpr unsigned kPatience = 60;  // seconds before a hanging child is killed

// Runs `act` in a child process that exits normally, with destructors of static objects. Returns
// "exit 0" if act() returned true, otherwise how the child ended.
std::string fate_of_child(const std::function<bool()>& act) {
  std::fflush(nullptr);
  const pid_t child = fork();
  if (child == 0) {
    in_child = true;
    alarm(kPatience);
    std::exit(act() ? 0 : 1);
  }
  int status = 0;
  if (child < 0 || waitpid(child, &status, 0) != child) return "no child";
  if (WIFSIGNALED(status)) return "signal " + std::to_string(WTERMSIG(status));
  return "exit " + std::to_string(WEXITSTATUS(status));
}

// An attention call with several tasks, and its expected bits.
struct Attention {
  Problem problem = cases::make_problem({.spec = "routing(clusters=4,window=40)", .N = 300}, 1);
  Pass expected = run();

  Pass run() const {
    Pass pass = cases::run_forward(problem);
    cases::run_backward(problem, pass);
    return pass;
  }
  bool repeats() const {
    const Pass pass = run();
    return test::same_bits(expected.result.out, pass.result.out) &&
           test::same_bits(expected.gradients.dq, pass.gradients.dq);
  }
};

class ProcessTest : public ::testing::Test {
 protected:
  void SetUp() override { set_threads(4); }
  void TearDown() override { set_threads(2); }
};

TEST_F(ProcessTest, AChildExits) {
  const Attention attention;
  EXPECT_EQ(fate_of_child([] { return true; }), "exit 0");
  EXPECT_TRUE(attention.repeats());
}

TEST_F(ProcessTest, AChildCallsAndExits) {
  const Attention attention;
  EXPECT_EQ(fate_of_child([&] { return attention.repeats(); }), "exit 0");
  EXPECT_EQ(fate_of_child([&] {
              set_threads(7);
              return attention.repeats();
            }),
            "exit 0");
  EXPECT_TRUE(attention.repeats());
}

TEST_F(ProcessTest, AGrandchildCallsAndExits) {
  const Attention attention;
  EXPECT_EQ(fate_of_child([&] {
              return attention.repeats() &&
                     fate_of_child([&] { return attention.repeats(); }) == "exit 0" &&
                     attention.repeats();
            }),
            "exit 0");
}

TEST_F(ProcessTest, AForkWhileAnotherThreadIsInsideACall) {
#ifdef __SANITIZE_ADDRESS__
  GTEST_SKIP() << "the child inherits the address sanitizer's allocator with locks held";
#endif
  const Attention attention;
  std::atomic<bool> stop{false}, right{true};
  std::thread caller([&] {
    while (!stop)
      if (!attention.repeats()) right = false;
  });
  for (int repeat = 0; repeat < 20; ++repeat) {
    EXPECT_EQ(fate_of_child([&] { return attention.repeats(); }), "exit 0");
    EXPECT_EQ(fate_of_child([] { return true; }), "exit 0");
  }
  stop = true;
  caller.join();
  EXPECT_TRUE(right);
}

TEST_F(ProcessTest, AnExitWhileAnotherThreadIsInsideACall) {
#ifdef __SANITIZE_THREAD__
  GTEST_SKIP() << "the thread sanitizer confuses a child's threads with those of its parent";
#endif
  const Attention attention;
  EXPECT_EQ(fate_of_child([&] {
              static const Attention& child = *new Attention;  // used until the very end
              static std::atomic<int> calls{0};
              std::thread([] {
                for (;; ++calls) child.run();
              }).detach();
              while (calls < 3) std::this_thread::yield();
              return true;
            }),
            "exit 0");
}

int running_threads() {
  std::ifstream file("/proc/self/status");
  for (std::string word; file >> word;) {
    int count = 0;
    if (word == "Threads:" && file >> count) return count;
  }
  return 0;
}

// Leaves address space for the stacks of two more threads: the third is refused.
void allow_two_more_threads() {
  constexpr std::size_t kStack = std::size_t{1} << 30;
  pthread_attr_t attributes;
  pthread_attr_init(&attributes);
  pthread_attr_setstacksize(&attributes, kStack);
  ASSERT_EQ(pthread_setattr_default_np(&attributes), 0);
  pthread_attr_destroy(&attributes);
  std::size_t pages = 0;
  std::ifstream("/proc/self/statm") >> pages;
  rlimit limit{};
  getrlimit(RLIMIT_AS, &limit);
  limit.rlim_cur = pages * static_cast<std::size_t>(sysconf(_SC_PAGESIZE)) + kStack * 5 / 2;
  ASSERT_EQ(setrlimit(RLIMIT_AS, &limit), 0);
}

TEST_F(ProcessTest, FewerThreadsWhereTheSystemRefusesThem) {
  const Attention attention;
  EXPECT_EQ(fate_of_child([&] {
              allow_two_more_threads();
              set_threads(16);
              const bool right = attention.repeats() && attention.repeats();
              const int few = running_threads();
              rlimit limit{};
              getrlimit(RLIMIT_AS, &limit);
              limit.rlim_cur = limit.rlim_max;
              setrlimit(RLIMIT_AS, &limit);
              const bool again = attention.repeats();  // the refused threads are requested again
              return right && few >= 2 && few <= 3 && again && running_threads() >= 16;
            }),
            "exit 0");
}

}  // namespace
}  // namespace coterie
