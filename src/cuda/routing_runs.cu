// SPDX-License-Identifier: MIT
// Strict routing: pairs (row, cluster) sorted by cluster, and what the runs of queries and keys
// imply for a query: how many keys of its cluster are not after it, and what becomes of its own.
#include "cuda/device/await.cuh"
#include "cuda/device/group.cuh"
#include "cuda/launch.h"
#include "cuda/routing.h"

namespace coterie::cuda {

namespace {

constexpr int kThreads = 512, kWarps = kThreads / 32;

struct SortProblems {
  ClusterShape shape;  // of rows
  const std::int32_t* clusters;
  int per_row;
  RoutingRuns runs, copy;
};

struct SortArgs {
  SortProblems sides[2];
  Teams teams;
  std::int32_t* histograms;
  int shared_words;
};

// Sorts one problem; `range` of it is this block's.
__device__ void sort_problem(const SortArgs& args, const SortProblems& side, int number, int turn,
                             Team& team, std::int32_t* shared) {
  const ClusterShape& shape = side.shape;
  const int item = number / shape.heads, head = number % shape.heads, m = side.per_row;
  const ItemSpan span = shape.q.span(item);
  const std::int64_t start = shape.start(span, head) * m;
  const std::int64_t starts = static_cast<std::int64_t>(number) * (shape.clusters + 1);
  std::int32_t* order = side.runs.order + start;
  const RowRange range = team.share(span.length * m);
  group_rows(
      team, range,
      {side.clusters + start, order, side.runs.offsets + starts,
       histograms_of(args.histograms, args.teams, team, turn, shape.clusters), shape.clusters},
      shared, args.shared_words);
  if (!shape.q.cu_seqlens || item + 1 == shape.items)
    for (int i = span.length * m + team.rank * kThreads + threadIdx.x;
         i < (shape.rows - span.begin) * m; i += team.size * kThreads) {
      order[i] = -1;
      if (side.copy.order) side.copy.order[start + i] = -1;
    }
  if (m == 1 && !side.copy.order) return;
  team.sync();
  for (int i = range.begin + threadIdx.x; i < range.end; i += kThreads) {
    if (m > 1) order[i] /= m;
    if (side.copy.order) side.copy.order[start + i] = order[i];
  }
  if (side.copy.order && team.rank == 0)
    for (int c = threadIdx.x; c <= shape.clusters; c += kThreads)
      side.copy.offsets[starts + c] = side.runs.offsets[starts + c];
}

// Teams work on the problems of both sides, as group_kernel of group.cu.
__global__ void __launch_bounds__(kThreads, 1)
    sort_runs_kernel(const __grid_constant__ SortArgs args) {
  extern __shared__ std::int32_t shared[];
  Team team(args.teams);
  const int queries = args.sides[0].shape.problems();
  const int problems = queries + args.sides[1].shape.problems();
  int turn = 0;
  for (int number = team.number; number < problems; number += args.teams.count, turn ^= 1)
    if (number < queries)
      sort_problem(args, args.sides[0], number, turn, team, shared);
    else
      sort_problem(args, args.sides[1], number - queries, turn, team, shared);
}

struct EndArgs {
  ItemSpans spans;
  int items, heads, group, clusters, window, per_row;
  const std::int32_t *q_order, *q_offsets, *k_order, *k_offsets;
  bool same;  // the runs of queries are those of keys
  bool demote, include_self;
  RunEnds out;
};

// The first place in [0, count) where `values` exceeds `value`; they ascend.
__device__ __forceinline__ int upper_bound(const std::int32_t* values, int count, int value) {
  int first = 0;
  while (count > 0) {
    const int half = count / 2;
    if (values[first + half] <= value) {
      first += half + 1;
      count -= half + 1;
    } else {
      count = half;
    }
  }
  return first;
}

// The number of keys in sight and whether the own key is among them, to what becomes of it.
__device__ __forceinline__ std::uint8_t own_key(const EndArgs& args, int keys, bool found) {
  const bool demoted = args.demote && keys - (found ? 1 : 0) > 0;
  if (found) return demoted ? kDropOwnKey : 0;
  return args.include_self && !demoted ? kAddOwnKey : 0;
}

// A thread per query slot.
__global__ void __launch_bounds__(kThreads) run_ends_kernel(EndArgs args) {
  await_previous();
  const SequenceSpans& q = args.spans.q;
  const std::int64_t per_head = static_cast<std::int64_t>(q.rows) * args.per_row;
  const std::int64_t place = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const int head = static_cast<int>(blockIdx.y), batch = static_cast<int>(blockIdx.z);
  if (place >= per_head) return;
  const std::int64_t block = static_cast<std::int64_t>(batch) * args.heads + head;
  const int item = q.item_of(batch, static_cast<int>(place / args.per_row), args.items);
  if (item < 0) {
    if (args.per_row == 1) args.out.own_row[block * q.rows + place] = 0;
    return;
  }
  const ItemSpan span = q.span(item), keys = args.spans.k.span(item);
  const std::int32_t* starts =
      args.q_offsets + (static_cast<std::int64_t>(item) * args.heads + head) * (args.clusters + 1);
  const int pair = static_cast<int>(place - static_cast<std::int64_t>(span.begin) * args.per_row);
  const int cluster = upper_bound(starts, args.clusters + 1, pair) - 1;
  const int row = args.q_order[block * per_head + place];
  const int position = row + keys.length - span.length;
  int end = pair - starts[cluster] + 1;
  bool own = true;
  if (!args.same) {
    const int key_heads = args.heads / args.group, key_head = head / args.group;
    const std::int32_t* key_starts =
        args.k_offsets +
        (static_cast<std::int64_t>(item) * key_heads + key_head) * (args.clusters + 1) + cluster;
    const std::int32_t* run =
        args.k_order +
        (static_cast<std::int64_t>(keys.batch) * key_heads + key_head) * args.spans.k.rows +
        keys.begin + key_starts[0];
    end = upper_bound(run, key_starts[1] - key_starts[0], position);
    own = end > 0 && run[end - 1] == position;
  }
  args.out.ends[block * per_head + place] = end;
  const int seen = min(end, args.window);
  if (args.per_row == 1)
    args.out.own_row[block * q.rows + span.begin + row] = own_key(args, seen, own);
  else
    args.out.own_slot[block * per_head + place] =
        static_cast<std::uint8_t>(min(seen, 2) | (own ? 4 : 0));
}

// own_row from what the slots of a row see. A thread per row.
__global__ void __launch_bounds__(kThreads) own_rows_kernel(EndArgs args, TokenSlots slots) {
  await_previous();
  const SequenceSpans& q = args.spans.q;
  const int row = static_cast<int>(blockIdx.x * kThreads + threadIdx.x);
  const int head = static_cast<int>(blockIdx.y), batch = static_cast<int>(blockIdx.z);
  if (row >= q.rows) return;
  const std::int64_t place = (static_cast<std::int64_t>(batch) * args.heads + head) * q.rows + row;
  const int item = q.item_of(batch, row, args.items);
  int keys = 0;
  bool found = false;
  if (item >= 0) {
    const std::int64_t start = slots.start(item, q.span(item), head);
    const std::int32_t* own = slots.slots + start + slots.first[place];
    for (int i = 0; i < slots.count[place]; ++i) {
      const std::uint8_t sight = args.out.own_slot[start + own[i]];
      keys += sight & 3;
      found = found || (sight & 4);
    }
  }
  args.out.own_row[place] = item >= 0 ? own_key(args, keys, found) : 0;
}

}  // namespace

void sort_runs(const SortSide& queries, const SortSide* keys, unsigned* arrivals, Arena& arena,
               cudaStream_t stream) {
  SortArgs args{};
  int rows = 0, problems = 0;
  for (const SortSide* sort : {&queries, keys}) {
    if (!sort) continue;
    const ClusterShape& shape = sort->side.shape;
    args.sides[sort == keys] = {shape, sort->clusters, sort->per_row, sort->runs, sort->copy};
    rows = std::max(rows, shape.rows * sort->per_row);
    problems += shape.problems();
    for (std::int32_t* order : {sort->runs.order, sort->copy.order})
      if (shape.items == 0 && order)  // all rows are padding
        COTERIE_CUDA(cudaMemsetAsync(
            order, 0xff,
            static_cast<std::size_t>(sort->side.count() * sort->per_row) * sizeof(std::int32_t),
            stream));
  }
  const int clusters = queries.side.shape.clusters;
  args.teams = make_teams(problems, rows, multiprocessors(), arrivals);
  args.histograms =
      arena.take<std::int32_t>(2 * static_cast<std::int64_t>(args.teams.blocks()) * clusters);
  if (!args.histograms || problems == 0) return;
  const std::size_t bytes = group_shared_bytes(clusters, kWarps);
  args.shared_words = static_cast<int>(bytes / sizeof(std::int32_t));
  launch_cooperative(sort_runs_kernel, args.teams.blocks(), kThreads, bytes, stream, args);
}

RunEnds::RunEnds(Arena& arena, const RoutingParams& params, const AttentionCall& call)
    : per_row(static_cast<int>(std::min(params.queries_in, params.clusters))) {
  const std::int64_t rows = call.B * call.H * call.N;
  ends = arena.take<std::int32_t>(rows * per_row);
  own_row = arena.take<std::uint8_t>(rows);
  if (per_row > 1) own_slot = arena.take<std::uint8_t>(rows * per_row);
}

void find_run_ends(const RoutingParams& params, const AttentionCall& call,
                   const RoutingRuns& queries, const RoutingRuns& keys, const TokenSlots* slots,
                   const RunEnds& ends, cudaStream_t stream) {
  if (call.B * call.H * call.N == 0) return;
  EndArgs args{};
  args.spans = item_spans(call.inputs);
  args.items = static_cast<int>(call.num_items());
  args.heads = static_cast<int>(call.H);
  args.group = static_cast<int>(call.H / call.key_heads);
  args.clusters = static_cast<int>(params.clusters);
  args.window = static_cast<int>(std::min(params.window, call.N + call.S));
  args.per_row = ends.per_row;
  args.q_order = queries.order;
  args.q_offsets = queries.offsets;
  args.k_order = keys.order;
  args.k_offsets = keys.offsets;
  args.same = params.share_qk && ends.per_row == 1;
  args.demote = params.self == SelfAttention::demote;
  args.include_self = params.include_self;
  args.out = ends;
  const auto grid = [&](std::int64_t count) {
    return dim3(static_cast<unsigned>((count + kThreads - 1) / kThreads),
                static_cast<unsigned>(call.H), static_cast<unsigned>(call.B));
  };
  launch_early("run_ends", run_ends_kernel, grid(call.N * ends.per_row), kThreads, 0, stream, args);
  if (ends.per_row > 1)
    launch_early("own_rows", own_rows_kernel, grid(call.N), kThreads, 0, stream, args, *slots);
}

}  // namespace coterie::cuda
