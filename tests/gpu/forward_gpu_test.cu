// SPDX-License-Identifier: MIT
// The attention stages of clustered and improved clustered attention on the GPU against the CPU in
// f64, given the CPU's clusters: cluster means, top keys, centroid attention, outputs. Then bit
// equality of repeated runs and graph capture.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <random>
#include <string>
#include <vector>

#include "core/arena.h"
#include "core/call.h"
#include "core/items.h"
#include "coterie/attention.h"
#include "coterie/runtime.h"
#include "cuda/cluster/means.h"
#include "cuda/clustered/clustered.h"
#include "cuda/launch/device.h"
#include "tests/gpu/device_tensor.h"

namespace coterie::gpu_test {
namespace {

enum class Batch { full, lengths, packed };
enum class Data { normal, equal_queries, equal_keys, sorted_keys, unit };

struct Case {
  const char* name;
  DType dtype = DType::bf16;
  std::int64_t B = 1, H = 2, kv_heads = 2, N = 128, S = 128, D = 64, clusters = 16, topk = 8;
  Batch batch = Batch::full;
  Data data = Data::normal;
  bool rows_first = false;   // (B, N, H, D) in memory
  std::int64_t padding = 0;  // unused elements after every row
  double scale = 0.0;
};

struct HostInputs {
  std::vector<HostTensor> memory;
  AttentionInputs inputs;
};

std::vector<double> values_of(const Case& c, std::int64_t heads, std::int64_t rows, int which) {
  std::mt19937_64 engine(static_cast<std::uint64_t>(17 * rows + which));
  std::normal_distribution<double> normal;
  std::vector<double> values(static_cast<std::size_t>(c.B * heads * rows * c.D));
  for (std::size_t i = 0; i < values.size(); ++i) {
    const std::size_t row = i / static_cast<std::size_t>(c.D);
    values[i] = normal(engine);
    if (which == 0 && c.data == Data::equal_queries) values[i] = 0.1 * static_cast<double>(i % 7);
    if (which == 1 && c.data == Data::equal_keys)
      values[i] = 0.1 * static_cast<double>(i % static_cast<std::size_t>(c.D));
    if (which == 1 && c.data == Data::sorted_keys)
      values[i] =
          0.001 * static_cast<double>(row % static_cast<std::size_t>(rows)) + 0.01 * values[i];
    if (which == 0 && c.data == Data::sorted_keys) values[i] = 0.5 + 0.1 * values[i];
  }
  return values;
}

TensorView add_tensor(const Case& c, HostInputs& host, DType dtype, std::int64_t heads,
                      std::int64_t rows, int which) {
  const std::int64_t width = c.D + c.padding;
  host.memory.emplace_back(dtype, c.rows_first
                                      ? std::vector<std::int64_t>{c.B, rows, heads, width}
                                      : std::vector<std::int64_t>{c.B, heads, rows, width});
  TensorView view = host.memory.back().view();
  if (c.rows_first) view = view.transposed(1, 2);
  view = view.narrowed(3, 0, c.D);
  write_values(view, values_of(c, heads, rows, which));
  return view;
}

Sequences add_sequences(const Case& c, HostInputs& host, std::int64_t rows) {
  Sequences sequences;
  if (c.batch == Batch::lengths) {
    host.memory.emplace_back(DType::i32, std::vector<std::int64_t>{c.B});
    for (std::int64_t b = 0; b < c.B; ++b)
      host.memory.back().data<std::int32_t>()[b] =
          static_cast<std::int32_t>(b == 1 ? 0 : rows * (b + 1) / (c.B + 1));
    sequences.lengths = host.memory.back().view();
  } else if (c.batch == Batch::packed) {
    const std::vector<std::int64_t> ends = {0,        rows / 7,     rows / 7,
                                            rows / 2, rows / 2 + 1, rows - rows / 9};
    host.memory.emplace_back(DType::i32, std::vector<std::int64_t>{6});
    for (std::size_t i = 0; i < ends.size(); ++i)
      host.memory.back().data<std::int32_t>()[i] = static_cast<std::int32_t>(ends[i]);
    sequences.cu_seqlens = host.memory.back().view();
  }
  return sequences;
}

// Inputs of element type `dtype` with values rounded to the case's own type.
HostInputs make_inputs(const Case& c, DType dtype) {
  HostInputs host;
  host.memory.reserve(16);
  AttentionInputs& inputs = host.inputs;
  const std::int64_t heads[] = {c.H, c.kv_heads, c.kv_heads}, rows[] = {c.N, c.S, c.S};
  TensorView* const views[] = {&inputs.q, &inputs.k, &inputs.v};
  for (int which = 0; which < 3; ++which) {
    HostInputs rounded;
    const TensorView own = add_tensor(c, rounded, c.dtype, heads[which], rows[which], which);
    *views[which] = add_tensor(c, host, dtype, heads[which], rows[which], which);
    write_values(*views[which], read_values(own));
  }
  inputs.q_sequences = add_sequences(c, host, c.N);
  inputs.k_sequences = add_sequences(c, host, c.S);
  inputs.scale = c.scale;
  inputs.seed = 5;
  return host;
}

struct HostResult {
  HostTensor out;
  std::vector<HostTensor> saved;
  std::vector<std::string> names;
  AttentionResult views() const {
    AttentionResult result{out.view(), {}};
    for (const HostTensor& tensor : saved) result.saved.push_back(tensor.view());
    return result;
  }
};

HostResult allocate(const Mechanism& mechanism, const AttentionInputs& inputs) {
  HostResult result;
  const SavedLayout layout = attention_saved(mechanism, inputs);
  for (const TensorLayout& tensor : layout.tensors) {
    result.saved.emplace_back(tensor);
    result.names.push_back(tensor.name);
  }
  result.out = HostTensor(inputs.q.dtype,
                          {inputs.q.size(0), inputs.q.size(1), inputs.q.size(2), inputs.v.size(3)});
  return result;
}

// Selects in f32, attends in f64, on the CPU.
HostResult oracle(const Mechanism& mechanism, const Case& c) {
  const HostInputs single = make_inputs(c, DType::f32), twice = make_inputs(c, DType::f64);
  HostResult selected = allocate(mechanism, single.inputs),
             result = allocate(mechanism, twice.inputs);
  const auto workspace = [&](const AttentionInputs& inputs) {
    return HostTensor(DType::u8, {attention_workspace_bytes(mechanism, inputs) + 64});
  };
  HostTensor a = workspace(single.inputs), b = workspace(twice.inputs);
  attention_select(mechanism, single.inputs, selected.views().saved,
                   {a.data<std::uint8_t>(), a.view().size(0), nullptr});
  const std::size_t count = attention_saved(mechanism, single.inputs).selection_count;
  for (std::size_t i = 0; i < count; ++i) result.saved[i] = selected.saved[i];
  attention_attend(mechanism, twice.inputs, result.views(),
                   {b.data<std::uint8_t>(), b.view().size(0), nullptr});
  return result;
}

// All tensors of a case on the GPU.
struct Gpu {
  HostInputs host;
  std::vector<DeviceTensor> inputs_memory, saved;
  AttentionInputs inputs;
  DeviceTensor out;
  DeviceMemory workspace;
  std::vector<std::string> names;

