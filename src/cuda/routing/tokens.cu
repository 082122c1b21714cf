// SPDX-License-Identifier: MIT
// From slots of routing's lists back to tokens, if slots are floats or parts of a softmax; sums of
// rounded slots are in lists/slot_sum.cu.
//   merge_slots            out = sum_i w_i out_i with w = softmax of the log-sum-exps of a query's
//                          slots and the logit of its own key
//   merge_deltas           delta = sum of the slots' parts and the own key's, and its gradient
//   token_gradients        dx = (dy - mean(dy) - y mean(dy y)) / sigma, dy the sum over the slots
//   logit_scale_gradient   sum over the rows of a head of q . dq
//
// Grid and block: (rows / 128, heads, batch), 256 threads; neighbouring lanes share a row, 16 bytes
// each. logit_scale_gradient: a block per head, 2 KB of shared memory; the others use none.
// token_gradients: __launch_bounds__(256, 3). Preconditions: none. Sums run in the order of the
// slots, in fp32.
#include <cstdint>

#include "cuda/launch/dispatch.h"
#include "cuda/launch/launch.h"
#include "cuda/prim/dependent.cuh"
#include "cuda/prim/dropout.cuh"
#include "cuda/prim/row_lanes.cuh"
#include "cuda/prim/warp.cuh"
#include "cuda/routing/stages.h"

namespace coterie::cuda {

namespace {

constexpr int kTokenThreads = 256;
constexpr int kTokenRows = 128;  // tokens per block

// Rows of one head of a (B, heads, N, D) tensor: block (x, y, z) has rows from x * kTokenRows of
// head y of batch entry z. Calls body(row) for every row of this thread's group of lanes.
template <int kLanes, class Body>
__device__ __forceinline__ void for_block_rows(int rows, const Body& body) {
  constexpr int kGroups = kTokenThreads / kLanes;
#pragma unroll 1
  for (int i = threadIdx.x / kLanes; i < kTokenRows; i += kGroups) {
    const int row = static_cast<int>(blockIdx.x) * kTokenRows + i;
    body(row, row < rows);
  }
}

inline dim3 row_grid(std::int64_t batches, std::int64_t heads, std::int64_t rows) {
  return dim3(static_cast<unsigned>((rows + kTokenRows - 1) / kTokenRows),
              static_cast<unsigned>(heads), static_cast<unsigned>(batches));
}

// A token of one side.
struct Token {
  int item, row;  // row counted from the item
  int slot;       // its only slot, if the tokens of a block are taken in the order of a run
  ItemSpan span;

  // item is -1 in padding.
  __device__ Token(const SequenceSpans& spans, int items, int place, bool there) {
    item = there ? spans.item_of(static_cast<int>(blockIdx.z), place, items) : -1;
    span = item >= 0 ? spans.span(item) : ItemSpan{0, 0, 0};
    row = place - span.begin;
    slot = -1;
  }
  // Switches to the token of slot `row`.
  __device__ void follow(const TokenSlots& slots, int head) {
    if (item < 0) return;
    slot = row;
    row = slots.index[slots.start(item, span, head) + slot];
  }
};

// Calls body(TypeTag<T>, std::integral_constant<int, width>).
template <class Body>
void dispatch_rows(const AttentionCall& call, Body&& body) {
  dispatch_element(call.op, call.inputs.q.dtype, [&](auto tag) {
    dispatch_head_dim(call.op, call.Dk, [&](auto width) { body(tag, width); });
  });
}

template <class T>
struct OwnArgs {
  OwnKeys own;
  Tensor4<const T> q, k, v;
  SequenceSpans key_spans;
  int group, value_group, key_heads;
};

// Whether a query's own key is added separately.
__device__ __forceinline__ bool adds_own(const OwnKeys& own, std::int64_t row) {
  return own.flags && own.flags[row] == kAddOwnKey;
}

// Dropout of its weight.
__device__ __forceinline__ float own_kept(const OwnKeys& own, const Token& token, int heads,
                                          int head) {
  if (!own.dropout.on()) return 1.0f;
  const DropoutRow words =
      own.dropout.query(static_cast<std::int64_t>(token.item) * heads + head, token.row);
  return kept(own.dropout, words, token.row);
}

// Its logit, scaled. Called by all lanes of a row, and all rows of the warp; `added`: requested.
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
__global__ void __launch_bounds__(kTokenThreads)
    merge_kernel(SlotRows slots, const float* slot_lse, const __grid_constant__ OwnArgs<T> args,
                 Tensor4<T> out, float* lse) {
  await_previous();
  using Lanes = RowLanes<T, kWidth>;
  const TokenSlots& tokens = slots.tokens;
  const int head = static_cast<int>(blockIdx.y);
  const Rows<T> rows = out.rows(static_cast<int>(blockIdx.z), head, 0);
  const Rows<const T> values{static_cast<const T*>(slots.values), out.width, out.width,
                             out.width % Lanes::kVector == 0};
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
        Lanes::load(values, start + list[i], true, part);
        add(value);
      }
      if (added) {
        Lanes::load(args.v.rows(keys.batch, head / args.value_group, keys.begin), token.row, true,
                    part);
        const float factor = own_kept(args.own, token, tokens.heads, head);
#pragma unroll
        for (int j = 0; j < Lanes::kVector; ++j) part[j] *= factor;
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
__global__ void __launch_bounds__(kTokenThreads)
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
      float product = Lanes::dot(g, v);
      if (added) {
        const float factor = own_kept(args.own, token, tokens.heads, head);
        const float p = expf(logit - lse[row]);
        product *= factor;
        weight = p * factor;
        sum = fmaf(p, product, sum);
        dlogit = args.own.scale * (args.own.head_scale ? args.own.head_scale[head] : 1.0f) * p *
                 (product - sum);
      }
    }
    if (!there || Lanes::column() != 0) return;
    delta[row] = sum;
    if (!args.own.flags) return;
    args.own.weight[row] = weight;
    args.own.dlogit[row] = dlogit;
  });
}
constexpr int kSumThreads = 1024;

