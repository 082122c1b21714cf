// SPDX-License-Identifier: MIT
// Attention by a spec, forward and backward, on raw memory.
//
//   const coterie::Attention attention("i-clustered(clusters=100)");
//   const auto saved = attention.forward({.q = view(q, {B, H, N, D}), ...}, view(out, ...));
//   attention.backward(saved, view(grad_out, ...), {.dq = view(dq, {B, H, N, D}), ...});
//
// Contract of every mechanism: rows beyond an item's length, and queries with nothing to attend to,
// get output 0, log-sum-exp -inf and gradient 0. Ties go to the lower index. The same inputs and
// seed give the same bits for any number of threads, backward included. An argument that a
// mechanism cannot honour is refused with an Error.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "coterie/inputs.h"
#include "coterie/layer.h"
#include "coterie/passes.h"
#include "coterie/spec.h"
#include "coterie/tensor.h"

namespace coterie {

// Inputs of one head group besides q, k and v, for specs of several groups. The fields are those of
// AttentionInputs and AttentionGradients.
struct GroupState {
  ConstTensorView centroids{}, gate{}, logit_scale{};
};
struct GroupStateGradients {
  TensorView dcentroids{}, dgate{}, dlogit_scale{};
};

// Allocator and stream of a call.
struct CallResources {
  // Returns at least `bytes` bytes on `device`, aligned to 64 bytes. If not set, host memory is
  // used, which works on the CPU only. GPU memory is released while the stream may still use it, so
  // its allocator must be stream-ordered.
  std::function<std::shared_ptr<void>(std::int64_t bytes, Device device)> allocate;
  void* stream = nullptr;  // cudaStream_t
};

// The attention of a layer. Objects are immutable, so threads may share them.
class Attention {
 public:
  explicit Attention(std::string_view spec);  // throws Error as AttentionSpec::parse does
  explicit Attention(AttentionSpec spec);

  const AttentionSpec& spec() const { return spec_; }

  // What a forward pass keeps for the backward pass: views of its inputs and output, whose memory
  // must outlive this object, and tensors that it owns.
  class Saved {
   public:
    // A saved tensor of a head group by name ("offsets", "lse", ...). An unknown name throws Error,
    // which lists the known ones.
    ConstTensorView get(std::string_view name, std::size_t group = 0) const;
    std::vector<std::string> names(std::size_t group = 0) const;

   private:
    friend class Attention;
    struct Group {
      HeadSlice slice;
      AttentionInputs inputs;  // of its heads
      AttentionResult result;
      SavedLayout layout;
    };
    std::vector<Group> groups_;
    std::vector<std::shared_ptr<void>> memory_;
    CallResources resources_;
  };

  // Writes out (B, H, N, Dv). Head groups take consecutive heads of q and out, and their share of
  // the heads of k and v. k has no heads for groups whose keys are the queries. If there are
  // several groups, the dropout seed of group g is group_seed(dropout_seed, 0, g). `state` has one
  // entry per group, or none if `inputs` has the state of a single group.
  Saved forward(const AttentionInputs& inputs, const TensorView& out,
                const std::vector<GroupState>& state = {},
                const CallResources& resources = {}) const;
  Saved forward(const AttentionInputs& inputs, const ConstTensorView& out,
                const std::vector<GroupState>& state = {},
                const CallResources& resources = {}) const = delete;  // out is written

  // Gradients of sum(out * grad_out), with the selection held constant.
  void backward(const Saved& saved, const ConstTensorView& grad_out,
                const AttentionGradients& gradients,
                const std::vector<GroupStateGradients>& state = {}) const;

 private:
  AttentionSpec spec_;
};

}  // namespace coterie
