// SPDX-License-Identifier: MIT
// Forward pass of attention over lists: outputs and log-sum-exps.
//
// This kernel takes every plan; on Hopper attend_list_fwd_sm90a.cu takes most of them.
//
// A block takes 128 queries of a list, 32 a warp, and walks over the tiles of 64 keys that any of
// them sees. Warps leave out what none of their queries sees, and mask what not all of them do.
#include "cuda/device/list_forward_rows.cuh"
#include "cuda/launch.h"
#include "cuda/lists.h"
#include "cuda/padding.h"
#include "cuda/tuning.h"

namespace coterie::cuda {

static std::int64_t list_slots(const ListSide& side, std::int64_t lists, std::int64_t items,
                               std::int64_t batches, std::int64_t heads, std::int64_t rows) {
  switch (side.layout) {
    case ListLayout::runs:
      return batches * heads * rows * side.per_row;
    case ListLayout::members:
      return items * heads * lists * side.width;
    case ListLayout::rounds:
      return batches * heads * lists * rows;
    default:
      return batches * heads * rows;
  }
}

std::int64_t list_query_slots(const AttentionCall& call, const ListPlan& plan) {
  return list_slots(plan.queries, plan.lists, call.num_items(), call.B, call.H, call.N);
}

std::int64_t list_key_slots(const AttentionCall& call, const ListPlan& plan) {
  return list_slots(plan.keys, plan.lists, call.num_items(), call.B, call.key_heads, call.S);
}

namespace {

template <class T, int kDim>
__global__ void __launch_bounds__(kForwardThreads)
    list_forward_kernel(const __grid_constant__ ListForwardArgs<T> args) {
  extern __shared__ __align__(128) unsigned char memory[];
  __shared__ KeyFacts<kForwardKeys> facts[2];
  __shared__ RankRange ranges[kForwardRows];
  __shared__ QueryFacts query_facts[kForwardRows];
  const ForwardTiles<T, kDim> tiles(memory);
  const ListProblem& problem = args.problem;
  const int head = blockIdx.y;
  // With causal ranges the last tiles have most to do: they start first.
  const int number = problem.rule == ListRule::causal ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
  const ListTile tile = args.tiles.find(problem.q, head, number);
  if (tile.first == kNoRank) return;
  const ListPair pair = problem.pair(tile.item, head, tile.list);
  write_empty(args, pair, tile.first);
  if (tile.first >= pair.q.count) return;

  load_tile<kForwardRows, kForwardThreads>(
      tiles.queries, pair.q.rows(args.q.rows(pair.q_span.batch, head, pair.q_span.begin)),
      tile.first, pair.q.count - tile.first, pair.q.index_at(tile.first));
  const Rows<const T> k =
      pair.k.rows(args.k.rows(pair.k_span.batch, head / problem.group, pair.k_span.begin));
  const Rows<const T> v =
      pair.k.rows(args.v.rows(pair.k_span.batch, head / problem.value_group, pair.k_span.begin));
  // A thread looks up one query; those beyond the last repeat it.
  const int own = min(tile.first + static_cast<int>(threadIdx.x), pair.q.count - 1);
  ranges[threadIdx.x] = problem.range(pair, own);
  query_facts[threadIdx.x].load(problem, pair, head, own);
  __syncthreads();
  const int begin = ranges[0].low / kForwardKeys * kForwardKeys;
  const int end = ranges[kForwardRows - 1].high;
  const auto load_keys = [&](int stage, int from) {
    tiles.load(stage, k, v, pair.k, from);
    facts[stage].load(problem, pair, head, from);
  };
  load_keys(0, begin);

  ForwardRows<T, kDim> rows;
  rows.start(ranges, query_facts);
  const float scale = problem.score_scale(head);
  cp_async_wait<0>();
  __syncthreads();
  if (scale < 0.0f) {
    tiles.negate_queries();
    __syncthreads();
  }
  rows.queries.load(tiles.queries, threadIdx.x / 32 * 32);
  for (int from = begin, stage = 0; from < end; from += kForwardKeys, stage ^= 1) {
    cp_async_wait<0>();
    __syncthreads();
    if (from + kForwardKeys < end) load_keys(stage ^ 1, from + kForwardKeys);
    constexpr int kStep = 16 * ForwardRows<T, kDim>::kBlock;
#pragma unroll 1
    for (int column = 0; column < kForwardKeys; column += kStep)
      rows.attend(problem, tiles.keys(stage), tiles.values(stage), facts[stage], from, column,
                  fabsf(scale));
  }
  rows.write(args, pair, head, tile.first);
}

template <class T, int kDim>
void launch(const ListForwardArgs<T>& args, cudaStream_t stream) {
  constexpr int kBytes = ForwardTiles<T, kDim>::kBytes;
  const auto kernel = list_forward_kernel<T, kDim>;
  allow_shared_memory(kernel, kBytes);
  const dim3 grid(static_cast<unsigned>(args.tiles.total),
                  static_cast<unsigned>(args.problem.q.heads));
  kernel<<<grid, kForwardThreads, kBytes, stream>>>(args);
  COTERIE_LAUNCH("list_forward");
}

void write_padding(const AttentionCall& call, const ListPlan& plan, const ListOutputs& outputs,
                   cudaStream_t stream) {
  const Sequences& sequences = call.inputs.q_sequences;
  const bool by_row = !outputs.slot_rows;
  if (by_row) zero_padding(outputs.out, sequences, call.num_items(), stream);
  if (outputs.lse && (by_row || plan.queries.layout == ListLayout::rounds))
    fill_padding(outputs.lse, call.B, by_row ? call.H : call.H * plan.lists, call.N, sequences,
                 call.num_items(), -INFINITY, stream);
}

}  // namespace

void lists_forward(const AttentionCall& call, const ListPlan& plan, const ListOutputs& outputs,
                   cudaStream_t stream) {
  write_padding(call, plan, outputs, stream);
  const ListProblem problem = list_problem(call, plan);
  const ListTiles tiles = list_tiles(problem.q, kForwardRowBits);
  if (call.num_items() == 0 || call.N == 0 || call.H == 0 || tiles.total == 0) return;
  dispatch_element(call.op, call.inputs.q.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const ListForwardArgs<T> args{problem,
                                  tiles,
                                  tensor4<const T>(call.inputs.q),
                                  tensor4<const T>(call.k),
                                  tensor4<const T>(call.inputs.v),
                                  outputs.out.present() ? tensor4<T>(outputs.out) : Tensor4<T>{},
                                  static_cast<T*>(outputs.slot_rows),
                                  outputs.lse};
    if constexpr (sizeof(T) == 2)
      if (list_forward_sm90a(call, plan, args, stream)) return;
    dispatch_head_dim(call.op, call.Dk,
                      [&](auto width) { launch<T, decltype(width)::value>(args, stream); });
  });
}

}  // namespace coterie::cuda
