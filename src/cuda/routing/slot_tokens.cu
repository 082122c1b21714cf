// SPDX-License-Identifier: MIT
#include <cstdint>

#include "cuda/launch/launch.h"
#include "cuda/lists/slot_sum.h"
#include "cuda/prim/dependent.cuh"
#include "cuda/routing/slot_tokens.cuh"
#include "cuda/routing/slot_tokens.h"

namespace coterie::cuda {

namespace {

// The tokens of a block of threads by the number of their slots, so that all lanes have rows to
// add: some tokens are in many lists.

constexpr int kListedTokens = 256;  // of a block, and its threads

// The tokens of a block, in any order: those with many slots from the front, those with few from
// the back.
struct TokenList {
  static constexpr int kMany = 8;  // slots; a warp takes such a token
  int many, few, idle;             // tokens
  std::int32_t row[kListedTokens], idle_row[kListedTokens];
  std::int32_t count[kListedTokens];
  std::int64_t start[kListedTokens];                 // of the slots of its item and head ...
  std::int32_t first[kListedTokens];                 // ... and where its own are listed
  std::int32_t near[kListedTokens][SlotSet::kNear];  // the first of them

  // By all threads. Padding is idle.
  __device__ void fill(const TokenSlots& tokens, int head) {
    if (threadIdx.x == 0) many = few = idle = 0;
    __syncthreads();
    const int place = static_cast<int>(blockIdx.x) * kListedTokens + static_cast<int>(threadIdx.x);
    const bool there = place < tokens.spans.rows;
    Token token(tokens.spans, tokens.items, place, there);
    int slots = token.item >= 0, own = 0;
    if (slots && tokens.slots) {
      const std::int64_t number = tokens.row(token.span, head, token.row);
      slots = tokens.count[number];
      own = tokens.first[number];
    } else if (slots) {
      token.follow(tokens, head);
    }
    if (token.item >= 0) {
      const int number =
          slots > kMany ? atomicAdd(&many, 1) : kListedTokens - 1 - atomicAdd(&few, 1);
      const std::int64_t begin = tokens.start(token.item, token.span, head);
      row[number] = token.span.begin + token.row;
      count[number] = slots;
      first[number] = own;
      start[number] = begin;
#pragma unroll
      for (int i = 0; i < SlotSet::kNear; ++i)
        near[number][i] = tokens.slots && i < slots ? tokens.slots[begin + own + i] : token.slot;
    } else if (there) {
      idle_row[atomicAdd(&idle, 1)] = place;
    }
    __syncthreads();
  }

  // Calls body(number, part) for tokens with slots: a group of lanes has the token `number`, or
  // none, and then it is -1; where all groups of a warp share one, `part` is the group's number,
  // else -1. Warps stay together.
  template <int kLanes, class Body>
  __device__ __forceinline__ void for_each(const Body& body) const {
    constexpr int kGroups = 32 / kLanes;
    const int group = static_cast<int>(threadIdx.x) % 32 / kLanes;
    const int units = many + (few + kGroups - 1) / kGroups;
#pragma unroll 1
    for (int unit = static_cast<int>(threadIdx.x) / 32; unit < units; unit += kListedTokens / 32) {
      const int own = (unit - many) * kGroups + group;
      body(unit < many ? unit : own < few ? kListedTokens - 1 - own : -1, unit < many ? group : -1);
    }
  }

  // The sum of the rows of a token's slots.
  template <class Lanes>
  __device__ __forceinline__ void add(const SlotRows& slots, int number, int part, int width,
                                      typename Lanes::Values& sum) const {
    constexpr int kGroups = 32 / Lanes::kLanes;
    if (number >= 0) {
      const std::int64_t begin = start[number];
      const int all = count[number], each = part < 0 ? all : (all + kGroups - 1) / kGroups;
      const int skipped = max(part, 0) * each;
      const SlotSet set{slots.tokens.slots + begin + first[number] + skipped,
                        part <= 0 ? near[number] : nullptr, min(each, all - skipped)};
      add_slot_rows<Lanes>(static_cast<const float*>(slots.values) + begin * width, set, width,
                           sum);
    }
    if (part < 0) return;
#pragma unroll
    for (int step = Lanes::kLanes; step < 32; step *= 2)
#pragma unroll
      for (int j = 0; j < Lanes::kVector; ++j) sum[j] += __shfl_xor_sync(~0u, sum[j], step);
  }

