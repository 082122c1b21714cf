// SPDX-License-Identifier: MIT
// The torch interface: outputs and gradients have the same bits as the core's.
#include "coterie/torch/functional.h"

#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include "tensors.h"
#include "tests/support/tensors.h"

namespace coterie::torch_api {
namespace {

using ::torch::autograd::grad;

at::Tensor normal(at::IntArrayRef sizes, at::ScalarType type = at::kFloat) {
  return at::randn(sizes, at::TensorOptions(type));
}

// One test for all cases: ctest starts a process per test, and torch takes a second to load.
TEST(Door, GivesTheOutputAndTheSelectionOfTheCore) {
  for (const cases::Case& c : cases::all()) {
    SCOPED_TRACE(c.name);
    const cases::Problem problem = cases::make_problem(c, 5);
    const cases::Pass core = cases::run_forward(problem);
    const TorchProblem torch(problem);
    EXPECT_TRUE(at::equal(torch.attend(), tensor_on(core.result.out)));
    const AttentionDetails details =
        attention_details(torch.q, torch.k, torch.v, torch.mechanism, torch.options);
    ASSERT_EQ(details.selection_count, core.selection_count);
    for (std::size_t i = 0; i < details.selection_count; ++i) {
      EXPECT_TRUE(at::equal(details.saved[i].tensor, tensor_on(core.result.saved[i])))
          << details.saved[i].name;
    }
  }
}

void expect_gradient(const char* name, const at::Tensor& input, const TensorView& core) {
  if (!core.present()) return;
  ASSERT_TRUE(input.grad().defined()) << name;
  EXPECT_TRUE(at::equal(input.grad(), tensor_on(core))) << name;
}

TEST(Door, GivesTheGradientsOfTheCore) {
  for (const cases::Case& c : cases::all()) {
    SCOPED_TRACE(c.name);
    const cases::Problem problem = cases::make_problem(c, 6);
    cases::Pass core = cases::run_forward(problem);
    cases::run_backward(problem, core);
    const TorchProblem torch(problem);
    torch.require_gradients();
    torch.attend().backward(torch.grad_out);
    expect_gradient("dq", torch.q, core.gradients.dq);
    expect_gradient("dk", torch.k, core.gradients.dk);
    expect_gradient("dv", torch.v, core.gradients.dv);
    expect_gradient("dcentroids", torch.options.centroids, core.gradients.dcentroids);
    expect_gradient("dgate", torch.options.gate, core.gradients.dgate);
    expect_gradient("dlogit_scale", torch.options.logit_scale, core.gradients.dlogit_scale);
  }
}

TEST(FullAttention, IsThatOfTorch) {
  for (const bool causal : {false, true}) {
    const at::Tensor q = normal({2, 4, 65, 32}).requires_grad_();
    const at::Tensor k = normal({2, 2, 65, 32}).requires_grad_();
    const at::Tensor v = normal({2, 2, 65, 16}).requires_grad_();
    const at::Tensor grad_out = normal({2, 4, 65, 16});
    const at::Tensor ours = attention(q, k, v, FullParams{}, {.causal = causal});
    const at::Tensor theirs =
        at::scaled_dot_product_attention(q, k, v, {}, 0.0, causal, {}, /*enable_gqa=*/true);
    EXPECT_TRUE(at::allclose(ours, theirs, 1e-4, 1e-5));
    const auto our_gradients = grad({ours}, {q, k, v}, {grad_out});
    const auto their_gradients = grad({theirs}, {q, k, v}, {grad_out});
    for (std::size_t i = 0; i < 3; ++i) {
      EXPECT_TRUE(at::allclose(our_gradients[i], their_gradients[i], 1e-4, 1e-5)) << i;
    }
  }
}

TEST(FullAttention, TakesMasksThatBroadcast) {
  const at::Tensor q = normal({2, 3, 10, 8}), k = normal({2, 3, 12, 8}), v = normal({2, 3, 12, 8});
  const at::Tensor mask = normal({2, 1, 1, 12}) > -1.0;
  const at::Tensor ours = attention(q, k, v, FullParams{}, {.mask = mask});
  EXPECT_TRUE(at::allclose(ours, at::scaled_dot_product_attention(q, k, v, mask), 1e-4, 1e-5));
}

TEST(Layout, TokensBeforeHeadsStayWhereTheyAre) {
  const at::Tensor x =
      normal({2, 33, 3, 4, 16});  // (B, N, qkv, H, D), as one projection returns it
  const auto part = [&](int i) { return x.select(2, i).transpose(1, 2).detach().requires_grad_(); };
  const at::Tensor q = part(0), k = part(1), v = part(2);
  EXPECT_EQ(with_contiguous_rows(q).data_ptr(), q.data_ptr());
  const at::Tensor out = attention(q, k, v, mechanism_of("local(window=8)"));
  EXPECT_TRUE(out.transpose(1, 2).is_contiguous());
  const at::Tensor dq = grad({out}, {q}, {normal({2, 4, 33, 16})})[0];
  EXPECT_TRUE(dq.transpose(1, 2).is_contiguous());
  const at::Tensor dense =
      attention(q.contiguous(), k.contiguous(), v.contiguous(), mechanism_of("local(window=8)"));
  EXPECT_TRUE(dense.is_contiguous());
  EXPECT_TRUE(at::equal(out, dense));
}

TEST(Layout, ColumnsAreMadeRows) {
  const at::Tensor q = normal({1, 2, 16, 9}).transpose(2, 3).requires_grad_();  // D = 16 strided
  const at::Tensor k = normal({1, 2, 9, 16}), v = normal({1, 2, 9, 16});
  const at::Tensor out = attention(q, k, v, FullParams{});
  EXPECT_TRUE(at::equal(out, attention(q.contiguous(), k, v, FullParams{})));
  out.sum().backward();
  EXPECT_EQ(q.grad().sizes(), q.sizes());
}

// Every input as a view that is negated when it is read, as the imaginary part of a conjugate is.
TEST(Layout, NegatedViewsCountAsTheirValues) {
  for (const cases::Case& c : cases::all()) {
    SCOPED_TRACE(c.name);
    const cases::Problem problem = cases::make_problem(c, 7);
    TorchProblem plain(problem), negated(problem);
    AttentionOptions& options = negated.options;
    for (at::Tensor* tensor :
         {&negated.q, &negated.k, &negated.v, &negated.grad_out, &options.centroids, &options.gate,
          &options.logit_scale, &options.q_lengths, &options.k_lengths, &options.cu_seqlens_q,
          &options.cu_seqlens_k}) {
      if (tensor->defined()) *tensor = at::_neg_view(tensor->neg());
    }
    plain.require_gradients();
    negated.require_gradients();
    const at::Tensor wanted = plain.attend(), got = negated.attend();
    EXPECT_TRUE(at::equal(got, wanted));
    const std::vector<at::Tensor> ours = grad({got}, negated.differentiable(), {negated.grad_out});
    const std::vector<at::Tensor> theirs = grad({wanted}, plain.differentiable(), {plain.grad_out});
    for (std::size_t i = 0; i < theirs.size(); ++i) EXPECT_TRUE(at::equal(ours[i], theirs[i])) << i;
  }
}

TEST(Options, IntegersOfAnyKindAreLengths) {
  const at::Tensor q = normal({2, 2, 20, 8});
  const at::Tensor lengths = at::tensor({20, 11}, at::kLong);
  const AttentionOptions options{.q_lengths = lengths, .k_lengths = lengths};
  const at::Tensor out = attention(q, q, q, FullParams{}, options);
  EXPECT_TRUE(at::equal(out.select(0, 1).slice(1, 11), at::zeros({2, 9, 8})));
  const AttentionOptions real{.q_lengths = lengths.to(at::kFloat), .k_lengths = lengths};
  EXPECT_THROW(attention(q, q, q, FullParams{}, real), Error);
}

TEST(Options, StateOfAShorterTypeIsWidened) {
  const at::Tensor q = normal({1, 2, 32, 8}, at::kBFloat16);
  const at::Tensor centroids = normal({2, 4, 8}, at::kBFloat16).requires_grad_();
  const at::Tensor gate = normal({1, 32}, at::kBFloat16).requires_grad_();
  const AttentionOptions options{.centroids = centroids, .gate = gate};
  attention(q, q, q, mechanism_of("cast(clusters=4,size=8)"), options).sum().backward();
  EXPECT_EQ(centroids.grad().scalar_type(), at::kBFloat16);
  EXPECT_EQ(gate.grad().scalar_type(), at::kBFloat16);
}

// A spec of several groups gives each of them its heads, its mask and its state.
TEST(Groups, HaveTheBitsOfTheirMechanisms) {
  const at::Tensor q = normal({2, 6, 21, 8}).requires_grad_(), k = normal({2, 2, 21, 8}),
                   v = normal({2, 3, 21, 8});
  const at::Tensor centroids = normal({1, 3, 8});
  const at::Tensor out =
      attention(q, k, v, "2*full+2*lsh(rounds=2,chunk=8,buckets=4)+2*routing(clusters=3,window=6)",
                {.state = {{}, {}, {.centroids = centroids}}, .causal = true, .seed = 3});
  const auto heads = [](const at::Tensor& all, std::int64_t first, std::int64_t count) {
    return all.narrow(1, first, count);
  };
  const at::Tensor expected =
      at::cat({attention(heads(q, 0, 2), heads(k, 0, 1), heads(v, 0, 1), "full", {.causal = true}),
               attention(heads(q, 2, 2), {}, heads(v, 1, 1), "lsh(rounds=2,chunk=8,buckets=4)",
                         {.causal = true, .seed = 3}),
               attention(heads(q, 4, 2), heads(k, 1, 1), heads(v, 2, 1),
                         "routing(clusters=3,window=6)", {.centroids = centroids, .causal = true})},
              1);
  EXPECT_TRUE(at::equal(out, expected));
  EXPECT_TRUE(at::equal(grad({out.sum()}, {q})[0], grad({expected.sum()}, {q})[0]));

  const at::Tensor rows = normal({2, 4, 9, 8}), mask = normal({2, 4, 9, 9}) > 0;
  EXPECT_TRUE(at::equal(
      attention(rows, rows, rows, "2*full+2*oracle-top(topk=9)", {.mask = mask}).narrow(1, 2, 2),
      attention(heads(rows, 2, 2), heads(rows, 2, 2), heads(rows, 2, 2), "oracle-top(topk=9)",
                {.mask = heads(mask, 2, 2)})));
}

TEST(Groups, RefuseWhatDoesNotFit) {
  const at::Tensor q = normal({1, 4, 8, 4});
  const auto refusal = [&](const char* spec, const AttentionOptions& options = {}) {
    return test::error_of([&] { attention(q, q, q, spec, options); });
  };
  EXPECT_NE(refusal("2*full+2*lsh").find("expected k with 2 heads"), std::string::npos);
  EXPECT_NE(refusal("full(positions=rotary)").find("without positions"), std::string::npos);
  EXPECT_NE(refusal("2*full+2*local(window=2)", {.state = {{}}}).find("for 2 head groups; got 1"),
            std::string::npos);
}

TEST(Refusals, AreThoseOfTheCore) {
  const at::Tensor q = normal({1, 2, 8, 4});
  const auto refusal = [&](const at::Tensor& k, const std::string& spec,
                           const AttentionOptions& options = {}) {
    return test::error_of([&] { attention(q, k, q, mechanism_of(spec), options); });
  };
  EXPECT_NE(refusal({}, "full").find("expected k"), std::string::npos);
  EXPECT_NE(refusal(normal({1, 2, 8, 5}), "full").find("expected k of shape"), std::string::npos);
  EXPECT_NE(refusal(q, "full", {.centroids = q[0]}).find("centroids is only used by"),
            std::string::npos);
  EXPECT_NE(refusal(q, "clustered(clusters=2)", {.causal = true}).find("causal"),
            std::string::npos);
  EXPECT_NE(refusal(q.to(at::kLong), "full").find("type"), std::string::npos);
}

TEST(Refusals, AreWhatTheDoorCannotHonour) {
  const at::Tensor q = normal({1, 2, 8, 4});
  EXPECT_THROW(attention(q, q.clone(), q, LshParams{}), Error);
  EXPECT_THROW(attention(q, q.detach(), q, LshParams{}), Error);
  EXPECT_NO_THROW(attention(q, q, q, LshParams{}));
  const AttentionOptions learned{.centroids = normal({2, 2, 4}).requires_grad_()};
  EXPECT_THROW(attention(q, q, q, mechanism_of("routing(clusters=2,window=4)"), learned), Error);
  EXPECT_THROW(attention(q, q, q, FullParams{}, {.mask = normal({8, 8})}), Error);
  EXPECT_THROW(attention({}, q, q, FullParams{}), Error);
  EXPECT_THROW(attention(q, q, {}, FullParams{}), Error);
  EXPECT_THROW(attention_details(q, q, q, FullParams{}).get("labels"), Error);
}

}  // namespace
}  // namespace coterie::torch_api
