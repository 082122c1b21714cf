// SPDX-License-Identifier: MIT
// The heads of a layer that share a mechanism: their parameters besides the projections, and their
// attention.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/linear.h>

#include <cstdint>

#include "coterie/spec.h"
#include "coterie/torch/attention.h"
#include "positions.h"

namespace coterie::torch_api {

struct HeadGroupOptions {
  HeadGroup spec;
  std::int64_t dim = 0, head_dim = 0;  // E, D
  std::int64_t heads = 0, kv_heads = 0;
  bool causal = false;
  double rotary_base = 0;
  std::uint64_t seed = 0;
};

// q (B, N, h, D), k and v (B, N, h', D); k undefined if keys are queries.
struct HeadRows {
  at::Tensor q, k, v;
};

// The heads of a rank: part `index` of `count` equal ones.
struct HeadPart {
  std::int64_t index = 0, count = 1;

  explicit HeadPart(const SequenceRanks* ranks = nullptr) {
    if (ranks != nullptr) index = ranks->rank, count = ranks->size;
  }
  // Its rows of a tensor with a first dimension of heads.
  at::Tensor of(const at::Tensor& heads) const {
    if (count == 1 || !heads.defined()) return heads;
    const std::int64_t own = heads.size(0) / count;
    return heads.narrow(0, index * own, own);
  }
};

class HeadGroupImpl : public ::torch::nn::Module {
 public:
  explicit HeadGroupImpl(const HeadGroupOptions& options);

  // Replaces the mechanism and positions, which the spec names, and keeps the state; see
  // SelfAttention::set_spec. `check_spec` throws what `set_spec` would and changes nothing.
  void check_spec(const HeadGroup& spec) const;
  void set_spec(const HeadGroup& spec);

  const Mechanism& mechanism() const { return mechanism_; }  // resolved
  Positions positions() const { return positions_; }
  bool has_tensors() const { return !parameters().empty() || !buffers().empty(); }
  // Whether packed_attention (packed.h) can run the group, and its positions.
  bool can_be_packed() const;
  bool rotary() const { return positions_ == Positions::rotary; }
  double rotary_base() const { return options_.rotary_base; }

  // Rows of the part's heads with positions from `first` on, in the layout of attention():
  // (B, h, N, D).
  HeadRows placed(const HeadRows& rows, std::int64_t first,
                  const HeadPart& part = HeadPart()) const;
  // Inputs of attention() besides the rows; `x` (B, N, E) is the layer's input.
  AttentionOptions attention_options(const at::Tensor& x, const HeadPart& part = HeadPart());

  // Of sequences that ranks share (cast): replaces the gate of this rank's positions by that of
  // all, and adds the selection, which needs the rows of all heads. `rows` are those of this rank's
  // positions, before placed().
  void exchange(const HeadRows& rows, const SequenceRanks& ranks, std::int64_t length,
                AttentionOptions& options) const;

  // Attention (B, h, N, D) and the weighted commitment loss of placed rows.
  PassOutput forward(const HeadRows& placed, const AttentionOptions& options) const;

  // Routing only: adds placed rows to the statistics; moves or initialises the centroids. Labels
  // are those of queries and keys if the pass has them, else empty.
  void add_statistics(const HeadRows& placed, const at::Tensor& lengths,
                      const std::vector<at::Tensor>& labels, GroupStatistics& statistics,
                      const HeadPart& part = HeadPart()) const;
  void update_centroids(const GroupStatistics& statistics) const;
  void initialise_centroids(const std::vector<AttentionRecord>& records, std::uint64_t seed,
                            const HeadPart& part = HeadPart()) const;

 private:
  void add_centroids(const RoutingParams& params);
  void add_surrogates(const CastParams& params);
  void add_relative();

  HeadGroupOptions options_;
  Mechanism mechanism_;
  Positions positions_ = Positions::none;
  CentroidState state_;                // routing
  at::Tensor logit_scale_;             // routing: (h)
  at::Tensor surrogates_;              // cast: (h, C, D)
  ::torch::nn::Linear gate_{nullptr};  // cast
  RelativePositions relative_;
};

}  // namespace coterie::torch_api
