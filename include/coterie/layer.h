// SPDX-License-Identifier: MIT
// Heads and seeds of the head groups of a layer, for any tensor library.
#pragma once

#include <cstdint>
#include <vector>

#include "coterie/spec.h"

namespace coterie {

// `spec` with the defaults of a layer: queries of causal routing are also its keys, as published,
// unless the spec says otherwise.
AttentionSpec layer_spec(AttentionSpec spec, bool causal);

// The heads of a group: [first, first + count) of the layer's query heads, and the key/value heads
// that they read. Groups whose keys are their queries have no key heads. In a layer that projects
// keys for the other groups only, those of this group are [first_key, first_key + key_count).
struct HeadSlice {
  std::int64_t first = 0, count = 0;
  std::int64_t first_kv = 0, kv_count = 0;
  std::int64_t first_key = 0, key_count = 0;
};

// One slice per group of `spec` in a layer of `heads` query heads and `kv_heads` key/value heads.
// Throws Error when head counts do not add up or a group would share a key/value head with another.
std::vector<HeadSlice> head_slices(const AttentionSpec& spec, std::int64_t heads,
                                   std::int64_t kv_heads);

// Throws Error unless k has the heads that all groups need. A single group is not checked.
void check_key_heads(const std::vector<HeadSlice>& slices, std::int64_t key_heads);

// For calls that do not apply positions to q and k: throws Error when a group asks for them.
void refuse_positions(const AttentionSpec& spec);

// The seed of one group of one layer, for clusterings or dropout, from the seed of a pass. Layers
// and groups count from 0. With step(s, n) = mix(s + 0x9E3779B97F4A7C15 (n + 1)) modulo 2^64 and
// the mix of SplitMix64 (Steele et al. 2014), it is step(step(seed, layer), group).
std::uint64_t group_seed(std::uint64_t seed, std::int64_t layer, std::int64_t group);

}  // namespace coterie
