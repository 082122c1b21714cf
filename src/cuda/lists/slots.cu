// SPDX-License-Identifier: MIT
// The slots of every token, ascending: first[token], count[token] and slots[first ...], from lists
// that ascend.
//
// Grid (ranges of 512 to 2048 tokens of an item, heads of both sides), 256 threads. A range is a
// piece of every list, whose ends are found by search. Groups of 16 lanes take neighbouring lists
// and count their tokens, which gives the destination of each of their slots: no atomics, no
// sorting. Shared memory: 16-bit counts [group][token], 16 to 64 KB, and 8 KB for the starts of
// tokens; at most 85 registers. Tokens that do not belong in a list are ignored.
#include "cuda/lists/slots.h"

#include "core/item.h"
#include "cuda/launch/launch.h"
#include "cuda/prim/dependent.cuh"
#include "cuda/prim/splits.cuh"
#include "cuda/prim/warp.cuh"

namespace coterie::cuda {

namespace {

constexpr int kThreads = 256, kEach = 8;
constexpr int kMostRange = kThreads * kEach;  // tokens per block
constexpr int kLanes = 16, kGroups = kThreads / kLanes;
constexpr int kBatch = 8;  // pieces of lists, kLanes slots each, that a group has in flight

struct SlotSearch {
  TokenSlots tokens;
  ItemChunks ranges;
};
struct SlotArgs {
  SlotSearch sides[2];
  int range_bits;
};

// A range of an item's tokens and the lists of a head.
struct SlotRange {
  const TokenSlots& tokens;
  ItemChunk range;
  std::int64_t start;  // of the slots of the item and head
  const std::int32_t *index, *offsets;
  int width;

  __device__ SlotRange(const SlotSearch& side, int number, int head)
      : tokens(side.tokens),
        range(side.ranges.find(tokens.spans, number)),
        start(tokens.start(range.item, range.span, head)),
        index(tokens.index + start),
        offsets(nullptr),
        width(0) {
    if (tokens.per_row > 0)
      offsets = tokens.offsets +
                (static_cast<std::int64_t>(range.item) * tokens.heads + head) * (tokens.lists + 1);
    else
      width = static_cast<int>(tokens.block / tokens.lists);
  }
  __device__ int list_begin(int list) const { return offsets ? offsets[list] : list * width; }

  // Calls visit(slot, token) for the range's pieces of this group's lists, list by list. Returns
  // the number of list entries before the pieces whose begin this lane found.
  template <class Visit>
  __device__ __forceinline__ int for_pieces(const Visit& visit) const {
    const int lane = static_cast<int>(threadIdx.x) % kLanes;
    const unsigned lanes = 0xffffu << (threadIdx.x % 32 - lane);
    const int share = (tokens.lists + kGroups - 1) / kGroups;
    const int first = static_cast<int>(threadIdx.x) / kLanes * share;
    const int last = min(first + share, tokens.lists);
    // A group with few lists has long pieces: a batch has several parts of them.
    const int parts = share == 1 ? kBatch : share == 2 ? kBatch / 2 : share <= 4 ? kBatch / 4 : 1;
    const int part_bits = 31 - __clz(parts);
    int before = 0;
    for (int chunk = first; chunk < last; chunk += kLanes / 2) {
      int bound = 0;  // where the piece of a list begins or ends: two lanes per list
      if (const int own = chunk + lane / 2; own < last) {
        const int start_of_own = list_begin(own), size = list_begin(own + 1) - start_of_own;
        bound = entries_up_to(index + start_of_own, size, (lane % 2 ? range.end : range.begin) - 1);
        if (lane % 2 == 0) before += bound;
        bound += start_of_own;
      }
      const auto begin_of = [&](int list) { return __shfl_sync(lanes, bound, 2 * list, kLanes); };
      const auto end_of = [&](int list) { return __shfl_sync(lanes, bound, 2 * list + 1, kLanes); };
      for (int base = 0; base < min(last - chunk, kLanes / 2); base += kBatch >> part_bits) {
        int slot[kBatch], token[kBatch];
#pragma unroll
        for (int j = 0; j < kBatch; ++j) {
          const int list = base + (j >> part_bits), skipped = (j & parts - 1) * kLanes;
          slot[j] = begin_of(list) + lane + skipped;
          token[j] = slot[j] < end_of(list) ? index[slot[j]] : -1;
        }
#pragma unroll
        for (int j = 0; j < kBatch; ++j) {
          visit(slot[j], token[j]);
          if ((j + 1 & parts - 1) == 0) {  // the list's last part of the batch
            const int stop = end_of(base + (j >> part_bits));
#pragma unroll 1
            for (int next = slot[j] + kLanes; next < stop; next += kLanes) visit(next, index[next]);
          }
          __syncwarp(lanes);
        }
      }
    }
    return before;
  }
};

__global__ void __launch_bounds__(kThreads, 3)
    token_slots_kernel(const __grid_constant__ SlotArgs args) {
  await_writes();
  release_next();                    // kernels that need no slots may overlap this one
  extern __shared__ uint4 shared[];  // counts [group][token] of 16 bits
  __shared__ int firsts[kMostRange + 1];
  int head = static_cast<int>(blockIdx.y);
  const bool second = head >= args.sides[0].tokens.heads;
  if (second) head -= args.sides[0].tokens.heads;
  const SlotSearch& side = args.sides[second];
  if (static_cast<int>(blockIdx.x) >= side.ranges.slots) return;
  const SlotRange problem(side, static_cast<int>(blockIdx.x), head);
  const TokenSlots& tokens = problem.tokens;
  const int tokens_of_block = 1 << args.range_bits, owners = tokens_of_block / kEach;
  const int first_token = problem.range.split << args.range_bits;
  const int thread = static_cast<int>(threadIdx.x);
  // Padding of unpacked sequences has no slots.
  const int rows = tokens.spans.cu_seqlens ? problem.range.span.length : tokens.spans.rows;
  const int count = min(tokens_of_block, rows - first_token);
  if (count <= 0) return;
  for (int i = thread; i < kGroups * owners; i += kThreads) shared[i] = make_uint4(0, 0, 0, 0);
  __syncthreads();
  auto* counts = reinterpret_cast<std::uint16_t*>(shared) + (thread / kLanes << args.range_bits);
  const auto inside = [&](int token) {
    return static_cast<unsigned>(token - first_token) < static_cast<unsigned>(count);
  };
  const int before = problem.for_pieces([&](int, int token) {
    if (inside(token)) ++counts[token - first_token];
  });
  int base = 0;                          // slots of tokens before the range
  block_exclusive_scan(before, base);    // also waits for all counts
  uint4 total = make_uint4(0, 0, 0, 0);  // of this thread's 8 tokens; running start of each group
  if (thread < owners)
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      const uint4 own = shared[group * owners + thread];
      shared[group * owners + thread] = total;
      total.x += own.x, total.y += own.y, total.z += own.z, total.w += own.w;
    }
  int each[kEach], sum = 0, carry = 0;
#pragma unroll
  for (int i = 0; i < kEach; ++i)
    sum += each[i] = static_cast<int>((&total.x)[i / 2] >> (i % 2 * 16) & 0xffffu);
  int place = base + block_exclusive_scan(sum, carry);
  if (thread < owners) {
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      firsts[thread * kEach + i] = place;
      place += each[i];
    }
    if (thread == owners - 1) firsts[tokens_of_block] = place;
  }
  __syncthreads();
  const std::int64_t row = tokens.row(problem.range.span, head, first_token);
  for (int i = thread; i < count; i += kThreads) {
    const bool there = first_token + i < problem.range.span.length;  // else padding
    tokens.first[row + i] = there ? firsts[i] : 0;
    tokens.count[row + i] = there ? firsts[i + 1] - firsts[i] : 0;
  }
  std::int32_t* out = tokens.slots + problem.start;
  problem.for_pieces([&](int slot, int token) {
    if (inside(token)) out[firsts[token - first_token] + counts[token - first_token]++] = slot;
  });
}

