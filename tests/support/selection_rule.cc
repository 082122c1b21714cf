// SPDX-License-Identifier: MIT
#include "tests/support/selection_rule.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <sstream>
#include <variant>

#include "coterie/random.h"
#include "ref/views.h"

namespace coterie::test {
namespace {

using ref::Index;
using ref::Lists;
using ref::Place;
using Rows = std::vector<double>;  // row-major

constexpr double kNothing = -std::numeric_limits<double>::infinity();
constexpr double kUnit = 0x1p-24;
constexpr Index kPlaces = 6, kSamples = 24;  // items and heads of a problem, samples of each
constexpr double kScoreWork = 3e7;           // limit on products for scores of clusters

struct Wrong {
  std::string text;
};
template <class... Parts>
[[noreturn]] void wrong(const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  throw Wrong{text.str()};
}

double rank_value(double score) { return std::isnan(score) ? kNothing : score; }

double dot(const double* a, const double* b, Index dim) {
  double sum = 0.0;
  for (Index d = 0; d < dim; ++d) sum += a[d] * b[d];
  return sum;
}

// The largest norm of all finite rows.
double largest_norm(const Rows& rows, Index dim) {
  double most = 0.0;
  for (std::size_t first = 0; first < rows.size(); first += static_cast<std::size_t>(dim)) {
    const double norm = std::sqrt(dot(&rows[first], &rows[first], dim));
    if (std::isfinite(norm)) most = std::max(most, norm);
  }
  return most;
}

// Normalises rows to zero mean and unit variance; returns the largest ratio of norm to deviation.
double normalise(Rows& rows, Index dim) {
  double most = 0.0;
  for (std::size_t first = 0; first < rows.size(); first += static_cast<std::size_t>(dim)) {
    double* row = &rows[first];
    double mean = 0.0, square = 0.0;
    const double norm = std::sqrt(dot(row, row, dim));
    for (Index d = 0; d < dim; ++d) mean += row[d] / static_cast<double>(dim);
    for (Index d = 0; d < dim; ++d) square += std::pow(row[d] - mean, 2);
    const double sigma = std::sqrt(square / static_cast<double>(dim) + 1e-6);
    for (Index d = 0; d < dim; ++d) row[d] = (row[d] - mean) / sigma;
    if (std::isfinite(norm / sigma)) most = std::max(most, norm / sigma);
  }
  return most;
}

// A list of the best tokens: ascending, in [0, tokens), `count` of them; with `fewer` it may be
// shorter, because scores are not finite.
void expect_list(const char* what, const std::vector<Index>& list, Index tokens, Index count,
                 bool fewer = false) {
  const auto size = static_cast<Index>(list.size());
  if (fewer ? size > count : size != count)
    wrong(what, ": ", list.size(), " entries; expected ", count);
  for (std::size_t t = 0; t < list.size(); ++t)
    if (list[t] < 0 || list[t] >= tokens || (t > 0 && list[t] <= list[t - 1]))
      wrong(what, ": entry ", t, " is ", list[t], " of ", tokens);
}

// No score outside the list exceeds one inside by more than rounding. `infinite`: whether infinite
// scores outside the list count.
void expect_best(const char* what, const std::vector<Index>& list,
                 const std::vector<double>& scores, const std::vector<Index>& candidates,
                 double margin, bool infinite = true) {
  double worst = std::numeric_limits<double>::infinity(), best = kNothing;
  std::vector<bool> taken(scores.size());
  for (Index t : list) {
    taken[static_cast<std::size_t>(t)] = true;
    worst = std::min(worst, rank_value(scores[static_cast<std::size_t>(t)]));
  }
  for (Index t : candidates) {
    const double score = rank_value(scores[static_cast<std::size_t>(t)]);
    if (!taken[static_cast<std::size_t>(t)] && (infinite || !std::isinf(score)))
      best = std::max(best, score);
  }
  if (best > worst + margin)
    wrong(what, ": a score of ", best, " was left out, one of ", worst, " taken; margin ", margin);
}

// order is labels sorted by cluster, ties by position; offsets are where clusters start.
void expect_groups(const char* what, const std::vector<Index>& labels,
                   const std::vector<Index>& order, const std::vector<Index>& offsets,
                   Index clusters) {
  Lists members(static_cast<std::size_t>(clusters));
  for (std::size_t i = 0; i < labels.size(); ++i) {
    if (labels[i] < 0 || labels[i] >= clusters)
      wrong(what, ": label ", labels[i], " of token ", i, ", of ", clusters, " clusters");
    members[static_cast<std::size_t>(labels[i])].push_back(static_cast<Index>(i));
  }
  Index slot = 0;
  for (std::size_t c = 0; c < members.size(); ++c) {
    if (offsets[c] != slot) wrong(what, ": offset ", offsets[c], " of cluster ", c, ", not ", slot);
    for (Index i : members[c])
      if (order[static_cast<std::size_t>(slot++)] != i)
        wrong(what, ": slot ", slot - 1, " has token ", order[static_cast<std::size_t>(slot - 1)],
              ", not ", i);
  }
  if (offsets.back() != slot) wrong(what, ": the last offset is ", offsets.back());
}

// Every token is in one cluster, clusters have at most `capacity` members, and the matching is
// stable: no token and cluster prefer each other to their current match. scores(token, cluster).
template <class Scores>
void expect_matching(const char* what, const Lists& members, Index tokens, Index capacity,
                     const Scores& scores, const std::vector<Index>& sample, double margin) {
  std::vector<Index> labels(static_cast<std::size_t>(tokens), -1);
  for (std::size_t c = 0; c < members.size(); ++c) {
    if (static_cast<Index>(members[c].size()) > capacity)
      wrong(what, ": cluster ", c, " has ", members[c].size(), " members of ", capacity);
    expect_list(what, members[c], tokens, static_cast<Index>(members[c].size()));
    for (Index t : members[c]) {
      if (labels[static_cast<std::size_t>(t)] >= 0)
        wrong(what, ": token ", t, " is in two clusters");
      labels[static_cast<std::size_t>(t)] = static_cast<Index>(c);
    }
  }
  for (Index t = 0; t < tokens; ++t)
    if (labels[static_cast<std::size_t>(t)] < 0) wrong(what, ": token ", t, " is in no cluster");
  if (sample.empty()) return;
  std::vector<double> bar(members.size(), kNothing);
  for (std::size_t c = 0; c < members.size(); ++c)
    if (static_cast<Index>(members[c].size()) == capacity) {
      bar[c] = std::numeric_limits<double>::infinity();
      for (Index t : members[c])
        bar[c] = std::min(bar[c], rank_value(scores(t, static_cast<Index>(c))));
    }
  for (Index t : sample) {
    const double own = rank_value(scores(t, labels[static_cast<std::size_t>(t)]));
    for (std::size_t c = 0; c < members.size(); ++c) {
      const double score = rank_value(scores(t, static_cast<Index>(c)));
      if (score > own + margin && score > bar[c] + margin)
        wrong(what, ": token ", t, " scores ", score, " with cluster ", c, ", whose last has ",
              bar[c], ", but is where it scores ", own);
    }
  }
}

// One item and head of a call.
class PlaceRule {
 public:
  PlaceRule(const cases::Problem& problem, const std::vector<TensorView>& selection,
            const Place& place, std::uint64_t seed)
      : in_(problem.inputs),
        selection_(selection),
        place_(place),
        dim_(in_.q.size(3)),
        tokens_(place.q.length),
        keys_(place.k.length),
        stream_{seed, RandomUse::sample, place.problem()} {}

