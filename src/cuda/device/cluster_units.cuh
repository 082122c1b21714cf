// SPDX-License-Identifier: MIT
// Clusters cut in units, one per thread block, for the backward pass (clustered_bwd.h). The first
// unit of a cluster is found by the cluster's number, the others by the multiples of kUnitRows that
// lie inside the cluster's range of the sorted rows: there are at least as many of these.
#pragma once

#include <cstdint>

#include "cuda/device/problem.cuh"

namespace coterie::cuda {

constexpr int kUnitBits = 10, kUnitRows = 1 << kUnitBits;  // members of a unit, at most

// Members [first, first + count) of a cluster in the sorted order of its item; count 0: none.
struct ClusterUnit {
  int item, cluster, first, count;
  int size;   // members of the whole cluster
  int part;   // number of the unit in its cluster
  int place;  // of the unit in scratch memory
  ItemSpan span;
};

// Places: a first unit has the number of its cluster, (item * H + head) * clusters + cluster; the
// others follow, by head and multiple.
struct ClusterUnits {
  int items, heads, clusters, rows;  // rows: of a batch entry
  int more;                          // multiples of kUnitRows below the rows of all batch entries

  __host__ __device__ int blocks() const { return items * clusters + more; }  // of a head
  __host__ __device__ int first_units() const { return items * heads * clusters; }
  __host__ __device__ int places() const { return first_units() + heads * more; }

  __device__ int row(int item, int head, int cluster) const {
    return (item * heads + head) * clusters + cluster;
  }
  // Multiples up to row `at` of an item's sorted rows.
  __device__ int multiples(const ItemSpan& span, int at) const {
    return static_cast<int>((static_cast<std::int64_t>(span.batch) * rows + span.begin + at) >>
                            kUnitBits);
  }
  // Place of unit 1 of a cluster that starts at row `first`, which unit 2 follows.
  __device__ int second_place(int head, const ItemSpan& span, int first) const {
    return first_units() + head * more + multiples(span, first);
  }

  // Unit of block `number` of a head. labels, order: (B, H, rows); offsets (items, H, clusters +
  // 1).
  __device__ ClusterUnit find(const SequenceSpans& spans, const std::int32_t* offsets,
                              const std::int32_t* labels, const std::int32_t* order, int head,
                              int number) const {
    const int extra = number - items * clusters;
    ClusterUnit unit{};
    int multiple = 0;
    if (extra < 0) {
      unit.item = items > 1 ? number / clusters : 0;
      unit.cluster = number - unit.item * clusters;
      unit.span = spans.span(unit.item);
    } else {
      multiple = extra + 1;
      const std::int64_t at = static_cast<std::int64_t>(multiple) << kUnitBits;
      const int batch = static_cast<int>(at / rows), r = static_cast<int>(at % rows);
      unit.item = spans.item_of(batch, r, items);
      unit.part = 1;  // of nothing, where no item has this row
      if (unit.item < 0) return unit;
      unit.span = spans.span(unit.item);
      const std::int64_t token = (static_cast<std::int64_t>(batch) * heads + head) * rows;
      unit.cluster = labels[token + unit.span.begin + order[token + r]];
    }
    const int own = row(unit.item, head, unit.cluster);
    const std::int32_t* offset =
        offsets + (static_cast<std::int64_t>(unit.item) * heads + head) * (clusters + 1) +
        unit.cluster;
    unit.first = offset[0];
    unit.size = offset[1] - unit.first;
    unit.count = min(unit.size, kUnitRows);
    unit.place = own;
    if (extra < 0) return unit;
    unit.part = multiple - multiples(unit.span, unit.first);
    unit.place = second_place(head, unit.span, unit.first) + unit.part - 1;
    const int skipped = unit.part << kUnitBits;
    unit.first += skipped;
    unit.count = unit.part > 0 ? min(max(unit.size - skipped, 0), kUnitRows) : 0;
    return unit;
  }
};

}  // namespace coterie::cuda
