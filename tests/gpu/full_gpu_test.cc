// SPDX-License-Identifier: MIT
// The backward pass of full attention, and of windows, whose sums of gradient times output come
// from the output (AttentionInputs::delta_from_output): against the CPU in fp32, and equal bits in
// repeated runs.
#include <gtest/gtest.h>

#include <cmath>
#include <string>

#include "cases/cases.h"
#include "cases/problem.h"
#include "coterie/random.h"
#include "coterie/runtime.h"
#include "tests/gpu/device_run.h"

namespace coterie {
namespace {

using cases::Case;
using cases::Problem;

std::vector<Case> full_cases() {
  std::vector<Case> all;
  const auto add = [&](const char* name, const char* shape, const char* spec = "full") {
    all.push_back(cases::make_case(name, spec, shape));
  };
  add("both_ways", "B2 H3 N1000 D64 bf16");
  add("causal", "B2 H3 N1100 D64 causal bf16");
  add("causal_f16", "B1 H4 N1537 D64 causal f16");
  add("one_tile", "B3 H2 N40 D64 causal bf16");
  add("one_row", "B1 H2 N1 D64 causal bf16");
  add("narrow", "B1 H3 N700 D40 causal f16");
  add("wide", "B1 H3 N1000 D128 bf16");
  add("wide_causal", "B2 H2 N1290 D128 causal bf16");
  add("wide_f16", "B1 H2 N600 D96 causal f16");
  add("groups", "B1 H8:2 N900 D64 causal bf16");
  add("wide_groups", "B2 H4:1 N700 D128 causal f16");
  add("padded", "B5 H2 N900 D64 causal padded bnhd bf16");
  add("padded_both_ways", "B3 H4:2 N700 D128 padded bf16");
  add("packed", "B1 H3 N3000 D64 causal packed bf16");
  add("packed_wide", "B1 H4:2 N2000 D128 packed f16");
  add("more_keys", "B2 H3 N500 S1343 D64 causal bf16");
  add("more_queries", "B2 H3 N1343 S500 D64 causal bf16");
  add("more_queries_wide", "B1 H2 N900 S300 D128 causal f16");
  add("cross", "B2 H2 N300 S1000 D64 f16");
  add("unaligned", "B1 H2 N500 D64 causal gaps bf16");  // another kernel
  add("mixture", "B1 H2 N1500 D64 causal bf16 mixture");
  add("zipf", "B1 H2 N1500 D64 bf16 zipf");
  add("window", "B2 H2 N1100 D64 causal bf16", "local(window=300)");
  add("window_both_ways", "B2 H2 N1100 D64 f16", "local(window=400)");
  add("window_groups", "B1 H8:2 N900 D64 causal bf16", "local(window=256)");
  add("window_wide", "B1 H3 N1290 D128 causal bf16", "local(window=256)");
  add("window_wide_groups", "B2 H4:1 N1000 D128 causal bf16", "local(window=200)");
  add("window_wide_both_ways", "B1 H2 N1000 D128 bf16", "local(window=129)");
  add("window_of_two", "B1 H2 N500 D128 causal f16", "local(window=2)");
  add("window_drawn", "B5 H2 N500 D128 drawn bf16", "local(window=50)");
  add("no_keys", "B4 H2 N300 S0 D64 bf16");
  add("window_short", "B1 H2 N500 D96 bf16", "local(window=20)");
  add("window_of_all", "B1 H2 N500 D128 bf16", "local(window=5000)");
  add("window_padded", "B5 H2 N900 D128 causal padded bnhd bf16", "local(window=256)");
  add("window_packed", "B1 H4:2 N2000 D128 packed f16", "local(window=256)");
  add("window_more_keys", "B2 H3 N500 S1343 D128 causal bf16", "local(window=256)");
  add("window_more_queries", "B2 H3 N1343 S500 D128 causal bf16", "local(window=256)");
  add("window_cross", "B2 H2 N300 S1000 D128 f16", "local(window=256)");
  add("window_beyond", "B2 H2 N1000 S300 D128 bf16", "local(window=100)");
  return all;
}

class FullGpuTest : public ::testing::TestWithParam<Case> {
 protected:
  void SetUp() override {
    if (!cuda_available()) GTEST_SKIP() << "no GPU";
  }
};

Problem make(const Case& c, std::uint64_t seed) {
  Problem problem = cases::make_problem(c, seed);
  problem.inputs.delta_from_output = true;
  return problem;
}

// What rounding the output does: with e = g . (rounded out - out), dq loses scale e times the mean
// of the keys by weight, and dk scale times the sum of the queries by weight and e. Both are a pass
// of full attention whose values are the keys.
void subtract_rounding(const Problem& exact, const cases::Pass& pass, Problem by_keys,
                       const std::vector<double>& rounded) {
  const std::vector<double> out = read_values(pass.result.out), g = read_values(exact.grad_out),
                            q = read_values(exact.inputs.q);
  const std::size_t D = static_cast<std::size_t>(exact.inputs.q.size(3));
  std::vector<double> e(out.size() / D, 0.0), weighted(q.size());
  for (std::size_t i = 0; i < out.size(); ++i)
    if (rounded[i] != out[i]) e[i / D] += g[i] * (rounded[i] - out[i]);  // not in padding
  for (std::size_t i = 0; i < q.size(); ++i) weighted[i] = e[i / D] * q[i];
  write_values(by_keys.inputs.v, read_values(exact.inputs.k));
  write_values(by_keys.grad_out, weighted);
  cases::Pass keys = cases::run_forward(by_keys);
  cases::run_backward(by_keys, keys);
  const double scale = 1.0 / std::sqrt(static_cast<double>(D));
  const std::vector<double> mean = read_values(keys.result.out),
                            sums = read_values(keys.gradients.dv);
  std::vector<double> dq = read_values(pass.gradients.dq), dk = read_values(pass.gradients.dk);
  for (std::size_t i = 0; i < dq.size(); ++i)
    if (e[i / D] != 0) dq[i] -= scale * e[i / D] * mean[i];
  for (std::size_t i = 0; i < dk.size(); ++i) dk[i] -= scale * sums[i];
  write_values(pass.gradients.dq, dq);
  write_values(pass.gradients.dk, dk);
}

void expect_gradients(const Case& c, std::uint64_t seed) {
  const Problem problem = make(c, seed);
  const Problem reference = gpu_test::in_fp32(c, problem, seed);
  gpu_test::DeviceRun run(problem);
  run.forward();
  run.backward();
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  EXPECT_TRUE(run.intact());
  cases::Pass host = cases::run_forward(reference);
  cases::run_backward(reference, host);
  subtract_rounding(reference, host, gpu_test::in_fp32(c, problem, seed),
                    read_values(run.out.download()));
  // Gradients of single keys cancel to nothing, and items may be empty.
  const double bound = gpu_test::bound(c.dtype, true), least = 0.01;
  gpu_test::expect_near("dq", run.dq, host.gradients.dq, bound, least);
  gpu_test::expect_near("dk", run.dk, host.gradients.dk, bound, least);
  gpu_test::expect_near("dv", run.dv, host.gradients.dv, bound, least);
}

TEST_P(FullGpuTest, AgreesWithTheCpu) { expect_gradients(GetParam(), 1); }

TEST_P(FullGpuTest, RepeatsItsBits) {
  gpu_test::DeviceRun run(make(GetParam(), 2));
  run.forward();
  std::vector<std::uint8_t> first;
  for (int repeat = 0; repeat < 5; ++repeat) {
    run.backward();
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    if (repeat == 0) first = run.bits();
    EXPECT_TRUE(run.bits() == first) << "repeat " << repeat;
  }
}

INSTANTIATE_TEST_SUITE_P(Cases, FullGpuTest, ::testing::ValuesIn(full_cases()),
                         [](const auto& test) { return test.param.name; });

TEST(FullGpuRandomTest, ShapesAgreeWithTheCpu) {
  if (!cuda_available()) GTEST_SKIP() << "no GPU";
  for (std::uint64_t draw = 0; draw < 80; ++draw) {
    const auto pick = [&](std::uint64_t which, std::uint64_t count) {
      return random_u64({91, RandomUse::data, static_cast<std::uint32_t>(which)}, draw) % count;
    };
    const std::uint64_t heads = 1 + pick(1, 3), group = 1 + pick(2, 3);
    std::string shape = "B" + std::to_string(1 + pick(0, 3)) + " H" +
                        std::to_string(heads * group) + ":" + std::to_string(heads) + " N" +
                        std::to_string(1 + pick(3, 800)) + " S" + std::to_string(1 + pick(4, 800)) +
                        " D" + std::to_string(8 * (1 + pick(5, 16)));
    if (pick(6, 2)) shape += " causal";
    if (pick(7, 3) == 0) shape += " drawn";
    shape += pick(8, 2) ? " bf16" : " f16";
    const std::string spec =
        pick(9, 2) ? "full" : "local(window=" + std::to_string(1 + pick(10, 900)) + ")";
    SCOPED_TRACE(spec + " " + shape);
    expect_gradients(cases::make_case("random", spec, shape), draw);
  }
}

// Rows that are not finite: every block ends, and nothing is written elsewhere.
TEST(FullGpuRandomTest, UnkindRowsEnd) {
  if (!cuda_available()) GTEST_SKIP() << "no GPU";
  for (const char* data : {"nonfinite", "huge", "large", "zeros", "repeated", "equal"}) {
    for (const char* spec : {"full", "local(window=300)"}) {
      SCOPED_TRACE(std::string(data) + " " + spec);
      const Case c =
          cases::make_case("unkind", spec, std::string("B2 H3 N700 D64 causal bf16 ") + data);
      gpu_test::DeviceRun run(make(c, 3));
      run.forward();
      run.backward();
      ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
      EXPECT_TRUE(run.intact());
    }
  }
}

}  // namespace
}  // namespace coterie
