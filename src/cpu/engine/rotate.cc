// SPDX-License-Identifier: MIT
#include "cpu/engine/rotate.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "core/parallel.h"
#include "cpu/engine/rows.h"

namespace coterie::cpu {

// One task has the sines and cosines of a few positions, and turns these rows of all heads.
template <class T>
void rotate_rows(const TensorView& x, const Rotation& rotation, const TensorView& out) {
  constexpr std::int64_t kRows = 8;
  const std::int64_t N = x.size(2), D = x.size(3), half = D / 2, tile_row = padded(D);
  const Kernels<T>& kernel = kernels<T>();
  const double step = -2.0 * std::log(rotation.base) / static_cast<double>(D);
  parallel_for((N + kRows - 1) / kRows, [&](std::int64_t task, int) {
    const std::int64_t first = task * kRows, count = std::min(kRows, N - first);
    std::vector<T> waves(static_cast<std::size_t>(count * D));  // D/2 cosines, then D/2 sines
    std::vector<T> tile(static_cast<std::size_t>(count * tile_row));
    for (std::int64_t r = 0; r < count; ++r)
      for (std::int64_t d = 0; d < half; ++d) {
        const double angle = static_cast<double>(rotation.first + first + r) *
                             std::exp(static_cast<double>(d) * step);
        T* wave = waves.data() + r * D + d;
        wave[0] = static_cast<T>(std::cos(angle));
        wave[half] = static_cast<T>(rotation.inverse ? -std::sin(angle) : std::sin(angle));
      }
    for (std::int64_t b = 0; b < x.size(0); ++b)
      for (std::int64_t h = 0; h < x.size(1); ++h) {
        const Span span{b, 0, N};
        kernel.load(span_rows(x, span, h), first, count, T(1), tile.data(), tile_row);
        for (std::int64_t r = 0; r < count; ++r) {
          const T* wave = waves.data() + r * D;
          T* row = tile.data() + r * tile_row;
          for (std::int64_t d = 0; d < half; ++d) {
            const T low = row[d], high = row[d + half];
            row[d] = low * wave[d] - high * wave[d + half];
            row[d + half] = low * wave[d + half] + high * wave[d];
          }
        }
        kernel.store(span_rows(out, span, h), first, count, T(1), tile.data(), tile_row);
      }
  });
}

template void rotate_rows<float>(const TensorView&, const Rotation&, const TensorView&);
template void rotate_rows<double>(const TensorView&, const Rotation&, const TensorView&);

}  // namespace coterie::cpu
