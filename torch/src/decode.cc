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

// Drops rows before `needed` when there is no room, and doubles it when that does not help.
void make_room(RowCache& cache, std::int64_t needed) {
  const std::int64_t capacity = cache.k.size(2);
  if (cache.count < capacity) {
    make_own(cache.k);
    make_own(cache.v);
    return;
  }
  const std::int64_t dropped = needed - cache.first, kept = cache.count - dropped;
  const std::int64_t larger = std::max(capacity, 2 * kept + 1);
  cache.k = with_capacity(cache.k, larger, dropped, kept);
  cache.v = with_capacity(cache.v, larger, dropped, kept);
  cache.first = needed;
  cache.count = kept;
}

void append(RowCache& cache, const HeadRows& rows, std::int64_t needed) {
  constexpr std::int64_t kFirstCapacity = 16;
  if (!cache.k.defined()) {
    cache.k = with_capacity(rows.k, kFirstCapacity, 0, 0);
    cache.v = with_capacity(rows.v, kFirstCapacity, 0, 0);
  }
  make_room(cache, std::min(needed, cache.first + cache.count));
  cache.k.narrow(2, cache.count, 1).copy_(rows.k);
  cache.v.narrow(2, cache.count, 1).copy_(rows.v);
  ++cache.count;
}

at::Tensor decode_rows(const DecodingStep& step, RowCache& cache) {
  const KeyPattern pattern = key_pattern(step.mechanism, step.position);
  append(cache, step.rows, first_needed(pattern));
  const auto seen = [&](const at::Tensor& rows) {
    return rows.slice(2, pattern.first - cache.first, cache.count, pattern.stride);
  };
  const bool selects = std::holds_alternative<OracleTopParams>(step.mechanism);
  return attention(step.rows.q, seen(cache.k), seen(cache.v),
                   selects ? step.mechanism : Mechanism(FullParams{}),
                   {.scale = step.options.scale});
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
