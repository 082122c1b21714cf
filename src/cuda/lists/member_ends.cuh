// SPDX-License-Identifier: MIT
// What queries of member lists see of the keys there.
#pragma once

#include <cstdint>

#include "cuda/lists/slots.h"
#include "cuda/prim/tensor.cuh"

namespace coterie::cuda {

// Entries of an ascending list, -1 behind its end, that are at most `most`.
__device__ __forceinline__ int entries_up_to(const std::int32_t* list, int width, int most) {
  if (most < 0) return 0;
  int first = 0;
  for (int count = width; count > 0;) {
    const int half = count / 2;
    const bool in = static_cast<unsigned>(list[first + half]) <= static_cast<unsigned>(most);
    first += in ? half + 1 : 0;
    count = in ? count - half - 1 : half;
  }
  return first;
}

// By the thread of a query slot: `place` in the lists of an item and head, and its row.
__device__ __forceinline__ void write_member_end(const MemberEnds& args, int item, int head,
                                                 std::int64_t place, int row) {
  const std::int64_t block = static_cast<std::int64_t>(args.clusters) * args.q_width;
  const std::int64_t slot = (static_cast<std::int64_t>(item) * args.heads + head) * block + place;
  int seen = 0;
  if (row >= 0) {
    const std::int64_t list =
        (static_cast<std::int64_t>(item) * (args.heads / args.group) + head / args.group) *
            args.clusters +
        place / args.q_width;
    const int last = args.causal
                         ? row + args.spans.k.span(item).length - args.spans.q.span(item).length
                         : args.spans.k.rows;
    seen = entries_up_to(args.k_members + list * args.k_width, args.k_width, last);
  }
  if (args.ends) args.ends[slot] = seen;
  if (args.flags) args.flags[slot] = seen > 1;
}

}  // namespace coterie::cuda
