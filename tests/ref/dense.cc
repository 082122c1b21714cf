// SPDX-License-Identifier: MIT
#include "tests/ref/dense.h"

#include <algorithm>
#include <bit>
#include <functional>
#include <limits>
#include <map>
#include <set>
#include <tuple>

#include "core/half.h"
#include "coterie/random.h"

namespace coterie::dense {
namespace {

using Set = std::set<Index>;
using Counts = std::vector<std::vector<int>>;  // how often a query sees a key

Counts nothing(const Head& head) {
  return Counts(head.q.size(), std::vector<int>(head.k.size(), 0));
}

Matrix zeros(Index rows, Index columns) { return {static_cast<std::size_t>(rows), Row(columns)}; }

Number dot(const Row& a, const Row& b) {
  Number sum;
  for (std::size_t d = 0; d < a.size(); ++d) sum += a[d] * b[d];
  return sum;
}

// factor a b^T
Matrix products(Number factor, const Matrix& a, const Matrix& b) {
  Matrix result(a.size());
  for (std::size_t i = 0; i < a.size(); ++i)
    for (const Row& row : b) result[i].push_back(factor * dot(a[i], row));
  return result;
}

// log sum_j n_j exp(s_j)
Number lse(const Row& s, const std::vector<int>& n) {
  double top = -std::numeric_limits<double>::infinity();
  for (std::size_t j = 0; j < s.size(); ++j)
    if (n[j] > 0) top = std::max(top, s[j].value);
  if (std::isinf(top)) return top;
  Number sum;
  for (std::size_t j = 0; j < s.size(); ++j)
    if (n[j] > 0) sum += n[j] * exp(s[j] - top);
  return top + log(sum);
}

// n_j exp(s_j - lse); a row without keys is 0.
Row softmax(const Row& s, const std::vector<int>& n) {
  const Number total = lse(s, n);
  Row p(s.size());
  for (std::size_t j = 0; j < s.size(); ++j)
    if (n[j] > 0) p[j] = n[j] * exp(s[j] - total);
  return p;
}

Matrix softmax(const Matrix& s, const Counts& n) {
  Matrix p;
  for (std::size_t i = 0; i < s.size(); ++i) p.push_back(softmax(s[i], n[i]));
  return p;
}

double tau(const Head& head, bool routing = false) {
  if (head.scale != 0.0) return head.scale;
  return routing ? 1.0
                 : 1.0 / std::sqrt(static_cast<double>(head.q.empty() ? 1 : head.q[0].size()));
}

// Position of query i among the keys; if causal, the last query is at the last key.
Index position(const Head& head, Index i) {
  return head.causal ? i + head.keys() - head.queries() : i;
}

// The `count` candidates of largest score; ties go to the lower index.
Set best(const Row& scores, const Set& candidates, Index count) {
  std::vector<Index> sorted(candidates.begin(), candidates.end());
  std::stable_sort(sorted.begin(), sorted.end(),
                   [&](Index a, Index b) { return scores[a].value > scores[b].value; });
  sorted.resize(std::min(sorted.size(), static_cast<std::size_t>(count)));
  return {sorted.begin(), sorted.end()};
}

Set all_below(Index count) {
  Set all;
  for (Index i = 0; i < count; ++i) all.insert(i);
  return all;
}

Set best(const Row& scores, Index count) {
  return best(scores, all_below(static_cast<Index>(scores.size())), count);
}

Row column(const Matrix& matrix, Index c) {
  Row result;
  for (const Row& row : matrix) result.push_back(row[c]);
  return result;
}

// Full, local, strided, oracle-top: softmax over admissible keys. `pattern` takes the positions of
// a query and a key.
Counts admissible(const Head& head, const std::function<bool(Index, Index)>& pattern) {
  Counts n = nothing(head);
  for (Index i = 0; i < head.queries(); ++i)
    for (Index j = 0; j < head.keys(); ++j) {
      const Index p = position(head, i);
      n[i][j] = pattern(p, j) && (!head.causal || j <= p) && (head.mask.empty() || head.mask[i][j]);
    }
  return n;
}

Matrix logits(const Head& head) { return products(tau(head), head.q, head.k); }

Matrix weights_of(const FullParams&, const std::vector<Head>& heads, std::size_t h) {
  return softmax(logits(heads[h]), admissible(heads[h], [](Index, Index) { return true; }));
}

Matrix weights_of(const LocalParams& params, const std::vector<Head>& heads, std::size_t h) {
  const Index w = params.window;
  const bool causal = heads[h].causal;
  const auto floor_half = [](Index x) { return x / 2; };
  const auto ceil_half = [](Index x) { return (x + 1) / 2; };
  const auto sliding = [&](Index i, Index j) {
    return causal ? i - w + 1 <= j && j <= i : i - floor_half(w) <= j && j <= i + ceil_half(w) - 1;
  };
  const auto blocked = [&](Index i, Index j) {
    if (i < 0) return false;  // before the first key
    const Index own = i / w, other = j / w;
    return own - params.flange <= other && other <= own + (causal ? 0 : params.flange);
  };
  if (params.kind == LocalKind::blocked)
    return softmax(logits(heads[h]), admissible(heads[h], blocked));
  return softmax(logits(heads[h]), admissible(heads[h], sliding));
}

Matrix weights_of(const StridedParams& params, const std::vector<Head>& heads, std::size_t h) {
  return softmax(logits(heads[h]), admissible(heads[h], [&](Index i, Index j) {
                   return std::abs(i - j) % params.stride == 0;
                 }));
}

Matrix weights_of(const OracleTopParams& params, const std::vector<Head>& heads, std::size_t h) {
  const Head& head = heads[h];
  const Matrix s = logits(head);
  Counts n = admissible(head, [](Index, Index) { return true; });
  for (Index i = 0; i < head.queries(); ++i) {
    Set keys;
    for (Index j = 0; j < head.keys(); ++j)
      if (n[i][j] > 0) keys.insert(j);
    const Set top = best(s[i], keys, params.topk);
    for (Index j = 0; j < head.keys(); ++j) n[i][j] = static_cast<int>(top.count(j));
  }
  return softmax(s, n);
}

// Clusterings of the queries.

double difference_in_metric(const Row& q, const Row& mean, const Matrix& covariance) {
  double distance = 0.0;
  for (std::size_t a = 0; a < q.size(); ++a)
    for (std::size_t b = 0; b < q.size(); ++b)
      distance +=
          (q[a].value - mean[a].value) * covariance[a][b].value * (q[b].value - mean[b].value);
  return distance;
}

Row mean_of(const Matrix& rows, const Set& members) {
  Row mean(rows[0].size());
  for (Index i : members)
    for (std::size_t d = 0; d < mean.size(); ++d)
      mean[d] += rows[i][d] / static_cast<double>(members.size());
  return mean;
}

std::vector<Index> initial_queries(const Head& head, Index clusters) {
  const RandomStream stream{head.seed, RandomUse::initial_centroid, head.problem};
  std::vector<Index> chosen;
  for (Index c = 0; c < clusters; ++c)
    chosen.push_back(random_permutation(stream, static_cast<std::uint32_t>(c),
                                        static_cast<std::uint32_t>(head.queries())));
  return chosen;
}

std::vector<Set> members_of(const std::vector<Index>& labels, Index clusters) {
  std::vector<Set> members(static_cast<std::size_t>(clusters));
  for (std::size_t i = 0; i < labels.size(); ++i) members[labels[i]].insert(static_cast<Index>(i));
  return members;
}

// The nearest centroid of every query; the first one if tied.
template <class Centroid, class Distance>
std::vector<Index> nearest(Index queries, const std::vector<Centroid>& centroids,
                           const Distance& distance) {
  std::vector<Index> labels;
  for (Index i = 0; i < queries; ++i) {
    std::vector<double> all;
    for (const Centroid& centroid : centroids) all.push_back(distance(i, centroid));
    labels.push_back(std::min_element(all.begin(), all.end()) - all.begin());
  }
  return labels;
}

// Lloyd's algorithm in the metric of the covariance of min(keys, 8 D) evenly spaced keys.
std::vector<Index> metric_labels(const ClusteringParams& params, const Head& head) {
  const Index dim = static_cast<Index>(head.q[0].size());
  const Index samples = std::min(head.keys(), 8 * dim);
  Matrix sample, covariance = zeros(dim, dim);
  for (Index t = 0; t < samples; ++t) sample.push_back(head.k[t * head.keys() / samples]);
  if (samples > 0) {
    const Row mean = mean_of(sample, all_below(samples));
    for (const Row& key : sample)
      for (Index a = 0; a < dim; ++a)
        for (Index b = 0; b < dim; ++b)
          covariance[a][b] +=
              (key[a] - mean[a]) * (key[b] - mean[b]) / static_cast<double>(samples);
  }
  Matrix centroids;
  for (Index i : initial_queries(head, params.clusters)) centroids.push_back(head.q[i]);
  const auto assign = [&] {
    return nearest(head.queries(), centroids, [&](Index i, const Row& mean) {
      return difference_in_metric(head.q[i], mean, covariance);
    });
  };
  for (Index iteration = 0; iteration < params.iterations; ++iteration) {
    const std::vector<Set> members = members_of(assign(), params.clusters);
    for (Index c = 0; c < params.clusters; ++c)
      if (!members[c].empty()) centroids[c] = mean_of(head.q, members[c]);
  }
  return assign();
}

// Planes and thresholds of the two Hamming forms.
std::vector<std::uint64_t> codes_of(const ClusteringParams& params, const Head& head) {
  const Index dim = static_cast<Index>(head.q[0].size());
  const auto keys = static_cast<std::uint32_t>(head.keys());
  const RandomStream normal{head.seed, RandomUse::hash_plane, 0};
  const RandomStream threshold{head.seed, RandomUse::hash_threshold, 0};
  const RandomStream pair{head.seed, RandomUse::key_pair, head.kv_problem};
  std::vector<std::uint64_t> codes(head.q.size(), 0);
  for (Index r = 0; r < params.bits; ++r) {
    Row plane(static_cast<std::size_t>(dim));
    Number level;
    if (params.method == Clustering::hamming) {
      for (Index d = 0; d < dim; ++d)
        plane[d] = to_float(to_bf16(static_cast<float>(random_normal(normal, r * dim + d))));
      if (params.hash_bias) level = static_cast<float>(random_normal(threshold, r));
    } else {
      for (Index m = 16 * r; keys > 0 && m < 16 * r + 16; ++m) {
        const Index a = random_below(pair, 2 * m, keys), b = random_below(pair, 2 * m + 1, keys);
        for (Index d = 0; d < dim; ++d) plane[d] += head.k[a][d] - head.k[b][d];
      }
      level = dot(plane, mean_of(head.q, all_below(head.queries())));
    }
    for (std::size_t i = 0; i < codes.size(); ++i)
      if (dot(plane, head.q[i]).value > level.value) codes[i] |= std::uint64_t{1} << r;
  }
  return codes;
}

std::vector<Index> hamming_labels(const ClusteringParams& params, const Head& head) {
  const std::vector<std::uint64_t> codes = codes_of(params, head);
  const RandomStream anew{head.seed, RandomUse::empty_cluster, head.problem};
  std::vector<std::uint64_t> centroids;
  for (Index i : initial_queries(head, params.clusters)) centroids.push_back(codes[i]);
  const auto assign = [&] {
    return nearest(head.queries(), centroids, [&](Index i, std::uint64_t centroid) {
      return static_cast<double>(std::popcount(codes[i] ^ centroid));
    });
  };
  for (Index iteration = 0; iteration < params.iterations; ++iteration) {
    const std::vector<Set> members = members_of(assign(), params.clusters);
    for (Index c = 0; c < params.clusters; ++c) {
      centroids[c] = 0;
      for (Index r = 0; r < params.bits; ++r) {
        std::size_t ones = 0;
        for (Index i : members[c]) ones += codes[i] >> r & 1;
        centroids[c] |= static_cast<std::uint64_t>(2 * ones > members[c].size()) << r;
      }
      if (members[c].empty())
        centroids[c] = random_u64(anew, iteration * params.clusters + c) &
                       ((std::uint64_t{1} << params.bits) - 1);
    }
  }
  return assign();
}

std::vector<Index> labels_of(const ClusteringParams& params, const Head& head) {
  const Set all = all_below(head.queries());
  if (params.clusters >= head.queries()) return {all.begin(), all.end()};
  return params.method == Clustering::keys ? metric_labels(params, head)
                                           : hamming_labels(params, head);
}

// One softmax over all keys: with the query's logits on near keys and in `top`, with Z elsewhere.
Row near_row(Index near, Index i, const Set& top, const Row& s, const Row& z) {
  Row mixed = z;
  for (std::size_t j = 0; j < z.size(); ++j) {
    const Index distance = static_cast<Index>(j) / near - i / near;
    if ((distance >= -1 && distance <= 1) || top.contains(static_cast<Index>(j))) mixed[j] = s[j];
  }
  return softmax(mixed, std::vector<int>(z.size(), 1));
}

// Z = scale M K^T with M the mean queries, and its softmax A, each with one row per query.
struct ClusterRows {
  Matrix z, a;
};

ClusterRows cluster_rows(const ClusteringParams& params, const Head& head) {
  const std::vector<Index> labels = labels_of(params, head);
  const std::vector<Set> members = members_of(labels, params.clusters);
  Matrix means;
  for (Index label : labels) means.push_back(mean_of(head.q, members[label]));
  const Matrix z = products(tau(head), means, head.k);
  return {z, softmax(z, Counts(head.q.size(), std::vector<int>(head.k.size(), 1)))};
}

Matrix weights_of(const ClusteredParams& params, const std::vector<Head>& heads, std::size_t h) {
  const Head& head = heads[h];
  const ClusterRows rows = cluster_rows(params.clustering, head);
  if (params.near == 0) return rows.a;
  const Matrix s = logits(head);
  Matrix w;
  for (Index i = 0; i < head.queries(); ++i)
    w.push_back(near_row(params.near, i, {}, s[i], rows.z[i]));
  return w;
}

Matrix weights_of(const ImprovedClusteredParams& params, const std::vector<Head>& heads,
                  std::size_t h) {
  const Head& head = heads[h];
  const ClusterRows rows = cluster_rows(params.clustering, head);
  const Matrix s = logits(head);
  Matrix w = rows.a;
  for (Index i = 0; i < head.queries(); ++i) {
    const Set top = best(rows.z[i], params.topk);
    if (params.near > 0) {
      w[i] = near_row(params.near, i, top, s[i], rows.z[i]);
      continue;
    }
    std::vector<int> n(head.k.size(), 0);
    Number mass;
    for (Index j : top) {
      n[j] = !head.causal || j <= position(head, i);
      mass += rows.a[i][j];
    }
    const Row p = softmax(s[i], n);
    if (!params.mass_grad) mass.slope = 0.0;
    for (Index j = 0; head.causal && j < head.keys(); ++j) w[i][j] = p[j];
    for (Index j : top)
      if (!head.causal) w[i][j] = mass * p[j];
  }
  return w;
}

// LSH. The order of a round: bucket = argmax [x R ; -x R], tokens by bucket and position.
std::vector<Index> slots_of(const LshParams& params, const Head& head, Index round) {
  const Index half = params.buckets / 2;
  const RandomStream stream{head.seed, RandomUse::lsh_rotation, static_cast<std::uint32_t>(round)};
  std::vector<std::pair<Index, Index>> sorted;
  for (Index i = 0; i < head.queries(); ++i) {
    Row scores(static_cast<std::size_t>(params.buckets));
    for (Index b = 0; b < half; ++b) {
      for (std::size_t d = 0; d < head.q[i].size(); ++d)
        scores[b] += head.q[i][d] * random_normal(stream, d * half + b);
      scores[half + b] = 0.0 - scores[b];
    }
    sorted.push_back({*best(scores, 1).begin(), i});
  }
  std::sort(sorted.begin(), sorted.end());
  std::vector<Index> slots(sorted.size());
  for (std::size_t slot = 0; slot < sorted.size(); ++slot)
    slots[sorted[slot].second] = static_cast<Index>(slot);
  return slots;
}

// Chunk t sees t and t - 1; with `wraps`, chunk 0 sees the last one.
Counts seen_in_round(const LshParams& params, const Head& head, Index round, bool wraps) {
  const std::vector<Index> slots = slots_of(params, head, round);
  const Index last = (head.queries() - 1) / params.chunk;
  Counts n = nothing(head);
  for (Index i = 0; i < head.queries(); ++i)
    for (Index j = 0; j < head.queries(); ++j) {
      const Index own = slots[i] / params.chunk, other = slots[j] / params.chunk;
      const bool near = other == own || other == own - 1 || (wraps && own == 0 && other == last);
      n[i][j] = near && (!head.causal || j <= i);
    }
  return n;
}

// Rounds are merged by their log-sum-exps. As published, a query's own key has a logit far below
// all others in every round, so it has weight only if no round has another key. The published logit
// is -5e4; e^-1024 is 0 as well and leaves the log-sum-exp three more digits.
Matrix weights_of(const LshParams& params, const std::vector<Head>& heads, std::size_t h) {
  const Head& head = heads[h];
  const bool merges = params.combine == LshCombine::lse;
  Matrix unit = head.q;
  for (Row& row : unit) {
    const Number square = dot(row, row);
    for (Number& x : row) x = square.value == 0.0 ? Number() : x / sqrt(square);
  }
  Matrix s = products(tau(head), head.q, unit), w = zeros(head.queries(), head.queries());
  for (Index i = 0; merges && i < head.queries(); ++i) s[i][i] = -1024.0;
  std::vector<Counts> rounds;
  for (Index r = 0; r < params.rounds; ++r)
    rounds.push_back(seen_in_round(params, head, r, merges));
  for (Index i = 0; i < head.queries(); ++i) {
    Row round_lse;
    for (const Counts& n : rounds) round_lse.push_back(lse(s[i], n[i]));
    const Number total = lse(round_lse, std::vector<int>(rounds.size(), 1));
    for (std::size_t r = 0; r < rounds.size(); ++r) {
      const Number share =
          merges ? exp(round_lse[r] - total) : Number(1.0 / static_cast<double>(rounds.size()));
      const Row p = softmax(s[i], rounds[r][i]);
      for (Index j = 0; j < head.queries(); ++j) w[i][j] += share * p[j];
    }
  }
  return w;
}

// Routing.

Matrix normalised(const Matrix& x) {
  Matrix y;
  for (const Row& row : x) {
    Number mean, variance;
    for (Number e : row) mean += e / static_cast<double>(row.size());
    for (Number e : row) variance += (e - mean) * (e - mean) / static_cast<double>(row.size());
    y.emplace_back();
    for (Number e : row) y.back().push_back((e - mean) / sqrt(variance + 1e-6));
  }
  return y;
}

// Pairs by score, then lower token, then lower cluster; each is taken while both are free.
std::vector<Set> partition(const Matrix& scores, Index clusters, Index capacity) {
  std::vector<std::tuple<double, Index, Index>> pairs;
  for (std::size_t i = 0; i < scores.size(); ++i)
    for (Index c = 0; c < clusters; ++c)
      pairs.push_back({-scores[i][c].value, static_cast<Index>(i), c});
  std::sort(pairs.begin(), pairs.end());
  std::vector<Set> members(static_cast<std::size_t>(clusters));
  Set placed;
  for (const auto& [score, token, cluster] : pairs)
    if (static_cast<Index>(members[cluster].size()) < capacity && placed.insert(token).second)
      members[cluster].insert(token);
  return members;
}

// Tokens of every cluster.
std::vector<Set> routing_members(const RoutingParams& params, const Matrix& scores) {
  const Index clusters = params.clusters;
  if (params.membership == Membership::balanced)
    return partition(scores, clusters,
                     (static_cast<Index>(scores.size()) + clusters - 1) / clusters);
  std::vector<Set> members;
  for (Index c = 0; c < clusters; ++c) members.push_back(best(column(scores, c), params.window));
  return members;
}

// Drops the own key if there is another.
void demote(const RoutingParams& params, Index self, std::vector<int>& n) {
  int met = 0;
  for (int count : n) met += count;
  if (params.self == SelfAttention::demote && 0 <= self && self < static_cast<Index>(n.size()) &&
      met > n[self])
    n[self] = 0;
}

Matrix strict_weights(const RoutingParams& params, const Head& head, const Matrix& s,
                      const Matrix& q_scores, const Matrix& k_scores) {
  Counts n = nothing(head);
  for (Index i = 0; i < head.queries(); ++i) {
    const Index self = position(head, i);
    const Set clusters = best(q_scores[i], std::min(params.queries_in, params.clusters));
    std::map<Index, Index> met;  // keys of each cluster
    for (Index j = self; j >= 0; --j) {
      const Index cluster = *best(k_scores[j], 1).begin();
      n[i][j] = clusters.count(cluster) == 1 && met[cluster]++ < params.window;
    }
    if (params.include_self && clusters.count(*best(k_scores[self], 1).begin()) == 0)
      n[i][self] = 1;
    demote(params, self, n[i]);
  }
  return softmax(s, n);
}

Matrix weights_of(const RoutingParams& params, const std::vector<Head>& heads, std::size_t h) {
  const Head& head = heads[h];
  const Matrix q = normalised(head.q), k = normalised(head.k);
  const Matrix s = products(tau(head, true) * head.logit_scale, q, k);
  const Matrix q_scores = products(1.0, q, head.centroids),
               k_scores = products(1.0, k, head.centroids);
  if (params.membership == Membership::nearest)
    return strict_weights(params, head, s, q_scores, k_scores);
  const std::vector<Set> q_members = routing_members(params, q_scores);
  const std::vector<Set> k_members = routing_members(params, k_scores);
  Matrix w = zeros(head.queries(), head.keys());
  for (Index i = 0; i < head.queries(); ++i) {
    double count = 0.0;
    for (const Set& members : q_members) count += static_cast<double>(members.count(i));
    const double divisor = params.membership == Membership::top ? count + params.count_eps : 1.0;
    for (std::size_t c = 0; c < q_members.size(); ++c) {
      if (q_members[c].count(i) == 0) continue;
      std::vector<int> n(head.k.size(), 0);
      for (Index j : k_members[c]) n[j] = !head.causal || j <= position(head, i);
      demote(params, position(head, i), n);
      const Row p = softmax(s[i], n);
      for (Index j = 0; j < head.keys(); ++j) w[i][j] += p[j] / divisor;
    }
  }
  return w;
}

// CAST.

Number laplace(Number x) {
  const double mu = std::sqrt(0.5), sigma = std::sqrt(1.0 / (4.0 * M_PI));
  return 0.5 * (1.0 + erf((x - mu) / (sigma * std::sqrt(2.0))));
}

// f over the entries in `set`, 0 elsewhere.
Row activated(const CastParams& params, const Row& x, const Set& set) {
  std::vector<int> n(x.size(), 0);
  for (Index e : set) n[e] = 1;
  if (params.activation == CastActivation::softmax) return softmax(x, n);
  Row f(x.size());
  for (Index e : set) f[e] = laplace(x[e]);
  return f;
}

Number sigmoid(Number x) { return 1.0 / (1.0 + exp(0.0 - x)); }

Number psi(const CastParams& params, Number x) {
  return params.gate_scale ? 1.0 + log(1.0 + exp(x)) : Number(1.0);
}

// A_g, from affinities summed over `heads`.
Matrix gated_affinities(const CastParams& params, const std::vector<Head>& heads) {
  const Index tokens = heads[0].queries();
  const Set all = all_below(params.clusters);
  Matrix scores = zeros(tokens, params.clusters);
  for (Index i = 0; i < tokens; ++i) {
    Row aq(static_cast<std::size_t>(params.clusters)), ak = aq;
    for (const Head& head : heads)
      for (Index c = 0; c < params.clusters; ++c) {
        aq[c] += dot(head.q[i], head.centroids[c]);
        ak[c] += dot(head.k[i], head.centroids[c]);
      }
    const Number open = sigmoid(heads[0].gate[i]);
    const Row from_q = activated(params, aq, all), from_k = activated(params, ak, all);
    for (Index c = 0; c < params.clusters; ++c)
      scores[i][c] = open * from_q[c] + (1.0 - open) * from_k[c];
  }
  return scores;
}

std::vector<Set> cast_members(const CastParams& params, const std::vector<Head>& heads,
                              std::size_t h) {
  const Matrix scores =
      gated_affinities(params, params.share_heads ? heads : std::vector<Head>{heads[h]});
  const Index tokens = static_cast<Index>(scores.size()), clusters = params.clusters;
  if (params.mode == CastMode::single)
    return partition(scores, clusters, std::max(params.size, (tokens + clusters - 1) / clusters));
  std::vector<Set> members;
  for (Index c = 0; c < clusters; ++c) members.push_back(best(column(scores, c), params.size));
  return members;
}

Matrix weights_of(const CastParams& params, const std::vector<Head>& heads, std::size_t h) {
  const Head& head = heads[h];
  const std::vector<Set> members = cast_members(params, heads, h);
  Set live;
  Matrix summaries;  // beta, over all tokens
  for (Index c = 0; c < params.clusters; ++c) {
    if (!members[c].empty()) live.insert(c);
    Row x(head.k.size());
    for (Index j : members[c])
      x[j] = tau(head) * dot(head.k[j], head.centroids[c]) * psi(params, 0.0 - head.gate[j]);
    summaries.push_back(activated(params, x, members[c]));
  }
  const Matrix s = logits(head);
  Matrix w = zeros(head.queries(), head.keys());
  for (Index i = 0; i < head.queries(); ++i) {
    Row x;
    for (const Row& surrogate : head.centroids)
      x.push_back(tau(head) * dot(head.q[i], surrogate) * psi(params, head.gate[i]));
    const Row mix = activated(params, x, live);
    for (Index c : live) {
      const Row from =
          members[c].count(i) == 1 ? activated(params, s[i], members[c]) : summaries[c];
      for (Index j = 0; j < head.keys(); ++j) w[i][j] += mix[c] * from[j];
    }
  }
  return w;
}

}  // namespace

Matrix weights(const Mechanism& mechanism, const std::vector<Head>& heads, std::size_t h) {
  if (heads[h].q.empty()) return {};
  return std::visit([&](const auto& params) { return weights_of(params, heads, h); }, mechanism);
}

}  // namespace coterie::dense