  // Rows of idle tokens become 0.
  template <class Lanes, class T>
  __device__ __forceinline__ void clear(const Rows<T>& rows) const {
    const typename Lanes::Values zero = {};
    for (int i = threadIdx.x / Lanes::kLanes; i < idle; i += kListedTokens / Lanes::kLanes)
      Lanes::store(rows, idle_row[i], zero);
  }
};

constexpr int kThreads = kListedTokens;

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

template <class T>
struct GradientSet {
  static constexpr int kMost = 3;
  GradientArgs<T> gradient[kMost];
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

// Adds the rows of a token's slots of a head; where every token has one, that is `single`.
template <class Lanes>
__device__ __forceinline__ void add_slots(const SlotRows& slots, const Token& token, int head,
                                          int single, int width, typename Lanes::Values& sum) {
  const TokenSlots& tokens = slots.tokens;
  const std::int64_t start = tokens.start(token.item, token.span, head);
  SlotSet set{nullptr, &single, 1};
  if (tokens.slots) {
    const std::int64_t place = tokens.row(token.span, head, token.row);
    set = {tokens.slots + start + tokens.first[place], nullptr, tokens.count[place]};
  }
  add_slot_rows<Lanes>(static_cast<const float*>(slots.values) + start * width, set, width, sum);
}

// What else goes into a token's gradient than its slots of the first head: own keys, other heads,
// second slots, and its product with the normalised row before these.
template <class Lanes, class T>
__device__ __forceinline__ void add_others(const GradientArgs<T>& args, int head, int place,
                                           int single, int width, const typename Lanes::Values& y,
                                           float* product, typename Lanes::Values& sum) {
  const Token token(args.first.tokens.spans, args.first.tokens.items, place, place >= 0);
  const auto add = [&](const SlotRows& slots, int skipped) {
    const int sharing = slots.tokens.heads / args.heads;
    for (int h = head * sharing + skipped; h < (head + 1) * sharing && place >= 0; ++h)
      add_slots<Lanes>(slots, token, h, single, width, sum);
  };
  add(args.first, 1);
  add_own<Lanes>(args, token, head, sum);
  if (args.products) {
    const float dot = Lanes::dot(y, sum);
    if (place >= 0 && Lanes::column() == 0) *product = dot;
  }
  if (args.second.values) add(args.second, 0);
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
__global__ void __launch_bounds__(kThreads, 3)
    token_gradients_kernel(const __grid_constant__ GradientSet<T> set) {
  await_previous();
  using Lanes = RowLanes<T, kWidth>;
  __shared__ TokenList tokens;
  int head;
  const GradientArgs<T>& args = find_gradient(set, head);
  const TokenSlots& slots = args.first.tokens;
  const int batch = static_cast<int>(blockIdx.z);
  const int width = args.gradient.data ? args.gradient.width : args.rows.width;
  tokens.fill(slots, head * (slots.heads / args.heads));
  if (args.gradient.data) tokens.template clear<Lanes>(args.gradient.rows(batch, head, 0));
  tokens.template for_each<Lanes::kLanes>([&](int i, int part) {
    const bool there = i >= 0;
    const int place = there ? tokens.row[i] : -1;
    const std::int64_t row =
        (static_cast<std::int64_t>(batch) * args.heads + head) * slots.spans.rows + max(place, 0);
    typename Lanes::Values y = {}, sum = {};
    union {
      uint4 words;
      T elements[Lanes::kVector];
    } x;
    x.words = make_uint4(0, 0, 0, 0);
    RowStatistics stats{0.0f, 0.0f};
    if (args.stats && there) {  // on its way while the slots' rows come
      const Rows<const T> rows = args.rows.rows(batch, head, 0);
      stats = args.stats[row];
      if (Lanes::column() < width)
        x.words = rows.aligned ? *reinterpret_cast<const uint4*>(rows.row(place) + Lanes::column())
                               : load_chunk(rows.row(place), Lanes::column(), width);
    }
    tokens.template add<Lanes>(args.first, i, part, width, sum);
#pragma unroll
    for (int j = 0; j < Lanes::kVector; ++j)
      if (Lanes::column() + j < width)
        y[j] = (to_float(x.elements[j]) - stats.mean) * stats.inverse;
    add_others<Lanes>(args, head, place, there ? tokens.near[i][0] : 0, width, y,
                      args.products + row, sum);
    if (args.stats) normalise_backward<Lanes>(y, width, stats.inverse, sum);
    if (there && part <= 0 && args.gradient.data)
      Lanes::store(args.gradient.rows(batch, head, 0), place, sum);
  });
  if (args.products)
    for (int i = threadIdx.x; i < tokens.idle; i += kThreads)
      args.products[(static_cast<std::int64_t>(batch) * args.heads + head) * slots.spans.rows +
                    tokens.idle_row[i]] = 0.0f;
}

template <class T>
GradientArgs<T> gradient_args(const AttentionCall& call, const TokenGradient& gradient, int heads) {
  GradientArgs<T> args{};
  args.first = gradient.first;
  args.second = gradient.second;
  args.heads = heads;
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
  return args;
}

dim3 token_grid(std::int64_t batches, std::int64_t heads, std::int64_t rows) {
  return dim3(static_cast<unsigned>((rows + kThreads - 1) / kThreads), static_cast<unsigned>(heads),
              static_cast<unsigned>(batches));
}

}  // namespace

void combine_slots(const AttentionCall& call, const SlotRows& slots, const SlotWeight& weight,
                   const TensorView& out, float* weights, cudaStream_t stream) {
  SlotSum sum{slots.tokens, slots.values, call.H, out};
  sum.mean = weight.mean;
  sum.eps = weight.eps;
  sum.weights = weights;
  sum_slots(call, {sum}, SlotSumStart::slots_ready, stream);
}

void token_gradients(const AttentionCall& call, const std::vector<TokenGradient>& gradients,
                     bool rounded, cudaStream_t stream) {
  if (rounded) {
    std::vector<SlotSum> sums;
    for (const TokenGradient& gradient : gradients) {
      sums.push_back({gradient.first.tokens, gradient.first.values, gradient.gradient.size(1),
                      gradient.gradient});
      sums.back().zeroed = gradient.first.zeroed;
    }
    sum_slots(call, sums, SlotSumStart::slots_ready, stream);
    return;
  }
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
                 token_grid(call.B, heads, rows), kThreads, 0, stream, set);
  });
}

}  // namespace coterie::cuda
