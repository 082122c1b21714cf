// SPDX-License-Identifier: MIT
// The torch interface on a GPU: same results as on the CPU, on the current stream, without
// synchronising, with equal bits in every run. Skipped without a GPU.
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include "coterie/error.h"
#include "coterie/runtime.h"
#include "coterie/torch/centroids.h"
#include "tensors.h"

namespace coterie::torch_api {
namespace {

using ::torch::autograd::grad;

const char* const kSpecs[] = {"clustered(clusters=8)",
                              "clustered(clusters=8,clustering=hamming)",
                              "i-clustered(clusters=8,topk=16)",
                              "i-clustered(clusters=8,topk=16,clustering=hamming-keys)",
                              "full",
                              "local(window=32)",
                              "strided(stride=7)",
                              "oracle-top(topk=16)"};

class CudaDoor : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!at::hasCUDA() || !cuda_available()) GTEST_SKIP() << "no GPU";
  }
};

struct Inputs {
  at::Tensor q, k, v, grad_out;

  explicit Inputs(std::int64_t N, at::ScalarType type = at::kFloat) {
    at::manual_seed(7);
    const auto normal = [&](std::int64_t heads) {
      return at::randn({2, heads, N, 64}, at::TensorOptions(at::kFloat)).to(type);
    };
    q = normal(4);
    k = normal(2);
    v = normal(2);
    grad_out = normal(4);
  }

  void to(const at::Device& device) {
    for (at::Tensor* tensor : {&q, &k, &v, &grad_out}) *tensor = tensor->to(device);
    for (at::Tensor* leaf : {&q, &k, &v}) leaf->requires_grad_();
  }
};

at::Tensor forward(const Inputs& inputs, const Mechanism& mechanism) {
  return attention(inputs.q, inputs.k, inputs.v, mechanism, {.seed = 3});
}

// The output, then the gradients of q, k and v.
std::vector<at::Tensor> both_passes(const Inputs& inputs, const Mechanism& mechanism) {
  std::vector<at::Tensor> results = {forward(inputs, mechanism)};
  for (const at::Tensor& gradient :
       grad({results[0]}, {inputs.q, inputs.k, inputs.v}, {inputs.grad_out})) {
    results.push_back(gradient);
  }
  return results;
}

double relative_error(const at::Tensor& got, const at::Tensor& wanted) {
  const at::Tensor exact = wanted.to(at::kDouble);
  return ((got.to(at::kCPU).to(at::kDouble) - exact).norm() / exact.norm()).item<double>();
}

// In f32 both devices find the same hash codes, labels and top keys, except for ties within
// rounding. A query in another cluster has a different result, so the data have no close ties.
TEST_F(CudaDoor, GivesWhatTheCpuGives) {
  for (const char* const spec : kSpecs) {
    const Mechanism mechanism = mechanism_of(spec);
    Inputs inputs(200);
    inputs.to(at::kCPU);
    const AttentionDetails on_cpu =
        attention_details(inputs.q, inputs.k, inputs.v, mechanism, {.seed = 3});
    const std::vector<at::Tensor> wanted = both_passes(inputs, mechanism);
    inputs.to(at::kCUDA);
    const AttentionDetails on_gpu =
        attention_details(inputs.q, inputs.k, inputs.v, mechanism, {.seed = 3});
    for (std::size_t i = 0; i < on_cpu.selection_count; ++i) {
      EXPECT_TRUE(at::equal(on_gpu.saved[i].tensor.to(at::kCPU), on_cpu.saved[i].tensor))
          << spec << " " << on_cpu.saved[i].name;
    }
    const std::vector<at::Tensor> got = both_passes(inputs, mechanism);
    for (std::size_t i = 0; i < wanted.size(); ++i) {
      EXPECT_TRUE(got[i].is_cuda());
      EXPECT_LE(relative_error(got[i], wanted[i]), i == 0 ? 1e-5 : 3e-5) << spec << " " << i;
    }
  }
}

TEST_F(CudaDoor, GivesTheSameBitsInEveryRun) {
  for (const char* const spec : kSpecs) {
    for (const at::ScalarType type : {at::kFloat, at::kBFloat16}) {
      Inputs inputs(1000, type);
      inputs.to(at::kCUDA);
      const std::vector<at::Tensor> first = both_passes(inputs, mechanism_of(spec));
      for (int run = 0; run < 5; ++run) {
        const std::vector<at::Tensor> again = both_passes(inputs, mechanism_of(spec));
        for (std::size_t i = 0; i < first.size(); ++i) {
          EXPECT_TRUE(at::equal(first[i], again[i])) << spec << " " << i;
        }
      }
    }
  }
}

