// SPDX-License-Identifier: MIT
// The CUDA entry points of a library built without CUDA: there is no device and no kernel.
#include "core/check.h"
#include "cuda/api/entry.h"

namespace coterie::cuda {

namespace {

[[noreturn]] void refuse(const char* op) {
  fail(op,
       "expected tensors on the cpu; got tensors on cuda, and this library was built without CUDA");
}

}  // namespace

bool available() { return false; }

std::vector<CudaDevice> devices() { return {}; }

const char* toolkit() { return "none"; }

std::string refusal(const Mechanism&, const AttentionCall&) {
  return "this library was built without CUDA";
}

std::int64_t workspace_bytes(const Mechanism&, const AttentionCall& call) { refuse(call.op); }

void select(const Mechanism&, const AttentionCall& call, const std::vector<TensorView>&,
            const Workspace&) {
  refuse(call.op);
}

void attend(const Mechanism&, const AttentionCall& call, const AttentionResult&, const Workspace&) {
  refuse(call.op);
}

void forward(const Mechanism&, const AttentionCall& call, const AttentionResult&,
             const Workspace&) {
  refuse(call.op);
}

void backward(const Mechanism&, const AttentionCall& call, const AttentionResult&,
              const TensorView&, const AttentionGradients&, const Workspace&) {
  refuse(call.op);
}

std::string refuse_kmeans(const TensorView&, std::int64_t) {
  return "this library was built without CUDA";
}
std::int64_t kmeans_workspace_bytes(const KMeansParams&, const TensorView&, std::int64_t) {
  refuse("kmeans");
}
void kmeans(const KMeansParams&, const TensorView&, const KMeansResult&, const Workspace&) {
  refuse("kmeans");
}

void fill(const TensorView&, double, const Workspace&) { refuse("fill"); }

void rotate_rows(const TensorView&, const Rotation&, const TensorView&, const Workspace&) {
  refuse("rotate_rows");
}

void add_norm(const AddNorm&, const AddNormResult&, const Workspace&) { refuse("add_norm"); }

void add_norm_backward(const AddNormBackward&, const AddNormGradients&, const Workspace&) {
  refuse("add_norm_backward");
}

void bias_gelu(const TensorView&, const TensorView&, const TensorView&, const Workspace&) {
  refuse("bias_gelu");
}

void bias_gelu_backward(const TensorView&, const TensorView&, const TensorView&, const TensorView&,
                        const TensorView&, const Workspace&) {
  refuse("bias_gelu_backward");
}

void sum_rows(const TensorView&, const TensorView&, const Workspace&) { refuse("sum_rows"); }

std::string refuse_tokens(const TensorView&) { return "this library was built without CUDA"; }

void normalise_rows(const TensorView&, const TensorView&, const Workspace&) {
  refuse("normalise_rows");
}

std::int64_t centroid_statistics_workspace_bytes(const TensorView&, const CentroidStatistics&) {
  refuse("add_centroid_statistics");
}

void add_centroid_statistics(const TensorView&, const Sequences&, const TensorView&,
                             const CentroidStatistics&, const Workspace&) {
  refuse("add_centroid_statistics");
}

void move_centroids(double, const CentroidStatistics&, const CentroidState&, const Workspace&) {
  refuse("move_centroids");
}

std::int64_t commitment_workspace_bytes(const TensorView&) { refuse("commitment_loss"); }

void commitment_loss(const TensorView&, const Sequences&, const TensorView&, const TensorView&,
                     const TensorView&, const Workspace&) {
  refuse("commitment_loss");
}

void commitment_loss_backward(const TensorView&, const Sequences&, const TensorView&,
                              const TensorView&, double, const TensorView&, const TensorView&,
                              const Workspace&) {
  refuse("commitment_loss_backward");
}

void routing_step(const RoutingParams&, const AttentionCall& call, const std::vector<TensorView>&,
                  const RoutingRings&, const TensorView&, const Workspace&) {
  refuse(call.op);
}

}  // namespace coterie::cuda
