// SPDX-License-Identifier: MIT
// k-means of rows (coterie/kmeans.h): label_n = argmin_c |x_n - mu_c|^2, mu_c = mean of its rows.
#include <cmath>
#include <limits>

#include "coterie/random.h"
#include "ref/matrix.h"
#include "ref/ref.h"
#include "ref/views.h"

namespace coterie::ref {

namespace {

constexpr Index kNone = -1;

template <class T>
struct KMeans {
  const KMeansParams& params;
  std::uint32_t problem;
  Matrix<T> x, centroids;
  std::vector<Index> labels = {};  // kNone for rows that are not finite

  bool finite(Index n) const {
    for (Index d = 0; d < x.cols; ++d)
      if (!std::isfinite(x(n, d))) return false;
    return true;
  }
  T distance(Index n, Index c) const {
    T sum = 0;
    for (Index d = 0; d < x.cols; ++d)
      sum += (x(n, d) - centroids(c, d)) * (x(n, d) - centroids(c, d));
    return sum;
  }
  void place(Index c, Index n) {
    for (Index d = 0; d < x.cols; ++d) centroids(c, d) = n == kNone ? T{0} : x(n, d);
  }

  // Finite rows in random order, repeated if there are less than clusters.
  std::vector<Index> start_rows() const {
    const RandomStream stream{params.seed, RandomUse::kmeans_start, problem};
    std::vector<Index> rows;
    for (Index i = 0; i < x.rows && static_cast<Index>(rows.size()) < centroids.rows; ++i) {
      const Index n = random_permutation(stream, static_cast<std::uint32_t>(i),
                                         static_cast<std::uint32_t>(x.rows));
      if (finite(n)) rows.push_back(n);
    }
    if (rows.empty()) rows.push_back(kNone);
    const std::size_t found = rows.size();
    while (static_cast<Index>(rows.size()) < centroids.rows)
      rows.push_back(rows[rows.size() - found]);
    return rows;
  }
  void start() {
    if (params.start == KMeansStart::given) return;
    const std::vector<Index> rows = start_rows();
    for (Index c = 0; c < centroids.rows; ++c) place(c, rows[static_cast<std::size_t>(c)]);
    if (params.start == KMeansStart::random || rows[0] == kNone) return;
    const RandomStream stream{params.seed, RandomUse::kmeans_draw, problem};
    std::vector<T> least(static_cast<std::size_t>(x.rows), std::numeric_limits<T>::infinity());
    for (Index c = 1; c < centroids.rows; ++c) {
      T total = 0;
      for (Index n = 0; n < x.rows; ++n) {
        T& own = least[static_cast<std::size_t>(n)];
        own = finite(n) ? std::min(own, distance(n, c - 1)) : T{0};
        total += own;
      }
      if (!(total > 0)) continue;  // all rows are centroids: the random one
      const T drawn =
          static_cast<T>(random_unit(stream.at(static_cast<std::uint64_t>(c)).word[0])) * total;
      T before = 0;
      Index chosen = kNone;
      for (Index n = 0; n < x.rows && !(before > drawn); ++n) {
        before += least[static_cast<std::size_t>(n)];
        if (least[static_cast<std::size_t>(n)] > 0) chosen = n;
      }
      place(c, chosen);
    }
  }

  void assign() {
    labels.assign(static_cast<std::size_t>(x.rows), kNone);
    for (Index n = 0; n < x.rows; ++n) {
      if (!finite(n)) continue;
      Index best = 0;
      for (Index c = 1; c < centroids.rows; ++c)
        if (distance(n, c) < distance(n, best)) best = c;
      labels[static_cast<std::size_t>(n)] = best;
    }
  }
  std::vector<Index> counts() const {
    std::vector<Index> members(static_cast<std::size_t>(centroids.rows), 0);
    for (const Index label : labels)
      if (label != kNone) ++members[static_cast<std::size_t>(label)];
    return members;
  }
  // Gives empty clusters the farthest rows of clusters with two rows or more; `moves`: also as
  // their centroids.
  void fill(bool moves) {
    std::vector<Index> members = counts();
    std::vector<T> far;
    for (Index n = 0; n < x.rows; ++n) {
      const Index label = labels[static_cast<std::size_t>(n)];
      far.push_back(label == kNone ? T{-1} : distance(n, label));
    }
    for (Index c = 0; c < centroids.rows; ++c) {
      if (members[static_cast<std::size_t>(c)] > 0) continue;
      Index best = kNone;
      for (Index n = 0; n < x.rows; ++n) {
        const Index label = labels[static_cast<std::size_t>(n)];
        if (label == kNone || members[static_cast<std::size_t>(label)] < 2) continue;
        if (best == kNone || far[static_cast<std::size_t>(n)] > far[static_cast<std::size_t>(best)])
          best = n;
      }
      if (best == kNone) return;
      --members[static_cast<std::size_t>(labels[static_cast<std::size_t>(best)])];
      labels[static_cast<std::size_t>(best)] = c;
      members[static_cast<std::size_t>(c)] = 1;
      if (moves) place(c, best);
    }
  }
  void update() {
    const std::vector<Index> members = counts();
    Matrix<T> sums(centroids.rows, centroids.cols);
    for (Index n = 0; n < x.rows; ++n) {
      const Index label = labels[static_cast<std::size_t>(n)];
      for (Index d = 0; d < x.cols && label != kNone; ++d) sums(label, d) += x(n, d);
    }
    for (Index c = 0; c < centroids.rows; ++c)
      for (Index d = 0; d < x.cols && members[static_cast<std::size_t>(c)] > 0; ++d)
        centroids(c, d) = sums(c, d) / static_cast<T>(members[static_cast<std::size_t>(c)]);
  }
  void run() {
    start();
    for (Index i = 0; i < params.iterations; ++i) {
      assign();
      if (params.fill_empty) fill(false);
      update();
    }
    assign();
    if (params.fill_empty) fill(true);
  }
};

}  // namespace

template <class T>
void kmeans(const KMeansParams& params, const TensorView& x, const KMeansResult& result) {
  for (Index p = 0; p < x.size(0); ++p) {
    const auto own = [&](const TensorView& tensor) { return tensor.narrowed(0, p, 1); };
    const bool given = params.start == KMeansStart::given;
    KMeans<T> problem{params, static_cast<std::uint32_t>(p), read_matrix<T>(own(x)),
                      given ? read_matrix<T>(own(result.centroids))
                            : Matrix<T>(result.centroids.size(1), x.size(2))};
    problem.run();
    write_matrix(own(result.centroids), problem.centroids);
    const auto write = [&](const TensorView& tensor, const std::vector<Index>& values) {
      write_values(own(tensor), {values.begin(), values.end()});
    };
    write(result.labels, problem.labels);
    write(result.counts, problem.counts());
  }
}

template void kmeans<float>(const KMeansParams&, const TensorView&, const KMeansResult&);
template void kmeans<double>(const KMeansParams&, const TensorView&, const KMeansResult&);

}  // namespace coterie::ref
