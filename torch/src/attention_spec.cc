// SPDX-License-Identifier: MIT
// Another attention over the projections of a layer.
#include <algorithm>
#include <string>

#include "coterie/error.h"
#include "coterie/torch/attention.h"
#include "head_group.h"

namespace coterie::torch_api {
namespace {

bool same_heads(const std::vector<HeadSlice>& a, const std::vector<HeadSlice>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(),
                    [](const auto& x, const auto& y) { return x.count == y.count; });
}

}  // namespace

// The spec with positions in all groups: a group that names none becomes one for each run of heads
// with equal trained positions.
AttentionSpec SelfAttentionImpl::with_positions(const AttentionSpec& given) const {
  AttentionSpec spec = layer_spec(given, options_.causal), settled;
  const std::vector<std::int64_t> counts = spec.head_counts(options_.heads);
  std::size_t head = 0;
  for (std::size_t g = 0; g < counts.size(); ++g) {
    HeadGroup group = spec.groups[g];
    const bool named = group.positions != Positions::automatic;
    const std::size_t end = head + static_cast<std::size_t>(counts[g]);
    while (head < end) {
      const std::size_t first = head;
      group.positions = named ? group.positions : trained_positions_[head];
      while (head < end && (named || trained_positions_[head] == group.positions)) ++head;
      group.heads = static_cast<std::int64_t>(head - first);
      settled.groups.push_back(group);
    }
  }
  return settled;
}

// Groups with other numbers of heads; throws if the layer or the groups have learned tensors.
SelfAttentionImpl::Groups SelfAttentionImpl::other_groups(const AttentionSpec& spec) const {
  const auto plain = [](const auto& group) {
    return !group->has_tensors() && !keys_are_queries(group->mechanism());
  };
  if (!std::all_of(groups_.begin(), groups_.end(), plain)) {
    throw Error("[self_attention] expected groups with as many heads as in \"" +
                options_.spec.to_string() +
                "\", which has learned tensors or keys that are the queries; got \"" +
                spec.to_string() + '"');
  }
  Groups groups = make_groups(spec);
  if (!std::all_of(groups.begin(), groups.end(), plain)) {
    throw Error(
        "[self_attention] expected attention without learned tensors and with separate keys; got "
        "\"" +
        spec.to_string() + "\", which this layer was not trained with");
  }
  return groups;
}

void SelfAttentionImpl::check_spec(const AttentionSpec& given) const {
  const AttentionSpec spec = with_positions(given);
  const std::vector<HeadSlice> slices = head_slices(spec, options_.heads, kv_heads_);
  if (!same_heads(slices, slices_)) {
    other_groups(spec);
    return;
  }
  for (std::size_t g = 0; g < groups_.size(); ++g) groups_[g]->check_spec(spec.groups[g]);
}

void SelfAttentionImpl::set_spec(const AttentionSpec& given) {
  check_spec(given);
  const AttentionSpec spec = with_positions(given);
  const std::vector<HeadSlice> slices = head_slices(spec, options_.heads, kv_heads_);
  if (same_heads(slices, slices_)) {
    for (std::size_t g = 0; g < groups_.size(); ++g) groups_[g]->set_spec(spec.groups[g]);
  } else {
    for (std::size_t g = 0; g < groups_.size(); ++g)
      unregister_module("group_" + std::to_string(g));
    groups_ = other_groups(spec);
    slices_ = slices;
    for (std::size_t g = 0; g < groups_.size(); ++g)
      register_module("group_" + std::to_string(g), groups_[g]);
  }
  options_.spec = layer_spec(given, options_.causal);
}

}  // namespace coterie::torch_api
