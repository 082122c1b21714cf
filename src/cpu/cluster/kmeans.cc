// SPDX-License-Identifier: MIT
// With a reference row r, argmin_c |x - mu_c|^2 is argmax_c x . m_c + b_c, m_c = mu_c - r and
// b_c = -(mu_c + r) . m_c / 2: scores are as small as the spread of the rows.
#include "cpu/cluster/kmeans.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "core/parallel.h"
#include "coterie/random.h"
#include "cpu/cluster/means.h"
#include "cpu/cluster/nearest.h"
#include "cpu/engine/row_tiles.h"
#include "cpu/engine/rows.h"

namespace coterie::cpu {

namespace {

constexpr std::int32_t kNone = -1;

template <class T>
struct KMeansRun {
  const KMeansParams& params;
  const TensorView& x;
  const KMeansResult& result;
  KMeansMemory<T>& memory;
  std::int64_t problems = x.size(1), count = x.size(2), width = x.size(3),
               clusters = result.centroids.size(1);
  Span span{0, 0, count};
  std::vector<RowTile> row_tiles = span_tiles({span}, problems);

  Tiles<T>& tiles_of(int worker) const { return memory.tiles[static_cast<std::size_t>(worker)]; }
  Rows rows_of(std::int64_t p) const { return span_rows(x, span, p); }
  T* centroid(std::int64_t p, std::int64_t c) const {
    return static_cast<T*>(result.centroids.data) + (p * clusters + c) * width;
  }
  std::int32_t* labels(std::int64_t p) const {
    return static_cast<std::int32_t*>(result.labels.data) + p * count;
  }
  std::int32_t* counts(std::int64_t p) const {
    return static_cast<std::int32_t*>(result.counts.data) + p * clusters;
  }
  std::int32_t* start_row(std::int64_t p) const { return memory.rows + p * clusters; }
  T* far(std::int64_t p) const { return memory.far + p * count; }

  // Loads up to kQueryTile rows into the tile's q.
  const T* load(std::int64_t p, std::int64_t first, std::int64_t rows, Tiles<T>& own) const {
    kernels<T>().load(rows_of(p), first, rows, T(1), own.q, own.key_row);
    return own.q;
  }
  bool finite(const T* row) const {
    return std::all_of(row, row + width, [](T value) { return std::isfinite(value); });
  }
  T distance(const T* row, const T* other) const {
    T sum = 0;
    for (std::int64_t d = 0; d < width; ++d) sum += (row[d] - other[d]) * (row[d] - other[d]);
    return sum;
  }
  void place(std::int64_t p, std::int64_t c, std::int32_t row, Tiles<T>& own) const {
    if (row == kNone)
      std::fill_n(centroid(p, c), width, T(0));
    else
      std::copy_n(load(p, row, 1, own), width, centroid(p, c));
  }

  void start_at_random(std::int64_t p, Tiles<T>& own) const {
    const RandomStream stream{params.seed, RandomUse::kmeans_start, static_cast<std::uint32_t>(p)};
    std::int32_t* rows = start_row(p);
    std::int64_t found = 0;
    for (std::int64_t i = 0; i < count && found < clusters; ++i) {
      const auto row = static_cast<std::int32_t>(random_permutation(
          stream, static_cast<std::uint32_t>(i), static_cast<std::uint32_t>(count)));
      if (finite(load(p, row, 1, own))) rows[found++] = row;
    }
    if (found == 0) rows[found++] = kNone;
    for (std::int64_t c = found; c < clusters; ++c) rows[c] = rows[c - found];
    for (std::int64_t c = 0; c < clusters; ++c) place(p, c, rows[c], own);
  }
  // The next centroids by squared distances to those before; tiles of rows in parallel.
  void draw(std::int64_t p) const {
    if (start_row(p)[0] == kNone) return;
    const RandomStream stream{params.seed, RandomUse::kmeans_draw, static_cast<std::uint32_t>(p)};
    std::fill_n(far(p), count, std::numeric_limits<T>::infinity());
    const std::int64_t parts = (count + kQueryTile - 1) / kQueryTile;
    std::vector<double> sums(static_cast<std::size_t>(parts));
    for (std::int64_t c = 1; c < clusters; ++c) {
      parallel_for(parts, [&](std::int64_t part, int worker) {
        Tiles<T>& own = tiles_of(worker);
        const std::int64_t first = part * kQueryTile, rows = std::min(kQueryTile, count - first);
        const T* row = load(p, first, rows, own);
        double& sum = sums[static_cast<std::size_t>(part)] = 0;
        for (std::int64_t n = first; n < first + rows; ++n, row += own.key_row) {
          far(p)[n] = finite(row) ? std::min(far(p)[n], distance(row, centroid(p, c - 1))) : T(0);
          sum += far(p)[n];
        }
      });
      double total = 0, before = 0;
      for (const double sum : sums) total += sum;
      if (!(total > 0)) continue;
      const double drawn = random_unit(stream.at(static_cast<std::uint64_t>(c)).word[0]) * total;
      std::int64_t part = 0;
      while (part + 1 < parts && before + sums[static_cast<std::size_t>(part)] <= drawn)
        before += sums[static_cast<std::size_t>(part++)];
      std::int32_t chosen = kNone;
      for (std::int64_t n = part * kQueryTile; n < count && !(before > drawn); ++n) {
        before += far(p)[n];
        if (far(p)[n] > 0) chosen = static_cast<std::int32_t>(n);
      }
      place(p, c, chosen == kNone ? start_row(p)[c] : chosen, memory.tiles[0]);
    }
  }
  void start() const {
    if (params.start != KMeansStart::given)
      parallel_for(problems,
                   [&](std::int64_t p, int worker) { start_at_random(p, tiles_of(worker)); });
    if (params.start == KMeansStart::plus_plus)
      for (std::int64_t p = 0; p < problems; ++p) draw(p);
    for (std::int64_t p = 0; p < problems; ++p)
      std::copy_n(centroid(p, 0), width, memory.reference + p * width);
  }

