// SPDX-License-Identifier: MIT
// Every gradient against finite differences in double, selections held fixed.
//
// With central differences D(h) = (L(x+h) - L(x-h)) / 2h the quotient S(h) = (4 D(h) - D(2h)) / 3
// has a truncation error of c h^4, so S(2h) - S(h) = 15 c h^4 exceeds it for smooth L. A value of L
// is a sum of terms of total size A, computed with a relative error of about 64 roundings of u =
// 2^-53 each; in S(h) this becomes (4/3 + 1/6) 64 u A / h. The two together bound |S(h) -
// gradient|.
#include <gtest/gtest.h>

#include <functional>

#include "tests/ref/support.h"

namespace coterie::ref {
namespace {

using cases::Case;
using cases::Lengths;

constexpr double kStep = 1.0 / 1024;

// sum(out * grad_out); padding has no gradient, and its output must be 0.
double inner_product(const std::vector<double>& out, const std::vector<double>& grad_out) {
  double sum = 0.0;
  for (std::size_t i = 0; i < out.size(); ++i) {
    if (std::isnan(grad_out[i])) {
      EXPECT_EQ(out[i], 0.0) << "padding, element " << i;
    } else {
      sum += out[i] * grad_out[i];
    }
  }
  return sum;
}

double sum_of_sizes(const std::vector<double>& out, const std::vector<double>& grad_out) {
  double sum = 0.0;
  for (std::size_t i = 0; i < out.size(); ++i)
    if (!std::isnan(grad_out[i])) sum += (1.0 + std::abs(out[i])) * std::abs(grad_out[i]);
  return sum;
}

struct Quotient {
  double value = 0.0, bound = 0.0;
};

Quotient difference_quotient(const std::function<double()>& loss, double size, double& x) {
  const double at = x;
  const auto central = [&](double h) {
    x = at + h;
    const double above = loss();
    x = at - h;
    const double below = loss();
    x = at;
    return (above - below) / (2 * h);
  };
  const double d1 = central(kStep), d2 = central(2 * kStep), d4 = central(4 * kStep);
  const double fine = (4 * d1 - d2) / 3, coarse = (4 * d2 - d4) / 3;
  const double rounding = 1.5 * 64 * std::ldexp(1.0, -53) * size / kStep;
  return {.value = fine, .bound = std::abs(coarse - fine) + rounding};
}

// Compares `gradient` with the derivative of loss by each element of a contiguous f64 tensor.
void check_gradient(const std::function<double()>& loss, double size, const TensorView& x,
                    const std::vector<double>& gradient) {
  ASSERT_EQ(static_cast<std::int64_t>(gradient.size()), x.count());
  auto* values = static_cast<double*>(x.data);
  double largest = 0.0;
  for (std::size_t i = 0; i < gradient.size(); ++i) {
    if (std::isnan(values[i])) {
      EXPECT_EQ(gradient[i], 0.0) << "padding, element " << i;
      continue;
    }
    const Quotient quotient = difference_quotient(loss, size, values[i]);
    EXPECT_NEAR(gradient[i], quotient.value, quotient.bound) << "element " << i;
    EXPECT_LT(quotient.bound, 1e-5 * size) << "the bound is too loose at element " << i;
    largest = std::max(largest, std::abs(gradient[i]));
  }
  EXPECT_GT(largest, 100 * 1e-11 * size) << "all gradients are 0 within rounding";
}

void check_all_gradients(const Selected& selected, const std::function<double()>& loss) {
  const AttentionInputs& inputs = selected.problem.inputs;
  const Gradients<double> gradients = selected.backward();
  const double size = sum_of_sizes(selected.attend(), read_values(selected.problem.grad_out));
  const auto check = [&](const char* name, const TensorView& x, const std::vector<double>& dx) {
    if (dx.empty()) return;
    SCOPED_TRACE(name);
    check_gradient(loss, size, x, dx);
  };
  check("dq", inputs.q, gradients.dq);
  check("dk", inputs.k, gradients.dk);
  check("dv", inputs.v, gradients.dv);
  check("dcentroids", inputs.centroids, gradients.dcentroids);
  check("dlogit_scale", inputs.logit_scale, gradients.dlogit_scale);
  const auto* cast = std::get_if<CastParams>(&selected.problem.mechanism);
  if (cast != nullptr && cast->gate_scale) check("dgate", inputs.gate, gradients.dgate);
}

// Four items, one of them without queries and, in cross-attention, one without keys; two query
// heads per key head; all sizes different.
Case small(const char* name, const char* spec) {
  return {.name = name,
          .spec = spec,
          .B = 4,
          .H = 2,
          .Hkv = 1,
          .N = 9,
          .S = 9,
          .Dk = 4,
          .Dv = 3,
          .lengths = Lengths::padded,
          .dtype = DType::f64};
}

Case masked(Case c) {
  c.mask = true;
  return c;
}

Case with_logit_scale(Case c) {
  c.logit_scale = true;
  return c;
}

Case packed(Case c) {
  c.B = 1;
  c.N = c.S = 16;
  c.lengths = Lengths::packed;
  return c;
}

Case with_scale(Case c, double scale) {
  c.scale = scale;
  return c;
}

std::vector<Case> positional_cases() {
  return {
      small("full", "full"),
      causal(cross(small("full_causal_prefix", "full"), 6, 9)),
      causal(masked(cross(small("full_masked", "full"), 9, 7))),
      packed(small("full_packed", "full")),
      cross(small("local_sliding", "local(window=4)"), 8, 9),
      causal(small("local_sliding_causal", "local(window=3)")),
      small("local_blocked", "local(window=2,kind=blocked)"),
      causal(cross(small("local_blocked_causal", "local(window=2,kind=blocked)"), 7, 9)),
      cross(small("strided", "strided(stride=3)"), 8, 9),
      causal(small("strided_causal", "strided(stride=3)")),
      masked(small("oracle_top", "oracle-top(topk=3)")),
      causal(cross(small("oracle_top_causal", "oracle-top(topk=3)"), 6, 9)),
  };
}

std::vector<Case> clustered_cases() {
  return {
      cross(small("clustered", "clustered(clusters=3)"), 9, 8),
      with_scale(small("clustered_scale", "clustered(clusters=3,clustering=hamming)"), 0.7),
      packed(small("clustered_packed", "clustered(clusters=2,clustering=hamming-keys)")),
      cross(small("i_clustered", "i-clustered(clusters=3,topk=3)"), 9, 8),
      packed(small("i_clustered_packed", "i-clustered(clusters=2,topk=2)")),
      cross(small("i_clustered_all_keys", "i-clustered(clusters=3,topk=99)"), 8, 9),
      small("i_clustered_reference", "i-clustered(clusters=3,topk=4,causal=reference)"),
      cross(
          small("i_clustered_reference_prefix", "i-clustered(clusters=3,topk=4,causal=reference)"),
          6, 9),
      small("clustered_near", "clustered(clusters=3,near=2)"),
      packed(small("clustered_near_packed", "clustered(clusters=2,near=1)")),
      small("i_clustered_near", "i-clustered(clusters=3,topk=3,near=2)"),
      with_scale(packed(small("i_clustered_near_packed", "i-clustered(clusters=2,topk=2,near=3)")),
                 0.7),
  };
}

std::vector<Case> lsh_cases() {
  return {
      small("lsh_lse", "lsh(rounds=3,chunk=2,buckets=4)"),
      small("lsh_lse_two_chunks", "lsh(rounds=2,chunk=5,buckets=4)"),
      causal(small("lsh_lse_causal", "lsh(rounds=2,chunk=2,buckets=4)")),
      small("lsh_mean", "lsh(rounds=3,chunk=2,buckets=4,combine=mean)"),
      causal(packed(small("lsh_mean_causal", "lsh(rounds=2,chunk=2,buckets=4,combine=mean)"))),
  };
}

std::vector<Case> routing_cases() {
  return {
      cross(small("routing_top", "routing(clusters=3,window=4)"), 9, 8),
      with_logit_scale(small("routing_top_shared", "routing(clusters=3,window=4,share_qk=true)")),
      small("routing_top_shared_keep", "routing(clusters=3,window=4,share_qk=true,self=keep)"),
      small("routing_top_demote", "routing(clusters=3,window=4,self=demote)"),
      cross(small("routing_paper", "routing(clusters=3,window=4,causal=paper)"), 6, 9),
      small("routing_paper_shared", "routing(clusters=3,window=4,causal=paper,share_qk=true)"),
      with_logit_scale(
          cross(small("routing_balanced", "routing(clusters=3,membership=balanced)"), 9, 8)),
      small("routing_balanced_shared", "routing(clusters=3,membership=balanced,share_qk=true)"),
      with_scale(packed(small("routing_strict", "routing(clusters=3,window=2,causal=strict)")),
                 0.5),
      small("routing_strict_shared", "routing(clusters=3,window=3,causal=strict,share_qk=true)"),
      with_scale(with_logit_scale(small("routing_strict_two",
                                        "routing(clusters=4,window=2,causal=strict,queries_in=2)")),
                 0.6),
      with_logit_scale(
          small("routing_strict_shared_two",
                "routing(clusters=3,window=2,causal=strict,queries_in=2,share_qk=true,self=keep)")),
      small("routing_strict_self", "routing(clusters=4,window=2,causal=strict,include_self=true)"),
      small("routing_strict_self_demote",
            "routing(clusters=3,window=2,causal=strict,include_self=true,self=demote)"),
  };
}

std::vector<Case> cast_cases() {
  return {
      small("cast", "cast(clusters=3,size=3)"),
      small("cast_per_head", "cast(clusters=3,size=4,heads=separate)"),
      small("cast_single", "cast(clusters=3,size=4,mode=single)"),
      small("cast_empty_clusters", "cast(clusters=6,size=9,mode=single)"),
      packed(small("cast_no_gate", "cast(clusters=2,size=3,gate_scale=false)")),
      small("cast_laplace", "cast(clusters=3,size=3,activation=laplace)"),
      with_scale(small("cast_laplace_single",
                       "cast(clusters=3,size=4,mode=single,activation=laplace,gate_scale=false)"),
                 0.3),
  };
}

class GradientTest : public testing::TestWithParam<Case> {};

TEST_P(GradientTest, AgreesWithFiniteDifferences) {
  const Selected selected = make_selected(GetParam());
  const std::vector<double> grad_out = read_values(selected.problem.grad_out);
  check_all_gradients(selected, [&] { return inner_product(selected.attend(), grad_out); });
}

std::string name_of(const testing::TestParamInfo<Case>& info) { return info.param.name; }

INSTANTIATE_TEST_SUITE_P(Positional, GradientTest, testing::ValuesIn(positional_cases()), name_of);
INSTANTIATE_TEST_SUITE_P(Clustered, GradientTest, testing::ValuesIn(clustered_cases()), name_of);
INSTANTIATE_TEST_SUITE_P(Lsh, GradientTest, testing::ValuesIn(lsh_cases()), name_of);
INSTANTIATE_TEST_SUITE_P(Routing, GradientTest, testing::ValuesIn(routing_cases()), name_of);
INSTANTIATE_TEST_SUITE_P(Cast, GradientTest, testing::ValuesIn(cast_cases()), name_of);

// All of them with dropout, whose factors do not depend on the inputs.
std::vector<Case> dropped_cases(double p) {
  std::vector<Case> dropped;
  for (const auto& cases :
       {positional_cases(), clustered_cases(), lsh_cases(), routing_cases(), cast_cases()})
    for (Case c : cases) {
      c.dropout = p;
      dropped.push_back(c);
    }
  return dropped;
}
INSTANTIATE_TEST_SUITE_P(Dropout10, GradientTest, testing::ValuesIn(dropped_cases(0.1)), name_of);
INSTANTIATE_TEST_SUITE_P(Dropout50, GradientTest, testing::ValuesIn(dropped_cases(0.5)), name_of);

// With mass_grad=false the gradient is that of a function whose masses keep their initial values:
// on top keys the weights are mass p, so multiplying by (initial mass / mass) freezes them.
TEST(FrozenMassGradientTest, AgreesWithFiniteDifferencesAtConstantMass) {
  Case c = small("frozen_mass", "i-clustered(clusters=3,topk=3,mass_grad=false)");
  c.B = c.H = 1;
  c.lengths = Lengths::none;
  c.S = 8;
  const Selected selected = make_selected(c);
  const std::vector<int> labels = indices_of(selected.saved[0]);
  const std::vector<int> top_keys = indices_of(selected.saved[3]);  // (1, 1, 3, 3)
  const auto top_mass = [&](const std::vector<double>& weights, std::int64_t i) {
    double mass = 0.0;
    for (int slot = 0; slot < 3; ++slot) mass += weights[i * c.S + top_keys[labels[i] * 3 + slot]];
    return mass;
  };
  const std::vector<double> first = selected.weights();
  const std::vector<double> grad_out = read_values(selected.problem.grad_out);
  const auto loss = [&] {
    std::vector<double> weights = selected.weights(), out(grad_out.size());
    const std::vector<double> v = read_values(selected.problem.inputs.v);
    for (std::int64_t i = 0; i < c.N; ++i) {
      const double factor = top_mass(first, i) / top_mass(weights, i);
      for (int slot = 0; slot < 3; ++slot)
        weights[i * c.S + top_keys[labels[i] * 3 + slot]] *= factor;
      for (std::int64_t j = 0; j < c.S; ++j)
        for (std::int64_t d = 0; d < c.Dv; ++d)
          out[i * c.Dv + d] += weights[i * c.S + j] * v[j * c.Dv + d];
    }
    return inner_product(out, grad_out);
  };
  check_all_gradients(selected, loss);
}

}  // namespace
}  // namespace coterie::ref