// As large as 4 blocks per multiprocessor allow: longer pieces of lists keep more lanes busy.
int range_bits(std::int64_t tokens) {
  int bits = 9;
  while (1 << bits < kMostRange && tokens >> bits > 4 * multiprocessors()) ++bits;
  return bits;
}

}  // namespace

TokenSlots make_single_slots(const Sequences& sequences, std::int64_t batches, std::int64_t rows,
                             std::int64_t heads, const std::int32_t* index) {
  TokenSlots tokens{};
  tokens.spans = sequence_spans(sequences, rows);
  tokens.items = static_cast<int>(item_count(sequences, batches));
  tokens.heads = static_cast<int>(heads);
  tokens.per_row = 1;
  tokens.index = index;
  return tokens;
}

TokenSlots make_token_slots(Arena& arena, const Sequences& sequences, std::int64_t batches,
                            std::int64_t rows, std::int64_t heads, const std::int32_t* index,
                            std::int64_t block, std::int64_t per_row, std::int64_t lists,
                            const std::int32_t* offsets) {
  TokenSlots tokens = make_single_slots(sequences, batches, rows, heads, index);
  tokens.per_row = static_cast<int>(per_row);
  if (per_row > 0)
    tokens.offsets = offsets;
  else
    tokens.block = block;
  tokens.lists = static_cast<int>(lists);
  tokens.first = arena.take<std::int32_t>(batches * heads * rows);
  tokens.count = arena.take<std::int32_t>(batches * heads * rows);
  tokens.slots = arena.take<std::int32_t>(
      (per_row > 0 ? batches * rows * per_row : tokens.items * block) * heads);
  return tokens;
}

void find_token_slots(const TokenSlots& tokens, const Arena& arena, cudaStream_t stream,
                      const TokenSlots* second, bool early) {
  if (arena.counting()) return;
  SlotArgs args{};
  const auto rows_of = [](const TokenSlots& side) {
    return (side.spans.cu_seqlens ? 1 : std::int64_t{side.items}) * side.heads * side.spans.rows;
  };
  args.range_bits = range_bits(rows_of(tokens) + (second ? rows_of(*second) : 0));
  unsigned ranges = 0, heads = 0;
  const auto add = [&](const TokenSlots& side, SlotSearch& to) {
    to = {side, row_tiles(side.spans, side.items, 1 << args.range_bits)};
    if (side.lists == 0 || side.items == 0) to.ranges.slots = 0;
    ranges = max(ranges, static_cast<unsigned>(to.ranges.slots));
    heads += static_cast<unsigned>(side.heads);
  };
  add(tokens, args.sides[0]);
  if (second) add(*second, args.sides[1]);
  if (ranges == 0 || heads == 0) return;
  launch_kernel("token_slots", {early, false}, token_slots_kernel, dim3(ranges, heads), kThreads,
                (static_cast<std::size_t>(kGroups) * sizeof(std::uint16_t)) << args.range_bits,
                stream, args);
}

}  // namespace coterie::cuda
