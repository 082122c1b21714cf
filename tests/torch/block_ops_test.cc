// SPDX-License-Identifier: MIT
// The fused steps of a block, and a model that runs them, against torch's operations.
#include "torch/src/block_ops.h"

#include <ATen/autocast_mode.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <string>

#include "coterie/torch/models.h"

namespace coterie::torch_api {
namespace {

// Largest difference, relative to the largest element of `wanted`.
double error_of(const at::Tensor& got, const at::Tensor& wanted) {
  const at::Tensor a = got.detach().to(at::kDouble), b = wanted.detach().to(at::kDouble);
  return ((a - b).abs().max() / b.abs().max().clamp_min(1e-30)).item<double>();
}

at::Tensor leaf(at::IntArrayRef sizes, at::ScalarType type = at::kFloat) {
  return ::torch::randn(sizes).to(type).requires_grad_();
}

TEST(BlockOps, AddNormEqualsItsParts) {
  ::torch::manual_seed(1);
  for (const std::int64_t E : {4, 36, 512, 1000}) {
    for (const bool with_branch : {true, false}) {
      ::torch::nn::LayerNorm norm(::torch::nn::LayerNormOptions({E}));
      {
        const at::NoGradGuard guard;
        norm->weight.normal_();
        norm->bias.normal_();
      }
      const at::Tensor x = leaf({2, 35, E}), bias = leaf({E});
      const at::Tensor branch = leaf({2, 35, E}, at::kBFloat16);
      const at::Tensor weight = ::torch::randn({2, 35, E}).to(at::kBFloat16);
      const at::Tensor other = ::torch::randn({2, 35, E});
      std::vector<std::vector<at::Tensor>> found;
      for (const bool fused : {true, false}) {
        at::Tensor sum = x, normed;
        if (fused) {
          const NormedSum both = with_branch ? add_norm(norm, {x, branch, bias}, at::kBFloat16)
                                             : add_norm(norm, {x, {}, {}}, at::kBFloat16);
          sum = both.sum;
          normed = both.normed;
        } else {
          if (with_branch) sum = x + branch + bias;
          normed = norm(sum).to(at::kBFloat16);
        }
        std::vector<at::Tensor> inputs = {x, norm->weight, norm->bias};
        if (with_branch) inputs.insert(inputs.end(), {branch, bias});
        auto values = ::torch::autograd::grad(
            {(normed * weight).to(at::kFloat).sum() + (sum * other).sum()}, inputs);
        values.push_back(sum);
        values.push_back(normed.to(at::kFloat));
        found.push_back(values);
      }
      // Elements are rounded to bf16 once: two units of its last place, sums over 70 rows included.
      for (std::size_t i = 0; i < found[0].size(); ++i) {
        EXPECT_LE(error_of(found[0][i], found[1][i]), 0x1p-7)
            << E << " " << with_branch << " " << i;
      }
      EXPECT_LE(error_of(found[0][1], found[1][1]), 1e-4) << "gradient of the gain";
      EXPECT_LE(error_of(found[0][2], found[1][2]), 1e-6) << "gradient of the bias";
    }
  }
}

TEST(BlockOps, BiasGeluEqualsItsParts) {
  ::torch::manual_seed(2);
  for (const at::ScalarType type : {at::kFloat, at::kBFloat16}) {
    const double tolerance = type == at::kFloat ? 2e-6 : 0x1p-7;
    const at::Tensor x = leaf({3, 41, 260}, type), bias = leaf({260});
    const at::Tensor weight = ::torch::randn({3, 41, 260}).to(type);
    const at::Tensor out = bias_gelu(x, bias);
    const auto got = ::torch::autograd::grad({(out * weight).sum()}, {x, bias});
    const at::Tensor wide = x.detach().to(at::kDouble).requires_grad_();
    const at::Tensor shift = bias.detach().to(at::kDouble).requires_grad_();
    const at::Tensor expected = at::gelu(wide + shift);
    const auto wanted =
        ::torch::autograd::grad({(expected * weight.to(at::kDouble)).sum()}, {wide, shift});
    EXPECT_LE(error_of(out, expected), tolerance);
    EXPECT_LE(error_of(got[0], wanted[0]), tolerance);
    EXPECT_LE(error_of(got[1], wanted[1]), tolerance);
    EXPECT_LE(error_of(bias_gelu(x, {}), at::gelu(wide)), tolerance);
  }
}

struct Autocast {
  Autocast() {
    at::autocast::set_autocast_enabled(at::kCPU, true);
    at::autocast::set_autocast_dtype(at::kCPU, at::kBFloat16);
    at::autocast::increment_nesting();
  }
  ~Autocast() {
    at::autocast::decrement_nesting();
    at::autocast::clear_cache();
    at::autocast::set_autocast_enabled(at::kCPU, false);
  }
};

struct FusedOnCpu {
  explicit FusedOnCpu(bool wanted) { fuse_on_cpu(wanted); }
  ~FusedOnCpu() { fuse_on_cpu(false); }
};

std::vector<at::Tensor> values_of(LanguageModel& model, bool fused, const at::Tensor& tokens,
                                  const PassContext& context) {
  const FusedOnCpu on_cpu(fused);
  PassOutput output;
  {
    const Autocast autocast;
    output = model->forward(tokens, context);
  }
  model->zero_grad();
  (at::cross_entropy_loss(output.out.flatten(0, 1).to(at::kFloat), tokens.flatten()) +
   output.commitment)
      .backward();
  std::vector<at::Tensor> values = {output.out.to(at::kFloat), output.commitment};
  for (const at::Tensor& parameter : model->parameters()) {
    values.push_back(parameter.grad().defined() ? parameter.grad().clone()
                                                : ::torch::zeros_like(parameter));
  }
  return values;
}

LanguageModel make_model(const char* spec, bool bias, bool recompute) {
  LanguageModelOptions options;
  options.tied = false;
  options.transformer.dim = 32;
  options.transformer.heads = 4;
  options.transformer.attention = {AttentionSpec::parse(spec)};
  options.transformer.causal = std::string(spec).find("cast") == std::string::npos;
  options.transformer.bias = bias;
  options.transformer.recompute = recompute;
  ::torch::manual_seed(3);
  return LanguageModel(options);
}

// A model of every kind of head group, with and without biases, lengths and recomputation. One
// cluster: with several, rows that are rounded differently may choose another one. commitment=1
// lets its gradient count.
TEST(BlockOps, FusedModelsEqualOthersUpToRounding) {
  for (const char* spec : {"full", "local(window=8)", "2*local(window=8)+2*full(positions=none)",
                           "2*local(window=8)+2*routing(clusters=1,window=8,commitment=1)",
                           "2*full+2*routing(clusters=1,window=8,share_qk=false,commitment=1)",
                           "cast(clusters=1,size=40)", "full(positions=relative)"}) {
    for (const bool bias : {true, false}) {
      for (const bool recompute : {false, true}) {
        LanguageModel model = make_model(spec, bias, recompute);
        const at::Tensor tokens = ::torch::randint(0, 256, {3, 40});
        PassContext context;
        if (recompute) context.lengths = ::torch::tensor({40L, 17L, 33L});
        const auto fused = values_of(model, true, tokens, context);
        const auto plain = values_of(model, false, tokens, context);
        double largest = 0;  // gradient
        for (std::size_t i = 2; i < plain.size(); ++i) {
          largest = std::max(largest, plain[i].abs().max().item<double>());
        }
        for (std::size_t i = 0; i < plain.size(); ++i) {
          // bf16 has 8 bits; its rounding at different places grows through two layers. Gradients
          // of the keys' biases are 0 but for rounding.
          const double size = plain[i].abs().max().item<double>();
          EXPECT_LE((fused[i] - plain[i]).abs().max().item<double>(), 0.06 * size + 0.003 * largest)
              << spec << " bias " << bias << " recompute " << recompute << " value " << i;
        }
      }
    }
  }
}

// Recomputed layers exchange sums and branches like others.
TEST(BlockOps, FusedModelsHaveTheSameBitsWhenRecomputed) {
  for (const char* spec : {"full", "2*local(window=8)+2*routing(clusters=4,window=8)"}) {
    const at::Tensor tokens = ::torch::randint(0, 256, {3, 40});
    LanguageModel kept = make_model(spec, true, false), recomputed = make_model(spec, true, true);
    const auto a = values_of(kept, true, tokens, {}), b = values_of(recomputed, true, tokens, {});
    for (std::size_t i = 0; i < a.size(); ++i) {
      EXPECT_TRUE(::torch::equal(a[i], b[i])) << spec << " value " << i;
    }
  }
}

// The clusters that a pass found serve its statistics.
TEST(BlockOps, FusedModelsHaveTheStatisticsOfTheirRecords) {
  const FusedOnCpu fused(true);
  for (const char* spec : {"2*local(window=8)+2*routing(clusters=4,window=8)",
                           "2*full+2*routing(clusters=4,window=8,share_qk=false)",
                           "4*routing(clusters=4,window=8,causal=paper)"}) {
    for (const bool recompute : {false, true}) {
      LanguageModel model = make_model(spec, true, recompute);
      std::vector<AttentionRecord> records;
      StepStatistics found, expected;
      PassContext context;
      context.records = &records;
      context.statistics = &found;
      PassOutput output;
      {
        const Autocast autocast;
        output = model->forward(::torch::randint(0, 256, {3, 40}), context);
      }
      output.out.sum().backward();
      model->transformer()->add_statistics(records, expected);
      ASSERT_EQ(found.size(), 2u);
      for (const auto& [place, own] : expected) {
        EXPECT_TRUE(::torch::equal(found[place].queries.members, own.queries.members)) << spec;
        EXPECT_TRUE(::torch::equal(found[place].queries.sums, own.queries.sums)) << spec;
        ASSERT_EQ(found[place].keys.sums.defined(), own.keys.sums.defined());
        if (own.keys.sums.defined()) {
          EXPECT_TRUE(::torch::equal(found[place].keys.sums, own.keys.sums)) << spec;
        }
      }
    }
  }
}

TEST(BlockOps, FusedModelsRepeatTheirBits) {
  LanguageModel model =
      make_model("2*local(window=8)+2*routing(clusters=4,window=8)", true, /*recompute=*/false);
  const at::Tensor tokens = ::torch::randint(0, 256, {3, 40});
  const auto first = values_of(model, true, tokens, {}), again = values_of(model, true, tokens, {});
  for (std::size_t i = 0; i < first.size(); ++i) {
    EXPECT_TRUE(::torch::equal(first[i], again[i])) << "value " << i;
  }
}

}  // namespace
}  // namespace coterie::torch_api
