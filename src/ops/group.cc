// SPDX-License-Identifier: MIT

#include "cpu/cluster/group.h"
#include "core/check.h"
#include "core/items.h"
#include "core/parallel.h"
#include "cpu/engine/rows.h"
#include "ops/call.h"
#include "ops/parts.h"

namespace coterie {

void group_by_cluster(const TensorView& labels, const Sequences& sequences, const Groups& groups,
                      const Workspace&) {
  const char* op = "group_by_cluster";
  COTERIE_CHECK(labels.rank == 3, op, "expected labels with 3 dimensions; got ", describe(labels));
  const std::int64_t batches = labels.size(0), heads = labels.size(1), rows = labels.size(2);
  ops::check_dense(op, "labels", labels, DType::i32, {batches, heads, rows});
  ops::check_dense(op, "order", groups.order, DType::i32, {batches, heads, rows});
  if (groups.inverse.present())
    ops::check_dense(op, "inverse", groups.inverse, DType::i32, {batches, heads, rows});
  const std::vector<Span> spans = make_spans(op, sequences, batches, rows);
  const std::int64_t items = static_cast<std::int64_t>(spans.size());
  COTERIE_CHECK(groups.offsets.rank == 3 && groups.offsets.size(2) >= 2, op,
                "expected offsets of shape (items, heads, clusters + 1); got ",
                describe(groups.offsets));
  const std::int64_t clusters = groups.offsets.size(2) - 1;
  ops::check_dense(op, "offsets", groups.offsets, DType::i32, {items, heads, clusters + 1});
  cpu::fill_padding(groups.order, spans, -1);
  if (groups.inverse.present()) cpu::fill_padding(groups.inverse, spans, -1);
  parallel_for(items * heads, [&](std::int64_t problem, int) {
    const std::int64_t item = problem / heads, head = problem % heads;
    const Span& span = spans[static_cast<std::size_t>(item)];
    const std::int32_t* label = cpu::span_at<std::int32_t>(labels, span, head);
    for (std::int64_t i = 0; i < span.length; ++i)
      COTERIE_CHECK(0 <= label[i] && label[i] < clusters, op, "expected labels in [0, ", clusters,
                    "); got ", label[i], " at token ", i, " of item ", item, ", head ", head);
    std::int32_t* order = cpu::span_at<std::int32_t>(groups.order, span, head);
    cpu::group_rows(label, span.length, clusters, order,
                    cpu::block_at<std::int32_t>(groups.offsets, item, head));
    if (!groups.inverse.present()) return;
    std::int32_t* inverse = cpu::span_at<std::int32_t>(groups.inverse, span, head);
    for (std::int64_t slot = 0; slot < span.length; ++slot)
      inverse[order[slot]] = static_cast<std::int32_t>(slot);
  });
}

}  // namespace coterie
