// SPDX-License-Identifier: MIT
// Guarantees specific to routing, on the GPU: in strict forms later tokens change no bit of earlier
// rows, a token gets the same clusters alone as in a sequence, and selections of long sequences,
// which use other kernels than short ones, give the best tokens too.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <map>

#include "coterie/attention.h"
#include "coterie/random.h"
#include "coterie/runtime.h"
#include "coterie/spec.h"
#include "tests/gpu/device_tensor.h"

namespace coterie {
namespace {

using gpu_test::DeviceMemory;
using gpu_test::DeviceTensor;

constexpr std::int64_t kHeads = 2, kKeyHeads = 1, kTokens = 700, kDim = 64;

// Rows (1, heads, kTokens, kDim) in bf16; rows from `later` on come from another stream.
HostTensor random_rows(std::int64_t heads, std::uint32_t number, std::int64_t later) {
  HostTensor rows(DType::bf16, {1, heads, kTokens, kDim});
  const RandomStream stream{7, RandomUse::data, number}, other{8, RandomUse::data, number};
  fill(rows, [&](std::int64_t i) {
    const bool moved = i / kDim % kTokens >= later;
    const double unit =
        random_unit((moved ? other : stream).at(static_cast<std::uint64_t>(i)).word[0]);
    return (moved ? 20.0 : 2.0) * (unit - 0.5);
  });
  return rows;
}

// The forward pass over tokens [first, first + count).
struct ForwardRun {
  std::vector<std::string> names;
  std::vector<HostTensor> saved;
  HostTensor out;

  ForwardRun(const char* spec, std::int64_t later, std::int64_t first, std::int64_t count) {
    const Mechanism mechanism = AttentionSpec::parse(spec).groups[0].mechanism;
    HostTensor centroids(DType::f32,
                         {kKeyHeads, std::get<RoutingParams>(mechanism).clusters, kDim});
    const RandomStream stream{9, RandomUse::data, 0};
    fill(centroids, [&](std::int64_t i) {
      return random_unit(stream.at(static_cast<std::uint64_t>(i)).word[0]) - 0.5;
    });
    const DeviceTensor q(random_rows(kHeads, 1, later).view().narrowed(2, first, count));
    const DeviceTensor k(random_rows(kKeyHeads, 2, later).view().narrowed(2, first, count));
    const DeviceTensor v(random_rows(kKeyHeads, 3, later).view().narrowed(2, first, count));
    const DeviceTensor device_centroids(centroids.view());
    AttentionInputs inputs;
    inputs.q = q.view();
    if (!keys_are_queries(mechanism)) inputs.k = k.view();
    inputs.v = v.view();
    inputs.centroids = device_centroids.view();
    inputs.scale = 0.1;
    inputs.causal = true;
    AttentionResult result;
    std::vector<DeviceTensor> memory;
    for (const TensorLayout& layout : attention_saved(mechanism, inputs).tensors) {
      names.push_back(layout.name);
      memory.emplace_back(layout);
      result.saved.push_back(memory.back().view());
    }
    const DeviceTensor device_out(TensorLayout{"out", DType::bf16, {1, kHeads, count, kDim}});
    result.out = device_out.view();
    const DeviceMemory workspace(attention_workspace_bytes(mechanism, inputs));
    attention_forward(mechanism, inputs, result, {workspace.data(), workspace.bytes(), nullptr});
    for (const DeviceTensor& tensor : memory) saved.push_back(tensor.download());
    out = device_out.download();
  }

