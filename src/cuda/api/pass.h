// SPDX-License-Identifier: MIT
// The interface of a mechanism in the CUDA back end: one class per mechanism, for calls that
// src/ops has checked and parameters that resolve() has settled.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "core/arena.h"
#include "core/call.h"
#include "coterie/inputs.h"
#include "coterie/params.h"
#include "coterie/result.h"

namespace coterie::cuda {

// A checked call of one mechanism; parameters and call outlive it. Work is launched on
// workspace.stream. `saved` holds the tensors of attention_saved in order.
class Pass {
 public:
  explicit Pass(const AttentionCall& call) : call_(call) {}
  virtual ~Pass() = default;

  // Why the mechanism's kernels cannot run the call; "" when they can. attention.cc checks the
  // shapes and types that all kernels need. The other functions are for calls not refused.
  virtual std::string refusal() const { return ""; }

  virtual std::int64_t workspace_bytes() const = 0;
  virtual void select(const std::vector<TensorView>& saved, const Workspace& workspace) const = 0;
  virtual void attend(const AttentionResult& result, const Workspace& workspace) const = 0;
  // select, then attend; a mechanism may override it to share work between the two.
  virtual void forward(const AttentionResult& result, const Workspace& workspace) const {
    select(result.saved, workspace);
    attend(result, workspace);
  }
  virtual void backward(const AttentionResult& result, const TensorView& grad_out,
                        const AttentionGradients& gradients, const Workspace& workspace) const = 0;

 protected:
  // All of the workspace, after a check of its size.
  Arena take_workspace(const Workspace& workspace) const {
    return Arena(call_.op, workspace, workspace_bytes());
  }

  const AttentionCall& call_;
};

// Defined in the mechanism's folder.
std::unique_ptr<Pass> make_pass(const FullParams& params, const AttentionCall& call);
std::unique_ptr<Pass> make_pass(const LocalParams& params, const AttentionCall& call);
std::unique_ptr<Pass> make_pass(const StridedParams& params, const AttentionCall& call);
std::unique_ptr<Pass> make_pass(const OracleTopParams& params, const AttentionCall& call);
std::unique_ptr<Pass> make_pass(const ClusteredParams& params, const AttentionCall& call);
std::unique_ptr<Pass> make_pass(const ImprovedClusteredParams& params, const AttentionCall& call);
std::unique_ptr<Pass> make_pass(const LshParams& params, const AttentionCall& call);
std::unique_ptr<Pass> make_pass(const RoutingParams& params, const AttentionCall& call);
std::unique_ptr<Pass> make_pass(const CastParams& params, const AttentionCall& call);

}  // namespace coterie::cuda
