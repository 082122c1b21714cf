// SPDX-License-Identifier: MIT
// The keys that each query sees, and their weights, on problems small enough to write down.
#include <gtest/gtest.h>

#include <algorithm>
#include <set>

#include "coterie/random.h"
#include "tests/ref/support.h"

namespace coterie::ref {
namespace {

using cases::Case;
using Sets = std::vector<std::set<int>>;

Case one_head(const char* spec, std::int64_t queries, std::int64_t keys) {
  return {.name = "",
          .spec = spec,
          .B = 1,
          .H = 1,
          .Hkv = 1,
          .N = queries,
          .S = keys,
          .Dk = 4,
          .Dv = 2,
          .dtype = DType::f64};
}

// Keys with nonzero weight, per query.
Sets keys_of(const Selected& selected, std::int64_t queries, std::int64_t keys) {
  const std::vector<double> weights = selected.weights();
  Sets sets(static_cast<std::size_t>(queries));
  for (std::int64_t i = 0; i < queries; ++i)
    for (std::int64_t j = 0; j < keys; ++j)
      if (weights[i * keys + j] != 0.0) sets[i].insert(static_cast<int>(j));
  return sets;
}

Sets keys_of(const Case& c) { return keys_of(make_selected(c), c.N, c.S); }

TEST(PatternTest, SlidingWindows) {
  EXPECT_EQ(keys_of(one_head("local(window=2)", 4, 3)), (Sets{{0}, {0, 1}, {1, 2}, {2}}));
  EXPECT_EQ(keys_of(one_head("local(window=3)", 4, 4)),
            (Sets{{0, 1}, {0, 1, 2}, {1, 2, 3}, {2, 3}}));
  EXPECT_EQ(keys_of(causal(one_head("local(window=2)", 4, 4))),
            (Sets{{0}, {0, 1}, {1, 2}, {2, 3}}));
}

TEST(PatternTest, Blocks) {
  EXPECT_EQ(
      keys_of(one_head("local(window=2,kind=blocked)", 5, 7)),
      (Sets{{0, 1, 2, 3}, {0, 1, 2, 3}, {0, 1, 2, 3, 4, 5}, {0, 1, 2, 3, 4, 5}, {2, 3, 4, 5, 6}}));
  EXPECT_EQ(keys_of(causal(one_head("local(window=2,kind=blocked)", 5, 5))),
            (Sets{{0}, {0, 1}, {0, 1, 2}, {0, 1, 2, 3}, {2, 3, 4}}));
  EXPECT_EQ(keys_of(one_head("local(window=2,kind=blocked,flange=0)", 3, 5)),
            (Sets{{0, 1}, {0, 1}, {2, 3}}));
}

TEST(PatternTest, Strides) {
  EXPECT_EQ(keys_of(one_head("strided(stride=2)", 3, 5)), (Sets{{0, 2, 4}, {1, 3}, {0, 2, 4}}));
  EXPECT_EQ(keys_of(causal(one_head("strided(stride=2)", 4, 4))), (Sets{{0}, {1}, {0, 2}, {1, 3}}));
}

// The last query is aligned with the last key, whether there are more queries or more keys.
TEST(PatternTest, CausalityIsAlignedAtTheEnd) {
  EXPECT_EQ(keys_of(causal(one_head("full", 2, 4))), (Sets{{0, 1, 2}, {0, 1, 2, 3}}));
  EXPECT_EQ(keys_of(causal(one_head("full", 4, 2))), (Sets{{}, {}, {0}, {0, 1}}));
  EXPECT_EQ(keys_of(causal(one_head("local(window=2)", 2, 4))), (Sets{{1, 2}, {2, 3}}));
  EXPECT_EQ(keys_of(causal(one_head("strided(stride=2)", 2, 5))), (Sets{{1, 3}, {0, 2, 4}}));
  EXPECT_EQ(keys_of(causal(one_head("local(window=2,kind=blocked,flange=0)", 2, 4))),
            (Sets{{2}, {2, 3}}));
}

TEST(PatternTest, OracleTopKeepsTheLargestLogits) {
  const Case c = one_head("oracle-top(topk=3)", 5, 9);
  Case full = c;
  full.spec = "full";
  const std::vector<double> exact = make_selected(full).weights();
  const Sets sets = keys_of(c);
  for (int i = 0; i < 5; ++i) {
    EXPECT_EQ(sets[i].size(), 3u);
    for (int j : sets[i])
      for (int other = 0; other < 9; ++other)
        EXPECT_TRUE(sets[i].count(other) == 1 || exact[i * 9 + j] > exact[i * 9 + other]);
  }
}

// Four chunks of at most two in the given order; the first also sees the last, unless rounds are
// averaged.
TEST(PatternTest, LshChunksSeeTheirPredecessor) {
  Selected lse = make_selected(one_head("lsh(rounds=1,chunk=2,buckets=2)", 7, 7));
  write_values(lse.saved[0], {0, 1, 2, 3, 4, 5, 6});
  EXPECT_EQ(keys_of(lse, 7, 7),
            (Sets{{1, 6}, {0, 6}, {0, 1, 3}, {0, 1, 2}, {2, 3, 5}, {2, 3, 4}, {4, 5}}));
  write_values(lse.saved[0], {6, 0, 3, 2, 5, 4, 1});
  EXPECT_EQ(keys_of(lse, 7, 7),
            (Sets{{1, 6}, {4, 5}, {0, 3, 6}, {0, 2, 6}, {2, 3, 5}, {2, 3, 4}, {0, 1}}));
  lse.problem.inputs.causal = true;
  EXPECT_EQ(keys_of(lse, 7, 7), (Sets{{0}, {1}, {0}, {0, 2}, {2, 3}, {2, 3, 4}, {0, 1}}));

  const Selected mean =
      make_selected(one_head("lsh(rounds=1,chunk=2,buckets=2,combine=mean)", 7, 7));
  write_values(mean.saved[0], {0, 1, 2, 3, 4, 5, 6});
  EXPECT_EQ(
      keys_of(mean, 7, 7),
      (Sets{{0, 1}, {0, 1}, {0, 1, 2, 3}, {0, 1, 2, 3}, {2, 3, 4, 5}, {2, 3, 4, 5}, {4, 5, 6}}));
}

// Query 0 sees keys 1 4 5 in the first round and 1 2 3 in the second: key 1 counts twice.
TEST(PatternTest, LshKeysCountAsOftenAsTheyAreMet) {
  const Selected lsh = make_selected(one_head("lsh(rounds=2,chunk=2,buckets=2)", 6, 6));
  write_values(lsh.saved[0], {0, 1, 2, 3, 4, 5, 2, 3, 0, 1, 4, 5});
  const std::vector<double> q = read_values(lsh.problem.inputs.q), weights = lsh.weights();
  std::vector<double> expected = {0, 2, 1, 1, 1, 1};
  double sum = 0.0;
  for (int j = 0; j < 6; ++j) {
    double product = 0.0, norm = 0.0;
    for (int d = 0; d < 4; ++d) product += q[d] * q[j * 4 + d], norm += q[j * 4 + d] * q[j * 4 + d];
    expected[j] *= std::exp(product / std::sqrt(norm) / 2);
    sum += expected[j];
  }
  for (int j = 0; j < 6; ++j) EXPECT_NEAR(weights[j], expected[j] / sum, 1e-14);
}

// Token 1 sees token 0 in the first round and none in the second; token 0 sees none in either.
TEST(PatternTest, LshSelfCountsOnlyWhereNoRoundMeetsAnother) {
  Selected lsh = make_selected(causal(one_head("lsh(rounds=2,chunk=1,buckets=4)", 4, 4)));
  write_values(lsh.saved[0], {0, 1, 2, 3, 0, 3, 2, 1});
  EXPECT_EQ(keys_of(lsh, 4, 4), (Sets{{0}, {0}, {1}, {0, 2}}));
  const std::vector<double> weights = lsh.weights();
  EXPECT_EQ(weights[0], 1.0);
  EXPECT_EQ(weights[4], 1.0);
}

TEST(PatternTest, OutsideItsTopKeysAnImprovedRowIsTheClustersRow) {
  const Case c = one_head("i-clustered(clusters=3,topk=3)", 12, 9);
  Case coarse = c;
  coarse.spec = "clustered(clusters=3)";
  const Selected improved = make_selected(c);
  const std::vector<double> weights = improved.weights(), shared = make_selected(coarse).weights();
  const std::vector<int> labels = indices_of(improved.saved[0]),
                         top = indices_of(improved.saved[3]);
  for (int i = 0; i < 12; ++i) {
    const auto begin = top.begin() + labels[i] * 3;
    const std::set<int> top_keys(begin, begin + 3);
    double mass = 0.0, own = 0.0;
    for (int j = 0; j < 9; ++j) {
      if (top_keys.count(j) == 0) {
        EXPECT_EQ(weights[i * 9 + j], shared[i * 9 + j]);
        for (int best : top_keys) EXPECT_GE(shared[i * 9 + best], shared[i * 9 + j]);
      } else {
        mass += shared[i * 9 + j];
        own += weights[i * 9 + j];
      }
    }
    EXPECT_NEAR(own, mass, 1e-14);
  }
}

TEST(PatternTest, LeakingClustersSeeTheirPastTopKeys) {
  const Case c = one_head("i-clustered(clusters=3,topk=4,causal=reference)", 10, 12);
  const Selected selected = make_selected(c);
  const std::vector<int> labels = indices_of(selected.saved[0]),
                         top = indices_of(selected.saved[3]);
  const Sets sets = keys_of(selected, 10, 12);
  for (int i = 0; i < 10; ++i) {
    std::set<int> expected;
    for (int slot = 0; slot < 4; ++slot)
      if (top[labels[i] * 4 + slot] <= i + 2) expected.insert(top[labels[i] * 4 + slot]);
    EXPECT_EQ(sets[i], expected);
  }
}

// Lists by hand: query clusters {0 2} {2 3} and key clusters {1 2} {0 2}; query 1 is in none.
TEST(PatternTest, RoutingClustersMeetTheirKeys) {
  const char* spec = "routing(clusters=2,window=2,count_eps=0.5)";
  Selected routing = make_selected(one_head(spec, 4, 3));
  write_values(routing.saved[0], {0, 2, 2, 3});
  write_values(routing.saved[1], {1, 2, 0, 2});
  EXPECT_EQ(keys_of(routing, 4, 3), (Sets{{1, 2}, {}, {0, 1, 2}, {0, 2}}));
  const std::vector<double> weights = routing.weights();
  EXPECT_NEAR(weights[0] + weights[1] + weights[2], 1 / 1.5, 1e-14);  // in one cluster
  EXPECT_NEAR(weights[6] + weights[7] + weights[8], 2 / 2.5, 1e-14);  // in two

  auto& params = std::get<RoutingParams>(routing.problem.mechanism);
  params.self = SelfAttention::demote;  // key 2 is query 2's own
  EXPECT_EQ(keys_of(routing, 4, 3), (Sets{{1, 2}, {}, {0, 1}, {0, 2}}));
  params.self = SelfAttention::keep;
  params.causal = Causality::leaking;  // queries are at -1, 0, 1, 2
  EXPECT_EQ(keys_of(routing, 4, 3), (Sets{{}, {}, {0, 1}, {0, 2}}));
}

// Clusters of the keys 0 1 0 0 1 0, of the queries 0 0 1 1 0 1; window 2.
TEST(PatternTest, StrictRoutingSeesTheLatestKeysOfItsCluster) {
  Selected routing = make_selected(one_head("routing(clusters=2,window=2,causal=strict)", 6, 6));
  write_values(routing.saved[1], {0, 1, 0, 0, 1, 0});
  write_values(routing.saved[2], {0, 1, 4, 2, 3, 5});
  write_values(routing.saved[3], {0, 3, 6});
  EXPECT_EQ(keys_of(routing, 6, 6), (Sets{{0}, {0}, {1}, {1}, {2, 3}, {1, 4}}));
  auto& params = std::get<RoutingParams>(routing.problem.mechanism);
  params.include_self = true;
  EXPECT_EQ(keys_of(routing, 6, 6), (Sets{{0}, {0, 1}, {1, 2}, {1, 3}, {2, 3, 4}, {1, 4, 5}}));
  params.self = SelfAttention::demote;
  EXPECT_EQ(keys_of(routing, 6, 6), (Sets{{0}, {0}, {1}, {1}, {2, 3}, {1, 4}}));
}

// Labels are the nearest of the initial queries in d^2 = (q-mu)' Sigma_K (q-mu).
TEST(PatternTest, KeyMetricLabelsAreNearest) {
  const Selected selected = make_selected(one_head("clustered(clusters=4,iterations=0)", 20, 30));
  const std::vector<int> labels = indices_of(selected.saved[0]);
  const std::vector<double> q = read_values(selected.problem.inputs.q);
  const std::vector<double> k = read_values(selected.problem.inputs.k);
  const RandomStream stream{selected.problem.inputs.seed, RandomUse::initial_centroid, 0};
  const auto distance = [&](int i, int c) {  // the variance of (q - mu) . k over keys
    const std::uint32_t start = random_permutation(stream, static_cast<std::uint32_t>(c), 20);
    double mean = 0.0, square = 0.0;
    for (int j = 0; j < 30; ++j) {
      double product = 0.0;
      for (int d = 0; d < 4; ++d) product += (q[i * 4 + d] - q[start * 4 + d]) * k[j * 4 + d];
      mean += product / 30;
      square += product * product / 30;
    }
    return square - mean * mean;
  };
  for (int i = 0; i < 20; ++i)
    for (int c = 0; c < 4; ++c) EXPECT_LE(distance(i, labels[i]), distance(i, c) + 1e-12);
}

// One cluster with two of three tokens; token 2 sees only its summary.
TEST(PatternTest, CastMixesOwnAttentionAndSummaries) {
  const double phi[] = {0.3, -0.4, 0.9};
  for (const char* spec : {"cast(clusters=1,size=2)", "cast(clusters=1,size=2,activation=laplace)",
                           "cast(clusters=1,size=2,activation=laplace,gate_scale=false)"}) {
    const Selected selected = make_selected(one_head(spec, 3, 3));
    const auto& params = std::get<CastParams>(selected.problem.mechanism);
    const bool laplace = params.activation == CastActivation::laplace;
    const AttentionInputs& inputs = selected.problem.inputs;
    write_values(selected.saved[0], {0, 1});
    write_values(inputs.gate, {phi[0], phi[1], phi[2]});
    const std::vector<double> q = read_values(inputs.q), k = read_values(inputs.k);
    const std::vector<double> s = read_values(inputs.centroids);
    const auto dot = [](const double* a, const double* b) {
      return (a[0] * b[0] + a[1] * b[1] + a[2] * b[2] + a[3] * b[3]) / 2;
    };
    const auto psi = [&](double x) { return params.gate_scale ? 1 + std::log1p(std::exp(x)) : 1; };
    const auto f = [&](double x) {
      return laplace ? 0.5 * (1 + std::erf((x - std::sqrt(0.5)) * std::sqrt(2 * M_PI)))
                     : std::exp(x);
    };
    const std::vector<double> weights = selected.weights();
    for (int i = 0; i < 3; ++i) {
      const double mix = laplace ? f(dot(&q[i * 4], &s[0]) * psi(phi[i])) : 1.0;
      double own[2], sum = 0.0;
      for (int j = 0; j < 2; ++j) {
        own[j] = i < 2 ? f(dot(&q[i * 4], &k[j * 4])) : f(dot(&k[j * 4], &s[0]) * psi(-phi[j]));
        sum += own[j];
      }
      for (int j = 0; j < 2; ++j)
        EXPECT_NEAR(weights[i * 3 + j], mix * own[j] / (laplace ? 1.0 : sum), 1e-14) << spec;
      EXPECT_EQ(weights[i * 3 + 2], 0.0);
    }
  }
}

}  // namespace
}  // namespace coterie::ref
