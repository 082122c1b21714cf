// SPDX-License-Identifier: MIT
// What an order of LSH attention implies (LshPlan): norms of the rows, slots of the tokens, which
// tokens see a key other than their own, and the lists of the wrap.
//
// Grids: a row per group of lanes for norms (RowLanes); a warp per chunk of a round for the rest.
// No shared memory. Preconditions: rows of at most 128 elements.
#include <climits>

#include "cuda/launch/dispatch.h"
#include "cuda/launch/launch.h"
#include "cuda/lsh/lsh.cuh"
#include "cuda/prim/row_lanes.cuh"
#include "cuda/prim/splits.cuh"

namespace coterie::cuda {
namespace {

constexpr int kThreads = 128, kWarps = kThreads / 32;

template <class T, int kWidth>
__global__ void __launch_bounds__(kThreads)
    lsh_norms_kernel(const __grid_constant__ Tensor4<const T> q, SequenceSpans spans, int items,
                     int H, std::int64_t rows, RowStatistics* norms) {
  using Lanes = RowLanes<T, kWidth>;
  const std::int64_t number =
      (static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x) / Lanes::kLanes;
  const int row = static_cast<int>(number % spans.rows);
  const int head = static_cast<int>(number / spans.rows % H);
  const int batch = static_cast<int>(number / spans.rows / H);
  const bool there = number < rows && spans.item_of(batch, row, items) >= 0;
  typename Lanes::Values x;
  Lanes::load(q.rows(there ? batch : 0, there ? head : 0, 0), row, there, x);
  const float square = Lanes::dot(x, x);
  if (number < rows && Lanes::column() == 0)
    norms[number] = {0.0f, square == 0.0f ? 0.0f : 1.0f / sqrtf(square)};
}

struct LshListArgs {
  LshTokens tokens;
  ItemChunks chunks;  // of the tokens of an item
  bool causal;
  const std::int32_t* order;
  std::uint8_t* drop_own;  // zeroed before the launch, or null
  std::int32_t *wrap_first, *wrap_last;
};

// A chunk of one round, by a warp.
__global__ void __launch_bounds__(kThreads)
    lsh_lists_kernel(const __grid_constant__ LshListArgs args) {
  const int lane = threadIdx.x % 32, size = args.chunks.chunk;
  const int number = static_cast<int>(blockIdx.x) * kWarps + static_cast<int>(threadIdx.x) / 32;
  if (number >= args.chunks.slots) return;
  const ItemChunk chunk = args.chunks.find(args.tokens.spans, number);
  const int list = blockIdx.y, tokens = chunk.span.length;  // list: head * rounds + round
  const std::int64_t base =
      (static_cast<std::int64_t>(chunk.span.batch) * args.tokens.H * args.tokens.rounds + list) *
          args.tokens.spans.rows +
      chunk.span.begin;
  const std::int32_t* order = args.order + base;
  const int last = (args.chunks.count(tokens) - 1) * size;  // first slot of the last chunk
  const bool wraps = args.wrap_first && last > 0;
  // The lowest token in sight, and the number of tokens in sight.
  int lowest = INT_MAX, count = 0;
  const auto see = [&](int begin, int end) {
    for (int slot = begin + lane; slot < end; slot += 32) lowest = min(lowest, order[slot]);
    count += max(end - begin, 0);
  };
  if (args.drop_own) {
    see(max(chunk.begin - size, 0), chunk.end);
    if (wraps && chunk.begin == 0) see(last, tokens);
    lowest = __reduce_min_sync(~0u, lowest);
  }
  std::uint8_t* own = args.drop_own;
  if (own)
    own +=
        (static_cast<std::int64_t>(chunk.span.batch) * args.tokens.H + list / args.tokens.rounds) *
            args.tokens.spans.rows +
        chunk.span.begin;
  for (int slot = chunk.begin + lane; slot < chunk.end; slot += 32) {
    const int token = order[slot];
    args.tokens.slots[base + token] = slot;
    // Rounds that see another key all write the same 1.
    if (args.drop_own && (args.causal ? lowest != token : count != 1)) own[token] = 1;
  }
  if (!args.wrap_first || chunk.split != 0) return;
  const std::int64_t wrap =
      (static_cast<std::int64_t>(chunk.item) * args.tokens.H * args.tokens.rounds + list) * size;
  for (int i = lane; i < size; i += 32) {
    args.wrap_first[wrap + i] = wraps ? order[i] : -1;
    args.wrap_last[wrap + i] = wraps && last + i < tokens ? order[last + i] : -1;
  }
}

}  // namespace

LshPlan::LshPlan(const LshParams& params, const AttentionCall& call, const TensorView& order,
                 Arena& arena)
    : tokens{item_spans(call.inputs).q,
             static_cast<int>(call.num_items()),
             static_cast<int>(call.H),
             static_cast<int>(params.rounds),
             static_cast<int>(
                 min(max(params.chunk, std::int64_t{1}), max(call.N, std::int64_t{1}))),
             params.combine == LshCombine::lse && call.N > params.chunk,
             nullptr},
      merges(params.combine == LshCombine::lse),
      round_weight(merges ? 1.0f : 1.0f / static_cast<float>(params.rounds)),
      band_slots(call.B * call.H * params.rounds * call.N),
      wrap_slots(tokens.wraps ? call.num_items() * call.H * params.rounds * tokens.chunk : 0) {
  const std::int64_t rows = call.B * call.H * call.N;
  norms = arena.take<RowStatistics>(rows);
  tokens.slots = arena.take<std::int32_t>(band_slots);
  if (merges) drop_own = arena.take<std::uint8_t>(rows);
  if (tokens.wraps) {
    wrap_first = arena.take<std::int32_t>(wrap_slots);
    wrap_last = arena.take<std::int32_t>(wrap_slots);
  }
  band.lists = tokens.rounds;
  band.queries.layout = ListLayout::rounds;
  band.queries.index = static_cast<const std::int32_t*>(order.data);
  band.queries.index_heads = tokens.H;
  band.filters.causal_rows = call.causal;
  band.scale = static_cast<float>(call.scale);
  band.k_stats = norms;
  wrap = band;
  wrap.queries.layout = ListLayout::members;
  wrap.queries.width = tokens.chunk;
  wrap.keys = wrap.queries;
  wrap.queries.index = wrap_first;
  wrap.keys.index = wrap_last;
  band.keys = band.queries;
  band.ranges.rule = ListRule::blocked;
  band.ranges.window = tokens.chunk;
  band.ranges.before = 1;
  band.filters.drop_own = drop_own;
}

void lsh_find_lists(const LshPlan& plan, const AttentionCall& call, const TensorView& order,
                    cudaStream_t stream) {
  const std::int64_t rows = call.B * call.H * call.N;
  const LshTokens& tokens = plan.tokens;
  dispatch_element(call.op, call.inputs.q.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    dispatch_head_dim(call.op, call.Dk, [&](auto width) {
      constexpr int kWidth = decltype(width)::value;
      constexpr int kEach = kThreads / RowLanes<T, kWidth>::kLanes;
      launch_kernel("lsh norms", {}, lsh_norms_kernel<T, kWidth>,
                    dim3(static_cast<unsigned>((rows + kEach - 1) / kEach)), kThreads, 0, stream,
                    tensor4<const T>(call.inputs.q), tokens.spans, tokens.items, tokens.H, rows,
                    plan.norms);
    });
  });
  if (plan.drop_own)
    COTERIE_CUDA(cudaMemsetAsync(plan.drop_own, 0, static_cast<std::size_t>(rows), stream));
  const LshListArgs args{tokens,        row_tiles(tokens.spans, tokens.items, tokens.chunk),
                         call.causal,   static_cast<const std::int32_t*>(order.data),
                         plan.drop_own, plan.wrap_first,
                         plan.wrap_last};
  if (args.chunks.slots == 0) return;
  launch_kernel("lsh lists", {}, lsh_lists_kernel,
                dim3(static_cast<unsigned>((args.chunks.slots + kWarps - 1) / kWarps),
                     static_cast<unsigned>(tokens.H * tokens.rounds)),
                kThreads, 0, stream, args);
}

}  // namespace coterie::cuda
