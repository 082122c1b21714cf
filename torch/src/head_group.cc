// SPDX-License-Identifier: MIT
#include "head_group.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/full.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <cmath>
#include <string>

#include "coterie/error.h"

namespace coterie::torch_api {
namespace {

[[noreturn]] void refuse(const Mechanism& mechanism, const std::string& message) {
  throw Error(std::string("[") + mechanism_name(mechanism) + "] " + message);
}

double inverse_root(std::int64_t D) { return 1.0 / std::sqrt(static_cast<double>(D)); }

void check_positions(const HeadGroupOptions& options, const Mechanism& mechanism,
                     Positions positions) {
  if (positions == Positions::none) return;
  if (options.head_dim % 2 != 0) {
    refuse(mechanism, "expected an even head dimension for rotary and relative positions; got " +
                          std::to_string(options.head_dim));
  }
  const bool rotary_only = keys_are_queries(mechanism) ||
                           std::holds_alternative<RoutingParams>(mechanism) ||
                           std::holds_alternative<CastParams>(mechanism);
  if (positions == Positions::relative && rotary_only) {
    refuse(mechanism, "expected positions=rotary or none; got relative");
  }
}

// Throws unless `state` (heads, clusters, D) of the trained group has that many clusters.
void check_state(const Mechanism& mechanism, const char* name, std::int64_t clusters,
                 const at::Tensor& state) {
  if (state.defined() && state.size(1) == clusters) return;
  const std::string have = state.defined() ? std::to_string(state.size(1)) : std::string("none");
  refuse(mechanism, std::string("expected a group trained with ") + std::to_string(clusters) + " " +
                        name + "; got one with " + have);
}

// (B, H, N, D) as (B H / heads, heads, N, D): heads that share a key head become batch entries.
at::Tensor fold_heads(const at::Tensor& x, std::int64_t heads) {
  return x.unflatten(1, {heads, x.size(1) / heads}).transpose(1, 2).flatten(0, 1);
}

// Rows of records padded to the same length, as batch entries.
struct PaddedRows {
  std::vector<at::Tensor> rows, lengths;

