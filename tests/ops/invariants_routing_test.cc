// SPDX-License-Identifier: MIT
// Invariants of the mechanisms with normalised or shared tokens: routing, LSH and CAST.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <deque>
#include <map>
#include <set>

#include "cases/problem.h"
#include "coterie/routing.h"
#include "ops/parts.h"
#include "ref/ref.h"
#include "tests/support/definitions.h"
#include "tests/support/expect.h"
#include "tests/support/tensors.h"

namespace coterie {
namespace {

using cases::Case;
using cases::Pass;
using cases::Problem;
using test::Expected;
using test::follows_rule;
using test::Normalisation;
using test::normalised;

using Index = std::int64_t;

// The problem with another mechanism and the given tokens in double; values and output gradients
// are the same.
Problem twin(const Problem& problem, const Mechanism& mechanism, const std::vector<double>& q,
             const std::vector<double>& k) {
  Problem result;
  result.mechanism = mechanism;
  result.inputs = problem.inputs;
  result.inputs.centroids = result.inputs.logit_scale = result.inputs.gate = {};
  result.grad_out = problem.grad_out;
  const TensorView& shape = problem.inputs.q;
  const auto add = [&](const std::vector<double>& values, Index heads) {
    result.storage.emplace_back(DType::f64,
                                test::Shape{shape.size(0), heads, shape.size(2), shape.size(3)});
    write_values(result.storage.back(), values);
    return result.storage.back().view();
  };
  result.storage.reserve(2);
  result.inputs.q = add(q, shape.size(1));
  result.inputs.k = add(k, problem.inputs.k.present() ? problem.inputs.k.size(1) : shape.size(1));
  return result;
}

// The output of full or local attention over normalised tokens, with routing's default scale 1.
Expected on_normalised(const Problem& problem, const Mechanism& mechanism) {
  const Index dim = problem.inputs.q.size(3);
  const std::vector<double> q =
      normalised(read_values(problem.inputs.q), dim, Normalisation::unit_variance);
  const std::vector<double> k =
      problem.inputs.k.present()
          ? normalised(read_values(problem.inputs.k), dim, Normalisation::unit_variance)
          : q;
  Problem same = twin(problem, mechanism, q, k);
  if (same.inputs.scale == 0.0) same.inputs.scale = 1.0;
  return test::expected_out(same, {});
}

void expect_routing_equals(const Case& c, const Mechanism& mechanism, double factor = 1.0) {
  SCOPED_TRACE(c.spec);
  const Problem problem = cases::make_problem(c, 1);
  const Pass run = cases::run_forward(problem);
  Expected expected = on_normalised(problem, mechanism);
  for (double& value : expected.exact) value *= factor;
  for (double& value : expected.naive) value *= factor;
  EXPECT_TRUE(follows_rule("out", run.result.out, expected));
}

TEST(RoutingInvariantsTest, OneClusterOfAllTokensIsFullAttention) {
  Case c{.H = 4, .Hkv = 2, .N = 65, .Dk = 16};
  c.spec = "routing(clusters=1,window=65)";
  expect_routing_equals(c, FullParams{}, 1.0 / 1.01);
  c.spec = "routing(clusters=1,window=200,count_eps=0)";
  expect_routing_equals(c, FullParams{});
  c.spec = "routing(clusters=1,membership=balanced)";
  expect_routing_equals(c, FullParams{});
  c.causal = true;
  c.spec = "routing(clusters=1,window=65,causal=paper,count_eps=0)";
  expect_routing_equals(c, FullParams{});
  c.Hkv = 4;
  c.spec = "routing(clusters=1,window=65,causal=paper,count_eps=0,share_qk=true,self=keep)";
  expect_routing_equals(c, FullParams{});
}

TEST(RoutingInvariantsTest, StrictRoutingWithOneClusterIsASlidingWindow) {
  Case c{.H = 4, .Hkv = 2, .N = 113, .Dk = 16, .causal = true};
  c.spec = "routing(clusters=1,window=9)";
  expect_routing_equals(c, LocalParams{.window = 9});
  c.spec = "routing(clusters=1,window=113)";
  expect_routing_equals(c, FullParams{});
  c.Hkv = 4;
  c.spec = "routing(clusters=1,window=9,share_qk=true,self=keep)";
  expect_routing_equals(c, LocalParams{.window = 9});
}

TEST(RoutingInvariantsTest, StrictRoutingIntoAllClustersIsFullCausalAttention) {
  Case c{.N = 65, .Dk = 16, .causal = true};
  c.spec = "routing(clusters=6,window=65,queries_in=6)";
  expect_routing_equals(c, FullParams{});
  c.spec = "routing(clusters=6,window=100,queries_in=99)";
  expect_routing_equals(c, FullParams{});
  c.spec = "routing(clusters=6,window=100,queries_in=6,share_qk=true,self=keep)";
  expect_routing_equals(c, FullParams{});
}

TEST(RoutingInvariantsTest, AWindowOfOneOverSharedTokensCopiesTheValue) {
  const Problem problem = cases::make_problem(
      {.spec = "routing(clusters=4,window=1,share_qk=true,self=keep)", .N = 65, .causal = true}, 2);
  const Pass run = cases::run_forward(problem);
  EXPECT_TRUE(test::same_bits(run.result.out, problem.inputs.v));
}

// Balanced membership is a partition into clusters of at most ceil(n / C) tokens.
TEST(RoutingInvariantsTest, BalancedMembershipIsAPartition) {
  for (cases::Data data : {cases::Data::normal, cases::Data::integers, cases::Data::equal}) {
    for (const char* spec :
         {"routing(clusters=7,membership=balanced)", "routing(clusters=64,membership=balanced)",
          "routing(clusters=100,membership=balanced,share_qk=true)"}) {
      SCOPED_TRACE(spec);
      const Problem problem = cases::make_problem(
          {.spec = spec, .B = 3, .N = 65, .Dk = 8, .lengths = cases::Lengths::padded, .data = data},
          3);
      const Pass run = cases::run_forward(problem);
      const TensorView& members = run.result.saved[0];
      for (Index item = 0; item < members.size(0); ++item)
        for (Index h = 0; h < members.size(1); ++h) {
          const Index used = cases::used_rows(problem.inputs.q_sequences, item, 65);
          const Index clusters = members.size(2), capacity = (used + clusters - 1) / clusters;
          std::multiset<double> seen;
          for (Index c = 0; c < clusters; ++c) {
            Index size = 0;
            for (double token :
                 read_values(members.narrowed(0, item, 1).narrowed(1, h, 1).narrowed(2, c, 1))) {
              if (token < 0) continue;
              seen.insert(token);
              ++size;
            }
            EXPECT_LE(size, capacity);
          }
          EXPECT_EQ(static_cast<Index>(seen.size()), used);
          EXPECT_EQ(static_cast<Index>(std::set<double>(seen.begin(), seen.end()).size()), used);
        }
    }
  }
}

struct Ring {
  std::deque<Index> keys;
};

// Decodes token by token, in double, with a ring of keys per cluster.
std::vector<double> decode(const Problem& problem, const RoutingParams& params) {
  const TensorView& q_view = problem.inputs.q;
  const Index B = q_view.size(0), H = q_view.size(1), N = q_view.size(2), D = q_view.size(3);
  const Index Dv = problem.inputs.v.size(3), Hkv = problem.inputs.v.size(1);
  const bool shared = !problem.inputs.k.present();
  const Index key_heads = shared ? H : Hkv;
  const std::vector<double> q = normalised(read_values(q_view), D, Normalisation::unit_variance);
  const std::vector<double> k =
      shared ? q : normalised(read_values(problem.inputs.k), D, Normalisation::unit_variance);
  const std::vector<double> v = read_values(problem.inputs.v),
                            mu = read_values(problem.inputs.centroids);
  const double scale = problem.inputs.scale == 0.0 ? 1.0 : problem.inputs.scale;
  const auto dot = [&](const double* a, const double* b) {
    double sum = 0;
    for (Index d = 0; d < D; ++d) sum += a[d] * b[d];
    return sum;
  };
  std::vector<double> out;
  for (Index b = 0; b < B; ++b)
    for (Index h = 0; h < H; ++h) {
      const Index kv = h / (H / Hkv), kh = shared ? h : kv;
      const double* centroids = &mu[kv * params.clusters * D];
      std::map<Index, Ring> rings;
      for (Index t = 0; t < N; ++t) {
        const double* query = &q[((b * H + h) * N + t) * D];
        const double* key = &k[((b * key_heads + kh) * N + t) * D];
        std::vector<std::pair<double, Index>> by_query, by_key;
        for (Index c = 0; c < params.clusters; ++c) {
          by_query.emplace_back(-dot(query, centroids + c * D), c);
          by_key.emplace_back(-dot(key, centroids + c * D), c);
        }
        std::sort(by_query.begin(), by_query.end());
        const Index own = std::min_element(by_key.begin(), by_key.end())->second;
        std::deque<Index>& ring = rings[own].keys;
        ring.push_back(t);
        if (static_cast<Index>(ring.size()) > params.window) ring.pop_front();
        std::set<Index> seen;
        for (Index m = 0; m < std::min(params.queries_in, params.clusters); ++m) {
          const std::deque<Index>& keys = rings[by_query[m].second].keys;
          seen.insert(keys.begin(), keys.end());
        }
        if (params.include_self) seen.insert(t);
        if (params.self == SelfAttention::demote && seen.size() > 1) seen.erase(t);
        double largest = -1e300, total = 0;
        for (Index j : seen) {
          largest = std::max(largest, scale * dot(query, &k[((b * key_heads + kh) * N + j) * D]));
        }
        std::vector<double> row(Dv);
        for (Index j : seen) {
          const double weight =
              std::exp(scale * dot(query, &k[((b * key_heads + kh) * N + j) * D]) - largest);
          total += weight;
          for (Index d = 0; d < Dv; ++d) row[d] += weight * v[((b * Hkv + kv) * N + j) * Dv + d];
        }
        for (double value : row) out.push_back(seen.empty() ? 0.0 : value / total);
      }
    }
  return out;
}

TEST(RoutingInvariantsTest, StrictRoutingIsDecodingWithRings) {
  for (const char* spec :
       {"routing(clusters=4,window=5)", "routing(clusters=7,window=3,queries_in=2)",
        "routing(clusters=5,window=4,include_self=true)",
        "routing(clusters=3,window=6,self=demote)", "routing(clusters=4,window=5,share_qk=true)",
        "routing(clusters=4,window=5,share_qk=true,self=keep,queries_in=3)",
        "routing(clusters=9,window=2,include_self=true,self=demote)"}) {
    SCOPED_TRACE(spec);
    Case c{.spec = spec, .H = 4, .Hkv = 2, .N = 80, .Dk = 8, .causal = true};
    c.scale = 0.5;
    const Problem problem = cases::make_problem(c, 4);
    const Pass run = cases::run_forward(problem);
    const auto params = std::get<RoutingParams>(resolve(problem.mechanism, true));
    Expected expected = test::expected_out(problem, run.result.saved);
    expected.exact = decode(problem, params);
    EXPECT_TRUE(follows_rule("out", run.result.out, expected));
  }
}

// The number of pairs in a cluster: n(n+1)/2 if n is below the window w, otherwise nw - w(w-1)/2.
TEST(RoutingInvariantsTest, StrictRoutingMeetsAsManyPairsAsItSays) {
  const Index window = 6, tokens = 60;
  Case c{.spec = "routing(clusters=5,window=6,share_qk=true,self=keep)",
         .B = 1,
         .N = tokens,
         .Dk = 8,
         .Dv = tokens,
         .causal = true,
         .scale = 0.1};
  const Problem problem = cases::make_problem(c, 5);
  fill(problem.inputs.v, [&](Index at) { return at / tokens % tokens == at % tokens ? 1.0 : 0.0; });
  const Pass run = cases::run_forward(problem);
  std::map<double, Index> sizes;
  Index expected = 0, actual = 0;
  for (Index h = 0; h < 2; ++h) {
    sizes.clear();
    for (double label : read_values(run.result.saved[0].narrowed(1, h, 1))) ++sizes[label];
    for (const auto& [label, n] : sizes) {
      expected += n < window ? n * (n + 1) / 2 : n * window - window * (window - 1) / 2;
    }
  }
  for (double weight : read_values(run.result.out)) actual += weight > 0 ? 1 : 0;
  EXPECT_EQ(actual, expected);
}

TEST(RoutingInvariantsTest, QueriesWhoseClusterHasNoKeysGetZeros) {
  for (bool causal : {true, false}) {
    Case c{.spec = "routing(clusters=2,membership=nearest,window=8)", .N = 20, .Dk = 8};
    if (!causal) c.spec = "routing(clusters=2,window=8)";
    c.causal = causal;
    const Problem problem = cases::make_problem(c, 6);
    // Queries point to the second centroid, keys to the first.
    const auto pattern = [](Index d) { return d < 4 ? 1.0 : -1.0; };
    fill(problem.inputs.centroids,
         [&](Index at) { return (at / 8 % 2 == 0 ? 1.0 : -1.0) * pattern(at % 8); });
    fill(problem.inputs.q, [&](Index at) { return -pattern(at % 8); });
    fill(problem.inputs.k, [&](Index at) { return pattern(at % 8); });
    Pass run = cases::run_forward(problem);
    cases::run_backward(problem, run);
    if (causal) {
      for (double value : read_values(run.result.out)) ASSERT_EQ(value, 0.0);
      for (const TensorView& gradient : {run.gradients.dq, run.gradients.dk, run.gradients.dv}) {
        for (double value : read_values(gradient)) ASSERT_EQ(value, 0.0);
      }
      for (double value : read_values(run.result.saved.back())) {
        ASSERT_EQ(value, -std::numeric_limits<double>::infinity());
      }
    }
    test::expect_written(run, true);
  }
}

// A step uses the centroids it started with; an update takes effect in the next step.
TEST(RoutingInvariantsTest, CentroidUpdatesShowInTheNextStep) {
  Case c{.spec = "routing(clusters=4,window=8)", .N = 65, .Dk = 8, .causal = true};
  const Problem problem = cases::make_problem(c, 7);
  const Pass first = cases::run_forward(problem), second = cases::run_forward(problem);
  EXPECT_TRUE(test::same_bits(first.result.out, second.result.out));
  const HostTensor counts = test::tensor_of(DType::f32, {2, 4}, std::vector<double>(8, 1.0));
  const HostTensor sums =
      test::tensor_of(DType::f32, {2, 4, 8}, read_values(problem.inputs.centroids));
  CentroidState state;
  state.centroids = problem.inputs.centroids;
  state.counts = counts;
  state.sums = sums;
  const HostTensor members(DType::f64, {2, 4}), added(DType::f64, {2, 4, 8});
  add_centroid_statistics(problem.inputs.q, {}, first.result.saved[0], {members, added});
  move_centroids(0.1, {members, added}, state);
  const Pass third = cases::run_forward(problem);
  EXPECT_FALSE(test::same_bits(first.result.out, third.result.out));
}

// A factor of 0 makes attention uniform; its gradient has no special case.
TEST(RoutingInvariantsTest, LogitFactorsMayBeZeroOrNegative) {
  for (const auto& [spec, causal] : std::vector<std::pair<const char*, bool>>{
           {"routing(clusters=4,window=9)", true},
           {"routing(clusters=4,window=9,share_qk=true)", true},
           {"routing(clusters=4,window=9)", false},
           {"routing(clusters=4,membership=balanced)", false}}) {
    SCOPED_TRACE(spec);
    Case c{.spec = spec, .N = 65, .Dk = 8, .logit_scale = true, .scale = 0.5};
    c.causal = causal;
    const Problem problem = cases::make_problem(c, 12);
    write_values(problem.inputs.logit_scale, {0.0, -0.7});
    Pass run = cases::run_forward(problem);
    cases::run_backward(problem, run);
    test::expect_forward(problem, run);
    test::expect_backward(problem, run);
  }
}

TEST(LshInvariantsTest, OneChunkIsFullAttentionOverNormalisedKeys) {
  for (const char* spec :
       {"lsh(rounds=1,chunk=65,buckets=4,combine=mean)",
        "lsh(rounds=3,chunk=80,buckets=4,combine=mean)", "lsh(rounds=1,chunk=65,buckets=4)",
        "lsh(rounds=1,chunk=200,buckets=4)"}) {
    for (bool causal : {false, true}) {
      SCOPED_TRACE(std::string(spec) + (causal ? " causal" : ""));
      Case c{.spec = spec, .N = 65, .Dk = 16};
      c.causal = causal;
      const Problem problem = cases::make_problem(c, 8);
      const Pass run = cases::run_forward(problem);
      const std::vector<double> q = read_values(problem.inputs.q);
      Problem same = twin(problem, FullParams{}, q, normalised(q, 16, Normalisation::unit_length));
      HostTensor mask(DType::u8, {2, 2, 65, 65});
      const bool demoted = std::get<LshParams>(problem.mechanism).combine == LshCombine::lse;
      fill(mask, [&](Index at) {
        const Index i = at / 65 % 65, j = at % 65;
        const bool alone = causal && i == 0;
        return demoted && i == j && !alone ? 0.0 : 1.0;
      });
      same.inputs.mask = mask;
      EXPECT_TRUE(follows_rule("out", run.result.out, test::expected_out(same, {})));
    }
  }
}

TEST(LshInvariantsTest, EveryTokenIsInEveryRoundOnceInBucketOrder) {
  const Problem problem = cases::make_problem({.spec = "lsh(rounds=3,chunk=8,buckets=6)",
                                               .B = 3,
                                               .N = 65,
                                               .Dk = 8,
                                               .lengths = cases::Lengths::padded},
                                              9);
  const Pass run = cases::run_forward(problem);
  const TensorView& order = run.result.saved[0];
  for (Index b = 0; b < 3; ++b)
    for (Index h = 0; h < 2; ++h)
      for (Index r = 0; r < 3; ++r) {
        const std::vector<double> slots =
            read_values(order.narrowed(0, b, 1).narrowed(1, h, 1).narrowed(2, r, 1));
        const Index used = cases::used_rows(problem.inputs.q_sequences, b, 65);
        std::set<double> tokens(slots.begin(), slots.begin() + used);
        EXPECT_EQ(static_cast<Index>(tokens.size()), used);
        if (used > 0) {
          EXPECT_EQ(*tokens.begin(), 0);
          EXPECT_EQ(*tokens.rbegin(), used - 1);
        }
        for (Index slot = used; slot < 65; ++slot) EXPECT_EQ(slots[slot], -1);
        // At most six buckets: six ascending runs.
        Index runs = used > 0 ? 1 : 0;
        for (Index slot = 1; slot < used; ++slot) runs += slots[slot] < slots[slot - 1] ? 1 : 0;
        EXPECT_LE(runs, 6);
      }
}

// Chunks of one token: in each round a token sees its predecessor in the order, unless that is
// later in the sequence.
TEST(LshInvariantsTest, SelfCountsOnlyWhereNoRoundMeetsAnother) {
  constexpr Index kTokens = 33, kRounds = 3;
  const Problem problem = cases::make_problem({.spec = "lsh(rounds=3,chunk=1,buckets=4)",
                                               .N = kTokens,
                                               .Dk = 8,
                                               .Dv = kTokens,
                                               .causal = true},
                                              12);
  fill(problem.inputs.v,
       [](Index at) { return at / kTokens % kTokens == at % kTokens ? 1.0 : 0.0; });
  const Pass run = cases::run_forward(problem);
  const std::vector<double> out = read_values(run.result.out);
  const std::vector<double> order = read_values(run.result.saved[0]);
  Index alone_in_some = 0, alone_in_all = 0;
  for (Index head = 0; head < 4; ++head) {
    std::vector<Index> met(kTokens, 0);
    for (Index round = 0; round < kRounds; ++round) {
      const double* sorted = &order[(head * kRounds + round) * kTokens];
      for (Index slot = 0; slot < kTokens; ++slot)
        if (sorted[(slot + kTokens - 1) % kTokens] < sorted[slot])
          ++met[static_cast<Index>(sorted[slot])];
    }
    for (Index i = 0; i < kTokens; ++i) {
      EXPECT_EQ(out[(head * kTokens + i) * kTokens + i] != 0.0, met[i] == 0) << i;
      alone_in_some += 0 < met[i] && met[i] < kRounds ? 1 : 0;
      alone_in_all += met[i] == 0 ? 1 : 0;
    }
  }
  EXPECT_GT(alone_in_some, 0);
  EXPECT_GT(alone_in_all, 0);
}

TEST(CastInvariantsTest, OneClusterOfAllTokensIsFullAttention) {
  for (const char* spec :
       {"cast(clusters=1,size=65)", "cast(clusters=1,size=65,mode=single)",
        "cast(clusters=1,size=100,heads=separate)", "cast(clusters=1,size=65,gate_scale=false)"}) {
    SCOPED_TRACE(spec);
    Problem problem = cases::make_problem({.spec = spec, .H = 4, .Hkv = 2, .N = 65, .Dk = 16}, 10);
    Pass run = cases::run_forward(problem);
    cases::run_backward(problem, run);
    for (double value : read_values(run.gradients.dgate)) EXPECT_EQ(value, 0.0);
    run.gradients.dgate = run.gradients.dcentroids = {};
    problem.mechanism = FullParams{};
    problem.inputs.centroids = problem.inputs.gate = {};
    EXPECT_TRUE(follows_rule("out", run.result.out, test::expected_out(problem, {})));
    test::expect_gradients(problem, run, test::expected_gradients(problem, {}));
  }
}

TEST(CastInvariantsTest, WithoutGateScaleTheGateHasNoGradient) {
  const Problem problem = cases::make_problem(
      {.spec = "cast(clusters=5,size=9,gate_scale=false)", .N = 65, .Dk = 8}, 11);
  Pass run = cases::run_forward(problem);
  cases::run_backward(problem, run);
  for (double value : read_values(run.gradients.dgate)) EXPECT_EQ(value, 0.0);
}

}  // namespace
}  // namespace coterie
