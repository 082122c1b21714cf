// SPDX-License-Identifier: MIT
// Gradients through torch's autograd graph: finite differences, partial and repeated requests.
#include <ATen/core/grad_mode.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <cmath>

#include "coterie/error.h"
#include "coterie/torch/functional.h"
#include "tensors.h"

namespace coterie::torch_api {
namespace {

using ::torch::autograd::grad;

// Central differences of sum(out * grad_out) for some elements of every input.
void expect_derivatives(const std::string& spec, const std::string& shape) {
  const cases::Problem problem = cases::make_problem(cases::make_case("x", spec, shape), 3);
  const TorchProblem torch(problem);
  torch.require_gradients();
  (torch.attend() * torch.grad_out).sum().backward();
  const auto loss = [&] {
    const at::NoGradGuard no_grad;
    return (torch.attend() * torch.grad_out).sum().item<double>();
  };
  for (const at::Tensor& input : torch.differentiable()) {
    const at::Tensor flat = input.detach().view({-1}), gradient = input.grad().reshape({-1});
    const std::int64_t step = std::max<std::int64_t>(1, flat.numel() / 17);
    for (std::int64_t i = 0; i < flat.numel(); i += step) {
      constexpr double kStep = 1e-6;
      double* const element = flat.data_ptr<double>() + i;
      const double value = *element;
      *element = value + kStep;
      const double above = loss();
      *element = value - kStep;
      const double below = loss();
      *element = value;
      EXPECT_NEAR((above - below) / (2 * kStep), gradient[i].item<double>(), 1e-6)
          << spec << ", an input of shape " << input.sizes() << ", element " << i;
    }
  }
}

TEST(Derivatives, OfFullAttention) { expect_derivatives("full", "N13 D8 H4:2 causal f64"); }
TEST(Derivatives, OfImprovedClusteredAttention) {
  expect_derivatives("i-clustered(clusters=3,topk=4)", "N21 D8 f64");
}
TEST(Derivatives, OfRoutingWithALogitScale) {
  expect_derivatives("routing(clusters=2,window=6)", "N15 D8 logit_scale f64");
}
TEST(Derivatives, OfCastWithSurrogatesAndGate) {
  expect_derivatives("cast(clusters=3,size=6)", "N15 D8 f64");
}

TEST(Gradients, AreComputedForThoseWhoNeedThem) {
  const at::Tensor q = at::randn({1, 2, 9, 4}).requires_grad_(), k = at::randn({1, 2, 9, 4}),
                   v = at::randn({1, 2, 9, 4}).requires_grad_();
  const at::Tensor out = attention(q, k, v, FullParams{});
  const auto only_v = grad({out.sum()}, {v}, {}, /*retain_graph=*/true);
  out.sum().backward();
  EXPECT_TRUE(at::equal(only_v[0], v.grad()));
  EXPECT_TRUE(q.grad().defined());
  EXPECT_FALSE(k.grad().defined());
  EXPECT_FALSE(attention(k, k, k, FullParams{}).requires_grad());
}

TEST(Gradients, OfSharedQueriesAndKeysAreOneSum) {
  const at::Tensor q = at::randn({1, 2, 40, 8}).requires_grad_(), v = at::randn({1, 2, 40, 8});
  attention(q, {}, v, mechanism_of("lsh(rounds=2,chunk=8,buckets=4)")).sum().backward();
  EXPECT_EQ(q.grad().sizes(), q.sizes());
}

TEST(Gradients, AreOfFirstOrder) {
  const at::Tensor q = at::randn({1, 1, 5, 4}).requires_grad_();
  const at::Tensor out = attention(q, q, q, FullParams{});
  EXPECT_THROW(grad({out.sum()}, {q}, {}, true, /*create_graph=*/true), Error);
}

TEST(Gradients, RefuseInputsThatWereChanged) {
  const at::Tensor q = at::randn({1, 1, 5, 4}).requires_grad_();
  const at::Tensor v = at::randn({1, 1, 5, 4});
  const at::Tensor out = attention(q, q, v, FullParams{});
  v.zero_();
  EXPECT_THROW(out.sum().backward(), c10::Error);
}

// Activation checkpointing: the forward pass runs without a graph, and again when gradients are
// needed.
TEST(Recomputation, RepeatsTheSelection) {
  for (const char* spec : {"i-clustered(clusters=5,topk=8)", "lsh(rounds=2,chunk=8,buckets=8)",
                           "i-clustered(clusters=5,topk=8,clustering=hamming)"}) {
    const cases::Problem problem = cases::make_problem(cases::make_case("x", spec, "N113"), 4);
    const TorchProblem torch(problem);
    const auto details = [&] {
      return attention_details(torch.q, torch.k, torch.v, torch.mechanism, torch.options);
    };
    torch.require_gradients();
    AttentionDetails first;
    {
      const at::NoGradGuard no_grad;
      first = details();
    }
    const AttentionDetails again = details();
    EXPECT_FALSE(first.out.requires_grad());
    EXPECT_TRUE(at::equal(first.out, again.out)) << spec;
    for (std::size_t i = 0; i < first.saved.size(); ++i) {
      EXPECT_TRUE(at::equal(first.saved[i].tensor, again.saved[i].tensor)) << spec;
      EXPECT_FALSE(again.saved[i].tensor.requires_grad());
    }
    const auto inputs = torch.differentiable();
    const auto direct = grad({torch.attend()}, inputs, {torch.grad_out});
    const auto recomputed = grad({again.out}, inputs, {torch.grad_out});
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      EXPECT_TRUE(at::equal(direct[i], recomputed[i])) << spec;
    }
  }
}

TEST(Bfloat16, StaysBfloat16AndCloseToFloat) {
  const at::Tensor q = at::randn({2, 2, 50, 16}).to(at::kBFloat16).requires_grad_();
  const at::Tensor out = attention(q, q, q, mechanism_of("i-clustered(clusters=4,topk=50)"));
  EXPECT_EQ(out.scalar_type(), at::kBFloat16);
  const at::Tensor wide = q.detach().to(at::kFloat);
  const at::Tensor exact = at::scaled_dot_product_attention(wide, wide, wide);
  EXPECT_LT((out.to(at::kFloat) - exact).abs().max().item<float>(), 0.03f);
  out.sum().backward();
  EXPECT_EQ(q.grad().scalar_type(), at::kBFloat16);
  EXPECT_TRUE(at::isfinite(q.grad()).all().item<bool>());
}

}  // namespace
}  // namespace coterie::torch_api
