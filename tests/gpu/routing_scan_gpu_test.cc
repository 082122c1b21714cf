// SPDX-License-Identifier: MIT
// Strict routing of bf16 rows on tensor cores selects the same clusters as fp32 sums, for rows of
// all magnitudes and for equal centroids.
#include <gtest/gtest.h>

#include <cmath>
#include <string>

#include "coterie/attention.h"
#include "coterie/random.h"
#include "coterie/runtime.h"
#include "coterie/spec.h"
#include "tests/gpu/device_tensor.h"

namespace coterie {
namespace {

using gpu_test::DeviceMemory;
using gpu_test::DeviceTensor;

constexpr std::int64_t kRows = 900;

struct Form {
  std::int64_t clusters, dim;
  bool packed;
  // Added to the centroids' elements with alternating sign: all scores of a row can be negative.
  double common = 0;
  std::int64_t key_heads = 1;  // of two query heads
};

// Elements of normal, tiny and huge size, with large means, zeros, infinities and NaN.
double row_value(double unit, std::int64_t i, std::int64_t dim) {
  const std::int64_t row = i / dim % kRows;
  if (row % 97 == 5 && i % dim == 3) return INFINITY;
  if (row % 97 == 6 && i % dim == 3) return NAN;
  if (row % 13 == 3) return unit * 0x1p-80;
  if (row % 13 == 4) return unit * 0x1p60;
  if (row % 11 == 2) return 0;
  return row % 7 == 1 ? unit + 4 : unit;
}

// The saved integers for rows of the given type, with values rounded to bf16.
std::vector<HostTensor> select_runs(DType dtype, const Form& form) {
  const std::int64_t heads = form.key_heads;
  HostTensor q(DType::bf16, {1, 2, kRows, form.dim}), k(DType::bf16, {1, heads, kRows, form.dim});
  HostTensor centroids(DType::f32, {heads, form.clusters, form.dim}), offsets(DType::i32, {4});
  const RandomStream stream{11, RandomUse::data, 0};
  const auto unit = [&](std::int64_t i, int word) {
    return random_unit(stream.at(static_cast<std::uint64_t>(i)).word[word]) - 0.5;
  };
  fill(q, [&](std::int64_t i) { return row_value(unit(i, 0), i, form.dim); });
  fill(k, [&](std::int64_t i) { return row_value(unit(i, 1), i, form.dim); });
  fill(centroids, [&](std::int64_t i) {
    return unit(i / form.dim % 3 == 2 ? i - form.dim : i, 1) + (i % 2 ? form.common : -form.common);
  });
  fill(offsets, [](std::int64_t i) { return i * 299; });
  HostTensor typed_q(dtype, {1, 2, kRows, form.dim}), typed_k(dtype, {1, heads, kRows, form.dim});
  write_values(typed_q, read_values(q));
  write_values(typed_k, read_values(k));
  const DeviceTensor device_q(typed_q.view()), device_k(typed_k.view()),
      device_centroids(centroids.view()), device_offsets(offsets.view());
  const std::string spec = "routing(clusters=" + std::to_string(form.clusters) + ",window=64)";
  const Mechanism mechanism = AttentionSpec::parse(spec).groups[0].mechanism;
  AttentionInputs inputs;
  inputs.q = device_q.view();
  inputs.k = inputs.v = device_k.view();
  inputs.centroids = device_centroids.view();
  inputs.causal = true;
  if (form.packed)
    inputs.q_sequences.cu_seqlens = inputs.k_sequences.cu_seqlens = device_offsets.view();
  std::vector<DeviceTensor> memory;
  std::vector<TensorView> saved;
  for (const TensorLayout& tensor : attention_saved(mechanism, inputs).tensors) {
    memory.emplace_back(tensor);
    saved.push_back(memory.back().view());
  }
  const DeviceMemory workspace(attention_workspace_bytes(mechanism, inputs));
  const Workspace memory_of_calls{workspace.data(), workspace.bytes(), nullptr};
  const DeviceTensor out({"out", dtype, {1, 2, kRows, form.dim}});
  if (form.key_heads == 1)
    attention_select(mechanism, inputs, saved, memory_of_calls);
  else
    attention_forward(mechanism, inputs, {out.view(), saved}, memory_of_calls);
  std::vector<HostTensor> results;
  for (const DeviceTensor& tensor : memory)
    if (tensor.view().dtype == DType::i32) results.push_back(tensor.download());
  return results;
}

TEST(RoutingScanGpuTest, TakesTheClustersOfSumsInFp32) {
  if (!cuda_available()) GTEST_SKIP() << "no GPU";
  for (const Form& form :
       {Form{7, 64, false}, Form{130, 40, true}, Form{300, 64, true}, Form{260, 128, false},
        Form{64, 37, false}, Form{256, 64, false, 1.5}, Form{100, 64, true, 0.25}}) {
    const auto plain = select_runs(DType::f32, form), found = select_runs(DType::bf16, form);
    ASSERT_EQ(plain.size(), found.size());
    for (std::size_t i = 0; i < plain.size(); ++i)
      EXPECT_EQ(read_values(plain[i]), read_values(found[i]))
          << form.clusters << " clusters, " << form.dim << " elements, tensor " << i;
  }
}

// With as many key as query heads, queries and keys are sorted together; the sort also counts the
// keys that each query sees.
TEST(RoutingScanGpuTest, CountsTheKeysThatAreInSight) {
  if (!cuda_available()) GTEST_SKIP() << "no GPU";
  for (const Form& form : {Form{7, 64, false, 0, 2}, Form{300, 40, false, 0.25, 2},
                           Form{1, 128, false, 0, 2}, Form{64, 37, false, 0, 2}}) {
    const auto plain = select_runs(DType::f32, form), found = select_runs(DType::bf16, form);
    ASSERT_EQ(plain.size(), found.size());
    for (std::size_t i = 0; i < plain.size(); ++i)  // includes the ends
      EXPECT_EQ(read_values(plain[i]), read_values(found[i]))
          << form.clusters << " clusters, " << form.dim << " elements, tensor " << i;
  }
}

}  // namespace
}  // namespace coterie
