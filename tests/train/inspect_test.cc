// SPDX-License-Identifier: MIT
// Inspection of attention: kept mass, entropy, cluster sizes, divergence between heads.
#include "train/inspect.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/full.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <cmath>
#include <numeric>
#include <set>

#include "coterie/spec.h"
#include "train/trainer.h"

namespace coterie::train {
namespace {

using torch_api::AttentionRecord;

constexpr std::int64_t kRows = 2, kHeads = 3, kTokens = 24, kDim = 8;
// Weights have single precision and are summed over kTokens keys: 24 roundings of 6e-8, and a
// margin.
constexpr double kRounding = 1e-5;

Mechanism mechanism_of(const std::string& spec) {
  return AttentionSpec::parse(spec).groups.at(0).mechanism;
}

AttentionRecord make_record(const std::string& spec, bool causal = false) {
  AttentionRecord record;
  record.mechanism = resolve(mechanism_of(spec), causal);
  record.q = at::randn({kRows, kHeads, kTokens, kDim});
  record.v = at::randn({kRows, kHeads, kTokens, kDim});
  if (!keys_are_queries(record.mechanism)) record.k = at::randn({kRows, kHeads, kTokens, kDim});
  record.options.causal = causal;
  record.options.seed = 5;
  if (const auto* routing = std::get_if<RoutingParams>(&record.mechanism)) {
    record.options.centroids = at::randn({kHeads, routing->clusters, kDim});
    record.options.logit_scale = at::full({kHeads}, 0.35, at::kFloat);
  }
  if (const auto* cast = std::get_if<CastParams>(&record.mechanism)) {
    record.options.centroids = at::randn({kHeads, cast->clusters, kDim});
    record.options.gate = at::randn({kRows, kTokens});
  }
  return record;
}

GroupReport inspect_one(const AttentionRecord& record) {
  return inspect_records({record}).groups.at(0);
}

double sum(const std::vector<double>& values) {
  return std::accumulate(values.begin(), values.end(), 0.0);
}

// If the budget covers the sequence, all mass of full attention is kept.
class InspectCovering : public testing::TestWithParam<std::pair<const char*, bool>> {};

TEST_P(InspectCovering, KeepsAllMass) {
  for (const HeadReport& head :
       inspect_one(make_record(GetParam().first, GetParam().second)).heads) {
    EXPECT_NEAR(head.mass, 1, kRounding);
  }
}

INSTANTIATE_TEST_SUITE_P(
    Mechanisms, InspectCovering,
    testing::Values(std::pair{"full", false}, std::pair{"full", true},
                    std::pair{"local(window=48)", false}, std::pair{"local(window=24)", true},
                    std::pair{"oracle-top(topk=24)", false},
                    std::pair{"i-clustered(clusters=3,topk=24)", false},
                    std::pair{"lsh(rounds=1,chunk=32,buckets=4)", false},
                    std::pair{"lsh(rounds=1,chunk=32,buckets=4,combine=mean)", true},
                    std::pair{"routing(clusters=1,window=24,count_eps=0)", false},
                    std::pair{"routing(clusters=1,window=24,share_qk=true,causal=strict)", true},
                    std::pair{"routing(clusters=1,window=24,causal=strict)", true},
                    std::pair{"cast(clusters=1,size=24)", false}));

TEST(Inspect, KeptMassOfLocalIsTheMassInsideTheWindow) {
  const AttentionRecord record = make_record("local(window=8)");
  const at::Tensor full = full_rows(record), local = attention_rows(record);
  const at::Tensor inside = (full * (local > 0)).sum(-1);  // mass of the keys in the window
  const GroupReport report = inspect_one(record);
  for (std::int64_t head = 0; head < kHeads; ++head) {
    const double wanted = inside.select(1, head).mean().item<double>();
    EXPECT_LT(wanted, 0.9);
    EXPECT_NEAR(report.heads[static_cast<std::size_t>(head)].mass, wanted, kRounding);
  }
}

TEST(Inspect, KeptMassOfClusteredIsTheOverlapOfRows) {
  const AttentionRecord record = make_record("clustered(clusters=2)");
  const at::Tensor distance = (full_rows(record) - attention_rows(record)).abs().sum(-1) / 2;
  const GroupReport report = inspect_one(record);
  for (std::int64_t head = 0; head < kHeads; ++head) {
    const double wanted = 1 - distance.select(1, head).mean().item<double>();
    EXPECT_GT(wanted, 0.1);
    EXPECT_LT(wanted, 0.99);
    EXPECT_NEAR(report.heads[static_cast<std::size_t>(head)].mass, wanted, kRounding);
  }
}

TEST(Inspect, RowsAreThoseOfTheAttention) {
  for (const char* const spec : {"full", "clustered(clusters=3)", "lsh(rounds=2,chunk=4,buckets=4)",
                                 "routing(clusters=3,window=8)", "cast(clusters=3,size=8)"}) {
    const AttentionRecord record = make_record(spec);
    const at::Tensor out =
        torch_api::attention(record.q, record.k, record.v, record.mechanism, record.options);
    EXPECT_TRUE(at::allclose(attention_rows(record).matmul(record.v), out, 1e-4, kRounding))
        << spec;
  }
}

// With fewer key/value heads than query heads, rows equal those of repeated key heads. If queries
// are also the keys, every head has its own keys and only values are shared.
TEST(Inspect, SharedKeyHeadsGiveTheRowsOfRepeatedOnes) {
  constexpr std::int64_t kMany = 4;
  for (const char* const spec :
       {"full", "local(window=8)", "clustered(clusters=3)", "lsh(rounds=2,chunk=4,buckets=4)",
        "lsh(rounds=1,chunk=8,buckets=4,combine=mean)", "routing(clusters=3,window=8)",
        "routing(clusters=3,window=8,share_qk=true)",
        "routing(clusters=3,window=8,share_qk=true,self=demote)", "cast(clusters=3,size=8)"}) {
    for (const std::int64_t heads : {1, 2, 4}) {
      SCOPED_TRACE(std::string(spec) + ", key heads: " + std::to_string(heads));
      AttentionRecord shared = make_record(spec);
      const bool routing = std::holds_alternative<RoutingParams>(shared.mechanism);
      const auto rows = [](std::int64_t count) { return at::randn({kRows, count, kTokens, kDim}); };
      shared.q = rows(kMany);
      shared.v = rows(heads);
      if (shared.k.defined()) shared.k = rows(heads);
      at::Tensor& centroids = shared.options.centroids;
      if (centroids.defined()) {
        centroids = at::randn({routing ? heads : kMany, centroids.size(1), kDim});
      }
      if (routing) shared.options.logit_scale = at::full({kMany}, 0.35, at::kFloat);
      AttentionRecord repeated = shared;
      repeated.v = shared.v.repeat_interleave(kMany / heads, 1);
      if (shared.k.defined()) repeated.k = shared.k.repeat_interleave(kMany / heads, 1);
      if (routing) {
        repeated.options.centroids = centroids.repeat_interleave(kMany / heads, 0);
      }
      EXPECT_TRUE(at::allclose(attention_rows(shared), attention_rows(repeated), 0, kRounding));
      EXPECT_TRUE(at::allclose(full_rows(shared), full_rows(repeated), 0, kRounding));
      EXPECT_EQ(inspect_one(shared).heads.size(), static_cast<std::size_t>(kMany));
    }
  }
}

TEST(Inspect, PaddingAndQueriesWithoutKeysDoNotCount) {
  AttentionRecord record = make_record("full");
  const double whole = inspect_one(record).heads[0].entropy;
  EXPECT_LT(whole, std::log(kTokens) + kRounding);
  record.options.q_lengths = record.options.k_lengths = at::full({kRows}, 1, at::kLong);
  const GroupReport report = inspect_one(record);
  EXPECT_NEAR(report.heads[0].mass, 1, kRounding);
  EXPECT_NEAR(report.heads[0].entropy, 0, kRounding);  // one key only
}

TEST(Inspect, EqualWeightsHaveTheLargestEntropy) {
  AttentionRecord record = make_record("full");
  record.q = at::zeros_like(record.q);
  EXPECT_NEAR(inspect_one(record).heads[0].entropy, std::log(kTokens), kRounding);
}

TEST(Inspect, ClustersHoldEveryTokenOnce) {
  for (const auto& [spec, causal] :
       {std::pair{"clustered(clusters=5)", false}, std::pair{"i-clustered(clusters=5)", false},
        std::pair{"routing(clusters=5,window=4)", false},
        std::pair{"routing(clusters=5,window=4,causal=strict)", true}}) {
    for (const HeadReport& head : inspect_one(make_record(spec, causal)).heads) {
      ASSERT_EQ(head.sizes.size(), 5u) << spec;
      EXPECT_NEAR(sum(head.sizes), kTokens, kRounding) << spec;
      EXPECT_TRUE(std::is_sorted(head.sizes.rbegin(), head.sizes.rend())) << spec;
    }
  }
  for (const HeadReport& head : inspect_one(make_record("cast(clusters=3,size=4)")).heads) {
    EXPECT_EQ(head.sizes, (std::vector<double>{4, 4, 4}));
  }
  EXPECT_TRUE(inspect_one(make_record("local(window=4)")).heads[0].sizes.empty());
}

TEST(Inspect, CountsEmptyClusters) {
  AttentionRecord record = make_record("routing(clusters=4,window=24)");
  // All tokens are equal, so they are all in one cluster.
  record.q = at::arange(kDim, at::kFloat).expand({kRows, kHeads, kTokens, kDim});
  record.k = record.q;
  for (const HeadReport& head : inspect_one(record).heads) {
    EXPECT_EQ(head.empty, 3);
    EXPECT_EQ(head.sizes, (std::vector<double>{kTokens, 0, 0, 0}));
  }
}

TEST(Inspect, EqualHeadsDoNotDiverge) {
  AttentionRecord record = make_record("full");
  record.q = record.q.narrow(1, 0, 1).expand_as(record.q);
  record.k = record.k.narrow(1, 0, 1).expand_as(record.k);
  const std::vector<Divergence> divergences = inspect_records({record}).divergences;
  ASSERT_EQ(divergences.size(), 1u);
  EXPECT_EQ(divergences[0].a, "full");
  EXPECT_NEAR(divergences[0].mean, 0, kRounding);
  EXPECT_NEAR(divergences[0].deviation, 0, kRounding);
}

TEST(Inspect, HeadsThatShareNoKeyDivergeByLnTwo) {
  // Large logits: head 0 attends to key 0 only, head 1 to key 1 only.
  AttentionRecord record = make_record("full");
  record.q = at::full({1, 2, 4, 2}, 100.0, at::kFloat);
  record.k = at::zeros({1, 2, 4, 2});
  record.k[0][0][0].fill_(1);
  record.k[0][1][1].fill_(1);
  record.v = record.k;
  const std::vector<Divergence> divergences = inspect_records({record}).divergences;
  ASSERT_EQ(divergences.size(), 1u);
  EXPECT_NEAR(divergences[0].mean, std::log(2), kRounding);
  EXPECT_NEAR(divergences[0].deviation, 0, kRounding);
}

TEST(Inspect, DivergencesAreByMechanismAndLayer) {
  std::vector<AttentionRecord> records;
  for (const std::int64_t layer : {0, 1}) {
    for (const char* const spec :
         {"local(window=4)", "routing(clusters=2,window=8,causal=strict)"}) {
      records.push_back(make_record(spec, /*causal=*/true));
      records.back().layer = layer;
      records.back().group = records.size() % 2 == 1 ? 0 : 1;
    }
  }
  const Inspection inspection = inspect_records(records);
  ASSERT_EQ(inspection.groups.size(), 4u);
  EXPECT_EQ(inspection.groups[3].layer, 1);
  EXPECT_EQ(inspection.groups[3].group, 1);
  ASSERT_EQ(inspection.divergences.size(), 6u);
  const Divergence& mixed = inspection.divergences[4];
  EXPECT_EQ(mixed.layer, 1);
  EXPECT_EQ(mixed.a, "local");
  EXPECT_EQ(mixed.b, "routing");
  for (const Divergence& divergence : inspection.divergences) {
    EXPECT_GT(divergence.mean, 0);
    EXPECT_LT(divergence.mean, std::log(2) + kRounding);
  }
}

TEST(Inspect, MembersOfClustersAreThoseOfTheSizes) {
  // A token may be in several clusters of CAST, or in none.
  const AttentionRecord record = make_record("cast(clusters=3,size=4)");
  const at::Tensor members = cluster_members(record);
  ASSERT_EQ(members.sizes().slice(2), at::IntArrayRef({kTokens, 3}));
  EXPECT_TRUE((members.sum(2) == 4).all().item<bool>());
  const at::Tensor labels = cluster_members(make_record("clustered(clusters=5)"));
  EXPECT_EQ(labels.sizes(), at::IntArrayRef({kRows, kHeads, kTokens, 5}));
  EXPECT_TRUE((labels.sum(3) == 1).all().item<bool>());
  EXPECT_FALSE(cluster_members(make_record("local(window=4)")).defined());
}

TEST(Inspect, DrawsImagesAndTheirClusters) {
  Config config;
  config.task = "pathfinder";
  config.pathfinder.paddles = 4;
  config.length = 256;
  config.model.dim = 16;
  config.model.heads = 4;
  config.attention = "2*clustered(clusters=4)+2*local(window=8)";
  const auto task = make_task(config);
  const torch_api::Model model = make_model(config, *task);
  const Picture sheet = cluster_picture(model, *task, 3, /*seed=*/1);
  // Pixels are squares of 4; two layers beside each image, 8 between pictures.
  ASSERT_EQ(sheet.width, 3 * (64 + 8) + 8);
  ASSERT_EQ(sheet.height, 3 * (64 + 8) + 8);
  const auto colour = [&](std::int64_t column, std::int64_t row, std::int64_t y, std::int64_t x) {
    const std::int64_t at = (8 + row * 72 + 4 * y) * sheet.width + 8 + column * 72 + 4 * x;
    return sheet.values.substr(static_cast<std::size_t>(3 * at), 3);
  };
  const Batch batch = task->batch(Split::valid, 0, 3);
  std::set<std::string> colours;
  for (std::int64_t i = 0; i < 256; ++i) {
    const auto grey = static_cast<char>(batch.tokens[2][i].item<std::int64_t>());
    EXPECT_EQ(colour(0, 2, i / 16, i % 16), std::string(3, grey));
    colours.insert(colour(1, 2, i / 16, i % 16));
  }
  EXPECT_GT(colours.size(), 1U);
  EXPECT_LE(colours.size(), 4U);
  EXPECT_FALSE(colours.contains(std::string(3, '\0')));
  EXPECT_EQ(cluster_picture(model, *task, 3, /*seed=*/1).values, sheet.values);
}

TEST(Inspect, LooksIntoEveryGroupOfAModel) {
  Config config;
  config.task = "copy";
  config.length = 32;
  config.model.dim = 16;
  config.model.layers = 2;
  config.model.heads = 4;
  config.attention = "1*local(window=8)+3*clustered(clusters=4)";
  const std::unique_ptr<Task> task = make_task(config);
  torch_api::Model model = make_model(config, *task);
  model->train();
  const Inspection inspection = inspect(model, *task, 2, /*seed=*/1);
  EXPECT_TRUE(model->is_training());
  ASSERT_EQ(inspection.groups.size(), 4u);
  EXPECT_EQ(inspection.groups[3].attention, "clustered(clusters=4)");
  ASSERT_EQ(inspection.groups[3].heads.size(), 3u);
  EXPECT_EQ(inspection.groups[3].heads[2].sizes.size(), 4u);
  EXPECT_EQ(inspection.divergences.size(),
            4u);  // the local group has one head, so it diverges from others only
  const Inspection again = inspect(model, *task, 2, /*seed=*/1);
  EXPECT_EQ(again.groups[3].heads[2].sizes, inspection.groups[3].heads[2].sizes);
  EXPECT_EQ(again.divergences[1].mean, inspection.divergences[1].mean);
}

}  // namespace
}  // namespace coterie::train
