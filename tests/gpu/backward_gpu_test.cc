// SPDX-License-Identifier: MIT
// The CUDA backward pass of clustered and i-clustered attention against the CPU's, for the same
// inputs, selection and saved tensors.
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <string>
#include <tuple>
#include <vector>

#include "coterie/attention.h"
#include "coterie/random.h"
#include "coterie/runtime.h"
#include "cuda/api/entry.h"
#include "ops/call.h"
#include "tests/gpu/device_tensor.h"

namespace coterie::gpu_test {
namespace {

enum class Lengths { full, padded, packed };

struct Case {
  const char* name;
  std::int64_t B, H, Hkv, N, S, D, C, topk;  // topk 0: plain clustered
  Lengths lengths = Lengths::full;
  bool mass_grad = true;
  bool equal_queries = false;
  bool by_token = false;  // (B, N, H, D) in memory
  const char* wanted = "qkv";
  std::int64_t sharpness = 1;  // factor of the queries
};

Mechanism mechanism_of(const Case& c) {
  ClusteringParams clustering;
  clustering.clusters = c.C;
  clustering.method = Clustering::hamming;
  clustering.iterations = 2;
  if (c.topk == 0) return resolve(ClusteredParams{clustering}, false);
  ImprovedClusteredParams params;
  params.clustering = clustering;
  params.topk = c.topk;
  params.mass_grad = c.mass_grad;
  return resolve(params, false);
}

// An f32 host tensor with values of `dtype`, viewed as (B, H, N, D).
struct Input {
  HostTensor memory;
  TensorView view;

  Input(DType dtype, std::vector<std::int64_t> sizes, bool by_token) {
    if (by_token) std::swap(sizes[1], sizes[2]);
    memory = HostTensor(dtype, sizes);
    view = by_token ? memory.view().transposed(1, 2) : memory.view();
  }
};

std::vector<double> round_to(DType dtype, const std::vector<double>& values) {
  HostTensor tensor(dtype, {static_cast<std::int64_t>(values.size())});
  write_values(tensor, values);
  return read_values(tensor);
}

std::vector<std::int64_t> item_lengths(const Case& c, std::int64_t rows, int seed) {
  std::vector<std::int64_t> lengths;
  if (c.lengths == Lengths::padded)
    for (std::int64_t b = 0; b < c.B; ++b)
      lengths.push_back(b == 1 ? 0 : std::max<std::int64_t>(rows - 7 * b - seed, 1));
  if (c.lengths == Lengths::packed) {
    const std::int64_t parts[] = {rows / 3, 0, rows / 5, 1, rows / 4};
    for (const std::int64_t part : parts) lengths.push_back(part);
  }
  return lengths;
}

HostTensor lengths_tensor(const Case& c, const std::vector<std::int64_t>& lengths) {
  std::vector<double> values;
  if (c.lengths == Lengths::packed) values.push_back(0);
  for (const std::int64_t length : lengths)
    values.push_back(static_cast<double>(length) +
                     (c.lengths == Lengths::packed ? values.back() : 0.0));
  HostTensor tensor(DType::i32, {static_cast<std::int64_t>(values.size())});
  write_values(tensor, values);
  return tensor;
}

Sequences sequences(const Case& c, const TensorView& lengths) {
  Sequences result;
  if (c.lengths == Lengths::padded) result.lengths = lengths;
  if (c.lengths == Lengths::packed) result.cu_seqlens = lengths;
  return result;
}

// All tensors of one case, in host and device memory.
struct Problem {
  const Case& c;
  DType dtype;
  Mechanism mechanism;
  HostTensor q_lengths, k_lengths;
  std::vector<double> q, k, v, g;
  std::vector<HostTensor> saved;
  AttentionInputs cpu_inputs;
  std::vector<Input> cpu;
  std::vector<std::vector<double>> expected;  // dq, dk, dv
  std::vector<DeviceMemory> memory;

  Problem(const Case& which, DType type) : c(which), dtype(type), mechanism(mechanism_of(which)) {
    const auto q_items = item_lengths(c, c.N, 1), k_items = item_lengths(c, c.S, 3);
    q_lengths = lengths_tensor(c, q_items);
    k_lengths = lengths_tensor(c, k_items);
    q = values({c.B, c.H, c.N}, 1, q_items, static_cast<double>(c.sharpness));
    k = values({c.B, c.Hkv, c.S}, 2, k_items, 1.0);
    v = values({c.B, c.Hkv, c.S}, 3, k_items, 1.0);
    g = values({c.B, c.H, c.N}, 4, q_items, 1.0);
    run_cpu();
  }

