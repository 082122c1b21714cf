// SPDX-License-Identifier: MIT
// Makes torch choose deterministic algorithms in a scope, without filling new memory.
#pragma once

#include <ATen/Context.h>

namespace coterie::torch_api {

class Deterministic {
 public:
  Deterministic()
      : was_(context().deterministicAlgorithms()),
        warned_(context().deterministicAlgorithmsWarnOnly()),
        filled_(context().deterministicFillUninitializedMemory()) {
    context().setDeterministicAlgorithms(true, /*warn_only=*/false);
    context().setDeterministicFillUninitializedMemory(false);
  }
  ~Deterministic() {
    context().setDeterministicAlgorithms(was_, warned_);
    context().setDeterministicFillUninitializedMemory(filled_);
  }
  Deterministic(const Deterministic&) = delete;
  Deterministic& operator=(const Deterministic&) = delete;

 private:
  static at::Context& context() { return at::globalContext(); }
  bool was_, warned_, filled_;
};

}  // namespace coterie::torch_api
