// SPDX-License-Identifier: MIT
#include "train/collapse.h"

#include <fmt/core.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <numeric>

namespace coterie::train {
namespace {

// Of the head's tokens, in its largest cluster; 0 without clusters.
double largest_share(const HeadReport& head) {
  const double sum = std::accumulate(head.sizes.begin(), head.sizes.end(), 0.0);
  return head.sizes.size() < 2 || sum <= 0 ? 0 : head.sizes.front() / sum;  // largest first
}

}  // namespace

std::vector<std::string> collapse_warnings(const std::vector<GroupReport>& groups) {
  std::vector<std::string> warnings;
  std::int64_t layer = -1, first = 0;
  for (const GroupReport& group : groups) {
    if (group.layer != layer) first = 0;
    layer = group.layer;
    std::vector<std::int64_t> heads;
    double share = 0, mass = 1;
    for (const HeadReport& head : group.heads) {
      if (has_collapsed(head.sizes, head.mass)) {
        heads.push_back(first);
        share = std::max(share, largest_share(head));
        mass = std::min(mass, head.mass);
      }
      ++first;
    }
    if (heads.empty()) continue;
    warnings.push_back(fmt::format(
        "layer {}, head{} {}, {}: the clusters have collapsed (up to {:.0f} % of the tokens in one "
        "cluster, {:.1f} % of full attention kept); docs/training.md says what to do",
        layer, heads.size() == 1 ? "" : "s", fmt::join(heads, ", "), group.attention, 100 * share,
        100 * mass));
  }
  return warnings;
}

}  // namespace coterie::train
