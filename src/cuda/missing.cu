// SPDX-License-Identifier: MIT
// Mechanisms without CUDA kernels.
#include "cuda/attention.h"

namespace coterie::cuda {

namespace {

class MissingPass : public Pass {
 public:
  std::string refusal() const override { return "this mechanism has no CUDA kernels"; }
  std::int64_t workspace_bytes() const override { return 0; }
  void select(const std::vector<TensorView>&, const Workspace&) const override {}
  void attend(const AttentionResult&, const Workspace&) const override {}
  void backward(const AttentionResult&, const TensorView&, const AttentionGradients&,
                const Workspace&) const override {}
};

}  // namespace

std::unique_ptr<Pass> make_pass(const FullParams&, const AttentionCall&) {
  return std::make_unique<MissingPass>();
}
std::unique_ptr<Pass> make_pass(const LocalParams&, const AttentionCall&) {
  return std::make_unique<MissingPass>();
}
std::unique_ptr<Pass> make_pass(const StridedParams&, const AttentionCall&) {
  return std::make_unique<MissingPass>();
}
std::unique_ptr<Pass> make_pass(const OracleTopParams&, const AttentionCall&) {
  return std::make_unique<MissingPass>();
}
std::unique_ptr<Pass> make_pass(const LshParams&, const AttentionCall&) {
  return std::make_unique<MissingPass>();
}
std::unique_ptr<Pass> make_pass(const RoutingParams&, const AttentionCall&) {
  return std::make_unique<MissingPass>();
}
std::unique_ptr<Pass> make_pass(const CastParams&, const AttentionCall&) {
  return std::make_unique<MissingPass>();
}

}  // namespace coterie::cuda
