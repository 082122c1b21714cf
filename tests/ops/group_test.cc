// SPDX-License-Identifier: MIT

#include <gtest/gtest.h>

#include <algorithm>

#include "ops/parts.h"
#include "ref/ref.h"
#include "tests/support/tensors.h"

namespace coterie {
namespace {

using test::error_of;
using test::ints;
using test::labels_below;

struct Grouping {
  HostTensor order, inverse, offsets;
  Groups groups;

  Grouping(std::int64_t batches, std::int64_t heads, std::int64_t rows, std::int64_t items,
           std::int64_t clusters)
      : order(DType::i32, {batches, heads, rows}),
        inverse(DType::i32, {batches, heads, rows}),
        offsets(DType::i32, {items, heads, clusters + 1}) {
    for (const HostTensor* tensor : {&order, &inverse, &offsets}) {
      fill(*tensor, [](std::int64_t) { return 0x7F7F7F7F; });
    }
    groups = {.order = order, .inverse = inverse, .offsets = offsets};
  }
};

TEST(GroupTest, ClustersAreRunsInPositionOrder) {
  const HostTensor labels = test::tensor_of(DType::i32, {1, 1, 7}, {2, 0, 2, 4, 0, 2, 0});
  const Grouping g(1, 1, 7, 1, 5);
  group_by_cluster(labels, {}, g.groups);
  EXPECT_EQ(read_values(g.order), (std::vector<double>{1, 4, 6, 0, 2, 5, 3}));
  EXPECT_EQ(read_values(g.inverse), (std::vector<double>{3, 0, 4, 6, 1, 5, 2}));
  EXPECT_EQ(read_values(g.offsets), (std::vector<double>{0, 3, 3, 6, 6, 7}));
}

TEST(GroupTest, PaddingIsInNoCluster) {
  const HostTensor labels = test::tensor_of(DType::i32, {2, 1, 4}, {1, 0, -1, 99, 7, 7, 7, 7});
  const HostTensor lengths = ints({2, 0});
  const Grouping g(2, 1, 4, 2, 2);
  group_by_cluster(labels, test::padded(lengths), g.groups);
  EXPECT_EQ(read_values(g.order), (std::vector<double>{1, 0, -1, -1, -1, -1, -1, -1}));
  EXPECT_EQ(read_values(g.inverse), (std::vector<double>{1, 0, -1, -1, -1, -1, -1, -1}));
  EXPECT_EQ(read_values(g.offsets), (std::vector<double>{0, 1, 2, 0, 0, 0}));
}

TEST(GroupTest, PackedItemsAreGroupedApartAndCountedFromTheirStart) {
  const HostTensor labels = test::tensor_of(DType::i32, {1, 1, 6}, {1, 0, 1, 1, 0, 3});
  const HostTensor cu_seqlens = ints({0, 2, 2, 5});
  const Grouping g(1, 1, 6, 3, 2);
  group_by_cluster(labels, test::packed(cu_seqlens), g.groups);
  EXPECT_EQ(read_values(g.order), (std::vector<double>{1, 0, 2, 0, 1, -1}));
  EXPECT_EQ(read_values(g.inverse), (std::vector<double>{1, 0, 1, 2, 0, -1}));
  EXPECT_EQ(read_values(g.offsets), (std::vector<double>{0, 1, 2, 0, 0, 0, 0, 1, 3}));
}

TEST(GroupTest, InverseMayBeAbsent) {
  const HostTensor labels = labels_below(9, {2, 3, 50}, 1);
  const Grouping with(2, 3, 50, 2, 9), without(2, 3, 50, 2, 9);
  group_by_cluster(labels, {}, with.groups);
  Groups groups = without.groups;
  groups.inverse = {};
  group_by_cluster(labels, {}, groups);
  EXPECT_EQ(read_values(with.order), read_values(without.order));
  EXPECT_EQ(read_values(with.offsets), read_values(without.offsets));
}

TEST(GroupTest, IsAStableSort) {
  for (std::int64_t clusters : {1, 2, 17, 300}) {
    const HostTensor labels = labels_below(clusters, {2, 2, 200}, 2);
    const HostTensor lengths = ints({200, 131});
    const Grouping g(2, 2, 200, 2, clusters), expected(2, 2, 200, 2, clusters);
    group_by_cluster(labels, test::padded(lengths), g.groups);
    ref::group_by_cluster(labels, test::padded(lengths), expected.groups);
    EXPECT_EQ(read_values(g.order), read_values(expected.order));
    EXPECT_EQ(read_values(g.inverse), read_values(expected.inverse));
    EXPECT_EQ(read_values(g.offsets), read_values(expected.offsets));
    const std::vector<double> label =
        read_values(labels.view().narrowed(0, 0, 1).narrowed(1, 0, 1));
    std::vector<double> sorted(200);
    for (int i = 0; i < 200; ++i) sorted[i] = i;
    std::stable_sort(sorted.begin(), sorted.end(), [&](double a, double b) {
      return label[static_cast<int>(a)] < label[static_cast<int>(b)];
    });
    EXPECT_EQ(read_values(g.order.view().narrowed(0, 0, 1).narrowed(1, 0, 1)), sorted);
  }
}

TEST(GroupTest, ALabelOutOfRangeIsRefused) {
  for (double bad : {-1.0, 3.0, 1e9}) {
    const HostTensor labels = test::tensor_of(DType::i32, {1, 1, 3}, {0, bad, 2});
    const Grouping g(1, 1, 3, 1, 3);
    const std::string message = error_of([&] { group_by_cluster(labels, {}, g.groups); });
    EXPECT_TRUE(message.starts_with("[group_by_cluster] ")) << message;
    EXPECT_NE(message.find(std::to_string(static_cast<int>(bad))), std::string::npos) << message;
  }
}

TEST(GroupTest, ShapesMustFit) {
  const HostTensor labels = labels_below(3, {1, 2, 8}, 1);
  const Grouping g(1, 2, 8, 1, 3), heads(1, 1, 8, 1, 3), rows(1, 2, 7, 1, 3), items(1, 2, 8, 2, 3);
  for (const Groups& groups :
       {Groups{heads.order, g.inverse, g.offsets}, Groups{g.order, rows.inverse, g.offsets},
        Groups{g.order, g.inverse, items.offsets}, Groups{{}, g.inverse, g.offsets}}) {
    const std::string message = error_of([&] { group_by_cluster(labels, {}, groups); });
    EXPECT_TRUE(message.starts_with("[group_by_cluster] ")) << message;
  }
  const HostTensor wide(DType::i64, {1, 2, 8});
  EXPECT_TRUE(
      error_of([&] { group_by_cluster(wide, {}, g.groups); }).starts_with("[group_by_cluster] "));
}

}  // namespace
}  // namespace coterie
