// SPDX-License-Identifier: MIT
#include "coterie/layer.h"

#include "core/check.h"

namespace coterie {

AttentionSpec layer_spec(AttentionSpec spec, bool causal) {
  for (HeadGroup& group : spec.groups) {
    auto* const routing = std::get_if<RoutingParams>(&group.mechanism);
    if (routing == nullptr || routing->share_qk != SharedKeys::automatic || !causal) continue;
    if (!routing->include_self) routing->share_qk = SharedKeys::yes;  // needs separate keys
  }
  return spec;
}

std::vector<HeadSlice> head_slices(const AttentionSpec& spec, std::int64_t heads,
                                   std::int64_t kv_heads) {
  COTERIE_CHECK(kv_heads >= 1 && heads % kv_heads == 0, "spec",
                "the number of query heads must be a multiple of the number of key/value heads; "
                "got ",
                heads, " and ", kv_heads);
  const std::int64_t per_kv = heads / kv_heads;
  std::vector<HeadSlice> slices;
  HeadSlice next;
  const std::vector<std::int64_t> counts = spec.head_counts(heads);
  for (std::size_t g = 0; g < counts.size(); ++g) {
    const std::int64_t count = counts[g];
    COTERIE_CHECK(count % per_kv == 0, "spec", "the heads of a group must be a multiple of ",
                  per_kv, ", the query heads per key/value head; got a group of ", count);
    next.count = count;
    next.kv_count = count / per_kv;
    next.key_count = keys_are_queries(spec.groups[g].mechanism) ? 0 : next.kv_count;
    slices.push_back(next);
    next.first += count;
    next.first_kv += next.kv_count;
    next.first_key += next.key_count;
  }
  return slices;
}

void check_key_heads(const std::vector<HeadSlice>& slices, std::int64_t key_heads) {
  std::int64_t needed = 0;
  for (const HeadSlice& slice : slices) needed += slice.key_count;
  COTERIE_CHECK(key_heads == needed || slices.size() == 1, "attention", "expected k with ", needed,
                " heads, those of the groups that have keys; got ", key_heads);
}

void refuse_positions(const AttentionSpec& spec) {
  for (const HeadGroup& group : spec.groups)
    COTERIE_CHECK(group.positions == Positions::automatic || group.positions == Positions::none,
                  mechanism_name(group.mechanism),
                  "q and k are used as they are, without positions; got ", spec.to_string(),
                  ". Use a layer, which applies positions");
}

std::uint64_t group_seed(std::uint64_t seed, std::int64_t layer, std::int64_t group) {
  for (const std::int64_t number : {layer, group}) {
    seed += 0x9E3779B97F4A7C15ull * (static_cast<std::uint64_t>(number) + 1);
    seed = (seed ^ (seed >> 30)) * 0xBF58476D1CE4E5B9ull;
    seed = (seed ^ (seed >> 27)) * 0x94D049BB133111EBull;
    seed ^= seed >> 31;
  }
  return seed;
}

}  // namespace coterie
