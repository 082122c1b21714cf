// SPDX-License-Identifier: MIT
// Merging attention over disjoint key sets: lse = logsumexp of the parts' lse, out = sum of
// exp(part lse - lse) part out, which is the softmax over the union.
#pragma once

#include <cstdint>
#include <vector>

namespace coterie::cpu {

template <class T>
struct Partial {
  const T* out;
  T lse;
};

// Writes `width` elements of out and returns lse; 0 and -inf when every part is empty (lse -inf).
template <class T>
T merge_row(const std::vector<Partial<T>>& parts, std::int64_t width, T* out);

}  // namespace coterie::cpu