// A block per head.
__global__ void __launch_bounds__(kSumThreads)
    logit_scale_kernel(const float* products, SequenceSpans spans, int items, int batches,
                       int heads, const float* head_scale, float* gradient) {
  await_previous();
  __shared__ double parts[kSumThreads / 32];
  double sum = 0.0;
  for (int b = 0; b < batches; ++b) {
    const float* own = products + (static_cast<std::int64_t>(b) * heads + blockIdx.x) * spans.rows;
#pragma unroll 8
    for (int row = threadIdx.x; row < spans.rows; row += kSumThreads) {
      const float product = own[row];  // loaded before it is known to count
      sum += spans.item_of(b, row, items) >= 0 ? static_cast<double>(product) : 0.0;
    }
  }
  sum = warp_sum(sum);
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = sum;
  __syncthreads();
  if (threadIdx.x >= 32) return;
  const double total = warp_sum(parts[threadIdx.x]);
  if (threadIdx.x == 0)
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

// The slots of a token: own[0 .. count), or a single one.
struct SlotSet {
  const std::int32_t* own;
  int single, count;

  __device__ __forceinline__ int slot(int i) const { return own ? own[i] : single; }
};

// Adds a token's rows in the order of its slots, several in flight at a time. Called by all lanes
// of a row.
template <class Lanes>
__device__ __forceinline__ void add_whole_rows(const float* values, const SlotSet& set, int width,
                                               typename Lanes::Values& sum) {
  constexpr int kAhead = 4;
  const int lane = static_cast<int>(threadIdx.x) % Lanes::kLanes;
  const unsigned lanes = (~0u >> (32 - Lanes::kLanes)) << (threadIdx.x % 32 - lane);
  const bool there = Lanes::column() < width;
  values += Lanes::column();
#pragma unroll 1
  for (int base = 0; base < set.count; base += Lanes::kLanes) {
    const int slot = base + lane < set.count ? set.slot(base + lane) : 0;
    const int end = min(set.count - base, Lanes::kLanes);
#pragma unroll 1
    for (int i = 0; i < end; i += kAhead) {
      float4 x[kAhead][Lanes::kVector / 4];
#pragma unroll
      for (int j = 0; j < kAhead; ++j) {
        const std::int64_t row = __shfl_sync(lanes, slot, i + j, Lanes::kLanes);
        const auto* from = reinterpret_cast<const float4*>(values + row * width);
#pragma unroll
        for (int v = 0; v < Lanes::kVector / 4; ++v)
          x[j][v] = there && i + j < end ? __ldcs(from + v) : float4{};
      }
#pragma unroll
      for (int j = 0; j < kAhead; ++j)
#pragma unroll
        for (int d = 0; d < Lanes::kVector; ++d) sum[d] += (&x[j][d / 4].x)[d % 4];
    }
  }
}

// The same if rows are not whole vectors.
template <class Lanes>
__device__ __forceinline__ void add_odd_rows(const float* values, const SlotSet& set, int width,
                                             typename Lanes::Values& sum) {
#pragma unroll 1
  for (int i = 0; i < set.count; ++i) {
    const float* row = values + static_cast<std::int64_t>(set.slot(i)) * width;
#pragma unroll
    for (int d = 0; d < Lanes::kVector; ++d)
      if (Lanes::column() + d < width) sum[d] += row[Lanes::column() + d];
  }
}

template <class Lanes>
__device__ __forceinline__ void add_slot_rows(const float* values, const SlotSet& set, int width,
                                              typename Lanes::Values& sum) {
  if (width % Lanes::kVector == 0)
    add_whole_rows<Lanes>(values, set, width, sum);
  else
    add_odd_rows<Lanes>(values, set, width, sum);
}

template <class T>
struct GradientArgs {
  TokenGradient of;  // except for its views, which are these
  Tensor4<const T> rows, own_rows;
  Tensor4<T> gradient;
  int heads;  // of the gradient; heads of the slots that share one are added in order
  int query_heads, own_heads;
  SequenceSpans query_spans;
};

template <class T>
struct GradientSet {
  GradientArgs<T> gradient[3];
};

// Adds factor * row of the own keys of the query heads that belong to this head.
template <class Lanes, class T>
__device__ __forceinline__ void add_own(const GradientArgs<T>& args, const Token& token, int head,
                                        typename Lanes::Values& sum) {
  if (!args.of.own_factor || token.item < 0) return;
  const int sharing = args.query_heads / args.heads;
  const ItemSpan queries = args.query_spans.span(token.item);
  const ItemSpan span = args.of.own_spans.span(token.item);
  for (int h = head * sharing; h < (head + 1) * sharing; ++h) {
    const float factor =
        args.of.own_factor[(static_cast<std::int64_t>(queries.batch) * args.query_heads + h) *
                               args.query_spans.rows +
                           queries.begin + token.row];
    if (factor == 0.0f) continue;
    const int own_head = h / (args.query_heads / args.own_heads);
    RowStatistics stats{0.0f, 1.0f};
    if (args.of.own_stats)
      stats =
          args.of.own_stats[(static_cast<std::int64_t>(span.batch) * args.own_heads + own_head) *
                                args.of.own_spans.rows +
                            span.begin + token.row];
    typename Lanes::Values x;
    Lanes::load(args.own_rows.rows(span.batch, own_head, span.begin), token.row, true, x);
#pragma unroll
    for (int j = 0; j < Lanes::kVector; ++j)
      if (Lanes::column() + j < args.own_rows.width)
        sum[j] = fmaf(factor, (x[j] - stats.mean) * stats.inverse, sum[j]);
  }
}

// dx = (dy - mean(dy) - y mean(dy y)) / sigma. Called by all lanes of the warp.
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

// Adds the rows of a token's slots of the heads that share a head of the gradient.
template <class Lanes>
__device__ __forceinline__ void add_slots(const SlotRows& slots, const Token& token, int head,
                                          int heads, int width, typename Lanes::Values& sum) {
  const TokenSlots& tokens = slots.tokens;
  const int sharing = tokens.heads / heads;
  for (int h = head * sharing; h < (head + 1) * sharing && token.item >= 0; ++h) {
    const std::int64_t start = tokens.start(token.item, token.span, h);
    SlotSet set{nullptr, token.slot, 1};
    if (tokens.slots) {
      const std::int64_t place = tokens.row(token.span, h, token.row);
      set = {tokens.slots + start + tokens.first[place], 0, tokens.count[place]};
    }
    add_slot_rows<Lanes>(static_cast<const float*>(slots.values) + start * width, set, width, sum);
  }
}

// Head and gradient of a block: the heads of all gradients in turn.
template <class T>
__device__ __forceinline__ const GradientArgs<T>& find_gradient(const GradientSet<T>& set,
                                                                int& head) {
  int number = 0;
  head = static_cast<int>(blockIdx.y);
  while (head >= set.gradient[number].heads) head -= set.gradient[number++].heads;
  return set.gradient[number];
}

template <class T, int kWidth>
__global__ void __launch_bounds__(kTokenThreads, 3)
    token_gradients_kernel(const __grid_constant__ GradientSet<T> set) {
  await_previous();
  using Lanes = RowLanes<T, kWidth>;
  int head;
  const GradientArgs<T>& args = find_gradient(set, head);
  const TokenGradient& of = args.of;
  const TokenSlots& slots = of.first.tokens;
  const int batch = static_cast<int>(blockIdx.z);
  const int width = args.gradient.data ? args.gradient.width : args.rows.width;
  for_block_rows<Lanes::kLanes>(slots.spans.rows, [&](int number, bool there) {
    Token token(slots.spans, slots.items, number, there);
    if (!slots.slots) token.follow(slots, head);
    const int place = token.item >= 0 ? token.span.begin + token.row : number;
    const std::int64_t row =
        (static_cast<std::int64_t>(batch) * args.heads + head) * slots.spans.rows + place;
    typename Lanes::Values y = {}, sum = {};
    union {
      uint4 words;
      T elements[Lanes::kVector];
    } x;
    x.words = make_uint4(0, 0, 0, 0);
    RowStatistics stats{0.0f, 0.0f};
    if (of.stats && token.item >= 0) {  // in flight while the slots' rows are loaded
      const Rows<const T> rows = args.rows.rows(batch, head, 0);
      stats = of.stats[row];
      if (Lanes::column() < width)
        x.words = rows.aligned ? *reinterpret_cast<const uint4*>(rows.row(place) + Lanes::column())
                               : load_chunk(rows.row(place), Lanes::column(), width);
    }
    add_slots<Lanes>(of.first, token, head, args.heads, width, sum);
    add_own<Lanes>(args, token, head, sum);
#pragma unroll
    for (int j = 0; j < Lanes::kVector; ++j)
      if (Lanes::column() + j < width)
        y[j] = (to_float(x.elements[j]) - stats.mean) * stats.inverse;
    if (of.products) {
      const float product = Lanes::dot(y, sum);
      if (there && Lanes::column() == 0) of.products[row] = product;
    }
    if (of.second.values) add_slots<Lanes>(of.second, token, head, args.heads, width, sum);
    if (of.stats) normalise_backward<Lanes>(y, width, stats.inverse, sum);
    if (there && args.gradient.data) Lanes::store(args.gradient.rows(batch, head, 0), place, sum);
  });
}

template <class T>
GradientArgs<T> gradient_args(const AttentionCall& call, const TokenGradient& gradient, int heads) {
  GradientArgs<T> args{gradient};
  args.heads = heads;
  args.query_heads = static_cast<int>(call.H);
  if (gradient.stats) args.rows = tensor4<const T>(gradient.rows);
  if (gradient.gradient.present()) args.gradient = tensor4<T>(gradient.gradient);
  if (!gradient.own_factor) return args;
  args.own_rows = tensor4<const T>(gradient.own_rows);
  args.own_heads = static_cast<int>(gradient.own_rows.size(1));
  args.query_spans = item_spans(call.inputs).q;
  return args;
}

}  // namespace

