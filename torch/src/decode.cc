// SPDX-License-Identifier: MIT
#include "decode.h"

#include <ATen/ops/zeros.h>

#include <algorithm>
#include <string>

#include "coterie/error.h"
#include "coterie/spec.h"

namespace coterie::torch_api {
namespace {

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

}  // namespace

void make_own(at::Tensor& tensor) {
  if (tensor.use_count() > 1) tensor = tensor.clone();
}

GroupCache make_group_cache(const Mechanism& mechanism, bool causal) {
  const std::string op = std::string("[") + mechanism_name(mechanism) + "] ";
  if (!causal) throw Error(op + "expected a causal layer for decoding; got one that is not");
  if (leaks_future(mechanism, causal)) {
    throw Error(op + "expected a mechanism that does not look ahead for decoding; got " +
                to_string(mechanism) + ", whose selection sees the future");
  }
  if (std::holds_alternative<RoutingParams>(mechanism)) return RingCache{};
  return RowCache{};
}

at::Tensor decode(const DecodingStep& step, GroupCache& cache) {
  if (auto* rings = std::get_if<RingCache>(&cache)) return decode_rings(step, *rings);
  return decode_rows(step, std::get<RowCache>(cache));
}

}  // namespace coterie::torch_api
