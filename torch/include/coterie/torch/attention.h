// SPDX-License-Identifier: MIT
// A self-attention layer defined by an attention spec: projections, positions and one call of
// functional.h per head group.
//
// Parameters and buffers, by name (the same in checkpoints and in the Python package):
//   q.weight (H D, E), k.weight (keys of the groups that have their own), v.weight, out.weight
//   (E, H D), each with .bias if `bias` is set; and for group g, if its mechanism has them,
//   group_g.centroids, group_g.counts, group_g.sums (buffers) and group_g.logit_scale (routing),
//   group_g.surrogates, group_g.gate.weight, group_g.gate.bias (cast),
//   group_g.relative.weight (F, D) per head group and group_g.relative.bias (H, F)
//   (positions=relative).
// Heads are in the order of the groups. Centroids are not parameters: update_centroids moves them.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/pimpl.h>

#include <cstdint>
#include <functional>
#include <iosfwd>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "coterie/layer.h"
#include "coterie/spec.h"
#include "coterie/torch/centroids.h"
#include "coterie/torch/functional.h"
#include "coterie/torch/ulysses.h"

namespace coterie::torch_api {

struct SelfAttentionOptions {
  std::int64_t dim = 0;       // E, width of the input
  std::int64_t heads = 0;     // H; E / H is the head dimension D
  std::int64_t kv_heads = 0;  // 0: same as heads; no two groups may share one
  AttentionSpec spec{};
  bool causal = false;
  bool bias = true;
  double rotary_base = 10000.0;
  double dropout = 0.0;    // of attention weights, in training
  std::uint64_t seed = 0;  // for the initial centroids and surrogate tokens
};

// The detached inputs of one head group's attention, for centroid updates and inspection.
struct AttentionRecord {
  std::int64_t layer = 0, group = 0;
  Mechanism mechanism;
  at::Tensor q, k, v;  // (B, h, N, D) as attention() got them; k undefined when shared
  AttentionOptions options;
};

// Centroid statistics of one optimiser step for each routing group, by (layer, group). Their size
// depends on the number of clusters, not on the number of rows.
struct GroupStatistics {
  CentroidStatistics queries, keys;  // keys: undefined if keys are queries
};
using StepStatistics = std::map<std::pair<std::int64_t, std::int64_t>, GroupStatistics>;

// Inputs of a pass over a batch besides the tokens.
struct PassContext {
  at::Tensor lengths{};    // (B), or undefined: all rows are valid
  std::uint64_t seed = 0;  // for clusterings; equal seeds repeat them (docs/architecture.md)
  std::uint64_t dropout_seed = 0;  // for attention dropout, likewise
  std::int64_t first_row = 0;      // number of the first row in a larger batch, for random numbers
  std::int64_t layer = 0;          // set by the transformer
  // Ranks that share the sequences (ulysses.h), or null. Layers then get this rank's positions,
  // attention runs on this rank's heads, and commitments, records and statistics are of these.
  const SequenceRanks* ranks = nullptr;
  std::int64_t length = 0;  // N of the whole sequences, set by the model if `ranks` is
  std::vector<AttentionRecord>* records = nullptr;  // appended to if not null
  StepStatistics* statistics = nullptr;             // routing's are added to it if not null
  std::function<void()> before_layer{};  // called before each layer, also in the backward pass; may
                                         // throw to leave the pass early
};

// Outputs of a layer, a stack or a model.
struct PassOutput {
  at::Tensor out;
  // Scalar: weighted sum of the routing heads' commitment losses, or 0. With PassContext::ranks the
  // sum over the ranks is that of all heads.
  at::Tensor commitment;
};

// The keys and values of one layer seen so far, per group. Only for exact causal mechanisms: full,
// local, strided, oracle-top, strict routing.
struct LayerCache;

class HeadGroupImpl;  // a group of heads with its parameters and buffers
struct HeadRows;

class SelfAttentionImpl : public ::torch::nn::Module {
 public:
  explicit SelfAttentionImpl(SelfAttentionOptions options);

  PassOutput forward(const at::Tensor& x_BNE, const PassContext& context);
  // The same without the bias of the output layer, which the caller adds.
  PassOutput forward_without_bias(const at::Tensor& x_BNE, const PassContext& context);
  at::Tensor output_bias() const;  // undefined without biases

  // Replaces the attention over the same projections, for evaluation. Heads of groups that name no
  // positions keep those they were trained with. Groups with as many heads as the layer's keep
  // their centroids, surrogate tokens and relative positions; throws if the spec needs others. A
  // layer whose groups have no such tensors, and keys that are not the queries, takes any other
  // groups of that kind.
  void set_spec(const AttentionSpec& spec);
  void check_spec(const AttentionSpec& spec) const;  // throws what set_spec would
  const AttentionSpec& spec() const;
  const std::vector<Positions>& trained_positions() const { return trained_positions_; }  // by head

  // Moves the routing centroids by one step of their moving average, outside autograd. `records`
  // are those of this layer from all passes that make up the step's batch. Records keep the rows of
  // their passes; PassContext::statistics has what is needed of them, for update_centroids after
  // the last pass. add_statistics is the same for records.
  void update_centroids(const std::vector<AttentionRecord>& records);
  void update_centroids(const StepStatistics& statistics);
  void add_statistics(const std::vector<AttentionRecord>& records,
                      StepStatistics& statistics) const;
  // Sets the centroids by spherical k-means of the records. With the ranks of the records' passes,
  // those of this rank's heads; the others become 0, so that the sum over the ranks has all.
  void initialise_centroids(const std::vector<AttentionRecord>& records, std::uint64_t seed,
                            const SequenceRanks* ranks = nullptr);

  // Decoding: prefill returns the outputs (B, N, E) of the N positions after those in the cache,
  // which they join. make_cache throws for a mechanism that is not exact and causal, and names it.
  std::shared_ptr<LayerCache> make_cache(std::int64_t batch) const;
  at::Tensor prefill(const at::Tensor& x_BNE, LayerCache& cache);

  void pretty_print(std::ostream& stream) const override;

 private:
  PassOutput attended(const at::Tensor& x_BNE, const PassContext& context);
  PassOutput attended_packed(const at::Tensor& x_BNE, const PassContext& context);
  bool packs(const at::Tensor& x_BNE, const PassContext& context) const;
  using Groups = std::vector<std::shared_ptr<HeadGroupImpl>>;
  Groups make_groups(const AttentionSpec& spec) const;
  AttentionSpec with_positions(const AttentionSpec& spec) const;
  Groups other_groups(const AttentionSpec& spec) const;
  AttentionOptions group_options(std::size_t group, const at::Tensor& x_BNE,
                                 const PassContext& context);
  void record(const PassContext& context, std::int64_t group, const HeadRows& placed,
              const AttentionOptions& options, const std::vector<at::Tensor>& labels) const;
  std::vector<HeadRows> project(const at::Tensor& x_BNE);
  std::vector<HeadRows> whole_sequences(std::vector<HeadRows> rows,
                                        const PassContext& context) const;

  SelfAttentionOptions options_;
  std::int64_t kv_heads_ = 0;
  ::torch::nn::Linear q_{nullptr}, k_{nullptr}, v_{nullptr}, out_{nullptr};
  std::vector<HeadSlice> slices_;
  Groups groups_;
  std::vector<Positions> trained_positions_;  // by head
};
TORCH_MODULE(SelfAttention);

}  // namespace coterie::torch_api
