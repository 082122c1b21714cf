// SPDX-License-Identifier: MIT

#include <algorithm>

#include "core/check.h"
#include "core/dispatch.h"
#include "core/items.h"
#include "core/parallel.h"
#include "cpu/engine/rows.h"
#include "cpu/engine/top.h"
#include "ops/call.h"
#include "ops/parts.h"
#include "ops/scratch.h"

namespace coterie {

void select_top(const TensorView& rows, const TensorView& x, const Sequences& sequences,
                const TensorView& indices, const Workspace&) {
  const char* op = "select_top";
  ops::check_rows(op, "x", x, 4);
  COTERIE_CHECK(is_floating(x.dtype), op, "expected x of a floating type; got ", describe(x));
  COTERIE_CHECK(rows.rank == 4, op, "expected rows with 4 dimensions; got ", describe(rows));
  const std::vector<Span> spans = make_spans(op, sequences, x.size(0), x.size(2));
  const std::int64_t items = static_cast<std::int64_t>(spans.size()), num_rows = rows.size(2);
  const std::int64_t row_heads = rows.size(1), x_heads = x.size(1);
  const std::int64_t heads = std::max(row_heads, x_heads);
  COTERIE_CHECK((rows.size(0) == 1 || rows.size(0) == items) && row_heads >= 1 && x_heads >= 1 &&
                    heads % row_heads == 0 && heads % x_heads == 0,
                op, "expected rows for 1 or ", items,
                " items, with a number of heads that divides or is a "
                "multiple of the ",
                x_heads, " heads of x; got ", describe(rows));
  ops::check_dense(op, "rows", rows, accumulator_dtype(x.dtype),
                   {rows.size(0), row_heads, num_rows, x.size(3)});
  COTERIE_CHECK(indices.rank == 4 && indices.size(3) >= 1, op,
                "expected indices of shape (items, heads, rows, count); got ", describe(indices));
  const std::int64_t count = indices.size(3);
  ops::check_dense(op, "indices", indices, DType::i32, {items, heads, num_rows, count});
  dispatch_accumulator(x.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    ops::Scratch memory;
    auto [tiles, buffers] = ops::take_scratch(memory, [&](Arena& arena) {
      return std::make_pair(cpu::make_tiles<T>(arena, x.size(3), 1),
                            cpu::make_top_buffers<T>(arena, count));
    });
    const std::int64_t tiles_per_head = (num_rows + cpu::kQueryTile - 1) / cpu::kQueryTile;
    parallel_for(items * heads * tiles_per_head, [&, &tiles = tiles, &buffers = buffers](
                                                     std::int64_t task, int worker) {
      const std::int64_t first = task % tiles_per_head * cpu::kQueryTile;
      const std::int64_t head = task / tiles_per_head % heads, item = task / tiles_per_head / heads;
      const Span& span = spans[static_cast<std::size_t>(item)];
      cpu::Segment<T> segment;
      segment.q = cpu::memory_rows(
          cpu::block_at<T>(rows, rows.size(0) == 1 ? 0 : item, head / (heads / row_heads)),
          x.size(3));
      segment.k = cpu::span_rows(x, span, head / (heads / x_heads));
      segment.num_queries = num_rows;
      segment.num_keys = span.length;
      segment.rule.ranges = [&](std::int64_t, std::int64_t n, cpu::Range* ranges) {
        std::fill_n(ranges, n, cpu::Range{0, span.length});
      };
      cpu::select_tile(segment, first, std::min(cpu::kQueryTile, num_rows - first),
                       tiles[static_cast<std::size_t>(worker)],
                       buffers[static_cast<std::size_t>(worker)],
                       cpu::block_at<std::int32_t>(indices, item, head) + first * count);
    });
  });
}

}  // namespace coterie
