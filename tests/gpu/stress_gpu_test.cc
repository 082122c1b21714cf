// SPDX-License-Identifier: MIT
// Random problems of every mechanism on the GPU (tests/support/draw.h): any parameters, sizes,
// types, lengths and strides, and difficult data. Compares outputs and gradients row by row with
// the CPU for the selection that the GPU made, checks selections by their own rule, expects equal
// bits in two runs, and fails if a kernel does not return.
//
//   COTERIE_TEST_SEED=n      only draw n
//   COTERIE_STRESS_DRAWS=n   number of draws, starting at COTERIE_STRESS_FIRST=m
//   COTERIE_STRESS_SECONDS=n time limit of a kernel before the program is terminated
#include <gtest/gtest.h>

#include <chrono>
#include <cstdio>
#include <map>
#include <string>
#include <thread>

#include "cases/problem.h"
#include "coterie/runtime.h"
#include "tests/gpu/device_run.h"
#include "tests/gpu/watchdog.h"
#include "tests/support/draw.h"
#include "tests/support/row_bounds.h"
#include "tests/support/selection_rule.h"

namespace coterie {
namespace {

using cases::Case;
using cases::Problem;
using gpu_test::DeviceRun;
using gpu_test::DeviceTensor;

constexpr std::uint64_t kFirstDraw = 1, kDraws = 63;

void run_passes(DeviceRun& run, const std::string& what) {
  const gpu_test::Watchdog watchdog(
      std::chrono::seconds(test::number_from("COTERIE_STRESS_SECONDS", 20)), what);
  run.forward();
  run.backward();
  COTERIE_CUDA(cudaDeviceSynchronize());
}

// All faults of the GPU's results for a problem, in one line; "" if there are none.
std::string faults_of(const Case& c, std::uint64_t seed, const std::string& what) {
  std::string faults;
  const auto add = [&](const std::string& fault) {
    faults += (faults.empty() ? "" : "; ") + fault;
  };
  const Problem problem = cases::make_problem(c, seed);
  DeviceRun run(problem);
  run_passes(run, what);
  run.fetch();
  const std::vector<std::uint8_t> bits = run.bits();
  run_passes(run, what + ", second run");
  if (run.bits() != bits) add("other bits in a second run");
  if (!run.intact()) add("memory behind a tensor was written");
  const auto count = static_cast<std::ptrdiff_t>(run.host.selection_count);
  const std::vector<TensorView> selection(run.host.result.saved.begin(),
                                          run.host.result.saved.begin() + count);
  const std::string selected = test::check_selection(problem, selection, seed);
  if (!selected.empty()) {  // with a wrong selection the outputs say nothing
    add(selected);
    return faults;
  }
  const test::RowRule rule(problem, selection);
  for (const test::RowFinding& finding : rule.check(run.host.result.out, run.host.gradients))
    add(test::describe(finding));
  return faults;
}

struct Tally {
  std::map<std::string, int> draws;
  int total = 0, failed = 0;

  void print() const {
    std::string line = "stress: " + std::to_string(total) + " draws";
    for (const auto& [name, count] : draws) line += ", " + name + " " + std::to_string(count);
    std::printf("%s, failed %d\n", line.c_str(), failed);
  }
};

// Returns false when the device is no longer usable.
bool check(const Case& c, std::uint64_t seed, const std::string& name, Tally& tally) {
  const std::string what = name + ": " + test::describe(c);
  ++tally.total;
  ++tally.draws[c.spec.substr(0, c.spec.find('('))];
  std::string faults;
  try {
    faults = faults_of(c, seed, what);
  } catch (const std::exception& error) {
    faults = error.what();
  }
  if (faults.empty()) return true;
  ++tally.failed;
  ADD_FAILURE() << what << "\n  " << faults;
  return cudaDeviceSynchronize() == cudaSuccess;
}

TEST(StressGpuTest, RandomProblemsAgreeWithTheCpu) {
  if (!cuda_available()) GTEST_SKIP() << "no GPU";
  Tally tally;
  std::uint64_t first = test::number_from("COTERIE_STRESS_FIRST", kFirstDraw);
  std::uint64_t count = test::number_from("COTERIE_STRESS_DRAWS", kDraws);
  if (std::getenv("COTERIE_TEST_SEED") != nullptr) {
    first = test::number_from("COTERIE_TEST_SEED", 0);
    count = 1;
  }
  const bool told = std::getenv("COTERIE_STRESS_VERBOSE") != nullptr || count == 1;
  std::printf("stress: draws %llu to %llu\n", static_cast<unsigned long long>(first),
              static_cast<unsigned long long>(first + count - 1));
  for (std::uint64_t seed = first; seed < first + count; ++seed) {
    const Case c = test::draw_case(seed, test::Form::gpu);
    const std::string name = "COTERIE_TEST_SEED=" + std::to_string(seed);
    if (told) std::printf("%s: %s\n", name.c_str(), test::describe(c).c_str());
    if (!check(c, seed, name, tally)) break;
  }
  tally.print();
}

TEST(StressGpuTest, WhatOnceHungReturns) {
  if (!cuda_available()) GTEST_SKIP() << "no GPU";
  Tally tally;
  for (const Case& c : test::known_hangs())
    if (!check(c, 1, c.name, tally)) break;
  tally.print();
}

// Draws that once revealed a fault, or a tolerance without one of its terms.
TEST(StressGpuTest, WhatOnceFailedPasses) {
  if (!cuda_available()) GTEST_SKIP() << "no GPU";
  Tally tally;
  for (const std::uint64_t seed : {10385, 10501, 20134, 50110, 51665})
    if (!check(test::draw_case(seed, test::Form::gpu), seed, std::to_string(seed), tally)) break;
  tally.print();
}

TEST(WatchdogDeathTest, EndsTheProgramAndNamesWhatItWatched) {
  ::testing::FLAGS_gtest_death_test_style = "threadsafe";
  EXPECT_EXIT(
      {
        const gpu_test::Watchdog watchdog(std::chrono::seconds(1), "the draw");
        std::this_thread::sleep_for(std::chrono::seconds(30));
      },
      ::testing::ExitedWithCode(3), "the draw did not end within 1 s");
}

}  // namespace
}  // namespace coterie
