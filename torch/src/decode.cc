// SPDX-License-Identifier: MIT
#include "decode.h"

#include <ATen/ops/zeros.h>
#include <c10/core/DeviceGuard.h>

#include <algorithm>
#include <string>

#include "bridge.h"
#include "coterie/error.h"
#include "coterie/routing.h"
#include "coterie/spec.h"

namespace coterie::torch_api {
namespace {

// Gives the tensor its own memory if it shares any.
void make_own(at::Tensor& tensor) {
  if (tensor.use_count() > 1) tensor = tensor.clone();
}

// The first position that this one and later ones see: patterns with a stride see all of them.
std::int64_t first_needed(const KeyPattern& pattern) {
  return pattern.stride == 1 ? pattern.first : 0;
}

at::Tensor with_capacity(const at::Tensor& rows, std::int64_t capacity, std::int64_t from,
                         std::int64_t count) {
  const at::Tensor larger =
      at::zeros({rows.size(0), rows.size(1), capacity, rows.size(3)}, rows.options());
  larger.narrow(2, 0, count).copy_(rows.narrow(2, from, count));
  return larger;
}

// Keeps the rows from position `needed` on, in memory for `capacity` rows.
void move_rows(RowCache& cache, std::int64_t needed, std::int64_t capacity) {
  const std::int64_t dropped = needed - cache.first, kept = cache.count - dropped;
  cache.k = with_capacity(cache.k, capacity, dropped, kept);
  cache.v = with_capacity(cache.v, capacity, dropped, kept);
  cache.first = needed;
  cache.count = kept;
}

// Drops rows before `needed` when there is no room, and more than doubles it when that does not
// help.
void append(RowCache& cache, const HeadRows& rows, std::int64_t needed) {
  constexpr std::int64_t kFirstCapacity = 16;
  const std::int64_t N = rows.v.size(2);
  if (!cache.k.defined()) {
    cache.k = with_capacity(rows.k, std::max(kFirstCapacity, N), 0, 0);
    cache.v = with_capacity(rows.v, std::max(kFirstCapacity, N), 0, 0);
  }
  if (cache.count + N <= cache.k.size(2)) {
    make_own(cache.k);
    make_own(cache.v);
  } else {
    const std::int64_t kept = cache.first + cache.count - needed;
    move_rows(cache, needed, std::max(cache.k.size(2), 2 * kept + N));
  }
  cache.k.narrow(2, cache.count, N).copy_(rows.k);
  cache.v.narrow(2, cache.count, N).copy_(rows.v);
  cache.count += N;
}

// Frees memory if most of the rows are before `needed`, as after many positions at once.
void shrink(RowCache& cache, std::int64_t needed) {
  const std::int64_t kept = cache.first + cache.count - needed;
  if (cache.k.size(2) > 4 * kept + 64) move_rows(cache, needed, 2 * kept + 1);
}

// One query needs no mask: it attends to all of the rows that its pattern selects. Several are the
// last queries of the mechanism over the rows that any of them sees.
at::Tensor decode_rows(const DecodingStep& step, RowCache& cache) {
  const std::int64_t N = step.rows.v.size(2);
  const KeyPattern pattern = key_pattern(step.mechanism, step.position);
  const std::int64_t needed = first_needed(pattern);
  append(cache, step.rows, needed);
  const bool one = N == 1;
  const std::int64_t first = one ? pattern.first : needed;
  const auto seen = [&](const at::Tensor& rows) {
    return rows.slice(2, first - cache.first, cache.count, one ? pattern.stride : 1);
  };
  const bool selects = std::holds_alternative<OracleTopParams>(step.mechanism);
  const at::Tensor out = attention(step.rows.q, seen(cache.k), seen(cache.v),
                                   one && !selects ? Mechanism(FullParams{}) : step.mechanism,
                                   {.scale = step.options.scale, .causal = !one});
  if (!one) shrink(cache, first_needed(key_pattern(step.mechanism, step.position + N)));
  return out;
}

at::Tensor decode_rings(const DecodingStep& step, RingCache& cache) {
  const auto& params = std::get<RoutingParams>(step.mechanism);
  const at::Tensor q = with_contiguous_rows(step.rows.q), k = with_contiguous_rows(step.rows.k),
                   v = with_contiguous_rows(step.rows.v);
  const at::ScalarType wide = accumulator_of(q);
  if (!cache.k.defined()) {
    const auto zeros = [&](std::int64_t slots, at::IntArrayRef width, at::ScalarType type) {
      std::vector<std::int64_t> sizes = {q.size(0), (k.defined() ? k : q).size(1), slots};
      sizes.insert(sizes.end(), width.begin(), width.end());
      return at::zeros(sizes, q.options().dtype(type));
    };
    cache.k = zeros(params.clusters * params.window, {q.size(3)}, wide);
    cache.v = zeros(params.clusters * params.window, {v.size(3)}, wide);
    cache.counts = zeros(params.clusters, {}, at::kLong);
  }
  for (at::Tensor* tensor : {&cache.k, &cache.v, &cache.counts}) make_own(*tensor);
  const at::Tensor centroids = with_type(step.options.centroids, wide);
  const at::Tensor logit_scale = with_type(step.options.logit_scale, wide);
  AttentionInputs inputs;
  inputs.q = view(q);
  inputs.k = view(k);
  inputs.v = view(v);
  inputs.centroids = view(centroids);
  inputs.logit_scale = view(logit_scale);
  inputs.scale = step.options.scale;
  inputs.causal = true;
  const c10::DeviceGuard guard(q.device());
  const at::Tensor out = empty_rows(q, v.size(3));
  routing_step(params, inputs, {view(cache.k), view(cache.v), view(cache.counts)}, view(out),
               Scratch(routing_step_workspace_bytes(params, inputs), q).workspace());
  return out;
}

}  // namespace

GroupCache make_group_cache(const Mechanism& mechanism, bool causal) {
  const std::string op = std::string("[") + mechanism_name(mechanism) + "] ";
  if (!causal) throw Error(op + "expected a causal layer for decoding; got one that is not");
  if (leaks_future(mechanism, causal)) {
    throw Error(op + "expected a mechanism that does not look ahead for decoding; got " +
                to_string(mechanism) + ", whose selection sees the future");
  }
  const Decoding form = decoding(mechanism, causal);
  if (form == Decoding::none) throw Error(op + "has no decoding; got " + to_string(mechanism));
  if (form == Decoding::rings) return RingCache{};
  return RowCache{};
}

at::Tensor decode(const DecodingStep& step, GroupCache& cache) {
  if (auto* rings = std::get_if<RingCache>(&cache)) return decode_rings(step, *rings);
  return decode_rows(step, std::get<RowCache>(cache));
}

}  // namespace coterie::torch_api
