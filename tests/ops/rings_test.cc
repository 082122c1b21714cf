// SPDX-License-Identifier: MIT
// Strict routing in pieces, from single tokens to the whole sequence, against its parallel pass.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "cases/buffers.h"
#include "coterie/attention.h"
#include "coterie/routing.h"
#include "coterie/runtime.h"
#include "coterie/spec.h"
#include "tests/support/expect.h"
#include "tests/support/tensors.h"

namespace coterie {
namespace {

using test::normals;

constexpr std::int64_t B = 2, H = 4, Hkv = 2, N = 29, Dk = 7, Dv = 5;

struct StepCase {
  std::string spec;
  DType dtype = DType::f32;
  bool scaled = true;
  std::vector<std::int64_t> pieces{1};  // tokens per call; the last number repeats
};

struct Decoded {
  HostTensor parallel, out, counts, ring_k, ring_v;
};

// The outputs of the parallel pass and of calls for the pieces.
Decoded decode(const StepCase& c) {
  const auto params = std::get<RoutingParams>(AttentionSpec::parse(c.spec).groups[0].mechanism);
  const DType wide = accumulator_dtype(c.dtype);
  const HostTensor q = normals(c.dtype, {B, H, N, Dk}, 1), k = normals(c.dtype, {B, Hkv, N, Dk}, 2);
  const HostTensor v = normals(c.dtype, {B, Hkv, N, Dv}, 3);
  const HostTensor centroids = normals(wide, {Hkv, params.clusters, Dk}, 4);
  const HostTensor scale = test::tensor_of(wide, {H}, {0.3, -0.5, 0, 1});
  const auto inputs_of = [&](std::int64_t first, std::int64_t count) {
    AttentionInputs inputs;
    inputs.q = q.view().narrowed(2, first, count);
    if (!params.shared()) inputs.k = k.view().narrowed(2, first, count);
    inputs.v = v.view().narrowed(2, first, count);
    inputs.centroids = centroids;
    if (c.scaled) inputs.logit_scale = scale;
    inputs.causal = true;
    return inputs;
  };
  const cases::Buffers buffers(params, inputs_of(0, N));
  attention_forward(params, inputs_of(0, N), buffers.result(), buffers.workspace());
  const std::int64_t heads = params.shared() ? H : Hkv, slots = params.clusters * params.window;
  Decoded decoded{HostTensor(c.dtype, {B, H, N, Dv}), HostTensor(c.dtype, {B, H, N, Dv}),
                  HostTensor(DType::i64, {B, heads, params.clusters}),
                  HostTensor(wide, {B, heads, slots, Dk}), HostTensor(wide, {B, heads, slots, Dv})};
  write_values(decoded.parallel, read_values(buffers.result().out));
  std::size_t piece = 0;
  for (std::int64_t n = 0; n < N;) {
    const std::int64_t count = std::min(N - n, c.pieces[std::min(piece++, c.pieces.size() - 1)]);
    const AttentionInputs inputs = inputs_of(n, count);
    const HostTensor memory(DType::u8, {routing_step_workspace_bytes(params, inputs)});
    routing_step(params, inputs, {decoded.ring_k, decoded.ring_v, decoded.counts},
                 decoded.out.view().narrowed(2, n, count),
                 {memory.view().data, memory.view().count(), nullptr});
    n += count;
  }
  return decoded;
}

double tolerance(DType dtype) {
  if (dtype == DType::f64) return 1e-13;
  if (dtype == DType::f32) return 1e-5;
  return dtype == DType::bf16 ? 1.0 / 64 : 1.0 / 512;
}

void expect_parallel(const StepCase& c) {
  const Decoded decoded = decode(c);
  const std::vector<double> expected = read_values(decoded.parallel);
  const std::vector<double> found = read_values(decoded.out);
  for (std::size_t i = 0; i < expected.size(); ++i)
    ASSERT_NEAR(found[i], expected[i], tolerance(c.dtype) * (1 + std::abs(expected[i])))
        << c.spec << " " << dtype_name(c.dtype) << " position " << i / Dv % N;
  double total = 0;
  for (const double count : read_values(decoded.counts)) total += count;
  EXPECT_EQ(total, static_cast<double>(decoded.counts.view().size(1) * B * N));
}

TEST(RoutingStepTest, IsTheParallelPass) {
  for (const DType dtype : {DType::f32, DType::f64, DType::bf16, DType::f16})
    for (const char* self : {"keep", "demote"})
      for (const char* rest : {"", ",share_qk=true", ",queries_in=2", ",include_self=true",
                               ",queries_in=2,include_self=true", ",queries_in=9"})
        for (const bool scaled : {false, true})
          expect_parallel({std::string("routing(clusters=4,window=5,self=") + self + rest + ")",
                           dtype, scaled});
}

// Pieces of any sizes leave the rings of single steps, bit by bit.
TEST(RoutingStepTest, TakesTokensInPieces) {
  for (const char* spec :
       {"routing(clusters=4,window=5)", "routing(clusters=4,window=5,share_qk=true)",
        "routing(clusters=4,window=3,queries_in=2,include_self=true)",
        "routing(clusters=4,window=3,queries_in=3,include_self=true,self=demote)",
        "routing(clusters=1,window=100)", "routing(clusters=4,window=1,share_qk=true)"}) {
    const Decoded steps = decode({spec, DType::f32, true});
    for (const std::vector<std::int64_t>& pieces :
         {std::vector<std::int64_t>{N}, {7}, {1, 13, 1, 1, 20}, {20, 1}}) {
      const StepCase c{spec, DType::f32, true, pieces};
      expect_parallel(c);
      const Decoded decoded = decode(c);
      EXPECT_TRUE(test::same_bits(steps.ring_k, decoded.ring_k)) << spec;
      EXPECT_TRUE(test::same_bits(steps.ring_v, decoded.ring_v)) << spec;
      EXPECT_TRUE(test::same_bits(steps.counts, decoded.counts)) << spec;
    }
  }
  expect_parallel({"routing(clusters=4,window=5,queries_in=2)", DType::bf16, true, {11}});
}

TEST(RoutingStepTest, TakesRingsOfOneSlotAndOneCluster) {
  expect_parallel({"routing(clusters=4,window=1)", DType::f32, true});
  expect_parallel({"routing(clusters=1,window=100)", DType::f32, true});
}

TEST(RoutingStepTest, DoesNotDependOnTheNumberOfThreads) {
  const StepCase c{"routing(clusters=4,window=5,queries_in=2)", DType::f32, true, {4}};
  const int before = threads();
  set_threads(1);
  const Decoded one = decode(c);
  set_threads(5);
  const Decoded many = decode(c);
  set_threads(before);
  EXPECT_TRUE(test::same_bits(one.out, many.out));
}

TEST(RoutingStepTest, NamesWhatIsWrong) {
  const HostTensor x(DType::f32, {1, 2, 1, 4}), two(DType::f32, {1, 2, 2, 4});
  const HostTensor centroids(DType::f32, {2, 3, 4}), lengths = test::ints({1});
  const HostTensor ring(DType::f32, {1, 2, 6, 4}), counts(DType::i64, {1, 2, 3});
  RoutingParams params;
  params.clusters = 3;
  params.window = 2;
  AttentionInputs inputs;
  inputs.q = inputs.k = inputs.v = x;
  inputs.centroids = centroids;
  inputs.causal = true;
  const auto refusal = [&](const RoutingParams& own, const AttentionInputs& given,
                           const RoutingRings& rings) {
    return test::error_of([&] {
      const HostTensor memory(DType::u8, {routing_step_workspace_bytes(own, given)});
      routing_step(own, given, rings, x, {memory.view().data, memory.view().count(), nullptr});
    });
  };
  const RoutingRings rings{ring, ring, counts};
  EXPECT_EQ(refusal(params, inputs, rings), "");
  const auto expect = [&](const std::string& message, const char* words) {
    EXPECT_NE(message.find(words), std::string::npos) << message;
  };
  AttentionInputs other = inputs;
  other.causal = false;
  expect(refusal(params, other, rings), "expected causal inputs");
  other = inputs;
  other.k = other.v = two;
  expect(refusal(params, other, rings), "as many keys as queries");
  other.q = two;
  expect(refusal(params, other, rings), "expected out of shape (1, 2, 2, 4)");
  other = inputs;
  other.q_sequences.lengths = other.k_sequences.lengths = lengths;
  expect(refusal(params, other, rings), "lengths");
  expect(refusal(params, inputs, {ring, ring, ring}), "expected counts of type i64");
  expect(refusal(params, inputs, {counts, ring, counts}), "the ring of keys");
  params.causal = Causality::leaking;
  expect(refusal(params, inputs, rings), "expected strict routing");
}

}  // namespace
}  // namespace coterie
