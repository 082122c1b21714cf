// SPDX-License-Identifier: MIT
#include "cuda/routing_tokens.h"

#include "cuda/device/await.cuh"
#include "cuda/device/row_lanes.cuh"
#include "cuda/launch.h"
#include "cuda/routing.h"
#include "cuda/tuning.h"

namespace coterie::cuda {

namespace {

constexpr int kThreads = 256;
constexpr int kBlockRows = 128;  // tokens of a block

// Rows of one head of a (B, heads, N, D) tensor: block (x, y, z) has rows from x * kBlockRows of
// head y of batch entry z. Calls body(row) for every row of this thread's group of lanes.
template <int kLanes, class Body>
__device__ __forceinline__ void for_block_rows(int rows, const Body& body) {
  constexpr int kGroups = kThreads / kLanes;
#pragma unroll 1
  for (int i = threadIdx.x / kLanes; i < kBlockRows; i += kGroups) {
    const int row = static_cast<int>(blockIdx.x) * kBlockRows + i;
    body(row, row < rows);
  }
}

dim3 row_grid(std::int64_t batches, std::int64_t heads, std::int64_t rows) {
  return dim3(static_cast<unsigned>((rows + kBlockRows - 1) / kBlockRows),
              static_cast<unsigned>(heads), static_cast<unsigned>(batches));
}

// A token of one side.
struct Token {
  int item, row;  // row counted from the item
  int slot;       // its only slot, where the tokens of a block are taken in the order of a run
  ItemSpan span;

