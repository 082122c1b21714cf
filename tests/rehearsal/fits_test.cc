// SPDX-License-Identifier: MIT
// Every mechanism, element type and head size fits on every kind of GPU, forward and backward:
// shared memory, registers and, where blocks wait for each other, their number. Runs without a GPU
// (fake_cuda.h). COTERIE_KERNEL_USES names the resource usage of this program's kernels.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <map>
#include <string>
#include <vector>

#include "core/check.h"
#include "coterie/kmeans.h"
#include "coterie/passes.h"
#include "coterie/spec.h"
#include "coterie/tensor.h"
#include "tests/rehearsal/fake_cuda.h"

namespace coterie {
namespace {

using fake_cuda::KernelUse;

constexpr int kReserved =
    1024;  // bytes of shared memory that code of 9.0 counts and blocks do not pay

// Reads what cuobjdump --dump-resource-usage prints: the largest use of all architectures. Kernels
// that were not optimised (COTERIE_KERNELS_QUICK) say nothing about registers.
std::map<std::string, KernelUse> read_uses(const std::string& path) {
  std::ifstream file(path);
  COTERIE_CHECK(file.good(), "test", "expected a readable file in COTERIE_KERNEL_USES; got ", path);
  std::map<std::string, KernelUse> uses;
  std::string name;
  bool hopper = false, reserves = false;
  const bool quick = std::getenv("COTERIE_KERNELS_QUICK") != nullptr;
  for (std::string line; std::getline(file, line);) {
    if (line.rfind("arch = ", 0) == 0) {
      hopper = line.find("sm_90a") != std::string::npos;
      reserves = line.find("sm_9") != std::string::npos || line.find("sm_1") != std::string::npos;
    }
    if (const auto at = line.find("Function "); at != std::string::npos) {
      name = line.substr(at + 9);
      name = name.substr(0, name.find(':'));
    }
    const auto registers = line.find("REG:"), shared = line.find("SHARED:");
    if (registers == std::string::npos || shared == std::string::npos) continue;
    const auto [use, first] = uses.try_emplace(name);
    if (!quick)
      use->second.registers =
          std::max(use->second.registers, std::atoi(line.c_str() + registers + 4));
    const int bytes = std::atoi(line.c_str() + shared + 7);
    use->second.shared =
        std::max(use->second.shared, reserves ? std::max(bytes - kReserved, 0) : bytes);
    use->second.hopper = hopper && (first || use->second.hopper);
  }
  return uses;
}

// Addresses that nothing reads.
struct Memory {
  Device device;
  std::uintptr_t next = std::uintptr_t{1} << 40;

