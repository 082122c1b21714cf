// SPDX-License-Identifier: MIT
#include "train/optimizer.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <set>

#include "coterie/error.h"
#include "train/adafactor.h"

namespace coterie::train {
namespace {

// A module with every kind of parameter name.
struct NamesImpl : ::torch::nn::Module {
  NamesImpl() {
    ::torch::manual_seed(1);
    for (const char* name : {"embedding", "positions", "norm", "out"}) {
      register_module(name, std::make_shared<Holder>(name));
    }
    register_parameter("logit_scale", ::torch::ones({3}));
    register_parameter("surrogates", ::torch::randn({2, 3, 4}));
  }
  struct Holder : ::torch::nn::Module {
    explicit Holder(const std::string& kind) {
      register_parameter("weight", kind == "norm" ? ::torch::ones({4}) : ::torch::randn({5, 4}));
      if (kind == "out") register_parameter("bias", ::torch::zeros({5}));
    }
  };
};
TORCH_MODULE(Names);

// A gradient that changes from step to step and is not symmetric.
void make_gradients(Names& module, int step) {
  ::torch::manual_seed(100 + static_cast<std::uint64_t>(step));
  for (at::Tensor& parameter : module->parameters()) {
    parameter.mutable_grad() = ::torch::randn_like(parameter) * 0.1 + 0.02 * parameter.detach();
  }
}

void run_steps(Names& module, ::torch::optim::Optimizer& optimizer, int first, int last) {
  for (int step = first; step <= last; ++step) {
    make_gradients(module, step);
    set_learning_rate(optimizer, 0.01 * step);
    optimizer.step();
  }
}

OptimizerConfig config_of(const std::string& name) {
  OptimizerConfig config;
  config.name = name;
  return config;
}

TEST(Optimizer, OnlyMatricesDecay) {
  const Names module;
  std::vector<std::string> names;
  for (const auto& item : module->named_parameters()) {
    if (decays(item.key(), item.value())) names.push_back(item.key());
  }
  EXPECT_EQ(names, (std::vector<std::string>{"embedding.weight", "out.weight"}));
  EXPECT_FALSE(decays("layers.0.attention.group_0.relative.bias", ::torch::ones({2, 3})));
  EXPECT_FALSE(decays("layers.0.attention.group_0.relative.weight", ::torch::ones({2, 3})));
}

TEST(Optimizer, WeightDecayPullsOnlyWhatDecays) {
  for (const char* name : {"adamw", "adafactor"}) {
    Names module;
    OptimizerConfig config = config_of(name);
    config.weight_decay = 0.5;
    const auto optimizer = make_optimizer(config, *module);
    set_learning_rate(*optimizer, 0.1);
    std::map<std::string, at::Tensor> before;
    for (const auto& item : module->named_parameters()) {
      before[item.key()] = item.value().detach().clone();
      item.value().mutable_grad() = ::torch::zeros_like(item.value());
    }
    optimizer->step();
    for (const auto& item : module->named_parameters()) {
      const double factor = decays(item.key(), item.value()) ? 0.95 : 1.0;
      EXPECT_TRUE(::torch::allclose(item.value(), before[item.key()] * factor, 1e-6, 1e-7))
          << name << " " << item.key();
    }
  }
}

TEST(Optimizer, ClippingScalesAllGradientsToTheLimit) {
  Names module;
  make_gradients(module, 1);
  double square = 0;
  for (const at::Tensor& p : module->parameters()) {
    square += p.grad().to(at::kDouble).square().sum().item<double>();
  }
  const double norm = std::sqrt(square);
  const auto clipped = [&](double limit) {
    const at::Tensor before = gradient_norm(*module);
    clip_gradients(*module, before, limit);
    return before.item<double>();
  };
  EXPECT_NEAR(clipped(0.0), norm, 1e-6 * norm);
  EXPECT_NEAR(clipped(norm / 2), norm, 1e-6 * norm);
  EXPECT_NEAR(clipped(norm), norm / 2, 1e-6 * norm);  // below the limit: unchanged
  EXPECT_NEAR(clipped(0.0), norm / 2, 1e-6 * norm);
}

TEST(Optimizer, StateComesBackBitByBit) {
  for (const char* name : {"adamw", "adafactor"}) {
    Names straight, resumed;
    const auto optimizer = make_optimizer(config_of(name), *straight);
    run_steps(straight, *optimizer, 1, 3);
    const NamedTensors state = optimizer_tensors(*optimizer, *straight);
    {
      const at::NoGradGuard guard;
      for (const auto& item : straight->named_parameters()) {
        resumed->named_parameters()[item.key()].copy_(item.value());
      }
    }
    run_steps(straight, *optimizer, 4, 6);

    const auto fresh = make_optimizer(config_of(name), *resumed);
    load_optimizer(*fresh, *resumed, state, "here");
    run_steps(resumed, *fresh, 4, 6);
    for (const auto& item : straight->named_parameters()) {
      EXPECT_TRUE(::torch::equal(item.value(), resumed->named_parameters()[item.key()]))
          << name << " " << item.key();
    }
    for (const auto& [key, tensor] : optimizer_tensors(*optimizer, *straight)) {
      EXPECT_TRUE(::torch::equal(tensor, optimizer_tensors(*fresh, *resumed).at(key))) << key;
    }
  }
}

TEST(Optimizer, StateThatDoesNotFitIsRefused) {
  Names module;
  const auto optimizer = make_optimizer(config_of("adamw"), *module);
  run_steps(module, *optimizer, 1, 1);
  const NamedTensors good = optimizer_tensors(*optimizer, *module);
  EXPECT_EQ(good.size(), 3 * module->parameters().size());
  const auto refused = [&](NamedTensors state, const std::string& part) {
    try {
      load_optimizer(*optimizer, *module, state, "x/optimizer");
      ADD_FAILURE() << "not refused: " << part;
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << error.what();
    }
  };
  NamedTensors missing = good;
  missing.erase("out.weight.exp_avg");
  refused(missing, "out.weight.exp_avg is missing in x/optimizer");
  NamedTensors shaped = good;
  shaped["out.weight.exp_avg"] = ::torch::zeros({4, 5});
  refused(shaped, "out.weight.exp_avg");
  NamedTensors foreign = good;
  foreign["other.row"] = ::torch::zeros({4});
  refused(foreign, "other.row");
}

// The formula of adafactor.h in double, for a matrix.
struct ReferenceAdafactor {
  at::Tensor row, column;

