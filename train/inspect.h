// SPDX-License-Identifier: MIT
// Statistics of a model's attention on held-out rows: cluster sizes, empty clusters, how much of
// full attention it keeps, and how different its heads are.
//
// Compares the weights A' (N, S) of each mechanism (its output for values that are unit vectors)
// with the weights A of full attention over all admissible keys with the mechanism's own logits
// (normalised rows for routing, unit keys for lsh, without the query's own key where the mechanism
// leaves it out). The kept mass of a row is
//
//   sum_j min(A_j, A'_j),
//
// It is 1 for full attention. For mechanisms that renormalise full attention over a subset of keys
// (local, oracle-top, strict routing) it is the mass of these keys; for weights that approximate A
// (clustered) it is 1 minus the total variation distance.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "coterie/torch/models.h"
#include "train/pictures.h"
#include "train/task.h"

namespace coterie::train {

struct HeadReport {
  std::vector<double> sizes;  // tokens per cluster of a row, largest first, mean over rows; counts
                              // queries if those are clustered; empty without clusters
  double empty = 0;           // clusters of a row without tokens, mean over rows
  double mass = 1;            // kept mass, mean over queries
  double entropy = 0;         // of A' normalised to sum 1, in nats, mean over queries
};

struct GroupReport {
  std::int64_t layer = 0, group = 0;
  std::string attention;
  std::vector<HeadReport> heads;
};

// Jensen-Shannon divergence in nats between the weights of two heads of a layer, rows normalised to
// sum 1; mean and standard deviation over rows and pairs of heads, as in Table 1 of the Routing
// paper for local and routing heads. 0: equal heads; ln 2: heads that share no key.
struct Divergence {
  std::int64_t layer = 0;
  std::string a, b;  // mechanisms: "local", "routing"
  double mean = 0, deviation = 0;
};

struct Inspection {
  std::vector<GroupReport> groups;
  std::vector<Divergence> divergences;
};

// On the first `rows` rows of the validation data, cut to 512 tokens. `seed` is the clustering
// seed.
Inspection inspect(const torch_api::Model& model, const Task& task, std::int64_t rows,
                   std::uint64_t seed);

// On recorded inputs of head groups. Works on the CPU in single precision.
Inspection inspect_records(const std::vector<torch_api::AttentionRecord>& records);

// Whether a token is in a cluster, (B, h, N, C) bool; undefined where there are no clusters. One
// clustering may serve all heads, which then has h = 1. For records on the CPU.
at::Tensor cluster_members(const torch_api::AttentionRecord& record);

// The clusters of the first head of every layer and group, in colours, on the first `rows` rows of
// the validation data: a line of pictures per row, the image first. Colours of tokens in several
// clusters are mixed; those in none are black. For tasks whose tokens are an image.
Picture cluster_picture(const torch_api::Model& model, const Task& task, std::int64_t rows,
                        std::uint64_t seed);

// Weights (B, h, N, S) of a record's attention, and of full attention in its place.
at::Tensor attention_rows(const torch_api::AttentionRecord& record);
at::Tensor full_rows(const torch_api::AttentionRecord& record);

}  // namespace coterie::train