  template <class Params>
  void check(const Params&) {}

  void check(const OracleTopParams& params) {
    if (tokens_ == 0) return;
    const Lists top_keys = ref::read_lists(place_.queries(selection_[0]));
    const Rows q = queries(), k = keys();
    const double margin = sum_margin(dim_) * largest_norm(q, dim_) * largest_norm(k, dim_);
    for (Index i = 0; i < tokens_; ++i)
      expect_list("top_keys", top_keys[static_cast<std::size_t>(i)], keys_,
                  static_cast<Index>(top_keys[static_cast<std::size_t>(i)].size()));
    for (Index i : sample(tokens_)) {
      std::vector<Index> seen;
      const Index last = in_.causal ? i + keys_ - tokens_ : keys_ - 1;
      const Rows mask = in_.mask.present()
                            ? read_values(place_.queries(in_.mask).narrowed(2, i, 1).narrowed(
                                  3, place_.k.begin, place_.k.length))
                            : Rows();
      for (Index j = 0; j <= std::min(last, keys_ - 1); ++j)
        if (mask.empty() || mask[static_cast<std::size_t>(j)] != 0.0) seen.push_back(j);
      const std::vector<Index>& list = top_keys[static_cast<std::size_t>(i)];
      expect_list("top_keys", list, keys_,
                  std::min<Index>(params.topk, static_cast<Index>(seen.size())), !finite(q, k));
      expect_best("top_keys", list, scores(&q[static_cast<std::size_t>(i * dim_)], k), seen, margin,
                  !splits());
    }
  }

