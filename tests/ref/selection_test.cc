// SPDX-License-Identifier: MIT
// Selections: total orders, partitions and invariances.
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <set>

#include "coterie/error.h"
#include "coterie/random.h"
#include "ref/selection.h"
#include "tests/ref/support.h"

namespace coterie::ref {
namespace {

using cases::Case;
using cases::Lengths;

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

Matrix<double> matrix(Index rows, Index cols, std::vector<double> values) {
  Matrix<double> result(rows, cols);
  result.values = std::move(values);
  return result;
}

Matrix<double> random_integers(Index rows, Index cols, std::uint64_t seed, std::uint32_t below) {
  const RandomStream stream{seed, RandomUse::data, 0};
  Matrix<double> result(rows, cols);
  for (std::size_t i = 0; i < result.values.size(); ++i)
    result.values[i] = random_below(stream, i, below);
  return result;
}

TEST(SelectionTest, TopPrefersLowerIndicesAndRanksNanLast) {
  const Lists top = top_of_rows(matrix(2, 5, {1, 3, 3, kNaN, 3, kNaN, 0, kNaN, kNaN, -1}), 3);
  EXPECT_EQ(top[0], (std::vector<Index>{1, 2, 4}));
  EXPECT_EQ(top[1], (std::vector<Index>{0, 1, 4}));  // 0, -1, then the first NaN
  EXPECT_EQ(top_of_rows(matrix(1, 2, {1, 2}), 9)[0], (std::vector<Index>{0, 1}));
}

TEST(SelectionTest, BestPrefersLowerIndicesAndIgnoresNan) {
  const Matrix<double> scores = matrix(3, 3, {1, 2, 2, kNaN, -5, kNaN, kNaN, kNaN, kNaN});
  EXPECT_EQ(best_of_rows(scores), (std::vector<Index>{1, 1, 0}));
}

// The same matching by deferred acceptance: every unplaced token proposes to its best cluster not
// yet tried, and every cluster keeps its best proposals.
std::vector<Index> deferred_acceptance(const Matrix<double>& scores, Index capacity) {
  Matrix<std::uint8_t> tried(scores.rows, scores.cols);
  std::vector<Index> labels(static_cast<std::size_t>(scores.rows), -1);
  for (bool moved = true; moved;) {
    moved = false;
    for (Index i = 0; i < scores.rows; ++i) {
      if (labels[i] >= 0) continue;
      Index best = -1;
      for (Index c = 0; c < scores.cols; ++c)
        if (!tried(i, c) && (best < 0 || scores(i, c) > scores(i, best))) best = c;
      if (best < 0) continue;
      tried(i, best) = 1;
      labels[i] = best;
      moved = true;
    }
    for (Index c = 0; c < scores.cols; ++c) {
      std::vector<Index> held = members_of(labels, scores.cols)[c];
      std::ranges::stable_sort(held, [&](Index a, Index b) { return scores(a, c) > scores(b, c); });
      for (std::size_t r = capacity; r < held.size(); ++r) labels[held[r]] = -1;
    }
  }
  return labels;
}

TEST(SelectionTest, BalancedWalkIsThePairOrderedMatching) {
  for (std::uint64_t seed = 0; seed < 20; ++seed) {
    const Index tokens = 5 + static_cast<Index>(seed), clusters = 4;
    const Index capacity = (tokens + clusters - 1) / clusters;
    const Matrix<double> scores = random_integers(tokens, clusters, seed, seed % 2 ? 3 : 1000);
    const std::vector<Index> labels = balanced_walk(scores, capacity);
    EXPECT_EQ(labels, deferred_acceptance(scores, capacity));
    for (const std::vector<Index>& members : members_of(labels, clusters))
      EXPECT_LE(static_cast<Index>(members.size()), capacity);
    EXPECT_EQ(std::ranges::count(labels, -1), 0);
  }
}

Case lists_case(const char* spec) {
  return {.name = "",
          .spec = spec,
          .B = 1,
          .H = 2,
          .Hkv = 1,
          .N = 40,
          .S = 40,
          .Dk = 6,
          .Dv = 2,
          .dtype = DType::f64};
}

TEST(SelectionTest, GroupsAreStableRunsOfTheirClusters) {
  const HostTensor labels(DType::i32, {1, 1, 7}), lengths(DType::i32, {1});
  const HostTensor order(DType::i32, {1, 1, 7}), inverse(DType::i32, {1, 1, 7});
  const HostTensor offsets(DType::i32, {1, 1, 5});
  write_values(labels, {2, 0, 2, 3, 0, 2, 99});
  write_values(lengths, {6});
  const Sequences sequences{.lengths = lengths, .cu_seqlens = {}};
  const Groups groups{.order = order, .inverse = inverse, .offsets = offsets};
  ref::group_by_cluster(labels, sequences, groups);
  EXPECT_EQ(indices_of(order), (std::vector<int>{1, 4, 0, 2, 5, 3, -1}));
  EXPECT_EQ(indices_of(inverse), (std::vector<int>{2, 0, 3, 5, 1, 4, -1}));
  EXPECT_EQ(indices_of(offsets), (std::vector<int>{0, 2, 2, 5, 6}));
  EXPECT_THROW(ref::group_by_cluster(labels, {}, groups), Error);
}

TEST(SelectionTest, SelectTopMapsHeadsBothWays) {
  const HostTensor two(DType::f64, {1, 2, 3, 1}), one(DType::f64, {1, 1, 3, 1});
  const HostTensor indices(DType::i32, {1, 2, 3, 2});
  fill(two, [](std::int64_t i) { return i < 3 ? 1.0 : -1.0; });
  fill(one, [](std::int64_t i) { return static_cast<double>(i); });
  select_top<double>(two, one, {}, indices);  // the second head prefers small values
  EXPECT_EQ(indices_of(indices), (std::vector<int>{1, 2, 1, 2, 1, 2, 0, 1, 0, 1, 0, 1}));
  select_top<double>(one, two, {}, indices);
  EXPECT_EQ(indices_of(indices), std::vector<int>({0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1}));
}

TEST(SelectionTest, NearestCentroidAddsItsBias) {
  const HostTensor x(DType::f64, {1, 2, 2, 1}), centroids(DType::f64, {1, 1, 3, 1});
  const HostTensor bias(DType::f64, {1, 1, 3}), labels(DType::i32, {1, 2, 2});
  write_values(x, {1, -1, 0, kNaN});
  write_values(centroids, {0, 1, -1});
  nearest_centroid<double>(x, {}, centroids, {}, labels);
  EXPECT_EQ(indices_of(labels), (std::vector<int>{1, 2, 0, 0}));
  write_values(bias, {3, 0, 0});
  nearest_centroid<double>(x, {}, centroids, bias, labels);
  EXPECT_EQ(indices_of(labels), (std::vector<int>{0, 0, 0, 0}));
}

TEST(SelectionTest, BalancedAssignFillsEvenly) {
  const HostTensor x(DType::f64, {1, 1, 5, 1}), centroids(DType::f64, {1, 1, 2, 1});
  const HostTensor labels(DType::i32, {1, 1, 5});
  write_values(x, {5, 4, 3, 2, 1});
  write_values(centroids, {1, -1});
  balanced_assign<double>(x, {}, centroids, 0,
                          labels);  // three to the first cluster, the rest to the second
  EXPECT_EQ(indices_of(labels), (std::vector<int>{0, 0, 0, 1, 1}));
  balanced_assign<double>(x, {}, centroids, 4, labels);
  EXPECT_EQ(indices_of(labels), (std::vector<int>{0, 0, 0, 0, 1}));
}

TEST(SelectionTest, LshOrdersArePermutationsSortedByBucket) {
  const Selected selected = make_selected(lists_case("lsh(rounds=3,chunk=4,buckets=6)"));
  const std::vector<int> order = indices_of(selected.saved[0]);
  for (int row = 0; row < 2 * 3; ++row) {
    const auto begin = order.begin() + row * 40;
    EXPECT_EQ(std::set<int>(begin, begin + 40).size(), 40u);
    int descents = 0;  // positions ascend inside a bucket
    for (int slot = 1; slot < 40; ++slot) descents += begin[slot] < begin[slot - 1];
    EXPECT_LT(descents, 6);
  }
}

TEST(SelectionTest, SelectionsOfPaddingAreMinusOne) {
  Case c = lists_case("i-clustered(clusters=5,topk=60)");
  c.B = 4;
  c.S = 50;
  c.lengths = Lengths::padded;
  const Selected selected = make_selected(c);
  const std::vector<int> queries = indices_of(selected.problem.inputs.q_sequences.lengths);
  const std::vector<int> keys = indices_of(selected.problem.inputs.k_sequences.lengths);
  const std::vector<int> labels = indices_of(selected.saved[0]);
  const std::vector<int> order = indices_of(selected.saved[1]);
  const std::vector<int> offsets = indices_of(selected.saved[2]);
  const std::vector<int> top = indices_of(selected.saved[3]);
  for (int at = 0; at < 4 * 2; ++at) {  // item and head
    const int item = at / 2;
    for (int i = 0; i < 40; ++i) {
      EXPECT_EQ(labels[at * 40 + i] == -1, i >= queries[item]);
      EXPECT_EQ(order[at * 40 + i] == -1, i >= queries[item]);
    }
    EXPECT_EQ(offsets[at * 6 + 5], queries[item]);
    for (int cluster = 0; cluster < 5; ++cluster) {
      const bool empty = offsets[at * 6 + cluster] == offsets[at * 6 + cluster + 1];
      for (int slot = 0; slot < 50; ++slot)
        EXPECT_EQ(top[(at * 5 + cluster) * 50 + slot], empty || slot >= keys[item] ? -1 : slot);
    }
  }
}

}  // namespace
}  // namespace coterie::ref
