// SPDX-License-Identifier: MIT
// What a measurement holds, the gate before it and the peaks beside it.
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <stdexcept>

#include "bench/attention.h"
#include "bench/gate.h"
#include "bench/opponent.h"
#include "bench/peak.h"
#include "coterie/runtime.h"

namespace coterie::bench {
namespace {

const Problem kSmall{.heads = 2, .kv_heads = 2, .N = 48, .D = 16};

TEST(Measure, TimesStagesAndCountsWhatItKnows) {
  const std::vector<Entry> entries = {make_entry("full", false),
                                      make_entry("i-clustered(clusters=4,topk=8)", false)};
  const std::vector<Measurement> all =
      measure(entries, kSmall, Pass::both, {.repeats = 3, .min_repeats = 3});
  const bool opposed = !opponent_name().empty();
  ASSERT_EQ(all.size(), opposed ? 3u : 2u);
  const Measurement &full = all.front(), &clustered = all.back();
  EXPECT_EQ(full.error, 0.0);
  EXPECT_EQ(full.forward_flops, full_attention_flops(kSmall, Pass::forward, false));
  EXPECT_GT(full.gflops(), 0.0);
  EXPECT_GT(full.peak_gflops, 0.0);
  EXPECT_EQ(clustered.name, "i-clustered(clusters=4,topk=8)");
  EXPECT_FALSE(clustered.gflops());
  EXPECT_GT(clustered.select->median_ms, 0.0);
  EXPECT_GT(clustered.attend->median_ms, 0.0);
  EXPECT_GE(clustered.forward->median_ms, clustered.select->median_ms);
  EXPECT_GT(clustered.backward->median_ms, 0.0);
  EXPECT_GT(clustered.workspace_bytes, 0);
  EXPECT_EQ(clustered.io_bytes, 4 * 2 * 48 * 16 * 4);
}

TEST(Measure, OpponentsAgreeWithFullAttention) {
  if (opponent_name().empty()) GTEST_SKIP() << "no other library in this build";
  for (const DType dtype : {DType::f32, DType::bf16}) {
    Problem grouped = kSmall;
    grouped.kv_heads = 1;
    grouped.dtype = dtype;
    const std::vector<Entry> entries = {make_entry("full", false), make_entry("full", true)};
    const std::vector<Measurement> all =
        measure(entries, grouped, Pass::both, {.repeats = 1, .min_repeats = 1});
    ASSERT_EQ(all.size(), 4u);
    for (const std::size_t i : {1, 3}) {
      EXPECT_TRUE(all[i].opponent);
      EXPECT_EQ(all[i].name, opponent_name());
      EXPECT_EQ(all[i].entry.causal, i == 3);
      EXPECT_LT(all[i].error, dtype == DType::f32 ? 1e-5 : 1e-2);
      EXPECT_FALSE(all[i].select);
    }
  }
}

TEST(Gate, LetsEveryMechanismPass) {
  std::vector<Entry> entries;
  for (const char* spec :
       {"full", "local(window=16)", "strided(stride=5)", "oracle-top", "clustered(clusters=6)",
        "i-clustered(clusters=6)", "i-clustered(clusters=6,clustering=hamming)", "lsh",
        "routing(clusters=3,window=32)", "cast(clusters=3,size=32)",
        "1*local(window=8)+1*routing(clusters=3,window=16,causal=strict)"}) {
    entries.push_back(make_entry(spec, false));
  }
  for (const DType dtype : {DType::f32, DType::f64, DType::bf16, DType::f16}) {
    Problem problem = kSmall;
    problem.N = 130;
    problem.dtype = dtype;
    const std::vector<Check> checks = gate(entries, problem);
    EXPECT_GT(checks.size(), 3 * entries.size());
    for (const Check& check : checks) {
      EXPECT_TRUE(check.passed()) << dtype_name(dtype) << " " << check.attention << " "
                                  << check.tensor << " " << check.error;
    }
    EXPECT_NO_THROW(refuse_wrong(checks));
  }
}

TEST(Gate, RefusesWhatIsWrong) {
  const Check right{"full", "output", 1e-7, 1e-5}, wrong{"lsh", "dq", 1e-3, 1e-4};
  const Check broken{"full", "dv", std::numeric_limits<double>::quiet_NaN(), 1e-4};
  EXPECT_NO_THROW(refuse_wrong({right}));
  EXPECT_THROW(refuse_wrong({right, wrong}), std::runtime_error);
  EXPECT_THROW(refuse_wrong({broken}), std::runtime_error);
}

TEST(Peak, IsOfEveryInstructionSet) {
  const CpuIsa best = cpu_isa();
  for (const CpuIsa isa : supported_cpu_isas()) {
    force_cpu_isa(isa);
    for (const DType dtype : {DType::f32, DType::f64}) {
      FmaPeak peak(dtype);
      peak.run();
      EXPECT_GT(peak.gflops(), 0.1) << cpu_isa_name(isa);
    }
  }
  force_cpu_isa(best);
  EXPECT_GT(copy_gigabytes_per_second(), 0.0);
}

}  // namespace
}  // namespace coterie::bench
