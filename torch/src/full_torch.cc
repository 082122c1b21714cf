// SPDX-License-Identifier: MIT
#include "full_torch.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/scaled_dot_product_attention.h>

#include <optional>
#include <string>

#include "bridge.h"
#include "coterie/error.h"

namespace coterie::torch_api {
namespace {

void check(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
           const AttentionOptions& options) {
  for (const at::Tensor& tensor : {options.centroids, options.gate, options.logit_scale}) {
    if (tensor.defined()) {
      throw Error(
          "[full] expected no centroids, gate or logit_scale, for it has no use of them; "
          "got one");
    }
  }
  const bool fits = k.defined() && q.dim() == 4 && k.dim() == 4 && v.dim() == 4 &&
                    k.size(0) == q.size(0) && v.size(0) == q.size(0) && k.size(1) == v.size(1) &&
                    k.size(1) > 0 && q.size(1) % k.size(1) == 0 && k.size(2) == v.size(2) &&
                    k.size(3) == q.size(3);
  if (!fits) {
    throw Error("[full] expected q (B, H, N, Dk), k (B, Hkv, S, Dk) and v (B, Hkv, S, Dv); got " +
                view(q).describe() + ", " + view(k).describe() + " and " + view(v).describe());
  }
}

// Which pairs may meet, (B|1, H|1, N, S); undefined when all may, or all that a plain causal form
// of equal lengths allows.
at::Tensor allowed_pairs(const at::Tensor& q, const at::Tensor& k,
                         const AttentionOptions& options) {
  const std::int64_t N = q.size(2), S = k.size(2);
  const at::TensorOptions integers = q.options().dtype(at::kLong);
  const at::Tensor i = at::arange(N, integers).unsqueeze(1), j = at::arange(S, integers);
  const at::Tensor &q_lengths = options.q_lengths, &k_lengths = options.k_lengths;
  at::Tensor allowed = options.mask;
  const auto restrict_to = [&](const at::Tensor& pairs) {
    allowed = allowed.defined() ? allowed & pairs : pairs;
  };
  const auto per_item = [](const at::Tensor& lengths) { return lengths.view({-1, 1, 1, 1}); };
  if (q_lengths.defined()) restrict_to(i < per_item(q_lengths));
  if (k_lengths.defined()) restrict_to(j < per_item(k_lengths));
  if (!options.causal || (!allowed.defined() && N == S)) return allowed;
  at::Tensor last = i + (S - N);  // the last key in sight: sequences end together
  if (k_lengths.defined()) last = last + (per_item(k_lengths) - S);
  if (q_lengths.defined()) last = last + (N - per_item(q_lengths));
  restrict_to(j <= last);
  return allowed;
}

// x (B, H, N, D) with zeros beyond the lengths, where there may be anything: not even weights of 0
// make NaN harmless.
at::Tensor without_padding(const at::Tensor& x, const at::Tensor& lengths) {
  if (!lengths.defined()) return x;
  const at::Tensor rows = at::arange(x.size(2), lengths.options()).unsqueeze(1);
  return x.masked_fill(rows >= lengths.view({-1, 1, 1, 1}), 0);
}

}  // namespace

at::Tensor full_attention_of_torch(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                   const AttentionOptions& options) {
  check(q, k, v, options);
  const auto scale = options.scale == 0 ? std::nullopt : std::optional<double>(options.scale);
  const bool shared = q.size(1) != k.size(1);
  const at::Tensor allowed = allowed_pairs(q, k, options);
  if (!allowed.defined()) {
    return at::scaled_dot_product_attention(q, k, v, {}, 0.0, options.causal, scale, shared);
  }
  // A row without keys is opened, for its softmax has no meaning, and its output set to 0.
  const at::Tensor blind = ~allowed.any(-1, /*keepdim=*/true);
  return at::scaled_dot_product_attention(
             without_padding(q, options.q_lengths), without_padding(k, options.k_lengths),
             without_padding(v, options.k_lengths), allowed | blind, 0.0, false, scale, shared)
      .masked_fill(blind, 0);
}

}  // namespace coterie::torch_api
