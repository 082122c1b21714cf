// SPDX-License-Identifier: MIT
#include "cuda/routing/run_tokens.h"

#include "cuda/launch/launch.h"
#include "cuda/prim/dependent.cuh"
#include "cuda/routing/slot_tokens.cuh"
#include "cuda/routing/stages.h"

namespace coterie::cuda {

namespace {

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
// A block per head.
__global__ void __launch_bounds__(kTokenThreads)
    logit_scale_kernel(const float* products, SequenceSpans spans, int items, int batches,
                       int heads, const float* head_scale, float* gradient) {
  await_previous();
  __shared__ double parts[kTokenThreads];
  double sum = 0.0;
  for (int b = 0; b < batches; ++b)
    for (int row = threadIdx.x; row < spans.rows; row += kTokenThreads)
      if (spans.item_of(b, row, items) >= 0)
        sum += static_cast<double>(
            products[(static_cast<std::int64_t>(b) * heads + blockIdx.x) * spans.rows + row]);
  parts[threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.x != 0) return;
  double total = 0.0;
  for (int i = 0; i < kTokenThreads; ++i) total += parts[i];
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
               kTokenThreads, 0, stream, products, item_spans(call.inputs).q,
               static_cast<int>(call.num_items()), static_cast<int>(call.B),
               static_cast<int>(call.H), head_scale, static_cast<float*>(dlogit_scale.data));
}

void nonzero_scale(const AttentionCall& call, float* scale, cudaStream_t stream) {
  const int heads = static_cast<int>(call.H);
  launch_early("nonzero_scale", nonzero_scale_kernel,
               dim3(static_cast<unsigned>((heads + 127) / 128)), 128, 0, stream,
               static_cast<const float*>(call.inputs.logit_scale.data), scale, heads);
}

}  // namespace coterie::cuda
