// SPDX-License-Identifier: MIT
// Perturbs the future: rows up to a position keep their bits when everything after it changes.
// Modes that are labelled as leaking do leak.
#include <gtest/gtest.h>

#include "cases/problem.h"
#include "coterie/random.h"
#include "tests/support/expect.h"

namespace coterie {
namespace {

using cases::Case;
using cases::Pass;
using cases::Problem;

using Index = std::int64_t;

// Writes other, large values to the rows after position t.
void change_future(const TensorView& tensor, Index t, std::uint64_t seed) {
  if (!tensor.present()) return;
  const RandomStream stream{seed, RandomUse::data, 77};
  fill(tensor.narrowed(2, t + 1, tensor.size(2) - t - 1),
       [&](Index at) { return 10.0 * random_normal(stream, static_cast<std::uint64_t>(at)); });
}

// Whether rows 0 .. t of out have the same bits in both.
::testing::AssertionResult same_past(const Pass& a, const Pass& b, Index t) {
  return test::same_bits(a.result.out.narrowed(2, 0, t + 1), b.result.out.narrowed(2, 0, t + 1));
}

Case causal_case(const std::string& spec, DType dtype) {
  Case c{.spec = spec, .H = 4, .Hkv = 2, .N = 200, .Dk = 16, .causal = true};
  c.dtype = dtype;
  return c;
}

TEST(CausalityTest, StrictModesDoNotSeeTheFuture) {
  for (const char* spec :
       {"full", "local(window=16)", "local(window=16,kind=blocked)", "strided(stride=5)",
        "oracle-top(topk=7)", "routing(clusters=5,window=9)",
        "routing(clusters=5,window=150,queries_in=2)", "routing(clusters=5,window=9,share_qk=true)",
        "routing(clusters=5,window=150,share_qk=true,self=keep)",
        "routing(clusters=5,window=9,include_self=true,self=demote)"}) {
    for (DType dtype : {DType::f32, DType::bf16}) {
      const Case c = causal_case(spec, dtype);
      const Problem problem = cases::make_problem(c, 1);
      EXPECT_FALSE(leaks_future(problem.mechanism, true)) << spec;
      const Pass before = cases::run_forward(problem);
      for (Index t : {0, 1, 63, 64, 100, 127, 128, 150, 198}) {
        SCOPED_TRACE(std::string(spec) + " at " + std::to_string(t));
        const Problem changed = cases::make_problem(c, 1);
        for (const TensorView& tensor : {changed.inputs.q, changed.inputs.k, changed.inputs.v}) {
          change_future(tensor, t, 5);
        }
        const Pass after = cases::run_forward(changed);
        EXPECT_TRUE(same_past(before, after, t));
        // In all of these modes the last saved tensor is the rows' lse.
        EXPECT_TRUE(test::same_bits(before.result.saved.back().narrowed(2, 0, t + 1),
                                    after.result.saved.back().narrowed(2, 0, t + 1)));
      }
    }
  }
}

// The outputs of a prefix do not change when the sequence grows. Decoding relies on this.
TEST(CausalityTest, StrictModesExtendASequenceWithoutChangingIt) {
  for (const char* spec :
       {"full", "local(window=16)", "strided(stride=5)", "oracle-top(topk=7)",
        "routing(clusters=5,window=9)", "routing(clusters=5,window=9,share_qk=true)"}) {
    const Case c = causal_case(spec, DType::f32);
    const Problem whole = cases::make_problem(c, 2);
    const Pass expected = cases::run_forward(whole);
    for (Index length : {1, 64, 129}) {
      Problem prefix = cases::make_problem(c, 2);
      for (TensorView* tensor : {&prefix.inputs.q, &prefix.inputs.k, &prefix.inputs.v}) {
        if (tensor->present()) *tensor = tensor->narrowed(2, 0, length);
      }
      prefix.grad_out = prefix.grad_out.narrowed(2, 0, length);
      const Pass run = cases::run_forward(prefix);
      EXPECT_TRUE(same_past(run, expected, length - 1)) << spec << " of length " << length;
    }
  }
}

const char* const kLeaking[] = {
    "i-clustered(clusters=5,topk=9,causal=reference)",
    "i-clustered(clusters=5,topk=9,causal=reference,clustering=hamming)",
    "routing(clusters=5,window=20,causal=paper)",
    "routing(clusters=5,window=20,causal=paper,share_qk=true)",
    "lsh(rounds=2,chunk=8,buckets=8)",
    "lsh(rounds=2,chunk=8,buckets=8,combine=mean)",
};

TEST(CausalityTest, LeakingModesLeak) {
  for (const char* spec : kLeaking) {
    const Case c = causal_case(spec, DType::f32);
    bool leaked = false;
    for (std::uint64_t seed = 0; seed < 10 && !leaked; ++seed) {
      const Problem problem = cases::make_problem(c, seed), changed = cases::make_problem(c, seed);
      EXPECT_TRUE(leaks_future(problem.mechanism, true)) << spec;
      change_future(changed.inputs.q, 100, seed);
      change_future(changed.inputs.k, 100, seed);
      leaked = !same_past(cases::run_forward(problem), cases::run_forward(changed), 100);
    }
    EXPECT_TRUE(leaked) << spec << " is labelled as leaking, but no leak was found";
  }
}

// Leaking modes leak through their selection only: values of later tokens do not reach earlier
// rows.
TEST(CausalityTest, LeakingModesDoNotSeeFutureValues) {
  for (const char* spec : kLeaking) {
    const Case c = causal_case(spec, DType::f32);
    const Problem problem = cases::make_problem(c, 3), changed = cases::make_problem(c, 3);
    change_future(changed.inputs.v, 100, 4);
    EXPECT_TRUE(same_past(cases::run_forward(problem), cases::run_forward(changed), 100)) << spec;
  }
}

// Gradients flow back in time only: inputs after t get no gradient from outputs up to t.
TEST(CausalityTest, NoGradientReachesTheFuture) {
  for (const char* spec :
       {"full", "local(window=16)", "strided(stride=5)", "oracle-top(topk=7)",
        "routing(clusters=5,window=9)", "routing(clusters=5,window=9,share_qk=true)",
        "i-clustered(clusters=5,topk=9,causal=reference)",
        "routing(clusters=5,window=20,causal=paper)", "lsh(rounds=2,chunk=8,buckets=8)"}) {
    SCOPED_TRACE(spec);
    const Problem problem = cases::make_problem(causal_case(spec, DType::f32), 4);
    const Index t = 100;
    fill(problem.grad_out.narrowed(2, t + 1, 99), [](Index) { return 0.0; });
    Pass run = cases::run_forward(problem);
    cases::run_backward(problem, run);
    for (const TensorView& gradient : {run.gradients.dq, run.gradients.dk, run.gradients.dv}) {
      if (!gradient.present()) continue;
      for (double value : read_values(gradient.narrowed(2, t + 1, 99))) ASSERT_EQ(value, 0.0);
    }
  }
}

}  // namespace
}  // namespace coterie
