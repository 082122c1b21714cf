// SPDX-License-Identifier: MIT
// The slots of every token of lists that ascend. A block takes a range of tokens, which is a piece
// of every list: a first kernel finds where the pieces begin. Groups of lanes take neighbouring
// lists, count their tokens in shared memory, and know then where each of their slots goes.
#include "cuda/device/await.cuh"
#include "cuda/device/block_scan.cuh"
#include "cuda/launch.h"
#include "cuda/slots.h"
#include "cuda/tuning.h"

namespace coterie::cuda {

namespace {

constexpr int kThreads = 256, kEach = 8, kRange = kThreads * kEach;  // tokens of a block
constexpr int kLanes = 16, kGroups = kThreads / kLanes;
constexpr int kBatch = 8;  // lists of a group on their way at a time

struct MemberSlots {
  TokenSlots tokens;
  int width, problems;
  std::int32_t* bounds;  // (problems, ranges + 1, lists): the first place of a list's piece
};

struct MemberSlotArgs {
  MemberSlots sides[2];
  int ranges;
};

// Item and head of one side.
struct MemberProblem {
  const MemberSlots& side;
  int number, head, length;
  ItemSpan span;
  std::int64_t start;  // of its slots

  __device__ MemberProblem(const MemberSlotArgs& args, int of_both)
      : side(args.sides[of_both >= args.sides[0].problems]),
        number(of_both >= args.sides[0].problems ? of_both - args.sides[0].problems : of_both),
        head(number % side.tokens.heads),
        span(side.tokens.spans.span(number / side.tokens.heads)) {
    length = span.length;
    start = side.tokens.start(number / side.tokens.heads, span, head);
  }
  __device__ std::int32_t* bounds(const MemberSlotArgs& args, int range) const {
    return side.bounds +
           (static_cast<std::int64_t>(number) * (args.ranges + 1) + range) * side.tokens.lists;
  }
};

// A thread per slot; blockIdx.y counts problems.
__global__ void __launch_bounds__(kThreads)
    member_bounds_kernel(const __grid_constant__ MemberSlotArgs args) {
  await_previous();
  const MemberProblem problem(args, static_cast<int>(blockIdx.y));
  const int slot = static_cast<int>(blockIdx.x) * kThreads + static_cast<int>(threadIdx.x);
  if (slot >= problem.side.tokens.block) return;
  const int width = problem.side.width, list = slot / width, place = slot % width;
  const std::int32_t* index = problem.side.tokens.index + problem.start + slot;
  const auto range_of = [&](int token) {
    return token >= 0 && token < problem.length ? token / kRange : args.ranges;
  };
  const int own = range_of(index[0]);
  for (int range = place > 0 ? range_of(index[-1]) + 1 : 0; range <= own; ++range)
    problem.bounds(args, range)[list] = place;
  if (place + 1 == width)
    for (int range = own + 1; range <= args.ranges; ++range)
      problem.bounds(args, range)[list] = width;
}

// Calls visit(slot, token) for the block's pieces of this group's lists, list by list.
template <class Visit>
__device__ __forceinline__ void for_pieces(const MemberProblem& problem, const std::int32_t* begins,
                                           const std::int32_t* ends, const Visit& visit) {
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  const unsigned lanes = 0xffffu << (threadIdx.x % 32 - lane);
  const int lists = problem.side.tokens.lists, width = problem.side.width;
  const int share = (lists + kGroups - 1) / kGroups;
  const int first = static_cast<int>(threadIdx.x) / kLanes * share;
  const int last = min(first + share, lists);
  const std::int32_t* index = problem.side.tokens.index + problem.start;
  for (int chunk = first; chunk < last; chunk += kLanes) {  // a lane knows the piece of one list
    const int begin = chunk + lane < last ? begins[chunk + lane] : 0;
    const int end = chunk + lane < last ? ends[chunk + lane] : 0;
    for (int base = 0; base < min(last - chunk, kLanes); base += kBatch) {
      int place[kBatch], token[kBatch];
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
        place[j] = __shfl_sync(lanes, begin, base + j, kLanes) + lane;
        const bool there = place[j] < __shfl_sync(lanes, end, base + j, kLanes);
        const std::int64_t row = static_cast<std::int64_t>(chunk + base + j) * width;
        token[j] = there ? index[row + place[j]] : -1;
      }
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
        const std::int64_t row = static_cast<std::int64_t>(chunk + base + j) * width;
        if (token[j] >= 0) visit(static_cast<int>(row + place[j]), token[j]);
        const int stop = __shfl_sync(lanes, end, base + j, kLanes);
        for (int next = place[j] + kLanes; next < stop; next += kLanes)
          visit(static_cast<int>(row + next), index[row + next]);
        __syncwarp(lanes);
      }
    }
  }
}