  // item is -1 in padding.
  __device__ Token(const SequenceSpans& spans, int items, int place, bool there) {
    item = there ? spans.item_of(static_cast<int>(blockIdx.z), place, items) : -1;
    span = item >= 0 ? spans.span(item) : ItemSpan{0, 0, 0};
    row = place - span.begin;
    slot = -1;
  }
  // The token of slot `row` instead.
  __device__ void follow(const TokenSlots& slots, int head) {
    if (item < 0) return;
    slot = row;
    row = slots.index[slots.start(item, span, head) + slot];
  }
};

// Adds the rows of a token's slots of a head to `sum`.
template <class Lanes>
__device__ __forceinline__ int add_slots(const SlotRows& slots, const Token& token, int head,
                                         int width, typename Lanes::Values& sum) {
  if (token.item < 0) return 0;
  const TokenSlots& tokens = slots.tokens;
  const std::int64_t start = tokens.start(token.item, token.span, head);
  const auto add = [&](int slot) {
    typename Lanes::Values x;
    Lanes::load_floats(slots.values + (start + slot) * width, width, x);
#pragma unroll
    for (int j = 0; j < Lanes::kVector; ++j) sum[j] += x[j];
  };
  if (!tokens.slots) {
    add(token.slot);
    return 1;
  }
  const std::int64_t place = tokens.row(token.span, head, token.row);
  const int count = tokens.count[place];
  const std::int32_t* own = tokens.slots + start + tokens.first[place];
  for (int i = 0; i < count; ++i) add(own[i]);
  return count;
}

__device__ __forceinline__ float weight_of(const SlotWeight& weight, int count) {
  // A token in no cluster has nothing to divide.
  if (count == 0) return 0.0f;
  return weight.mean ? 1.0f / (static_cast<float>(count) + weight.eps) : 1.0f;
}

template <class T, int kWidth>
__global__ void __launch_bounds__(kThreads)
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

__global__ void __launch_bounds__(kThreads)
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
struct OwnArgs {
  OwnKeys own;
  Tensor4<const T> q, k, v;
  SequenceSpans key_spans;
  int group, value_group, key_heads;
};

// Whether a query's own key counts apart.
__device__ __forceinline__ bool adds_own(const OwnKeys& own, std::int64_t row) {
  return own.flags && own.flags[row] == kAddOwnKey;
}

// Its logit, scaled. By all lanes of a row, and all rows of the warp; `added` where it is wanted.
template <class Lanes, class T>
__device__ __forceinline__ float own_logit(const OwnArgs<T>& args, const Token& token, int head,
                                           std::int64_t row, const ItemSpan& keys, bool added) {
  typename Lanes::Values q, k;
  const int key_head = head / args.group;
  Lanes::load(args.q.rows(token.span.batch, head, token.span.begin), token.row, added, q);
  Lanes::load(args.k.rows(keys.batch, key_head, keys.begin), token.row, added, k);
  float product = Lanes::dot(q, k);
  if (!added) return -INFINITY;
  const RowStatistics a = args.own.q_stats[row];
  const RowStatistics b =
      args.own.k_stats[(static_cast<std::int64_t>(keys.batch) * args.key_heads + key_head) *
                           args.key_spans.rows +
                       keys.begin + token.row];
  product -= static_cast<float>(args.q.width) * a.mean * b.mean;
  return product * a.inverse * b.inverse * args.own.scale *
         (args.own.head_scale ? args.own.head_scale[head] : 1.0f);
}

template <class T, int kWidth>
__global__ void __launch_bounds__(kThreads)
    merge_kernel(SlotRows slots, const float* slot_lse, const __grid_constant__ OwnArgs<T> args,
                 Tensor4<T> out, float* lse) {
  await_previous();
  using Lanes = RowLanes<T, kWidth>;
  const TokenSlots& tokens = slots.tokens;
  const int head = static_cast<int>(blockIdx.y);
  const Rows<T> rows = out.rows(static_cast<int>(blockIdx.z), head, 0);
  for_block_rows<Lanes::kLanes>(tokens.spans.rows, [&](int place, bool there) {
    const Token token(tokens.spans, tokens.items, place, there);
    const bool valid = token.item >= 0;
    const std::int64_t row =
        (static_cast<std::int64_t>(blockIdx.z) * tokens.heads + head) * tokens.spans.rows + place;
    typename Lanes::Values sum = {}, part;
    const bool added = valid && adds_own(args.own, row);
    float own = -INFINITY;
    ItemSpan keys{0, 0, 0};
    if (args.own.flags) {
      if (valid) keys = args.key_spans.span(token.item);
      own = own_logit<Lanes>(args, token, head, row, keys, added);
    }
    float largest = own, total = 0.0f;
    const std::int64_t start = valid ? tokens.start(token.item, token.span, head) : 0;
    const std::int32_t* list = valid ? tokens.slots + start + tokens.first[row] : nullptr;
    const int count = valid ? tokens.count[row] : 0;
    for (int i = 0; i < count; ++i) largest = fmaxf(largest, slot_lse[start + list[i]]);
    const auto add = [&](float value) {
      const float weight = expf(value - largest);
      total += weight;
#pragma unroll
      for (int j = 0; j < Lanes::kVector; ++j) sum[j] = fmaf(weight, part[j], sum[j]);
    };
    if (largest > -INFINITY) {
      for (int i = 0; i < count; ++i) {
        const float value = slot_lse[start + list[i]];
        if (value == -INFINITY) continue;
        Lanes::load_floats(slots.values + (start + list[i]) * out.width, out.width, part);
        add(value);
      }
      if (added) {
        Lanes::load(args.v.rows(keys.batch, head / args.value_group, keys.begin), token.row, true,
                    part);
        add(own);
      }
    }
#pragma unroll
    for (int j = 0; j < Lanes::kVector; ++j) sum[j] = total > 0.0f ? sum[j] / total : 0.0f;
    if (!there) return;
    Lanes::store(rows, place, sum);
    if (Lanes::column() == 0) lse[row] = total > 0.0f ? largest + logf(total) : -INFINITY;
  });
}

template <class T, int kWidth>
__global__ void __launch_bounds__(kThreads)
    merge_deltas_kernel(TokenSlots tokens, const float* parts, const float* lse,
                        Tensor4<const T> grad_out, const __grid_constant__ OwnArgs<T> args,
                        float* delta) {
  await_previous();
  using Lanes = RowLanes<T, kWidth>;
  const int head = static_cast<int>(blockIdx.y);
  for_block_rows<Lanes::kLanes>(tokens.spans.rows, [&](int place, bool there) {
    const Token token(tokens.spans, tokens.items, place, there);
    const bool valid = token.item >= 0;
    const std::int64_t row =
        (static_cast<std::int64_t>(blockIdx.z) * tokens.heads + head) * tokens.spans.rows + place;
    float sum = 0.0f;
    if (valid) {
      const std::int64_t start = tokens.start(token.item, token.span, head);
      const std::int32_t* list = tokens.slots + start + tokens.first[row];
      for (int i = 0; i < tokens.count[row]; ++i) sum += parts[start + list[i]];
    }
    float weight = 0.0f, dlogit = 0.0f;
    if (args.own.flags) {
      const bool added = valid && adds_own(args.own, row);
      const ItemSpan keys = valid ? args.key_spans.span(token.item) : ItemSpan{0, 0, 0};
      const float logit = own_logit<Lanes>(args, token, head, row, keys, added);
      typename Lanes::Values g, v;
      Lanes::load(grad_out.rows(static_cast<int>(blockIdx.z), head, 0), place, added, g);
      Lanes::load(args.v.rows(keys.batch, head / args.value_group, keys.begin), token.row, added,
                  v);
      const float product = Lanes::dot(g, v);
      if (added) {
        weight = expf(logit - lse[row]);
        sum = fmaf(weight, product, sum);
        dlogit = args.own.scale * (args.own.head_scale ? args.own.head_scale[head] : 1.0f) *
                 weight * (product - sum);
      }
    }
    if (!there || Lanes::column() != 0) return;
    delta[row] = sum;
    if (!args.own.flags) return;
    args.own.weight[row] = weight;
    args.own.dlogit[row] = dlogit;
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
  double* products;  // (B, heads, blocks)
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
__global__ void __launch_bounds__(kThreads)
    token_gradients_kernel(const __grid_constant__ GradientArgs<T> args) {
  await_previous();
  using Lanes = RowLanes<T, kWidth>;
  constexpr int kGroups = kThreads / Lanes::kLanes;
  const SequenceSpans& spans = args.first.tokens.spans;
  const int head = static_cast<int>(blockIdx.y), batch = static_cast<int>(blockIdx.z);
  const int width = args.gradient.data ? args.gradient.width : args.rows.width;
  double products = 0.0;
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
      const RowStatistics stats =
          there ? args.stats[(static_cast<std::int64_t>(batch) * args.heads + head) * spans.rows +
                             place]
                : RowStatistics{0.0f, 0.0f};
      typename Lanes::Values y;
      Lanes::load(args.rows.rows(batch, head, 0), place, token.item >= 0, y);
#pragma unroll
      for (int j = 0; j < Lanes::kVector; ++j)
        y[j] = Lanes::column() + j < width ? (y[j] - stats.mean) * stats.inverse : 0.0f;
      if (args.products) products += static_cast<double>(Lanes::dot(y, sum));
      if (args.second.values) add(args.second);
      normalise_backward<Lanes>(y, width, stats.inverse, sum);
    }
    if (there && args.gradient.data) Lanes::store(args.gradient.rows(batch, head, 0), place, sum);
  });
  if (!args.products) return;
  __shared__ double parts[kGroups];
  if (Lanes::column() == 0) parts[threadIdx.x / Lanes::kLanes] = products;
  __syncthreads();
  if (threadIdx.x != 0) return;
  double total = 0.0;
  for (int group = 0; group < kGroups; ++group) total += parts[group];
  args.products[(static_cast<std::int64_t>(batch) * args.heads + head) * gridDim.x + blockIdx.x] =
      total;
}

// A block per head.
__global__ void __launch_bounds__(kThreads)
    logit_scale_kernel(const double* products, int batches, int heads, int blocks,
                       const float* head_scale, float* gradient) {
  await_previous();
  __shared__ double parts[kThreads];
  double sum = 0.0;
  for (int b = 0; b < batches; ++b)
    for (int i = threadIdx.x; i < blocks; i += kThreads)
      sum += products[(static_cast<std::int64_t>(b) * heads + blockIdx.x) * blocks + i];
  parts[threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.x != 0) return;
  double total = 0.0;
  for (int i = 0; i < kThreads; ++i) total += parts[i];
  gradient[blockIdx.x] = static_cast<float>(total / static_cast<double>(head_scale[blockIdx.x]));
}

__global__ void nonzero_scale_kernel(const float* from, float* to, int heads) {
  await_previous();
  const int head = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (head < heads) to[head] = from[head] == 0.0f ? 0x1p-60f : from[head];
}

template <class T>
OwnArgs<T> own_args(const AttentionCall& call, const OwnKeys& own) {
  return {own,
          tensor4<const T>(call.inputs.q),
          tensor4<const T>(call.k),
          tensor4<const T>(call.inputs.v),
          item_spans(call.inputs).k,
          static_cast<int>(call.H / call.key_heads),
          static_cast<int>(call.H / call.value_heads),
          static_cast<int>(call.key_heads)};
}

// Calls body(TypeTag<T>, std::integral_constant<int, width>).
template <class Body>
void dispatch_rows(const AttentionCall& call, Body&& body) {
  dispatch_element(call.op, call.inputs.q.dtype, [&](auto tag) {
    dispatch_wide_dim(call.op, call.Dk, [&](auto width) { body(tag, width); });
  });
}

std::int64_t product_blocks(const AttentionCall& call) {
  return (call.N + kBlockRows - 1) / kBlockRows;
}

}  // namespace

void combine_slots(const AttentionCall& call, const SlotRows& slots, const SlotWeight& weight,
                   const TensorView& out, cudaStream_t stream) {
  if (out.count() == 0) return;
  dispatch_rows(call, [&](auto tag, auto width) {
    using T = typename decltype(tag)::type;
    launch_early("combine_slots", combine_kernel<T, decltype(width)::value>,
                 row_grid(call.B, call.H, call.N), kThreads, 0, stream, slots, weight,
                 tensor4<T>(out));
  });
}

void slot_weights(const AttentionCall& call, const TokenSlots& slots, const SlotWeight& weight,
                  float* weights, cudaStream_t stream) {
  if (call.B * call.N == 0) return;
  launch_early("slot_weights", slot_weights_kernel, row_grid(call.B, call.H, call.N), kThreads, 0,
               stream, slots, weight, weights);
}

void merge_slots(const AttentionCall& call, const SlotRows& slots, const float* slot_lse,
                 const OwnKeys& own, const TensorView& out, float* lse, cudaStream_t stream) {
  if (out.count() == 0) return;
  dispatch_rows(call, [&](auto tag, auto width) {
    using T = typename decltype(tag)::type;
    launch_early("merge_slots", merge_kernel<T, decltype(width)::value>,
                 row_grid(call.B, call.H, call.N), kThreads, 0, stream, slots, slot_lse,
                 own_args<T>(call, own), tensor4<T>(out), lse);
  });
}

void merge_deltas(const AttentionCall& call, const TokenSlots& slots, const float* parts,
                  const float* lse, const TensorView& grad_out, const OwnKeys& own, float* delta,
                  cudaStream_t stream) {
  if (call.B * call.N == 0) return;
  dispatch_rows(call, [&](auto tag, auto width) {
    using T = typename decltype(tag)::type;
    launch_early("merge_deltas", merge_deltas_kernel<T, decltype(width)::value>,
                 row_grid(call.B, call.H, call.N), kThreads, 0, stream, slots, parts, lse,
                 tensor4<const T>(grad_out), own_args<T>(call, own), delta);
  });
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
                 row_grid(like.size(0), like.size(1), like.size(2)), kThreads, 0, stream, args);
  });
}

double* take_products(Arena& arena, const AttentionCall& call) {
  return arena.take<double>(call.B * call.H * product_blocks(call));
}

void logit_scale_gradient(const AttentionCall& call, const double* products,
                          const float* head_scale, const TensorView& dlogit_scale,
                          cudaStream_t stream) {
  launch_early("logit_scale_gradient", logit_scale_kernel, dim3(static_cast<unsigned>(call.H)),
               kThreads, 0, stream, products, static_cast<int>(call.B), static_cast<int>(call.H),
               static_cast<int>(product_blocks(call)), head_scale,
               static_cast<float*>(dlogit_scale.data));
}

void nonzero_scale(const AttentionCall& call, float* scale, cudaStream_t stream) {
  const int heads = static_cast<int>(call.H);
  launch_early("nonzero_scale", nonzero_scale_kernel,
               dim3(static_cast<unsigned>((heads + 127) / 128)), 128, 0, stream,
               static_cast<const float*>(call.inputs.logit_scale.data), scale, heads);
}

}  // namespace coterie::cuda
