// SPDX-License-Identifier: MIT
// Several host threads and streams at once, in one process and in two: equal bits, and every call
// returns. Cooperative kernels (prim/team.cuh) wait for all of their blocks. Most of them start
// while the previous kernel is ending, and here they compete for the multiprocessors.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "coterie/runtime.h"
#include "coterie/spec.h"
#include "tests/gpu/device_run.h"
#include "tests/gpu/watchdog.h"

namespace coterie {
namespace {

using cases::Case;
using cases::Problem;
using gpu_test::DeviceRun;

// Each mechanism in at least two shapes, so the same kernels are launched with different amounts of
// shared memory. `cooperative`: only mechanisms with a cooperative kernel.
std::vector<Case> concurrent_cases(bool cooperative) {
  std::vector<Case> all;
  const auto add = [&](const char* name, const std::string& spec, const char* shape) {
    all.push_back(cases::make_case(name, spec, shape));
  };
  add("keys", "i-clustered(clusters=100)", "B1 H4 N3000 D64 bf16 mixture");
  add("keys_small", "i-clustered(clusters=9,topk=8)", "B2 H2 N200 D64 bf16 mixture");
  add("keys_f32", "i-clustered(clusters=40,topk=8)", "B1 H2 N700 D32 mixture");
  add("hamming", "clustered(clusters=500,clustering=hamming)", "B1 H4 N4000 D64 bf16 mixture");
  add("hamming_small", "clustered(clusters=8,clustering=hamming)", "B2 H2 N300 D32 mixture");
  add("routing_strict", "routing(clusters=64,window=256)", "B1 H4 N4000 D64 causal bf16 mixture");
  add("routing_strict_small", "routing(clusters=5,window=32)", "B2 H2 N300 D128 causal bf16");
  add("routing_strict_f16", "routing(clusters=24,window=128)",
      "B1 H3 N2100 D64 causal f16 mixture");
  add("routing_top", "routing(clusters=40,window=128,causal=paper)",
      "B1 H4 N4000 D64 causal bf16 mixture");
  add("routing_top_small", "routing(clusters=6,window=30)", "B2 H2 N400 D32 mixture");
  add("routing_balanced", "routing(clusters=32,membership=balanced)", "B1 H4 N2000 D64 bf16");
  add("routing_balanced_small", "routing(clusters=4,membership=balanced)", "B2 H2 N300 D32");
  add("lsh", "lsh(rounds=2,chunk=32,buckets=64)", "B1 H3 N2048 D64 bf16 mixture");
  add("cast", "cast(clusters=16,size=128)", "B1 H4 N2000 D64 packed bf16");
  add("cast_single", "cast(clusters=12,size=256,mode=single)", "B2 H3 N2000 D64 bf16");
  add("oracle", "oracle-top(topk=16)", "B1 H2 N900 D64 bf16");
  if (cooperative) return all;
  add("full", "full", "B1 H4 N1500 D64 causal bf16");
  add("full_wide", "full", "B1 H2 N700 D128 bf16");
  add("full_f32", "full", "B1 H2 N500 D64");
  add("local", "local(window=256)", "B1 H4 N3000 D64 causal bf16");
  add("strided", "strided(stride=16)", "B1 H4 N2500 D64 causal bf16");
  return all;
}

// The problems that the threads compute, with the bits of an undisturbed run.
struct Work {
  std::vector<Problem> problems;
  std::vector<std::vector<std::uint8_t>> bits;

  explicit Work(const std::vector<Case>& all) {
    for (const Case& c : all) {
      problems.push_back(cases::make_problem(c, 1));
      DeviceRun run(problems.back());
      run.forward();
      run.backward();
      COTERIE_CUDA(cudaDeviceSynchronize());
      bits.push_back(run.bits());
    }
  }
};

// Runs all problems on a new stream, `times` times in a row, starting with problem `first`. Returns
// the mechanism of a problem whose bits differ, or "".
std::string run_all(const Work& work, std::size_t first, int times) {
  cudaStream_t stream = nullptr;
  COTERIE_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  std::vector<std::unique_ptr<DeviceRun>> runs;
  for (const Problem& problem : work.problems) {
    runs.push_back(std::make_unique<DeviceRun>(problem));
    runs.back()->workspace.stream = stream;
  }
  std::string wrong;
  for (int turn = 0; turn < times; ++turn)
    for (std::size_t i = 0; i < runs.size(); ++i) {
      DeviceRun& run = *runs[(first + i) % runs.size()];
      run.forward();
      run.backward();
    }
  COTERIE_CUDA(cudaStreamSynchronize(stream));
  for (std::size_t i = 0; i < runs.size(); ++i)
    if (runs[i]->bits() != work.bits[i]) wrong = mechanism_name(work.problems[i].mechanism);
  cudaStreamDestroy(stream);
  return wrong;
}

void expect_equal_bits(const Work& work, int num_threads, int times) {
  std::vector<std::string> wrong(static_cast<std::size_t>(num_threads));
  std::vector<std::thread> threads;
  for (std::size_t t = 0; t < wrong.size(); ++t)
    threads.emplace_back([&, t] {
      try {
        wrong[t] = run_all(work, t * work.problems.size() / wrong.size(), times);
      } catch (const std::exception& error) {
        wrong[t] = error.what();
      }
    });
  for (std::thread& thread : threads) thread.join();
  for (const std::string& text : wrong) EXPECT_EQ(text, "");
}

TEST(ConcurrentGpuTest, ThreadsWithStreamsOfTheirOwnGiveEqualBits) {
  if (!cuda_available()) GTEST_SKIP() << "no GPU";
  const gpu_test::Watchdog watchdog;
  expect_equal_bits(Work(concurrent_cases(false)), 8, 10);
}

TEST(ConcurrentGpuTest, CooperativeGridsShareTheDevice) {
  if (!cuda_available()) GTEST_SKIP() << "no GPU";
  const gpu_test::Watchdog watchdog;
  expect_equal_bits(Work(concurrent_cases(true)), 6, 20);
}

// One mechanism at a time in all streams: its grids compete with each other.
TEST(ConcurrentGpuTest, EqualCooperativeGridsShareTheDevice) {
  if (!cuda_available()) GTEST_SKIP() << "no GPU";
  for (const Case& c : concurrent_cases(true)) {
    SCOPED_TRACE(c.name);
    const gpu_test::Watchdog watchdog(std::chrono::seconds(60), c.name);
    expect_equal_bits(Work({c}), 4, 30);
  }
}

// Starts the program twice more, each time with the test above.
TEST(ConcurrentGpuTest, ProcessesShareTheDevice) {
  if (!cuda_available()) GTEST_SKIP() << "no GPU";
  const gpu_test::Watchdog watchdog(std::chrono::seconds(120));
  char path[4096] = {};
  ASSERT_GT(readlink("/proc/self/exe", path, sizeof(path) - 1), 0);
  const std::string command =
      std::string("'") + path + "' --gtest_filter=ConcurrentGpuTest.Cooperative* 2>&1";
  FILE* programs[2] = {};
  for (FILE*& program : programs) program = popen(command.c_str(), "r");
  for (FILE* program : programs) {
    ASSERT_NE(program, nullptr);
    std::string text;
    char line[512];
    while (fgets(line, sizeof(line), program)) text += line;
    const int status = pclose(program);
    EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << text;
  }
}

}  // namespace
}  // namespace coterie
