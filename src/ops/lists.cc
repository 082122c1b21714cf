// SPDX-License-Identifier: MIT
#include "ops/lists.h"

#include <string>

#include "core/check.h"
#include "cpu/engine/rows.h"
#include "ops/call.h"

namespace coterie::ops {

namespace {

// What a message says of where it found something.
struct Place {
  const AttentionCall& call;
  const char* side;
  std::size_t item;
  std::int64_t head;
  std::int64_t rows;  // of the item
};

void check_offsets(const Place& at, const std::int32_t* offsets, std::int64_t clusters) {
  COTERIE_CHECK(offsets[0] == 0 && offsets[clusters] == at.rows, at.call.op,
                "expected the offsets of the ", at.side, " to run from 0 to ", at.rows,
                ", the rows of item ", at.item, "; got ", offsets[0], " to ", offsets[clusters],
                " in head ", at.head);
  for (std::int64_t c = 0; c < clusters; ++c)
    COTERIE_CHECK(offsets[c] <= offsets[c + 1], at.call.op, "expected the offsets of the ", at.side,
                  " to ascend; got ", offsets[c], " then ", offsets[c + 1], " in item ", at.item,
                  ", head ", at.head);
}

void check_permutation(const Place& at, const std::int32_t* order) {
  std::vector<bool> seen(static_cast<std::size_t>(at.rows));
  for (std::int64_t slot = 0; slot < at.rows; ++slot) {
    const std::int32_t row = order[slot];
    COTERIE_CHECK(0 <= row && row < at.rows && !seen[static_cast<std::size_t>(row)], at.call.op,
                  "expected the order of the ", at.side, " to contain each row of [0, ", at.rows,
                  ") once; got ", row, " in slot ", slot, " of item ", at.item, ", head ", at.head);
    seen[static_cast<std::size_t>(row)] = true;
  }
}

// For offsets that were checked.
void check_ascending_runs(const Place& at, const std::int32_t* order, const std::int32_t* offsets,
                          std::int64_t clusters) {
  for (std::int64_t c = 0; c < clusters; ++c)
    for (std::int64_t slot = offsets[c] + 1; slot < offsets[c + 1]; ++slot)
      COTERIE_CHECK(order[slot - 1] < order[slot], at.call.op, "expected the ", at.side,
                    " of a cluster to ascend; got ", order[slot - 1], " then ", order[slot],
                    " in slot ", slot, " of item ", at.item, ", head ", at.head);
}

void check_list(const Place& at, const std::int32_t* list, std::int64_t width) {
  for (std::int64_t t = 0; t < width; ++t) {
    const bool ends = list[t] == -1;
    const bool goes_on = 0 <= list[t] && list[t] < at.rows &&
                         (t == 0 || (list[t - 1] != -1 && list[t - 1] < list[t]));
    COTERIE_CHECK(ends || goes_on, at.call.op, "expected lists of ", at.side,
                  " to ascend within [0, ", at.rows, ") and to end with -1s; got ", list[t],
                  " at index ", t, " of a list of item ", at.item, ", head ", at.head);
  }
}

}  // namespace

std::int64_t check_group_shapes(const AttentionCall& call, const char* side, const Groups& groups,
                                std::int64_t heads, std::int64_t rows) {
  const std::string of = " of the " + std::string(side);
  check_dense(call.op, ("the order" + of).c_str(), groups.order, DType::i32, {call.B, heads, rows});
  COTERIE_CHECK(groups.offsets.rank == 3 && groups.offsets.size(2) >= 2, call.op,
                "expected the offsets", of, " to have shape (items, heads, clusters + 1); got ",
                describe(groups.offsets));
  const std::int64_t clusters = groups.offsets.size(2) - 1;
  check_dense(call.op, ("the offsets" + of).c_str(), groups.offsets, DType::i32,
              {call.num_items(), heads, clusters + 1});
  return clusters;
}

std::int64_t check_list_shape(const AttentionCall& call, const char* side, const TensorView& lists,
                              std::int64_t heads) {
  const std::string name = "the lists of " + std::string(side);
  COTERIE_CHECK(lists.rank == 4, call.op, "expected ", name,
                " to have shape (items, heads, lists, size); got ", describe(lists));
  check_dense(call.op, name.c_str(), lists, DType::i32,
              {call.num_items(), heads, lists.size(2), lists.size(3)});
  return lists.size(2);
}

void check_groups(const AttentionCall& call, const char* side, const Groups& groups,
                  const std::vector<Span>& spans, bool ascending) {
  const std::int64_t heads = groups.order.size(1), clusters = groups.offsets.size(2) - 1;
  for (std::size_t item = 0; item < spans.size(); ++item)
    for (std::int64_t head = 0; head < heads; ++head) {
      const Place at{call, side, item, head, spans[item].length};
      const auto* order = cpu::span_at<const std::int32_t>(groups.order, spans[item], head);
      const auto* offsets =
          cpu::block_at<const std::int32_t>(groups.offsets, static_cast<std::int64_t>(item), head);
      check_offsets(at, offsets, clusters);
      check_permutation(at, order);
      if (ascending) check_ascending_runs(at, order, offsets, clusters);
    }
}

void check_lists(const AttentionCall& call, const char* side, const TensorView& lists,
                 const std::vector<Span>& spans) {
  const std::int64_t heads = lists.size(1), count = lists.size(2), width = lists.size(3);
  for (std::size_t item = 0; item < spans.size(); ++item)
    for (std::int64_t head = 0; head < heads; ++head) {
      const auto* list =
          cpu::block_at<const std::int32_t>(lists, static_cast<std::int64_t>(item), head);
      for (std::int64_t c = 0; c < count; ++c)
        check_list({call, side, item, head, spans[item].length}, list + c * width, width);
    }
}

}  // namespace coterie::ops
