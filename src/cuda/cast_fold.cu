// SPDX-License-Identifier: MIT
// The sums over slots, rows and items that make CAST's gradients. All run in ascending order.
#include "cuda/device/await.cuh"
#include "cuda/device/cast_bwd.cuh"
#include "cuda/launch.h"
#include "cuda/padding.h"
#include "cuda/tuning.h"

namespace coterie::cuda {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;

// One gradient of tokens: over a token's slots, the sum of a row of the slot and `factors` times
// the row of its cluster.
template <class T>
struct TokenSum {
  Tensor4<T> to;
  const float *slots, *factors, *clusters;  // (slots, D), (slots), (items or 1, H, C, D)
  int heads, slot_heads;                    // of `to` and of `slots`
  bool scaled;    // times the factor of the token's logits, and added to what is there (dq)
  bool per_item;  // clusters
};

template <class T>
struct FoldArgs {
  CastShape shape;
  TokenSlots slots;
  const float4* facts;
  KeyChunks tiles;
  TokenSum<T> sums[3];
};

// Lanes side by side for a token, kTogether tokens at a time.
template <class T, int kDim>
struct TokenFold {
  using Layout = CastLanes<float, kDim>;
  static constexpr int kTogether = 2, kGroups = kThreads / Layout::kLanes;

  const FoldArgs<T>& args;
  const TokenSum<T>& sum;
  const KeyChunk& tile;
  Layout lanes;

  template <bool kAligned>
  __device__ float4 fetch_row(const float* row, bool there) const {
    const int column = lanes.column(), width = there ? args.shape.D : 0;
    if constexpr (kAligned)
      return column < width ? *reinterpret_cast<const float4*>(row + column)
                            : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    const auto at = [&](int i) { return column + i < width ? row[column + i] : 0.0f; };
    return make_float4(at(0), at(1), at(2), at(3));
  }
  __device__ static void add(float4& to, float factor, const float4& a) {
    to.x = fmaf(factor, a.x, to.x);
    to.y = fmaf(factor, a.y, to.y);
    to.z = fmaf(factor, a.z, to.z);
    to.w = fmaf(factor, a.w, to.w);
  }
  __device__ float4 load(const Rows<T>& rows, int token) const {
    const int column = lanes.column();
    float value[4] = {};
    if (rows.aligned && column < rows.width) {
      struct alignas(4 * sizeof(T)) Four {
        T element[4];
      };
      const Four four = *reinterpret_cast<const Four*>(rows.row(token) + column);
#pragma unroll
      for (int i = 0; i < 4; ++i) value[i] = to_float(four.element[i]);
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i)
        if (column + i < rows.width) value[i] = to_float(rows.row(token)[column + i]);
    }
    return make_float4(value[0], value[1], value[2], value[3]);
  }

