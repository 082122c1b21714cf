// SPDX-License-Identifier: MIT
// Centroids of the routing heads of an attention layer.
#include "coterie/torch/attention.h"
#include "head_group.h"

namespace coterie::torch_api {

void SelfAttentionImpl::add_statistics(const std::vector<AttentionRecord>& records,
                                       StepStatistics& statistics) const {
  for (const AttentionRecord& record : records) {
    const HeadGroupImpl& group = *groups_.at(static_cast<std::size_t>(record.group));
    if (!std::holds_alternative<RoutingParams>(group.mechanism())) continue;
    group.add_statistics({record.q, record.k, {}}, record.options.q_lengths, {},
                         statistics[{record.layer, record.group}]);
  }
}

void SelfAttentionImpl::update_centroids(const StepStatistics& statistics) {
  for (const auto& [place, own] : statistics) {
    groups_.at(static_cast<std::size_t>(place.second))->update_centroids(own);
  }
}

void SelfAttentionImpl::update_centroids(const std::vector<AttentionRecord>& records) {
  StepStatistics statistics;
  add_statistics(records, statistics);
  update_centroids(statistics);
}

void SelfAttentionImpl::initialise_centroids(const std::vector<AttentionRecord>& records,
                                             std::uint64_t seed, const SequenceRanks* ranks) {
  for (std::size_t g = 0; g < groups_.size(); ++g) {
    std::vector<AttentionRecord> own;
    for (const AttentionRecord& record : records) {
      if (record.group == static_cast<std::int64_t>(g)) own.push_back(record);
    }
    groups_[g]->initialise_centroids(own, group_seed(seed, 0, static_cast<std::int64_t>(g)),
                                     HeadPart(ranks));
  }
}

}  // namespace coterie::torch_api
