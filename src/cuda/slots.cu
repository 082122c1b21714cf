// SPDX-License-Identifier: MIT
// The slots of every token by one kernel: teams of blocks count them, add up the counts, fill the
// lists and sort them, each token's few by themselves.
#include "cuda/slots.h"

#include "core/items.h"
#include "cuda/device/group.cuh"

namespace coterie::cuda {

namespace {

constexpr int kThreads = 512;

struct SlotArgs {
  TokenSlots tokens;
  Teams teams;
  std::int32_t* cursor;  // (B, heads, rows)
  std::int32_t* sums;    // (2, blocks): tokens' counts in a block's share, problems in turn
};

// The sum of `value` over the block.
__device__ int block_sum(int value) {
  int carry = 0;
  block_exclusive_scan(value, carry);
  return carry;
}

// first[] of the block's tokens, from their counts.
__device__ void place_tokens(Team& team, const RowRange& range, const std::int32_t* count,
                             std::int32_t* first, std::int32_t* sums) {
  int mine = 0;
  for (int i = range.begin + threadIdx.x; i < range.end; i += kThreads) mine += count[i];
  mine = block_sum(mine);
  if (threadIdx.x == 0) sums[team.rank] = mine;
  team.sync();
  int carry = 0;
  for (int rank = 0; rank < team.rank; ++rank) carry += sums[rank];
  for (int begin = range.begin; begin < range.end; begin += kThreads) {
    const int i = begin + static_cast<int>(threadIdx.x);
    const int place = block_exclusive_scan(i < range.end ? count[i] : 0, carry);
    if (i < range.end) first[i] = place;
  }
}

__device__ void sort_few(std::int32_t* slots, int count) {
  for (int i = 1; i < count; ++i) {
    const std::int32_t slot = slots[i];
    int j = i;
    for (; j > 0 && slots[j - 1] > slot; --j) slots[j] = slots[j - 1];
    slots[j] = slot;
  }
}

__global__ void __launch_bounds__(kThreads, 1) token_slots_kernel(SlotArgs args) {
  const TokenSlots& tokens = args.tokens;
  Team team(args.teams);
  int turn = 0;
  for (int number = team.number; number < tokens.items * tokens.heads;
       number += args.teams.count, turn ^= 1) {
    const int item = number / tokens.heads, head = number % tokens.heads;
    const ItemSpan span = tokens.spans.span(item);
    const std::int64_t row = tokens.row(span, head, 0), start = tokens.start(item, span, head);
    std::int32_t *count = tokens.count + row, *first = tokens.first + row;
    std::int32_t *cursor = args.cursor + row, *slots = tokens.slots + start;
    const RowRange rows = team.share(span.length);
    const RowRange mine = team.share(tokens.per_row > 0 ? span.length * tokens.per_row
                                                        : static_cast<int>(tokens.block));
    for (int i = rows.begin + threadIdx.x; i < rows.end; i += kThreads) count[i] = cursor[i] = 0;
    team.sync();
    for (int i = mine.begin + threadIdx.x; i < mine.end; i += kThreads) {
      const int token = tokens.index[start + i];
      if (token >= 0 && token < span.length) atomicAdd(count + token, 1);
    }
    team.sync();
    place_tokens(team, rows, count, first,
                 args.sums + (turn * args.teams.count + team.number) * team.size);
    team.sync();
    for (int i = mine.begin + threadIdx.x; i < mine.end; i += kThreads) {
      const int token = tokens.index[start + i];
      if (token >= 0 && token < span.length) slots[first[token] + atomicAdd(cursor + token, 1)] = i;
    }
    team.sync();
    for (int i = rows.begin + threadIdx.x; i < rows.end; i += kThreads)
      if (count[i] > 1) sort_few(slots + first[i], count[i]);
  }
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
                            std::int64_t block, std::int64_t per_row) {
  TokenSlots tokens = make_single_slots(sequences, batches, rows, heads, index);
  tokens.per_row = static_cast<int>(per_row);
  tokens.block = block;
  tokens.first = arena.take<std::int32_t>(batches * heads * rows);
  tokens.count = arena.take<std::int32_t>(batches * heads * rows);
  const std::int64_t slots = per_row > 0 ? batches * rows * per_row : tokens.items * block;
  tokens.slots = arena.take<std::int32_t>(slots * heads);
  return tokens;
}

void find_token_slots(const TokenSlots& tokens, std::int64_t batches, Arena& arena,
                      cudaStream_t stream) {
  SlotArgs args{};
  args.tokens = tokens;
  const int problems = tokens.items * tokens.heads;
  args.teams = make_teams(problems, tokens.spans.rows, multiprocessors(), nullptr);
  args.cursor = arena.take<std::int32_t>(batches * tokens.heads * tokens.spans.rows);
  args.sums = arena.take<std::int32_t>(2 * args.teams.blocks());
  args.teams.arrivals = arena.take<unsigned>(args.teams.count);
  if (!args.cursor || problems == 0) return;
  COTERIE_CUDA(cudaMemsetAsync(args.teams.arrivals, 0,
                               static_cast<std::size_t>(args.teams.count) * sizeof(unsigned),
                               stream));
  launch_cooperative(token_slots_kernel, args.teams.blocks(), kThreads, 0, stream, args);
}

}  // namespace coterie::cuda
