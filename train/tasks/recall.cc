// SPDX-License-Identifier: MIT
// Associative recall: pair tokens (a key and its value) and query tokens (a key) are scattered
// among filler. The target at a query is the value of its key. In the causal task every query comes
// after its pair. Scores are grouped by the distance between the two.
//
// Ids: 0 filler, then pairs by key and value, then queries by key. Targets are values, from 0 on.
#include <fmt/core.h>

#include <algorithm>
#include <bit>

#include "coterie/error.h"
#include "train/tasks/row_task.h"
#include "train/tasks/tasks.h"

namespace coterie::train {
namespace {

constexpr std::int64_t kMaxIds = 1'000'000;

void check_at_least(std::int64_t got, std::int64_t least, const char* what) {
  if (got < least) {
    throw Error(fmt::format("[recall] expected {} {} or more; got {}", least, what, got));
  }
}

class RecallTask final : public RowTask {
 public:
  explicit RecallTask(const Config& config)
      : RowTask(config.seed, config.length), config_(config.recall) {
    check_at_least(config_.keys, 1, "keys");
    check_at_least(config_.values, 2, "values");
    check_at_least(config_.pairs, 1, "pairs");
    check_at_least(config_.queries, 1, "queries");
    if (config_.keys > kMaxIds / config_.values) {
      throw Error(fmt::format(
          "[recall] expected keys times values of at most {}; got {} keys and {} values", kMaxIds,
          config_.keys, config_.values));
    }
    if (config_.pairs > config_.keys) {
      throw Error(fmt::format("[recall] expected at least {} keys, one per pair; got {}",
                              config_.pairs, config_.keys));
    }
    if (config_.pairs > length() || config_.queries > length() - config_.pairs) {
      throw Error(
          fmt::format("[recall] expected a length of at least {} pairs + {} queries; got {}",
                      config_.pairs, config_.queries, length()));
    }
  }

  std::string name() const override { return "recall"; }
  std::int64_t vocabulary() const override { return query(config_.keys); }
  bool causal() const override { return config_.causal; }
  bool needs_positions() const override { return false; }
  double embedding_std() const override { return 0.05; }
  Metric metric() const override { return Metric::accuracy; }
  std::vector<Baseline> baselines() const override {
    return {{"a guess", 1.0 / static_cast<double>(config_.values)}};
  }
  // Distances 1, 2-3, 4-7, ... up to the length.
  std::vector<std::string> strata() const override {
    std::vector<std::string> names = {"distance 1"};
    for (std::int64_t low = 2; low < length(); low *= 2) {
      names.push_back(fmt::format("distance {}-{}", low, 2 * low - 1));
    }
    return names;
  }

 protected:
  void fill(Row& row) const override {
    std::vector<std::size_t> places = random_places(row);
    const auto queries = places.begin() + config_.pairs;
    if (config_.causal) {  // the first place is a pair, not a query
      std::iter_swap(places.begin(), std::min_element(places.begin(), places.end()));
    }
    std::sort(places.begin(), queries);

    std::vector<Pair> pairs;
    for (std::int64_t i = 0; i < config_.pairs; ++i) {
      const std::int64_t key = random_permutation(random(row, kKeys), static_cast<std::uint32_t>(i),
                                                  static_cast<std::uint32_t>(config_.keys));
      const std::int64_t value = below(random(row, kValues), i, config_.values);
      pairs.push_back({key, value});
      row.tokens[places[static_cast<std::size_t>(i)]] = pair(key, value);
    }
    for (auto place = queries; place != places.end(); ++place) {
      const auto end = config_.causal ? std::lower_bound(places.begin(), queries, *place) : queries;
      const auto chosen = static_cast<std::size_t>(
          below(random(row, kChoices), place - queries, end - places.begin()));
      row.tokens[*place] = query(pairs[chosen].key);
      row.targets[*place] = pairs[chosen].value;
      row.strata[*place] = stratum(*place, places[chosen]);
    }
  }

 private:
  enum Purpose : std::uint32_t { kPlaces, kKeys, kValues, kChoices };
  struct Pair {
    std::int64_t key, value;
  };

  std::int64_t pair(std::int64_t key, std::int64_t value) const {
    return 1 + key * config_.values + value;
  }
  std::int64_t query(std::int64_t key) const { return pair(config_.keys, 0) + key; }

  static std::int64_t stratum(std::size_t a, std::size_t b) {
    return std::bit_width(a > b ? a - b : b - a) - 1;
  }

  static std::int64_t below(const RandomStream& stream, std::int64_t i, std::int64_t bound) {
    return random_below(stream, static_cast<std::uint64_t>(i), static_cast<std::uint32_t>(bound));
  }

  // Distinct places, first of the pairs, then of the queries.
  std::vector<std::size_t> random_places(const Row& row) const {
    std::vector<std::size_t> places;
    for (std::int64_t i = 0; i < config_.pairs + config_.queries; ++i) {
      places.push_back(random_permutation(random(row, kPlaces), static_cast<std::uint32_t>(i),
                                          static_cast<std::uint32_t>(length())));
    }
    return places;
  }

  RecallConfig config_;
};

}  // namespace

std::unique_ptr<Task> make_recall_task(const Config& config, const TaskFiles* /*stored*/) {
  return std::make_unique<RecallTask>(config);
}

}  // namespace coterie::train
