// SPDX-License-Identifier: MIT
// Hash codes and clusterings of queries.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <limits>

#include "coterie/random.h"
#include "ref/selection.h"
#include "tests/ref/support.h"

namespace coterie::ref {
namespace {

using cases::Case;
using cases::Lengths;

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

TEST(ClusterTest, HammingClustersAreNearestAndRepeatable) {
  const RandomStream stream{5, RandomUse::data, 0};
  std::vector<std::uint64_t> codes;
  for (std::uint64_t i = 0; i < 40; ++i) codes.push_back(random_u64(stream, i) & 0xfff);
  const HammingProblem params{.clusters = 7, .iterations = 4, .bits = 12, .seed = 3, .problem = 2};
  const HammingClusters found = hamming_clusters(params, codes);
  EXPECT_EQ(found.labels, hamming_clusters(params, codes).labels);
  for (std::size_t i = 0; i < codes.size(); ++i)
    for (std::size_t c = 0; c < found.centroids.size(); ++c) {
      const int own = std::popcount(codes[i] ^ found.centroids[found.labels[i]]);
      const int other = std::popcount(codes[i] ^ found.centroids[c]);
      EXPECT_TRUE(own < other || (own == other && found.labels[i] <= static_cast<Index>(c)));
    }
  for (std::uint64_t centroid : found.centroids) EXPECT_LT(centroid, 1u << 12);
}

// One cluster: each bit of its code is the majority of all codes; a tie gives 0.
TEST(ClusterTest, HammingMajorityTiesGiveZero) {
  const HammingProblem params{.clusters = 1, .iterations = 1, .bits = 4};
  EXPECT_EQ(hamming_clusters(params, {0b1100, 0b1010}).centroids[0], 0b1000u);
  EXPECT_EQ(hamming_clusters(params, {0b1100, 0b1010, 0b0010}).centroids[0], 0b1010u);
}

// Equal codes leave clusters empty; these get new codes below 2^bits and attract no token.
TEST(ClusterTest, EmptyHammingClustersAreReseeded) {
  const HammingProblem params{.clusters = 3, .iterations = 2, .bits = 10, .seed = 9, .problem = 4};
  const HammingClusters found = hamming_clusters(params, std::vector<std::uint64_t>(6, 5));
  EXPECT_EQ(found.labels, std::vector<Index>(6, 0));
  const RandomStream reseed{9, RandomUse::empty_cluster, 4};
  EXPECT_EQ(found.centroids[1], random_u64(reseed, 1 * 3 + 1) & 1023);
}

TEST(ClusterTest, FewTokensAreTheirOwnClusters) {
  const HammingProblem params{.clusters = 4, .iterations = 2, .bits = 10};
  const HammingClusters found = hamming_clusters(params, {7, 7, 7, 7});
  EXPECT_EQ(found.labels, (std::vector<Index>{0, 1, 2, 3}));
}

Case clustering_case(const char* clustering) {
  return {.name = "",
          .spec = std::string("clustered(clusters=5,clustering=") + clustering + ")",
          .B = 2,
          .H = 2,
          .Hkv = 1,
          .N = 40,
          .S = 50,
          .Dk = 6,
          .Dv = 2,
          .dtype = DType::f64,
          .data = cases::Data::mixture};
}

// A vector added to all keys does not change attention, nor the key-aware clusterings.
TEST(ClusterTest, KeyAwareLabelsIgnoreAShiftOfTheKeys) {
  for (const char* clustering : {"keys", "hamming-keys"}) {
    Selected selected = make_selected(clustering_case(clustering));
    const std::vector<int> before = indices_of(selected.saved[0]);
    std::vector<double> keys = read_values(selected.problem.inputs.k);
    for (std::size_t i = 0; i < keys.size(); ++i) keys[i] += 0.5 * static_cast<double>(i % 6);
    write_values(selected.problem.inputs.k, keys);
    select_again(selected);
    EXPECT_EQ(before, indices_of(selected.saved[0])) << clustering;
    EXPECT_GT(*std::ranges::max_element(before), 1) << clustering;
  }
}

// Keys are 0 beyond the first three dimensions: differences of queries there have no effect.
TEST(ClusterTest, KeyAwareLabelsIgnoreWhatKeysCannotSee) {
  for (const char* clustering : {"keys", "hamming-keys"}) {
    Selected selected = make_selected(clustering_case(clustering));
    const AttentionInputs& inputs = selected.problem.inputs;
    fill(inputs.k.narrowed(3, 3, 3), [](std::int64_t) { return 0.25; });
    select_again(selected);
    const std::vector<int> before = indices_of(selected.saved[0]);
    fill(inputs.q.narrowed(3, 3, 3), [](std::int64_t i) { return std::cos(double(i)) * 100; });
    select_again(selected);
    EXPECT_EQ(before, indices_of(selected.saved[0])) << clustering;
  }
}

TEST(ClusterTest, ClusterQueriesGivesTheLabelsOfTheMechanism) {
  for (const char* clustering : {"keys", "hamming-keys", "hamming"}) {
    const Selected selected = make_selected(clustering_case(clustering));
    const auto& params = std::get<ClusteredParams>(selected.problem.mechanism);
    const HostTensor labels(DType::i32, {2, 2, 40});
    cluster_queries<double>(params.clustering, selected.problem.inputs, labels);
    EXPECT_EQ(indices_of(labels), indices_of(selected.saved[0]));
  }
}

// The published clustering, composed of the public operations.
TEST(ClusterTest, HashCodesAndKMeansComposeToTheHammingClustering) {
  Case c = clustering_case("hamming");
  c.B = 4;
  c.lengths = Lengths::padded;
  const Selected selected = make_selected(c);
  const AttentionInputs& inputs = selected.problem.inputs;
  const HostTensor planes(DType::f32, {1, 1, 63, 6}), thresholds(DType::f32, {1, 1, 63});
  const HostTensor codes(DType::u64, {4, 2, 40}), labels(DType::i32, {4, 2, 40});
  const HostTensor centroids(DType::u64, {4, 2, 5});
  isotropic_planes<double>(inputs.seed, true, planes, thresholds);
  hash_codes<double>(inputs.q, inputs.q_sequences, planes, thresholds, codes);
  ref::hamming_kmeans({.iterations = 10, .bits = 63, .seed = inputs.seed}, codes,
                      inputs.q_sequences, labels, centroids);
  EXPECT_EQ(indices_of(labels), indices_of(selected.saved[0]));
}

TEST(ClusterTest, KeyDifferencePlanesComposeToTheHammingKeysClustering) {
  Case c = clustering_case("hamming-keys");
  const Selected selected = make_selected(c);
  const AttentionInputs& inputs = selected.problem.inputs;
  const HostTensor planes(DType::f64, {2, 1, 63, 6}), thresholds(DType::f64, {2, 2, 63});
  const HostTensor codes(DType::u64, {2, 2, 40}), labels(DType::i32, {2, 2, 40});
  const HostTensor centroids(DType::u64, {2, 2, 5});
  key_difference_planes<double>(inputs, planes, thresholds);
  hash_codes<double>(inputs.q, {}, planes, thresholds, codes);
  ref::hamming_kmeans({.iterations = 3, .bits = 63, .seed = inputs.seed}, codes, {}, labels,
                      centroids);
  EXPECT_EQ(indices_of(labels), indices_of(selected.saved[0]));
}

TEST(ClusterTest, NanRowsHashToZero) {
  HostTensor x(DType::f64, {1, 1, 2, 3}), planes(DType::f32, {1, 1, 2, 3});
  HostTensor thresholds(DType::f32, {1, 1, 2});
  const HostTensor codes(DType::u64, {1, 1, 2});
  fill(x, [](std::int64_t i) { return i == 1 ? kNaN : 1.0; });
  fill(planes, [](std::int64_t i) { return i < 3 ? 1.0 : 2.0; });
  fill(thresholds, [](std::int64_t r) { return r == 0 ? 3.0 : 5.0; });
  hash_codes<double>(x, {}, planes, thresholds, codes);
  EXPECT_EQ(codes.data<std::uint64_t>()[0], 0u);
  EXPECT_EQ(codes.data<std::uint64_t>()[1], 2u);  // 3 > 3 is false, 6 > 5 is true
}

}  // namespace
}  // namespace coterie::ref
