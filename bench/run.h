// SPDX-License-Identifier: MIT
// One spec on given data, ready to run any number of times.
#pragma once

#include <cstddef>
#include <vector>

#include "bench/attention.h"
#include "coterie/attention.h"

namespace coterie::bench {

// Gradients that all runs on the same data overwrite in turn; absent for forward-only runs.
struct Gradients {
  Tensor dq, dk, dv;
  explicit Gradients(const AttentionData& data);
};

// The heads of one group; views point into the data, the gradients and `owned`.
struct HeadRun {
  Mechanism mechanism;
  AttentionInputs inputs;
  AttentionResult result;
  std::size_t selection_count = 0;  // leading tensors of result.saved
  Workspace workspace;
  AttentionGradients gradients;
  TensorView grad_out;
  bool shared_qk = false;
  std::vector<Tensor> owned;

  // Takes ownership and returns a view that stays valid as long as this object.
  TensorView own(Tensor tensor);
};

// On a GPU its functions launch the work and return without waiting.
class AttentionRun {
 public:
  AttentionRun(const Entry& entry, const AttentionData& data, const Gradients& gradients);

  void select();
  void attend();
  void forward();
  void backward();

  const std::vector<HeadRun>& groups() const { return groups_; }
  std::vector<HeadRun>& groups() { return groups_; }
  std::int64_t workspace_bytes() const;  // maximum over groups, which run one after the other
  std::int64_t saved_bytes() const;

 private:
  std::vector<HeadRun> groups_;
};

}  // namespace coterie::bench
