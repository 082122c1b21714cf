// SPDX-License-Identifier: MIT
// The contents of a measurement, the error gate before it and the peak rates.
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <stdexcept>

#include "bench/attention.h"
#include "bench/device.h"
#include "bench/gate.h"
#include "bench/opponent.h"
#include "bench/peak.h"
#include "bench/work.h"
#include "coterie/runtime.h"

namespace coterie::bench {
namespace {

const Problem kSmall{.heads = 2, .kv_heads = 2, .N = 48, .D = 16};

MeasurePlan plan_of(Pass pass, int repeats) {
  return {.pass = pass, .timing = {.repeats = repeats, .min_repeats = repeats}};
}

TEST(Measure, TimesPassesAndPartsAndCountsWhatItKnows) {
  const std::vector<Entry> entries = {make_entry("full", false),
                                      make_entry("i-clustered(clusters=4,topk=8)", false)};
  const std::vector<Measurement> all = measure(entries, kSmall, plan_of(Pass::both, 3));
  const std::size_t opponents = opponent_name().empty() ? 0 : 1;
  ASSERT_EQ(all.size(), 2 + opponents);
  const Measurement &full = all[opponents], &clustered = all.back();
  EXPECT_EQ(full.error, 0.0);
  EXPECT_EQ(full.error_rows, kSmall.N);
  EXPECT_EQ(full.forward_flops, attention_flops(entries[0], kSmall, Pass::forward));
  EXPECT_GT(full.gflops(), 0.0);
  EXPECT_GT(full.peak_gflops, 0.0);
  EXPECT_FALSE(full.select);  // it does not select
  EXPECT_FALSE(full.launch_ms);
  EXPECT_EQ(clustered.name, "i-clustered(clusters=4,topk=8)");
  EXPECT_EQ(clustered.threads, threads());
  EXPECT_FALSE(clustered.hash);  // this clustering does not hash
  EXPECT_GT(clustered.cluster->median_ms, 0.0);
  EXPECT_GT(clustered.select->median_ms, 0.0);
  EXPECT_GT(clustered.attend->median_ms, 0.0);
  EXPECT_GT(clustered.forward->median_ms, 0.0);
  EXPECT_GT(clustered.backward->median_ms, 0.0);
  EXPECT_GT(clustered.workspace_bytes, 0);
  EXPECT_EQ(clustered.io_bytes, 4 * 2 * 48 * 16 * 4);
  EXPECT_EQ(clustered.least_bytes, 3.0 * clustered.io_bytes);
  EXPECT_DOUBLE_EQ(clustered.gigabytes_per_second(),
                   clustered.least_bytes / (1e6 * clustered.total_ms()));
}

TEST(Measure, TimesThePartsThatAMechanismHas) {
  std::vector<Entry> entries;
  for (const char* spec : {"clustered(clusters=4,clustering=hamming)",
                           "i-clustered(clusters=4,clustering=hamming-keys)",
                           "routing(clusters=2,window=8,causal=strict)", "lsh", "local(window=8)",
                           "1*local(window=8)+1*clustered(clusters=4)"}) {
    entries.push_back(make_entry(spec, false));
  }
  MeasurePlan plan = plan_of(Pass::forward, 1);
  plan.alone = true;
  const std::vector<Measurement> all = measure(entries, kSmall, plan);
  ASSERT_EQ(all.size(), entries.size());
  const auto parts = [&](std::size_t i) {
    const Measurement& m = all[i];
    std::string names;
    if (m.hash) names += 'h';
    if (m.cluster) names += 'c';
    if (m.select) names += 's';
    if (m.attend) names += 'a';
    return names;
  };
  EXPECT_EQ(parts(0), "hcsa");
  EXPECT_EQ(parts(1), "hcsa");
  EXPECT_EQ(parts(2), "csa");
  EXPECT_EQ(parts(3), "sa");
  EXPECT_EQ(parts(4), "");
  EXPECT_EQ(parts(5), "csa");
  for (const Measurement& m : all) EXPECT_FALSE(m.backward) << m.name;
}

TEST(Measure, MeasuresEveryNumberOfThreadsAndRestoresIt) {
  const int before = threads();
  MeasurePlan plan = plan_of(Pass::both, 1);
  plan.threads = {1, 3};
  const std::vector<Measurement> all =
      measure({make_entry("full", false), make_entry("local(window=8)", false)}, kSmall, plan);
  EXPECT_EQ(threads(), before);
  const std::size_t each = opponent_name().empty() ? 2 : 3;
  ASSERT_EQ(all.size(), 2 * each);
  for (std::size_t i = 0; i < all.size(); ++i) {
    EXPECT_EQ(all[i].threads, i < each ? 1 : 3);
    EXPECT_EQ(all[i].name, all[i % each].name);
    EXPECT_EQ(all[i].error, all[i % each].error);  // bits do not depend on the number of threads
    EXPECT_GT(all[i].peak_gflops, 0.0);
  }
}

TEST(Measure, OpponentsAgreeWithFullAttention) {
  if (opponent_name().empty()) GTEST_SKIP() << "no other library in this build";
  for (const DType dtype : {DType::f32, DType::bf16}) {
    Problem grouped = kSmall;
    grouped.kv_heads = 1;
    grouped.dtype = dtype;
    const std::vector<Entry> entries = {make_entry("full", false), make_entry("full", true)};
    const std::vector<Measurement> all = measure(entries, grouped, plan_of(Pass::both, 1));
    ASSERT_EQ(all.size(), 4u);
    for (const std::size_t i : {0, 1}) {
      EXPECT_TRUE(all[i].opponent);
      EXPECT_EQ(all[i].name, opponent_name());
      EXPECT_EQ(all[i].entry.causal, i == 1);
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
        "routing(clusters=3,window=32)", "cast(clusters=3,size=32)", "cast(clusters=2,size=64)",
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

TEST(Gate, LetsTheKernelsOfAGpuPass) {
  if (!why_no_device().empty()) GTEST_SKIP() << why_no_device();
  const std::vector<Entry> entries = {make_entry("full", false), make_entry("full", true),
                                      make_entry("local(window=64)", true),
                                      make_entry("i-clustered(clusters=16)", false)};
  for (const DType dtype : {DType::bf16, DType::f16}) {
    Problem problem{.heads = 4, .kv_heads = 4, .N = 4096, .D = 64, .device = Device::cuda};
    problem.dtype = dtype;
    EXPECT_NO_THROW(refuse_wrong(gate(entries, problem)));
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
  EXPECT_GT(hamming_pairs_per_second(), 0.0);
}

}  // namespace
}  // namespace coterie::bench
