// SPDX-License-Identifier: MIT
// The slots of every token by one kernel: teams of blocks count them, add up the counts, list them
// in the order in which they come, and sort every token's.
#include "cuda/lists/slots.h"

#include "core/item.h"
#include "cuda/prim/team.cuh"
#include "cuda/prim/warp.cuh"

namespace coterie::cuda {

namespace {

constexpr int kThreads = 1024;
constexpr int kBatch = 4;  // slots of a thread on their way at a time

struct SlotSideArgs {
  TokenSlots tokens;
  std::int32_t *turn, *listed;  // laid out as the index: a slot's number, slots in that order
};

struct SlotArgs {
  SlotSideArgs sides[2];
  Teams teams;
  std::int32_t* sums;  // (2, blocks): tokens' counts in a block's share, problems in turn
};

// The problem of an item and head of one side.
struct SlotProblem {
  int length, slots;
  const std::int32_t* index;
  std::int32_t *count, *first, *turn, *listed, *out;

  __device__ SlotProblem(const SlotSideArgs& side, int number) {
    const TokenSlots& tokens = side.tokens;
    const int item = number / tokens.heads, head = number % tokens.heads;
    const ItemSpan span = tokens.spans.span(item);
    const std::int64_t row = tokens.row(span, head, 0), start = tokens.start(item, span, head);
    length = span.length;
    slots = tokens.per_row > 0 ? span.length * tokens.per_row : static_cast<int>(tokens.block);
    index = tokens.index + start;
    count = tokens.count + row;
    first = tokens.first + row;
    turn = side.turn + start;
    listed = side.listed + start;
    out = tokens.slots + start;
  }

  // visit(slots, tokens) for kBatch slots of a thread at a time; a token of -1 is none.
  template <class Visit>
  __device__ void for_each(const RowRange& range, const Visit& visit) const {
    for (int begin = range.begin; begin < range.end; begin += kThreads * kBatch) {
      int slot[kBatch], token[kBatch];
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
        slot[j] = begin + j * kThreads + static_cast<int>(threadIdx.x);
        token[j] = slot[j] < range.end ? index[slot[j]] : -1;
        if (token[j] >= length) token[j] = -1;
      }
      visit(slot, token);
    }
  }
};

// first[] of the block's tokens, from their counts.
__device__ void place_tokens(Team& team, const RowRange& range, const SlotProblem& problem,
                             std::int32_t* sums) {
  int mine = 0, total = 0;
#pragma unroll 4
  for (int i = range.begin + threadIdx.x; i < range.end; i += kThreads) mine += problem.count[i];
  block_exclusive_scan(mine, total);
  if (threadIdx.x == 0) sums[team.rank] = total;
  team.sync();
  int carry = 0;
  for (int rank = 0; rank < team.rank; ++rank) carry += sums[rank];
  for (int begin = range.begin; begin < range.end; begin += kThreads * kBatch) {
    const int own = begin + static_cast<int>(threadIdx.x) * kBatch;
    int each[kBatch], sum = 0;
#pragma unroll
    for (int j = 0; j < kBatch; ++j)
      sum += each[j] = own + j < range.end ? problem.count[own + j] : 0;
    int place = block_exclusive_scan(sum, carry);
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      if (own + j < range.end) problem.first[own + j] = place;
      place += each[j];
    }
  }
}

// The listed slots of tokens in ascending order. Few are in many lists: their warp sorts them.
__device__ void order_slots(const RowRange& range, const SlotProblem& problem) {
  constexpr int kFew = 8;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  for (int begin = range.begin + static_cast<int>(threadIdx.x) - lane; begin < range.end;
       begin += kThreads) {
    const bool there = begin + lane < range.end;
    const int count = there ? problem.count[begin + lane] : 0;
    const int first = there ? problem.first[begin + lane] : 0;
    if (count <= kFew) {
      int slot[kFew], place[kFew] = {};
#pragma unroll
      for (int i = 0; i < kFew; ++i) slot[i] = i < count ? problem.listed[first + i] : 0x7fffffff;
#pragma unroll
      for (int i = 0; i < kFew; ++i)
#pragma unroll
        for (int j = i + 1; j < kFew; ++j) {
          const bool after = slot[i] > slot[j];
          place[i] += after;
          place[j] += !after;
        }
#pragma unroll
      for (int i = 0; i < kFew; ++i)
        if (i < count) problem.out[first + place[i]] = slot[i];
    }
    for (unsigned left = __ballot_sync(~0u, count > kFew); left; left &= left - 1) {
      const int owner = __ffs(static_cast<int>(left)) - 1;
      const int many = __shfl_sync(~0u, count, owner), at = __shfl_sync(~0u, first, owner);
      for (int i = lane; i < many; i += 32) {
        const int slot = problem.listed[at + i];
        int place = 0;
#pragma unroll 8
        for (int j = 0; j < many; ++j) place += problem.listed[at + j] < slot;
        problem.out[at + place] = slot;
      }
      __syncwarp();
    }
  }
}

