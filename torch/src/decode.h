// SPDX-License-Identifier: MIT
// Attention of positions that follow those in a cache, for mechanisms in which a position depends
// on earlier ones only. Positional patterns keep rows that later positions may still see; strict
// routing keeps, for each cluster, a ring of its latest keys, so that its memory does not grow with
// the sequence.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <variant>
#include <vector>

#include "coterie/mechanism.h"
#include "coterie/torch/functional.h"
#include "head_group.h"

namespace coterie::torch_api {

// Rows of positions [first, first + count).
struct RowCache {
  at::Tensor k, v;  // (B, h', capacity, D)
  std::int64_t first = 0, count = 0;
};

// RoutingRings of coterie/routing.h.
struct RingCache {
  at::Tensor k, v;    // (B, heads, C * window, D)
  at::Tensor counts;  // (B, heads, C)
};

using GroupCache = std::variant<RowCache, RingCache>;

// Copies share memory: a step on a cache whose memory is shared copies it first.
struct LayerCache {
  std::int64_t batch = 0, position = 0;  // positions seen
  std::vector<GroupCache> groups;
};

// An empty cache; throws Error for mechanisms that are not exact and causal.
GroupCache make_group_cache(const Mechanism& mechanism, bool causal);

struct DecodingStep {
  Mechanism mechanism;  // resolved
  HeadRows rows;        // (B, h, N, D)
  AttentionOptions options;
  std::int64_t position = 0;  // of the first row
};
// The output (B, h, N, D) of the positions, whose keys and values join the cache.
at::Tensor decode(const DecodingStep& step, GroupCache& cache);

}  // namespace coterie::torch_api
