// SPDX-License-Identifier: MIT
// Benchmark data, the full-attention references and the minimum operation counts.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>

#include "bench/device.h"
#include "bench/reference.h"
#include "bench/work.h"
#include "coterie/error.h"
#include "coterie/runtime.h"

namespace coterie::bench {
namespace {

TEST(BenchData, RowsOfQueriesAndKeysAreNormalised) {
  for (const DataKind kind : {DataKind::normal, DataKind::mixture}) {
    const AttentionData data = make_data(
        {.B = 2, .heads = 4, .kv_heads = 2, .N = 7, .D = 16, .data = kind}, Pass::forward);
    EXPECT_EQ(data.k.view().size(1), 2);
    EXPECT_FALSE(data.grad_out.view().present());
    const std::vector<double> q = read_values(data.q);
    for (std::size_t row = 0; row < q.size(); row += 16) {
      double sum = 0, square = 0;
      for (int d = 0; d < 16; ++d) {
        sum += q[row + d];
        square += q[row + d] * q[row + d];
      }
      EXPECT_NEAR(sum, 0, 1e-4);
      EXPECT_NEAR(square, 16, 1e-3);
    }
    EXPECT_EQ(q, read_values(make_data(data.problem, Pass::forward).q));
  }
}

TEST(BenchData, SavedRowsAreTakenAsTheyAre) {
  const auto rows = std::make_shared<SavedRows>();
  rows->q = HostTensor(DType::f32, {1, 2, 5, 4});
  rows->k = rows->v = HostTensor(DType::f32, {1, 1, 5, 4});
  fill(rows->q, [](std::int64_t i) { return static_cast<double>(i); });
  Problem problem{.heads = 2, .kv_heads = 1, .N = 3, .D = 4};
  problem.data = DataKind::saved;
  problem.saved = rows;
  const AttentionData data = make_data(problem, Pass::both);
  EXPECT_EQ(read_values(data.q), read_values(rows->q.view().narrowed(2, 0, 3)));
  EXPECT_EQ(data.grad_out.view().size(2), 3);
  problem.N = 6;
  EXPECT_THROW(make_data(problem, Pass::both), Error);
}

TEST(BenchFlops, CountPairsThatMeet) {
  const Problem problem{.B = 2, .heads = 3, .kv_heads = 3, .N = 10, .D = 8};
  const auto flops = [&](const char* spec, bool causal, Pass pass = Pass::forward) {
    return attention_flops(make_entry(spec, causal), problem, pass);
  };
  const double pair = 4.0 * 8 * 6;  // forward, in all heads
  EXPECT_EQ(flops("full", false), pair * 100);
  EXPECT_EQ(flops("full", true), pair * 55);
  EXPECT_EQ(flops("full", false, Pass::both), 3.5 * pair * 100);
  EXPECT_EQ(flops("local(window=3)", true), pair * (1 + 2 + 8 * 3));
  EXPECT_EQ(flops("local(window=3)", false), pair * (2 + 8 * 3 + 2));
  EXPECT_EQ(flops("local(window=4)", false), pair * (2 + 3 + 7 * 4 + 3));
  EXPECT_EQ(flops("strided(stride=4)", false), pair * (9 + 9 + 4 + 4));
  EXPECT_EQ(flops("strided(stride=4)", true), pair * (6 + 6 + 3 + 3));
  EXPECT_EQ(flops("clustered(clusters=4)", false), pair * 40);
  EXPECT_EQ(flops("clustered(clusters=99)", false), pair * 100);
  EXPECT_EQ(flops("i-clustered(clusters=4,topk=2)", false), pair * 60);
  EXPECT_FALSE(flops("lsh", false));
  EXPECT_FALSE(flops("2*full+1*lsh", false));
  EXPECT_EQ(flops("2*full+1*clustered(clusters=4)", false), pair * (200 + 40) / 3);
}

// The error over a sample of the rows is that over all rows, up to sampling error.
TEST(References, OfLongSequencesAreASampleOfTheQueries) {
  Problem problem{.heads = 4, .kv_heads = 2, .N = 8192, .D = 8};
  const AttentionData data = make_data(problem, Pass::forward);
  const Gradients gradients(data);
  References references(data);
  EXPECT_EQ(references.rows(), 2048);
  for (const bool causal : {false, true}) {
    AttentionRun full(make_entry("full", causal), data, gradients);
    full.forward();
    EXPECT_LT(references.error_of(full, causal), 1e-5) << causal;
    AttentionRun local(make_entry("local(window=64)", causal), data, gradients);
    local.forward();
    SquaredNorms all;
    all.add(read_values(local.groups()[0].result.out), read_values(full.groups()[0].result.out));
    EXPECT_NEAR(references.error_of(local, causal), all.relative_error(),
                0.05 * all.relative_error());
  }
}

TEST(References, WithSharedQueriesAndKeysTakeTheQueriesAsKeys) {
  Problem problem{.heads = 4, .kv_heads = 2, .N = 40, .D = 8};
  const AttentionData data = make_data(problem, Pass::forward);
  const Gradients gradients(data);
  References references(data);
  // One chunk: every query attends to every key.
  AttentionRun lsh(make_entry("lsh(rounds=1,chunk=40,buckets=2,combine=mean)", false), data,
                   gradients);
  lsh.forward();
  EXPECT_LT(references.error_of(lsh, false), 1e-5);
}

TEST(SquaredNormsTest, AreRelativeToTheLargerNorm) {
  SquaredNorms norms;
  norms.add({3, 4}, {3, 4});
  EXPECT_EQ(norms.relative_error(), 0.0);
  norms.add({0}, {1e-9});
  EXPECT_NEAR(norms.relative_error(), 1e-9 / 5, 1e-15);
  EXPECT_NEAR(norms.relative_error(100), 1e-11, 1e-15);
}

TEST(BenchTensor, CopiesStridedViewsAndPoisons) {
  HostTensor host(DType::f32, {2, 3, 4});
  fill(host, [](std::int64_t i) { return static_cast<double>(i); });
  const TensorView middle = host.view().narrowed(1, 1, 1);
  EXPECT_EQ(read_values(host_copy(middle)), (std::vector<double>{4, 5, 6, 7, 16, 17, 18, 19}));
  EXPECT_EQ(read_values(host_copy(host.view().transposed(1, 2))),
            read_values(host.view().transposed(1, 2)));
  EXPECT_THROW(poison(middle), Error);
  const Tensor tensor(host, Device::cpu);
  poison(tensor);
  EXPECT_TRUE(std::isnan(read_values(tensor)[5]));
}

TEST(BenchDevice, SaysWhatIsRefusedWithoutADevice) {
  Problem problem{.heads = 2, .kv_heads = 2, .N = 64, .D = 16, .device = Device::cuda};
  for (const char* spec :
       {"full", "lsh", "routing(clusters=2,window=8)", "cast(clusters=2,size=8)"}) {
    const Entry entry = make_entry(spec, false);
    const std::string reason = refusal(entry, problem);
    // The shapes are right and no input is missing.
    EXPECT_TRUE(reason.empty() || reason.find("CUDA") != std::string::npos) << spec << reason;
    Problem on_cpu = problem;
    on_cpu.device = Device::cpu;
    EXPECT_EQ(refusal(entry, on_cpu), "") << spec;
  }
  Problem wide = problem;
  wide.dtype = DType::f64;
  EXPECT_NE(refusal(make_entry("oracle-top", false), wide), "");
  const bool with_kernels = build_info().cuda_toolkit != "none";
  EXPECT_EQ(refusal(make_entry("i-clustered(clusters=4)", false), problem).empty(), with_kernels);
}

TEST(BenchDevice, IsMissingWithAReason) {
  if (why_no_device().empty()) GTEST_SKIP() << "this machine has a CUDA device";
  EXPECT_EQ(device_description(), "");
  EXPECT_THROW(device_memory(1), Error);
  EXPECT_THROW(Tensor({"", DType::f32, {1}}, Device::cuda), Error);
}

}  // namespace
}  // namespace coterie::bench
