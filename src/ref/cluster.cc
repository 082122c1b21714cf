// SPDX-License-Identifier: MIT
// Clusterings: k-means of hash codes in Hamming distance, Lloyd iterations in the metric of the
// keys' covariance, nearest centroids, balanced assignment.
#include <algorithm>
#include <bit>
#include <numeric>

#include "coterie/random.h"
#include "ref/ref.h"
#include "ref/selection.h"

namespace coterie::ref {

namespace {

std::vector<Index> nearest_codes(const std::vector<std::uint64_t>& codes,
                                 const std::vector<std::uint64_t>& centroids) {
  std::vector<Index> labels;
  for (std::uint64_t code : codes) {
    Index best = 0;
    for (std::size_t c = 1; c < centroids.size(); ++c)
      if (std::popcount(code ^ centroids[c]) < std::popcount(code ^ centroids[best]))
        best = static_cast<Index>(c);
    labels.push_back(best);
  }
  return labels;
}

// Each bit by majority; a tie gives 0.
std::uint64_t majority(const std::vector<std::uint64_t>& codes, const std::vector<Index>& members) {
  std::uint64_t centroid = 0;
  for (int bit = 0; bit < 64; ++bit) {
    std::size_t votes = 0;
    for (Index i : members) votes += (codes[i] >> bit) & 1;
    if (2 * votes > members.size()) centroid |= std::uint64_t{1} << bit;
  }
  return centroid;
}

// Distinct random tokens to start from.
std::vector<Index> initial_tokens(std::uint64_t seed, std::uint32_t problem, Index clusters,
                                  Index tokens) {
  const RandomStream stream{seed, RandomUse::initial_centroid, problem};
  std::vector<Index> chosen;
  for (Index c = 0; c < clusters; ++c)
    chosen.push_back(random_permutation(stream, static_cast<std::uint32_t>(c),
                                        static_cast<std::uint32_t>(tokens)));
  return chosen;
}

std::vector<Index> own_clusters(Index tokens) {
  std::vector<Index> labels(static_cast<std::size_t>(tokens));
  std::iota(labels.begin(), labels.end(), Index{0});
  return labels;
}

}  // namespace

HammingClusters hamming_clusters(const HammingProblem& params,
                                 const std::vector<std::uint64_t>& codes) {
  const Index tokens = static_cast<Index>(codes.size());
  HammingClusters result;
  if (params.clusters >= tokens) {
    result = {.labels = own_clusters(tokens), .centroids = codes};
    result.centroids.resize(static_cast<std::size_t>(params.clusters), 0);
    return result;
  }
  const std::uint64_t mask = (std::uint64_t{1} << params.bits) - 1;
  const RandomStream reseed{params.seed, RandomUse::empty_cluster, params.problem};
  for (Index token : initial_tokens(params.seed, params.problem, params.clusters, tokens))
    result.centroids.push_back(codes[token]);
  for (Index iteration = 0; iteration < params.iterations; ++iteration) {
    const Lists members = members_of(nearest_codes(codes, result.centroids), params.clusters);
    for (Index c = 0; c < params.clusters; ++c)
      result.centroids[c] = members[c].empty()
                                ? random_u64(reseed, iteration * params.clusters + c) & mask
                                : majority(codes, members[c]);
  }
  result.labels = nearest_codes(codes, result.centroids);
  return result;
}

namespace {

// Covariance of at most 8 Dk evenly spaced keys: weighs differences between queries by their effect
// on the logits.
template <class T>
Matrix<T> key_covariance(const Matrix<T>& keys) {
  const Index samples = std::min(keys.rows, 8 * keys.cols);
  Matrix<T> sample(samples, keys.cols);
  for (Index t = 0; t < samples; ++t)
    for (Index d = 0; d < keys.cols; ++d) sample(t, d) = keys(t * keys.rows / samples, d);
  const std::vector<Index> one_cluster(static_cast<std::size_t>(samples), 0);
  const Matrix<T> mean = means_of(sample, one_cluster, Matrix<T>(1, keys.cols));
  for (Index t = 0; t < samples; ++t)
    for (Index d = 0; d < keys.cols; ++d) sample(t, d) -= mean(0, d);
  return scaled(transposed_multiply(sample, sample),
                samples == 0 ? T{0} : T{1} / static_cast<T>(samples));
}

// argmax_c q . m_c - mu_c . m_c / 2 with m_c = covariance mu_c: the nearest mu_c in the metric.
template <class T>
std::vector<Index> nearest_in_metric(const Matrix<T>& q, const Matrix<T>& centroids,
                                     const Matrix<T>& covariance) {
  const Matrix<T> metric_centroids = multiply(centroids, covariance);
  Matrix<T> scores = inner_products(q, metric_centroids);
  const Matrix<T> products = inner_products(centroids, metric_centroids);
  for (Index i = 0; i < scores.rows; ++i)
    for (Index c = 0; c < scores.cols; ++c) scores(i, c) -= products(c, c) / 2;
  return best_of_rows(scores);
}

template <class T>
std::vector<Index> key_metric_clusters(const ClusteringParams& params, const Problem<T>& problem) {
  const Matrix<T> covariance = key_covariance(problem.k);
  const std::vector<Index> start =
      initial_tokens(problem.seed, problem.place.problem(), params.clusters, problem.q.rows);
  Matrix<T> centroids(params.clusters, problem.q.cols);
  for (Index c = 0; c < params.clusters; ++c)
    for (Index d = 0; d < problem.q.cols; ++d) centroids(c, d) = problem.q(start[c], d);
  for (Index iteration = 0; iteration < params.iterations; ++iteration)
    centroids = means_of(problem.q, nearest_in_metric(problem.q, centroids, covariance), centroids);
  return nearest_in_metric(problem.q, centroids, covariance);
}

template <class T>
Planes<T> planes_of(const ClusteringParams& params, const Problem<T>& problem) {
  if (params.method == Clustering::hamming)
    return isotropic_planes<T>(problem.seed, params.bits, problem.q.cols, params.hash_bias);
  Planes<T> result;
  result.planes =
      key_difference_planes(problem.seed, problem.place.kv_problem(), problem.k, params.bits);
  result.thresholds = thresholds_at_mean(result.planes, problem.q);
  return result;
}

}  // namespace

template <class T>
std::vector<Index> cluster_labels(const ClusteringParams& params, const Problem<T>& problem) {
  if (params.clusters >= problem.q.rows) return own_clusters(problem.q.rows);
  if (params.method == Clustering::keys) return key_metric_clusters(params, problem);
  const HammingProblem hamming{.clusters = params.clusters,
                               .iterations = params.iterations,
                               .bits = params.bits,
                               .seed = problem.seed,
                               .problem = problem.place.problem()};
  return hamming_clusters(hamming, codes_of(problem.q, planes_of(params, problem))).labels;
}

void hamming_kmeans(const HammingKMeansParams& params, const TensorView& codes,
                    const Sequences& sequences, const TensorView& labels,
                    const TensorView& centroids) {
  fill(labels, [](Index) { return -1.0; });
  HammingProblem hamming{.clusters = centroids.size(2),
                         .iterations = params.iterations,
                         .bits = params.bits == kAutomatic ? kMaxHashBits : params.bits,
                         .seed = params.seed};
  for (const Place& place : make_places("hamming_kmeans", sequences, codes, codes.size(1))) {
    hamming.problem = place.problem();
    const HammingClusters found = hamming_clusters(hamming, read_codes(place.queries(codes)));
    write_indices(place.queries(labels), found.labels);
    write_codes(place.item_head(centroids), found.centroids);
  }
}

template <class T>
void cluster_queries(const ClusteringParams& params, const AttentionInputs& inputs,
                     const TensorView& labels) {
  ClusteredParams settled{.clustering = params};
  settled = std::get<ClusteredParams>(resolve(settled, false));
  fill(labels, [](Index) { return -1.0; });
  for (const Place& place : make_places("cluster_queries", inputs)) {
    Problem<T> problem;
    problem.q = read_matrix<T>(place.queries(inputs.q));
    problem.k = read_matrix<T>(place.keys(inputs.k));
    problem.seed = inputs.seed;
    problem.place = place;
    write_indices(place.queries(labels), cluster_labels(settled.clustering, problem));
  }
}

namespace {

template <class T>
Matrix<T> scores_at(const Place& place, const TensorView& x, const TensorView& centroids) {
  return inner_products(read_matrix<T>(place.queries(x)),
                        read_matrix<T>(place.item_head(centroids)));
}

}  // namespace

template <class T>
void nearest_centroid(const TensorView& x, const Sequences& sequences, const TensorView& centroids,
                      const TensorView& bias, const TensorView& labels) {
  fill(labels, [](Index) { return -1.0; });
  for (const Place& place : make_places("nearest_centroid", sequences, x, x.size(1))) {
    Matrix<T> scores = scores_at<T>(place, x, centroids);
    if (bias.present()) {
      const Matrix<T> own_bias = read_matrix<T>(place.item_head(bias));
      for (Index i = 0; i < scores.rows; ++i)
        for (Index c = 0; c < scores.cols; ++c) scores(i, c) += own_bias(0, c);
    }
    write_indices(place.queries(labels), best_of_rows(scores));
  }
}

template <class T>
void balanced_assign(const TensorView& x, const Sequences& sequences, const TensorView& centroids,
                     std::int64_t capacity, const TensorView& labels) {
  const Index clusters = centroids.size(2);
  fill(labels, [](Index) { return -1.0; });
  for (const Place& place : make_places("balanced_assign", sequences, x, x.size(1))) {
    const Index even = (place.q.length + clusters - 1) / clusters;
    write_indices(place.queries(labels), balanced_walk(scores_at<T>(place, x, centroids),
                                                       capacity == 0 ? even : capacity));
  }
}

template std::vector<Index> cluster_labels(const ClusteringParams&, const Problem<float>&);
template std::vector<Index> cluster_labels(const ClusteringParams&, const Problem<double>&);
template void cluster_queries<float>(const ClusteringParams&, const AttentionInputs&,
                                     const TensorView&);
template void cluster_queries<double>(const ClusteringParams&, const AttentionInputs&,
                                      const TensorView&);
template void nearest_centroid<float>(const TensorView&, const Sequences&, const TensorView&,
                                      const TensorView&, const TensorView&);
template void nearest_centroid<double>(const TensorView&, const Sequences&, const TensorView&,
                                       const TensorView&, const TensorView&);
template void balanced_assign<float>(const TensorView&, const Sequences&, const TensorView&,
                                     std::int64_t, const TensorView&);
template void balanced_assign<double>(const TensorView&, const Sequences&, const TensorView&,
                                      std::int64_t, const TensorView&);

}  // namespace coterie::ref