  // Normal numbers rounded to the element type; NaN in padding.
  std::vector<double> values(const std::vector<std::int64_t>& rows, std::uint32_t which,
                             const std::vector<std::int64_t>& items, double factor) const {
    const RandomStream stream{17, RandomUse::data, which};
    std::int64_t used = rows[2];
    if (c.lengths == Lengths::packed) {
      used = 0;
      for (const std::int64_t length : items) used += length;
    }
    std::vector<double> result(static_cast<std::size_t>(rows[0] * rows[1] * rows[2] * c.D));
    for (std::size_t i = 0; i < result.size(); ++i) {
      const std::int64_t row = static_cast<std::int64_t>(i) / c.D;
      const std::int64_t r = row % rows[2], b = row / rows[2] / rows[1];
      const bool equal = c.equal_queries && which == 1;
      const std::uint64_t index =
          equal ? static_cast<std::uint64_t>(static_cast<std::int64_t>(i) % c.D) : i;
      result[i] = factor * random_normal(stream, index);
      const std::int64_t end =
          c.lengths == Lengths::padded ? items[static_cast<std::size_t>(b)] : used;
      if (r >= end) result[i] = std::nan("");
    }
    return round_to(dtype, result);
  }

  AttentionInputs inputs_of(const std::vector<TensorView>& views, const TensorView& q_items,
                            const TensorView& k_items) const {
    AttentionInputs inputs;
    inputs.q = views[0];
    inputs.k = views[1];
    inputs.v = views[2];
    inputs.q_sequences = sequences(c, q_items);
    inputs.k_sequences = sequences(c, k_items);
    inputs.seed = 5;
    return inputs;
  }

  void run_cpu() {
    const std::int64_t rows[] = {c.H, c.Hkv, c.Hkv, c.H}, lengths[] = {c.N, c.S, c.S, c.N};
    const std::vector<double>* data[] = {&q, &k, &v, &g};
    std::vector<TensorView> views;
    for (int t = 0; t < 4; ++t) {
      cpu.emplace_back(DType::f32, std::vector<std::int64_t>{c.B, rows[t], lengths[t], c.D}, false);
      write_values(cpu.back().view, *data[t]);
      views.push_back(cpu.back().view);
    }
    cpu_inputs = inputs_of(views, q_lengths, k_lengths);
    const SavedLayout layout = attention_saved(mechanism, cpu_inputs);
    AttentionResult result;
    for (const TensorLayout& tensor : layout.tensors) saved.emplace_back(tensor);
    for (const HostTensor& tensor : saved) result.saved.push_back(tensor);
    HostTensor out(DType::f32, {c.B, c.H, c.N, c.D});
    result.out = out;
    const std::int64_t bytes = attention_workspace_bytes(mechanism, cpu_inputs);
    HostTensor scratch(DType::u8, {bytes});
    const Workspace workspace{scratch.view().data, bytes, nullptr};
    attention_forward(mechanism, cpu_inputs, result, workspace);
    HostTensor dq(DType::f32, {c.B, c.H, c.N, c.D}), dk(DType::f32, {c.B, c.Hkv, c.S, c.D}),
        dv(DType::f32, {c.B, c.Hkv, c.S, c.D});
    AttentionGradients gradients;
    gradients.dq = dq;
    gradients.dk = dk;
    gradients.dv = dv;
    attention_backward(mechanism, cpu_inputs, result, views[3], gradients, workspace);
    for (const HostTensor* d : {&dq, &dk, &dv}) expected.push_back(read_values(*d));
  }

  // A copy on the device.
  TensorView upload(const TensorView& dense) {
    TensorView view = dense;
    memory.emplace_back(dense.count() * dtype_bytes(dense.dtype));
    view.data = memory.back().data();
    view.device = Device::cuda;
    COTERIE_CUDA(cudaMemcpy(view.data, dense.data, static_cast<std::size_t>(memory.back().bytes()),
                            cudaMemcpyHostToDevice));
    return view;
  }
  TensorView upload_rows(std::vector<std::int64_t> sizes, const std::vector<double>& data) {
    Input input(dtype, std::move(sizes), c.by_token);
    write_values(input.view, data);
    TensorView view = upload(input.memory);
    return c.by_token ? view.transposed(1, 2) : view;
  }
};

// A prepared call on the device.
struct DeviceCall {
  Mechanism mechanism;
  AttentionCall call;
  AttentionResult result;
  TensorView grad_out;
  AttentionGradients gradients;
  std::vector<DeviceMemory> memory;

