// SPDX-License-Identifier: MIT
#include "bench/attention.h"

#include <algorithm>
#include <cmath>

namespace coterie::bench {

Entry make_entry(const std::string& spec, bool causal) {
  Entry entry{AttentionSpec::parse(spec), causal};
  for (const HeadGroup& group : entry.spec.groups) {
    const Causality form = resolve_causality(group.mechanism, causal);
    entry.causal = entry.causal || form != Causality::none;
  }
  for (const HeadGroup& group : entry.spec.groups) resolve(group.mechanism, entry.causal);
  return entry;
}

bool leaks_future(const Entry& entry) {
  const auto leaks = [&](const HeadGroup& group) {
    return coterie::leaks_future(group.mechanism, entry.causal);
  };
  return std::any_of(entry.spec.groups.begin(), entry.spec.groups.end(), leaks);
}

bool is_full(const Entry& entry) {
  return entry.spec.groups.size() == 1 &&
         std::holds_alternative<FullParams>(entry.spec.groups[0].mechanism);
}

double Measurement::total_ms() const {
  return (forward ? forward->median_ms : 0) + (backward ? backward->median_ms : 0);
}

std::optional<double> Measurement::gflops() const {
  if (!forward_flops && !backward_flops) return std::nullopt;
  return (forward_flops.value_or(0) + backward_flops.value_or(0)) / (1e6 * total_ms());
}

double Measurement::gigabytes_per_second() const { return least_bytes / (1e6 * total_ms()); }

std::optional<double> crossover(const std::vector<std::pair<double, double>>& speeds) {
  std::size_t first = speeds.size();  // start of the wins at the end
  while (first > 0 && speeds[first - 1].second > 1) --first;
  if (first == speeds.size()) return std::nullopt;
  if (first == 0) return speeds[0].first;
  const auto& [low, slow] = speeds[first - 1];
  const auto& [high, fast] = speeds[first];
  const double part = -std::log(slow) / (std::log(fast) - std::log(slow));
  return low * std::pow(high / low, part);
}

}  // namespace coterie::bench
