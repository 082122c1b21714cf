// SPDX-License-Identifier: MIT
#include "cpu/balanced.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <utility>

#include "cpu/pass.h"

namespace coterie::cpu {

template <class T>
BalancedBuffer<T>::BalancedBuffer(Arena& arena, std::int64_t tokens, std::int64_t clusters)
    : score(arena.take<T>(tokens)),
      cluster(arena.take<std::int32_t>(tokens)),
      pending(arena.take<std::int32_t>(tokens)),
      left(arena.take<std::int32_t>(tokens)),
      right(arena.take<std::int32_t>(tokens)),
      rank(arena.take<std::int32_t>(tokens)),
      top(arena.take<std::int32_t>(clusters)),
      size(arena.take<std::int32_t>(clusters)) {}

namespace {

// The heaps of all clusters share the token arrays: a token is held by one cluster at a time.
template <class T>
struct Holders {
  BalancedBuffer<T>& buffer;

  bool better(std::int32_t a, std::int32_t b) const {
    return buffer.score[a] > buffer.score[b] || (buffer.score[a] == buffer.score[b] && a < b);
  }
  std::int32_t rank(std::int32_t token) const { return token < 0 ? 0 : buffer.rank[token]; }

  // Leftist: the right spine has at most log2(size + 1) tokens, which bounds the recursion.
  std::int32_t merge(std::int32_t a, std::int32_t b) {
    if (a < 0) return b;
    if (b < 0) return a;
    if (better(a, b)) std::swap(a, b);
    buffer.right[a] = merge(buffer.right[a], b);
    if (rank(buffer.left[a]) < rank(buffer.right[a])) std::swap(buffer.left[a], buffer.right[a]);
    buffer.rank[a] = rank(buffer.right[a]) + 1;
    return a;
  }

  void hold(std::int32_t cluster, std::int32_t token) {
    buffer.left[token] = buffer.right[token] = -1;
    buffer.rank[token] = 1;
    buffer.top[cluster] = merge(buffer.top[cluster], token);
  }

  // Returns the token that is turned away, or -1.
  std::int32_t propose(std::int32_t token, std::int64_t capacity) {
    const std::int32_t cluster = buffer.cluster[token];
    if (buffer.size[cluster] < capacity) {
      ++buffer.size[cluster];
      hold(cluster, token);
      return -1;
    }
    const std::int32_t worst = buffer.top[cluster];
    if (better(worst, token)) return token;
    buffer.top[cluster] = merge(buffer.left[worst], buffer.right[worst]);
    hold(cluster, token);
    return worst;
  }
};

// The next proposal of tokens index[first ..]: the best cluster that comes after the last one
// tried; cluster -1 when there is none.
template <class T>
void next_proposals(const Rows& x, std::int64_t first, std::int64_t count, const Rows& centroids,
                    std::int64_t clusters, Tiles<T>& tiles, BalancedBuffer<T>& buffer) {
  const Kernels<T>& kernel = kernels<T>();
  kernel.load(x, first, count, T(1), tiles.q, tiles.key_row);
  T best_score[kQueryTile];
  std::int32_t best[kQueryTile];
  std::fill_n(best, count, -1);
  for (std::int64_t begin = 0; begin < clusters; begin += kKeyTile) {
    const std::int64_t columns = std::min(kKeyTile, clusters - begin);
    kernel.load_transposed(centroids, begin, columns, T(1), tiles.k_columns, kKeyTile);
    kernel.multiply({count, padded(columns), x.width, tiles.q, tiles.key_row, 1, tiles.k_columns,
                     kKeyTile, tiles.s, kKeyTile, false});
    for (std::int64_t r = 0; r < count; ++r) {
      const std::int32_t token = x.index[first + r], tried = buffer.cluster[token];
      const T last = buffer.score[token];
      const T* row = tiles.s + r * kKeyTile;
      for (std::int64_t t = 0; t < columns; ++t) {
        const std::int32_t c = static_cast<std::int32_t>(begin + t);
        const T score = std::isnan(row[t]) ? kNegInf<T> : row[t];
        if (score > last || (score == last && c <= tried)) continue;
        if (best[r] >= 0 && !(score > best_score[r])) continue;
        best[r] = c;
        best_score[r] = score;
      }
    }
  }
  for (std::int64_t r = 0; r < count; ++r) {
    const std::int32_t token = x.index[first + r];
    buffer.cluster[token] = best[r];
    if (best[r] >= 0) buffer.score[token] = best_score[r];
  }
}

}  // namespace

template <class T>
void balanced_rows(const Rows& x, std::int64_t count, const Rows& centroids, std::int64_t clusters,
                   std::int64_t capacity, Tiles<T>& tiles, BalancedBuffer<T>& buffer,
                   std::int32_t* labels) {
  std::fill_n(buffer.score, count, std::numeric_limits<T>::infinity());
  std::fill_n(buffer.cluster, count, -1);
  std::fill_n(buffer.top, clusters, -1);
  std::fill_n(buffer.size, clusters, 0);
  std::iota(buffer.pending, buffer.pending + count, 0);
  Rows listed = x;
  listed.index = buffer.pending;
  Holders<T> holders{buffer};
  for (std::int64_t left = count; left > 0;) {
    std::int64_t rejected = 0;
    for (std::int64_t first = 0; first < left; first += kQueryTile) {
      const std::int64_t num = std::min(kQueryTile, left - first);
      next_proposals(listed, first, num, centroids, clusters, tiles, buffer);
      // At most one token is turned away per proposal, so the list never overtakes its reader.
      for (std::int64_t r = 0; r < num; ++r) {
        const std::int32_t token = buffer.pending[first + r];
        if (buffer.cluster[token] < 0) continue;
        const std::int32_t out = holders.propose(token, capacity);
        if (out >= 0) buffer.pending[rejected++] = out;
      }
    }
    left = rejected;
  }
  std::copy_n(buffer.cluster, count, labels);
}

#define COTERIE_INSTANTIATE(T)                                                                    \
  template struct BalancedBuffer<T>;                                                              \
  template void balanced_rows(const Rows&, std::int64_t, const Rows&, std::int64_t, std::int64_t, \
                              Tiles<T>&, BalancedBuffer<T>&, std::int32_t*);
COTERIE_INSTANTIATE(float)
COTERIE_INSTANTIATE(double)
#undef COTERIE_INSTANTIATE

}  // namespace coterie::cpu
