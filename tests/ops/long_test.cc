// SPDX-License-Identifier: MIT
// Every mechanism at thousands of tokens against the specification: many tiles, many members of a
// cluster, and more tasks than threads. One head and short rows keep the specification, which
// compares every query with every key, at about a second.
#include <gtest/gtest.h>

#include <set>
#include <variant>

#include "cases/cases.h"
#include "cases/problem.h"
#include "coterie/runtime.h"
#include "coterie/spec.h"
#include "tests/support/expect.h"

namespace coterie {
namespace {

using cases::Case;

std::vector<Case> long_cases() {
  std::vector<Case> all;
  const auto add = [&](const char* name, const char* spec, const std::string& shape) {
    all.push_back(cases::make_case(name, spec, "B1 H1 D8 " + shape));
  };
  add("full", "full", "N1537 S2100");
  add("full_causal_bf16", "full", "N1999 causal bf16");
  add("local", "local(window=300)", "N2500");
  add("local_blocked_causal", "local(window=100,kind=blocked)", "N2049 causal");
  add("strided_packed", "strided(stride=37)", "N2500 causal packed");
  add("oracle_top", "oracle-top(topk=200)", "N1100 S2300");
  add("clustered", "clustered(clusters=200)", "N2500 S1500 mixture");
  add("clustered_hamming", "clustered(clusters=70,clustering=hamming)", "N3000 S1100");
  add("improved", "i-clustered(clusters=64,topk=150)", "N2200 S1600 mixture");
  add("improved_reference", "i-clustered(clusters=30,topk=64,causal=reference)",
      "N2100 causal packed");
  add("lsh", "lsh(rounds=2,chunk=130,buckets=16)", "N1900 causal");
  add("lsh_mean_f64", "lsh(rounds=3,chunk=64,buckets=64,combine=mean)", "N1500 f64");
  add("routing", "routing(clusters=20,window=300)", "N2200 S1700 scale=0.3");
  add("routing_paper_shared", "routing(clusters=9,window=250,share_qk=true,causal=paper)",
      "N1800 causal scale=0.3");
  add("routing_balanced", "routing(clusters=13,membership=balanced)", "N2100 scale=0.3");
  add("routing_strict", "routing(clusters=11,window=200,queries_in=2)", "N1900 causal scale=0.3");
  add("cast", "cast(clusters=12,size=250)", "N1500");
  add("cast_single_packed", "cast(clusters=10,size=260,mode=single)", "N2500 packed");
  return all;
}

class LongTest : public ::testing::TestWithParam<Case> {};
INSTANTIATE_TEST_SUITE_P(Cases, LongTest, ::testing::ValuesIn(long_cases()),
                         [](const auto& c) { return c.param.name; });

TEST_P(LongTest, FollowsTheSpecification) {
  set_threads(2);
  const cases::Problem problem = cases::make_problem(GetParam(), 77);
  cases::Pass run = cases::run_forward(problem);
  test::expect_written(run, false);
  test::expect_selection(problem, run);
  if (HasFailure()) return;  // with a wrong selection the outputs say nothing
  test::expect_forward(problem, run);
  cases::run_backward(problem, run);
  test::expect_written(run, true);
  test::expect_backward(problem, run);
}

TEST(LongCasesTest, EveryMechanismIsThere) {
  std::set<std::size_t> seen;
  for (const Case& c : long_cases())
    seen.insert(AttentionSpec::parse(c.spec).groups.at(0).mechanism.index());
  EXPECT_EQ(seen.size(), std::variant_size_v<Mechanism>);
}

}  // namespace
}  // namespace coterie
