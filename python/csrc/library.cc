// SPDX-License-Identifier: MIT
// Registers the operators coterie::*, or those of another namespace that the build names
// (COTERIE_OPERATORS). Shapes and meanings: python/coterie/ops.py, which adds fake kernels and
// derivatives.
#include <torch/csrc/stable/library.h>

#include <string>

#include "attention.h"
#include "layer.h"

namespace {

// Arguments that the attention operators share.
const std::string kArguments =
    "Tensor q, Tensor? k, Tensor v, Tensor? centroids, Tensor? gate, Tensor? logit_scale, "
    "Tensor? q_lengths, Tensor? k_lengths, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, "
    "Tensor? mask, Tensor? dropout_seed, str mechanism, float scale, bool causal, int seed, "
    "float dropout, int head_part, int head_parts";
// Which rows of a tensor count.
const std::string kSpans = "Tensor? lengths, Tensor? cu_seqlens";

struct Operator {
  const char* name;
  std::string schema;  // without the name
  coterie::stable_api::Kernel* kernel;
};

namespace api = coterie::stable_api;

const Operator kOperators[] = {
    {"attention", "(" + kArguments + ") -> (Tensor, Tensor[])", api::attention},
    // The same without derivatives.
    {"attention_forward", "(" + kArguments + ") -> (Tensor, Tensor[])", api::attention},
    {"attention_backward",
     "(Tensor grad_out, " + kArguments + ", Tensor out, Tensor[] saved, int needs) -> Tensor[]",
     api::attention_backward},
    {"attention_select", "(" + kArguments + ") -> Tensor[]", api::attention_select},
    {"attention_attend", "(" + kArguments + ", Tensor[] selection) -> (Tensor, Tensor[])",
     api::attention_attend},
    {"attention_quality",
     "(" + kArguments + ", Tensor out, Tensor[] saved, int rows, bool from_gpu) -> Tensor[]",
     api::attention_quality},
    {"rotate_rows", "(Tensor x, int first, float base, bool inverse) -> Tensor", api::rotate_rows},
    {"normalise_rows", "(Tensor x) -> Tensor", api::normalise_rows},
    {"routing_labels", "(Tensor x, Tensor centroids, " + kSpans + ") -> Tensor",
     api::routing_labels},
    {"spherical_kmeans",
     "(Tensor x, " + kSpans + ", int clusters, int iterations, int seed) -> Tensor",
     api::spherical_kmeans},
    {"kmeans",
     "(Tensor x, Tensor? centroids, int clusters, int iterations, int start, bool fill_empty, "
     "int seed) -> (Tensor, Tensor, Tensor)",
     api::kmeans},
    {"add_centroid_statistics",
     "(Tensor(a!) members, Tensor(b!) sums, Tensor x, Tensor labels, " + kSpans + ") -> ()",
     api::add_centroid_statistics},
    {"move_centroids",
     "(Tensor(a!) centroids, Tensor(b!) counts, Tensor(c!) sums, Tensor members, Tensor added, "
     "float decay) -> ()",
     api::move_centroids},
    {"commitment_loss", "(Tensor x, Tensor centroids, Tensor labels, " + kSpans + ") -> Tensor",
     api::commitment_loss},
    {"commitment_loss_backward",
     "(Tensor x, Tensor centroids, Tensor labels, " + kSpans + ") -> Tensor",
     api::commitment_loss_backward},
    {"routing_step",
     "(Tensor(a!) ring_k, Tensor(b!) ring_v, Tensor(c!) counts, Tensor q, Tensor? k, Tensor v, "
     "Tensor centroids, Tensor? logit_scale, str mechanism, float scale) -> Tensor",
     api::routing_step},
};

}  // namespace

// Macros of torch make text of their arguments; these expand COTERIE_OPERATORS first.
#define COTERIE_LIBRARY(name, m) STABLE_TORCH_LIBRARY(name, m)
#define COTERIE_LIBRARY_IMPL(name, device, m) STABLE_TORCH_LIBRARY_IMPL(name, device, m)

COTERIE_LIBRARY(COTERIE_OPERATORS, m) {
  for (const Operator& op : kOperators) m.def((op.name + op.schema).c_str());
}

// The core knows what it can do on which device, and says so.
COTERIE_LIBRARY_IMPL(COTERIE_OPERATORS, CPU, m) {
  for (const Operator& op : kOperators) m.impl(op.name, op.kernel);
}

COTERIE_LIBRARY_IMPL(COTERIE_OPERATORS, CUDA, m) {
  for (const Operator& op : kOperators) m.impl(op.name, op.kernel);
}