  void check(const ClusteredParams& params) { check_groups(params.clustering.clusters); }

  void check(const ImprovedClusteredParams& params) {
    const std::vector<Index> labels = check_groups(params.clustering.clusters);
    const Lists top_keys = ref::read_lists(place_.item_head(selection_[3]));
    const Rows q = queries(), k = keys();
    const double norms = largest_norm(q, dim_) * largest_norm(k, dim_);
    std::vector<Index> members(static_cast<std::size_t>(params.clustering.clusters), 0);
    for (Index label : labels) ++members[static_cast<std::size_t>(label)];
    for (std::size_t c = 0; c < members.size(); ++c)
      expect_list("top_keys", top_keys[c], keys_,
                  members[c] == 0 ? 0 : std::min<Index>(params.topk, keys_), !finite(q, k));
    if (keys_ == 0 || tokens_ == 0) return;
    for (Index i : sample(tokens_)) {
      const Index c = labels[static_cast<std::size_t>(i)];
      Rows mean(static_cast<std::size_t>(dim_));
      for (std::size_t j = 0; j < labels.size(); ++j)
        for (Index d = 0; labels[j] == c && d < dim_; ++d)
          mean[static_cast<std::size_t>(d)] +=
              q[j * static_cast<std::size_t>(dim_) + static_cast<std::size_t>(d)];
      const Index count = members[static_cast<std::size_t>(c)];
      for (double& x : mean) x /= static_cast<double>(count);
      const std::vector<double> score = scores(mean.data(), k);
      const double sharp = sum_margin(dim_ + count) * norms;
      const double wide = sharp + 2.0 * rounded(dim_) * norms;
      expect_best("top_keys", top_keys[static_cast<std::size_t>(c)], score, all(keys_),
                  crowded(score, params.topk, wide) ? wide : sharp, !splits());
    }
  }