  std::int64_t workspace_bytes() const { return cuda::workspace_bytes(mechanism, call); }
  void run(const DeviceMemory& workspace, cudaStream_t stream) const {
    cuda::backward(mechanism, call, result, grad_out, gradients,
                   {workspace.data(), workspace.bytes(), stream});
  }
};

TensorView new_gradient(DeviceCall& device, DType dtype, std::vector<std::int64_t> sizes,
                        bool by_token) {
  if (by_token) std::swap(sizes[1], sizes[2]);
  TensorView view = TensorView::contiguous(nullptr, dtype, {sizes[0], sizes[1], sizes[2], sizes[3]},
                                           Device::cuda);
  device.memory.emplace_back(view.count() * dtype_bytes(dtype));
  view.data = device.memory.back().data();
  return by_token ? view.transposed(1, 2) : view;
}

DeviceCall prepare(Problem& p) {
  const Case& c = p.c;
  DeviceCall device;
  device.mechanism = p.mechanism;
  const std::vector<TensorView> views = {p.upload_rows({c.B, c.H, c.N, c.D}, p.q),
                                         p.upload_rows({c.B, c.Hkv, c.S, c.D}, p.k),
                                         p.upload_rows({c.B, c.Hkv, c.S, c.D}, p.v)};
  const TensorView q_items = p.upload(p.q_lengths), k_items = p.upload(p.k_lengths);
  const AttentionInputs inputs = p.inputs_of(views, q_items, k_items);
  device.call = ops::make_call(p.mechanism, inputs);
  for (const HostTensor& tensor : p.saved) device.result.saved.push_back(p.upload(tensor));
  device.grad_out = p.upload_rows({c.B, c.H, c.N, c.D}, p.g);
  const std::string wanted = c.wanted;
  AttentionGradients& gradients = device.gradients;
  if (wanted.find('q') != std::string::npos)
    gradients.dq = new_gradient(device, p.dtype, {c.B, c.H, c.N, c.D}, c.by_token);
  if (wanted.find('k') != std::string::npos)
    gradients.dk = new_gradient(device, p.dtype, {c.B, c.Hkv, c.S, c.D}, c.by_token);
  if (wanted.find('v') != std::string::npos)
    gradients.dv = new_gradient(device, p.dtype, {c.B, c.Hkv, c.S, c.D}, c.by_token);
  return device;
}

// The elements of a device tensor as bytes in its own order, and as numbers in (B, H, N, D) order.
std::vector<unsigned char> bytes_of(const TensorView& view) {
  std::vector<unsigned char> bytes(
      static_cast<std::size_t>(view.count() * dtype_bytes(view.dtype)));
  COTERIE_CUDA(cudaMemcpy(bytes.data(), view.data, bytes.size(), cudaMemcpyDeviceToHost));
  return bytes;
}
std::vector<double> download(const TensorView& view) {
  std::vector<unsigned char> bytes = bytes_of(view);
  TensorView host = view;
  host.data = bytes.data();
  host.device = Device::cpu;
  return read_values(host);
}

double tolerance(DType dtype) {
  return dtype == DType::f32 ? 1e-5 : dtype == DType::f16 ? 2e-3 : 1e-2;
}

// The error is relative to the result. Where its terms cancel, it is relative to kFloor, a fraction
// of the size of the terms.
bool compare(const char* name, const TensorView& view, const std::vector<double>& expected,
             double allowed) {
  constexpr double kFloor = 0.03;
  if (!view.present()) return true;
  const std::vector<double> got = download(view);
  double error = 0, norm = 0, worst = 0, largest = 0;
  std::size_t at = 0;
  for (std::size_t i = 0; i < got.size(); ++i) {
    const double e = std::abs(got[i] - expected[i]);
    error += e * e;
    norm += expected[i] * expected[i];
    largest = std::max(largest, std::abs(expected[i]));
    if (!(e <= worst)) {
      worst = e;
      at = i;
    }
  }
  norm = std::max(norm, kFloor * kFloor * static_cast<double>(got.size()));
  const double relative = got.empty() ? 0 : std::sqrt(error / norm);
  const bool good = relative <= allowed && worst <= 8 * allowed * std::max(largest, kFloor);
  std::printf("  %s %.1e (max %.1e of %.1e)%s", name, relative, worst, largest, good ? "" : " BAD");
  if (!good) std::printf(" at %zu: %g for %g", at, got[at], expected[at]);
  return good;
}

bool same(const TensorView& view, const std::vector<unsigned char>& before) {
  return !view.present() || bytes_of(view) == before;
}

struct Run {
  Problem problem;
  DeviceCall device;
  DeviceMemory workspace;
  cudaStream_t stream = nullptr;