  // Adds the slots of one query head for the tokens first, first + kGroups, ..., to what is there
  // already with sum.scaled. Whether a token has slots.
  template <bool kAligned>
  __device__ void add_head(int head, int to_head, int first, float4 (&to)[kTogether],
                           bool (&any)[kTogether]) const {
    const CastShape& shape = args.shape;
    const int list_head = shape.list_head(head), D = shape.D;
    const std::int32_t* entries =
        args.slots.slots + args.slots.start(tile.item, tile.keys, list_head);
    // A key head's slots hold the sum over its query heads, where these share lists.
    const bool by_head = sum.slot_heads == shape.H;
    const bool with_slots = by_head || head % shape.group == 0;
    const float* slots = sum.slots + (static_cast<std::int64_t>(tile.item) * sum.slot_heads +
                                      (by_head ? head : to_head)) *
                                         shape.clusters * shape.width * D;
    const float* factors = sum.factors + shape.cluster(tile.item, head, 0) * shape.width;
    const float* clusters = sum.clusters + shape.cluster(sum.per_item ? tile.item : 0, head, 0) * D;
    const std::int64_t row = args.slots.row(tile.keys, list_head, first);
    int begin[kTogether], count[kTogether], most = 0;
    float scale[kTogether];
#pragma unroll
    for (int u = 0; u < kTogether; ++u) {
      const bool there = first + u * kGroups < tile.end;
      begin[u] = there ? args.slots.first[row + u * kGroups] : 0;
      count[u] = there ? args.slots.count[row + u * kGroups] : 0;
      scale[u] = sum.scaled && there
                     ? args.facts[shape.row(tile.keys, head) + first + u * kGroups].x * kLn2
                     : 1.0f;
      most = max(most, count[u]);
      any[u] = count[u] > 0;
    }
    if (sum.scaled) {
      const Rows<T> rows = sum.to.rows(tile.keys.batch, to_head, tile.keys.begin);
#pragma unroll
      for (int u = 0; u < kTogether; ++u)
        if (any[u]) to[u] = load(rows, first + u * kGroups);
    }
#pragma unroll 1
    for (int i = 0; i < most; ++i) {
      int entry[kTogether];
      float4 own[kTogether], shared[kTogether];
      float factor[kTogether];
#pragma unroll
      for (int u = 0; u < kTogether; ++u) entry[u] = i < count[u] ? entries[begin[u] + i] : -1;
#pragma unroll
      for (int u = 0; u < kTogether; ++u) {
        const bool there = entry[u] >= 0;
        factor[u] = there ? factors[entry[u]] : 0.0f;
        own[u] = fetch_row<kAligned>(slots + static_cast<std::int64_t>(entry[u]) * D,
                                     there && with_slots);
        shared[u] = fetch_row<kAligned>(clusters + entry[u] / shape.width * D, there);
      }
#pragma unroll
      for (int u = 0; u < kTogether; ++u) {
        add(to[u], 1.0f, own[u]);
        add(to[u], scale[u] * factor[u], shared[u]);
      }
    }
  }
  template <bool kAligned>
  __device__ void run(int to_head) const {
    const int group = args.shape.H / sum.heads;
    const Rows<T> rows = sum.to.rows(tile.keys.batch, to_head, tile.keys.begin);
#pragma unroll 1
    for (int first = tile.begin + lanes.group; first < tile.end; first += kTogether * kGroups) {
      float4 to[kTogether] = {};
      bool any[kTogether];
      for (int head = to_head * group; head < (to_head + 1) * group; ++head)
        add_head<kAligned>(head, to_head, first, to, any);
#pragma unroll
      for (int u = 0; u < kTogether; ++u)
        if (first + u * kGroups < tile.end && (any[u] || !sum.scaled))
          lanes.store(rows, first + u * kGroups,
                      typename Layout::Floats{{to[u].x, to[u].y, to[u].z, to[u].w}});
    }
  }
};

template <class T, int kDim>
__global__ void __launch_bounds__(kThreads, 4)
    fold_kernel(const __grid_constant__ FoldArgs<T> args) {
  await_previous();
  const TokenSum<T>& sum = args.sums[blockIdx.z];
  const int head = static_cast<int>(blockIdx.y);
  if (!sum.to.data || head >= sum.heads) return;
  const KeyChunk tile = args.tiles.find(args.shape.tokens, static_cast<int>(blockIdx.x));
  const TokenFold<T, kDim> fold{args, sum, tile, {}};
  if (args.shape.D % 4 == 0 && reinterpret_cast<std::uintptr_t>(sum.clusters) % 16 == 0)
    fold.template run<true>(head);
  else
    fold.template run<false>(head);
}

