// SPDX-License-Identifier: MIT
// Residual sums with norms and biases with GELU: formulas, threads, refusals. Gradients are
// compared with torch's in tests/torch/block_ops_test.cc.
#include "coterie/block.h"

#include <gtest/gtest.h>

#include <cmath>

#include "coterie/runtime.h"
#include "tests/support/tensors.h"

namespace coterie {
namespace {

using test::normals;

struct Norm {
  std::int64_t R, E;
  HostTensor x = normals(DType::f32, {R, E}, 1), branch = normals(DType::bf16, {R, E}, 2);
  HostTensor branch_bias = normals(DType::f32, {E}, 3), gain = normals(DType::f32, {E}, 4);
  HostTensor bias = normals(DType::f32, {E}, 5), grad_y = normals(DType::f32, {R, E}, 6);
  HostTensor grad_out = normals(DType::bf16, {R, E}, 7);
  HostTensor y{DType::f32, {R, E}}, out{DType::bf16, {R, E}};
  HostTensor mean{DType::f32, {R}}, scale{DType::f32, {R}};
  HostTensor dx{DType::f32, {R, E}}, dbranch{DType::bf16, {R, E}};
  HostTensor dbranch_bias{DType::f32, {E}}, dgain{DType::f32, {E}}, dbias{DType::f32, {E}};

  AddNorm inputs() const {
    return {x.view(), branch.view(), branch_bias.view(), gain.view(), bias.view(), 1e-5};
  }
  AddNormResult result() const { return {y.view(), out.view(), mean.view(), scale.view()}; }
  void run() const {
    add_norm(inputs(), result());
    const std::int64_t bytes = add_norm_workspace_bytes(x.view());
    std::vector<float> memory(static_cast<std::size_t>(bytes) / sizeof(float));
    add_norm_backward(
        {y.view(), mean.view(), scale.view(), gain.view(), grad_y.view(), grad_out.view()},
        {dx.view(), dbranch.view(), dbranch_bias.view(), dgain.view(), dbias.view()},
        {memory.data(), bytes, nullptr});
  }
};

TEST(BlockTest, SumsAndNormsFollowTheirFormulas) {
  const Norm norm{.R = 5, .E = 12};
  norm.run();
  const auto x = read_values(norm.x), branch = read_values(norm.branch), y = read_values(norm.y);
  const auto shift = read_values(norm.branch_bias), gain = read_values(norm.gain);
  const auto bias = read_values(norm.bias), out = read_values(norm.out);
  for (std::size_t r = 0; r < 5; ++r) {
    double mean = 0, variance = 0;
    for (std::size_t d = 0; d < 12; ++d) {
      const double sum = x[r * 12 + d] + branch[r * 12 + d] + shift[d];
      EXPECT_NEAR(y[r * 12 + d], sum, 1e-6 * (1 + std::abs(sum)));
      mean += sum / 12;
    }
    for (std::size_t d = 0; d < 12; ++d) variance += std::pow(y[r * 12 + d] - mean, 2) / 12;
    for (std::size_t d = 0; d < 12; ++d) {
      const double wanted = (y[r * 12 + d] - mean) / std::sqrt(variance + 1e-5) * gain[d] + bias[d];
      EXPECT_NEAR(out[r * 12 + d], wanted, 0x1p-8 * std::abs(wanted) + 1e-5);
    }
  }
}

TEST(BlockTest, BitsDoNotDependOnThreads) {
  const int before = threads();
  std::vector<std::vector<double>> found;
  for (const int count : {1, 3}) {
    set_threads(count);
    const Norm norm{.R = 700, .E = 36};
    norm.run();
    std::vector<double> values;
    for (const HostTensor* tensor :
         {&norm.out, &norm.dx, &norm.dbranch, &norm.dbranch_bias, &norm.dgain, &norm.dbias}) {
      const std::vector<double> own = read_values(*tensor);
      values.insert(values.end(), own.begin(), own.end());
    }
    found.push_back(values);
  }
  set_threads(before);
  EXPECT_EQ(found[0], found[1]);
}

TEST(BlockTest, GeluAndColumnSumsFollowTheirFormulas) {
  const HostTensor x = normals(DType::f32, {9, 8}, 1), bias = normals(DType::f32, {8}, 2);
  const HostTensor out(DType::f32, {9, 8}), sums(DType::f32, {8});
  bias_gelu(x, bias, out);
  const std::int64_t bytes = bias_gelu_workspace_bytes(x.view());
  std::vector<float> memory(static_cast<std::size_t>(bytes) / sizeof(float));
  sum_rows(x, sums, {memory.data(), bytes, nullptr});
  const auto from = read_values(x), shift = read_values(bias), to = read_values(out);
  std::vector<double> total(8);
  for (std::size_t i = 0; i < from.size(); ++i) {
    const double v = from[i] + shift[i % 8];
    EXPECT_NEAR(to[i], v * 0.5 * std::erfc(-v / std::sqrt(2.0)), 1e-6);
    total[i % 8] += from[i];
  }
  for (std::size_t d = 0; d < 8; ++d) EXPECT_NEAR(read_values(sums)[d], total[d], 1e-5);
}

TEST(BlockTest, RefusesWhatItCannotDo) {
  const auto refusal = [](const auto& change) {
    const Norm norm{.R = 2, .E = 8};
    AddNorm inputs = norm.inputs();
    AddNormResult result = norm.result();
    change(inputs, result);
    return test::error_of([&] { add_norm(inputs, result); });
  };
  const HostTensor odd(DType::f32, {2, 6}), wide(DType::f32, {2, 1028});
  EXPECT_NE(refusal([&](AddNorm& in, AddNormResult&) {
              in.x = odd.view();
            }).find("[add_norm] expected x of shape (rows, width) with a width that is a multiple"),
            std::string::npos);
  EXPECT_NE(refusal([&](AddNorm& in, AddNormResult&) {
              in.x = wide.view();
            }).find("a width of at most 1024; got 1028"),
            std::string::npos);
  EXPECT_NE(refusal([](AddNorm& in, AddNormResult&) {
              in.branch = {};
            }).find("expected y exactly if there is a branch"),
            std::string::npos);
  EXPECT_NE(refusal([](AddNorm& in, AddNormResult& out) {
              in.branch = {}, out.y = {};
            }).find("branch_bias is only used with a branch"),
            std::string::npos);
  const HostTensor x(DType::f32, {2, 8}), sums(DType::f32, {8});
  EXPECT_NE(test::error_of([&] { sum_rows(x, sums, {}); }).find("expected a workspace of"),
            std::string::npos);
}

}  // namespace
}  // namespace coterie
