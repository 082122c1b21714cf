// SPDX-License-Identifier: MIT
#include "cuda/slot_tokens.h"

#include "cuda/device/await.cuh"
#include "cuda/device/slot_tokens.cuh"
#include "cuda/launch.h"

namespace coterie::cuda {

namespace {

__device__ __forceinline__ float weight_of(const SlotWeight& weight, int count) {
  // A token in no cluster has nothing to divide.
  if (count == 0) return 0.0f;
  return weight.mean ? 1.0f / (static_cast<float>(count) + weight.eps) : 1.0f;
}

template <class T, int kWidth>
__global__ void __launch_bounds__(kTokenThreads)
    combine_kernel(SlotRows slots, SlotWeight weight, Tensor4<T> out) {
  await_previous();
  using Lanes = RowLanes<T, kWidth>;
  const int head = static_cast<int>(blockIdx.y);
  const Rows<T> rows = out.rows(static_cast<int>(blockIdx.z), head, 0);
  for_block_rows<Lanes::kLanes>(slots.tokens.spans.rows, [&](int place, bool there) {
    const Token token(slots.tokens.spans, slots.tokens.items, place, there);
    typename Lanes::Values sum = {};
    const float factor = weight_of(weight, add_slots<Lanes>(slots, token, head, out.width, sum));
#pragma unroll
    for (int j = 0; j < Lanes::kVector; ++j) sum[j] *= factor;
    if (there) Lanes::store(rows, place, sum);
  });
}

__global__ void __launch_bounds__(kTokenThreads)
    slot_weights_kernel(TokenSlots slots, SlotWeight weight, float* weights) {
  await_previous();
  for_block_rows<1>(slots.spans.rows, [&](int place, bool there) {
    if (!there) return;
    const Token token(slots.spans, slots.items, place, true);
    const std::int64_t row =
        (static_cast<std::int64_t>(blockIdx.z) * slots.heads + blockIdx.y) * slots.spans.rows +
        place;
    weights[row] = token.item < 0 ? 0.0f : weight_of(weight, slots.count[row]);
  });
}
template <class T>
struct GradientArgs {
  SlotRows first, second;
  int heads;  // of the gradient; those of the slots add up in their order
  Tensor4<const T> rows;
  const RowStatistics* stats;
  Tensor4<T> gradient;
  const float* own_factor;
  int query_heads;
  Tensor4<const T> own_rows;
  int own_heads;
  SequenceSpans own_spans, query_spans;
  const RowStatistics* own_stats;
  float* products;  // (B, heads, rows)
};

// Adds factor * row of the own keys of the query heads that belong to this head.
template <class Lanes, class T>
__device__ __forceinline__ void add_own(const GradientArgs<T>& args, const Token& token, int head,
                                        typename Lanes::Values& sum) {
  if (!args.own_factor || token.item < 0) return;
  const int sharing = args.query_heads / args.heads;
  const ItemSpan queries = args.query_spans.span(token.item);
  const ItemSpan span = args.own_spans.span(token.item);
  for (int h = head * sharing; h < (head + 1) * sharing; ++h) {
    const float factor =
        args.own_factor[(static_cast<std::int64_t>(queries.batch) * args.query_heads + h) *
                            args.query_spans.rows +
                        queries.begin + token.row];
    if (factor == 0.0f) continue;
    const int own_head = h / (args.query_heads / args.own_heads);
    RowStatistics stats{0.0f, 1.0f};
    if (args.own_stats)
      stats = args.own_stats[(static_cast<std::int64_t>(span.batch) * args.own_heads + own_head) *
                                 args.own_spans.rows +
                             span.begin + token.row];
    typename Lanes::Values x;
    Lanes::load(args.own_rows.rows(span.batch, own_head, span.begin), token.row, true, x);
#pragma unroll
    for (int j = 0; j < Lanes::kVector; ++j)
      if (Lanes::column() + j < args.own_rows.width)
        sum[j] = fmaf(factor, (x[j] - stats.mean) * stats.inverse, sum[j]);
  }
}

// dx = (dy - mean(dy) - y mean(dy y)) / sigma. By all lanes of the warp.
template <class Lanes>
__device__ __forceinline__ void normalise_backward(const typename Lanes::Values& y, int width,
                                                   float inverse, typename Lanes::Values& dy) {
  const float size = static_cast<float>(width);
  float sum = 0.0f;
#pragma unroll
  for (int j = 0; j < Lanes::kVector; ++j) sum += dy[j];
  const float mean = Lanes::sum(sum) / size, product = Lanes::dot(dy, y) / size;
#pragma unroll
  for (int j = 0; j < Lanes::kVector; ++j) dy[j] = (dy[j] - mean - y[j] * product) * inverse;
}

template <class T, int kWidth>
__global__ void __launch_bounds__(kTokenThreads)
    token_gradients_kernel(const __grid_constant__ GradientArgs<T> args) {
  await_previous();
  using Lanes = RowLanes<T, kWidth>;
  const SequenceSpans& spans = args.first.tokens.spans;
  const int head = static_cast<int>(blockIdx.y), batch = static_cast<int>(blockIdx.z);
  const int width = args.gradient.data ? args.gradient.width : args.rows.width;
  for_block_rows<Lanes::kLanes>(spans.rows, [&](int place, bool there) {
    Token token(spans, args.first.tokens.items, place, there);
    if (!args.first.tokens.slots) {
      token.follow(args.first.tokens, head);
      place = token.span.begin + token.row;
    }
    typename Lanes::Values sum = {};
    const auto add = [&](const SlotRows& slots) {
      const int sharing = slots.tokens.heads / args.heads;
      for (int h = head * sharing; h < (head + 1) * sharing; ++h)
        add_slots<Lanes>(slots, token, h, width, sum);
    };
    add(args.first);
    add_own<Lanes>(args, token, head, sum);
    if (args.stats) {
      const std::int64_t number =
          (static_cast<std::int64_t>(batch) * args.heads + head) * spans.rows + place;
      const RowStatistics stats = there ? args.stats[number] : RowStatistics{0.0f, 0.0f};
      typename Lanes::Values y;
      Lanes::load(args.rows.rows(batch, head, 0), place, token.item >= 0, y);
#pragma unroll
      for (int j = 0; j < Lanes::kVector; ++j)
        y[j] = Lanes::column() + j < width ? (y[j] - stats.mean) * stats.inverse : 0.0f;
      if (args.products) {
        const float product = Lanes::dot(y, sum);
        if (there && Lanes::column() == 0) args.products[number] = product;
      }
      if (args.second.values) add(args.second);
      normalise_backward<Lanes>(y, width, stats.inverse, sum);
    }
    if (there && args.gradient.data) Lanes::store(args.gradient.rows(batch, head, 0), place, sum);
  });
}
}  // namespace

void combine_slots(const AttentionCall& call, const SlotRows& slots, const SlotWeight& weight,
                   const TensorView& out, cudaStream_t stream) {
  if (out.count() == 0) return;
  dispatch_rows(call, [&](auto tag, auto width) {
    using T = typename decltype(tag)::type;
    launch_early("combine_slots", combine_kernel<T, decltype(width)::value>,
                 row_grid(call.B, call.H, call.N), kTokenThreads, 0, stream, slots, weight,
                 tensor4<T>(out));
  });
}

void slot_weights(const AttentionCall& call, const TokenSlots& slots, const SlotWeight& weight,
                  float* weights, cudaStream_t stream) {
  if (call.B * call.N == 0) return;
  launch_early("slot_weights", slot_weights_kernel, row_grid(call.B, call.H, call.N), kTokenThreads,
               0, stream, slots, weight, weights);
}
void token_gradients(const AttentionCall& call, const TokenGradient& gradient,
                     cudaStream_t stream) {
  const TensorView& like = gradient.gradient.present() ? gradient.gradient : gradient.rows;
  if (like.count() == 0) return;
  dispatch_rows(call, [&](auto tag, auto width) {
    using T = typename decltype(tag)::type;
    GradientArgs<T> args{};
    args.first = gradient.first;
    args.second = gradient.second;
    args.heads = static_cast<int>(like.size(1));
    if (gradient.stats) args.rows = tensor4<const T>(gradient.rows);
    args.stats = gradient.stats;
    if (gradient.gradient.present()) args.gradient = tensor4<T>(gradient.gradient);
    args.own_factor = gradient.own_factor;
    args.query_heads = static_cast<int>(call.H);
    if (gradient.own_factor) {
      args.own_rows = tensor4<const T>(gradient.own_rows);
      args.own_heads = static_cast<int>(gradient.own_rows.size(1));
      args.query_spans = item_spans(call.inputs).q;
      args.own_spans = gradient.own_spans;
    }
    args.own_stats = gradient.own_stats;
    args.products = gradient.products;
    launch_early("token_gradients", token_gradients_kernel<T, decltype(width)::value>,
                 row_grid(like.size(0), like.size(1), like.size(2)), kTokenThreads, 0, stream,
                 args);
  });
}
}  // namespace coterie::cuda