  void check(const LshParams& params) {
    for (Index round = 0; round < params.rounds; ++round) {
      const std::vector<Index> order = ref::read_indices(selection_[0]
                                                             .narrowed(0, place_.q.batch, 1)
                                                             .narrowed(1, place_.head, 1)
                                                             .narrowed(2, round, 1)
                                                             .narrowed(3, place_.q.begin, tokens_));
      std::vector<bool> seen(static_cast<std::size_t>(tokens_));
      for (Index t : order) {
        if (t < 0 || t >= tokens_ || seen[static_cast<std::size_t>(t)])
          wrong("order of round ", round, " is no permutation: ", t, " of ", tokens_);
        seen[static_cast<std::size_t>(t)] = true;
      }
      if (round > 0 || tokens_ < 2) continue;
      const Rows q = queries();
      const Index half = params.buckets / 2;
      const RandomStream planes{in_.seed, RandomUse::lsh_rotation,
                                static_cast<std::uint32_t>(round)};
      Rows rotation(static_cast<std::size_t>(dim_ * half));
      double column = 0.0;
      for (std::size_t e = 0; e < rotation.size(); ++e) rotation[e] = random_normal(planes, e);
      for (Index b = 0; b < half; ++b) {
        double square = 0.0;
        for (Index d = 0; d < dim_; ++d)
          square += std::pow(rotation[static_cast<std::size_t>(d * half + b)], 2);
        column = std::max(column, std::sqrt(square));
      }
      const auto buckets = [&](Index token) {  // all that rounding allows
        Rows found(static_cast<std::size_t>(2 * half));
        const double* row = &q[static_cast<std::size_t>(token * dim_)];
        for (Index b = 0; b < half; ++b) {
          double sum = 0.0;
          for (Index d = 0; d < dim_; ++d)
            sum += row[d] * rotation[static_cast<std::size_t>(d * half + b)];
          found[static_cast<std::size_t>(b)] = sum;
          found[static_cast<std::size_t>(half + b)] = -sum;
        }
        double best = kNothing;
        for (double x : found) best = std::max(best, rank_value(x));
        const double margin = sum_margin(dim_) * std::sqrt(dot(row, row, dim_)) * column;
        std::vector<Index> possible;
        for (std::size_t b = 0; b < found.size(); ++b)
          if (!(rank_value(found[b]) < best - margin)) possible.push_back(static_cast<Index>(b));
        return possible;
      };
      for (Index slot : sample(tokens_ - 1)) {
        const Index a = order[static_cast<std::size_t>(slot)],
                    b = order[static_cast<std::size_t>(slot + 1)];
        const Index low = buckets(a).front(), high = buckets(b).back();
        if (low > high || (low == high && a > b))
          wrong("order: token ", a, " of bucket ", low, " is before token ", b, " of bucket ",
                high);
      }
    }
  }

  void check(const RoutingParams& params) {
    if (params.membership == Membership::nearest) return check_runs(params);
    const std::size_t kt = params.shared() ? 0 : 1;
    check_members(params, "q_members", selection_[0], place_.queries(in_.q));
    if (kt == 1) check_members(params, "k_members", selection_[1], place_.keys(in_.k));
  }

  // Heads that share their clusters are checked together, at head 0.
  void check(const CastParams& params) {
    const Index heads = params.share_heads ? in_.q.size(1) : 1;
    if (params.share_heads && place_.head != 0) return;
    const Lists members = ref::read_lists(place_.item_head(selection_[0]));
    const Index fair = (in_.q.size(2) + params.clusters - 1) / params.clusters;
    // A token's scores need all its affinities.
    const double work =
        static_cast<double>(tokens_ * params.clusters * heads) * static_cast<double>(dim_);
    double reach = 0.0;
    std::vector<double> all_scores;
    if (work <= kScoreWork) all_scores = cast_scores(params, heads, reach);
    const auto score = [&](Index t, Index c) {
      return all_scores[static_cast<std::size_t>(t * params.clusters + c)];
    };
    // The slope of a softmax is below that of Laplace's function.
    const double margin =
        6.0 * sum_margin(dim_ * heads) * (reach + 2.0) + 1.42 * rounded(dim_) * reach;
    if (params.mode == CastMode::single) {
      expect_matching("members", members, tokens_,
                      std::max(params.size, std::min(fair, in_.q.size(2))), score,
                      all_scores.empty() ? std::vector<Index>() : sample(tokens_), margin);
      return;
    }
    for (const std::vector<Index>& list : members)
      expect_list("members", list, tokens_, std::min(params.size, tokens_));
    if (all_scores.empty()) return;
    for (Index c : sample(params.clusters)) {
      std::vector<double> column;
      for (Index t = 0; t < tokens_; ++t) column.push_back(score(t, c));
      expect_best("members", members[static_cast<std::size_t>(c)], column, all(tokens_), margin);
    }
  }