  void assign() const {
    parallel_for(problems * clusters, [&](std::int64_t row, int) {
      const T* mean = centroid(0, 0) + row * width;
      const T* reference = memory.reference + row / clusters * width;
      T sum = 0;
      for (std::int64_t d = 0; d < width; ++d) {
        const T shifted = mean[d] - reference[d];
        memory.shifted[row * width + d] = shifted;
        sum += (mean[d] + reference[d]) * shifted;
      }
      memory.bias[row] = T(-0.5) * sum;
    });
    for_tiles(row_tiles, memory.tiles, [&](const RowTile& tile, Tiles<T>& own) {
      const std::int64_t p = tile.head;
      std::int32_t* label = labels(p) + tile.first;
      nearest_tile(rows_of(p), tile.first, tile.count,
                   memory_rows(memory.shifted + p * clusters * width, width), clusters,
                   memory.bias + p * clusters, own, label);
      for (std::int64_t r = 0; r < tile.count; ++r)
        if (!finite(own.q + r * own.key_row)) label[r] = kNone;
    });
  }
  void count_labels(std::int64_t p) const {
    std::fill_n(counts(p), clusters, 0);
    for (std::int64_t n = 0; n < count; ++n)
      if (labels(p)[n] != kNone) ++counts(p)[labels(p)[n]];
  }
  // Gives empty clusters of a problem, whose counts are known, the farthest rows.
  void fill(std::int64_t p, bool moves, Tiles<T>& own) const {
    std::int32_t* members = counts(p);
    if (std::find(members, members + clusters, 0) == members + clusters) return;
    for (std::int64_t n = 0; n < count; ++n)
      far(p)[n] =
          labels(p)[n] == kNone ? T(-1) : distance(load(p, n, 1, own), centroid(p, labels(p)[n]));
    for (std::int64_t c = 0; c < clusters; ++c) {
      if (members[c] > 0) continue;
      std::int64_t best = kNone;
      for (std::int64_t n = 0; n < count; ++n) {
        if (labels(p)[n] == kNone || members[labels(p)[n]] < 2) continue;
        if (best == kNone || far(p)[n] > far(p)[best]) best = n;
      }
      if (best == kNone) return;
      --members[labels(p)[best]];
      labels(p)[best] = static_cast<std::int32_t>(c);
      members[c] = 1;
      if (moves) place(p, c, static_cast<std::int32_t>(best), own);
    }
  }
  void settle(bool last) const {
    parallel_for(problems, [&](std::int64_t p, int worker) {
      count_labels(p);
      if (params.fill_empty) fill(p, last, tiles_of(worker));
      if (last) return;
      std::int32_t *offsets = memory.offsets + p * (clusters + 1),
                   *order = memory.order + p * count;
      offsets[0] = 0;
      for (std::int64_t c = 0; c < clusters; ++c) offsets[c + 1] = offsets[c] + counts(p)[c];
      for (std::int64_t n = 0; n < count; ++n)
        if (labels(p)[n] != kNone) order[offsets[labels(p)[n]]++] = static_cast<std::int32_t>(n);
      for (std::int64_t c = clusters; c > 0; --c) offsets[c] = offsets[c - 1];
      offsets[0] = 0;
    });
  }
  void update() const {
    parallel_for(problems * clusters, [&](std::int64_t row, int worker) {
      const std::int64_t p = row / clusters, c = row % clusters;
      const std::int32_t* offsets = memory.offsets + p * (clusters + 1);
      mean_rows(rows_of(p), memory.order + p * count, offsets[c], offsets[c + 1], tiles_of(worker),
                centroid(p, c));
    });
  }
  void run() const {
    start();
    for (std::int64_t i = 0; i < params.iterations; ++i) {
      assign();
      settle(false);
      update();
    }
    assign();
    settle(true);
  }
};

}  // namespace

template <class T>
KMeansMemory<T>::KMeansMemory(Arena& arena, const TensorView& x, std::int64_t clusters)
    : tiles(make_tiles<T>(arena, x.size(3), 1)),
      reference(arena.take<T>(x.size(1) * x.size(3))),
      shifted(arena.take<T>(x.size(1) * clusters * x.size(3))),
      bias(arena.take<T>(x.size(1) * clusters)),
      far(arena.take<T>(x.size(1) * x.size(2))),
      order(arena.take<std::int32_t>(x.size(1) * x.size(2))),
      offsets(arena.take<std::int32_t>(x.size(1) * (clusters + 1))),
      rows(arena.take<std::int32_t>(x.size(1) * clusters)) {}

template <class T>
void kmeans(const KMeansParams& params, const TensorView& x, const KMeansResult& result,
            KMeansMemory<T>& memory) {
  KMeansRun<T>{params, x, result, memory}.run();
}

#define COTERIE_INSTANTIATE(T)                                                      \
  template struct KMeansMemory<T>;                                                  \
  template void kmeans(const KMeansParams&, const TensorView&, const KMeansResult&, \
                       KMeansMemory<T>&);
COTERIE_INSTANTIATE(float)
COTERIE_INSTANTIATE(double)
#undef COTERIE_INSTANTIATE

}  // namespace coterie::cpu
