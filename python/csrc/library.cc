// SPDX-License-Identifier: MIT
// Registers the operators coterie::*. Shapes and meanings: python/coterie/ops.py, which adds fake
// kernels and derivatives.
#include <torch/csrc/stable/library.h>

#include <string>

#include "attention.h"
#include "layer.h"

namespace {

// Arguments that attention, attention_backward and attention_select share.
const std::string kArguments =
    "Tensor q, Tensor? k, Tensor v, Tensor? centroids, Tensor? gate, Tensor? logit_scale, "
    "Tensor? q_lengths, Tensor? k_lengths, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, "
    "Tensor? mask, str mechanism, float scale, bool causal, int seed";

struct Operator {
  const char* name;
  coterie::stable_api::Kernel* kernel;
};

namespace api = coterie::stable_api;

constexpr Operator kOperators[] = {
    {"attention", api::attention},
    {"attention_forward", api::attention},  // the same without derivatives
    {"attention_backward", api::attention_backward},
    {"attention_select", api::attention_select},
    {"attention_quality", api::attention_quality},
    {"rotate_rows", api::rotate_rows},
    {"normalise_rows", api::normalise_rows},
    {"routing_labels", api::routing_labels},
    {"spherical_kmeans", api::spherical_kmeans},
    {"add_centroid_statistics", api::add_centroid_statistics},
    {"move_centroids", api::move_centroids},
    {"commitment_loss", api::commitment_loss},
    {"commitment_loss_backward", api::commitment_loss_backward},
    {"routing_step", api::routing_step},
};

}  // namespace

STABLE_TORCH_LIBRARY(coterie, m) {
  for (const char* name : {"attention", "attention_forward"}) {
    m.def((name + ("(" + kArguments) + ") -> (Tensor, Tensor[])").c_str());
  }
  m.def(("attention_backward(Tensor grad_out, " + kArguments +
         ", Tensor out, Tensor[] saved, int needs) -> Tensor[]")
            .c_str());
  m.def(("attention_select(" + kArguments + ") -> Tensor[]").c_str());
  m.def(("attention_quality(" + kArguments +
         ", Tensor out, Tensor[] saved, int rows, bool from_gpu) -> Tensor[]")
            .c_str());
  m.def("rotate_rows(Tensor x, int first, float base, bool inverse) -> Tensor");
  m.def("normalise_rows(Tensor x) -> Tensor");
  m.def(
      "routing_labels(Tensor x, Tensor centroids, Tensor? lengths, Tensor? cu_seqlens) -> Tensor");
  m.def(
      "spherical_kmeans(Tensor x, Tensor? lengths, Tensor? cu_seqlens, int clusters, "
      "int iterations, int seed) -> Tensor");
  m.def(
      "add_centroid_statistics(Tensor(a!) members, Tensor(b!) sums, Tensor x, Tensor labels, "
      "Tensor? lengths, Tensor? cu_seqlens) -> ()");
  m.def(
      "move_centroids(Tensor(a!) centroids, Tensor(b!) counts, Tensor(c!) sums, Tensor members, "
      "Tensor added, float decay) -> ()");
  m.def(
      "commitment_loss(Tensor x, Tensor centroids, Tensor labels, Tensor? lengths, "
      "Tensor? cu_seqlens) -> Tensor");
  m.def(
      "commitment_loss_backward(Tensor x, Tensor centroids, Tensor labels, Tensor? lengths, "
      "Tensor? cu_seqlens) -> Tensor");
  m.def(
      "routing_step(Tensor(a!) ring_k, Tensor(b!) ring_v, Tensor(c!) counts, Tensor q, Tensor? k, "
      "Tensor v, Tensor centroids, Tensor? logit_scale, str mechanism, float scale) -> Tensor");
}

// The core knows what it can do on which device, and says so.
STABLE_TORCH_LIBRARY_IMPL(coterie, CPU, m) {
  for (const Operator& op : kOperators) m.impl(op.name, op.kernel);
}

STABLE_TORCH_LIBRARY_IMPL(coterie, CUDA, m) {
  for (const Operator& op : kOperators) m.impl(op.name, op.kernel);
}