 private:
  static bool finite(const Rows& q, const Rows& k) {
    const auto all_finite = [](const Rows& x) {
      return std::all_of(x.begin(), x.end(), [](double value) { return std::isfinite(value); });
    };
    return all_finite(q) && all_finite(k);
  }
  Rows queries() const { return read_values(place_.queries(in_.q)); }
  Rows keys() const { return read_values(place_.keys(in_.k.present() ? in_.k : in_.q)); }
  // f32 products are split into parts, and the lower part of an infinity is NaN.
  bool splits() const { return in_.q.dtype == DType::f32; }
  // Error in products of norm 1 when means or surrogate tokens are rounded to a 16-bit type.
  double rounded(Index dim) const {
    const double unit = in_.q.dtype == DType::bf16 ? 0x1p-9 : 0x1p-12;
    return splits() || in_.q.dtype == DType::f64
               ? 0.0
               : unit * std::min(1.0, 6.0 / std::sqrt(3.0 * static_cast<double>(dim)));
  }
  // Whether more scores are within rounding of the last selected one than are rescored.
  static bool crowded(std::vector<double> scores, Index topk, double near) {
    for (double& score : scores) score = rank_value(score);
    std::sort(scores.rbegin(), scores.rend());
    const auto last = static_cast<std::size_t>(topk) - 1;
    if (last >= scores.size()) return false;
    const auto close = std::count_if(scores.begin(), scores.end(), [&](double score) {
      return std::abs(score - scores[last]) <= near;
    });
    return close > topk / 8 + 4;
  }
  // Rounding error of two float sums of this many terms of size 1.
  static double sum_margin(Index terms) { return 2.0 * kUnit * static_cast<double>(terms + 8); }

  static std::vector<Index> all(Index count) {
    std::vector<Index> numbers;
    for (Index i = 0; i < count; ++i) numbers.push_back(i);
    return numbers;
  }
  std::vector<Index> sample(Index count) {
    if (count <= kSamples) return all(std::max<Index>(count, 0));
    std::vector<Index> numbers;
    for (Index i = 0; i < kSamples; ++i)
      numbers.push_back(random_below(stream_, index_++, static_cast<std::uint32_t>(count)));
    return numbers;
  }

  std::vector<double> scores(const double* row, const Rows& x) const {
    const double sign = in_.scale < 0.0 ? -1.0 : 1.0;
    std::vector<double> result;
    for (std::size_t first = 0; first < x.size(); first += static_cast<std::size_t>(dim_))
      result.push_back(sign * dot(row, &x[first], dim_));
    return result;
  }

  std::vector<Index> check_groups(Index clusters) {
    const std::vector<Index> labels = ref::read_indices(place_.queries(selection_[0]));
    expect_groups("labels", labels, ref::read_indices(place_.queries(selection_[1])),
                  ref::read_indices(place_.item_head(selection_[2])), clusters);
    return labels;
  }

  Rows centroids() const {
    const Index heads = in_.centroids.size(0);
    return read_values(in_.centroids.narrowed(0, place_.head / (place_.num_heads / heads), 1));
  }

  void check_members(const RoutingParams& params, const char* what, const TensorView& saved,
                     const TensorView& tokens) {
    const Lists members = ref::read_lists(place_.item_head(saved));
    Rows x = read_values(tokens);
    const Rows c = centroids();
    const Index count = static_cast<Index>(x.size()) / dim_;
    const double margin = sum_margin(dim_) * normalise(x, dim_) * largest_norm(c, dim_);
    const auto score = [&](Index t, Index cluster) {
      return dot(&x[static_cast<std::size_t>(t * dim_)],
                 &c[static_cast<std::size_t>(cluster * dim_)], dim_);
    };
    if (params.membership == Membership::balanced) {
      const Index capacity = (count + params.clusters - 1) / params.clusters;
      return expect_matching(what, members, count, capacity, score, sample(count), margin);
    }
    for (const std::vector<Index>& list : members)
      expect_list(what, list, count, std::min(params.window, count));
    for (Index cluster : sample(params.clusters)) {
      std::vector<double> column;
      for (Index t = 0; t < count; ++t) column.push_back(score(t, cluster));
      expect_best(what, members[static_cast<std::size_t>(cluster)], column, all(count), margin);
    }
  }

