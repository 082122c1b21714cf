// SPDX-License-Identifier: MIT
// An item has the same bits alone, in a padded batch and in a packed batch, forward and backward.
#include <gtest/gtest.h>

#include <cmath>

#include "cases/problem.h"
#include "tests/support/expect.h"
#include "tests/support/tensors.h"

namespace coterie {
namespace {

using cases::Case;
using cases::Pass;
using cases::Problem;

using Index = std::int64_t;

constexpr Index kLength = 113;

// Position of an item in a larger problem.
struct Place {
  Index batch = 0, begin = 0;
};

TensorView part(const TensorView& tensor, const Place& place, int dim) {
  return tensor.narrowed(0, place.batch, 1).narrowed(dim, place.begin, kLength);
}

// A larger problem with the item at `place`; everything else is random or NaN.
Problem surround(const Case& alone_case, const Problem& alone, bool packed, const Place& place) {
  Case c = alone_case;
  c.B = packed ? 1 : 2;
  c.N = c.S = kLength + 51;
  Problem problem = cases::make_problem(c, alone.inputs.seed);
  const auto copy = [&](const TensorView& from, const TensorView& to, int dim) {
    if (!from.present()) return;
    for (Index b = 0; b < c.B && !packed; ++b) {
      const TensorView rest = to.narrowed(0, b, 1).narrowed(dim, kLength, 51);
      fill(rest, [](Index) { return std::nan(""); });
    }
    write_values(part(to, place, dim), read_values(from));
  };
  copy(alone.inputs.q, problem.inputs.q, 2);
  copy(alone.inputs.k, problem.inputs.k, 2);
  copy(alone.inputs.v, problem.inputs.v, 2);
  copy(alone.inputs.gate, problem.inputs.gate, 1);
  copy(alone.grad_out, problem.grad_out, 2);
  Sequences sequences;
  if (packed) {
    problem.storage.push_back(place.begin == 0
                                  ? test::ints({0, kLength, kLength, kLength + 40})
                                  : test::ints({0, static_cast<double>(place.begin),
                                                static_cast<double>(place.begin) + kLength}));
    sequences.cu_seqlens = problem.storage.back();
  } else {
    problem.storage.push_back(place.batch == 0 ? test::ints({kLength, 50})
                                               : test::ints({50, kLength}));
    sequences.lengths = problem.storage.back();
  }
  problem.inputs.q_sequences = problem.inputs.k_sequences = sequences;
  return problem;
}

void expect_same_item(const Case& c, const Pass& alone, bool packed, const Place& place) {
  SCOPED_TRACE(std::string(packed ? "packed" : "padded") +
               (place.batch + place.begin > 0 ? " second" : " first"));
  const Problem original = cases::make_problem(c, 1);
  const Problem problem = surround(c, original, packed, place);
  Pass run = cases::run_forward(problem);
  cases::run_backward(problem, run);
  EXPECT_TRUE(test::same_bits(alone.result.out, part(run.result.out, place, 2)));
  EXPECT_TRUE(test::same_bits(alone.gradients.dq, part(run.gradients.dq, place, 2)));
  EXPECT_TRUE(test::same_bits(alone.gradients.dv, part(run.gradients.dv, place, 2)));
  if (alone.gradients.dk.present()) {
    EXPECT_TRUE(test::same_bits(alone.gradients.dk, part(run.gradients.dk, place, 2)));
  }
  if (alone.gradients.dgate.present()) {
    EXPECT_TRUE(test::same_bits(alone.gradients.dgate, part(run.gradients.dgate, place, 1)));
  }
}

struct Spec {
  const char* text;
  bool causal = false;
  bool random = false;  // random streams per (item, head): equal only at the same item index
};

class PaddingTest : public ::testing::TestWithParam<Spec> {};

TEST_P(PaddingTest, DoesNotChangeABit) {
  for (DType dtype : {DType::f32, DType::bf16}) {
    Case c{.spec = GetParam().text, .B = 1, .H = 4, .Hkv = 2, .N = kLength, .S = kLength, .Dk = 16};
    c.causal = GetParam().causal;
    c.dtype = dtype;
    const Problem problem = cases::make_problem(c, 1);
    Pass alone = cases::run_forward(problem);
    cases::run_backward(problem, alone);
    for (bool packed : {false, true}) {
      expect_same_item(c, alone, packed, {});
      if (GetParam().random) continue;
      expect_same_item(c, alone, packed, packed ? Place{0, 45} : Place{1, 0});
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    Specs, PaddingTest,
    ::testing::Values(
        Spec{"full"}, Spec{"full", true}, Spec{"local(window=9)"}, Spec{"local(window=9)", true},
        Spec{"local(window=16,kind=blocked)"}, Spec{"local(window=16,kind=blocked)", true},
        Spec{"strided(stride=5)"}, Spec{"strided(stride=5)", true}, Spec{"oracle-top(topk=9)"},
        Spec{"oracle-top(topk=150)"}, Spec{"oracle-top(topk=9)", true},
        Spec{"clustered(clusters=7)", false, true}, Spec{"clustered(clusters=130)", false, true},
        Spec{"clustered(clusters=7,clustering=hamming)", false, true},
        Spec{"clustered(clusters=7,clustering=hamming-keys)", false, true},
        Spec{"i-clustered(clusters=7,topk=9)", false, true},
        Spec{"i-clustered(clusters=7,topk=140)", false, true},
        Spec{"i-clustered(clusters=7,topk=9,mass_grad=false)", false, true},
        Spec{"i-clustered(clusters=7,topk=9,causal=reference)", true, true},
        Spec{"clustered(clusters=7,near=8)", false, true},
        Spec{"clustered(clusters=130,near=5)", false, true},
        Spec{"i-clustered(clusters=7,topk=9,near=16)", false, true},
        Spec{"i-clustered(clusters=7,topk=9,near=32)", false, true},
        Spec{"lsh(rounds=2,chunk=8,buckets=8)", false, true},
        Spec{"lsh(rounds=2,chunk=8,buckets=8)", true, true},
        Spec{"lsh(rounds=2,chunk=9,buckets=8,combine=mean)", false, true},
        Spec{"routing(clusters=5,window=20)"}, Spec{"routing(clusters=5,window=140)"},
        Spec{"routing(clusters=5,window=20,share_qk=true)"},
        Spec{"routing(clusters=5,window=20,causal=paper)", true},
        Spec{"routing(clusters=5,membership=balanced)"}, Spec{"routing(clusters=5,window=9)", true},
        Spec{"routing(clusters=5,window=9,share_qk=true)", true},
        Spec{"routing(clusters=5,window=9,queries_in=2,include_self=true)", true},
        Spec{"cast(clusters=5,size=20)"}, Spec{"cast(clusters=5,size=140)"},
        Spec{"cast(clusters=5,size=23,mode=single)"}, Spec{"cast(clusters=5,size=40,mode=single)"},
        Spec{"cast(clusters=5,size=20,heads=separate)"},
        Spec{"cast(clusters=5,size=20,activation=laplace)"}),
    [](const auto& spec) {
      std::string name = spec.param.text;
      for (char& letter : name) {
        if (!std::isalnum(static_cast<unsigned char>(letter))) letter = '_';
      }
      return name + (spec.param.causal ? "_causal" : "");
    });

}  // namespace
}  // namespace coterie