// Routing's centroids: initialised on the CPU; update and commitment loss on the GPU.
TEST_F(CudaDoor, MovesCentroidsAsTheCpuDoes) {
  at::manual_seed(11);
  const at::Tensor x = at::randn({2, 4, 150, 64}, at::kFloat);
  const at::Tensor lengths = at::tensor({150, 90}, at::kInt);
  const CentroidState wanted = make_centroids(2, 8, 64, 5);
  const CentroidState got = {wanted.centroids.to(at::kCUDA), wanted.counts.to(at::kCUDA),
                             wanted.sums.to(at::kCUDA)};
  const auto step = [](const CentroidState& state, const at::Tensor& rows,
                       const at::Tensor& counts) {
    const at::Tensor leaf = rows.detach().requires_grad_();
    const at::Tensor labels = nearest_centroids(leaf, state.centroids, counts);
    const at::Tensor loss = commitment_loss(leaf, state.centroids, labels, counts);
    const at::Tensor gradient = grad({loss}, {leaf})[0];
    CentroidStatistics statistics;
    add_statistics(leaf, labels, counts, state, statistics);
    move_centroids(0.9, statistics, state);
    return std::vector<at::Tensor>{loss.reshape({1}), gradient, state.centroids, state.counts};
  };
  const std::vector<at::Tensor> expected = step(wanted, x, lengths);
  const std::vector<at::Tensor> results = step(got, x.to(at::kCUDA), lengths.to(at::kCUDA));
  for (std::size_t i = 0; i < expected.size(); ++i) {
    EXPECT_LE(relative_error(results[i], expected[i]), 1e-5) << i;
  }
}

// Queries that are ready only after `products` products of large matrices.
at::Tensor late_queries(const at::Tensor& q, const at::Tensor& matrix, int products) {
  at::Tensor product = matrix;
  for (int i = 0; i < products; ++i) product = at::matmul(matrix, product).clamp(-1, 1);
  return (q.detach() + 0 * product.view(-1)[0]).requires_grad_();
}

// Earlier work on the current stream runs first, and the host does not wait for it.
TEST_F(CudaDoor, WorksOnTheCurrentStreamWithoutWaiting) {
  const c10::impl::VirtualGuardImpl gpu(at::kCUDA);
  const Mechanism mechanism = mechanism_of("i-clustered(clusters=8,topk=16)");
  Inputs inputs(500);
  inputs.to(at::kCUDA);
  const at::Tensor q = inputs.q;
  const std::vector<at::Tensor> wanted = both_passes(inputs, mechanism);
  gpu.synchronizeDevice(0);

  const c10::StreamGuard guard(gpu.getStreamFromGlobalPool(gpu.getDevice()));
  const c10::Stream side = guard.current_stream();
  const at::Tensor matrix =
      at::randn({8192, 8192}, at::TensorOptions(at::kFloat).device(at::kCUDA));
  std::vector<at::Tensor> got;
  // The first run loads every kernel and allocates memory, which may synchronise; the second one
  // starts with half a second of work queued.
  for (const int products : {2, 25}) {
    inputs.q = late_queries(q, matrix, products);
    got = both_passes(inputs, mechanism);
    EXPECT_TRUE(products == 2 || !side.query()) << "the host waited for the GPU";
    side.synchronize();
  }
  for (std::size_t i = 0; i < wanted.size(); ++i) {
    EXPECT_TRUE(at::equal(got[i], wanted[i])) << i;
  }
}

TEST_F(CudaDoor, PassesRefusalsOn) {
  Inputs wide(32, at::kDouble);
  wide.to(at::kCUDA);
  EXPECT_THROW(forward(wide, mechanism_of("oracle-top")), Error);
  Inputs inputs(32);
  inputs.to(at::kCUDA);
  inputs.k = inputs.k.to(at::kCPU);
  EXPECT_THROW(forward(inputs, mechanism_of("clustered(clusters=8)")), Error);
}

}  // namespace
}  // namespace coterie::torch_api
