// SPDX-License-Identifier: MIT
// The invariants of docs/mechanisms.md, which hold for any data: when one mechanism equals another,
// and properties of the weights.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <set>

#include "cases/problem.h"
#include "coterie/spec.h"
#include "ops/parts.h"
#include "ref/ref.h"
#include "tests/support/expect.h"
#include "tests/support/tensors.h"

namespace coterie {
namespace {

using cases::Case;
using cases::Pass;
using cases::Problem;
using test::Expected;
using test::follows_rule;

using Index = std::int64_t;

// Runs the problem and expects the output and gradients that `mechanism` specifies for its inputs.
void expect_equals(Problem& problem, const Mechanism& mechanism) {
  Pass run = cases::run_forward(problem);
  cases::run_backward(problem, run);
  problem.mechanism = mechanism;
  EXPECT_TRUE(follows_rule("out", run.result.out, test::expected_out(problem, {})));
  test::expect_gradients(problem, run, test::expected_gradients(problem, {}));
}

// A budget that covers the sequence gives full attention.
TEST(InvariantsTest, ACoveringBudgetIsFullAttention) {
  const std::vector<std::string> specs = {
      "local(window=300)",
      "local(window=80,kind=blocked)",
      "local(window=8,kind=blocked,flange=20)",
      "strided(stride=1)",
      "oracle-top(topk=113)",
      "i-clustered(clusters=5,topk=113)",
      "i-clustered(clusters=5,topk=500,mass_grad=false)",
      "i-clustered(clusters=5,topk=113,clustering=hamming)",
      "i-clustered(clusters=5,topk=113,clustering=hamming-keys)",
      "clustered(clusters=113)",
      "clustered(clusters=200)",
      "clustered(clusters=113,clustering=hamming)",
      "clustered(clusters=150,clustering=hamming-keys)",
      "i-clustered(clusters=113,topk=3)",
      "clustered(clusters=5,near=113)",
      "i-clustered(clusters=5,topk=3,near=57)",
      "i-clustered(clusters=5,topk=113,near=4)",
      "clustered(clusters=113,near=8)",
      "i-clustered(clusters=113,topk=3,near=1)",
  };
  for (const std::string& spec : specs) {
    for (cases::Lengths lengths : {cases::Lengths::padded, cases::Lengths::packed}) {
      SCOPED_TRACE(spec + (lengths == cases::Lengths::packed ? " packed" : " padded"));
      Case c{.spec = spec,
             .B = lengths == cases::Lengths::packed ? 1 : 3,
             .H = 4,
             .Hkv = 2,
             .N = 113,
             .Dk = 16,
             .Dv = 8};
      c.lengths = lengths;
      Problem problem = cases::make_problem(c, 1);
      expect_equals(problem, FullParams{});
    }
  }
}

TEST(InvariantsTest, ACoveringBudgetIsFullAttentionCausally) {
  for (const char* spec : {"local(window=65)", "local(window=65,kind=blocked)", "strided(stride=1)",
                           "oracle-top(topk=65)"}) {
    SCOPED_TRACE(spec);
    Problem problem =
        cases::make_problem({.spec = spec, .N = 65, .S = 65, .Dk = 16, .causal = true}, 2);
    expect_equals(problem, FullParams{});
  }
}

TEST(InvariantsTest, EqualTokensAreClusteredWithoutError) {
  for (const char* spec :
       {"clustered(clusters=4)", "clustered(clusters=4,clustering=hamming)",
        "clustered(clusters=4,clustering=hamming-keys)", "i-clustered(clusters=4,topk=7)",
        "clustered(clusters=4,near=4)", "i-clustered(clusters=4,topk=7,near=8)"}) {
    SCOPED_TRACE(spec);
    Problem problem =
        cases::make_problem({.spec = spec, .N = 65, .Dk = 16, .data = cases::Data::equal}, 3);
    const Pass run = cases::run_forward(problem);
    problem.mechanism = FullParams{};
    EXPECT_TRUE(follows_rule("out", run.result.out, test::expected_out(problem, {})));
  }
}

// Writes labels, and the order and offsets that follow from them.
void set_labels(const Problem& problem, const Pass& run, const std::vector<double>& labels) {
  write_values(run.result.saved[0], labels);
  Groups groups;
  groups.order = run.result.saved[1];
  groups.offsets = run.result.saved[2];
  group_by_cluster(run.result.saved[0], problem.inputs.q_sequences, groups);
}

void expect_equal_queries_exact(const char* spec) {
  SCOPED_TRACE(spec);
  Problem problem = cases::make_problem({.spec = spec, .N = 63, .Dk = 16}, 4);
  const std::vector<double> rows = read_values(problem.inputs.q);
  const auto source = [](Index i) { return i * 7 % 9; };  // token i is a copy of one of nine
  fill(problem.inputs.q, [&](Index at) {
    const Index head = at / (63 * 16), i = at / 16 % 63;
    return rows[(head * 63 + source(i)) * 16 + at % 16];
  });
  const Pass run = cases::prepare(problem);
  std::vector<double> labels;
  for (Index row = 0; row < 4 * 63; ++row) labels.push_back(static_cast<double>(source(row % 63)));
  set_labels(problem, run, labels);
  attention_attend(problem.mechanism, problem.inputs, run.result, run.workspace);
  problem.mechanism = FullParams{};
  EXPECT_TRUE(follows_rule("out", run.result.out, test::expected_out(problem, {})));
}

TEST(InvariantsTest, ClustersOfEqualQueriesAreExact) {
  for (const char* spec : {"clustered(clusters=9)", "clustered(clusters=9,near=4)"})
    expect_equal_queries_exact(spec);
}

// The mean of a cluster gives almost all of its weight to the near keys of one member, whose own
// logits there are small: what remains of the cluster's row has to keep its accuracy.
TEST(InvariantsTest, NearKeysThatDominateAMeanDoNotCancel) {
  constexpr Index kTokens = 256, kNear = 16, kDim = 64;
  for (const char* spec :
       {"clustered(clusters=2,near=16)", "i-clustered(clusters=2,topk=3,near=16)"})
    for (const double size : {7.0, 14.0, 40.0, 120.0}) {  // 7: 99.9 % of the mean's weight
      SCOPED_TRACE(std::string(spec) + " logits of " + std::to_string(size));
      Problem problem =
          cases::make_problem({.spec = spec, .B = 1, .H = 1, .N = kTokens, .Dk = kDim}, 8);
      problem.inputs.scale = 1.0;
      // Keys of tokens 0 .. 2 kNear - 1 have direction 0; token 0 has no part in it, but token 200,
      // in the same cluster, twice as much as their mean.
      fill(problem.inputs.k, [&](Index at) {
        const Index j = at / kDim, d = at % kDim;
        if (d == 0) return j < 2 * kNear ? 1.0 : 0.0;
        return 0.05 * std::sin(static_cast<double>(3 * at + 1));
      });
      fill(problem.inputs.q, [&](Index at) {
        const Index i = at / kDim, d = at % kDim;
        if (d == 0) return i == 200 ? 2.0 * size : 0.0;
        return i == 0 || i == 200 ? 0.1 * std::cos(static_cast<double>(at)) : 0.0;
      });
      Pass run = cases::run_forward(problem);
      std::vector<double> labels(kTokens, 1.0);
      labels[0] = labels[200] = 0.0;
      set_labels(problem, run, labels);
      if (run.selection_count > 3) {
        // Neither list has a near key of token 0.
        write_values(run.result.saved[3], {210, 220, 230, 40, 41, 42});
      }
      attention_attend(problem.mechanism, problem.inputs, run.result, run.workspace);
      EXPECT_TRUE(
          follows_rule("out", run.result.out, test::expected_out(problem, run.result.saved)));
      cases::run_backward(problem, run);
      test::expect_gradients(problem, run, test::expected_gradients(problem, run.result.saved));
    }
}

// With unit vectors as values, outputs are weights.
Problem with_unit_values(Case c, std::uint64_t seed) {
  c = cases::completed(c);
  c.Dv = c.S;
  Problem problem = cases::make_problem(c, seed);
  fill(problem.inputs.v, [&](Index at) { return at / c.S % c.S == at % c.S ? 1.0 : 0.0; });
  return problem;
}

std::vector<double> row_distances(const std::vector<double>& a, const std::vector<double>& b,
                                  std::size_t width) {
  std::vector<double> distances;
  for (std::size_t first = 0; first < a.size(); first += width) {
    double sum = 0;
    for (std::size_t j = first; j < first + width; ++j) sum += std::abs(a[j] - b[j]);
    distances.push_back(sum);
  }
  return distances;
}

// |improved row - exact row| <= |clustered row - exact row| in the 1-norm, for every query.
TEST(InvariantsTest, ImprovedRowsAreNeverFurtherFromFullAttentionThanClusteredOnes) {
  for (const char* clustering : {"keys", "hamming-keys", "hamming"}) {
    for (cases::Data data : {cases::Data::normal, cases::Data::mixture}) {
      for (int topk : {1, 6, 30}) {
        const std::string common = "clustered(clusters=7,clustering=" + std::string(clustering);
        Case c{.spec = common + ")", .N = 50, .S = 60, .Dk = 8};
        c.dtype = DType::f64;
        c.data = data;
        c.scale = 1.0;  // peaked rows
        const Problem clustered = with_unit_values(c, 5);
        c.spec = "i-" + common + ",topk=" + std::to_string(topk) + ")";
        const Problem improved = with_unit_values(c, 5);
        const Pass a = cases::run_forward(clustered), b = cases::run_forward(improved);
        ASSERT_TRUE(test::same_bits(a.result.saved[0], b.result.saved[0])) << "the clusters differ";

        const std::vector<double> exact = ref::weights<double>(FullParams{}, clustered.inputs, {});
        const auto judge = [&](const std::vector<double>& plain,
                               const std::vector<double>& better) {
          const std::vector<double> before = row_distances(plain, exact, 60);
          const std::vector<double> after = row_distances(better, exact, 60);
          const double rounding = 60 * test::ulp(DType::f64, 1.0);
          double gain = 0;
          for (std::size_t i = 0; i < before.size(); ++i) {
            ASSERT_LE(after[i], before[i] + rounding) << c.spec << " row " << i;
            gain += before[i] - after[i];
          }
          const double least = topk > 1 ? 0.0 : -rounding;  // a single key keeps its mass
          EXPECT_GT(gain, least) << c.spec;
        };
        judge(read_values(a.result.out), read_values(b.result.out));
        judge(ref::weights<double>(clustered.mechanism, clustered.inputs, a.result.saved),
              ref::weights<double>(improved.mechanism, improved.inputs, b.result.saved));
      }
    }
  }
}

// If all values are 1, an output is the sum of its row of weights: 1, or 0 for a query without
// keys. With routing it is n / (n + eps) for a token in n clusters. Laplace weights have no fixed
// sum.
TEST(InvariantsTest, WeightsSumToOne) {
  for (const Case& c : cases::all()) {
    if (c.spec.find("laplace") != std::string::npos || c.dropout > 0) continue;
    SCOPED_TRACE(c.name);
    const Problem problem = cases::make_problem(c, 6);
    fill(problem.inputs.v, [](Index) { return 1.0; });
    const Pass run = cases::run_forward(problem);
    const Expected expected = test::expected_out(problem, run.result.saved);
    EXPECT_TRUE(follows_rule("out", run.result.out, expected));
    const Mechanism resolved = resolve(problem.mechanism, problem.inputs.causal);
    const auto* routing = std::get_if<RoutingParams>(&resolved);
    const bool averaged = routing != nullptr && routing->membership == Membership::top;
    const double rounding = static_cast<double>(c.S) * test::ulp(DType::f64, 1.0);
    for (double sum : expected.exact) {
      // With routing, a token in n clusters, of which m have a key for it, has m / (n + eps).
      double parts = sum;
      for (double n = 1; averaged && sum > 0 && n <= static_cast<double>(routing->clusters); ++n) {
        parts = sum * (n + routing->count_eps);
        if (std::abs(parts - std::round(parts)) < rounding) break;
      }
      ASSERT_NEAR(parts, std::round(parts), rounding);
      ASSERT_LE(sum, 1.0 + rounding);
    }
  }
}

// The new position of token `i` in the permuted sequence.
Index moved(Index i, Index count) { return (i * 29 + 11) % count; }

// Moves rows (dimension 2) to their new positions, or back.
void permute_rows(const TensorView& tensor, bool back = false) {
  const std::vector<double> values = read_values(tensor);
  const Index rows = tensor.size(2), width = tensor.rank > 3 ? tensor.size(3) : 1;
  std::vector<double> result(values.size());
  for (std::size_t at = 0; at < values.size(); ++at) {
    const Index d = static_cast<Index>(at) % width, row = static_cast<Index>(at) / width;
    const Index to = row / rows * rows + moved(row % rows, rows);
    if (back) {
      result[at] = values[to * width + d];
    } else {
      result[to * width + d] = values[at];
    }
  }
  write_values(tensor, result);
}

// Replaces tokens in lists (last dimension) by their new positions; if `sorted`, in ascending
// order.
void rename_tokens(const TensorView& lists, Index tokens, bool sorted) {
  std::vector<double> values = read_values(lists);
  const auto width = static_cast<std::size_t>(lists.size(lists.rank - 1));
  for (std::size_t first = 0; first < values.size(); first += width) {
    std::size_t used = 0;
    for (std::size_t t = first; t < first + width && values[t] >= 0; ++t, ++used) {
      values[t] = static_cast<double>(moved(static_cast<Index>(values[t]), tokens));
    }
    if (sorted) std::sort(values.begin() + first, values.begin() + first + used);
  }
  write_values(lists, values);
}

// Permutes a selection together with its tokens.
void permute_selection(const Problem& problem, const Pass& run, Index tokens) {
  const SavedLayout layout = attention_saved(problem.mechanism, problem.inputs);
  for (std::size_t s = 0; s < layout.selection_count; ++s) {
    const std::string& name = layout.tensors[s].name;
    const TensorView& tensor = run.result.saved[s];
    if (name.find("labels") != std::string::npos) permute_rows(tensor);
    if (name == "top_keys" || name.find("members") != std::string::npos) {
      rename_tokens(tensor, tokens, true);
    }
    if (name == "top_keys" && std::holds_alternative<OracleTopParams>(problem.mechanism)) {
      permute_rows(tensor);
    }
    if (name == "order" && std::holds_alternative<LshParams>(problem.mechanism)) {
      rename_tokens(tensor, tokens, false);
    }
  }
  if (layout.selection_count > 2 && layout.tensors[0].name == "labels") {
    set_labels(problem, run, read_values(run.result.saved[0]));
  }
}

TEST(InvariantsTest, PermutedTokensGivePermutedResults) {
  for (const char* spec :
       {"full", "oracle-top(topk=9)", "clustered(clusters=6)", "i-clustered(clusters=6,topk=9)",
        "i-clustered(clusters=6,topk=9,mass_grad=false,clustering=hamming)",
        "lsh(rounds=2,chunk=8,buckets=8,combine=mean)", "routing(clusters=5,window=12)",
        "routing(clusters=5,membership=balanced)", "cast(clusters=5,size=12)",
        "cast(clusters=5,size=15,mode=single)", "cast(clusters=5,size=12,activation=laplace)"}) {
    SCOPED_TRACE(spec);
    const Index tokens = 63;
    const Problem problem = cases::make_problem({.spec = spec, .N = tokens, .Dk = 8}, 7);
    Pass before = cases::run_forward(problem);
    cases::run_backward(problem, before);
    const Expected out = test::expected_out(problem, before.result.saved);
    const test::ExpectedGradients expected = test::expected_gradients(problem, before.result.saved);

    Pass after = cases::prepare(problem);
    for (std::size_t s = 0; s < before.selection_count; ++s) {
      write_values(after.result.saved[s], read_values(before.result.saved[s]));
    }
    permute_selection(problem, after, tokens);
    for (const TensorView& tensor : std::initializer_list<TensorView>{
             problem.inputs.q, problem.inputs.k, problem.inputs.v, problem.grad_out}) {
      if (tensor.present()) permute_rows(tensor);
    }
    if (problem.inputs.gate.present()) {
      TensorView gate = problem.inputs.gate;  // (B, N) as (1, B, N)
      gate = TensorView::contiguous(gate.data, gate.dtype, {1, gate.size(0), gate.size(1)});
      permute_rows(gate);
    }
    attention_attend(problem.mechanism, problem.inputs, after.result, after.workspace);
    cases::run_backward(problem, after);
    for (const TensorView& tensor :
         {after.result.out, after.gradients.dq, after.gradients.dk, after.gradients.dv}) {
      if (tensor.present()) permute_rows(tensor, true);
    }
    EXPECT_TRUE(test::agrees("out", after.result.out, before.result.out, out));
    EXPECT_TRUE(test::agrees("dq", after.gradients.dq, before.gradients.dq, expected.dq));
    if (problem.inputs.k.present()) {
      EXPECT_TRUE(test::agrees("dk", after.gradients.dk, before.gradients.dk, expected.dk));
    }
    EXPECT_TRUE(test::agrees("dv", after.gradients.dv, before.gradients.dv, expected.dv));
    if (problem.inputs.gate.present()) {
      EXPECT_TRUE(test::agrees("dcentroids", after.gradients.dcentroids,
                               before.gradients.dcentroids, expected.dcentroids));
    }
  }
}

// A mask of ones is equivalent to no mask, and a lower triangle is equivalent to `causal`.
TEST(InvariantsTest, AMaskCanSayWhatTheFlagsSay) {
  for (const char* spec : {"full", "local(window=9)", "local(window=16,kind=blocked)",
                           "strided(stride=3)", "oracle-top(topk=7)"}) {
    SCOPED_TRACE(spec);
    const Index tokens = 65;
    Problem problem =
        cases::make_problem({.spec = spec, .B = 1, .H = 2, .N = tokens, .Dk = 8, .mask = true}, 8);
    fill(problem.inputs.mask.narrowed(1, 0, 1), [](Index) { return 1.0; });
    const Pass masked = cases::run_forward(problem);
    const Expected expected = test::expected_out(problem, masked.result.saved);
    TensorView mask = problem.inputs.mask;
    problem.inputs.mask = {};
    const Pass plain = cases::run_forward(problem);
    EXPECT_TRUE(test::agrees("out", masked.result.out, plain.result.out, expected));

    if (std::string(spec).starts_with("local")) continue;  // causal windows have another extent
    fill(mask.narrowed(1, 0, 1), [&](Index at) { return at % tokens <= at / tokens ? 1.0 : 0.0; });
    problem.inputs.mask = mask;
    const Pass triangle = cases::run_forward(problem);
    const Expected causal = test::expected_out(problem, triangle.result.saved);
    problem.inputs.mask = {};
    problem.inputs.causal = true;
    const Pass flag = cases::run_forward(problem);
    EXPECT_TRUE(test::agrees("out", triangle.result.out, flag.result.out, causal));
  }
}

// Adding one vector to all keys shifts all logits of a query equally.
TEST(InvariantsTest, AConstantAddedToAllKeysChangesNoKeyAwareCluster) {
  for (const char* clustering : {"keys", "hamming-keys"}) {
    const Problem problem = cases::make_problem(
        {.spec = "clustered(clusters=9,clustering=" + std::string(clustering) + ")",
         .N = 113,
         .Dk = 8,
         .dtype = DType::f64},
        9);
    const Pass before = cases::run_forward(problem);
    const std::vector<double> keys = read_values(problem.inputs.k);
    fill(problem.inputs.k, [&](Index at) { return keys[at] + static_cast<double>(at % 8) - 3.5; });
    const Pass after = cases::run_forward(problem);
    EXPECT_TRUE(test::same_bits(before.result.saved[0], after.result.saved[0])) << clustering;
  }
}

TEST(InvariantsTest, QueriesThatDifferWhereKeysDoNotShareAKeyAwareCluster) {
  for (const char* clustering : {"keys", "hamming-keys"}) {
    const Index tokens = 64, dim = 8;
    const Problem problem = cases::make_problem(
        {.spec = "clustered(clusters=9,clustering=" + std::string(clustering) + ")",
         .B = 1,
         .H = 1,
         .N = tokens,
         .Dk = dim,
         .dtype = DType::f64,
         .data = cases::Data::integers},
        10);
    const std::vector<double> keys = read_values(problem.inputs.k);
    fill(problem.inputs.k, [&](Index at) { return at % dim < 4 ? keys[at] : 0.0; });
    const std::vector<double> queries = read_values(problem.inputs.q);
    fill(problem.inputs.q, [&](Index at) {  // query i and i + 32 agree in the first four elements
      const Index i = at / dim, d = at % dim;
      return queries[d < 4 ? i % 32 * dim + d : at];
    });
    const Pass run = cases::run_forward(problem);
    const std::vector<double> labels = read_values(run.result.saved[0]);
    EXPECT_GT(std::set<double>(labels.begin(), labels.end()).size(), 1u) << clustering;
    for (Index i = 0; i < 32; ++i) EXPECT_EQ(labels[i], labels[i + 32]) << clustering;
  }
}

}  // namespace
}  // namespace coterie