  void add(const at::Tensor& x, const at::Tensor& x_lengths, std::int64_t heads, std::int64_t N) {
    const at::Tensor folded = fold_heads(x, heads);
    rows.push_back(at::constant_pad_nd(folded, {0, 0, 0, N - x.size(2)}));
    lengths.push_back(x_lengths.defined()
                          ? x_lengths.to(at::kInt).repeat_interleave(x.size(1) / heads)
                          : at::full({folded.size(0)}, x.size(2), x.options().dtype(at::kInt)));
  }
};

}  // namespace

HeadGroupImpl::HeadGroupImpl(const HeadGroupOptions& options)
    : options_(options),
      mechanism_(resolve(options.spec.mechanism, options.causal)),
      positions_(options.spec.positions) {
  if (positions_ == Positions::automatic) {
    positions_ = options.spec.rotary() ? Positions::rotary : Positions::none;
  }
  check_positions(options_, mechanism_, positions_);
  if (const auto* routing = std::get_if<RoutingParams>(&mechanism_)) add_centroids(*routing);
  if (const auto* cast = std::get_if<CastParams>(&mechanism_)) add_surrogates(*cast);
  if (positions_ == Positions::relative) add_relative();
}

void HeadGroupImpl::add_centroids(const RoutingParams& params) {
  const CentroidState state =
      make_centroids(options_.kv_heads, params.clusters, options_.head_dim, options_.seed);
  state_ = {register_buffer("centroids", state.centroids), register_buffer("counts", state.counts),
            register_buffer("sums", state.sums)};
  // With a scale of 1, shared-QK queries would attend to themselves only: |normalised row|^2 = D.
  logit_scale_ = register_parameter(
      "logit_scale", at::full({options_.heads}, inverse_root(options_.head_dim), at::kFloat));
}

void HeadGroupImpl::add_surrogates(const CastParams& params) {
  const std::int64_t D = options_.head_dim;
  const at::Generator generator = at::make_generator<at::CPUGeneratorImpl>(options_.seed);
  const at::Tensor drawn = at::randn({options_.heads, params.clusters, D}, generator, at::kFloat);
  surrogates_ = register_parameter("surrogates", drawn * inverse_root(D));
  gate_ = register_module("gate", ::torch::nn::Linear(options_.dim, 1));
}

void HeadGroupImpl::add_relative() {
  const std::int64_t D = options_.head_dim;
  const auto relative = register_module("relative", std::make_shared<::torch::nn::Module>());
  const at::Tensor drawn = (at::rand({D, D}) * 2 - 1) * inverse_root(D);  // as in torch's Linear
  relative_ = {relative->register_parameter("weight", drawn),
               relative->register_parameter("bias", at::zeros({options_.heads, D}))};
}

void HeadGroupImpl::check_spec(const HeadGroup& spec) const {
  const Mechanism mechanism = resolve(spec.mechanism, options_.causal);
  if (keys_are_queries(mechanism) != keys_are_queries(mechanism_)) {
    refuse(mechanism, std::string("expected a mechanism like ") + mechanism_name(mechanism_) +
                          ", whose keys are " +
                          (keys_are_queries(mechanism_) ? "the queries" : "separate") +
                          "; got one of the other kind");
  }
  check_positions(options_, mechanism, spec.positions);
  if (spec.positions == Positions::relative && !relative_.weight.defined()) {
    refuse(mechanism, "expected a group trained with positions=relative; got one without");
  }
  if (const auto* routing = std::get_if<RoutingParams>(&mechanism)) {
    check_state(mechanism, "centroids", routing->clusters, state_.centroids);
  }
  if (const auto* cast = std::get_if<CastParams>(&mechanism)) {
    check_state(mechanism, "surrogate tokens", cast->clusters, surrogates_);
  }
}

void HeadGroupImpl::set_spec(const HeadGroup& spec) {
  check_spec(spec);
  mechanism_ = resolve(spec.mechanism, options_.causal);
  positions_ = spec.positions;
}

bool HeadGroupImpl::can_be_packed() const {
  return positions_ != Positions::relative && !std::holds_alternative<CastParams>(mechanism_);
}

HeadRows HeadGroupImpl::placed(const HeadRows& rows, std::int64_t first,
                               const HeadPart& part) const {
  HeadRows own = rows;
  for (at::Tensor* tensor : {&own.q, &own.k, &own.v}) {
    if (tensor->defined()) *tensor = tensor->transpose(1, 2);
  }
  const PositionOptions options{first, options_.rotary_base};
  if (positions_ == Positions::rotary) {
    own.q = rotated(own.q, options);
    if (own.k.defined()) own.k = rotated(own.k, options);
  } else if (positions_ == Positions::relative) {
    own.q = widened_queries(own.q, {relative_.weight, part.of(relative_.bias)}, options);
    own.k = widened_keys(own.k, relative_.weight.size(0), options);
  }
  return own;
}

AttentionOptions HeadGroupImpl::attention_options(const at::Tensor& x, const HeadPart& part) {
  AttentionOptions options;
  options.causal = options_.causal;
  if (positions_ == Positions::relative) options.scale = inverse_root(options_.head_dim);
  if (std::holds_alternative<RoutingParams>(mechanism_)) {
    options.centroids = part.of(state_.centroids);
    options.logit_scale = part.of(logit_scale_);
  } else if (std::holds_alternative<CastParams>(mechanism_)) {
    options.centroids = part.of(surrogates_);
    options.gate = gate_(x).squeeze(-1);
  }
  return options;
}

void HeadGroupImpl::exchange(const HeadRows& rows, const SequenceRanks& ranks, std::int64_t length,
                             AttentionOptions& options) const {
  if (!options.gate.defined()) return;
  options.gate = to_all({options.gate}, ranks, length)[0];
  if (!selects_together(mechanism_)) return;
  const at::NoGradGuard no_grad;
  const std::vector<at::Tensor> all = to_all({rows.q, rows.k}, ranks, length);
  const HeadRows whole = placed({all[0], all[1], all[1]}, 0);
  AttentionOptions own = options;
  own.centroids = surrogates_;
  own.part = {options.part.first_item};
  options.selection = attention_select(whole.q, whole.k, whole.v, mechanism_, own);
}

PassOutput HeadGroupImpl::forward(const HeadRows& placed, const AttentionOptions& options) const {
  const auto& [q, k, v] = placed;
  const auto* routing = std::get_if<RoutingParams>(&mechanism_);
  if (!routing) return {attention(q, k, v, mechanism_, options), {}};
  const AttentionDetails details = attention_details(q, k, v, mechanism_, options);
  const bool strict = routing->membership == Membership::nearest;  // saves the labels
  const auto loss = [&](const at::Tensor& x, const char* name) {
    const at::Tensor labels =
        strict ? details.get(name) : nearest_centroids(x, options.centroids, options.q_lengths);
    return commitment_loss(x, options.centroids, labels, options.q_lengths);
  };
  const at::Tensor of_queries = loss(q, "q_labels");
  const at::Tensor of_keys = routing->shared() ? of_queries : loss(k, "k_labels");
  return {details.out, (of_queries + of_keys) * routing->commitment};
}

void HeadGroupImpl::add_statistics(const HeadRows& placed, const at::Tensor& lengths,
                                   const std::vector<at::Tensor>& labels,
                                   GroupStatistics& statistics, const HeadPart& part) const {
  const CentroidState state{part.of(state_.centroids), part.of(state_.counts),
                            part.of(state_.sums)};
  const auto add = [&](const at::Tensor& x, std::size_t side, CentroidStatistics& all) {
    if (!all.members.defined()) {
      all = {at::zeros_like(state_.counts, at::kDouble), at::zeros_like(state_.sums, at::kDouble)};
    }
    const at::Tensor nearest =
        labels.empty() ? nearest_centroids(x, state.centroids, lengths) : labels[side];
    CentroidStatistics own{part.of(all.members), part.of(all.sums)};
    torch_api::add_statistics(x, nearest, lengths, state, own);
  };
  add(placed.q, 0, statistics.queries);
  if (placed.k.defined()) add(placed.k, 1, statistics.keys);
}

void HeadGroupImpl::update_centroids(const GroupStatistics& statistics) const {
  const double decay = std::get<RoutingParams>(mechanism_).decay;
  move_centroids(decay, statistics.queries, state_);
  if (statistics.keys.members.defined()) move_centroids(decay, statistics.keys, state_);
}

void HeadGroupImpl::initialise_centroids(const std::vector<AttentionRecord>& records,
                                         std::uint64_t seed, const HeadPart& part) const {
  if (!std::holds_alternative<RoutingParams>(mechanism_) || records.empty()) return;
  std::int64_t N = 0;
  for (const AttentionRecord& record : records) N = std::max(N, record.q.size(2));
  PaddedRows padded;
  for (const AttentionRecord& record : records) {
    for (const at::Tensor& x : {record.q, record.k}) {
      const std::int64_t heads = options_.kv_heads / part.count;
      if (x.defined()) padded.add(x, record.options.q_lengths, heads, N);
    }
  }
  if (part.count > 1) {
    for (const at::Tensor& all : {state_.centroids, state_.counts, state_.sums}) all.zero_();
  }
  torch_api::initialise_centroids(
      {part.of(state_.centroids), part.of(state_.counts), part.of(state_.sums)},
      at::cat(padded.rows), at::cat(padded.lengths), seed,
      part.index * (options_.kv_heads / part.count));
}

}  // namespace coterie::torch_api