__global__ void __launch_bounds__(kThreads, 1)
    token_slots_kernel(const __grid_constant__ SlotArgs args) {
  Team team(args.teams);
  const int first_problems = args.sides[0].tokens.items * args.sides[0].tokens.heads;
  const int problems = first_problems + args.sides[1].tokens.items * args.sides[1].tokens.heads;
  int turn = 0;
  for (int number = team.number; number < problems; number += args.teams.count, turn ^= 1) {
    const bool second = number >= first_problems;
    const SlotProblem problem(args.sides[second], second ? number - first_problems : number);
    const RowRange rows = team.share(problem.length), mine = team.share(problem.slots);
    for (int i = rows.begin + threadIdx.x; i < rows.end; i += kThreads) problem.count[i] = 0;
    team.sync();
    problem.for_each(mine, [&](const int(&slot)[kBatch], const int(&token)[kBatch]) {
      int place[kBatch];
#pragma unroll
      for (int j = 0; j < kBatch; ++j)
        place[j] = token[j] >= 0 ? atomicAdd(problem.count + token[j], 1) : 0;
#pragma unroll
      for (int j = 0; j < kBatch; ++j)
        if (token[j] >= 0) problem.turn[slot[j]] = place[j];
    });
    team.sync();
    place_tokens(team, rows, problem,
                 args.sums + (turn * args.teams.count + team.number) * team.size);
    team.sync();
    problem.for_each(mine, [&](const int(&slot)[kBatch], const int(&token)[kBatch]) {
#pragma unroll
      for (int j = 0; j < kBatch; ++j)
        if (token[j] >= 0)
          problem.listed[problem.first[token[j]] + problem.turn[slot[j]]] = slot[j];
    });
    team.sync();
    order_slots(rows, problem);
  }
}

std::int64_t slot_count(const TokenSlots& tokens, std::int64_t batches) {
  return (tokens.per_row > 0 ? batches * tokens.spans.rows * tokens.per_row
                             : tokens.items * tokens.block) *
         tokens.heads;
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
                            std::int64_t block, std::int64_t per_row, std::int64_t lists) {
  TokenSlots tokens = make_single_slots(sequences, batches, rows, heads, index);
  tokens.per_row = static_cast<int>(per_row);
  tokens.block = block;
  tokens.lists = static_cast<int>(lists);
  tokens.first = arena.take<std::int32_t>(batches * heads * rows);
  tokens.count = arena.take<std::int32_t>(batches * heads * rows);
  tokens.slots = arena.take<std::int32_t>(slot_count(tokens, batches));
  return tokens;
}

bool find_token_slots(const TokenSlots& tokens, std::int64_t batches, Arena& arena,
                      cudaStream_t stream, const TokenSlots* second, const MemberEnds& ends) {
  if (find_member_slots(tokens, second, ends, arena, stream)) return true;
  SlotArgs args{};
  int problems = 0, rows = 0;
  const auto add = [&](const TokenSlots& side, SlotSideArgs& to) {
    to.tokens = side;
    to.turn = arena.take<std::int32_t>(slot_count(side, batches));
    to.listed = arena.take<std::int32_t>(slot_count(side, batches));
    problems += side.items * side.heads;
    rows = max(rows, side.spans.rows);
  };
  add(tokens, args.sides[0]);
  if (second) add(*second, args.sides[1]);
  args.teams = make_teams(problems, rows, multiprocessors(), nullptr);
  args.sums = arena.take<std::int32_t>(2 * args.teams.blocks());
  args.teams.arrivals = arena.take<unsigned>(args.teams.count);
  if (arena.counting() || problems == 0) return false;
  COTERIE_CUDA(cudaMemsetAsync(args.teams.arrivals, 0,
                               static_cast<std::size_t>(args.teams.count) * sizeof(unsigned),
                               stream));
  launch_cooperative(token_slots_kernel, args.teams.blocks(), kThreads, 0, stream, args);
  return false;
}

}  // namespace coterie::cuda
