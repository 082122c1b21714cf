// SPDX-License-Identifier: MIT
// Rows of q, k and v of a trained model as files, for measurements on real data.
#pragma once

#include <string>
#include <vector>

#include "coterie/torch/models.h"
#include "train/task.h"

namespace coterie::train {

struct SaveRowsOptions {
  std::string folder;      // created if it does not exist
  std::int64_t rows = 1;   // sequences, the first ones of the validation data
  std::uint64_t seed = 1;  // of clusterings
  bool bf16 = false;       // matrix products, as in evaluate()
};

// Writes one safetensors file per head group, layer-00-group-0.safetensors and so on, and returns
// their paths. A file has tensors q, k and v of shape (rows, heads, tokens, head dimension), with
// positions applied, as attention receives them. Mechanisms without keys (lsh, routing with
// share_qk) have no k. Throws if the sequences have different lengths.
std::vector<std::string> save_rows(const torch_api::Model& model, const Task& task,
                                   const SaveRowsOptions& options);

}  // namespace coterie::train