  Gpu(const Mechanism& mechanism, const Case& c, const HostResult* selection)
      : host(make_inputs(c, c.dtype)), inputs(host.inputs) {
    inputs_memory.reserve(16);
    TensorView* const views[] = {&inputs.q,
                                 &inputs.k,
                                 &inputs.v,
                                 &inputs.q_sequences.lengths,
                                 &inputs.q_sequences.cu_seqlens,
                                 &inputs.k_sequences.lengths,
                                 &inputs.k_sequences.cu_seqlens};
    for (TensorView* view : views) {
      if (!view->present()) continue;
      inputs_memory.emplace_back(*view);
      *view = inputs_memory.back().view();
    }
    const SavedLayout layout = attention_saved(mechanism, inputs);
    for (std::size_t i = 0; i < layout.tensors.size(); ++i) {
      names.push_back(layout.tensors[i].name);
      saved.push_back(selection && i < layout.selection_count
                          ? DeviceTensor(selection->saved[i].view())
                          : DeviceTensor(layout.tensors[i]));
    }
    out = DeviceTensor(TensorLayout{"out", c.dtype, {c.B, c.H, c.N, c.D}});
    workspace = DeviceMemory(attention_workspace_bytes(mechanism, inputs));
  }
  AttentionResult result() const {
    AttentionResult views{out.view(), {}};
    for (const DeviceTensor& tensor : saved) views.saved.push_back(tensor.view());
    return views;
  }
  Workspace ws(cudaStream_t stream) const { return {workspace.data(), workspace.bytes(), stream}; }
};

struct Tolerance {
  double relative, absolute;
};

Tolerance tolerance(DType dtype) {
  if (dtype == DType::bf16) return {3e-3, 2e-2};
  if (dtype == DType::f16) return {5e-4, 3e-3};
  return {1e-5, 1e-4};
}

// Relative Frobenius error; -inf exactly where the oracle has -inf; no NaN.
double compare(const std::string& where, const DeviceTensor& gpu, const HostTensor& cpu,
               double allowed) {
  const std::vector<double> got = read_values(gpu.download()), want = read_values(cpu);
  double error = 0, norm = 0, worst = 0;
  bool shapes = got.size() == want.size(), finite = true;
  for (std::size_t i = 0; shapes && i < got.size(); ++i) {
    if (std::isinf(want[i]) || std::isinf(got[i])) {
      finite = finite && want[i] == got[i];
      continue;
    }
    finite = finite && !std::isnan(got[i]);
    error += (got[i] - want[i]) * (got[i] - want[i]);
    norm += want[i] * want[i];
    worst = std::max(worst, std::abs(got[i] - want[i]));
  }
  const double relative = std::sqrt(error) / std::max(std::sqrt(norm), 1e-30);
  const bool good = shapes && finite && (relative <= allowed || std::sqrt(error) < 1e-7);
  char text[160];
  std::snprintf(text, sizeof text, "relative error %.3g (allowed %.3g), largest %.3g%s%s", relative,
                allowed, worst, finite ? "" : ", NaN or misplaced infinity",
                shapes ? "" : ", shape");
  EXPECT_TRUE(good) << where << ": " << text;
  return relative;
}

AttentionCall make_call(const char* op, const AttentionInputs& inputs) {
  AttentionCall call;
  call.op = op;
  call.inputs = inputs;
  call.device = Device::cuda;
  call.k = inputs.k;
  call.B = inputs.q.size(0);
  call.H = inputs.q.size(1);
  call.N = inputs.q.size(2);
  call.S = inputs.v.size(2);
  call.Dk = inputs.q.size(3);
  call.Dv = inputs.v.size(3);
  call.key_heads = call.value_heads = inputs.v.size(1);
  call.scale = inputs.scale != 0 ? inputs.scale : 1.0 / std::sqrt(static_cast<double>(call.Dk));
  call.item_total = item_count(inputs.q_sequences, call.B);
  return call;
}

// Fills the top keys of gpu.saved from its clusters; with `attend`, also computes the attention of
// the means.
void run_select(Gpu& gpu, std::int64_t clusters, std::int64_t topk, cudaStream_t stream,
                bool attend = false) {
  const AttentionCall call = make_call("i-clustered", gpu.inputs);
  ClusteringParams clustering;
  clustering.clusters = clusters;
  clustering.method = Clustering::hamming;
  const cuda::ClusteredPlan plan = cuda::clustered_plan(call, clustering, topk, true);
  const std::vector<TensorView> saved = gpu.result().saved;
  cuda::ClusteredForward pass{plan,
                              cuda::clustered_tensors(saved.data(), saved.size(), true, false)};
  pass.selection_attends = attend;
  pass.stream = stream;
  const auto run = [&](Arena& arena) {
    pass.counters = arena.take<unsigned>(plan.counters());
    cuda::centroid_means(call, pass.tensors.order, pass.tensors.offsets, pass.tensors.centroids,
                         arena, stream, {pass.counters, plan.counters()});
    cuda::select_top_keys(pass, arena);
  };
  Arena counted;
  run(counted);
  if (counted.used() > gpu.workspace.bytes()) gpu.workspace = DeviceMemory(counted.used());
  Arena arena("test", gpu.ws(stream), 0);
  run(arena);
}

// Scores of the selected keys against the best ones, by the CPU's means in f64.
void check_top_keys(const Case& c, const Gpu& gpu, const HostResult& want) {
  const std::vector<double> got = read_values(gpu.saved[3].download()),
                            cpu = read_values(want.saved[3]);
  const std::vector<double> means = read_values(want.saved[4]),
                            offsets = read_values(want.saved[2]);
  const std::vector<double> keys = read_values(gpu.host.inputs.k);
  const std::int64_t items = want.saved[3].view().size(0), width = want.saved[3].view().size(3);
  const double sign = c.scale < 0 ? -1 : 1;
  const HostInputs& host = gpu.host;
  std::int64_t same = 0, rows = 0;
  for (std::int64_t row = 0; row < items * c.H * c.clusters; ++row) {
    const std::int64_t item = row / c.clusters / c.H, head = row / c.clusters % c.H;
    const std::int64_t problem = row / c.clusters, cluster = row % c.clusters;
    std::int64_t batch = item, begin = 0, length = c.S;
    if (c.batch == Batch::lengths)
      length = host.inputs.k_sequences.lengths.data
                   ? static_cast<const std::int32_t*>(host.inputs.k_sequences.lengths.data)[item]
                   : c.S;
    if (c.batch == Batch::packed) {
      const auto* cu = static_cast<const std::int32_t*>(host.inputs.k_sequences.cu_seqlens.data);
      batch = 0;
      begin = cu[item];
      length = cu[item + 1] - cu[item];
    }
    const std::size_t at = static_cast<std::size_t>(problem * (c.clusters + 1) + cluster);
    const bool empty = offsets[at] == offsets[at + 1];
    const std::int64_t expected = empty ? 0 : std::min(c.topk, length);
    std::vector<double> scores;
    const auto score = [&](std::int64_t key) {
      double sum = 0;
      const std::int64_t kv = head / (c.H / c.kv_heads);
      for (std::int64_t d = 0; d < c.D; ++d)
        sum += means[static_cast<std::size_t>(row * c.D + d)] *
               keys[static_cast<std::size_t>(((batch * c.kv_heads + kv) * c.S + begin + key) * c.D +
                                             d)];
      return sign * sum;
    };
    bool good = true, equal = true;
    double least = 1e300, magnitude = 0;
    std::int64_t last = -1;
    for (std::int64_t t = 0; t < width; ++t) {
      const std::int64_t key =
          static_cast<std::int64_t>(got[static_cast<std::size_t>(row * width + t)]);
      equal =
          equal && key == static_cast<std::int64_t>(cpu[static_cast<std::size_t>(row * width + t)]);
      if (t >= expected) {
        good = good && key == -1;
        continue;
      }
      good = good && key > last && key < length;
      if (!good) break;
      last = key;
      least = std::min(least, score(key));
    }
    EXPECT_TRUE(good) << "top keys of row " << row << " are not a valid list";
    ++rows;
    same += equal;
    if (!good || equal || expected == 0) continue;
    for (std::int64_t key = 0; key < length; ++key) scores.push_back(score(key));
    std::sort(scores.begin(), scores.end(), std::greater<>());
    for (const double s : scores) magnitude = std::max(magnitude, std::abs(s));
    EXPECT_GE(least, scores[static_cast<std::size_t>(expected - 1)] - 2e-6 * magnitude - 1e-9)
        << "top keys of row " << row << " miss a better key";
  }
  EXPECT_GE(same * 50, rows * 49) << "rows with the CPU's top keys: " << same << " of " << rows;
}

Mechanism improved(const Case& c) {
  ImprovedClusteredParams params;
  params.clustering.clusters = c.clusters;
  params.topk = c.topk;
  return params;
}
Mechanism plain(const Case& c) {
  ClusteredParams params;
  params.clustering.clusters = c.clusters;
  return params;
}

class ForwardGpuTest : public ::testing::TestWithParam<Case> {};

TEST_P(ForwardGpuTest, AgreesWithTheCpu) {
  if (!cuda_available()) GTEST_SKIP() << "no GPU";
  const Case& c = GetParam();
  const Tolerance allowed = tolerance(c.dtype);
  std::string line;
  for (const Mechanism& mechanism : {improved(c), plain(c)}) {
    const bool top = std::holds_alternative<ImprovedClusteredParams>(mechanism);
    const HostResult want = oracle(mechanism, c);
    Gpu gpu(mechanism, c, &want);
    const std::string where = std::string(c.name) + (top ? " i-clustered " : " clustered ");
    attention_attend(mechanism, gpu.inputs, gpu.result(), gpu.ws(nullptr));
    COTERIE_CUDA(cudaDeviceSynchronize());
    const double error = compare(where + "out", gpu.out, want.out, allowed.relative);
    char text[64];
    std::snprintf(text, sizeof text, " %s %.2e", top ? "i" : "c", error);
    line += text;
    for (std::size_t i = top ? 4 : 3; i < gpu.saved.size(); ++i) {
      const bool logs = gpu.names[i].find("lse") != std::string::npos;
      compare(where + gpu.names[i], gpu.saved[i], want.saved[i],
              logs                          ? allowed.absolute
              : gpu.names[i] == "centroids" ? 1e-5
                                            : 2 * allowed.relative);
    }
    if (!top) continue;
    gpu.saved[3].memory().poison();
    gpu.workspace.poison();
    run_select(gpu, c.clusters, std::min(c.topk, c.S), nullptr);
    COTERIE_CUDA(cudaDeviceSynchronize());
    check_top_keys(c, gpu, want);
    if (c.dtype == DType::f32 || !cuda::on_hopper()) continue;
    // Selection and centroid attention in one call: same top keys, and attention without masks.
    const std::vector<std::uint8_t> keys = gpu.saved[3].bytes();
    for (std::size_t i = 3; i < 8; ++i)
      if (i != 4) gpu.saved[i].memory().poison();
    gpu.workspace.poison();
    run_select(gpu, c.clusters, std::min(c.topk, c.S), nullptr, true);
    COTERIE_CUDA(cudaDeviceSynchronize());
    EXPECT_EQ(gpu.saved[3].bytes(), keys) << "computing the attention as well changes the top keys";
    for (std::size_t i = 5; i < 8; ++i)
      compare(where + "in one call, " + gpu.names[i], gpu.saved[i], want.saved[i],
              i == 5 ? allowed.absolute : 2 * allowed.relative);
  }
  std::printf("%-22s%s\n", c.name, line.c_str());
}

// Means, selection and attention of one call on a stream.
void run_stages(const Mechanism& mechanism, Gpu& gpu, const Case& c, cudaStream_t stream) {
  run_select(gpu, c.clusters, std::min(c.topk, c.S), stream);
  attention_attend(mechanism, gpu.inputs, gpu.result(), gpu.ws(stream));
}

std::vector<std::vector<std::uint8_t>> all_bytes(const Gpu& gpu) {
  std::vector<std::vector<std::uint8_t>> copies = {gpu.out.bytes()};
  for (const DeviceTensor& tensor : gpu.saved) copies.push_back(tensor.bytes());
  return copies;
}

class ForwardRepeatsGpuTest : public ::testing::TestWithParam<Case> {};

TEST_P(ForwardRepeatsGpuTest, RepeatsItsBits) {
  if (!cuda_available()) GTEST_SKIP() << "no GPU";
  const Case& c = GetParam();
  const Mechanism mechanism = improved(c);
  const HostResult want = oracle(mechanism, c);
  Gpu gpu(mechanism, c, &want);
  cudaStream_t stream = nullptr;
  COTERIE_CUDA(cudaStreamCreate(&stream));
  std::vector<std::vector<std::uint8_t>> first;
  for (int run = 0; run < 20; ++run) {
    gpu.out.memory().poison();
    for (std::size_t i = 3; i < gpu.saved.size(); ++i) gpu.saved[i].memory().poison();
    gpu.workspace.poison();
    COTERIE_CUDA(cudaDeviceSynchronize());
    run_stages(mechanism, gpu, c, stream);
    COTERIE_CUDA(cudaStreamSynchronize(stream));
    if (run == 0) first = all_bytes(gpu);
    EXPECT_EQ(all_bytes(gpu), first) << "run " << run << " differs in bits";
  }
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t executable = nullptr;
  COTERIE_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  run_stages(mechanism, gpu, c, stream);
  COTERIE_CUDA(cudaStreamEndCapture(stream, &graph));
  COTERIE_CUDA(cudaGraphInstantiate(&executable, graph, 0));
  gpu.out.memory().poison();
  COTERIE_CUDA(cudaDeviceSynchronize());
  COTERIE_CUDA(cudaGraphLaunch(executable, stream));
  COTERIE_CUDA(cudaStreamSynchronize(stream));
  EXPECT_EQ(all_bytes(gpu), first) << "a captured graph differs in bits";
}

const Case kCases[] = {
    {"small"},
    {"one_token", DType::f32, 1, 1, 1, 1, 1, 64, 4, 4},
    {"n31_c_above_n", DType::f32, 2, 2, 2, 31, 31, 64, 40, 8},
    {"n129", DType::bf16, 1, 2, 2, 129, 129, 64, 7, 32},
    {"n1000_s700", DType::bf16, 2, 4, 4, 1000, 700, 64, 50, 32},
    {"n700_s1000_f32", DType::f32, 1, 2, 2, 700, 1000, 64, 130, 32},
    {"d32", DType::bf16, 1, 2, 2, 600, 600, 32, 20, 16},
    {"d32_f32", DType::f32, 1, 2, 2, 600, 600, 32, 20, 16},
    {"d40", DType::f16, 1, 2, 2, 600, 600, 40, 20, 16},
    {"d33_odd", DType::bf16, 1, 2, 2, 300, 300, 33, 20, 16},
    {"d33_odd_f32", DType::f32, 1, 2, 2, 300, 300, 33, 20, 16},
    {"d96", DType::bf16, 1, 2, 2, 600, 600, 96, 20, 40},
    {"d96_f16", DType::f16, 1, 2, 2, 600, 600, 96, 20, 40},
    {"d96_f32", DType::f32, 1, 2, 2, 600, 600, 96, 20, 40},
    {"d128", DType::bf16, 1, 2, 2, 700, 700, 128, 20, 128},
    {"d128_f16", DType::f16, 1, 2, 2, 700, 700, 128, 20, 128},
    {"d128_f32", DType::f32, 1, 2, 2, 700, 700, 128, 20, 128},
    {"d64_f16", DType::f16, 1, 2, 2, 700, 700, 64, 20, 32},
    {"gqa", DType::bf16, 2, 8, 2, 500, 600, 64, 30, 32},
    {"rows_first", DType::bf16, 2, 4, 2, 500, 500, 64, 30, 32, Batch::full, Data::normal, true},
    {"padded_rows", DType::f16, 1, 2, 2, 300, 300, 40, 30, 32, Batch::full, Data::normal, true, 1},
    {"lengths", DType::bf16, 4, 2, 2, 500, 400, 64, 30, 32, Batch::lengths},
    {"lengths_f32", DType::f32, 4, 2, 1, 500, 400, 64, 30, 32, Batch::lengths},
    {"packed", DType::bf16, 1, 4, 2, 2000, 1500, 64, 60, 32, Batch::packed},
    {"packed_f32", DType::f32, 1, 2, 2, 2000, 1500, 32, 60, 5, Batch::packed},
    {"equal_queries", DType::bf16, 1, 2, 2, 500, 500, 64, 30, 32, Batch::full, Data::equal_queries},
    {"equal_keys", DType::bf16, 1, 2, 2, 500, 3000, 64, 30, 32, Batch::full, Data::equal_keys},
    {"sorted_keys", DType::f16, 1, 2, 2, 500, 6000, 64, 30, 32, Batch::full, Data::sorted_keys},
    {"many_keys", DType::bf16, 1, 2, 2, 4000, 20000, 64, 140, 32},
    {"many_keys_f32", DType::f32, 1, 1, 1, 2000, 12000, 64, 140, 100},
    {"k_above_s", DType::bf16, 1, 2, 2, 300, 20, 64, 30, 32},
    {"negative_scale", DType::bf16, 1, 2, 2, 700, 3000, 64, 30, 32, Batch::full, Data::normal,
     false, 0, -0.2},
    {"large_scale", DType::f16, 1, 2, 2, 700, 900, 64, 30, 32, Batch::full, Data::normal, false, 0,
     2.0},
    {"many_clusters", DType::bf16, 1, 1, 1, 3000, 3000, 64, 1500, 32},
    {"many_heads", DType::bf16, 5, 8, 4, 300, 900, 64, 20, 32},
    {"many_heads_d128", DType::f16, 10, 8, 8, 200, 700, 128, 150, 64},
    {"long_lists", DType::bf16, 1, 16, 4, 400, 5000, 64, 256, 100},
};

const Case kRepeated[] = {
    {"heads", DType::bf16, 1, 4, 2, 4000, 9000, 64, 140, 32},
    {"packed", DType::f16, 1, 4, 2, 4000, 9000, 128, 60, 32, Batch::packed},
    {"batches", DType::bf16, 3, 8, 4, 1000, 1500, 64, 140, 32},
    {"f32", DType::f32, 1, 2, 2, 3000, 3000, 64, 60, 32},
};

INSTANTIATE_TEST_SUITE_P(Cases, ForwardGpuTest, ::testing::ValuesIn(kCases),
                         [](const auto& test) { return test.param.name; });
INSTANTIATE_TEST_SUITE_P(Cases, ForwardRepeatsGpuTest, ::testing::ValuesIn(kRepeated),
                         [](const auto& test) { return test.param.name; });

}  // namespace
}  // namespace coterie::gpu_test
