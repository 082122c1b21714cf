// SPDX-License-Identifier: MIT
// The best tokens by inner product, and tokens sorted by cluster.
#include <algorithm>

#include "core/check.h"
#include "ref/ref.h"
#include "ref/selection.h"

namespace coterie::ref {

template <class T>
void select_top(const TensorView& rows, const TensorView& x, const Sequences& sequences,
                const TensorView& indices) {
  const Index num_heads = std::max(rows.size(1), x.size(1));
  for (const Place& place : make_places("select_top", sequences, x, num_heads)) {
    const Matrix<T> scores =
        inner_products(read_matrix<T>(place.item_head(rows)), read_matrix<T>(place.queries(x)));
    write_lists(place.item_head(indices), top_of_rows(scores, indices.size(3)));
  }
}

void group_by_cluster(const TensorView& labels, const Sequences& sequences, const Groups& groups) {
  const Index clusters = groups.offsets.size(2) - 1;
  fill(groups.order, [](Index) { return -1.0; });
  if (groups.inverse.present()) fill(groups.inverse, [](Index) { return -1.0; });
  for (const Place& place : make_places("group_by_cluster", sequences, labels, labels.size(1))) {
    const std::vector<Index> own = read_indices(place.queries(labels));
    for (Index label : own)
      COTERIE_CHECK(0 <= label && label < clusters, "group_by_cluster",
                    "expected labels between 0 and ", clusters - 1, "; got ", label);
    const Runs runs = runs_of(members_of(own, clusters));
    std::vector<Index> inverse(own.size());
    for (std::size_t slot = 0; slot < own.size(); ++slot)
      inverse[runs.order[slot]] = static_cast<Index>(slot);
    write_indices(place.queries(groups.order), runs.order);
    write_indices(place.item_head(groups.offsets), runs.offsets);
    if (groups.inverse.present()) write_indices(place.queries(groups.inverse), inverse);
  }
}

template void select_top<float>(const TensorView&, const TensorView&, const Sequences&,
                                const TensorView&);
template void select_top<double>(const TensorView&, const TensorView&, const Sequences&,
                                 const TensorView&);

}  // namespace coterie::ref
