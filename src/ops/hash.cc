// SPDX-License-Identifier: MIT

#include "cpu/cluster/hash.h"
#include "core/check.h"
#include "core/dispatch.h"
#include "core/items.h"
#include "core/parallel.h"
#include "cpu/engine/rows.h"
#include "ops/call.h"
#include "ops/parts.h"
#include "ops/scratch.h"

namespace coterie {

namespace {

// Planes (a, b, bits, width) and thresholds (a', b', bits); returns bits.
std::int64_t check_planes(const char* op, const TensorView& planes, const TensorView& thresholds) {
  COTERIE_CHECK(planes.rank == 4, op, "expected planes with 4 dimensions; got ", describe(planes));
  COTERIE_CHECK(thresholds.rank == 3, op, "expected thresholds with 3 dimensions; got ",
                describe(thresholds));
  const std::int64_t bits = planes.size(2);
  COTERIE_CHECK(1 <= bits && bits <= kMaxHashBits, op, "expected 1 to ", kMaxHashBits,
                " bits; got ", bits);
  ops::check_dense(op, "planes", planes, DType::f32,
                   {planes.size(0), planes.size(1), bits, planes.size(3)});
  ops::check_dense(op, "thresholds", thresholds, DType::f32,
                   {thresholds.size(0), thresholds.size(1), bits});
  return bits;
}

// Index of (item, head) in a table of 1 or `items` rows and a divisor of `heads` columns.
std::int64_t table_row(const char* op, const char* name, const TensorView& table,
                       std::int64_t items, std::int64_t heads, std::int64_t item,
                       std::int64_t head) {
  const std::int64_t rows = table.size(0), columns = table.size(1);
  COTERIE_CHECK((rows == 1 || rows == items) && columns >= 1 && heads % columns == 0, op,
                "expected ", name, " for 1 or ", items,
                " items and a number of heads that divides ", heads, "; got ", describe(table));
  return (rows == 1 ? 0 : item) * columns + head / (heads / columns);
}

}  // namespace

void isotropic_planes(std::uint64_t seed, bool bias, const TensorView& planes,
                      const TensorView& thresholds, const Workspace&) {
  const char* op = "isotropic_planes";
  const std::int64_t bits = check_planes(op, planes, thresholds);
  ops::check_shape(op, "planes", planes, {1, 1, bits, planes.size(3)});
  ops::check_shape(op, "thresholds", thresholds, {1, 1, bits});
  cpu::isotropic_planes(seed, bias, bits, planes.size(3), static_cast<float*>(planes.data),
                        static_cast<float*>(thresholds.data));
}

void key_difference_planes(const AttentionInputs& inputs, const TensorView& planes,
                           const TensorView& thresholds, const Workspace&) {
  const char* op = "key_difference_planes";
  const AttentionCall call = ops::make_part_call(op, inputs);
  const std::int64_t bits = check_planes(op, planes, thresholds);
  ops::check_shape(op, "planes", planes, {call.num_items(), call.key_heads, bits, call.Dk});
  ops::check_shape(op, "thresholds", thresholds, {call.num_items(), call.H, bits});
  const std::int64_t group = call.H / call.key_heads;
  dispatch_accumulator(inputs.q.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    parallel_for(call.num_items() * call.key_heads, [&](std::int64_t problem, int) {
      const std::int64_t item = problem / call.key_heads, kv_head = problem % call.key_heads;
      float* plane = cpu::block_at<float>(planes, item, kv_head);
      cpu::key_difference_planes<T>(call, item, kv_head, bits, plane);
      std::vector<T> mean(static_cast<std::size_t>(cpu::padded(call.Dk)));
      for (std::int64_t head = kv_head * group; head < (kv_head + 1) * group; ++head)
        cpu::mean_query_thresholds(call, item, head, bits, plane, mean.data(),
                                   cpu::block_at<float>(thresholds, item, head));
    });
  });
}

void hash_codes(const TensorView& x, const Sequences& sequences, const TensorView& planes,
                const TensorView& thresholds, const TensorView& codes, const Workspace&) {
  const char* op = "hash_codes";
  ops::check_rows(op, "x", x, 4);
  COTERIE_CHECK(is_floating(x.dtype), op, "expected x of a floating type; got ", describe(x));
  const std::int64_t bits = check_planes(op, planes, thresholds);
  const std::int64_t heads = x.size(1), rows = x.size(2), width = x.size(3);
  COTERIE_CHECK(planes.size(3) == width, op, "expected planes of width ", width, "; got ",
                describe(planes));
  ops::check_dense(op, "codes", codes, DType::u64, {x.size(0), heads, rows});
  const std::vector<Span> spans = make_spans(op, sequences, x.size(0), rows);
  const std::int64_t items = static_cast<std::int64_t>(spans.size());
  cpu::fill_padding(codes, spans, 0);
  dispatch_accumulator(x.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    ops::Scratch memory;
    std::vector<cpu::Tiles<T>> tiles = ops::take_scratch(
        memory, [&](Arena& arena) { return cpu::make_tiles<T>(arena, width, 1); });
    parallel_for(items * heads, [&](std::int64_t problem, int worker) {
      const std::int64_t item = problem / heads, head = problem % heads;
      const Span& span = spans[static_cast<std::size_t>(item)];
      const float* plane = static_cast<const float*>(planes.data) +
                           table_row(op, "planes", planes, items, heads, item, head) * bits * width;
      const float* threshold =
          static_cast<const float*>(thresholds.data) +
          table_row(op, "thresholds", thresholds, items, heads, item, head) * bits;
      std::uint64_t* out = cpu::span_at<std::uint64_t>(codes, span, head);
      for (std::int64_t first = 0; first < span.length; first += cpu::kQueryTile)
        cpu::hash_tile(cpu::span_rows(x, span, head), first,
                       std::min(cpu::kQueryTile, span.length - first), bits, plane, threshold,
                       tiles[static_cast<std::size_t>(worker)], out + first);
    });
  });
}

}  // namespace coterie