void merge_slots(const AttentionCall& call, const SlotRows& slots, const float* slot_lse,
                 const OwnKeys& own, const TensorView& out, float* lse, cudaStream_t stream) {
  if (out.count() == 0) return;
  dispatch_rows(call, [&](auto tag, auto width) {
    using T = typename decltype(tag)::type;
    launch_early("merge_slots", merge_kernel<T, decltype(width)::value>,
                 row_grid(call.B, call.H, call.N), kTokenThreads, 0, stream, slots, slot_lse,
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
                 row_grid(call.B, call.H, call.N), kTokenThreads, 0, stream, slots, parts, lse,
                 tensor4<const T>(grad_out), own_args<T>(call, own), delta);
  });
}

void logit_scale_gradient(const AttentionCall& call, const float* products, const float* head_scale,
                          const TensorView& dlogit_scale, cudaStream_t stream) {
  launch_early("logit_scale_gradient", logit_scale_kernel, dim3(static_cast<unsigned>(call.H)),
               kSumThreads, 0, stream, products, item_spans(call.inputs).q,
               static_cast<int>(call.num_items()), static_cast<int>(call.B),
               static_cast<int>(call.H), head_scale, static_cast<float*>(dlogit_scale.data));
}

void nonzero_scale(const AttentionCall& call, float* scale, cudaStream_t stream) {
  const int heads = static_cast<int>(call.H);
  launch_early("nonzero_scale", nonzero_scale_kernel,
               dim3(static_cast<unsigned>((heads + 127) / 128)), 128, 0, stream,
               static_cast<const float*>(call.inputs.logit_scale.data), scale, heads);
}

void token_gradients(const AttentionCall& call, const std::vector<TokenGradient>& gradients,
                     cudaStream_t stream) {
  dispatch_rows(call, [&](auto tag, auto width) {
    using T = typename decltype(tag)::type;
    GradientSet<T> set{};
    std::int64_t heads = 0, rows = 0, count = 0;
    for (const TokenGradient& gradient : gradients) {
      const TensorView& like = gradient.gradient.present() ? gradient.gradient : gradient.rows;
      if (like.count() == 0) continue;
      set.gradient[count++] = gradient_args<T>(call, gradient, static_cast<int>(like.size(1)));
      heads += like.size(1);
      rows = max(rows, like.size(2));
    }
    if (heads == 0) return;
    constexpr int kWidth = decltype(width)::value;
    launch_early("token_gradients", token_gradients_kernel<T, kWidth>,
                 row_grid(call.B, heads, rows), kTokenThreads, 0, stream, set);
  });
}

}  // namespace coterie::cuda