  // Labels are the clusters of best score, up to the margin.
  template <class Score>
  void expect_nearest(const char* what, const std::vector<Index>& labels, const Score& score,
                      Index clusters, double margin) {
    for (Index t : sample(static_cast<Index>(labels.size()))) {
      const Index label = labels[static_cast<std::size_t>(t)];
      if (label < 0 || label >= clusters) wrong(what, ": ", label, " of ", clusters);
      double best = kNothing;
      for (Index c = 0; c < clusters; ++c) best = std::max(best, rank_value(score(t, c)));
      if (rank_value(score(t, label)) < best - margin)
        wrong(what, ": token ", t, " is in cluster ", label, " by ", score(t, label),
              ", the best has ", best);
    }
  }

  void check_runs(const RoutingParams& params) {
    const std::size_t kt = params.shared() ? 0 : 1;
    const Index clusters = params.clusters, in = std::min(params.queries_in, clusters);
    const std::vector<Index> q_labels = ref::read_indices(place_.queries(selection_[0]));
    const std::vector<Index> k_labels = ref::read_indices(place_.keys(selection_[kt]));
    const std::vector<Index> order =
        ref::read_indices(selection_[1 + kt]
                              .narrowed(0, place_.q.batch, 1)
                              .narrowed(1, place_.head, 1)
                              .narrowed(2, place_.q.begin * in, tokens_ * in));
    const std::vector<Index> offsets = ref::read_indices(place_.item_head(selection_[2 + kt]));
    expect_groups("k_labels", k_labels, ref::read_indices(place_.keys(selection_[3 + kt])),
                  ref::read_indices(place_.item_head(selection_[4 + kt])), clusters);
    if (tokens_ == 0) return;
    Rows q = queries(), k = keys();
    const Rows c = centroids();
    const double size = sum_margin(dim_) * largest_norm(c, dim_);
    const double q_margin = size * normalise(q, dim_), k_margin = size * normalise(k, dim_);
    const auto scorer = [&](const Rows& x) {
      return [&x, &c, this](Index t, Index cluster) {
        return dot(&x[static_cast<std::size_t>(t * dim_)],
                   &c[static_cast<std::size_t>(cluster * dim_)], dim_);
      };
    };
    expect_nearest("q_labels", q_labels, scorer(q), clusters, q_margin);
    expect_nearest("k_labels", k_labels, scorer(k), clusters, k_margin);
    Lists looks(static_cast<std::size_t>(tokens_));
    if (offsets.front() != 0 || offsets.back() != tokens_ * in) wrong("q_offsets do not span");
    for (Index cluster = 0; cluster < clusters; ++cluster) {
      const Index first = offsets[static_cast<std::size_t>(cluster)],
                  last = offsets[static_cast<std::size_t>(cluster + 1)];
      if (first > last) wrong("q_offsets fall at cluster ", cluster);
      for (Index slot = first; slot < last; ++slot) {
        const Index t = order[static_cast<std::size_t>(slot)];
        if (t < 0 || t >= tokens_ ||
            (slot > first && t <= order[static_cast<std::size_t>(slot - 1)]))
          wrong("q_order: slot ", slot, " has ", t);
        looks[static_cast<std::size_t>(t)].push_back(cluster);
      }
    }
    for (const std::vector<Index>& list : looks)
      if (static_cast<Index>(list.size()) != in) wrong("q_order: a query looks into ", list.size());
    for (Index t : sample(tokens_)) {
      std::vector<double> row;
      for (Index cluster = 0; cluster < clusters; ++cluster) row.push_back(scorer(q)(t, cluster));
      expect_best("q_order", looks[static_cast<std::size_t>(t)], row, all(clusters), q_margin);
    }
  }

