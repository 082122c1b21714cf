// SPDX-License-Identifier: MIT
// Puts a model into evaluation mode (no dropout) within a scope and restores its mode at the end.
#pragma once

#include "coterie/torch/models.h"

namespace coterie::train {

class EvalMode {
 public:
  explicit EvalMode(const torch_api::Model& model)
      : model_(model), was_training_(model->is_training()) {
    model_->eval();
  }
  ~EvalMode() { model_->train(was_training_); }
  EvalMode(const EvalMode&) = delete;
  EvalMode& operator=(const EvalMode&) = delete;

 private:
  torch_api::Model model_;
  bool was_training_;
};

}  // namespace coterie::train
