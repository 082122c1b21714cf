// SPDX-License-Identifier: MIT
// Gradients against central differences of the forward pass itself, in double, with the selection
// held constant.
#include <gtest/gtest.h>

#include <cmath>

#include "cases/problem.h"
#include "coterie/random.h"
#include "tests/support/tolerance.h"

namespace coterie {
namespace {

using cases::Case;
using cases::Pass;
using cases::Problem;

using Index = std::int64_t;

struct Loss {
  double value = 0.0;
  double magnitude = 0.0;  // sum of the terms' absolute values
};

// sum(out * grad_out) for the selection in the pass.
Loss loss_of(const Problem& problem, const Pass& run) {
  attention_attend(problem.mechanism, problem.inputs, run.result, run.workspace);
  const std::vector<double> out = read_values(run.result.out), g = read_values(problem.grad_out);
  Loss loss;
  for (std::size_t i = 0; i < out.size(); ++i) {
    if (out[i] == 0.0) continue;  // padding, where grad_out is NaN
    loss.value += out[i] * g[i];
    loss.magnitude += std::abs(out[i] * g[i]);
  }
  return loss;
}

// d loss / d tensor along a random direction, by central differences of width 2h.
double slope(const Problem& problem, const Pass& run, const TensorView& tensor,
             const std::vector<double>& direction, double h) {
  const std::vector<double> values = read_values(tensor);
  double sides[2] = {};
  for (int side = 0; side < 2; ++side) {
    const double step = side == 0 ? h : -h;
    fill(tensor, [&](Index i) { return values[i] + step * direction[i]; });
    sides[side] = loss_of(problem, run).value;
  }
  write_values(tensor, values);
  return (sides[0] - sides[1]) / (2.0 * h);
}

void expect_slope(const char* name, const Problem& problem, const TensorView& tensor,
                  const TensorView& gradient) {
  if (!tensor.present() || !gradient.present()) return;
  Pass run = cases::prepare(problem);
  attention_select(problem.mechanism, problem.inputs, run.result.saved, run.workspace);
  std::vector<double> direction;
  double expected = 0.0;
  const std::vector<double> values = read_values(gradient);
  const RandomStream stream{99, RandomUse::data, 9};
  for (std::size_t i = 0; i < values.size(); ++i) {
    direction.push_back(random_normal(stream, i));
    expected += direction[i] * values[i];
  }
  const double magnitude = loss_of(problem, run).magnitude;
  // The truncation error is proportional to h^2, so the error of the finer step is a third of the
  // change; the rounding error of the loss is divided by h.
  const double h = 1e-4;
  const double coarse = slope(problem, run, tensor, direction, 2 * h);
  const double fine = slope(problem, run, tensor, direction, h);
  const double rounding = 10.0 * test::ulp(DType::f64, magnitude) / h;
  EXPECT_NEAR(fine, expected, std::abs(coarse - fine) + rounding) << name;
}

class GradientTest : public ::testing::TestWithParam<Case> {};

TEST_P(GradientTest, IsTheSlopeOfTheForwardPass) {
  for (cases::Lengths lengths : {cases::Lengths::none, cases::Lengths::padded}) {
    Case c = GetParam();
    c.lengths = lengths;
    c.B = 3;
    c.dtype = DType::f64;
    SCOPED_TRACE(c.spec);
    const Problem problem = cases::make_problem(c, 12);
    Pass run = cases::run_forward(problem);
    cases::run_backward(problem, run);
    expect_slope("dq", problem, problem.inputs.q, run.gradients.dq);
    expect_slope("dk", problem, problem.inputs.k, run.gradients.dk);
    expect_slope("dv", problem, problem.inputs.v, run.gradients.dv);
    expect_slope("dcentroids", problem, problem.inputs.centroids, run.gradients.dcentroids);
    expect_slope("dgate", problem, problem.inputs.gate, run.gradients.dgate);
    expect_slope("dlogit_scale", problem, problem.inputs.logit_scale, run.gradients.dlogit_scale);
  }
}

Case small(const char* name, const char* spec, bool causal = false) {
  Case c{.name = name, .spec = spec, .H = 4, .Hkv = 2, .N = 23, .Dk = 5, .Dv = 3};
  c.causal = causal;
  c.logit_scale = c.spec.starts_with("routing");
  return c;
}

INSTANTIATE_TEST_SUITE_P(
    Mechanisms, GradientTest,
    ::testing::Values(
        small("full", "full"), small("full_causal", "full", true),
        small("local", "local(window=6)"), small("blocked", "local(window=5,kind=blocked)", true),
        small("strided", "strided(stride=3)"), small("oracle_top", "oracle-top(topk=5)"),
        small("clustered", "clustered(clusters=4)"),
        small("improved", "i-clustered(clusters=4,topk=5)"),
        small("improved_reference", "i-clustered(clusters=4,topk=9,causal=reference)", true),
        small("lsh", "lsh(rounds=2,chunk=4,buckets=4)"),
        small("lsh_causal", "lsh(rounds=2,chunk=4,buckets=4)", true),
        small("lsh_mean", "lsh(rounds=2,chunk=4,buckets=4,combine=mean)"),
        small("routing", "routing(clusters=3,window=7)"),
        small("routing_shared", "routing(clusters=3,window=7,share_qk=true)"),
        small("routing_shared_kept", "routing(clusters=3,window=7,share_qk=true,self=keep)"),
        small("routing_balanced", "routing(clusters=3,membership=balanced)"),
        small("routing_paper", "routing(clusters=3,window=7,causal=paper)", true),
        small("routing_strict", "routing(clusters=3,window=5)", true),
        small("routing_strict_shared", "routing(clusters=3,window=5,share_qk=true)", true),
        small("routing_strict_several",
              "routing(clusters=4,window=3,queries_in=2,include_self=true)", true),
        small("cast", "cast(clusters=3,size=7)"),
        small("cast_single", "cast(clusters=3,size=8,mode=single)"),
        small("cast_separate", "cast(clusters=3,size=7,heads=separate)"),
        small("cast_laplace", "cast(clusters=3,size=7,activation=laplace)"),
        small("cast_without_gate", "cast(clusters=3,size=7,gate_scale=false)")),
    [](const auto& c) { return c.param.name; });

}  // namespace
}  // namespace coterie
