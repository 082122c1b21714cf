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
CentroidWorkspace<T>::CentroidWorkspace(Arena& arena, const TensorView& x,
                                        const TensorView& centroids)
    : tiles(make_tiles<T>(arena, x.size(3), 1)),
      rows(arena, x),
      sums(arena.take<double>(centroids.count())),
      members(arena.take<std::int64_t>(centroids.size(0) * centroids.size(1))),
      labels(arena.take<std::int32_t>(x.size(0) * x.size(1) * x.size(2))) {}

namespace {

// Sums and counts the normalised rows of each cluster, in double and in the order of the batch.
template <class T>
void add_up(const std::vector<Span>& spans, const TensorView& labels, std::int64_t centroid_heads,
            std::int64_t clusters, CentroidWorkspace<T>& workspace) {
  const TensorView& rows = workspace.rows.rows;
  const std::int64_t dim = rows.size(3), sharing = rows.size(1) / centroid_heads;
  parallel_for(centroid_heads, [&](std::int64_t owner, int) {
    double* sums = workspace.sums + owner * clusters * dim;
    std::int64_t* members = workspace.members + owner * clusters;
    std::fill_n(sums, clusters * dim, 0.0);
    std::fill_n(members, clusters, 0);
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
                    const CentroidWorkspace<T>& workspace) {
  const std::int64_t clusters = centroids.size(1), dim = centroids.size(2);
  const std::vector<const T*> candidates =
      draw_rows<T>({params.seed, RandomUse::centroid_init, static_cast<std::uint32_t>(head)}, head,
                   params.candidates * clusters, spans, workspace.rows.rows);
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
void take_means(std::int64_t head, const TensorView& centroids, CentroidWorkspace<T>& workspace,
                Tiles<T>& tiles) {
  const std::int64_t clusters = centroids.size(1), dim = centroids.size(2);
  for (std::int64_t c = head * clusters; c < (head + 1) * clusters; ++c) {
    if (workspace.members[c] == 0) continue;
    const double size = static_cast<double>(workspace.members[c]);
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
                      CentroidWorkspace<T>& workspace) {
  const std::int64_t heads = x.size(1), clusters = centroids.size(1), dim = x.size(3);
  const TensorView labels =
      TensorView::contiguous(workspace.labels, DType::i32, {x.size(0), heads, x.size(2)});
  const CentroidView view{
      TensorView::contiguous(centroids.data, centroids.dtype, {1, heads, clusters, dim}), {}};
  normalise_rows(x, spans, workspace.rows, workspace.tiles);
  parallel_for(heads, [&](std::int64_t head, int) {
    draw_centroids(params, head, spans, centroids, workspace);
  });
  for (std::int64_t iteration = 0; iteration < params.iterations; ++iteration) {
    assign_nearest(workspace.rows.rows, spans, view, labels, workspace.tiles);
    add_up(spans, labels, heads, clusters, workspace);
    parallel_for(heads, [&](std::int64_t head, int worker) {
      take_means(head, centroids, workspace, workspace.tiles[static_cast<std::size_t>(worker)]);
    });
  }
}

template <class T>
void ema_update(double decay, const TensorView& x, const std::vector<Span>& spans,
                const TensorView& labels, const CentroidState& state,
                CentroidWorkspace<T>& workspace) {
  constexpr double kSmoothing = 1e-5;
  const std::int64_t owners = state.counts.size(0), clusters = state.counts.size(1);
  const std::int64_t dim = x.size(3);
  normalise_rows(x, spans, workspace.rows, workspace.tiles);
  add_up(spans, labels, owners, clusters, workspace);
  parallel_for(owners, [&](std::int64_t owner, int) {
    T* counts = static_cast<T*>(state.counts.data) + owner * clusters;
    double total = 0;
    for (std::int64_t c = 0; c < clusters; ++c) {
      const double members = static_cast<double>(workspace.members[owner * clusters + c]);
      counts[c] = static_cast<T>(decay * static_cast<double>(counts[c]) + (1 - decay) * members);
      total += static_cast<double>(counts[c]);
    }
    for (std::int64_t c = 0; c < clusters; ++c) {
      const std::int64_t cell = owner * clusters + c;
      const double smoothed = (static_cast<double>(counts[c]) + kSmoothing) /
                              (total + static_cast<double>(clusters) * kSmoothing) * total;
      T* sums = static_cast<T*>(state.sums.data) + cell * dim;
      T* centroid = static_cast<T*>(state.centroids.data) + cell * dim;
      for (std::int64_t d = 0; d < dim; ++d) {
        const double sum =
            decay * static_cast<double>(sums[d]) + (1 - decay) * workspace.sums[cell * dim + d];
        sums[d] = static_cast<T>(sum);
        if (workspace.members[cell] > 0) centroid[d] = static_cast<T>(sum / smoothed);
      }
    }
  });
}

#define COTERIE_INSTANTIATE(T)                                                                     \
  template struct CentroidWorkspace<T>;                                                            \
  template void spherical_kmeans(const SphericalKMeansParams&, const TensorView&,                  \
                                 const std::vector<Span>&, const TensorView&,                      \
                                 CentroidWorkspace<T>&);                                           \
  template void ema_update(double, const TensorView&, const std::vector<Span>&, const TensorView&, \
                           const CentroidState&, CentroidWorkspace<T>&);
COTERIE_INSTANTIATE(float)
COTERIE_INSTANTIATE(double)
#undef COTERIE_INSTANTIATE

}  // namespace coterie::cpu
