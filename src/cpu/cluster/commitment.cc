// SPDX-License-Identifier: MIT
#include "cpu/cluster/commitment.h"

#include <numeric>

#include "cpu/cluster/normalise.h"
#include "cpu/engine/row_tiles.h"
#include "cpu/engine/rows.h"

namespace coterie::cpu {

namespace {

double valid_elements(const CommitmentProblem& problem) {
  std::int64_t rows = 0;
  for (const Span& span : problem.spans) rows += span.length;
  return static_cast<double>(rows * problem.x.size(1) * problem.x.size(3));
}

// Leaves normalised rows in tiles.q, 1 / sigma in tiles.sum, and row - centroid in tiles.dq.
template <class T>
void differences(const CommitmentProblem& problem, const RowTile& tile, Tiles<T>& tiles) {
  const TensorView &x = problem.x, &centroids = problem.centroids;
  const Span& span = problem.spans[static_cast<std::size_t>(tile.item)];
  const std::int64_t dim = x.size(3), owner = tile.head / (x.size(1) / centroids.size(0));
  const T* own = static_cast<const T*>(centroids.data) + owner * centroids.size(1) * dim;
  const std::int32_t* label =
      span_at<const std::int32_t>(problem.labels, span, tile.head) + tile.first;
  kernels<T>().load(span_rows(x, span, tile.head), tile.first, tile.count, T(1), tiles.q,
                    tiles.key_row);
  normalise_tile(tiles.q, tile.count, dim, tiles.key_row, tiles.sum);
  for (std::int64_t r = 0; r < tile.count; ++r) {
    const T *row = tiles.q + r * tiles.key_row, *centroid = own + label[r] * dim;
    T* difference = tiles.dq + r * tiles.key_row;
    for (std::int64_t d = 0; d < dim; ++d) difference[d] = row[d] - centroid[d];
    for (std::int64_t d = dim; d < tiles.key_row; ++d) difference[d] = 0;
  }
}

}  // namespace

template <class T>
T commitment_loss(const CommitmentProblem& problem, std::vector<Tiles<T>>& tiles) {
  const std::vector<RowTile> rows = span_tiles(problem.spans, problem.x.size(1));
  std::vector<double> part(rows.size());
  for_tiles(rows, tiles, [&](const RowTile& tile, Tiles<T>& own) {
    differences(problem, tile, own);
    double sum = 0;
    for (std::int64_t r = 0; r < tile.count; ++r) {
      const T* row = own.dq + r * own.key_row;
      sum += static_cast<double>(kernels<T>().row_dot(row, row, own.key_row));
    }
    part[static_cast<std::size_t>(&tile - rows.data())] = sum;
  });
  if (rows.empty()) return 0;
  return static_cast<T>(std::accumulate(part.begin(), part.end(), 0.0) / valid_elements(problem));
}

template <class T>
void commitment_backward(const CommitmentProblem& problem, double weight, const TensorView& dx,
                         std::vector<Tiles<T>>& tiles) {
  const Kernels<T>& kernel = kernels<T>();
  const T factor = static_cast<T>(2 * weight / valid_elements(problem));
  const std::vector<RowTile> row_list = span_tiles(problem.spans, problem.x.size(1));
  for_tiles(row_list, tiles, [&](const RowTile& tile, Tiles<T>& own) {
    const Rows target =
        span_rows(dx, problem.spans[static_cast<std::size_t>(tile.item)], tile.head);
    differences(problem, tile, own);
    normalise_backward_tile(own.q, own.sum, tile.count, problem.x.size(3), own.key_row, own.dq);
    kernel.load(target, tile.first, tile.count, T(1), own.q, own.key_row);
    for (std::int64_t r = 0; r < tile.count; ++r)
      kernel.row_add(own.q + r * own.key_row, own.dq + r * own.key_row, own.key_row, factor);
    kernel.store(target, tile.first, tile.count, T(1), own.q, own.key_row);
  });
}

#define COTERIE_INSTANTIATE(T)                                                           \
  template T commitment_loss(const CommitmentProblem&, std::vector<Tiles<T>>&);          \
  template void commitment_backward(const CommitmentProblem&, double, const TensorView&, \
                                    std::vector<Tiles<T>>&);
COTERIE_INSTANTIATE(float)
COTERIE_INSTANTIATE(double)
#undef COTERIE_INSTANTIATE

}  // namespace coterie::cpu