// Blocks (range, problem).
__global__ void __launch_bounds__(kThreads, 3)
    member_slots_kernel(const __grid_constant__ MemberSlotArgs args) {
  await_writes();
  release_next();                    // kernels that need no slots run beside this one
  extern __shared__ uint4 shared[];  // counts [group][token] of 16 bits
  __shared__ int firsts[kRange + 1];
  const MemberProblem problem(args, static_cast<int>(blockIdx.y));
  const int range = static_cast<int>(blockIdx.x), first_token = range * kRange;
  const TokenSlots& tokens = problem.side.tokens;
  const std::int64_t row = tokens.row(problem.span, problem.head, first_token);
  for (int i = max(problem.length - first_token, 0) + static_cast<int>(threadIdx.x);
       i < min(kRange, tokens.spans.rows - first_token); i += kThreads)  // padding
    tokens.first[row + i] = tokens.count[row + i] = 0;
  if (first_token >= problem.length) return;
  const std::int32_t *begins = problem.bounds(args, range), *ends = begins + tokens.lists;
  for (int i = threadIdx.x; i < kGroups * kThreads; i += kThreads)
    shared[i] = make_uint4(0, 0, 0, 0);
  int base = 0, before = 0;  // slots of tokens before the range
  for (int c = threadIdx.x; c < tokens.lists; c += kThreads) before += begins[c];
  block_exclusive_scan(before, base);  // also waits for the zeros
  auto* counts =
      reinterpret_cast<std::uint16_t*>(shared) + static_cast<int>(threadIdx.x) / kLanes * kRange;
  for_pieces(problem, begins, ends, [&](int, int token) { ++counts[token - first_token]; });
  __syncthreads();
  uint4 total = make_uint4(0, 0, 0, 0);  // of this thread's 8 tokens; becomes where groups begin
#pragma unroll
  for (int group = 0; group < kGroups; ++group) {
    const uint4 own = shared[group * kThreads + static_cast<int>(threadIdx.x)];
    shared[group * kThreads + static_cast<int>(threadIdx.x)] = total;
    total.x += own.x, total.y += own.y, total.z += own.z, total.w += own.w;
  }
  int each[kEach], sum = 0, carry = 0;
#pragma unroll
  for (int i = 0; i < kEach; ++i)
    sum += each[i] = static_cast<int>((&total.x)[i / 2] >> (i % 2 * 16) & 0xffffu);
  int place = block_exclusive_scan(sum, carry);
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    firsts[static_cast<int>(threadIdx.x) * kEach + i] = base + place;
    place += each[i];
  }
  if (threadIdx.x == kThreads - 1) firsts[kRange] = base + place;
  __syncthreads();
  for (int i = threadIdx.x; i < min(kRange, problem.length - first_token); i += kThreads) {
    tokens.first[row + i] = firsts[i];
    tokens.count[row + i] = firsts[i + 1] - firsts[i];
  }
  std::int32_t* out = tokens.slots + problem.start;
  for_pieces(problem, begins, ends, [&](int slot, int token) {
    const int own = token - first_token;
    out[firsts[own] + counts[own]++] = slot;
  });
}

}  // namespace

bool find_member_slots(const TokenSlots& tokens, const TokenSlots* second, Arena& arena,
                       cudaStream_t stream) {
  const std::int64_t most = static_cast<std::int64_t>(tokens.items) * tokens.heads +
                            (second ? static_cast<std::int64_t>(second->items) * second->heads : 0);
  if (tokens.lists == 0 || tokens.spans.cu_seqlens || most > kMaxBlocks) return false;
  MemberSlotArgs args{};
  const int rows = max(tokens.spans.rows, second ? second->spans.rows : 0);
  args.ranges = (rows + kRange - 1) / kRange;
  std::int64_t block = 0;
  const auto add = [&](const TokenSlots& side, MemberSlots& to) {
    to.tokens = side;
    to.width = static_cast<int>(side.block / side.lists);
    to.problems = side.items * side.heads;
    to.bounds = arena.take<std::int32_t>(static_cast<std::int64_t>(to.problems) *
                                         (args.ranges + 1) * side.lists);
    block = max(block, side.block);
  };
  add(tokens, args.sides[0]);
  if (second) add(*second, args.sides[1]);
  const int problems = args.sides[0].problems + args.sides[1].problems;
  if (!args.sides[0].bounds || problems == 0 || block == 0 || rows == 0) return true;
  launch_early("member_bounds", member_bounds_kernel,
               dim3(static_cast<unsigned>((block + kThreads - 1) / kThreads),
                    static_cast<unsigned>(problems)),
               kThreads, 0, stream, args);
  launch_early("member_slots", member_slots_kernel,
               dim3(static_cast<unsigned>(args.ranges), static_cast<unsigned>(problems)), kThreads,
               static_cast<std::size_t>(kGroups) * kThreads * sizeof(uint4), stream, args);
  return true;
}

}  // namespace coterie::cuda
