// SPDX-License-Identifier: MIT
// Adafactor (Shazeer and Stern 2018) without momentum. For a matrix X with gradient G, in step t:
//   b = 1 - t^-0.8,  S = G^2 + 1e-30
//   r = b r + (1 - b) (mean of each row of S),  c = b c + (1 - b) (mean of each column)
//   U = G / sqrt(r c^T / mean(r)),  U = U / max(1, rms(U))
//   X = X - a (U + weight_decay X),  a = lr, or lr max(1e-3, rms(X)) with `relative`
// Vectors keep the moving mean of S itself. Tensors of more dimensions are stacks of matrices.
#pragma once

#include <torch/optim/optimizer.h>

#include <vector>

namespace coterie::train {

struct AdafactorOptions : public ::torch::optim::OptimizerCloneableOptions<AdafactorOptions> {
  double lr = 1e-3;
  double weight_decay = 0.0;
  bool relative = false;

  double get_lr() const override { return lr; }
  void set_lr(double rate) override { lr = rate; }
};

struct AdafactorState : public ::torch::optim::OptimizerCloneableParamState<AdafactorState> {
  std::int64_t step = 0;
  at::Tensor row, column;  // of matrices: (..., rows), (..., columns)
  at::Tensor second;       // of vectors
};

class Adafactor : public ::torch::optim::Optimizer {
 public:
  Adafactor(const std::vector<::torch::optim::OptimizerParamGroup>& groups,
            const AdafactorOptions& defaults);
  at::Tensor step(LossClosure closure = nullptr) override;
};

// The zero state for a parameter.
std::unique_ptr<AdafactorState> make_adafactor_state(const at::Tensor& parameter);

}  // namespace coterie::train
