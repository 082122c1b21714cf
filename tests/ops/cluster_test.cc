// SPDX-License-Identifier: MIT

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <set>
#include <tuple>

#include "coterie/runtime.h"
#include "ops/parts.h"
#include "ref/ref.h"
#include "tests/support/definitions.h"
#include "tests/support/tensors.h"

namespace coterie {
namespace {

using test::error_of;
using test::integers;
using test::ints;
using test::nearest_rows;
using test::normals;
using test::packed;
using test::padded;

using Codes = std::vector<std::uint64_t>;

// Random codes around a few centres, with one bit in ten flipped.
HostTensor random_codes(const test::Shape& sizes, int bits, std::uint64_t seed) {
  HostTensor codes(DType::u64, sizes);
  const RandomStream centres{seed, RandomUse::data, 1}, flips{seed, RandomUse::data, 2};
  for (std::int64_t i = 0; i < codes.view().count(); ++i) {
    const auto at = static_cast<std::uint64_t>(i);
    std::uint64_t code = random_u64(centres, random_below(flips, at, 5));
    for (int bit = 0; bit < bits; ++bit) {
      if (random_below(flips, at * 64 + static_cast<std::uint64_t>(bit) + 1000000, 10) == 0) {
        code ^= std::uint64_t{1} << bit;
      }
    }
    codes.data<std::uint64_t>()[i] = code & ((std::uint64_t{1} << bits) - 1);
  }
  return codes;
}

Codes codes_in(const HostTensor& codes) {
  const auto* data = codes.data<std::uint64_t>();
  return {data, data + codes.view().count()};
}

std::vector<double> nearest(const Codes& codes, const Codes& centroids) {
  std::vector<double> labels;
  for (std::uint64_t code : codes) {
    std::size_t best = 0;
    for (std::size_t c = 1; c < centroids.size(); ++c) {
      if (std::popcount(code ^ centroids[c]) < std::popcount(code ^ centroids[best])) best = c;
    }
    labels.push_back(static_cast<double>(best));
  }
  return labels;
}

std::uint64_t majority(const Codes& codes, const std::vector<double>& labels, std::size_t cluster,
                       std::size_t& members) {
  std::uint64_t result = 0;
  for (int bit = 0; bit < 63; ++bit) {
    std::size_t ones = 0;
    members = 0;
    for (std::size_t i = 0; i < codes.size(); ++i) {
      if (labels[i] != static_cast<double>(cluster)) continue;
      ++members;
      ones += (codes[i] >> bit) & 1;
    }
    if (2 * ones > members) result |= std::uint64_t{1} << bit;
  }
  return result;
}

struct Kmeans {
  HostTensor labels, centroids;
};

Kmeans run_kmeans(const HammingKMeansParams& params, const TensorView& codes,
                  const Sequences& sequences, std::int64_t items, std::int64_t clusters) {
  Kmeans result{HostTensor(DType::i32, {codes.size(0), codes.size(1), codes.size(2)}),
                HostTensor(DType::u64, {items, codes.size(1), clusters})};
  hamming_kmeans(params, codes, sequences, result.labels, result.centroids);
  return result;
}

class ClusterTest : public ::testing::TestWithParam<CpuIsa> {
 protected:
  void SetUp() override { force_cpu_isa(GetParam()); }
  void TearDown() override { force_cpu_isa(supported_cpu_isas().back()); }
};

INSTANTIATE_TEST_SUITE_P(Isas, ClusterTest, ::testing::ValuesIn(supported_cpu_isas()),
                         [](const auto& isa) { return cpu_isa_name(isa.param); });

TEST_P(ClusterTest, HammingKMeansStartsFromDistinctTokens) {
  HostTensor codes(DType::u64, {1, 1, 100});
  for (int i = 0; i < 100; ++i) codes.data<std::uint64_t>()[i] = static_cast<std::uint64_t>(i);
  const Kmeans result = run_kmeans({.iterations = 0, .bits = 7, .seed = 4}, codes, {}, 1, 20);
  const Codes start = codes_in(result.centroids);
  EXPECT_EQ(std::set<std::uint64_t>(start.begin(), start.end()).size(), 20u);
  EXPECT_LT(*std::max_element(start.begin(), start.end()), 100u);
  EXPECT_EQ(read_values(result.labels), nearest(codes_in(codes), start));
}

TEST_P(ClusterTest, HammingKMeansTakesMajoritiesAndAssignsOnceMore) {
  const HostTensor codes = random_codes({1, 1, 150}, 40, 3);
  for (std::int64_t iterations : {0, 1, 4}) {
    HammingKMeansParams params{.iterations = iterations, .bits = 40, .seed = 9};
    const Kmeans before = run_kmeans(params, codes, {}, 1, 6);
    ++params.iterations;
    const Kmeans after = run_kmeans(params, codes, {}, 1, 6);
    EXPECT_EQ(read_values(before.labels), nearest(codes_in(codes), codes_in(before.centroids)));
    EXPECT_EQ(read_values(after.labels), nearest(codes_in(codes), codes_in(after.centroids)));
    const Codes updated = codes_in(after.centroids);
    for (std::size_t c = 0; c < 6; ++c) {
      std::size_t members = 0;
      const std::uint64_t expected =
          majority(codes_in(codes), read_values(before.labels), c, members);
      if (members == 0) {
        EXPECT_EQ(updated[c] >> 40, 0u) << "a random code should have no more bits than the others";
      } else {
        EXPECT_EQ(updated[c], expected) << c;
      }
    }
  }
}

TEST_P(ClusterTest, HammingKMeansFollowsTheSpecification) {
  for (std::int64_t clusters : {1, 3, 17, 63, 64, 200}) {
    const HostTensor codes = random_codes({2, 3, 63}, 63, 5);
    const HostTensor lengths = ints({63, 40});
    const HammingKMeansParams params{.iterations = 5, .bits = 63, .seed = 1};
    const Kmeans actual = run_kmeans(params, codes, padded(lengths), 2, clusters);
    HostTensor labels(DType::i32, {2, 3, 63}), centroids(DType::u64, {2, 3, clusters});
    ref::hamming_kmeans(params, codes, padded(lengths), labels, centroids);
    EXPECT_EQ(read_values(actual.labels), read_values(labels)) << clusters;
    EXPECT_EQ(codes_in(actual.centroids), codes_in(centroids)) << clusters;
  }
}

// Few bits give many ties, and many centroids need more than one block of the kernels.
TEST_P(ClusterTest, HammingLabelsAreTheFirstOfTheNearestAmongManyCentroids) {
  for (std::int64_t clusters : {255, 256, 257, 600}) {
    const HostTensor codes = random_codes({1, 1, 1001}, 9, 6);
    const HammingKMeansParams params{.iterations = 0, .bits = 9, .seed = 2};
    const Kmeans result = run_kmeans(params, codes, {}, 1, clusters);
    EXPECT_EQ(read_values(result.labels), nearest(codes_in(codes), codes_in(result.centroids)))
        << clusters;
  }
}

TEST_P(ClusterTest, WithManyClustersEveryTokenIsItsOwn) {
  HostTensor codes(DType::u64, {1, 1, 6});  // all equal
  const Kmeans result = run_kmeans({.iterations = 3, .bits = 8, .seed = 4}, codes, {}, 1, 6);
  EXPECT_EQ(read_values(result.labels), (std::vector<double>{0, 1, 2, 3, 4, 5}));
  const Kmeans more = run_kmeans({.iterations = 3, .bits = 8, .seed = 4}, codes, {}, 1, 9);
  EXPECT_EQ(read_values(more.labels), (std::vector<double>{0, 1, 2, 3, 4, 5}));
}

TEST_P(ClusterTest, HammingLabelsOfPackedItemsAreThoseOfTheItems) {
  const HostTensor codes = random_codes({1, 1, 50}, 20, 6);
  const HostTensor cu_seqlens = ints({0, 30, 30, 48});
  const HammingKMeansParams params{.iterations = 2, .bits = 20, .seed = 3};
  const Kmeans result = run_kmeans(params, codes, packed(cu_seqlens), 3, 4);
  const std::vector<double> labels = read_values(result.labels);
  const Kmeans first = run_kmeans(params, codes.view().narrowed(2, 0, 30), {}, 1, 4);
  EXPECT_EQ(std::vector<double>(labels.begin(), labels.begin() + 30), read_values(first.labels));
  EXPECT_EQ(labels[48], -1);
  EXPECT_EQ(labels[49], -1);
}

TEST_P(ClusterTest, NearestCentroidIsTheFirstOfTheBest) {
  for (DType dtype : {DType::f32, DType::f64, DType::bf16, DType::f16}) {
    for (std::int64_t dim : {1, 8, 13, 64, 129}) {
      for (std::int64_t clusters : {1, 2, 7, 65}) {
        const DType accumulator = accumulator_dtype(dtype);
        const HostTensor x = integers(dtype, {2, 4, 37, dim}, 1);
        const HostTensor centroids = integers(accumulator, {2, 2, clusters, dim}, 2);
        const HostTensor bias = integers(accumulator, {2, 2, clusters}, 3, 9);
        const HostTensor labels(DType::i32, {2, 4, 37}), unbiased(DType::i32, {2, 4, 37});
        nearest_centroid(x, {}, centroids, bias, labels);
        nearest_centroid(x, {}, centroids, {}, unbiased);
        for (std::int64_t b = 0; b < 2; ++b)
          for (std::int64_t h = 0; h < 4; ++h) {
            const auto at = [&](const TensorView& t, std::int64_t head) {
              return read_values(t.narrowed(0, b, 1).narrowed(1, head, 1));
            };
            const auto width = static_cast<std::size_t>(dim);
            ASSERT_EQ(at(labels, h),
                      nearest_rows(at(x, h), at(centroids, h / 2), at(bias, h / 2), width));
            ASSERT_EQ(at(unbiased, h), nearest_rows(at(x, h), at(centroids, h / 2), {}, width));
          }
      }
    }
  }
}

TEST_P(ClusterTest, NearestCentroidOfNaNIsClusterZeroAndOfPaddingNone) {
  HostTensor x = normals(DType::f32, {2, 1, 5, 8}, 1);
  fill(x.view().narrowed(2, 2, 1), [](std::int64_t) { return std::nan(""); });
  const HostTensor centroids = normals(DType::f32, {1, 1, 9, 8}, 2), lengths = ints({5, 3});
  const HostTensor labels(DType::i32, {2, 1, 5});
  nearest_centroid(x, padded(lengths), centroids, {}, labels);
  const std::vector<double> values = read_values(labels);
  EXPECT_EQ(values[2], 0);
  EXPECT_EQ(values[7], 0);
  EXPECT_EQ(values[8], -1);
  EXPECT_EQ(values[9], -1);
}

// The centroids differ only by rounding, so a label depends on the order of summation.
TEST_P(ClusterTest, LabelsDependOnTheRowAndTheCentroidsOnly) {
  const std::int64_t dim = 96, clusters = 40, rows = 131;
  HostTensor x = normals(DType::f32, {1, 1, rows, dim}, 1);
  HostTensor centroids(DType::f32, {1, 1, clusters, dim});
  const std::vector<double> base = read_values(normals(DType::f32, {dim}, 2));
  const HostTensor noise = normals(DType::f32, {clusters, dim}, 3);
  const std::vector<double> moves = read_values(noise);
  fill(centroids, [&](std::int64_t i) { return base[i % dim] * (1 + 1e-7 * moves[i]); });
  const HostTensor labels(DType::i32, {1, 1, rows});
  nearest_centroid(x, {}, centroids, {}, labels);
  const std::vector<double> together = read_values(labels);
  EXPECT_GT(std::set<double>(together.begin(), together.end()).size(), 5u);
  for (std::int64_t begin : {0, 1, 17, 64, 130}) {
    const std::int64_t count = std::min<std::int64_t>(rows - begin, 19);
    const HostTensor some(DType::i32, {1, 1, count});
    nearest_centroid(x.view().narrowed(2, begin, count), {}, centroids, {}, some);
    EXPECT_EQ(read_values(some),
              std::vector<double>(together.begin() + begin, together.begin() + begin + count));
  }
  // The first centroids keep their scores when more centroids follow.
  const HostTensor fewer(DType::i32, {1, 1, rows});
  nearest_centroid(x, {}, centroids.view().narrowed(2, 0, 23), {}, fewer);
  for (std::size_t i = 0; i < together.size(); ++i) {
    if (together[i] >= 23) continue;
    EXPECT_EQ(read_values(fewer)[i], together[i]);
  }
}

TEST(NearestCentroidTest, IsTheSameOnEveryInstructionSet) {
  const HostTensor x = normals(DType::f32, {2, 2, 200, 64}, 1);
  const HostTensor centroids = normals(DType::f32, {2, 2, 50, 64}, 2);
  const HostTensor expected(DType::i32, {2, 2, 200});
  ref::nearest_centroid<double>(x, {}, centroids, {}, expected);
  for (CpuIsa isa : supported_cpu_isas()) {
    force_cpu_isa(isa);
    const HostTensor labels(DType::i32, {2, 2, 200});
    nearest_centroid(x, {}, centroids, {}, labels);
    EXPECT_EQ(read_values(labels), read_values(expected)) << cpu_isa_name(isa);
  }
}

// Goes through all pairs by descending score, as described in the header.
std::vector<double> greedy(const std::vector<double>& x, const std::vector<double>& centroids,
                           std::size_t dim, std::size_t capacity) {
  const std::size_t tokens = x.size() / dim, clusters = centroids.size() / dim;
  std::vector<std::tuple<double, std::size_t, std::size_t>> pairs;
  for (std::size_t i = 0; i < tokens; ++i)
    for (std::size_t c = 0; c < clusters; ++c) {
      double score = 0;
      for (std::size_t d = 0; d < dim; ++d) score += x[i * dim + d] * centroids[c * dim + d];
      pairs.emplace_back(-score, i, c);
    }
  std::sort(pairs.begin(), pairs.end());
  std::vector<double> labels(tokens, -1.0);
  std::vector<std::size_t> used(clusters);
  for (const auto& [score, i, c] : pairs) {
    if (labels[i] >= 0 || used[c] == capacity) continue;
    labels[i] = static_cast<double>(c);
    ++used[c];
  }
  return labels;
}

TEST_P(ClusterTest, BalancedAssignmentIsTheGreedyWalk) {
  for (DType dtype : {DType::f32, DType::f64, DType::bf16}) {
    for (std::int64_t clusters : {1, 2, 7, 40, 90}) {
      const std::int64_t rows = 83, dim = 8;
      for (bool tied : {true, false}) {
        const HostTensor x = tied ? integers(dtype, {2, 2, rows, dim}, 4, 1)
                                  : integers(dtype, {2, 2, rows, dim}, 4, 60);
        const HostTensor centroids = integers(accumulator_dtype(dtype), {1, 1, clusters, dim}, 5);
        const HostTensor labels(DType::i32, {2, 2, rows});
        balanced_assign(x, {}, centroids, 0, labels);
        const auto capacity = static_cast<std::size_t>((rows + clusters - 1) / clusters);
        for (std::int64_t b = 0; b < 2; ++b)
          for (std::int64_t h = 0; h < 2; ++h) {
            const auto at = [&](const TensorView& t) {
              return read_values(t.narrowed(0, b, 1).narrowed(1, h, 1));
            };
            ASSERT_EQ(at(labels), greedy(at(x), read_values(centroids), dim, capacity))
                << dtype_name(dtype) << " " << clusters << (tied ? " tied" : "");
          }
      }
    }
  }
}

TEST_P(ClusterTest, BalancedAssignmentTakesACapacityAndSkipsPadding) {
  HostTensor x = integers(DType::f32, {2, 1, 20, 8}, 6);
  const HostTensor centroids = integers(DType::f32, {1, 1, 4, 8}, 7), lengths = ints({20, 9});
  fill(x.view().narrowed(0, 1, 1).narrowed(2, 9, 11), [](std::int64_t) { return std::nan(""); });
  const HostTensor labels(DType::i32, {2, 1, 20});
  balanced_assign(x, padded(lengths), centroids, 6, labels);
  const std::vector<double> values = read_values(labels);
  EXPECT_EQ(std::vector<double>(values.begin(), values.begin() + 20),
            greedy(read_values(x.view().narrowed(0, 0, 1)), read_values(centroids), 8, 6));
  EXPECT_EQ(std::vector<double>(values.begin() + 20, values.begin() + 29),
            greedy(read_values(x.view().narrowed(0, 1, 1).narrowed(2, 0, 9)),
                   read_values(centroids), 8, 6));
  EXPECT_EQ(std::vector<double>(values.begin() + 29, values.end()), std::vector<double>(11, -1.0));
  balanced_assign(x, padded(lengths), centroids, 0, labels);  // ceil(9 / 4) for the second item
  EXPECT_EQ(read_values(labels.view().narrowed(0, 1, 1).narrowed(2, 0, 9)),
            greedy(read_values(x.view().narrowed(0, 1, 1).narrowed(2, 0, 9)),
                   read_values(centroids), 8, 3));
}

TEST(BalancedAssignTest, ACapacityThatIsTooSmallIsRefused) {
  const HostTensor x(DType::f32, {1, 1, 20, 8}), centroids(DType::f32, {1, 1, 4, 8});
  const HostTensor labels(DType::i32, {1, 1, 20});
  const std::string message = error_of([&] { balanced_assign(x, {}, centroids, 4, labels); });
  EXPECT_TRUE(message.starts_with("[balanced_assign] ")) << message;
}

// Labels of the queries by the three clusterings, as the mechanism uses them.
TEST_P(ClusterTest, ClusterQueriesIsTheSelectionOfClusteredAttention) {
  for (Clustering method : {Clustering::keys, Clustering::hamming_keys, Clustering::hamming}) {
    const HostTensor q = normals(DType::f32, {2, 2, 60, 16}, 1);
    const HostTensor k = normals(DType::f32, {2, 1, 70, 16}, 2), lengths = ints({60, 33});
    AttentionInputs inputs;
    inputs.q = q;
    inputs.k = inputs.v = k;
    inputs.q_sequences = padded(lengths);
    inputs.seed = 77;
    ClusteringParams params;
    params.clusters = 7;
    params.method = method;
    const std::int64_t bytes = cluster_queries_workspace_bytes(params, inputs);
    const HostTensor memory(DType::u8, {bytes}), labels(DType::i32, {2, 2, 60});
    cluster_queries(params, inputs, labels, {.data = memory.view().data, .bytes = bytes});

    const Mechanism mechanism = ClusteredParams{params};
    std::vector<HostTensor> saved;
    std::vector<TensorView> views;
    for (const TensorLayout& layout : attention_saved(mechanism, inputs).tensors) {
      saved.emplace_back(layout);
      views.push_back(saved.back());
    }
    const std::int64_t more = attention_workspace_bytes(mechanism, inputs);
    const HostTensor workspace(DType::u8, {more});
    attention_select(mechanism, inputs, views, {.data = workspace.view().data, .bytes = more});
    EXPECT_EQ(read_values(labels), read_values(views[0]));
  }
}

TEST(ClusterRefusalTest, ShapesAndTypesMustFit) {
  const HostTensor x(DType::bf16, {2, 4, 9, 8}), labels(DType::i32, {2, 4, 9});
  const HostTensor half(DType::bf16, {1, 4, 3, 8}), narrow(DType::f32, {1, 4, 3, 7});
  const HostTensor heads(DType::f32, {1, 3, 3, 8}), items(DType::f32, {3, 4, 3, 8});
  const HostTensor good(DType::f32, {1, 4, 3, 8}), few(DType::i32, {2, 4, 8});
  const HostTensor wide(DType::i64, {2, 4, 9}), bias(DType::f32, {1, 4, 2});
  const auto refused = [&](const char* op, const auto& call) {
    const std::string message = error_of(call);
    EXPECT_TRUE(message.starts_with(std::string("[") + op + "] ")) << message;
  };
  for (const HostTensor* centroids : {&half, &narrow, &heads, &items}) {
    refused("nearest_centroid", [&] { nearest_centroid(x, {}, *centroids, {}, labels); });
    refused("balanced_assign", [&] { balanced_assign(x, {}, *centroids, 0, labels); });
  }
  refused("nearest_centroid", [&] { nearest_centroid(x, {}, good, bias, labels); });
  refused("nearest_centroid", [&] { nearest_centroid(x, {}, good, {}, few); });
  refused("nearest_centroid", [&] { nearest_centroid(x, {}, good, {}, wide); });

  const HostTensor codes(DType::u64, {2, 4, 9}), centroids(DType::u64, {2, 4, 3});
  const HostTensor bad_codes(DType::i64, {2, 4, 9}), bad_centroids(DType::u64, {1, 4, 3});
  const HammingKMeansParams params{.iterations = 2, .bits = 10, .seed = 1};
  refused("hamming_kmeans", [&] { hamming_kmeans(params, bad_codes, {}, labels, centroids); });
  refused("hamming_kmeans", [&] { hamming_kmeans(params, codes, {}, few, centroids); });
  refused("hamming_kmeans", [&] { hamming_kmeans(params, codes, {}, labels, bad_centroids); });
  refused("hamming_kmeans", [&] {
    hamming_kmeans({.iterations = -2, .bits = 10, .seed = 1}, codes, {}, labels, centroids);
  });
  refused("hamming_kmeans", [&] {
    hamming_kmeans({.iterations = 1, .bits = 64, .seed = 1}, codes, {}, labels, centroids);
  });
}

}  // namespace
}  // namespace coterie