  Run(const Case& c, DType dtype)
      : problem(c, dtype), device(prepare(problem)), workspace(device.workspace_bytes()) {
    COTERIE_CUDA(cudaStreamCreate(&stream));
    again();
  }
  ~Run() { cudaStreamDestroy(stream); }
  void again() {
    device.run(workspace, stream);
    COTERIE_CUDA(cudaStreamSynchronize(stream));
  }
};

void expect_agreement(const Case& c, DType dtype) {
  const Run run(c, dtype);
  std::printf("%-34s %-4s", c.name, dtype_name(dtype));
  const AttentionGradients& d = run.device.gradients;
  // Errors of the logits grow with the logits.
  const double allowed = tolerance(dtype) * static_cast<double>(c.sharpness);
  EXPECT_TRUE(compare("dq", d.dq, run.problem.expected[0], allowed));
  EXPECT_TRUE(compare("dk", d.dk, run.problem.expected[1], allowed));
  EXPECT_TRUE(compare("dv", d.dv, run.problem.expected[2], allowed));
  std::printf("\n");
  for (const DeviceMemory& memory : run.device.memory) EXPECT_TRUE(memory.intact());
  EXPECT_TRUE(run.workspace.intact());
}

// The same bits in repeated runs, every second one as a graph.
void expect_repeats(const Case& c, DType dtype, int repeats) {
  Run run(c, dtype);
  const AttentionGradients& d = run.device.gradients;
  std::vector<std::vector<unsigned char>> first;
  for (const TensorView* view : {&d.dq, &d.dk, &d.dv}) first.push_back(bytes_of(*view));
  cudaGraph_t graph;
  cudaGraphExec_t replay;
  COTERIE_CUDA(cudaStreamBeginCapture(run.stream, cudaStreamCaptureModeGlobal));
  run.device.run(run.workspace, run.stream);
  COTERIE_CUDA(cudaStreamEndCapture(run.stream, &graph));
  COTERIE_CUDA(cudaGraphInstantiate(&replay, graph, 0));
  int equal = 0;
  for (int i = 0; i < repeats; ++i) {
    for (const DeviceMemory& memory : run.device.memory) memory.poison();
    if (i % 2) {
      COTERIE_CUDA(cudaGraphLaunch(replay, run.stream));
      COTERIE_CUDA(cudaStreamSynchronize(run.stream));
    } else {
      run.again();
    }
    equal += same(d.dq, first[0]) && same(d.dk, first[1]) && same(d.dv, first[2]);
  }
  EXPECT_EQ(equal, repeats);
  COTERIE_CUDA(cudaGraphExecDestroy(replay));
  COTERIE_CUDA(cudaGraphDestroy(graph));
}

const Lengths kFull = Lengths::full, kPadded = Lengths::padded, kPacked = Lengths::packed;

const Case kCases[] = {
    {"i_129_x_77_C_7_k_32", 1, 2, 2, 129, 77, 64, 7, 32},
    {"i_200_x_150_C_300_k_40_D_128", 1, 2, 1, 200, 150, 128, 300, 40, kPacked},
    {"i_90_x_130_C_9_k_5_D_40", 3, 4, 2, 90, 130, 40, 9, 5, kPadded, true, false, true},
    {"plain_129_x_300_C_20_D_96", 1, 4, 1, 129, 300, 96, 20, 0},
    {"i_N_1", 1, 2, 2, 1, 1, 64, 4, 32},
    {"i_N_31_C_above_N", 2, 3, 3, 31, 31, 64, 50, 32},
    {"i_1000_C_16_k_32", 1, 4, 4, 1000, 1000, 64, 16, 32},
    {"i_1000_C_16_k_32_no_mass_grad", 1, 4, 4, 1000, 1000, 64, 16, 32, kFull, false},
    {"i_1000_x_640_C_16_k_1", 1, 2, 2, 1000, 640, 64, 16, 1},
    {"i_640_x_1000_C_33_k_128", 1, 2, 2, 640, 1000, 64, 33, 128},
    {"i_640_x_1000_C_33_k_128_D_128", 1, 2, 2, 640, 1000, 128, 33, 128},
    {"i_300_C_10_k_33_D_32", 2, 2, 2, 300, 300, 32, 10, 33},
    {"i_300_C_10_k_32_D_96", 2, 2, 2, 300, 300, 96, 10, 32},
    {"i_300_C_10_k_20_D_40_by_token", 2, 2, 2, 300, 300, 40, 10, 20, kFull, true, false, true},
    {"i_300_C_10_k_20_D_33", 1, 2, 2, 300, 300, 33, 10, 20},
    {"i_all_equal_queries", 1, 2, 2, 500, 400, 64, 8, 32, kFull, true, true},
    {"i_one_cluster_of_3000", 1, 2, 2, 3000, 700, 64, 1, 32},
    {"i_equal_2500_C_5", 1, 1, 1, 2500, 600, 64, 5, 64, kFull, true, true},
    {"i_padded_with_an_empty_item", 3, 2, 2, 200, 260, 64, 12, 32, kPadded},
    {"i_packed_with_empty_items", 1, 2, 2, 900, 1100, 64, 12, 32, kPacked},
    {"i_GQA_4_2", 2, 4, 2, 333, 444, 64, 20, 32},
    {"i_GQA_4_1_packed_by_token", 1, 4, 1, 900, 700, 64, 20, 16, kPacked, true, false, true},
    {"i_GQA_4_1_C_100_D_128", 1, 4, 1, 700, 900, 128, 100, 32},
    {"i_GQA_4_1_C_150", 1, 4, 1, 700, 900, 64, 150, 32},
    {"i_C_1100", 1, 2, 2, 1500, 800, 64, 1100, 32},
    {"i_sharp_k_32", 1, 2, 2, 1000, 1000, 64, 32, 32, kFull, true, false, false, "qkv", 6},
    {"i_k_above_S", 1, 2, 2, 100, 20, 64, 6, 32},
    {"i_dq_only", 1, 2, 2, 300, 300, 64, 10, 32, kFull, true, false, false, "q"},
    {"i_dk_only", 1, 2, 2, 300, 300, 64, 10, 32, kFull, true, false, false, "k"},
    {"i_dv_only", 1, 2, 2, 300, 300, 64, 10, 32, kFull, true, false, false, "v"},
    {"plain_1000_C_16", 1, 4, 4, 1000, 1000, 64, 16, 0},
    {"plain_GQA_4_2_padded", 3, 4, 2, 333, 444, 32, 20, 0, kPadded},
    {"plain_packed_D_128", 1, 2, 1, 900, 700, 128, 40, 0, kPacked},
    {"plain_C_above_N_D_33", 1, 2, 2, 31, 50, 33, 40, 0},
    {"plain_dq_only", 1, 2, 2, 300, 300, 64, 10, 0, kFull, true, false, false, "q"},
};

using Parameter = std::tuple<Case, DType>;
std::string name_of(const ::testing::TestParamInfo<Parameter>& test) {
  return std::string(std::get<Case>(test.param).name) + "_" +
         dtype_name(std::get<DType>(test.param));
}

class BackwardGpuTest : public ::testing::TestWithParam<Parameter> {};

TEST_P(BackwardGpuTest, AgreesWithTheCpu) {
  if (!cuda_available()) GTEST_SKIP() << "no GPU";
  expect_agreement(std::get<Case>(GetParam()), std::get<DType>(GetParam()));
}

TEST_P(BackwardGpuTest, RepeatsItsBits) {
  if (!cuda_available()) GTEST_SKIP() << "no GPU";
  expect_repeats(std::get<Case>(GetParam()), std::get<DType>(GetParam()), 4);
}

class BackwardRepeatsGpuTest : public ::testing::TestWithParam<Parameter> {};

TEST_P(BackwardRepeatsGpuTest, RepeatsItsBits) {
  if (!cuda_available()) GTEST_SKIP() << "no GPU";
  expect_repeats(std::get<Case>(GetParam()), std::get<DType>(GetParam()), 100);
}

const Case kRepeated[] = {
    {"i_4096_C_64_GQA_4_2", 2, 4, 2, 4096, 4096, 64, 64, 32},
    {"i_5000_x_6000_C_256_k_64_D_128", 1, 2, 1, 5000, 6000, 128, 256, 64},
};

INSTANTIATE_TEST_SUITE_P(Cases, BackwardGpuTest,
                         ::testing::Combine(::testing::ValuesIn(kCases),
                                            ::testing::Values(DType::bf16, DType::f16, DType::f32)),
                         name_of);
INSTANTIATE_TEST_SUITE_P(Large, BackwardGpuTest,
                         ::testing::Combine(::testing::ValuesIn(kRepeated),
                                            ::testing::Values(DType::bf16)),
                         name_of);
INSTANTIATE_TEST_SUITE_P(Cases, BackwardRepeatsGpuTest,
                         ::testing::Combine(::testing::ValuesIn(kRepeated),
                                            ::testing::Values(DType::bf16)),
                         name_of);

}  // namespace
}  // namespace coterie::gpu_test
