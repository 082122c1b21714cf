// SPDX-License-Identifier: MIT
// The attention layer: the core's attention between projections; positions, shared key heads, other
// specs.
#include "coterie/torch/attention.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <cmath>
#include <map>
#include <set>
#include <sstream>
#include <string>

#include "coterie/error.h"
#include "modules.h"
#include "tests/support/tensors.h"
#include "torch/src/head_group.h"
#include "torch/src/positions.h"

namespace coterie::torch_api {
namespace {

SelfAttention make_layer(SelfAttentionOptions options, const std::string& spec) {
  at::manual_seed(2);
  options.dim = 32;
  options.heads = 4;
  options.spec = AttentionSpec::parse(spec);
  return SelfAttention(options);
}

std::map<std::string, at::Tensor> named_tensors(const ::torch::nn::Module& module) {
  std::map<std::string, at::Tensor> tensors;
  for (const auto& item : module.named_parameters()) tensors[item.key()] = item.value();
  for (const auto& item : module.named_buffers()) tensors[item.key()] = item.value();
  return tensors;
}

// Heads [first, first + count) of a projection of x, as (B, count, N, 8).
at::Tensor heads_of(const at::Tensor& x, const ::torch::nn::Module& layer, const std::string& name,
                    std::int64_t first, std::int64_t count) {
  auto tensors = named_tensors(layer);
  const at::Tensor rows = at::linear(x, tensors[name + ".weight"], tensors[name + ".bias"]);
  return rows.unflatten(2, {-1, 8}).narrow(2, first, count).transpose(1, 2);
}

at::Tensor project_out(const std::vector<at::Tensor>& parts, const ::torch::nn::Module& layer) {
  auto tensors = named_tensors(layer);
  return at::linear(at::cat(parts, 1).transpose(1, 2).flatten(2), tensors["out.weight"],
                    tensors["out.bias"]);
}

TEST(SelfAttention, IsTheCoreBetweenProjections) {
  const char* spec =
      "1*lsh(rounds=2,chunk=8,buckets=4)+2*i-clustered(clusters=4,topk=5)+1*full(positions=none)";
  SelfAttention layer = make_layer({.causal = false}, spec);
  const at::Tensor x = at::randn({2, 21, 32}), lengths = at::tensor({21, 13}, at::kInt);
  const PassContext context{.lengths = lengths, .seed = 9, .layer = 3};
  AttentionOptions options{.q_lengths = lengths, .k_lengths = lengths};
  std::vector<at::Tensor> parts;
  const AttentionSpec parsed = AttentionSpec::parse(spec);
  const std::int64_t head[] = {0, 1, 3}, count[] = {1, 2, 1};
  for (std::int64_t g = 0; g < 3; ++g) {
    options.seed = group_seed(9, 3, g);
    const at::Tensor k = g == 0 ? at::Tensor() : heads_of(x, *layer, "k", head[g] - 1, count[g]);
    parts.push_back(attention(heads_of(x, *layer, "q", head[g], count[g]), k,
                              heads_of(x, *layer, "v", head[g], count[g]),
                              parsed.groups[static_cast<std::size_t>(g)].mechanism, options));
  }
  const PassOutput output = layer->forward(x, context);
  EXPECT_TRUE(at::equal(output.out, project_out(parts, *layer)));
  EXPECT_EQ(output.commitment.item<float>(), 0.0F);
}

TEST(SelfAttention, NamesItsParametersAndBuffers) {
  SelfAttention layer =
      make_layer({},
                 "1*routing(clusters=3,window=4,share_qk=true)+1*cast(clusters=3,size=4)+"
                 "2*full(positions=relative)");
  std::set<std::string> names;
  for (const auto& [name, tensor] : named_tensors(*layer)) names.insert(name);
  EXPECT_EQ(names,
            (std::set<std::string>{"q.weight", "q.bias", "k.weight", "k.bias", "v.weight", "v.bias",
                                   "out.weight", "out.bias", "group_0.centroids", "group_0.counts",
                                   "group_0.sums", "group_0.logit_scale", "group_1.surrogates",
                                   "group_1.gate.weight", "group_1.gate.bias",
                                   "group_2.relative.weight", "group_2.relative.bias"}));
  auto tensors = named_tensors(*layer);
  EXPECT_EQ(tensors["k.weight"].size(0), 3 * 8);  // shared queries need no keys
  EXPECT_FALSE(tensors["group_0.centroids"].requires_grad());
  EXPECT_FLOAT_EQ(tensors["group_0.logit_scale"][0].item<float>(), 1 / std::sqrt(8.0f));
  std::ostringstream text;
  text << *layer;
  EXPECT_NE(text.str().find("SelfAttention(dim=32, heads=4"), std::string::npos);
}

TEST(SelfAttention, HasNoKeysWhereAllAreQueries) {
  SelfAttention layer = make_layer({.bias = false}, "lsh(rounds=1,chunk=8,buckets=4)");
  EXPECT_EQ(named_tensors(*layer).count("k.weight"), 0u);
  EXPECT_EQ(named_tensors(*layer).count("q.bias"), 0u);
  EXPECT_EQ(layer->forward(at::randn({1, 9, 32}), {}).out.sizes(), at::IntArrayRef({1, 9, 32}));
}

TEST(SelfAttention, GivesTheCommitmentLossOfQueriesAndKeys) {
  for (const bool shared : {false, true}) {
    SelfAttention layer =
        make_layer({.kv_heads = 2}, std::string("2*local(window=4)+2*routing(clusters=3,window=6,"
                                                "commitment=0.5,share_qk=") +
                                        (shared ? "true)" : "false)"));
    const at::Tensor x = at::randn({2, 17, 32}), lengths = at::tensor({17, 5}, at::kInt);
    const at::Tensor centroids = named_tensors(*layer)["group_1.centroids"];
    EXPECT_EQ(centroids.sizes(), at::IntArrayRef({1, 3, 8}));
    const auto loss = [&](const at::Tensor& rows) {
      return commitment_loss(rows, centroids, nearest_centroids(rows, centroids, lengths), lengths);
    };
    const at::Tensor of_queries = loss(heads_of(x, *layer, "q", 2, 2));
    const at::Tensor of_keys = shared ? of_queries : loss(heads_of(x, *layer, "k", 1, 1));
    EXPECT_FLOAT_EQ(layer->forward(x, {.lengths = lengths}).commitment.item<float>(),
                    (0.5 * (of_queries + of_keys)).item<float>());
  }
}

TEST(SharedKeyHeads, AreThoseOfRepeatedKeys) {
  SelfAttention layer = make_layer({.kv_heads = 2, .causal = true},
                                   "2*full(positions=none)+2*local(window=4,positions=none)");
  const at::Tensor x = at::randn({2, 11, 32});
  const auto part = [&](std::int64_t group, const Mechanism& mechanism) {
    const auto repeated = [&](const char* name) {
      return heads_of(x, *layer, name, group, 1).repeat_interleave(2, 1);
    };
    return attention(heads_of(x, *layer, "q", 2 * group, 2), repeated("k"), repeated("v"),
                     mechanism, {.causal = true});
  };
  const at::Tensor expected =
      project_out({part(0, FullParams{}), part(1, LocalParams{.window = 4})}, *layer);
  EXPECT_TRUE(at::allclose(layer->forward(x, {}).out, expected, 1e-5, 1e-6));
}

TEST(SharedKeyHeads, MustShareOutOverTheGroups) {
  const auto refusal = [](const std::string& spec, std::int64_t kv_heads) {
    return test::error_of([&] { make_layer({.kv_heads = kv_heads}, spec); });
  };
  EXPECT_EQ(
      refusal("1*full+3*local(window=2)", 2),
      "[spec] the heads of a group must be a multiple of 2, the query heads per key/value head; "
      "got a group of 1");
  EXPECT_NE(refusal("full", 3).find("got 4 and 3"), std::string::npos);
  EXPECT_NE(refusal("3*full", 0).find("add up"), std::string::npos);
}

// Full attention from the logits of one head.
at::Tensor attend(const at::Tensor& logits, const at::Tensor& v) {
  return at::matmul(at::softmax(logits, -1), v);
}

TEST(RelativePositions, AddTheTermOfTransformerXl) {
  SelfAttention layer = make_layer({}, "full(positions=relative)");
  layer->to(at::kDouble);
  auto tensors = named_tensors(*layer);
  const at::Tensor bias = at::randn({4, 8}, at::kDouble);
  {
    const at::NoGradGuard no_grad;
    tensors["group_0.relative.bias"].copy_(bias);
  }
  const std::int64_t N = 13;
  const at::Tensor x = at::randn({2, N, 32}, at::kDouble);
  const at::Tensor q = heads_of(x, *layer, "q", 0, 4), k = heads_of(x, *layer, "k", 0, 4);
  const at::Tensor term =
      at::matmul(q, tensors["group_0.relative.weight"].mT()) + bias.view({4, 1, 8});
  at::Tensor logits = at::matmul(q, k.mT()).detach().clone();
  for (std::int64_t i = 0; i < N; ++i) {
    for (std::int64_t j = 0; j < N; ++j) {
      at::Tensor wave = at::empty({8}, at::kDouble);
      for (std::int64_t f = 0; f < 4; ++f) {
        const double angle = static_cast<double>(i - j) * std::pow(10000.0, -2.0 * f / 8.0);
        wave[f] = std::sin(angle);
        wave[f + 4] = std::cos(angle);
      }
      logits.select(2, i).select(2, j).add_(at::matmul(term.select(2, i), wave).detach());
    }
  }
  const at::Tensor expected =
      project_out({attend(logits / std::sqrt(8.0), heads_of(x, *layer, "v", 0, 4))}, *layer);
  EXPECT_TRUE(at::allclose(layer->forward(x, {}).out, expected, 1e-11, 1e-11));
}

TEST(RotaryPositions, TurnPairsByTheAngleOfTheirPosition) {
  const at::Tensor x = at::randn({1, 1, 5, 6}, at::kDouble).requires_grad_();
  const at::Tensor turned = rotated(x, {7, 100.0});
  for (std::int64_t n = 0; n < 5; ++n) {
    for (std::int64_t f = 0; f < 3; ++f) {
      const double angle = static_cast<double>(7 + n) * std::pow(100.0, -2.0 * f / 6.0);
      const double a = x[0][0][n][f].item<double>(), b = x[0][0][n][f + 3].item<double>();
      EXPECT_NEAR(turned[0][0][n][f].item<double>(), a * std::cos(angle) - b * std::sin(angle),
                  1e-14);
      EXPECT_NEAR(turned[0][0][n][f + 3].item<double>(), a * std::sin(angle) + b * std::cos(angle),
                  1e-14);
    }
  }
  // A rotation is its own gradient's inverse.
  const at::Tensor weight = at::randn({1, 1, 5, 6}, at::kDouble);
  const at::Tensor gradient = ::torch::autograd::grad({(turned * weight).sum()}, {x})[0];
  EXPECT_TRUE(at::allclose(rotated(gradient, {7, 100.0}), weight, 1e-13, 1e-13));
}

TEST(RotaryPositions, AreThoseOfQueriesAndKeysOfGroupsThatSaySo) {
  SelfAttention layer = make_layer({}, "2*full+2*full(positions=none)");
  const at::Tensor x = at::randn({2, 9, 32});
  const auto place = [](const at::Tensor& rows) { return rotated(rows, {0, 10000.0}); };
  const auto heads = [&](const char* name, std::int64_t first) {
    return heads_of(x, *layer, name, first, 2);
  };
  const at::Tensor with =
      attention(place(heads("q", 0)), place(heads("k", 0)), heads("v", 0), FullParams{});
  const at::Tensor without = attention(heads("q", 2), heads("k", 2), heads("v", 2), FullParams{});
  EXPECT_TRUE(at::equal(layer->forward(x, {}).out, project_out({with, without}, *layer)));
}

TEST(Positions, NeedEvenHeadsAndFitTheMechanism) {
  const auto refusal = [](std::int64_t dim, const HeadGroup& group) {
    return test::error_of(
        [&] { SelfAttention(SelfAttentionOptions{.dim = dim, .heads = 2, .spec = {{group}}}); });
  };
  EXPECT_NE(refusal(10, {.mechanism = FullParams{}}).find("even head dimension"),
            std::string::npos);
  EXPECT_NE(refusal(8, {.mechanism = LshParams{}, .positions = Positions::relative})
                .find("[lsh] expected positions=rotary or none; got relative"),
            std::string::npos);
  EXPECT_EQ(refusal(10, {.mechanism = FullParams{}, .positions = Positions::none}), "");
}

TEST(Clusters, RepeatForEqualSeedsAndDifferBetweenLayers) {
  SelfAttention layer = make_layer({}, "i-clustered(clusters=5,topk=2,clustering=hamming)");
  const at::Tensor x = at::randn({1, 60, 32});
  const at::Tensor out = layer->forward(x, {.seed = 1}).out;
  EXPECT_TRUE(at::equal(layer->forward(x, {.seed = 1}).out, out));
  EXPECT_FALSE(at::equal(layer->forward(x, {.seed = 2}).out, out));
  EXPECT_FALSE(at::equal(layer->forward(x, {.seed = 1, .layer = 1}).out, out));
}

TEST(Records, HoldWhatAttentionGot) {
  for (const std::string& spec : every_spec(false)) {
    SCOPED_TRACE(spec);
    SelfAttention layer = make_layer({}, spec);
    std::vector<AttentionRecord> records;
    const at::Tensor x = at::randn({2, 15, 32});
    const PassOutput output = layer->forward(x, {.seed = 5, .layer = 2, .records = &records});
    std::vector<at::Tensor> parts;
    for (const AttentionRecord& record : records) {
      EXPECT_EQ(record.layer, 2);
      EXPECT_FALSE(record.q.requires_grad());
      EXPECT_EQ(record.group, static_cast<std::int64_t>(parts.size()));
      parts.push_back(attention(record.q, record.k, record.v, record.mechanism, record.options));
    }
    EXPECT_TRUE(at::equal(project_out(parts, *layer), output.out));
  }
}

TEST(StateDict, MakesAnotherLayerTheSame) {
  for (const std::string& spec : every_spec(false)) {
    SCOPED_TRACE(spec);
    SelfAttention layer = make_layer({.seed = 1}, spec), other(nullptr);
    {
      at::manual_seed(77);
      other = SelfAttention(SelfAttentionOptions{
          .dim = 32, .heads = 4, .spec = AttentionSpec::parse(spec), .seed = 2});
    }
    const at::Tensor x = at::randn({2, 15, 32});
    const at::Tensor out = layer->forward(x, {}).out;
    EXPECT_FALSE(at::equal(other->forward(x, {}).out, out));
    const at::NoGradGuard no_grad;
    auto target = named_tensors(*other);
    for (const auto& [name, tensor] : named_tensors(*layer)) target.at(name).copy_(tensor);
    EXPECT_TRUE(at::equal(other->forward(x, {}).out, out));
  }
}

TEST(SetSpec, ChangesTheAttentionAndKeepsPositions) {
  SelfAttention layer = make_layer({}, "full");
  const at::Tensor x = at::randn({1, 20, 32});
  const at::Tensor out = layer->forward(x, {}).out;
  layer->set_spec(AttentionSpec::parse("i-clustered(clusters=3,topk=20)"));
  EXPECT_EQ(layer->spec().to_string(), "i-clustered(clusters=3,topk=20)");
  EXPECT_TRUE(at::allclose(layer->forward(x, {}).out, out, 1e-4, 1e-5));  // all keys are top keys
  layer->set_spec(AttentionSpec::parse("oracle-top(topk=20,positions=none)"));
  EXPECT_FALSE(at::allclose(layer->forward(x, {}).out, out, 1e-3, 1e-3));
}

TEST(SetSpec, TakesTheStateOfTheTrainedGroup) {
  SelfAttention layer = make_layer({}, "2*routing(clusters=3,window=4)+2*cast(clusters=3,size=4)");
  const at::Tensor x = at::randn({1, 20, 32});
  layer->set_spec(AttentionSpec::parse("2*routing(clusters=3,window=9)+2*cast(clusters=3,size=7)"));
  EXPECT_EQ(layer->forward(x, {}).out.sizes(), x.sizes());
  layer->set_spec(AttentionSpec::parse("2*full+2*full"));
  EXPECT_EQ(layer->forward(x, {}).out.sizes(), x.sizes());
  layer->set_spec(AttentionSpec::parse("2*routing(clusters=3,window=4)+2*cast(clusters=3,size=4)"));
}

TEST(SetSpec, RefusesWhatTheGroupLacks) {
  SelfAttention layer = make_layer({}, "2*full+2*routing(clusters=3,window=4)");
  const auto expect_refusal = [&](const std::string& spec, const char* words) {
    const std::string error = test::error_of([&] { layer->set_spec(AttentionSpec::parse(spec)); });
    EXPECT_NE(error.find(words), std::string::npos) << error;
    EXPECT_EQ(layer->spec().to_string(), "2*full+2*routing(clusters=3,window=4)");
  };
  expect_refusal("3*full+1*local(window=3)",
                 "as many heads as in \"2*full+2*routing(clusters=3,window=4)\"");
  expect_refusal("2*full+2*routing(clusters=4,window=4)", "with 4 centroids; got one with 3");
  expect_refusal("2*cast(clusters=3,size=4)+2*full", "3 surrogate tokens; got one with none");
  expect_refusal("2*lsh+2*full", "expected a mechanism like full, whose keys are separate");
  expect_refusal("2*full(positions=relative)+2*full", "trained with positions=relative");
}

TEST(SetSpec, GroupsMayChangeWhereNothingIsLearned) {
  SelfAttention layer = make_layer({}, "2*full+2*full(positions=none)");
  const at::Tensor x = at::randn({1, 20, 32});
  const at::Tensor out = layer->forward(x, {}).out;
  const auto expect_same = [&](const char* spec, bool same) {
    layer->set_spec(AttentionSpec::parse(spec));
    EXPECT_EQ(layer->spec().to_string(), AttentionSpec::parse(spec).to_string());
    EXPECT_EQ(at::allclose(layer->forward(x, {}).out, out, 1e-4, 1e-5), same) << spec;
  };
  expect_same("full", true);  // heads keep their positions
  expect_same("oracle-top(topk=20)", true);
  expect_same("1*full+2*i-clustered(clusters=3,topk=20)+1*full", true);
  expect_same("1*full+2*i-clustered(clusters=3,topk=20,positions=none)+1*full", false);
  expect_same("1*full+3*local(window=3)", false);
  expect_same("2*full+2*full", true);
  EXPECT_EQ(layer->named_children().size(), 6u);  // projections and two groups
  const auto expect_refusal = [&](const char* spec, const char* words) {
    const std::string error = test::error_of([&] { layer->set_spec(AttentionSpec::parse(spec)); });
    EXPECT_NE(error.find(words), std::string::npos) << error;
    EXPECT_EQ(layer->spec().to_string(), "2*full+2*full");
  };
  expect_refusal("1*full+3*routing(clusters=2,window=4)", "without learned tensors");
  expect_refusal("1*full+3*lsh", "separate keys");
  expect_refusal("3*full", "heads");
  EXPECT_TRUE(at::allclose(layer->forward(x, {}).out, out, 1e-4, 1e-5));
}

TEST(UpdateCentroids, MovesThemByQueriesThenKeys) {
  for (const bool shared : {false, true}) {
    SelfAttention layer =
        make_layer({.kv_heads = 2}, std::string("routing(clusters=3,window=6,decay=0.5,share_qk=") +
                                        (shared ? "true)" : "false)"));
    auto tensors = named_tensors(*layer);
    const CentroidState expected{tensors["group_0.centroids"].clone(),
                                 tensors["group_0.counts"].clone(),
                                 tensors["group_0.sums"].clone()};
    std::vector<AttentionRecord> records;
    const at::Tensor x = at::randn({2, 15, 32}), lengths = at::tensor({15, 4}, at::kInt);
    layer->forward(x, {.lengths = lengths, .records = &records});
    const at::Tensor q = heads_of(x, *layer, "q", 0, 4);
    const auto statistics = [&](const at::Tensor& rows) {
      CentroidStatistics found;
      const at::Tensor labels = nearest_centroids(rows, expected.centroids, lengths);
      add_statistics(rows, labels, lengths, expected, found);
      return found;
    };
    const CentroidStatistics of_queries = statistics(q);
    const CentroidStatistics of_keys = statistics(heads_of(x, *layer, shared ? "q" : "k", 0, 2));
    move_centroids(0.5, of_queries, expected);
    if (!shared) move_centroids(0.5, of_keys, expected);
    layer->update_centroids(records);
    EXPECT_TRUE(at::equal(named_tensors(*layer)["group_0.centroids"], expected.centroids));
    EXPECT_TRUE(at::equal(named_tensors(*layer)["group_0.counts"], expected.counts));
  }
}

// Each group of each layer of a model gets its own seed.
TEST(GroupSeed, IsWhatEveryGroupOfEveryLayerIsCalledWith) {
  Transformer model(TransformerOptions{
      .dim = 32,
      .layers = 3,
      .heads = 4,
      .attention = {AttentionSpec::parse("2*lsh(chunk=4,buckets=4)+2*clustered(clusters=3)")}});
  std::vector<AttentionRecord> records;
  model->forward(at::randn({1, 12, 32}), {.seed = 77, .records = &records});
  ASSERT_EQ(records.size(), 6u);
  for (const AttentionRecord& record : records) {
    EXPECT_EQ(record.options.seed, group_seed(77, record.layer, record.group));
  }
}

// The passes of one step update the centroids once, like one pass over all their rows, however the
// step is split.
TEST(UpdateCentroids, TakesRecordsOfSeveralPassesForOneBatch) {
  for (const bool shared : {false, true}) {
    for (const bool causal : {false, true}) {
      const std::string spec = std::string("routing(clusters=3,window=6,decay=0.5,share_qk=") +
                               (shared ? "true)" : "false)");
      const at::Tensor x = at::randn({5, 15, 32}, at::kDouble);
      const at::Tensor lengths = at::tensor({15, 4, 1, 12, 9}, at::kInt);
      enum class By { records, statistics, context };
      const auto moved = [&](std::vector<std::int64_t> cuts, By by) {
        SelfAttention layer = make_layer({.kv_heads = 2, .causal = causal}, spec);
        layer->to(at::kDouble);
        std::vector<AttentionRecord> records;
        StepStatistics statistics;
        for (std::size_t i = 0; i + 1 < cuts.size(); ++i) {
          const auto part = [&](const at::Tensor& all) {
            return all.narrow(0, cuts[i], cuts[i + 1] - cuts[i]);
          };
          PassContext context{.lengths = part(lengths), .records = &records};
          if (by == By::context) context.statistics = &statistics;
          layer->forward(part(x), context);
          if (by != By::statistics) continue;
          layer->add_statistics(records, statistics);
          records.clear();
        }
        by == By::records ? layer->update_centroids(records) : layer->update_centroids(statistics);
        return named_tensors(*layer);
      };
      auto whole = moved({0, 5}, By::records);
      for (const By by : {By::records, By::statistics, By::context}) {
        auto parts = moved({0, 1, 3, 5}, by);
        for (const char* name : {"group_0.centroids", "group_0.counts", "group_0.sums"}) {
          // Sums of fewer than 100 numbers of order one, in double: 1e-13.
          EXPECT_LT((whole[name] - parts[name]).abs().max().item<double>(), 1e-13) << name;
        }
      }
    }
  }
}

TEST(InitialiseCentroids, TakesRowsOfAllRecords) {
  SelfAttention layer = make_layer({.kv_heads = 2}, "routing(clusters=3,window=6)");
  std::vector<AttentionRecord> records;
  layer->forward(at::randn({2, 15, 32}), {.records = &records});
  layer->forward(at::randn({1, 20, 32}),
                 {.lengths = at::tensor({11}, at::kInt), .records = &records});
  const at::Tensor before = named_tensors(*layer)["group_0.centroids"].clone();
  layer->initialise_centroids(records, 1);
  const at::Tensor centroids = named_tensors(*layer)["group_0.centroids"];
  EXPECT_FALSE(at::equal(centroids, before));
  EXPECT_TRUE(at::isfinite(centroids).all().item<bool>());
  EXPECT_TRUE(at::allclose(normalised_rows(centroids), centroids, 1e-3, 1e-3));
}

TEST(SelfAttention, RefusesOtherWidths) {
  SelfAttention layer = make_layer({}, "full");
  EXPECT_EQ(test::error_of([&] {
              layer->forward(at::randn({2, 3, 31}), {});
            }),
            "[self_attention] expected x of shape (B, N, 32); got (2, 3, 31)");
  EXPECT_THROW(layer->forward(at::randn({3, 32}), {}), Error);
  EXPECT_NE(test::error_of([] {
              SelfAttention(SelfAttentionOptions{
                  .dim = 10, .heads = 4, .spec = AttentionSpec::parse("full")});
            }).find("got width 10 and 4 heads"),
            std::string::npos);
}

}  // namespace
}  // namespace coterie::torch_api
