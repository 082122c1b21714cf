// SPDX-License-Identifier: MIT
#include <climits>

#include "cuda/launch/dispatch.h"
#include "cuda/launch/launch.h"
#include "cuda/lsh/lsh.h"
#include "cuda/prim/row_lanes.cuh"
#include "cuda/prim/splits.cuh"

namespace coterie::cuda {
namespace {

constexpr int kThreads = 128, kWarps = kThreads / 32;

template <class T, int kWidth>
__global__ void __launch_bounds__(kThreads)
    norms_kernel(const __grid_constant__ Tensor4<const T> q, SequenceSpans spans, int items, int H,
                 std::int64_t rows, RowStatistics* norms) {
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

struct ListArgs {
  SequenceSpans spans;
  ItemChunks chunks;  // of the tokens of an item
  int H, rounds;
  bool causal;
  const std::int32_t* order;
  std::int32_t* slots;
  std::uint8_t* drop_own;  // zeros before, or null
  std::int32_t *wrap_first, *wrap_last;
};

// A chunk of one round, by a warp.
__global__ void __launch_bounds__(kThreads)
    lsh_lists_kernel(const __grid_constant__ ListArgs args) {
  const int lane = threadIdx.x % 32, size = args.chunks.chunk;
  const int number = static_cast<int>(blockIdx.x) * kWarps + static_cast<int>(threadIdx.x) / 32;
  if (number >= args.chunks.slots) return;
  const ItemChunk chunk = args.chunks.find(args.spans, number);
  const int list = blockIdx.y, tokens = chunk.span.length;  // list: head * rounds + round
  const std::int64_t base =
      (static_cast<std::int64_t>(chunk.span.batch) * args.H * args.rounds + list) *
          args.spans.rows +
      chunk.span.begin;
  const std::int32_t* order = args.order + base;
  const int last = (args.chunks.count(tokens) - 1) * size;  // first slot of the last chunk
  const bool wraps = args.wrap_first && last > 0;
  // The lowest token in sight, and how many there are.
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
    own += (static_cast<std::int64_t>(chunk.span.batch) * args.H + list / args.rounds) *
               args.spans.rows +
           chunk.span.begin;
  for (int slot = chunk.begin + lane; slot < chunk.end; slot += 32) {
    const int token = order[slot];
    args.slots[base + token] = slot;
    // Rounds that meet another key write the same 1.
    if (args.drop_own && (args.causal ? lowest != token : count != 1)) own[token] = 1;
  }
  if (!args.wrap_first || chunk.split != 0) return;
  const std::int64_t wrap =
      (static_cast<std::int64_t>(chunk.item) * args.H * args.rounds + list) * size;
  for (int i = lane; i < size; i += 32) {
    args.wrap_first[wrap + i] = wraps ? order[i] : -1;
    args.wrap_last[wrap + i] = wraps && last + i < tokens ? order[last + i] : -1;
  }
}

}  // namespace

LshLists::LshLists(Arena& arena, const LshParams& params, const AttentionCall& call)
    : rounds(static_cast<int>(params.rounds)),
      chunk(
          static_cast<int>(min(max(params.chunk, std::int64_t{1}), max(call.N, std::int64_t{1})))),
      merges(params.combine == LshCombine::lse),
      wraps(merges && call.N > params.chunk),
      round_weight(merges ? 1.0f : 1.0f / static_cast<float>(params.rounds)) {
  norms = arena.take<RowStatistics>(call.B * call.H * call.N);
  slots = arena.take<std::int32_t>(band_slots(call));
  if (merges) drop_own = arena.take<std::uint8_t>(call.B * call.H * call.N);
  if (!wraps) return;
  wrap_first = arena.take<std::int32_t>(wrap_slots(call));
  wrap_last = arena.take<std::int32_t>(wrap_slots(call));
}

std::int64_t LshLists::band_slots(const AttentionCall& call) const {
  return call.B * call.H * rounds * call.N;
}
std::int64_t LshLists::wrap_slots(const AttentionCall& call) const {
  return wraps ? call.num_items() * call.H * rounds * chunk : 0;
}

ListCall LshLists::band(const AttentionCall& call, const TensorView& order) const {
  ListCall plan;
  plan.lists = rounds;
  plan.queries.layout = ListLayout::rounds;
  plan.queries.index = static_cast<const std::int32_t*>(order.data);
  plan.queries.index_heads = static_cast<int>(call.H);
  plan.keys = plan.queries;
  plan.ranges.rule = ListRule::blocked;
  plan.ranges.window = chunk;
  plan.ranges.before = 1;
  plan.filters.causal_rows = call.causal;
  plan.filters.drop_own = drop_own;
  plan.scale = static_cast<float>(call.scale);
  plan.k_stats = norms;
  return plan;
}

ListCall LshLists::wrap(const AttentionCall& call) const {
  ListCall plan;
  plan.lists = rounds;
  plan.queries.layout = plan.keys.layout = ListLayout::members;
  plan.queries.index_heads = plan.keys.index_heads = static_cast<int>(call.H);
  plan.queries.width = plan.keys.width = chunk;
  plan.queries.index = wrap_first;
  plan.keys.index = wrap_last;
  plan.filters.causal_rows = call.causal;
  plan.scale = static_cast<float>(call.scale);
  plan.k_stats = norms;
  return plan;
}

void find_lsh_lists(const AttentionCall& call, const LshLists& lists, const TensorView& order,
                    cudaStream_t stream) {
  const std::int64_t rows = call.B * call.H * call.N;
  if (rows == 0) return;
  const SequenceSpans spans = item_spans(call.inputs).q;
  dispatch_element(call.op, call.inputs.q.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    dispatch_head_dim(call.op, call.Dk, [&](auto width) {
      constexpr int kWidth = decltype(width)::value;
      constexpr int kEach = kThreads / RowLanes<T, kWidth>::kLanes;
      norms_kernel<T, kWidth>
          <<<static_cast<unsigned>((rows + kEach - 1) / kEach), kThreads, 0, stream>>>(
              tensor4<const T>(call.inputs.q), spans, static_cast<int>(call.num_items()),
              static_cast<int>(call.H), rows, lists.norms);
      COTERIE_LAUNCH("lsh_norms");
    });
  });
  if (lists.drop_own)
    COTERIE_CUDA(cudaMemsetAsync(lists.drop_own, 0, static_cast<std::size_t>(rows), stream));
  ListArgs args{spans,
                row_tiles(spans, static_cast<int>(call.num_items()), lists.chunk),
                static_cast<int>(call.H),
                lists.rounds,
                call.causal,
                static_cast<const std::int32_t*>(order.data),
                lists.slots,
                lists.drop_own,
                lists.wrap_first,
                lists.wrap_last};
  if (args.chunks.slots == 0) return;
  const dim3 grid(static_cast<unsigned>((args.chunks.slots + kWarps - 1) / kWarps),
                  static_cast<unsigned>(call.H * lists.rounds));
  lsh_lists_kernel<<<grid, kThreads, 0, stream>>>(args);
  COTERIE_LAUNCH("lsh_lists");
}

}  // namespace coterie::cuda
