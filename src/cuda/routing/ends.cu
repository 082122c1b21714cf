// SPDX-License-Identifier: MIT
// What queries see of their lists. Runs (strict): how many keys of the query's cluster are not
// after it, and how its own key is treated. Members: the same for member lists.
//
// run_ends: a block of 256 threads per tile of 256 or 1024 queries and head; a binary search in
//   the run of keys, which is staged in shared memory if it fits (24 KB).
// own_rows: with several slots per query, a thread per row combines what they see.
// member_ends: a thread per query slot.
// Preconditions: none. The scan finds the ends of queries and keys that it sorts together.
#include "cuda/cluster/group.cuh"
#include "cuda/launch/launch.h"
#include "cuda/prim/dependent.cuh"
#include "cuda/prim/splits.cuh"
#include "cuda/routing/stages.h"

namespace coterie::cuda {

namespace {

constexpr int kThreads = 512;
constexpr int kEndThreads = 256, kFewRows = 256, kManyRows = 1024;
constexpr int kStagedStarts = 2048, kStagedKeys = 2048;  // searched in shared memory

struct EndArgs {
  ItemSpans spans;
  ItemChunks tiles;  // of kFewRows or kManyRows queries
  int items, heads, group, clusters, window;
  SortedRuns q, k;
  bool demote, include_self;
  RunEnds out;
};

// How the own key is treated, from the number of visible keys and whether it is among them.
__device__ __forceinline__ std::uint8_t own_key(const EndArgs& args, int keys, bool found) {
  const bool demoted = args.demote && keys - (found ? 1 : 0) > 0;
  if (found) return demoted ? kDropOwnKey : 0;
  return args.include_self && !demoted ? kAddOwnKey : 0;
}

// Integers in global memory, or a copy of them in shared memory that starts at `first`.
struct Numbers {
  const std::int32_t* data;
  int first;

