// SPDX-License-Identifier: MIT
// What the attention of a model does on held-out rows: cluster sizes and empties, how much of full
// attention it keeps, how different its heads are.
//
// Every mechanism is judged by its weights A' (N, S), the output for values that are unit vectors,
// beside those of full attention A over all admissible keys with the mechanism's own logits
// (normalised rows for routing, unit keys for lsh, the query's own key left out where the mechanism
// leaves it out). Kept mass of a row is
//
//   sum_j min(A_j, A'_j),
//
// which is 1 for full attention, and the mass of the keys met for everything that renormalises full
// attention over some keys (local, oracle-top, strict routing); for weights that are only close to
// A's (clustered) it is 1 minus the distance in total variation.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "coterie/torch/models.h"
#include "train/task.h"

namespace coterie::train {

struct HeadReport {
  std::vector<double> sizes;  // tokens per cluster of a row, largest first, mean over rows; of the
                              // queries where they are clustered; empty without clusters
  double empty = 0;           // clusters of a row without tokens, mean over rows
  double mass = 1;            // kept mass, mean over queries
  double entropy = 0;         // of A' made to sum to 1, in nats, mean over queries
};

struct GroupReport {
  std::int64_t layer = 0, group = 0;
  std::string attention;
  std::vector<HeadReport> heads;
};

// Jensen-Shannon divergence in nats between the weights of two heads of a layer, each row made to
// sum to 1; mean and standard deviation over rows and pairs of heads, as Table 1 of the Routing
// paper has them between local and routing heads. 0: equal heads; ln 2: heads that share no key.
struct Divergence {
  std::int64_t layer = 0;
  std::string a, b;  // mechanisms: "local", "routing"
  double mean = 0, deviation = 0;
};

struct Inspection {
  std::vector<GroupReport> groups;
  std::vector<Divergence> divergences;
};

// On the first `rows` rows of the validation data, cut to 512 tokens. `seed` is that of
// clusterings.
Inspection inspect(torch_api::LanguageModel& model, const Task& task, std::int64_t rows,
                   std::uint64_t seed);

// On what head groups were called with. Works on the CPU in single precision.
Inspection inspect_records(const std::vector<torch_api::AttentionRecord>& records);

// Weights (B, h, N, S) of a record's attention, and of full attention in its place.
at::Tensor attention_rows(const torch_api::AttentionRecord& record);
at::Tensor full_rows(const torch_api::AttentionRecord& record);

}  // namespace coterie::train