  // Scores (tokens, clusters) of `heads` heads together; `reach` becomes the largest affinity.
  std::vector<double> cast_scores(const CastParams& params, Index heads, double& reach) const {
    const Index clusters = params.clusters;
    std::vector<double> affinity[2];
    for (auto& a : affinity) a.assign(static_cast<std::size_t>(tokens_ * clusters), 0.0);
    for (Index h = place_.head; h < place_.head + heads; ++h) {
      const Rows c = read_values(in_.centroids.narrowed(0, h, 1));
      const Index kv = h / (in_.q.size(1) / in_.k.size(1));
      const auto rows = [&](const TensorView& x, Index head, const ref::Index begin) {
        return read_values(
            x.narrowed(0, place_.q.batch, 1).narrowed(1, head, 1).narrowed(2, begin, tokens_));
      };
      const Rows x[2] = {rows(in_.q, h, place_.q.begin), rows(in_.k, kv, place_.k.begin)};
      for (int side = 0; side < 2; ++side) {
        reach += largest_norm(x[side], dim_) * largest_norm(c, dim_);
        for (Index t = 0; t < tokens_; ++t)
          for (Index cluster = 0; cluster < clusters; ++cluster)
            affinity[side][static_cast<std::size_t>(t * clusters + cluster)] +=
                dot(&x[side][static_cast<std::size_t>(t * dim_)],
                    &c[static_cast<std::size_t>(cluster * dim_)], dim_);
      }
    }
    const Rows gate =
        read_values(in_.gate.narrowed(0, place_.q.batch, 1).narrowed(1, place_.q.begin, tokens_));
    std::vector<double> scores(affinity[0].size());
    for (Index t = 0; t < tokens_; ++t) {
      const double open = 1.0 / (1.0 + std::exp(-gate[static_cast<std::size_t>(t)]));
      for (int side = 0; side < 2; ++side) {
        double* row = &affinity[side][static_cast<std::size_t>(t * clusters)];
        activate(params.activation, row, clusters);
        for (Index c = 0; c < clusters; ++c)
          scores[static_cast<std::size_t>(t * clusters + c)] +=
              (side == 0 ? open : 1.0 - open) * row[c];
      }
    }
    return scores;
  }

  static void activate(CastActivation f, double* row, Index count) {
    if (f == CastActivation::laplace) {
      for (Index c = 0; c < count; ++c)
        row[c] =
            (1.0 + std::erf((row[c] - std::sqrt(0.5)) * std::sqrt(2.0 * 3.14159265358979323846))) /
            2.0;
      return;
    }
    double top = kNothing, sum = 0.0;
    for (Index c = 0; c < count; ++c) top = std::max(top, row[c]);
    for (Index c = 0; c < count; ++c) sum += row[c] = std::exp(row[c] - top);
    for (Index c = 0; c < count; ++c) row[c] /= sum;
  }

  const AttentionInputs& in_;
  const std::vector<TensorView>& selection_;
  const Place& place_;
  Index dim_, tokens_, keys_;
  RandomStream stream_;
  std::uint64_t index_ = 0;
};

}  // namespace

std::string check_selection(const cases::Problem& problem, const std::vector<TensorView>& selection,
                            std::uint64_t seed) {
  if (selection.empty()) return "";
  const Mechanism mechanism = resolve(problem.mechanism, problem.inputs.causal);
  const std::vector<Place> places = ref::make_places("selection", problem.inputs);
  const RandomStream stream{seed, RandomUse::sample, 1u << 31};
  const Index count = static_cast<Index>(places.size());
  for (Index p = 0; p < std::min(count, kPlaces); ++p) {
    const Index at = count <= kPlaces ? p
                                      : random_below(stream, static_cast<std::uint64_t>(p),
                                                     static_cast<std::uint32_t>(count));
    const Place& place = places[static_cast<std::size_t>(at)];
    try {
      PlaceRule rule(problem, selection, place, seed);
      std::visit([&](const auto& params) { rule.check(params); }, mechanism);
    } catch (const Wrong& reason) {
      return "item " + std::to_string(place.item) + ", head " + std::to_string(place.head) + ", " +
             reason.text;
    }
  }
  return "";
}

}  // namespace coterie::test
