// SPDX-License-Identifier: MIT
// Errors of outputs against full attention.
#pragma once

#include <map>
#include <utility>
#include <vector>

#include "bench/run.h"

namespace coterie::bench {

// Sums over elements, for the relative error in the Frobenius norm.
struct SquaredNorms {
  double difference = 0, reference = 0;

  void add(const std::vector<double>& got, const std::vector<double>& wanted);
  // Relative to the norm of the reference, or to `least` if that is larger.
  double relative_error(double least = 0) const;
};

// Full attention on the data, computed on the CPU from the inputs in f32 (f64 for f64). It covers
// all queries of short sequences and a sample of the queries of long ones, the same in every head.
class References {
 public:
  explicit References(const AttentionData& data);

  // Relative error of outputs (B, heads, N, D) against full attention, over the keys or over the
  // queries as keys.
  double error_of(const TensorView& out, bool causal);
  double error_of(const AttentionRun& run, bool causal);

  std::int64_t rows() const { return static_cast<std::int64_t>(positions_.size()); }

 private:
  using Heads = std::vector<HostTensor>;  // (B, 1, rows, D) each

  const Heads& outputs(bool causal, bool shared_qk);
  HostTensor output(const TensorView& q, const TensorView& k, const TensorView& v,
                    bool causal) const;
  void add_norms(const TensorView& out, const Heads& wanted, std::int64_t first,
                 SquaredNorms& norms) const;

  std::vector<std::int64_t> positions_;             // of the sample, ascending
  std::vector<HostTensor> copies_;                  // of inputs that are on a GPU or of a half type
  TensorView q_, k_, v_;                            // (B, heads or kv_heads, N, D)
  std::map<std::pair<bool, bool>, Heads> outputs_;  // by (causal, shared)
};

}  // namespace coterie::bench