// A warp per token: the gradients of its gate by the heads' rows and slots.
__global__ void __launch_bounds__(kThreads) fold_gate_kernel(CastShape shape, CastBackward pass) {
  await_previous();
  const std::int64_t number = static_cast<std::int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  if (number >= static_cast<std::int64_t>(shape.B) * shape.N) return;
  const int batch = static_cast<int>(number / shape.N), row = static_cast<int>(number % shape.N);
  const int item = shape.gate_scale ? shape.tokens.item_of(batch, row, shape.items) : -1;
  const float slope = shape.scale * gate_sigmoid(shape.gate[number]);
  float sum = 0.0f;
  if (item >= 0) {
    const ItemSpan span = shape.tokens.span(item);
    const int token = row - span.begin;
    for (int head = threadIdx.x % 32; head < shape.H; head += 32) {
      const int list_head = shape.list_head(head);
      const std::int64_t place = pass.slots.row(span, list_head, token);
      const int begin = pass.slots.first[place], end = begin + pass.slots.count[place];
      const std::int32_t* entries = pass.slots.slots + pass.slots.start(item, span, list_head);
      sum = fmaf(slope, pass.dgate_rows[shape.row(span, head) + token], sum);
      for (int e = begin; e < end; ++e)
        sum += pass.dgate_slots[shape.cluster(item, head, 0) * shape.width + entries[e]];
    }
  }
#pragma unroll
  for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
  if (threadIdx.x % 32 == 0) static_cast<float*>(pass.gradients.dgate.data)[number] = sum;
}

__global__ void fold_surrogates_kernel(const float* from, float* to, int items,
                                       std::int64_t count) {
  await_previous();
  const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= count) return;
  float sum = 0.0f;
  for (int item = 0; item < items; ++item) sum += from[item * count + i];
  to[i] = sum;
}

unsigned blocks_of(std::int64_t count, int each) {
  return static_cast<unsigned>((count + each - 1) / each);
}

}  // namespace

void cast_fold(const CastShape& shape, const AttentionCall& call, const CastBackward& pass,
               cudaStream_t stream) {
  const AttentionGradients& to = pass.gradients;
  if (to.dq.present() || to.dk.present() || to.dv.present())
    dispatch_element(call.op, call.inputs.q.dtype, [&](auto tag) {
      using T = typename decltype(tag)::type;
      const int key_heads = static_cast<int>(call.value_heads);
      const auto view = [](const TensorView& rows) {
        return rows.present() ? tensor4<T>(rows) : Tensor4<T>{};
      };
      const FoldArgs<T> args{shape,
                             pass.slots,
                             pass.facts,
                             token_tiles(shape, 128),
                             {{view(to.dq), pass.dq_slots, pass.excess, shape.surrogates, shape.H,
                               shape.H, true, false},
                              {view(to.dk), pass.dk_slots, pass.key_factors, shape.surrogates,
                               key_heads, pass.key_slot_heads, false, false},
                              {view(to.dv), pass.dv_slots, pass.summary_weights, pass.dsummary,
                               key_heads, pass.key_slot_heads, false, true}}};
      if (args.tiles.slots == 0) return;
      dispatch_wide_dim(call.op, call.Dk, [&](auto width) {
        launch_early(
            "cast fold", fold_kernel<T, decltype(width)::value>,
            dim3(static_cast<unsigned>(args.tiles.slots), static_cast<unsigned>(shape.H), 3),
            kThreads, 0, stream, args);
      });
      for (const TensorView* rows : {&to.dk, &to.dv})
        if (rows->present()) zero_padding(*rows, call.inputs.q_sequences, call.num_items(), stream);
    });
  if (to.dgate.present())
    launch_early("cast gates", fold_gate_kernel, dim3(blocks_of(call.B * call.N, kWarps)), kThreads,
                 0, stream, shape, pass);
  if (to.dcentroids.present()) {
    const std::int64_t count = static_cast<std::int64_t>(shape.H) * shape.clusters * shape.D;
    launch_early("cast surrogates", fold_surrogates_kernel, dim3(blocks_of(count, kThreads)),
                 kThreads, 0, stream, static_cast<const float*>(pass.dsurrogate),
                 static_cast<float*>(to.dcentroids.data), shape.items, count);
  }
}

}  // namespace coterie::cuda
