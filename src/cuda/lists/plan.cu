// SPDX-License-Identifier: MIT
// Host-side decisions about calls of lists.
#include "cuda/lists/plan.h"

#include <algorithm>

#include "core/types.h"
#include "cuda/launch/device.h"

namespace coterie::cuda {
namespace {

constexpr std::int64_t kMost = std::int64_t{1} << 30;

int split(std::int64_t whole, std::int64_t parts) {
  return static_cast<int>((whole + parts - 1) / parts);
}
int tiles_of(std::int64_t ranks) { return split(std::max(ranks, std::int64_t{0}), kStreamRows); }

// Slots per item and head.
std::int64_t head_slots(const ListSide& side, std::int64_t lists, std::int64_t rows) {
  switch (side.layout) {
    case ListLayout::runs:
      return rows * side.per_row;
    case ListLayout::members:
      return lists * side.width;
    case ListLayout::rounds:
      return lists * rows;
    default:
      return rows;
  }
}
std::int64_t list_slots(const AttentionCall& call, const ListCall& lists, const ListSide& side,
                        std::int64_t heads, std::int64_t rows) {
  const std::int64_t items = side.layout == ListLayout::members ? call.num_items() : call.B;
  return items * heads * head_slots(side, lists.lists, rows);
}

SlotSide slot_side(const AttentionCall& call, const ListCall& lists, bool keys) {
  const ListSide& side = keys ? lists.keys : lists.queries;
  SlotSide slots;
  slots.spans = keys ? item_spans(call.inputs).k : item_spans(call.inputs).q;
  slots.layout = side.layout;
  slots.index = side.index;
  slots.offsets = side.offsets;
  slots.items = static_cast<int>(call.num_items());
  slots.heads = static_cast<int>(keys ? call.key_heads : call.H);
  slots.index_heads = side.index ? side.index_heads : slots.heads;
  slots.heads_of_index = slots.heads / slots.index_heads;
  slots.lists = static_cast<int>(lists.lists);
  slots.per_row = side.per_row;
  slots.width = static_cast<int>(side.width);
  slots.head_slots = head_slots(side, lists.lists, slots.spans.rows);
  return slots;
}

ListTiles list_tiles(const SlotSide& side, int bits) {
  const std::int64_t rows = side.spans.rows, lists = side.lists, items = side.items;
  const bool residues = side.layout == ListLayout::residues;
  ListTiles tiles{};
  tiles.bits = bits;
  if (side.layout == ListLayout::runs) {
    tiles.runs =
        query_tiles(side.spans.cu_seqlens != nullptr, items, rows, side.per_row, lists, bits);
    tiles.total = tiles.runs.total;
  } else if (side.layout == ListLayout::members || !side.spans.cu_seqlens) {
    const std::int64_t ranks = side.layout == ListLayout::members ? side.width
                               : residues                         ? split(rows, lists)
                                                                  : rows;
    tiles.per_list = split(ranks, 1 << bits);
    tiles.total = static_cast<int>(items * lists * tiles.per_list);
  } else {
    const std::int64_t unit = (residues ? lists : 1) << bits;
    tiles.unit = static_cast<int>(std::min(unit, rows + 1));
    tiles.total = static_cast<int>(items * lists + lists * (rows / tiles.unit));
  }
  return tiles;
}

ListProblem list_problem(const AttentionCall& call, const ListCall& lists) {
  ListProblem problem{};
  problem.q = slot_side(call, lists, false);
  problem.k = slot_side(call, lists, true);
  problem.group = static_cast<int>(call.H / call.key_heads);
  problem.value_group = static_cast<int>(call.H / call.value_heads);
  problem.offset_rows = call.causal;
  problem.rule = lists.ranges.rule;
  problem.causal = lists.ranges.causal;
  // Larger values see no more, even with half a window.
  const std::int64_t most = 2 * (call.N * lists.queries.per_row + call.S) + 1;
  const auto clipped = [&](std::int64_t value) {
    return static_cast<int>(std::min({value, most, std::int64_t{0x7fffffff}}));
  };
  problem.window = clipped(lists.ranges.window);
  problem.before = clipped(lists.ranges.before);
  problem.after = clipped(lists.ranges.after);
  problem.ends = lists.ranges.ends;
  problem.causal_rows = lists.filters.causal_rows;
  problem.drop_own = lists.filters.drop_own;
  problem.drop_by_slot = lists.filters.drop_by_slot;
  problem.laplace = lists.weighting == ListWeighting::laplace;
  if (const TensorView& mask = lists.filters.mask; mask.present())
    problem.mask = {static_cast<const std::uint8_t*>(mask.data), mask.stride(0), mask.stride(1),
                    mask.stride(2), mask.stride(3)};
  problem.scale = lists.scale;
  problem.head_scale = lists.head_scale;
  problem.q_stats = lists.q_stats;
  problem.k_stats = lists.k_stats;
  problem.width = static_cast<int>(call.Dk);
  problem.dropout = call.dropout;
  return problem;
}

ListForm list_form(const ListCall& lists) {
  if (lists.filters.any() || lists.weighting == ListWeighting::laplace) return ListForm::general;
  return lists.q_stats || lists.k_stats ? ListForm::normalised : ListForm::plain;
}

// Rows usable by warpgroup products: copied and written 16 bytes at a time.
bool aligned(const TensorView& rows) { return tensor4<const Bf16>(rows).aligned; }
// ... and less than 2 GiB apart.
bool near(const TensorView& rows) { return aligned(rows) && rows.stride(2) < kMost / 2; }

// Whether warpgroup products support a call: ranks, places and slots are ints there. They have no
// dropout.
bool hopper_takes(const AttentionCall& call, const ListCall& lists) {
  return dtype_bytes(call.inputs.q.dtype) == 2 && on_hopper() && !call.dropout.on() &&
         list_form(lists) != ListForm::general && call.N * lists.queries.per_row < kMost / 4 &&
         call.S * lists.keys.per_row < kMost / 4 && list_query_slots(call, lists) < kMost &&
         list_key_slots(call, lists) < kMost && call.H <= 0xffff && call.B <= 0xffff &&
         near(call.inputs.q) && near(call.k) && near(call.inputs.v);
}

// Upper bound of the tiles of the other side that 64 rows use; for ends, and for lists of unknown
// lengths, an estimate.
int span_tiles(const ListProblem& problem, const SlotSide& other) {
  std::int64_t ranks = other.spans.rows;
  if (other.layout == ListLayout::residues) ranks = split(ranks, other.lists);
  if (other.layout == ListLayout::members) ranks = other.width;
  const std::int64_t window = problem.window;
  if (problem.rule == ListRule::sliding || problem.rule == ListRule::earlier ||
      problem.rule == ListRule::ends)
    ranks = std::min(ranks, kStreamRows + window);
  if (problem.rule == ListRule::blocked)
    ranks = std::min(ranks, kStreamRows + window * (1 + problem.before + problem.after));
  return split(ranks, kStreamRows);
}

// Whether steps are cut by work: for runs where every head has its own lists. Only the normalised
// form needs it, because all runs have row statistics.
bool cut_by_work(ListForm form, const ListProblem& problem, const SlotSide& side, int steps,
                 int blocks) {
  const auto own_lists = [](const SlotSide& x) { return x.index_heads == x.heads; };
  return form != ListForm::plain && side.layout == ListLayout::runs && own_lists(problem.q) &&
         own_lists(problem.k) &&
         static_cast<std::int64_t>(side.lists) * side.items * side.heads <= kCutLists &&
         blocks <= kCutBlocks && steps < 1 << kStepBits;
}

// unit: steps that a block takes at once in rounds.
StreamRun stream_run(const ListProblem& problem, ListForm form, const SlotSide& side,
                     const ListTiles& tiles, bool rounds, int unit) {
  StreamRun run{};
  run.heads = side.heads;
  run.of_head = tiles.total;
  run.rounds = rounds;
  if (tiles.total == 0) return run;
  const int units = split(tiles.total, unit) * side.heads, places = multiprocessors();
  const int waves = split(units, places * (kStreamPlan / unit));
  const int of_block = split(units, places * waves), most = std::min(places * waves, units);
  run.count = of_block * unit;
  run.by_work = !rounds && cut_by_work(form, problem, side, units, most);
  run.blocks = run.by_work ? most : split(units, of_block);
  return run;
}

// Tiles of a sliding window if steps may weight the tile in which windows begin and the one in
// which they end as one, because the tiles of a step are in the ring together. 0: they may not.
int fold_tiles(const ListRanges& ranges) {
  constexpr int kMostTiles = forward_ring(64, ListForm::plain) - 4;
  if (ranges.rule != ListRule::sliding || ranges.window <= kStreamRows ||
      ranges.window > kMostTiles * kStreamRows)
    return 0;
  return tiles_of(ranges.window);
}

bool takes_whole_lists(const ListProblem& problem, const ListGradients& to) {
  // Single-tile lists keep a block less busy than a stream of tiles.
  const auto short_lists = [](const SlotSide& side) {
    return side.layout == ListLayout::members && side.width > kStreamRows &&
           side.width <= kWholeRanks;
  };
  const bool from_first = problem.rule == ListRule::all || problem.rule == ListRule::causal ||
                          (problem.rule == ListRule::ends && problem.window >= problem.k.width);
  return problem.width <= 64 && problem.group == 1 && short_lists(problem.q) &&
         short_lists(problem.k) && from_first && !to.delta.data && !to.dq.present() &&
         !to.dk.present() && !to.dv.present() && !to.dq_products;
}

bool takes_windows(const ListProblem& problem, const ListGradients& to) {
  const SlotSide &q = problem.q, &k = problem.k;
  const auto all_rows = [](const SlotSide& side) {
    return side.layout == ListLayout::residues && side.lists == 1;
  };
  const auto close = [](const TensorView& rows) { return rows.stride(2) < kMost / 2; };
  const std::int64_t rows = std::max(q.spans.rows, k.spans.rows);
  // For shorter windows the two kernels of backward_sm90a.cu skip hidden tiles.
  return problem.rule == ListRule::sliding && problem.window > kWalkWindow / 2 &&
         problem.window <= kWalkWindow && all_rows(q) && all_rows(k) && problem.group == 1 &&
         problem.value_group == 1 && problem.width <= 64 &&
         q.spans.cu_seqlens == k.spans.cu_seqlens && !to.delta.data && !to.lse.by_slot &&
         to.dq.present() && !to.slot_dk && !to.slot_dv && close(to.dq) && close(to.dk) &&
         close(to.dv) && (rows / kStreamRows + 8) * q.items * q.heads < kMost;
}

// Whether full_backward_sm90a.cu is the fastest kernel of a rule. It takes 128 keys at a time;
// short windows of narrow rows have kernels of their own.
bool one_range(const AttentionCall& call, const ListRanges& ranges) {
  if (ranges.rule != ListRule::sliding)
    return ranges.rule == ListRule::all || ranges.rule == ListRule::causal;
  if (std::max(call.Dk, call.Dv) > 64) return true;
  return ranges.window > (call.H > call.key_heads ? kWalkWindow / 2 : kWalkWindow);
}

// Whether the call's shapes and types are those of full_backward_sm90a.cu.
bool is_full(const AttentionCall& call, const ListCall& lists) {
  const auto all_rows = [](const ListSide& side) { return side.layout == ListLayout::residues; };
  return call.inputs.delta_from_output && dtype_bytes(call.inputs.q.dtype) == 2 && on_hopper() &&
         !call.dropout.on() && list_form(lists) == ListForm::plain && !lists.head_scale &&
         lists.lists == 1 && all_rows(lists.queries) && all_rows(lists.keys) &&
         one_range(call, lists.ranges) && call.key_heads == call.value_heads;
}
ListTiles full_tiles(const AttentionCall& call, const ListCall& lists, bool keys) {
  return list_tiles(slot_side(call, lists, keys),
                    keys ? kFullKeyBits : full_query_bits(std::max(call.Dk, call.Dv)));
}
bool takes_full(const AttentionCall& call, const ListCall& lists, const ListGradients& to) {
  return is_full(call, lists) && to.out.present() && near(to.out) && to.dq.present() &&
         to.dk.present() && to.dv.present();
}

WalkCut cut_windows(const ListProblem& problem) {
  const SlotSide &q = problem.q, &k = problem.k;
  const int queries = q.spans.rows, keys = k.spans.rows;
  WalkCut cut{};
  cut.reach = problem.causal ? 0 : (problem.window + 1) / 2 - 1;
  cut.per_item = 1 + tiles_of(cut.reach);
  if (q.spans.cu_seqlens) {
    cut.per_head = q.items * cut.per_item + queries / kStreamRows;
    cut.total = cut.per_head * q.heads;
  } else {
    const int shift = (problem.offset_rows ? keys - queries : 0) + cut.reach;
    const int lead = tiles_of(shift) * kStreamRows;
    cut.per_head = q.spans.lengths || k.spans.lengths
                       ? tiles_of(std::max(queries, keys)) + cut.per_item
                       : std::max(tiles_of(queries + lead), tiles_of(keys + lead - shift));
    cut.total = cut.per_head * q.items * q.heads;
  }
  cut.per_block = split(cut.total, multiprocessors());
  return cut;
}

// Whether a tensor's memory has no gaps, in any order of its dimensions.
bool clearable(const TensorView& tensor) {
  std::int64_t covered = 1;
  for (int step = 0; step < tensor.rank; ++step)
    for (int dim = 0; dim < tensor.rank; ++dim)
      if (tensor.size(dim) > 1 && tensor.stride(dim) == covered) covered *= tensor.size(dim);
  return covered == tensor.count() && reinterpret_cast<std::uintptr_t>(tensor.data) % 16 == 0 &&
         covered * dtype_bytes(tensor.dtype) % 16 == 0;
}

}  // namespace

std::int64_t list_query_slots(const AttentionCall& call, const ListCall& lists) {
  return list_slots(call, lists, lists.queries, call.H, call.N);
}

std::int64_t list_key_slots(const AttentionCall& call, const ListCall& lists) {
  return list_slots(call, lists, lists.keys, call.key_heads, call.S);
}

FullScratch take_full(const AttentionCall& call, const ListCall& lists, Arena& arena) {
  FullScratch scratch;
  if (!is_full(call, lists)) return scratch;
  const std::int64_t parts = full_tiles(call, lists, false).total * call.H * 2;
  constexpr std::int64_t kPart = 64 * 64;
  scratch.shifts = arena.take<float>(call.B * call.H * call.N);
  scratch.deltas = arena.take<float>(call.B * call.H * call.N);
  scratch.sums = arena.take<float>(parts * kPart);
  scratch.turns = arena.take<std::int32_t>(parts);
  scratch.ticket = arena.take<std::int32_t>(1);
  return scratch;
}

ListForwardPlan plan_lists_forward(const AttentionCall& call, const ListCall& lists,
                                   const ListOutputs& outputs) {
  ListForwardPlan plan{};
  plan.problem = list_problem(call, lists);
  plan.form = list_form(lists);
  const SlotSide& queries = plan.problem.q;
  plan.tiles = list_tiles(queries, kStreamBits);
  plan.stream = hopper_takes(call, lists) && (outputs.slot_rows || near(outputs.out)) &&
                static_cast<std::int64_t>(plan.tiles.total) * queries.heads < kMost;
  if (!plan.stream) {
    plan.tiles = list_tiles(queries, kForwardTileBits);
    return plan;
  }
  // Three steps being computed and one in flight share a ring that holds the tiles they use.
  const bool rounds =
      span_tiles(plan.problem, plan.problem.k) + 3 > forward_ring(call.Dk, plan.form);
  plan.run = stream_run(plan.problem, plan.form, queries, plan.tiles, rounds, 1);
  if (call.Dk <= 64 && plan.form == ListForm::plain) plan.fold = fold_tiles(lists.ranges);
  return plan;
}

ListBackwardPlan plan_lists_backward(const AttentionCall& call, const ListCall& lists,
                                     const ListGradients& gradients) {
  ListBackwardPlan plan{};
  plan.problem = list_problem(call, lists);
  const ListProblem& problem = plan.problem;
  plan.q_tiles = list_tiles(problem.q, kStreamBits);
  plan.k_tiles = list_tiles(problem.k, kStreamBits);
  plan.form = list_form(lists);
  // Row statistics and factors of gradients belong to the same form.
  if (plan.form == ListForm::plain && (gradients.weight.data || lists.head_scale))
    plan.form = ListForm::normalised;
  plan.keys =
      gradients.dk.present() || gradients.slot_dk || gradients.dv.present() || gradients.slot_dv;
  // delta is a by-product of the queries if it is not given.
  const bool recomputed =
      lists.weighting == ListWeighting::softmax && !gradients.delta.data && plan.keys;
  plan.queries = gradients.dq.present() || gradients.slot_dq || recomputed;
  const auto writable = [](const TensorView& rows) { return !rows.present() || aligned(rows); };
  // Query heads that share keys share lists.
  const bool shared_lists =
      !problem.q.index || problem.q.heads / problem.q.index_heads % problem.group == 0;
  const bool hopper = hopper_takes(call, lists) && near(gradients.grad_out) &&
                      writable(gradients.dq) && writable(gradients.dk) && writable(gradients.dv) &&
                      shared_lists;
  if (!hopper) {
    plan.kernel = ListBackwardKernel::tiles;
  } else if (takes_full(call, lists, gradients)) {
    plan.kernel = ListBackwardKernel::full;
    plan.q_tiles = full_tiles(call, lists, false);
    plan.k_tiles = full_tiles(call, lists, true);
  } else if (plan.queries && takes_whole_lists(problem, gradients)) {
    plan.kernel = ListBackwardKernel::whole;
    plan.whole_lists = problem.q.items * problem.q.lists * problem.q.heads;
    plan.clears = plan.whole_lists > 0 &&
                  std::all_of(gradients.cleared.begin(), gradients.cleared.end(), clearable);
  } else if (plan.form == ListForm::plain && plan.keys && takes_windows(problem, gradients)) {
    plan.kernel = ListBackwardKernel::windows;
    plan.windows = cut_windows(problem);
  } else if (call.Dk > 64) {
    plan.kernel = ListBackwardKernel::wide_tiles;
  } else {
    plan.kernel = ListBackwardKernel::stream;
    // Steps being computed share a ring that holds the tiles they use, and some tiles in flight.
    const auto run = [&](const SlotSide& side, const SlotSide& other, const ListTiles& tiles,
                         bool keys) {
      const bool rounds = span_tiles(problem, other) + 2 > backward_ring(plan.form, keys) ||
                          (keys && problem.group > 1);
      return stream_run(problem, plan.form, side, tiles, rounds, rounds ? kBackwardGroups : 1);
    };
    plan.query_run = run(problem.q, problem.k, plan.q_tiles, false);
    plan.key_run = run(problem.k, problem.q, plan.k_tiles, true);
  }
  return plan;
}

}  // namespace coterie::cuda
