// SPDX-License-Identifier: MIT
// One spec on given data, ready to run any number of times.
#pragma once

#include <map>
#include <utility>
#include <vector>

#include "bench/attention.h"
#include "coterie/attention.h"

namespace coterie::bench {

// What all runs on the same data may overwrite in turn.
struct Gradients {
  HostTensor dq, dk, dv;
  explicit Gradients(const AttentionData& data) : dq(data.q), dk(data.k), dv(data.v) {}
};

// The heads of one group; views point into the data, the gradients and `owned`.
struct HeadRun {
  Mechanism mechanism;
  AttentionInputs inputs;
  AttentionBuffers buffers;
  AttentionGradients gradients;
  TensorView grad_out;
  bool shared_qk = false;
  std::vector<HostTensor> owned;
};

class AttentionRun {
 public:
  AttentionRun(const Entry& entry, const AttentionData& data, const Gradients& gradients);

  void select();
  void attend();
  void forward();  // both
  void backward();

  const std::vector<HeadRun>& groups() const { return groups_; }
  std::vector<HeadRun>& groups() { return groups_; }
  std::int64_t workspace_bytes() const;  // of groups that run one after the other
  std::int64_t saved_bytes() const;

 private:
  std::vector<HeadRun> groups_;
};

// Sums over elements, for the relative error in the Frobenius norm.
struct SquaredNorms {
  double difference = 0, reference = 0;

  void add(const std::vector<double>& got, const std::vector<double>& wanted);
  double relative_error() const;
};

// Full attention's outputs on the data, each computed when first asked for.
class References {
 public:
  References(const AttentionData& data, const Gradients& gradients)
      : data_(data), gradients_(gradients) {}

  // Relative error of outputs (B, heads, N, D) against full attention, over the keys or over the
  // queries as keys.
  double error_of(const TensorView& out, bool causal);
  double error_of(const AttentionRun& run, bool causal);

 private:
  TensorView output(bool causal, bool shared_qk);

  const AttentionData& data_;
  const Gradients& gradients_;
  std::map<std::pair<bool, bool>, AttentionBuffers> outputs_;
};

}  // namespace coterie::bench
