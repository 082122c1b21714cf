// SPDX-License-Identifier: MIT
// The class Attention: head groups, saved tensors by name, refusals, use from several threads.
#include <gtest/gtest.h>

#include <thread>
#include <type_traits>
#include <vector>

#include "cases/buffers.h"
#include "coterie/attention.h"
#include "tests/support/expect.h"
#include "tests/support/tensors.h"

namespace coterie {
namespace {

constexpr std::int64_t kB = 2, kN = 37, kD = 8;

struct Layer {
  HostTensor q, k, v, grad_out, out, dq, dk, dv;

  Layer(std::int64_t heads, std::int64_t key_heads, std::int64_t value_heads)
      : q(test::normals(DType::f32, {kB, heads, kN, kD}, 1)),
        k(test::normals(DType::f32, {kB, key_heads, kN, kD}, 2)),
        v(test::normals(DType::f32, {kB, value_heads, kN, kD}, 3)),
        grad_out(test::normals(DType::f32, {kB, heads, kN, kD}, 4)),
        out(DType::f32, {kB, heads, kN, kD}),
        dq(out),
        dk(DType::f32, {kB, key_heads, kN, kD}),
        dv(DType::f32, {kB, value_heads, kN, kD}) {}

  AttentionInputs inputs() const {
    AttentionInputs inputs;
    inputs.q = q;
    inputs.k = k;
    inputs.v = v;
    inputs.seed = 5;
    return inputs;
  }
  AttentionGradients gradients() const {
    AttentionGradients gradients;
    gradients.dq = dq;
    gradients.dk = dk;
    gradients.dv = dv;
    return gradients;
  }
};

HostTensor heads_of(const HostTensor& all, std::int64_t first, std::int64_t count) {
  const TensorView view = all.view().narrowed(1, first, count);
  HostTensor part(view.dtype, {view.size(0), count, view.size(2), view.size(3)});
  write_values(part, read_values(view));
  return part;
}

using test::error_of;

// Groups with and without keys of their own, two query heads per key/value head.
TEST(AttentionClassTest, GroupsHaveTheBitsOfTheirMechanisms) {
  const Layer layer(8, 3, 4);
  const Attention attention(
      "2*local(window=8)+2*lsh(rounds=2,chunk=8,buckets=4)+4*i-clustered(clusters=5)");
  const auto saved = attention.forward(layer.inputs(), layer.out.view());
  attention.backward(saved, layer.grad_out, layer.gradients());
  struct Share {
    std::int64_t first, count, first_key, key_count, first_value;
  };
  const Share shares[] = {{0, 2, 0, 1, 0}, {2, 2, 0, 0, 1}, {4, 4, 1, 2, 2}};
  for (std::size_t g = 0; g < 3; ++g) {
    const auto& [first, count, first_key, key_count, first_value] = shares[g];
    const Mechanism& mechanism = attention.spec().groups[g].mechanism;
    AttentionInputs inputs = layer.inputs();
    const HostTensor q = heads_of(layer.q, first, count);
    const HostTensor v = heads_of(layer.v, first_value, count / 2);
    const HostTensor k = key_count ? heads_of(layer.k, first_key, key_count) : HostTensor();
    inputs.q = q;
    inputs.k = k;
    inputs.v = v;
    const cases::Buffers buffers(mechanism, inputs);
    attention_forward(mechanism, inputs, buffers.result(), buffers.workspace());
    EXPECT_TRUE(test::same_bits(buffers.result().out, heads_of(layer.out, first, count))) << g;
    HostTensor dq(DType::f32, {kB, count, kN, kD}), dv(DType::f32, {kB, count / 2, kN, kD}), dk;
    if (key_count) dk = HostTensor(DType::f32, {kB, key_count, kN, kD});
    AttentionGradients gradients;
    gradients.dq = dq;
    gradients.dk = dk;
    gradients.dv = dv;
    attention_backward(mechanism, inputs, buffers.result(), heads_of(layer.grad_out, first, count),
                       gradients, buffers.workspace());
    EXPECT_TRUE(test::same_bits(dq, heads_of(layer.dq, first, count))) << g;
    EXPECT_TRUE(test::same_bits(dv, heads_of(layer.dv, first_value, count / 2))) << g;
    if (key_count > 0) {
      EXPECT_TRUE(test::same_bits(dk, heads_of(layer.dk, first_key, key_count))) << g;
    }
  }
}

TEST(AttentionClassTest, GroupsHaveTheirOwnState) {
  const Layer layer(4, 4, 4);
  const HostTensor centroids = test::normals(DType::f32, {2, 3, kD}, 6);
  const Attention attention("2*full+2*routing(clusters=3,window=6)");
  AttentionInputs inputs = layer.inputs();
  inputs.causal = true;
  attention.forward(inputs, layer.out.view(), {{}, {.centroids = centroids}});
  EXPECT_NE(error_of([&] { attention.forward(inputs, layer.out.view()); }).find("centroids"),
            std::string::npos);
  EXPECT_EQ(error_of([&] { attention.forward(inputs, layer.out.view(), {{}}); }),
            "[attention] expected state for 2 head groups; got 1");
}

TEST(AttentionClassTest, SavedTensorsHaveNames) {
  const Layer layer(4, 4, 4);
  const Attention attention("2*full+2*i-clustered(clusters=5,topk=4)");
  const auto saved = attention.forward(layer.inputs(), layer.out.view());
  EXPECT_EQ(saved.names(0), std::vector<std::string>{"lse"});
  const ConstTensorView offsets = saved.get("offsets", 1);
  EXPECT_EQ(offsets.size(2), 6);
  EXPECT_EQ(error_of([&] { saved.get("offsets"); }),
            "[attention] there is no saved tensor \"offsets\"; there are: lse");
  EXPECT_EQ(error_of([&] { saved.get("lse", 2); }),
            "[attention] expected a head group below 2; got 2");
}

TEST(AttentionClassTest, RefusesWhatItCannotHonour) {
  const Layer layer(4, 4, 4);
  EXPECT_NE(error_of([] { Attention("full(positions=rotary)"); }).find("without positions"),
            std::string::npos);
  EXPECT_NE(error_of([&] { Attention("3*full").forward(layer.inputs(), layer.out.view()); }), "");
  EXPECT_EQ(error_of([&] { Attention("2*full+2*lsh").forward(layer.inputs(), layer.out.view()); }),
            "[attention] expected k with 2 heads, those of the groups that have keys; got 4");
  AttentionInputs elsewhere = layer.inputs();
  elsewhere.q.device = elsewhere.k.device = elsewhere.v.device = Device::cuda;
  EXPECT_NE(error_of([&] { Attention("full").forward(elsewhere, layer.out.view()); }), "");
}

// Memory that may only be read is an input and nothing else.
template <class Out>
concept Writable = requires(const Attention& attention, const AttentionInputs& inputs, Out out) {
  attention.forward(inputs, out);
};
static_assert(Writable<TensorView> && !Writable<ConstTensorView>);
static_assert(
    std::is_same_v<decltype(view(static_cast<const float*>(nullptr), {1})), ConstTensorView>);

TEST(AttentionClassTest, SeveralThreadsUseOneObject) {
  const Layer layer(4, 4, 4);
  const Attention attention("2*full+2*i-clustered(clusters=5,topk=4)");
  attention.forward(layer.inputs(), layer.out.view());
  std::vector<HostTensor> outs(4, HostTensor(DType::f32, {kB, 4, kN, kD}));
  std::vector<std::thread> threads;
  for (HostTensor& out : outs)
    threads.emplace_back([&] {
      for (int repeat = 0; repeat < 5; ++repeat) attention.forward(layer.inputs(), out.view());
    });
  for (std::thread& thread : threads) thread.join();
  for (const HostTensor& out : outs) EXPECT_TRUE(test::same_bits(out, layer.out));
}

}  // namespace
}  // namespace coterie