  void* take(std::int64_t bytes) {
    const std::uintptr_t at = next;
    next += static_cast<std::uintptr_t>(bytes + 4095) / 4096 * 4096;
    return reinterpret_cast<void*>(at);  // NOLINT(performance-no-int-to-ptr)
  }
  TensorView tensor(DType dtype, std::initializer_list<std::int64_t> sizes) {
    TensorView view = TensorView::contiguous(nullptr, dtype, sizes, device);
    view.data = take(view.count() * dtype_bytes(dtype));
    return view;
  }
};

struct Shape {
  DType dtype;
  std::int64_t D, N;
  double dropout;
  std::int64_t key_heads;
};

constexpr std::int64_t kHeads = 4;

void rehearse(const std::string& text, bool causal, const Shape& shape, int device) {
  Memory memory{Device(Device::cuda, device)};
  const Mechanism mechanism = AttentionSpec::parse(text).groups.at(0).mechanism;
  AttentionInputs inputs;
  const auto rows = [&](std::int64_t heads) {
    return memory.tensor(shape.dtype, {2, heads, shape.N, shape.D});
  };
  inputs.q = rows(kHeads);
  if (!std::holds_alternative<LshParams>(mechanism)) inputs.k = rows(shape.key_heads);
  inputs.v = rows(shape.key_heads);
  inputs.causal = causal;
  inputs.dropout = shape.dropout;
  AttentionResult result;
  AttentionGradients gradients;
  if (const auto* routing = std::get_if<RoutingParams>(&mechanism))
    inputs.centroids = memory.tensor(DType::f32, {shape.key_heads, routing->clusters, shape.D});
  if (const auto* cast = std::get_if<CastParams>(&mechanism)) {
    inputs.centroids = memory.tensor(DType::f32, {kHeads, cast->clusters, shape.D});
    inputs.gate = memory.tensor(DType::f32, {2, shape.N});
    gradients.dcentroids = inputs.centroids;
    gradients.dgate = inputs.gate;
  }
  for (const TensorLayout& layout : attention_saved(mechanism, inputs).tensors) {
    TensorView view = view_of(layout, nullptr, memory.device);
    view.data = memory.take(view.count() * dtype_bytes(layout.dtype));
    result.saved.push_back(view);
  }
  result.out = rows(kHeads);
  gradients.dq = rows(kHeads);
  if (inputs.k.present()) gradients.dk = rows(shape.key_heads);
  gradients.dv = rows(shape.key_heads);
  Workspace workspace;
  workspace.bytes = attention_workspace_bytes(mechanism, inputs);
  workspace.data = memory.take(workspace.bytes);
  attention_forward(mechanism, inputs, result, workspace);
  attention_backward(mechanism, inputs, result, rows(kHeads), gradients, workspace);
}

struct Spec {
  const char* text;
  bool causal;
};
const std::vector<Spec> kSpecs{
    {"full", true},
    {"local(window=256)", true},
    {"strided(stride=64)", true},
    {"oracle-top(topk=32)", false},
    {"clustered(clusters=100)", false},
    {"clustered(clusters=3000,clustering=hamming)", false},
    {"i-clustered(clusters=100,topk=32)", false},
    {"i-clustered(clusters=300,topk=128,clustering=hamming-keys)", false},
    {"i-clustered(clusters=100,topk=128,causal=reference)", true},
    {"i-clustered(clusters=100,topk=64,near=32)", false},
    {"lsh(rounds=2,buckets=64,chunk=64)", true},
    {"routing(clusters=16,window=256)", true},
    {"routing(clusters=16,window=256,causal=paper)", true},
    {"routing(clusters=40,window=256)", false},
    {"routing(clusters=40,membership=balanced)", false},
    {"cast(clusters=64,size=64)", false},
    {"cast(clusters=300,size=32,activation=laplace)", false},
    {"cast(clusters=64,size=64,mode=single)", false},
};

class Rehearsal : public testing::TestWithParam<int> {};

TEST_P(Rehearsal, EveryMechanismFits) {
  const char* path = std::getenv("COTERIE_KERNEL_USES");
  if (!path) GTEST_SKIP() << "COTERIE_KERNEL_USES is not set";
  fake_cuda::set_uses(read_uses(path));
  const int device = GetParam();
  std::printf("| %s |", fake_cuda::gpus()[static_cast<std::size_t>(device)].name);
  for (const Spec& spec : kSpecs) {
    int most = 0;
    for (const DType dtype : {DType::f32, DType::bf16, DType::f16})
      for (const std::int64_t D : {32, 64, 128})
        for (const std::int64_t N : {1200, 20000})
          for (const double dropout : {0.0, 0.1})
            for (const std::int64_t key_heads : {4, 2}) {
              std::string fault;
              try {
                rehearse(spec.text, spec.causal, {dtype, D, N, dropout, key_heads}, device);
              } catch (const Error& error) {
                fault = error.what();
              }
              const fake_cuda::Launches launches = fake_cuda::take_launches();
              most = std::max(most, launches.most_shared);
              for (const std::string& each : launches.faults) fault += "\n  " + each;
              if (launches.count == 0) fault += " nothing was launched";
              EXPECT_EQ(fault, "") << spec.text << ", " << dtype_name(dtype) << ", D = " << D
                                   << ", N = " << N << ", dropout " << dropout;
            }
    std::printf(" %.0f |", most / 1024.0);
  }
  std::printf("\n");
}

TEST_P(Rehearsal, KMeansFits) {
  const char* path = std::getenv("COTERIE_KERNEL_USES");
  if (!path) GTEST_SKIP() << "COTERIE_KERNEL_USES is not set";
  fake_cuda::set_uses(read_uses(path));
  for (const DType dtype : {DType::f32, DType::bf16, DType::f16})
    for (const std::int64_t D : {32, 64, 128})
      for (const std::int64_t clusters : {10, 1024, 16000}) {
        Memory memory{Device(Device::cuda, GetParam())};
        const TensorView x = memory.tensor(dtype, {3, 20000, D});
        const KMeansResult result{memory.tensor(DType::f32, {3, clusters, D}),
                                  memory.tensor(DType::i32, {3, 20000}),
                                  memory.tensor(DType::i32, {3, clusters})};
        const KMeansParams params{2, KMeansStart::plus_plus, true, 1};
        const std::int64_t bytes = kmeans_workspace_bytes(params, x, clusters);
        kmeans(params, x, result, {memory.take(bytes), bytes, nullptr});
        const fake_cuda::Launches launches = fake_cuda::take_launches();
        EXPECT_EQ(launches.faults, std::vector<std::string>());
        EXPECT_GT(launches.count, clusters);
      }
}

// A GPU whose shared memory has no counters for that many clusters says so.
TEST(RehearsalOfRefusals, TooManyClustersForAGpu) {
  const char* path = std::getenv("COTERIE_KERNEL_USES");
  if (!path) GTEST_SKIP() << "COTERIE_KERNEL_USES is not set";
  fake_cuda::set_uses(read_uses(path));
  const auto message = [](int device) {
    try {
      rehearse("clustered(clusters=30000,clustering=hamming)", false,
               {DType::bf16, 64, 40000, 0.0, 4}, device);
    } catch (const Error& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  EXPECT_EQ(message(0), "");  // A100
  EXPECT_NE(message(1).find("clusters of a head, for which this GPU has shared memory; got 30000"),
            std::string::npos)
      << message(1);
  fake_cuda::take_launches();
}

INSTANTIATE_TEST_SUITE_P(Gpus, Rehearsal,
                         testing::Range(0, static_cast<int>(fake_cuda::gpus().size())));

}  // namespace
}  // namespace coterie
