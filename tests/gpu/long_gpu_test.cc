// SPDX-License-Identifier: MIT
// Sequences long enough for blocks to loop over many tiles and lists: the GPU against the CPU in
// fp32 on the same values, for the selection that the GPU made.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>

#include "cases/cases.h"
#include "cases/problem.h"
#include "coterie/runtime.h"
#include "cuda/launch/device.h"
#include "tests/gpu/device_run.h"

namespace coterie {
namespace {

using cases::Case;
using cases::Problem;

std::vector<Case> long_cases() {
  std::vector<Case> all;
  const auto add = [&](const char* name, const char* spec, const char* shape) {
    all.push_back(cases::make_case(name, spec, shape));
  };
  add("local", "local(window=256)", "B1 H12 N2500 D64 causal bf16");
  add("local_both_ways_f16", "local(window=200)", "B2 H3 N1700 D64 f16");
  add("local_wide_groups", "local(window=256)", "B1 H4:2 N2500 D128 causal bf16");
  add("local_packed", "local(window=100)", "B1 H4 N3000 D48 causal packed bf16");
  add("local_padded", "local(window=300)", "B3 H4:2 N1900 D64 causal padded bnhd bf16");
  add("local_cross", "local(window=256)", "B2 H3 N1000 S1043 D64 causal bf16");
  // Windows for the kernel whose blocks slide along the sequence.
  add("local_walk_packed", "local(window=256)", "B1 H4 N3000 D48 causal packed bf16");
  add("local_walk_padded", "local(window=224)", "B5 H3 N900 D64 causal padded bnhd f16");
  add("local_walk_packed_both_ways", "local(window=255)", "B1 H3 N2100 D64 packed bf16");
  add("local_walk_padded_both_ways", "local(window=193)", "B3 H2 N1500 D40 padded bf16");
  add("local_walk_fewer_keys", "local(window=256)", "B2 H3 N1343 S900 D64 causal f16");
  add("local_walk_half_window", "local(window=130)", "B1 H5 N1200 D64 causal bf16");
  add("local_long_window", "local(window=1500)", "B1 H3 N2500 D64 causal bf16");
  add("strided_long", "strided(stride=2)", "B1 H3 N2500 D64 bf16");
  add("strided", "strided(stride=16)", "B1 H4 N2500 D64 causal bf16");
  add("routing", "routing(clusters=16,window=256)", "B1 H12 N3000 D64 causal bf16 mixture");
  add("routing_f16", "routing(clusters=24,window=128)", "B2 H3 N2100 D64 causal f16 mixture");
  add("routing_padded", "routing(clusters=9,window=256)",
      "B3 H4:2 N2100 D64 causal padded gaps bf16 mixture");
  add("routing_packed", "routing(clusters=8,window=96)", "B1 H4 N4000 D64 causal packed bf16");
  add("routing_one_cluster", "routing(clusters=1,window=256)", "B1 H4 N3000 D64 causal bf16");
  add("routing_wide", "routing(clusters=16,window=256)", "B1 H3 N3000 D128 causal bf16 mixture");
  add("routing_paper", "routing(clusters=16,window=256,causal=paper)",
      "B1 H4 N2300 D64 causal bf16 mixture");
  add("routing_paper_padded", "routing(clusters=12,window=200,causal=paper)",
      "B2 H4:2 N3000 D64 causal padded bf16 mixture");
  add("routing_paper_wide", "routing(clusters=16,window=256,causal=paper)",
      "B1 H3 N3000 D128 causal f16");
  // Lists that fit in one block, for every tile length.
  add("routing_paper_2", "routing(clusters=40,window=2,causal=paper)",
      "B1 H3 N900 D64 causal bf16");
  add("routing_paper_100", "routing(clusters=9,window=100,causal=paper)",
      "B2 H3 N1100 D64 causal padded f16 mixture");
  add("routing_paper_128", "routing(clusters=10,window=128,causal=paper)",
      "B1 H2 N900 D48 causal bf16 mixture");
  add("routing_paper_65", "routing(clusters=12,window=65,causal=paper)",
      "B1 H3 N2900 D64 causal packed bf16 mixture");
  add("routing_paper_255", "routing(clusters=5,window=255,causal=paper)",
      "B1 H3 N1300 D64 causal f16 mixture");
  add("routing_paper_256", "routing(clusters=150,window=256,causal=paper)",
      "B1 H2 N2300 D64 causal bf16 mixture");
  // Many clusters: the backward list kernel also clears the gradients, for tokens in no cluster.
  add("routing_paper_cleared", "routing(clusters=48,window=80,causal=paper)",
      "B2 H3 N1500 D64 causal bf16 mixture");
  add("routing_paper_cleared_bnhd", "routing(clusters=40,window=90,causal=paper)",
      "B1 H4 N1500 D64 causal bnhd bf16 mixture");
  add("routing_paper_cleared_padded", "routing(clusters=40,window=70,causal=paper)",
      "B2 H4 N1600 D64 causal padded gaps bf16 mixture");
  add("routing_both_ways_192", "routing(clusters=10,window=192)", "B2 H3 N1500 D40 padded f16");
  add("routing_both_ways", "routing(clusters=16,window=256)", "B1 H4 N2300 D64 bf16 mixture");
  add("cast", "cast(clusters=16,size=256)", "B1 H12 N3000 D64 bf16");
  add("cast_single", "cast(clusters=12,size=256,mode=single)", "B2 H3 N2900 D64 bf16");
  add("cast_f16_many", "cast(clusters=200,size=40)", "B1 H3 N2500 D64 f16");
  add("cast_wide", "cast(clusters=32,size=128)", "B1 H3 N3000 D128 padded bf16");
  add("cast_streamed", "cast(clusters=330,size=20)", "B1 H2 N2500 D64 packed bf16");
  add("cast_streamed_wide", "cast(clusters=210,size=20)", "B1 H2 N1300 D128 f16");
  add("cast_narrow_groups", "cast(clusters=70,size=30)", "B2 H4:2 N900 D40 padded bf16");
  add("cast_odd", "cast(clusters=20,size=50)", "B1 H2 N900 D36 bf16");
  add("lsh", "lsh(rounds=2,chunk=32,buckets=64)", "B1 H3 N2048 D64 bf16 mixture");
  add("clustered", "i-clustered(clusters=100)", "B1 H4 N3000 D64 bf16 mixture");
  add("clustered_wide", "i-clustered(clusters=200)", "B1 H4:2 N3000 D128 padded bf16 mixture");
  add("clustered_many", "i-clustered(clusters=1100)", "B1 H2 N6000 D64 bf16 mixture");
  add("clustered_few_padded", "i-clustered(clusters=2)", "B3 H2 N4500 D64 padded bf16 mixture");
  add("clustered_few_packed", "clustered(clusters=1)", "B1 H2 N5000 D64 packed bf16");
  add("near", "i-clustered(clusters=100,near=32)", "B1 H4 N3000 D64 bf16 mixture");
  add("near_128", "i-clustered(clusters=256,near=128)", "B1 H3 N4000 D64 bf16 mixture");
  add("near_wide_groups", "i-clustered(clusters=60,near=64)", "B1 H4:2 N3000 D128 padded bf16");
  add("near_plain_packed", "clustered(clusters=40,near=16)", "B1 H3 N5000 D64 packed f16");
  add("near_few", "i-clustered(clusters=2,near=48)", "B1 H2 N4500 D64 bf16 mixture");
  add("near_many_top", "i-clustered(clusters=50,topk=70,near=16)", "B2 H2 N1700 D40 padded bf16");
  add("near_f32", "i-clustered(clusters=50,near=16)", "B1 H4:2 N1700 D64 padded gaps");
  add("near_f32_wide", "clustered(clusters=50,near=32)", "B1 H2 N1500 D128");
  return all;
}

class LongGpuTest : public ::testing::TestWithParam<Case> {};

TEST_P(LongGpuTest, AgreesWithTheCpu) {
  if (!cuda_available()) GTEST_SKIP() << "no GPU";
  const Case& c = GetParam();
  const Problem problem = cases::make_problem(c, 1), reference = gpu_test::in_fp32(c, problem, 1);
  gpu_test::DeviceRun run(problem);
  run.forward();
  run.backward();
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  cases::Pass host = cases::prepare(reference);
  for (std::size_t i = 0; i < host.selection_count; ++i)
    write_values(host.result.saved[i], read_values(run.saved[i].download()));
  attention_attend(reference.mechanism, reference.inputs, host.result, host.workspace);
  cases::run_backward(reference, host);
  // CAST, except in the Hopper kernels, rounds the mix and the members' parts before adding them.
  const bool more = std::holds_alternative<CastParams>(problem.mechanism) &&
                    (c.Dk % 8 != 0 || !cuda::on_hopper());
  gpu_test::expect_near("out", run.out, host.result.out,
                        (more ? 4.0 / 3 : 1.0) * gpu_test::bound(c.dtype, false));
  const double bound = gpu_test::bound(c.dtype, true);
  gpu_test::expect_near("dq", run.dq, host.gradients.dq, bound);
  gpu_test::expect_near("dk", run.dk, host.gradients.dk, bound);
  gpu_test::expect_near("dv", run.dv, host.gradients.dv, bound);
  gpu_test::expect_near("dcentroids", run.dcentroids, host.gradients.dcentroids, bound);
  gpu_test::expect_near("dgate", run.dgate, host.gradients.dgate, bound);
  gpu_test::expect_rows(problem, run);
}

TEST_P(LongGpuTest, RepeatsItsBits) {
  if (!cuda_available()) GTEST_SKIP() << "no GPU";
  const Problem problem = cases::make_problem(GetParam(), 1);
  gpu_test::DeviceRun run(problem);
  run.forward();
  run.backward();
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  const std::vector<std::uint8_t> bits = run.bits();
  for (int repeat = 0; repeat < 3; ++repeat) {
    run.forward();
    run.backward();
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    ASSERT_EQ(run.bits(), bits) << "run " << repeat;
  }
}

INSTANTIATE_TEST_SUITE_P(Cases, LongGpuTest, ::testing::ValuesIn(long_cases()),
                         [](const auto& test) { return test.param.name; });

}  // namespace
}  // namespace coterie
