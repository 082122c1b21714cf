// SPDX-License-Identifier: MIT
// Several threads call the library while another changes the number of threads: every result has
// the same bits as with one caller and one thread.
#include <gtest/gtest.h>

#include <atomic>
#include <functional>
#include <thread>
#include <vector>

#include "cases/cases.h"
#include "cases/problem.h"
#include "coterie/attention.h"
#include "coterie/routing.h"
#include "coterie/runtime.h"
#include "ops/parts.h"
#include "tests/support/expect.h"
#include "tests/support/tensors.h"

namespace coterie {
namespace {

using cases::Case;
using cases::Pass;
using cases::Problem;
using test::Shape;

constexpr int kCallers = 3;
constexpr int kThreadCounts[] = {1, 5, 2, 16, 3};

// A call with its outputs in new memory.
struct Operation {
  std::string name;
  std::function<std::vector<HostTensor>()> run;
};

HostTensor copy_of(const TensorView& view) {
  HostTensor copy(view.dtype, Shape(view.sizes, view.sizes + view.rank));
  write_values(copy, read_values(view));
  return copy;
}

class ConcurrencyTest : public ::testing::Test {
 protected:
  void TearDown() override { set_threads(2); }

  // All callers run all operations, each starting at a different one, while set_threads is called.
  static void expect_bits_of_one_caller(const std::vector<Operation>& operations) {
    set_threads(1);
    std::vector<std::vector<HostTensor>> expected;
    for (const Operation& operation : operations) expected.push_back(operation.run());
    std::atomic<int> working{kCallers};
    const auto call_all = [&](std::size_t first) {
      for (std::size_t i = 0; i < operations.size(); ++i) {
        const std::size_t at = (first + i) % operations.size();
        try {
          const std::vector<HostTensor> outputs = operations[at].run();
          ASSERT_EQ(outputs.size(), expected[at].size());
          for (std::size_t o = 0; o < outputs.size(); ++o)
            EXPECT_TRUE(test::same_bits(expected[at][o], outputs[o]))
                << operations[at].name << ", output " << o;
        } catch (const std::exception& error) {
          ADD_FAILURE() << operations[at].name << ": " << error.what();
        }
      }
      --working;
    };
    std::vector<std::thread> callers;
    for (std::size_t caller = 0; caller < kCallers; ++caller)
      callers.emplace_back(call_all, caller * operations.size() / kCallers);
    for (std::size_t turn = 0; working > 0; ++turn) {
      set_threads(kThreadCounts[turn % std::size(kThreadCounts)]);
      std::this_thread::yield();
    }
    for (std::thread& caller : callers) caller.join();
  }
};

// Everything that a pass writes, including selections and gradients.
std::vector<HostTensor> outputs_of(const Problem& problem) {
  Pass run = cases::run_forward(problem);
  cases::run_backward(problem, run);
  std::vector<HostTensor> outputs;
  outputs.push_back(copy_of(run.result.out));
  for (const TensorView& saved : run.result.saved) outputs.push_back(copy_of(saved));
  const AttentionGradients& g = run.gradients;
  for (const TensorView& view : {g.dq, g.dk, g.dv, g.dcentroids, g.dgate, g.dlogit_scale})
    if (view.present()) outputs.push_back(copy_of(view));
  return outputs;
}

TEST_F(ConcurrencyTest, AttentionOfEveryCase) {
  std::vector<Problem> problems;
  std::vector<Operation> operations;
  const std::vector<Case> all = cases::all();
  problems.reserve(all.size());
  for (const Case& c : all) {
    const Problem& problem = problems.emplace_back(cases::make_problem(c, 11));
    operations.push_back({c.name, [&problem] { return outputs_of(problem); }});
  }
  expect_bits_of_one_caller(operations);
}

// Workspace of the size that an operation requests.
struct Memory {
  HostTensor tensor;
  explicit Memory(std::int64_t bytes) : tensor(DType::u8, {bytes}) {}
  Workspace workspace() const { return {tensor.view().data, tensor.view().count(), nullptr}; }
};

std::vector<HostTensor> list_of(HostTensor&& first) {
  std::vector<HostTensor> list;
  list.push_back(std::move(first));
  return list;
}

TEST_F(ConcurrencyTest, PartsOfMechanisms) {
  constexpr std::int64_t B = 2, H = 4, N = 300, D = 16, C = 6;
  const HostTensor q = test::normals(DType::f32, {B, H, N, D}, 1);
  const HostTensor k = test::normals(DType::f32, {B, H, N, D}, 2);
  const HostTensor v = test::normals(DType::f32, {B, H, N, D}, 3);
  const HostTensor centroids = test::normals(DType::f32, {1, H, C, D}, 4);
  const HostTensor own = test::normals(DType::f32, {H, C, D}, 5);
  const HostTensor labels = test::labels_below(C, {B, H, N}, 6);
  const HostTensor planes = test::normals(DType::f32, {1, 1, 32, D}, 7);
  const HostTensor thresholds(DType::f32, {1, 1, 32});
  AttentionInputs inputs;
  inputs.q = q;
  inputs.k = k;
  inputs.v = v;
  HostTensor codes(DType::u64, {B, H, N});
  hash_codes(q, {}, planes, thresholds, codes);
  std::vector<Operation> operations;
  operations.push_back({"hash_codes", [&] {
                          HostTensor out(DType::u64, {B, H, N});
                          hash_codes(q, {}, planes, thresholds, out);
                          return list_of(std::move(out));
                        }});
  operations.push_back({"hamming_kmeans", [&] {
                          std::vector<HostTensor> out;
                          out.emplace_back(DType::i32, Shape{B, H, N});
                          out.emplace_back(DType::u64, Shape{B, H, C});
                          hamming_kmeans({}, codes, {}, out[0], out[1]);
                          return out;
                        }});
  operations.push_back({"nearest_centroid", [&] {
                          HostTensor out(DType::i32, {B, H, N});
                          nearest_centroid(q, {}, centroids, {}, out);
                          return list_of(std::move(out));
                        }});
  operations.push_back({"balanced_assign", [&] {
                          HostTensor out(DType::i32, {B, H, N});
                          balanced_assign(q, {}, centroids, 0, out);
                          return list_of(std::move(out));
                        }});
  operations.push_back({"spherical_kmeans", [&] {
                          HostTensor out(DType::f32, {H, C, D});
                          spherical_kmeans({.iterations = 3}, q, {}, out);
                          return list_of(std::move(out));
                        }});
  operations.push_back({"move_centroids", [&] {
                          std::vector<HostTensor> out;
                          out.push_back(copy_of(own));
                          out.emplace_back(DType::f32, Shape{H, C});
                          out.emplace_back(DType::f32, Shape{H, C, D});
                          out.emplace_back(DType::f64, Shape{H, C});
                          out.emplace_back(DType::f64, Shape{H, C, D});
                          add_centroid_statistics(q, {}, labels, {out[3], out[4]});
                          move_centroids(0.5, {out[3], out[4]}, {out[0], out[1], out[2]});
                          return out;
                        }});
  operations.push_back({"commitment_loss", [&] {
                          std::vector<HostTensor> out;
                          out.emplace_back(DType::f32, Shape{1});
                          out.emplace_back(DType::f32, Shape{B, H, N, D});
                          commitment_loss(q, {}, own, labels, out[0]);
                          commitment_loss_backward(q, {}, own, labels, 1.0, out[1]);
                          return out;
                        }});
  operations.push_back({"select_top", [&] {
                          HostTensor out(DType::i32, {B, H, C, 20});
                          select_top(centroids, k, {}, out);
                          return list_of(std::move(out));
                        }});
  for (const Clustering method : {Clustering::keys, Clustering::hamming, Clustering::hamming_keys})
    operations.push_back({"cluster_queries", [&, method] {
                            ClusteringParams params;
                            params.clusters = C;
                            params.method = method;
                            HostTensor out(DType::i32, {B, H, N});
                            const Memory memory(cluster_queries_workspace_bytes(params, inputs));
                            cluster_queries(params, inputs, out, memory.workspace());
                            return list_of(std::move(out));
                          }});
  for (int repeat = 0; repeat < 3; ++repeat) expect_bits_of_one_caller(operations);
}

// A workspace sized for any number of threads works; if it is sized for fewer, fewer threads run.
TEST_F(ConcurrencyTest, WorkspacesCountedForOtherNumbersOfThreads) {
  for (const Case& c : cases::all()) {
    SCOPED_TRACE(c.name);
    const Problem problem = cases::make_problem(c, 12);
    set_threads(1);
    Pass expected = cases::run_forward(problem);
    cases::run_backward(problem, expected);
    for (const auto& [counted, used] : {std::pair{1, 7}, {2, 5}, {5, 2}, {8, 9}}) {
      set_threads(counted);
      Pass run = cases::prepare(problem);
      set_threads(used);
      attention_forward(problem.mechanism, problem.inputs, run.result, run.workspace);
      cases::run_backward(problem, run);
      EXPECT_TRUE(test::same_bits(expected.result.out, run.result.out)) << used;
      EXPECT_TRUE(test::same_bits(expected.gradients.dq, run.gradients.dq)) << used;
      EXPECT_TRUE(test::same_bits(expected.gradients.dv, run.gradients.dv)) << used;
    }
  }
}

}  // namespace
}  // namespace coterie
