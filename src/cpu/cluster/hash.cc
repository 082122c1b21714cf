// SPDX-License-Identifier: MIT
#include "cpu/cluster/hash.h"

#include <algorithm>

#include "core/half.h"
#include "coterie/random.h"
#include "cpu/engine/rows.h"

namespace coterie::cpu {

namespace {

constexpr std::int64_t kPairsPerPlane = 16;

// Reads one row as T.
template <class T>
void read_row(const Rows& rows, std::int64_t row, T* values) {
  kernels<T>().load(rows, row, 1, T(1), values, rows.width);
}

}  // namespace

void isotropic_planes(std::uint64_t seed, bool bias, std::int64_t bits, std::int64_t width,
                      float* planes, float* thresholds) {
  const RandomStream plane{seed, RandomUse::hash_plane, 0};
  const RandomStream threshold{seed, RandomUse::hash_threshold, 0};
  // bf16 entries make products with bf16 inputs exact, so that all back ends agree on the codes.
  for (std::int64_t e = 0; e < bits * width; ++e)
    planes[e] =
        to_float(to_bf16(static_cast<float>(random_normal(plane, static_cast<std::uint64_t>(e)))));
  for (std::int64_t r = 0; r < bits; ++r)
    thresholds[r] =
        bias ? static_cast<float>(random_normal(threshold, static_cast<std::uint64_t>(r))) : 0.0f;
}

template <class T>
void key_difference_planes(const AttentionCall& call, std::int64_t item, std::int64_t kv_head,
                           std::int64_t bits, float* planes) {
  const Span& span = call.item(item).k;
  std::fill_n(planes, bits * call.Dk, 0.0f);
  if (span.length == 0) return;
  const Rows keys = span_rows(call.k, span, kv_head);
  const RandomStream pairs{
      call.inputs.seed, RandomUse::key_pair,
      call.inputs.part.stream(item * call.key_heads + kv_head, call.key_heads)};
  const auto draw = [&](std::int64_t index) {
    return random_below(pairs, static_cast<std::uint64_t>(index),
                        static_cast<std::uint32_t>(span.length));
  };
  std::vector<T> a(static_cast<std::size_t>(call.Dk)), b(a.size()), sum(a.size());
  for (std::int64_t r = 0; r < bits; ++r) {
    std::fill(sum.begin(), sum.end(), T(0));
    for (std::int64_t m = 0; m < kPairsPerPlane; ++m) {
      read_row(keys, draw((r * kPairsPerPlane + m) * 2), a.data());
      read_row(keys, draw((r * kPairsPerPlane + m) * 2 + 1), b.data());
      for (std::size_t d = 0; d < sum.size(); ++d) sum[d] += a[d] - b[d];
    }
    std::copy(sum.begin(), sum.end(), planes + r * call.Dk);
  }
}

template <class T>
void mean_query_thresholds(const AttentionCall& call, std::int64_t item, std::int64_t head,
                           std::int64_t bits, const float* planes, T* mean, float* thresholds) {
  const Span& span = call.item(item).q;
  const Rows queries = span_rows(call.inputs.q, span, head);
  std::fill_n(thresholds, bits, 0.0f);
  if (span.length == 0) return;
  std::vector<double> sum(static_cast<std::size_t>(call.Dk));
  for (std::int64_t i = 0; i < span.length; ++i) {
    read_row(queries, i, mean);
    for (std::size_t d = 0; d < sum.size(); ++d) sum[d] += mean[d];
  }
  for (std::int64_t r = 0; r < bits; ++r) {
    double projection = 0;
    for (std::size_t d = 0; d < sum.size(); ++d)
      projection += planes[r * call.Dk + static_cast<std::int64_t>(d)] * sum[d];
    thresholds[r] = static_cast<float>(projection / static_cast<double>(span.length));
  }
}

template <class T>
void hash_tile(const Rows& x, std::int64_t first, std::int64_t count, std::int64_t bits,
               const float* planes, const float* thresholds, Tiles<T>& tiles,
               std::uint64_t* codes) {
  const Kernels<T>& kernel = kernels<T>();
  kernel.load(x, first, count, T(1), tiles.q, tiles.key_row);
  kernel.load_transposed(memory_rows(const_cast<float*>(planes), x.width), 0, bits, T(1),
                         tiles.k_columns, kKeyTile);
  kernel.multiply({count, padded(bits), x.width, tiles.q, tiles.key_row, 1, tiles.k_columns,
                   kKeyTile, tiles.s, kKeyTile, false});
  for (std::int64_t i = 0; i < count; ++i) {
    std::uint64_t code = 0;
    for (std::int64_t r = 0; r < bits; ++r) {
      const bool bit = tiles.s[i * kKeyTile + r] > static_cast<T>(thresholds[r]);
      code |= static_cast<std::uint64_t>(bit) << r;
    }
    codes[i] = code;
  }
}

#define COTERIE_INSTANTIATE(T)                                                                 \
  template void key_difference_planes<T>(const AttentionCall&, std::int64_t, std::int64_t,     \
                                         std::int64_t, float*);                                \
  template void mean_query_thresholds(const AttentionCall&, std::int64_t, std::int64_t,        \
                                      std::int64_t, const float*, T*, float*);                 \
  template void hash_tile(const Rows&, std::int64_t, std::int64_t, std::int64_t, const float*, \
                          const float*, Tiles<T>&, std::uint64_t*);
COTERIE_INSTANTIATE(float)
COTERIE_INSTANTIATE(double)
#undef COTERIE_INSTANTIATE

}  // namespace coterie::cpu