  const HostTensor& get(const std::string& name) const {
    for (std::size_t i = 0; i < names.size(); ++i)
      if (names[i] == name) return saved[i];
    throw std::out_of_range(name);
  }
};

const char* const kStrictForms[] = {
    "routing(clusters=5,window=64,share_qk=true)",
    "routing(clusters=5,window=64,share_qk=true,self=keep)",
    "routing(clusters=7,window=48)",
    "routing(clusters=6,window=48,include_self=true,self=demote)",
    "routing(clusters=9,window=32,queries_in=3)",
};

TEST(RoutingGpuTest, LaterTokensChangeNoBitOfEarlierRows) {
  if (!cuda_available()) GTEST_SKIP() << "no GPU";
  for (const char* spec : kStrictForms)
    for (const std::int64_t later : {std::int64_t{1}, std::int64_t{333}, kTokens - 1}) {
      const ForwardRun plain(spec, kTokens, 0, kTokens), moved(spec, later, 0, kTokens);
      for (std::int64_t head = 0; head < kHeads; ++head) {
        const auto row_bytes = static_cast<std::size_t>(kDim) * 2;
        const std::size_t first = static_cast<std::size_t>(head * kTokens) * row_bytes;
        EXPECT_EQ(std::memcmp(plain.out.data<char>() + first, moved.out.data<char>() + first,
                              static_cast<std::size_t>(later) * row_bytes),
                  0)
            << spec << ", tokens from " << later;
        const float* lse = plain.get("lse").data<float>() + head * kTokens;
        EXPECT_EQ(std::memcmp(lse, moved.get("lse").data<float>() + head * kTokens,
                              static_cast<std::size_t>(later) * sizeof(float)),
                  0)
            << spec << ", tokens from " << later;
      }
      // Otherwise the test would be vacuous.
      EXPECT_NE(std::memcmp(plain.out.data<char>(), moved.out.data<char>(),
                            static_cast<std::size_t>(kTokens * kDim) * 2),
                0);
    }
}

TEST(RoutingGpuTest, ATokenAloneGetsTheClustersItHasInTheSequence) {
  if (!cuda_available()) GTEST_SKIP() << "no GPU";
  const char* spec = "routing(clusters=300,window=8)";
  const ForwardRun all(spec, kTokens, 0, kTokens);
  for (std::int64_t token = 0; token < kTokens; token += 13) {
    const ForwardRun one(spec, kTokens, token, 1);
    for (std::int64_t head = 0; head < kHeads; ++head)
      EXPECT_EQ(one.get("q_labels").data<std::int32_t>()[head],
                all.get("q_labels").data<std::int32_t>()[head * kTokens + token]);
    EXPECT_EQ(one.get("k_labels").data<std::int32_t>()[0],
              all.get("k_labels").data<std::int32_t>()[token]);
  }
}

// Scores of all rows of one head for one centroid, by the definition, in double.
std::vector<double> scores_of(const std::vector<double>& rows, std::size_t dim,
                              const double* centroid) {
  std::vector<double> scores;
  const auto count = static_cast<double>(dim);
  for (std::size_t first = 0; first < rows.size(); first += dim) {
    double mean = 0, variance = 0, product = 0;
    for (std::size_t d = 0; d < dim; ++d) mean += rows[first + d] / count;
    for (std::size_t d = 0; d < dim; ++d) variance += std::pow(rows[first + d] - mean, 2) / count;
    for (std::size_t d = 0; d < dim; ++d) product += (rows[first + d] - mean) * centroid[d];
    scores.push_back(product / std::sqrt(variance + 1e-6));
  }
  return scores;
}

constexpr std::int64_t kLong = 8192;

// An element of row r; `draw` is uniform in [0, 1).
using RowElement = double (*)(std::int64_t r, std::int64_t d, double draw);
double any_row(std::int64_t, std::int64_t, double draw) { return 4 * draw - 1.5; }
// A few distinct rows, often repeated: the last member shares its score with many tokens.
double repeated_row(std::int64_t r, std::int64_t d, double) {
  const RandomStream stream{6, RandomUse::data, static_cast<std::uint32_t>(r * 7919 % 13)};
  return 4 * random_unit(stream.at(static_cast<std::uint64_t>(d)).word[0]) - 1.5;
}
double equal_row(std::int64_t, std::int64_t d, double) { return static_cast<double>(d % 7); }
// Neighbours are alike, and a third of the rows are nearly the same.
double skewed_row(std::int64_t r, std::int64_t d, double draw) {
  const std::int64_t kind = r % 3 == 0 ? 0 : 1 + r / 500;
  const RandomStream stream{6, RandomUse::data, static_cast<std::uint32_t>(kind)};
  return 4 * random_unit(stream.at(static_cast<std::uint64_t>(d)).word[0]) - 1.5 +
         (kind == 0 ? 0.001 : 0.3) * draw;
}
// Means far from 0.
double shifted_row(std::int64_t r, std::int64_t, double draw) {
  return 2 * draw + static_cast<double>(r % 40) - 20;
}

// The first tensor that a selection writes, which must be called `name`.
HostTensor first_selected(const char* spec, const char* name, AttentionInputs inputs, bool causal) {
  inputs.causal = causal;
  const Mechanism mechanism = AttentionSpec::parse(spec).groups[0].mechanism;
  const SavedLayout layout = attention_saved(mechanism, inputs);
  EXPECT_EQ(layout.tensors[0].name, name);
  std::vector<DeviceTensor> memory;
  std::vector<TensorView> saved;
  for (const TensorLayout& tensor : layout.tensors) {
    memory.emplace_back(tensor);
    saved.push_back(memory.back().view());
  }
  const DeviceMemory workspace(attention_workspace_bytes(mechanism, inputs));
  attention_select(mechanism, inputs, saved, {workspace.data(), workspace.bytes(), nullptr});
  return memory[0].download();
}

struct SelectionCase {
  RowElement element;
  std::int64_t clusters = 40, width = 96, dim = 64;
  std::int64_t shift = 0;  // offset of the rows from an aligned address, in elements
};

class LongSelectionTest : public testing::TestWithParam<SelectionCase> {};

TEST_P(LongSelectionTest, TakesTheBestTokensAndOfEqualOnesTheFirst) {
  if (!cuda_available()) GTEST_SKIP() << "no GPU";
  const auto [element, clusters, width, dim, shift] = GetParam();
  // Rounding of fp32 sums of products, for elements up to 21 and scores below 100.
  const double rounding = static_cast<double>(dim) * 400 * 0x1p-24;
  const std::int32_t lengths[] = {kLong, 700};
  HostTensor memory(DType::bf16, {2 * kLong * dim + shift});
  const auto rows_in = [&](const TensorView& whole) {
    return TensorView::contiguous(static_cast<char*>(whole.data) + 2 * shift, DType::bf16,
                                  {2, 1, kLong, dim}, whole.device);
  };
  const TensorView x = rows_in(memory.view());
  HostTensor centroids(DType::f32, {1, clusters, dim});
  HostTensor host_lengths(DType::i32, {2});
  const RandomStream stream{5, RandomUse::data, 0};
  fill(x, [&](std::int64_t i) {
    return element(i / dim % kLong, i % dim,
                   random_unit(stream.at(static_cast<std::uint64_t>(i)).word[0]));
  });
  fill(centroids, [&](std::int64_t i) {
    return 2 * random_unit(stream.at(static_cast<std::uint64_t>(i)).word[1]) - 1;
  });
  fill(host_lengths, [&](std::int64_t i) { return lengths[i]; });
  const DeviceTensor q(memory.view()), device_centroids(centroids.view()),
      device_lengths(host_lengths.view());
  AttentionInputs inputs;
  inputs.q = inputs.v = rows_in(q.view());
  inputs.centroids = device_centroids.view();
  inputs.q_sequences.lengths = inputs.k_sequences.lengths = device_lengths.view();
  const std::string spec = "routing(clusters=" + std::to_string(clusters) +
                           ",window=" + std::to_string(width) + ",share_qk=true)";
  const HostTensor members = first_selected(spec.c_str(), "q_members", inputs, false);
  const HostTensor labels = first_selected(spec.c_str(), "q_labels", inputs, true);
  const std::vector<double> centroid_values = read_values(centroids);
  for (std::int64_t item = 0; item < 2; ++item) {
    const std::size_t length = static_cast<std::size_t>(lengths[item]);
    const std::vector<double> rows =
        read_values(x.narrowed(0, item, 1).narrowed(2, 0, static_cast<std::int64_t>(length)));
    std::vector<double> best(length, -INFINITY), labelled(length);
    for (std::int64_t c = 0; c < clusters; ++c) {
      const std::vector<double> scores =
          scores_of(rows, static_cast<std::size_t>(dim), centroid_values.data() + c * dim);
      std::vector<double> sorted = scores;
      std::sort(sorted.begin(), sorted.end(), std::greater<>());
      const std::int32_t* list = members.data<std::int32_t>() + (item * clusters + c) * width;
      std::vector<bool> taken(length);
      std::map<double, std::int32_t> last;  // member with this score
      for (std::int64_t i = 0; i < width; ++i) {
        ASSERT_TRUE(list[i] > (i > 0 ? list[i - 1] : -1) && list[i] < lengths[item]);
        taken[static_cast<std::size_t>(list[i])] = true;
        last[scores[static_cast<std::size_t>(list[i])]] = list[i];
        EXPECT_GE(scores[static_cast<std::size_t>(list[i])],
                  sorted[static_cast<std::size_t>(width) - 1] - rounding);
      }
      for (std::size_t i = 0; i < length; ++i) {
        EXPECT_TRUE(taken[i] ||
                    scores[i] <= sorted[static_cast<std::size_t>(width) - 1] + rounding);
        if (!taken[i] && last.count(scores[i])) {
          EXPECT_GT(static_cast<std::int32_t>(i), last[scores[i]]);
        }
        best[i] = std::max(best[i], scores[i]);
        if (labels.data<std::int32_t>()[item * kLong + static_cast<std::int64_t>(i)] == c)
          labelled[i] = scores[i];
      }
    }
    for (std::size_t i = 0; i < length; ++i) EXPECT_GE(labelled[i], best[i] - rounding);
  }
}

INSTANTIATE_TEST_SUITE_P(Rows, LongSelectionTest,
                         testing::Values(SelectionCase{any_row}, SelectionCase{repeated_row},
                                         SelectionCase{equal_row}, SelectionCase{skewed_row},
                                         SelectionCase{shifted_row},
                                         SelectionCase{any_row, 300, 40, 128},
                                         SelectionCase{skewed_row, 130, 33, 72},
                                         SelectionCase{any_row, 9, 200, 64, 1}));

}  // namespace
}  // namespace coterie
