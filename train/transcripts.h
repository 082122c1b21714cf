// SPDX-License-Identifier: MIT
// Transcripts from the outputs of a CtcModel, and their errors.
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <vector>

#include "coterie/torch/models.h"
#include "train/task.h"

namespace coterie::train {

using Symbols = std::vector<std::int64_t>;

// The symbols that log-probabilities (T, 1 + symbols) on the CPU say; 0 is the blank. Greedy: the
// most likely output of each position. Otherwise prefix search (Graves 2012), which adds up the
// alignments of a transcript, with the `beam` most likely prefixes.
Symbols decode_ctc(const at::Tensor& log_probabilities_TV, std::int64_t beam);

// Fewest insertions, deletions and replacements that turn `a` into `b`.
template <class T>
std::int64_t edit_distance(const std::vector<T>& a, const std::vector<T>& b) {
  std::vector<std::int64_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), 0);
  for (std::size_t i = 0; i < a.size(); ++i) {
    std::int64_t diagonal = row[0]++;
    for (std::size_t j = 0; j < b.size(); ++j) {
      const std::int64_t replaced = diagonal + (a[i] == b[j] ? 0 : 1);
      diagonal = row[j + 1];
      row[j + 1] = std::min({replaced, diagonal + 1, row[j] + 1});
    }
  }
  return row.back();
}

// The score by symbols; `strata[0]`, if there is one, gets that by words.
Score score_transcripts(const torch_api::ModelImpl& model, const TranscriptAnswer& answer,
                        const at::Tensor& out, const Batch& batch, std::vector<Score>& strata);

}  // namespace coterie::train
