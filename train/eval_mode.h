// SPDX-License-Identifier: MIT
// A model without dropout, for as long as this lives; then as it was, training or not.
#pragma once

#include "coterie/torch/models.h"

namespace coterie::train {

class EvalMode {
 public:
  explicit EvalMode(torch_api::LanguageModel& model)
      : model_(model), was_training_(model->is_training()) {
    model_->eval();
  }
  ~EvalMode() { model_->train(was_training_); }
  EvalMode(const EvalMode&) = delete;
  EvalMode& operator=(const EvalMode&) = delete;

 private:
  torch_api::LanguageModel& model_;
  bool was_training_;
};

}  // namespace coterie::train
