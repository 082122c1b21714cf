// SPDX-License-Identifier: MIT
// Centroids of routing: spherical k-means, the moving average, the commitment loss. Rows are
// normalised to zero mean and unit variance throughout.
#include <algorithm>
#include <limits>

#include "core/check.h"
#include "coterie/random.h"
#include "ref/normalise.h"
#include "ref/ref.h"
#include "ref/selection.h"

namespace coterie::ref {

namespace {

// Normalised valid rows of one head, item by item.
template <class T>
Matrix<T> rows_of_head(const std::vector<Place>& places, const TensorView& x, Index head) {
  Matrix<T> rows(0, x.size(3));
  for (const Place& place : places) {
    if (place.head != head) continue;
    const Matrix<T> own = normalised_rows(read_matrix<T>(place.queries(x)));
    rows.values.insert(rows.values.end(), own.values.begin(), own.values.end());
    rows.rows += own.rows;
  }
  return rows;
}

// Farthest first among a random sample of the rows: each next centroid is the candidate whose
// largest inner product with those chosen is smallest. Random rows alone would give several
// centroids to the most frequent kind of token.
template <class T>
Matrix<T> initial_centroids(const SphericalKMeansParams& params, Index head, Index clusters,
                            const Matrix<T>& rows) {
  const RandomStream stream{params.seed, RandomUse::centroid_init,
                            static_cast<std::uint32_t>(params.first_head + head)};
  const Index candidates = std::min(rows.rows, params.candidates * clusters);
  Matrix<T> sample(candidates, rows.cols);
  for (Index i = 0; i < candidates; ++i) {
    const Index row = random_permutation(stream, static_cast<std::uint32_t>(i),
                                         static_cast<std::uint32_t>(rows.rows));
    for (Index d = 0; d < rows.cols; ++d) sample(i, d) = rows(row, d);
  }
  const Matrix<T> products = inner_products(sample, sample);
  Matrix<T> centroids(clusters, rows.cols);
  std::vector<T> largest(candidates, -std::numeric_limits<T>::infinity());
  for (Index c = 0; c < clusters; ++c) {
    const Index chosen = std::min_element(largest.begin(), largest.end()) - largest.begin();
    for (Index d = 0; d < rows.cols; ++d) centroids(c, d) = sample(chosen, d);
    for (Index i = 0; i < candidates; ++i) {
      largest[i] = std::max(largest[i], products(chosen, i));
    }
  }
  return centroids;
}

// (Hc, C, D) or (Hc, C): the rows of the centroid head that `head` of `num_heads` uses.
TensorView head_of(const TensorView& tensor, Index head, Index num_heads) {
  return tensor.narrowed(0, head / (num_heads / tensor.size(0)), 1);
}

}  // namespace

template <class T>
void spherical_kmeans(const SphericalKMeansParams& params, const TensorView& x,
                      const Sequences& sequences, const TensorView& centroids) {
  const std::vector<Place> places = make_places("spherical_kmeans", sequences, x, x.size(1));
  for (Index head = 0; head < x.size(1); ++head) {
    const Matrix<T> rows = rows_of_head<T>(places, x, head);
    COTERIE_CHECK(rows.rows > 0, "spherical_kmeans", "expected at least one valid row; got none");
    Matrix<T> current = initial_centroids(params, head, centroids.size(1), rows);
    for (Index iteration = 0; iteration < params.iterations; ++iteration) {
      const std::vector<Index> labels = best_of_rows(inner_products(rows, current));
      const Lists members = members_of(labels, current.rows);
      const Matrix<T> means = normalised_rows(means_of(rows, labels, current));
      for (Index c = 0; c < current.rows; ++c)
        for (Index d = 0; d < current.cols && !members[c].empty(); ++d) current(c, d) = means(c, d);
    }
    write_matrix(centroids.narrowed(0, head, 1), current);
  }
}

template <class T>
void add_centroid_statistics(const TensorView& x, const Sequences& sequences,
                             const TensorView& labels, const CentroidStatistics& statistics) {
  const Index owners = statistics.members.size(0);
  for (const Place& place : make_places("add_centroid_statistics", sequences, x, x.size(1))) {
    const Index owner = place.head / (place.num_heads / owners);
    const TensorView of_members = statistics.members.narrowed(0, owner, 1);
    const TensorView of_sums = statistics.sums.narrowed(0, owner, 1);
    Matrix<T> members = read_matrix<T>(of_members), sums = read_matrix<T>(of_sums);
    const Matrix<T> rows = normalised_rows(read_matrix<T>(place.queries(x)));
    const std::vector<Index> label = read_indices(place.queries(labels));
    for (Index i = 0; i < rows.rows; ++i) {
      members(0, label[i]) += 1;
      for (Index d = 0; d < rows.cols; ++d) sums(label[i], d) += rows(i, d);
    }
    write_matrix(of_members, members);
    write_matrix(of_sums, sums);
  }
}

// Per head: count and sum move towards those of the step, mu = sum / smoothed count, the smoothing
// keeping the total: (count + e) / (total + C e) total.
template <class T>
void move_centroids(double decay, const CentroidStatistics& statistics,
                    const CentroidState& state) {
  constexpr T kSmoothing = static_cast<T>(1e-5);
  const T kept = static_cast<T>(decay);
  for (Index owner = 0; owner < state.counts.size(0); ++owner) {
    const auto own = [&](const TensorView& tensor) { return tensor.narrowed(0, owner, 1); };
    const Matrix<T> members = read_matrix<T>(own(statistics.members));
    Matrix<T> counts = scaled(read_matrix<T>(own(state.counts)), kept);
    Matrix<T> sums = scaled(read_matrix<T>(own(state.sums)), kept);
    Matrix<T> centroids = read_matrix<T>(own(state.centroids));
    add(counts, scaled(members, 1 - kept));
    add(sums, scaled(read_matrix<T>(own(statistics.sums)), 1 - kept));
    T total = 0;
    for (T count : counts.values) total += count;
    const T grown = total + static_cast<T>(centroids.rows) * kSmoothing;
    for (Index c = 0; c < centroids.rows; ++c) {
      if (members(0, c) == 0) continue;
      const T smoothed = (counts(0, c) + kSmoothing) / grown * total;
      for (Index d = 0; d < centroids.cols; ++d) centroids(c, d) = sums(c, d) / smoothed;
    }
    write_matrix(own(state.counts), counts);
    write_matrix(own(state.sums), sums);
    write_matrix(own(state.centroids), centroids);
  }
}

namespace {

template <class T>
T valid_elements(const std::vector<Place>& places, Index dim) {
  Index rows = 0;
  for (const Place& place : places) rows += place.q.length;
  return static_cast<T>(rows * dim);
}

// Normalised rows minus the centroids of their labels.
template <class T>
Matrix<T> differences(const Place& place, const TensorView& x, const TensorView& centroids,
                      const TensorView& labels) {
  Matrix<T> rows = normalised_rows(read_matrix<T>(place.queries(x)));
  const Matrix<T> own = read_matrix<T>(head_of(centroids, place.head, place.num_heads));
  const std::vector<Index> label = read_indices(place.queries(labels));
  for (Index i = 0; i < rows.rows; ++i)
    for (Index d = 0; d < rows.cols; ++d) rows(i, d) -= own(label[i], d);
  return rows;
}

}  // namespace

template <class T>
T commitment_loss(const TensorView& x, const Sequences& sequences, const TensorView& centroids,
                  const TensorView& labels) {
  const std::vector<Place> places = make_places("commitment_loss", sequences, x, x.size(1));
  const T elements = valid_elements<T>(places, x.size(3));
  T sum = 0;
  for (const Place& place : places)
    for (T difference : differences<T>(place, x, centroids, labels).values)
      sum += difference * difference;
  return elements > 0 ? sum / elements : T{0};
}

template <class T>
void commitment_loss_backward(const TensorView& x, const Sequences& sequences,
                              const TensorView& centroids, const TensorView& labels, double weight,
                              const TensorView& dx) {
  const std::vector<Place> places = make_places("commitment_loss", sequences, x, x.size(1));
  const T factor = static_cast<T>(2 * weight) / valid_elements<T>(places, x.size(3));
  for (const Place& place : places)
    add_matrix(place.queries(dx), normalised_rows_backward(
                                      read_matrix<T>(place.queries(x)),
                                      scaled(differences<T>(place, x, centroids, labels), factor)));
}

template void spherical_kmeans<float>(const SphericalKMeansParams&, const TensorView&,
                                      const Sequences&, const TensorView&);
template void spherical_kmeans<double>(const SphericalKMeansParams&, const TensorView&,
                                       const Sequences&, const TensorView&);
template void add_centroid_statistics<float>(const TensorView&, const Sequences&, const TensorView&,
                                             const CentroidStatistics&);
template void add_centroid_statistics<double>(const TensorView&, const Sequences&,
                                              const TensorView&, const CentroidStatistics&);
template void move_centroids<float>(double, const CentroidStatistics&, const CentroidState&);
template void move_centroids<double>(double, const CentroidStatistics&, const CentroidState&);
template float commitment_loss(const TensorView&, const Sequences&, const TensorView&,
                               const TensorView&);
template double commitment_loss(const TensorView&, const Sequences&, const TensorView&,
                                const TensorView&);
template void commitment_loss_backward<float>(const TensorView&, const Sequences&,
                                              const TensorView&, const TensorView&, double,
                                              const TensorView&);
template void commitment_loss_backward<double>(const TensorView&, const Sequences&,
                                               const TensorView&, const TensorView&, double,
                                               const TensorView&);

}  // namespace coterie::ref
