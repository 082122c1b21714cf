// SPDX-License-Identifier: MIT
// Strict routing one position at a time.
#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/zeros.h>

#include <algorithm>

#include "coterie/torch/centroids.h"
#include "decode.h"

namespace coterie::torch_api {
namespace {

// The clusters of one token as the parallel pass finds them: bit by bit the same, for the core's
// selection of a row depends on nothing but the row and the centroids.
struct TokenClusters {
  at::Tensor keys;     // (B, key heads): the cluster of the key
  at::Tensor queries;  // (B, heads, m): those the query looks into
};

TokenClusters clusters_of(const DecodingStep& step, const RoutingParams& params) {
  const auto& [q, k, v] = step.rows;
  const AttentionDetails details = attention_details(q, k, v, step.mechanism, step.options);
  const auto labels = [&](const char* name) { return details.get(name).squeeze(2).to(at::kLong); };
  const at::Tensor& offsets = details.get("q_offsets");  // one query: a cluster holds it or not
  const std::int64_t m = std::min(params.queries_in, params.clusters);
  return {labels(params.share_qk ? "q_labels" : "k_labels"), std::get<1>(offsets.diff().topk(m))};
}

// Rows index (B, h, n) of x (B, h', R, D) with h a multiple of h': (B, h, n, D).
at::Tensor gather_rows(const at::Tensor& x, const at::Tensor& index) {
  const std::int64_t B = x.size(0), heads = x.size(1), n = index.size(2), D = x.size(3);
  const at::Tensor shared = index.reshape({B, heads, -1, 1}).expand({-1, -1, -1, D});
  return x.gather(2, shared).reshape({B, index.size(1), n, D});
}

// Puts the token's key and value into the ring of its cluster; gives its slots (B, key heads).
at::Tensor insert(RingCache& cache, const RoutingParams& params, const at::Tensor& clusters,
                  const HeadRows& rows) {
  const std::int64_t B = clusters.size(0), heads = clusters.size(1), D = rows.k.size(3);
  const auto slots_of = [&](std::int64_t width) {
    return at::zeros({B, heads, params.clusters * params.window, width}, rows.k.options());
  };
  if (!cache.k.defined()) {
    cache.k = slots_of(D);
    cache.v = slots_of(rows.v.size(3));
    cache.counts = at::zeros({B, heads, params.clusters}, clusters.options());
  }
  for (at::Tensor* tensor : {&cache.k, &cache.v, &cache.counts}) make_own(*tensor);
  const at::Tensor cluster = clusters.unsqueeze(2);
  const at::Tensor slot =
      cluster * params.window + cache.counts.gather(2, cluster).remainder(params.window);
  const auto put = [&](at::Tensor& ring, const at::Tensor& row) {
    ring.scatter_(2, slot.unsqueeze(3).expand({-1, -1, -1, row.size(3)}), row);
  };
  put(cache.k, rows.k);
  put(cache.v, rows.v);
  cache.counts.scatter_add_(2, cluster, at::ones_like(cluster));
  return slot.squeeze(2);
}

// Heads repeated so that there are `heads` of them, neighbours alike.
at::Tensor repeated(const at::Tensor& x, std::int64_t heads) {
  return x.size(1) == heads ? x : x.repeat_interleave(heads / x.size(1), 1);
}

// Slots in the rings of the query's clusters, and which of them it sees, (B, h, n).
struct Sight {
  at::Tensor slots, seen;
  at::Tensor own_key;  // (B, h, 1): whether it also sees its own key, which is in none of the rings
};

Sight look(const RingCache& cache, const RoutingParams& params, const at::Tensor& clusters,
           const at::Tensor& own_slot) {
  const std::int64_t B = clusters.size(0), H = clusters.size(1), w = params.window;
  const at::Tensor age = at::arange(w, clusters.options());
  const at::Tensor slots = (clusters.unsqueeze(3) * w + age).flatten(2);
  const at::Tensor counts =
      cache.counts.gather(2, clusters.reshape({B, cache.counts.size(1), -1})).view({B, H, -1, 1});
  at::Tensor seen = (age < counts).flatten(2);
  const at::Tensor own = slots == repeated(own_slot, H).unsqueeze(2);
  const at::Tensor others = (seen & ~own).any(2, /*keepdim=*/true);
  at::Tensor own_key = ~own.any(2, /*keepdim=*/true);
  if (!params.include_self) own_key = at::zeros_like(own_key);
  if (params.self == coterie::SelfAttention::demote) {
    seen = seen & ~(own & others);
    own_key = own_key & ~others;
  }
  return {slots, seen, own_key};
}

}  // namespace

at::Tensor decode_rings(const DecodingStep& step, RingCache& cache) {
  const auto& params = std::get<RoutingParams>(step.mechanism);
  const TokenClusters clusters = clusters_of(step, params);
  const std::int64_t H = step.rows.q.size(1), key_heads = clusters.keys.size(1);
  const at::Tensor q = normalised_rows(step.rows.q);
  const at::Tensor k = params.share_qk ? q : normalised_rows(step.rows.k);
  const at::Tensor v = repeated(step.rows.v, key_heads).to(q.scalar_type());
  const at::Tensor own_slot = insert(cache, params, clusters.keys, {{}, k, v});
  const Sight sight = look(cache, params, clusters.queries, own_slot);
  const auto visible = [&](const at::Tensor& ring, const at::Tensor& own) {
    return at::cat({gather_rows(ring, sight.slots), repeated(own, H)}, 2);
  };
  const at::Tensor scaled = q * step.options.logit_scale.to(q.scalar_type()).view({1, H, 1, 1});
  const at::Tensor out =
      attention(scaled, visible(cache.k, k), visible(cache.v, v), FullParams{},
                {.mask = at::cat({sight.seen, sight.own_key}, 2).unsqueeze(2), .scale = 1.0});
  return out.to(step.rows.q.scalar_type());
}

}  // namespace coterie::torch_api
