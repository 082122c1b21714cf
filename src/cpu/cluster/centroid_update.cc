// SPDX-License-Identifier: MIT
#include "cpu/cluster/centroid_update.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <vector>

#include "core/parallel.h"
#include "coterie/random.h"
#include "cpu/cluster/assign.h"
#include "cpu/engine/rows.h"

namespace coterie::cpu {

template <class T>
CentroidWorkspace<T>::CentroidWorkspace(Arena& arena, const TensorView& x)
    : tiles(make_tiles<T>(arena, x.size(3), 1)), rows(arena, x) {}

template <class T>
KMeansWorkspace<T>::KMeansWorkspace(Arena& arena, const TensorView& x, const TensorView& centroids)
    : CentroidWorkspace<T>(arena, x),
      sums(arena.take<double>(centroids.count())),
      members(arena.take<double>(centroids.size(0) * centroids.size(1))),
      labels(arena.take<std::int32_t>(x.size(0) * x.size(1) * x.size(2))) {}

namespace {

// Adds the numbers and sums of the normalised rows of each cluster, in the order of the batch.
template <class T>
void add_up(const std::vector<Span>& spans, const TensorView& labels, const TensorView& rows,
            const CentroidStatistics& statistics) {
  const std::int64_t owners = statistics.members.size(0), clusters = statistics.members.size(1);
  const std::int64_t dim = rows.size(3), sharing = rows.size(1) / owners;
  parallel_for(owners, [&](std::int64_t owner, int) {
    double* sums = static_cast<double*>(statistics.sums.data) + owner * clusters * dim;
    double* members = static_cast<double*>(statistics.members.data) + owner * clusters;
    for (const Span& span : spans)
      for (std::int64_t head = owner * sharing; head < (owner + 1) * sharing; ++head) {
        const std::int32_t* label = span_at<const std::int32_t>(labels, span, head);
        const T* row = block_at<const T>(rows, span.batch, head) + span.begin * dim;
        for (std::int64_t i = 0; i < span.length; ++i, row += dim) {
          ++members[label[i]];
          double* sum = sums + label[i] * dim;
          for (std::int64_t d = 0; d < dim; ++d) sum[d] += static_cast<double>(row[d]);
        }
      }
  });
}

// Up to `count` distinct random rows of a head's batch.
template <class T>
std::vector<const T*> draw_rows(const RandomStream& stream, std::int64_t head, std::int64_t count,
                                const std::vector<Span>& spans, const TensorView& rows) {
  std::int64_t total = 0;
  for (const Span& span : spans) total += span.length;
  std::vector<const T*> drawn;
  for (std::int64_t i = 0; i < std::min(count, total); ++i) {
    std::int64_t row = random_permutation(stream, static_cast<std::uint32_t>(i),
                                          static_cast<std::uint32_t>(total));
    auto span = spans.begin();
    while (row >= span->length) row -= (span++)->length;
    drawn.push_back(block_at<const T>(rows, span->batch, head) +
                    (span->begin + row) * rows.size(3));
  }
  return drawn;
}

// Farthest first among random rows: each next centroid is the candidate whose largest inner product
// with those chosen is smallest, ties to the first drawn.
template <class T>
void draw_centroids(const SphericalKMeansParams& params, std::int64_t head,
                    const std::vector<Span>& spans, const TensorView& centroids,
                    const KMeansWorkspace<T>& workspace) {
  const std::int64_t clusters = centroids.size(1), dim = centroids.size(2);
  const std::vector<const T*> candidates = draw_rows<T>(
      {params.seed, RandomUse::centroid_init, static_cast<std::uint32_t>(params.first_head + head)},
      head, params.candidates * clusters, spans, workspace.rows.rows);
  std::vector<double> largest(candidates.size(), -std::numeric_limits<double>::infinity());
  for (std::int64_t c = 0; c < clusters; ++c) {
    const auto place = std::min_element(largest.begin(), largest.end()) - largest.begin();
    const T* chosen = candidates[static_cast<std::size_t>(place)];
    std::copy_n(chosen, dim, static_cast<T*>(centroids.data) + (head * clusters + c) * dim);
    for (std::size_t i = 0; i < candidates.size(); ++i) {
      largest[i] =
          std::max(largest[i], std::inner_product(chosen, chosen + dim, candidates[i], 0.0));
    }
  }
}

// Normalised means of one head; a cluster without members keeps its centroid.
template <class T>
void take_means(std::int64_t head, const TensorView& centroids, const KMeansWorkspace<T>& workspace,
                Tiles<T>& tiles) {
  const std::int64_t clusters = centroids.size(1), dim = centroids.size(2);
  for (std::int64_t c = head * clusters; c < (head + 1) * clusters; ++c) {
    if (workspace.members[c] == 0) continue;
    const double size = workspace.members[c];
    std::fill_n(tiles.q, tiles.key_row, T(0));
    for (std::int64_t d = 0; d < dim; ++d)
      tiles.q[d] = static_cast<T>(workspace.sums[c * dim + d] / size);
    normalise_tile<T>(tiles.q, 1, dim, tiles.key_row, nullptr);
    std::copy_n(tiles.q, dim, static_cast<T*>(centroids.data) + c * dim);
  }
}

}  // namespace

template <class T>
void spherical_kmeans(const SphericalKMeansParams& params, const TensorView& x,
                      const std::vector<Span>& spans, const TensorView& centroids,
                      KMeansWorkspace<T>& workspace) {
  const std::int64_t heads = x.size(1), clusters = centroids.size(1), dim = x.size(3);
  const TensorView labels =
      TensorView::contiguous(workspace.labels, DType::i32, {x.size(0), heads, x.size(2)});
  const CentroidView view{
      TensorView::contiguous(centroids.data, centroids.dtype, {1, heads, clusters, dim}), {}};
  const CentroidStatistics statistics{
      TensorView::contiguous(workspace.members, DType::f64, {heads, clusters}),
      TensorView::contiguous(workspace.sums, DType::f64, {heads, clusters, dim})};
  normalise_rows(x, spans, workspace.rows, workspace.tiles);
  parallel_for(heads, [&](std::int64_t head, int) {
    draw_centroids(params, head, spans, centroids, workspace);
  });
  for (std::int64_t iteration = 0; iteration < params.iterations; ++iteration) {
    assign_nearest(workspace.rows.rows, spans, view, labels, workspace.tiles);
    std::fill_n(workspace.members, heads * clusters, 0.0);
    std::fill_n(workspace.sums, heads * clusters * dim, 0.0);
    add_up<T>(spans, labels, workspace.rows.rows, statistics);
    parallel_for(heads, [&](std::int64_t head, int worker) {
      take_means(head, centroids, workspace, workspace.tiles[static_cast<std::size_t>(worker)]);
    });
  }
}

template <class T>
void add_centroid_statistics(const TensorView& x, const std::vector<Span>& spans,
                             const TensorView& labels, const CentroidStatistics& statistics,
                             CentroidWorkspace<T>& workspace) {
  normalise_rows(x, spans, workspace.rows, workspace.tiles);
  add_up<T>(spans, labels, workspace.rows.rows, statistics);
}

template <class T>
void move_centroids(double decay, const CentroidStatistics& statistics,
                    const CentroidState& state) {
  constexpr double kSmoothing = 1e-5;
  const std::int64_t owners = state.centroids.size(0), clusters = state.centroids.size(1);
  const std::int64_t dim = state.centroids.size(2);
  parallel_for(owners, [&](std::int64_t owner, int) {
    const double* members = static_cast<const double*>(statistics.members.data) + owner * clusters;
    T* counts = static_cast<T*>(state.counts.data) + owner * clusters;
    double total = 0;
    for (std::int64_t c = 0; c < clusters; ++c) {
      counts[c] = static_cast<T>(decay * static_cast<double>(counts[c]) + (1 - decay) * members[c]);
      total += static_cast<double>(counts[c]);
    }
    for (std::int64_t c = 0; c < clusters; ++c) {
      const std::int64_t cell = (owner * clusters + c) * dim;
      const double smoothed = (static_cast<double>(counts[c]) + kSmoothing) /
                              (total + static_cast<double>(clusters) * kSmoothing) * total;
      const double* added = static_cast<const double*>(statistics.sums.data) + cell;
      T* sums = static_cast<T*>(state.sums.data) + cell;
      T* centroid = static_cast<T*>(state.centroids.data) + cell;
      for (std::int64_t d = 0; d < dim; ++d) {
        const double sum = decay * static_cast<double>(sums[d]) + (1 - decay) * added[d];
        sums[d] = static_cast<T>(sum);
        if (members[c] > 0) centroid[d] = static_cast<T>(sum / smoothed);
      }
    }
  });
}

#define COTERIE_INSTANTIATE(T)                                                        \
  template struct CentroidWorkspace<T>;                                               \
  template struct KMeansWorkspace<T>;                                                 \
  template void spherical_kmeans(const SphericalKMeansParams&, const TensorView&,     \
                                 const std::vector<Span>&, const TensorView&,         \
                                 KMeansWorkspace<T>&);                                \
  template void add_centroid_statistics(const TensorView&, const std::vector<Span>&,  \
                                        const TensorView&, const CentroidStatistics&, \
                                        CentroidWorkspace<T>&);                       \
  template void move_centroids<T>(double, const CentroidStatistics&, const CentroidState&);
COTERIE_INSTANTIATE(float)
COTERIE_INSTANTIATE(double)
#undef COTERIE_INSTANTIATE

}  // namespace coterie::cpu