  // Copies [begin, end) if it fits. Called by all threads, which then synchronise.
  __device__ void stage(std::int32_t* shared, int room, int begin, int end) {
    if (end - begin > room) return;
    for (int i = begin + threadIdx.x; i < end; i += kEndThreads) shared[i - begin] = data[i];
    data = shared;
    first = begin;
  }
  __device__ const std::int32_t* from(int i) const { return data + (i - first); }
};

// A block per tile of queries; a thread takes a slot at a time.
__global__ void __launch_bounds__(kEndThreads)
    run_ends_kernel(const __grid_constant__ EndArgs args) {
  await_previous();
  __shared__ std::int32_t q_starts[kStagedStarts], k_starts[kStagedStarts], k_rows[kStagedKeys];
  __shared__ int ends[2];
  const ItemChunk tile = args.tiles.find(args.spans.q, blockIdx.x);
  if (tile.begin >= tile.end) return;
  const int head = static_cast<int>(blockIdx.y), clusters = args.clusters, m = args.out.per_row;
  const int key_heads = args.heads / args.group, key_head = head / args.group;
  const ItemSpan span = tile.span, keys = args.spans.k.span(tile.item);
  Numbers starts{
      args.q.offsets + (static_cast<std::int64_t>(tile.item) * args.heads + head) * (clusters + 1),
      0};
  Numbers key_starts{
      args.k.offsets +
          (static_cast<std::int64_t>(tile.item) * key_heads + key_head) * (clusters + 1),
      0};
  Numbers rows{
      args.k.order +
          (static_cast<std::int64_t>(keys.batch) * key_heads + key_head) * args.spans.k.rows +
          keys.begin,
      0};
  starts.stage(q_starts, kStagedStarts, 0, clusters + 1);
  key_starts.stage(k_starts, kStagedStarts, 0, clusters + 1);
  __syncthreads();
  const int first = tile.begin * m, end = tile.end * m;
  // The clusters of the tile's first and last slot, found by one thread each.
  if (threadIdx.x % 32 == 0 && threadIdx.x < 64)
    ends[threadIdx.x / 32] =
        upper_bound(starts.data, clusters + 1, threadIdx.x == 0 ? first : end - 1) - 1;
  __syncthreads();
  const int low = ends[0], high = ends[1];
  rows.stage(k_rows, kStagedKeys, key_starts.data[low], key_starts.data[high + 1]);
  __syncthreads();
  const std::int64_t block = static_cast<std::int64_t>(span.batch) * args.heads + head;
  const std::int64_t slots = (block * args.spans.q.rows + span.begin) * m;
  for (int slot = first + static_cast<int>(threadIdx.x); slot < end; slot += kEndThreads) {
    const int row = args.q.order[slots + slot];
    const int cluster = low + upper_bound(starts.data + low + 1, high - low, slot);
    const int position = row + keys.length - span.length, run = key_starts.data[cluster];
    const int sight = upper_bound(rows.from(run), key_starts.data[cluster + 1] - run, position);
    const bool own = sight > 0 && rows.from(run)[sight - 1] == position;
    if (args.out.ends) args.out.ends[slots + slot] = sight;
    if (!args.out.own_row) continue;
    const int seen = min(sight, args.window);
    if (m == 1)
      args.out.own_row[block * args.spans.q.rows + span.begin + row] = own_key(args, seen, own);
    else
      args.out.own_slot[slots + slot] = static_cast<std::uint8_t>(min(seen, 2) | (own ? 4 : 0));
  }
}

// own_row, from what the slots of a row see. A thread per row.
__global__ void __launch_bounds__(kThreads)
    own_rows_kernel(const __grid_constant__ EndArgs args, TokenSlots slots) {
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

struct MemberEndArgs {
  ItemSpans spans;
  bool causal;
  int heads, group, clusters, q_width, k_width;
  const std::int32_t *q_members, *k_members;
  std::int32_t* ends;
  std::uint8_t* flags;
  bool beside_slots;  // the preceding kernel finds token slots and has waited for the members
};

// A thread per query slot; the blocks of an item and head are adjacent.
__global__ void __launch_bounds__(kEndThreads) member_ends_kernel(MemberEndArgs args) {
  release_next();
  if (!args.beside_slots) await_writes();
  const std::int64_t block = static_cast<std::int64_t>(args.clusters) * args.q_width;
  const auto each = static_cast<unsigned>((block + kEndThreads - 1) / kEndThreads);
  const unsigned problem = blockIdx.x / each;
  const int item = static_cast<int>(problem) / args.heads;
  const int head = static_cast<int>(problem) % args.heads, key_heads = args.heads / args.group;
  const std::int64_t place =
      static_cast<std::int64_t>(blockIdx.x % each) * kEndThreads + threadIdx.x;
  if (place >= block) return await_writes();
  const std::int64_t slot = problem * block + place;
  const int row = args.q_members[slot];
  int seen = 0;
  if (row >= 0) {
    const std::int64_t list =
        (static_cast<std::int64_t>(item) * key_heads + head / args.group) * args.clusters +
        place / args.q_width;
    const int last = args.causal
                         ? row + args.spans.k.span(item).length - args.spans.q.span(item).length
                         : args.spans.k.rows;
    seen = entries_up_to(args.k_members + list * args.k_width, args.k_width, last);
  }
  if (args.ends) args.ends[slot] = seen;
  if (args.flags) args.flags[slot] = seen > 1;
  await_writes();
}

}  // namespace

RunEnds::RunEnds(Arena& arena, const RoutingParams& params, const AttentionCall& call)
    : per_row(static_cast<int>(min(params.queries_in, params.clusters))) {
  const std::int64_t rows = call.B * call.H * call.N;
  if (!params.include_self && params.self != SelfAttention::demote) return;
  own_row = arena.take<std::uint8_t>(rows);
  if (per_row > 1) own_slot = arena.take<std::uint8_t>(rows * per_row);
}

void find_run_ends(const RoutingParams& params, const AttentionCall& call,
                   const SortedRuns& queries, const SortedRuns& keys, const TokenSlots& slots,
                   const RunEnds& ends, cudaStream_t stream) {
  EndArgs args{};
  args.spans = item_spans(call.inputs);
  args.items = static_cast<int>(call.num_items());
  args.tiles = row_tiles(args.spans.q, args.items, call.N < 16 * kManyRows ? kFewRows : kManyRows);
  args.heads = static_cast<int>(call.H);
  args.group = static_cast<int>(call.H / call.key_heads);
  args.clusters = static_cast<int>(params.clusters);
  args.window = static_cast<int>(min(params.window, call.N + call.S));
  args.q = queries;
  args.k = keys;
  args.demote = params.self == SelfAttention::demote;
  args.include_self = params.include_self;
  args.out = ends;
  if (args.tiles.slots == 0) return;
  launch_early("run_ends", run_ends_kernel,
               dim3(static_cast<unsigned>(args.tiles.slots), static_cast<unsigned>(call.H)),
               kEndThreads, 0, stream, args);
  if (!ends.own_slot) return;
  const dim3 grid(static_cast<unsigned>((call.N + kThreads - 1) / kThreads),
                  static_cast<unsigned>(call.H), static_cast<unsigned>(call.B));
  launch_early("own_rows", own_rows_kernel, grid, kThreads, 0, stream, args, slots);
}

void find_member_ends(const AttentionCall& call, const RoutingSide& queries,
                      const RoutingSide& keys, std::int32_t* ends, std::uint8_t* flags,
                      bool beside_slots, cudaStream_t stream) {
  const ClusterShape& shape = queries.shape;
  const std::int64_t block = static_cast<std::int64_t>(shape.clusters) * queries.width;
  const std::int64_t blocks = (block + kEndThreads - 1) / kEndThreads * shape.problems();
  if ((!ends && !flags) || blocks == 0) return;
  const MemberEndArgs args{item_spans(call.inputs),
                           call.causal,
                           shape.heads,
                           static_cast<int>(call.H / call.key_heads),
                           shape.clusters,
                           queries.width,
                           keys.width,
                           queries.members,
                           keys.members,
                           ends,
                           flags,
                           beside_slots};
  launch_early("member_ends", member_ends_kernel, dim3(static_cast<unsigned>(blocks)), kEndThreads,
               0, stream, args);
}

}  // namespace coterie::cuda
