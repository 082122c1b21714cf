// SPDX-License-Identifier: MIT
// Attention weights of records: outputs for values that are unit vectors.
#include <ATen/ops/cat.h>
#include <ATen/ops/eye.h>
#include <ATen/ops/ones_like.h>

#include <algorithm>

#include "train/inspect.h"

namespace coterie::train {

namespace {

using torch_api::AttentionRecord;

constexpr std::int64_t kColumns = 64;   // of the weights in one call
constexpr double kNormaliseEps = 1e-6;  // of routing's normalisation, docs/mechanisms.md

at::Tensor normalised(const at::Tensor& x) {
  const at::Tensor centred = x - x.mean(-1, /*keepdim=*/true);
  return centred / (centred.square().mean(-1, true) + kNormaliseEps).sqrt();
}

// Rows of length 1; zero rows stay zero.
at::Tensor unit(const at::Tensor& x) {
  const at::Tensor norm = x.square().sum(-1, true).sqrt();
  return x / norm.where(norm > 0, at::ones_like(norm));
}

// All keys except the query's own. A query without other keys keeps its own.
at::Tensor others_mask(std::int64_t N, bool causal) {
  at::Tensor mask = at::eye(N, at::kBool).logical_not();
  if (causal || N == 1) mask[0][0].fill_(true);
  return mask;
}

// Full attention with the logits of routing, scale logit_scale qn . kn.
void use_routing_logits(const RoutingParams& params, AttentionRecord& record) {
  torch_api::AttentionOptions& options = record.options;
  record.k = normalised(params.shared() ? record.q : record.k);
  record.q = normalised(record.q);
  if (options.logit_scale.defined()) record.q = record.q * options.logit_scale.view({-1, 1, 1});
  if (options.scale == 0) options.scale = 1;
  if (params.self == SelfAttention::demote) {
    options.mask = others_mask(record.q.size(2), options.causal);
  }
}

// Full attention with the logits of lsh, scale q_i . q_j / |q_j|.
void use_lsh_logits(const LshParams& params, AttentionRecord& record) {
  record.k = unit(record.q);
  if (params.combine == LshCombine::lse) {
    record.options.mask = others_mask(record.q.size(2), record.options.causal);
  }
}

}  // namespace

at::Tensor attention_rows(const AttentionRecord& record) {
  // One set of values per key head. With shared queries and keys k is absent; v gives its sizes.
  const at::Tensor& keys = record.k.defined() ? record.k : record.v;
  const std::int64_t B = keys.size(0), heads = keys.size(1), S = keys.size(2);
  const at::Tensor identity = at::eye(S, record.q.options());
  std::vector<at::Tensor> columns;
  for (std::int64_t begin = 0; begin < S; begin += kColumns) {
    const std::int64_t width = std::min(kColumns, S - begin);
    const at::Tensor v = identity.narrow(1, begin, width).expand({B, heads, S, width});
    columns.push_back(
        torch_api::attention(record.q, record.k, v, record.mechanism, record.options));
  }
  return at::cat(columns, -1);
}

at::Tensor full_rows(const AttentionRecord& record) {
  AttentionRecord full = record;
  const Mechanism mechanism = resolve(record.mechanism, record.options.causal);
  if (const auto* routing = std::get_if<RoutingParams>(&mechanism)) {
    use_routing_logits(*routing, full);
  } else if (const auto* lsh = std::get_if<LshParams>(&mechanism)) {
    use_lsh_logits(*lsh, full);
  }
  full.mechanism = FullParams();
  full.options.centroids = full.options.gate = full.options.logit_scale = at::Tensor();
  return attention_rows(full);
}

}  // namespace coterie::train
