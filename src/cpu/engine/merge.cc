// SPDX-License-Identifier: MIT
#include "cpu/engine/merge.h"

#include <algorithm>
#include <cmath>

#include "cpu/engine/tile_steps.h"

namespace coterie::cpu {

template <class T>
T merge_row(const std::vector<Partial<T>>& parts, std::int64_t width, T* out) {
  std::fill_n(out, width, T(0));
  T largest = kNegInf<T>;
  for (const Partial<T>& part : parts) largest = std::max(largest, part.lse);
  T sum = 0;
  for (const Partial<T>& part : parts)
    if (part.lse != kNegInf<T>) sum += std::exp(part.lse - largest);
  if (sum == T(0)) return kNegInf<T>;
  const T lse = largest + std::log(sum);
  for (const Partial<T>& part : parts) {
    if (part.lse == kNegInf<T>) continue;
    // Not exp(part.lse - lse), so that the weights of a row's parts sum to 1.
    const T weight = std::exp(part.lse - largest) / sum;
    for (std::int64_t d = 0; d < width; ++d) out[d] += weight * part.out[d];
  }
  return lse;
}

template float merge_row(const std::vector<Partial<float>>&, std::int64_t, float*);
template double merge_row(const std::vector<Partial<double>>&, std::int64_t, double*);

}  // namespace coterie::cpu