  at::Tensor update(const at::Tensor& gradient, int step) {
    const double keep = 1.0 - std::pow(step, -0.8);
    const at::Tensor g = gradient.to(at::kDouble), square = g * g + 1e-30;
    if (!row.defined()) row = ::torch::zeros({g.size(0)}, at::kDouble);
    if (!column.defined()) column = ::torch::zeros({g.size(1)}, at::kDouble);
    row = keep * row + (1 - keep) * square.mean(1);
    column = keep * column + (1 - keep) * square.mean(0);
    const at::Tensor u = g / ::torch::sqrt(::torch::outer(row, column) / row.mean());
    return u / std::max(1.0, u.square().mean().sqrt().item<double>());
  }
};

TEST(Adafactor, FollowsItsFormula) {
  for (const bool relative : {false, true}) {
    Names module;
    OptimizerConfig config = config_of("adafactor");
    config.relative = relative;
    config.weight_decay = 0.1;
    const auto optimizer = make_optimizer(config, *module);
    at::Tensor expected = module->named_parameters()["out.weight"].detach().to(at::kDouble);
    ReferenceAdafactor reference;
    for (int step = 1; step <= 5; ++step) {
      make_gradients(module, step);
      const at::Tensor gradient = module->named_parameters()["out.weight"].grad();
      const double rate = 0.01 * step;
      const double size = expected.square().mean().sqrt().item<double>();
      const double a = relative ? rate * std::max(1e-3, size) : rate;
      expected = expected - a * (reference.update(gradient, step) + 0.1 * expected);
      set_learning_rate(*optimizer, rate);
      optimizer->step();
    }
    // Five steps of a dozen roundings each on values of about 1.
    const at::Tensor got = module->named_parameters()["out.weight"].detach().to(at::kDouble);
    EXPECT_LT((got - expected).abs().max().item<double>(), 60 * 1.2e-7 * 4);
  }
}

TEST(Adafactor, KeepsRowsAndColumnsOfStacksOfMatrices) {
  Names module;
  const auto optimizer = make_optimizer(config_of("adafactor"), *module);
  run_steps(module, *optimizer, 1, 1);
  const NamedTensors state = optimizer_tensors(*optimizer, *module);
  EXPECT_EQ(state.at("surrogates.row").sizes(), (std::vector<std::int64_t>{2, 3}));
  EXPECT_EQ(state.at("surrogates.column").sizes(), (std::vector<std::int64_t>{2, 4}));
  EXPECT_EQ(state.at("logit_scale.second").sizes(), (std::vector<std::int64_t>{3}));
}

// ZeRO-1: every parameter has one owner, and the elements are spread evenly.
TEST(Optimizer, ParametersHaveOneOwnerEach) {
  Names module;
  const std::vector<std::int64_t> owners = parameter_owners(*module, 3);
  ASSERT_EQ(owners.size(), module->parameters().size());
  std::set<std::string> all;
  std::vector<std::int64_t> elements(3);
  for (std::int64_t rank = 0; rank < 3; ++rank) {
    for (const std::string& name : owned_parameters(*module, owners, rank)) {
      EXPECT_TRUE(all.insert(name).second) << name;
      elements[static_cast<std::size_t>(rank)] += module->named_parameters()[name].numel();
    }
  }
  EXPECT_EQ(all.size(), owners.size());
  EXPECT_LE(*std::max_element(elements.begin(), elements.end()) -
                *std::min_element(elements.begin(), elements.end()),
            24);  // the largest parameter
}

// Owners step their parameters as one optimiser over all of them would, bit by bit.
TEST(Optimizer, StepsOfOwnersAreThoseOfOneOptimiser) {
  for (const char* name : {"adamw", "adafactor"}) {
    Names whole, parts;
    const auto all = make_optimizer(config_of(name), *whole);
    run_steps(whole, *all, 1, 3);
    const std::vector<std::int64_t> owners = parameter_owners(*parts, 2);
    NamedTensors state;
    for (std::int64_t rank = 0; rank < 2; ++rank) {
      const std::set<std::string> owned = owned_parameters(*parts, owners, rank);
      Names own;
      const auto optimizer = make_optimizer(config_of(name), *own, &owned);
      run_steps(own, *optimizer, 1, 3);
      state.merge(optimizer_tensors(*optimizer, *own));
      for (const std::string& parameter : owned) {
        EXPECT_TRUE(
            at::equal(own->named_parameters()[parameter], whole->named_parameters()[parameter]));
      }
      // What is saved of all is loaded by its owner.
      const auto loaded = make_optimizer(config_of(name), *own, &owned);
      const NamedTensors stored = optimizer_tensors(*all, *whole);
      load_optimizer(*loaded, *own, tensors_of_parameters(stored, *own, owned), "test");
      for (const auto& [key, tensor] : optimizer_tensors(*loaded, *own)) {
        EXPECT_TRUE(at::equal(tensor, stored.at(key))) << key;
      }
    }
    const NamedTensors stored = optimizer_tensors(*all, *whole);
    ASSERT_EQ(state.size(), stored.size());
    for (const auto& [key, tensor] : stored) EXPECT_TRUE(at::equal(tensor, state.at(key))) << key;
  }
}

}  // namespace
}  // namespace coterie::train
