// SPDX-License-Identifier: MIT
// The sums over slots that make CAST's gradients of tokens, in ascending order.
#include "cuda/cast/backward.cuh"
#include "cuda/launch/dispatch.h"
#include "cuda/launch/launch.h"
#include "cuda/prim/dependent.cuh"

namespace coterie::cuda {
namespace {

constexpr int kThreads = 256;

// One gradient of tokens: over a token's slots, the sum of a row of the slot and `factors` times
// the row of its cluster.
template <class T>
struct TokenSum {
  Tensor4<T> to;
  const float *slots, *factors, *clusters;  // (slots, D), (slots), (items or 1, H, C, D)
  int heads, slot_heads;                    // of `to` and of `slots`
  bool added;                               // to what is there
  bool per_item;                            // clusters
};

template <class T>
struct FoldArgs {
  CastShape shape;
  TokenSlots slots;
  ItemChunks tiles;
  TokenSum<T> sums[3];
};

// Lanes side by side for a token, kTogether tokens at a time. A lane has four columns of either
// half of a row.
template <class T, int kDim>
struct TokenFold {
  static constexpr int kLanes = kDim / 8, kParts = 2, kTogether = 2;
  static constexpr int kGroups = kThreads / kLanes;
  static constexpr int kTokens = 4 * kTogether * kGroups;  // of a block
  struct Row {
    float4 part[kParts];
  };

  const FoldArgs<T>& args;
  const TokenSum<T>& sum;
  const ItemChunk& tile;

  __device__ static int column(int part) {
    return kDim / 2 * part + static_cast<int>(threadIdx.x) % kLanes * 4;
  }
  // Columns of this lane's parts that a row has: all four with kAligned, or none.
  __device__ int inside(int part) const { return args.shape.D - column(part); }
  // Past the first-level cache, which is to keep the rows of clusters.
  __device__ static void load_stream(float (&value)[4], const float* from) {
    asm volatile("ld.global.L1::no_allocate.v4.f32 {%0,%1,%2,%3}, [%4];"
                 : "=f"(value[0]), "=f"(value[1]), "=f"(value[2]), "=f"(value[3])
                 : "l"(from));
  }
  // `row` points to this lane's first column.
  template <bool kAligned, bool kStream = false, class U>
  __device__ void fetch(Row& to, const U* row, bool there) const {
    struct alignas(4 * sizeof(U)) Four {
      U element[4];
    };
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
      float value[4] = {};
      const U* from = row + kDim / 2 * i;
      if constexpr (kAligned) {
        if (there && inside(i) > 0) {
          if constexpr (kStream) {
            load_stream(value, from);
          } else {
            const Four four = *reinterpret_cast<const Four*>(from);
#pragma unroll
            for (int j = 0; j < 4; ++j) value[j] = to_float(four.element[j]);
          }
        }
      } else {
#pragma unroll
        for (int j = 0; j < 4; ++j)
          if (there && j < inside(i)) value[j] = to_float(from[j]);
      }
      to.part[i] = make_float4(value[0], value[1], value[2], value[3]);
    }
  }
  __device__ static void add(Row& to, float factor, const Row& a) {
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
      to.part[i].x = fmaf(factor, a.part[i].x, to.part[i].x);
      to.part[i].y = fmaf(factor, a.part[i].y, to.part[i].y);
      to.part[i].z = fmaf(factor, a.part[i].z, to.part[i].z);
      to.part[i].w = fmaf(factor, a.part[i].w, to.part[i].w);
    }
  }
  template <bool kAligned>
  __device__ void store(T* row, const Row& from) const {
    struct alignas(4 * sizeof(T)) Four {
      T element[4];
    };
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
      const float* value = reinterpret_cast<const float*>(&from.part[i]);
      T* to = row + kDim / 2 * i;
      if constexpr (kAligned) {
        Four four;
#pragma unroll
        for (int j = 0; j < 4; ++j) four.element[j] = from_float<T>(value[j]);
        if (inside(i) > 0) *reinterpret_cast<Four*>(to) = four;
      } else {
#pragma unroll
        for (int j = 0; j < 4; ++j)
          if (j < inside(i)) to[j] = from_float<T>(value[j]);
      }
    }
  }

  // What a query head has, counted from the item's first token, slot or cluster.
  struct Head {
    const std::int32_t *first, *count, *entries;
    const float *slots, *factors, *clusters;
  };
  __device__ Head find(int head, int to_head) const {
    const CastShape& shape = args.shape;
    const int list_head = shape.list_head(head);
    const std::int64_t row = args.slots.row(tile.span, list_head, 0);
    const std::int64_t cluster = shape.cluster(tile.item, head, 0);
    // A key head's slots hold the sum over its query heads, where these share lists.
    const bool by_head = sum.slot_heads == shape.H;
    const std::int64_t problem = static_cast<std::int64_t>(tile.item) * sum.slot_heads;
    Head at;
    at.first = args.slots.first + row;
    at.count = args.slots.count + row;
    at.entries = args.slots.slots + args.slots.start(tile.item, tile.span, list_head);
    at.slots = by_head || head % shape.group == 0 ? sum.slots + column(0) +
                                                        (problem + (by_head ? head : to_head)) *
                                                            shape.clusters * shape.width * shape.D
                                                  : nullptr;
    at.factors = sum.factors + cluster * shape.width;
    at.clusters =
        sum.clusters + column(0) + (sum.per_item ? cluster : shape.cluster(0, head, 0)) * shape.D;
    return at;
  }

  // Adds the slots of one query head for the tokens first, first + kGroups, ..., to what is there
  // already with sum.added. Whether a token has slots.
  template <bool kAligned>
  __device__ void add_head(const Head& at, T* const (&rows)[kTogether], int first,
                           Row (&to)[kTogether], bool (&any)[kTogether]) const {
    const int D = args.shape.D, width = args.shape.width;
    int begin[kTogether], count[kTogether], most = 0;
#pragma unroll
    for (int u = 0; u < kTogether; ++u) {
      const int token = first + u * kGroups;
      const bool there = token < tile.end;
      begin[u] = there ? at.first[token] : 0;
      count[u] = there ? at.count[token] : 0;
    }
#pragma unroll
    for (int u = 0; u < kTogether; ++u) {
      most = max(most, count[u]);
      any[u] = count[u] > 0;
      if (sum.added) fetch<kAligned>(to[u], rows[u], any[u]);
    }
#pragma unroll 1
    for (int i = 0; i < most; ++i) {
      int entry[kTogether];
      Row own[kTogether], shared[kTogether];
      float factor[kTogether];
#pragma unroll
      for (int u = 0; u < kTogether; ++u) entry[u] = i < count[u] ? at.entries[begin[u] + i] : -1;
#pragma unroll
      for (int u = 0; u < kTogether; ++u) {
        const bool there = entry[u] >= 0;
        factor[u] = there ? at.factors[entry[u]] : 0.0f;
        fetch<kAligned, true>(own[u], at.slots + static_cast<std::int64_t>(entry[u]) * D,
                              there && at.slots);
        fetch<kAligned>(shared[u], at.clusters + entry[u] / width * D, there);
      }
#pragma unroll
      for (int u = 0; u < kTogether; ++u) {
        add(to[u], 1.0f, own[u]);
        add(to[u], factor[u], shared[u]);
      }
    }
  }
  template <bool kAligned>
  __device__ void run(int to_head) const {
    const int group = args.shape.H / sum.heads;
    const Rows<T> rows = sum.to.rows(tile.span.batch, to_head, tile.span.begin);
    Head at = find(to_head * group, to_head);
#pragma unroll 1
    for (int first = tile.begin + static_cast<int>(threadIdx.x) / kLanes; first < tile.end;
         first += kTogether * kGroups) {
      Row to[kTogether] = {};
      bool any[kTogether];
      T* place[kTogether];
#pragma unroll
      for (int u = 0; u < kTogether; ++u) place[u] = rows.row(first + u * kGroups) + column(0);
#pragma unroll 1
      for (int i = 0; i < group; ++i) {
        if (group > 1) at = find(to_head * group + i, to_head);
        add_head<kAligned>(at, place, first, to, any);
      }
#pragma unroll
      for (int u = 0; u < kTogether; ++u)
        if (first + u * kGroups < tile.end && (any[u] || !sum.added))
          store<kAligned>(place[u], to[u]);
    }
  }
};

template <class T, int kDim, bool kAligned>
__global__ void __launch_bounds__(kThreads, 3)
    fold_kernel(const __grid_constant__ FoldArgs<T> args) {
  await_previous();
  const TokenSum<T>& sum = args.sums[blockIdx.z];
  const int head = static_cast<int>(blockIdx.y);
  if (!sum.to.data || head >= sum.heads) return;
  const ItemChunk tile = args.tiles.find(args.shape.tokens, static_cast<int>(blockIdx.x));
  const TokenFold<T, kDim> fold{args, sum, tile};
  fold.template run<kAligned>(head);
}

template <class T>
void fold_tokens(const CastShape& shape, const AttentionCall& call, const CastBackward& pass,
                 cudaStream_t stream) {
  const auto view = [](const TensorView& rows) {
    return rows.present() ? tensor4<T>(rows) : Tensor4<T>{};
  };
  FoldArgs<T> args{};
  args.shape = shape;
  args.slots = pass.slots;
  const auto floats = [](const void* slots) { return static_cast<const float*>(slots); };
  args.sums[0] = {view(pass.gradients.dq),
                  floats(pass.dq_slots),
                  pass.query_factors,
                  shape.surrogates,
                  shape.H,
                  shape.H,
                  true,
                  false};
  args.sums[1] = {view(pass.gradients.dk),
                  floats(pass.dk_slots),
                  pass.key_factors,
                  shape.surrogates,
                  shape.H / shape.group,
                  pass.key_slot_heads,
                  false,
                  false};
  args.sums[2] = {view(pass.gradients.dv),
                  floats(pass.dv_slots),
                  pass.summary_weights,
                  pass.dsummary,
                  shape.H / shape.group,
                  pass.key_slot_heads,
                  false,
                  true};
  bool aligned = reinterpret_cast<std::uintptr_t>(shape.surrogates) % 16 == 0 && shape.D % 4 == 0;
  for (const TokenSum<T>& sum : args.sums) aligned = aligned && (!sum.to.data || sum.to.aligned);
  dispatch_head_dim(call.op, call.Dk, [&](auto width) {
    constexpr int kDim = decltype(width)::value;
    args.tiles = token_tiles(shape, TokenFold<T, kDim>::kTokens);
    if (args.tiles.slots == 0) return;
    launch_early("cast fold", aligned ? fold_kernel<T, kDim, true> : fold_kernel<T, kDim, false>,
                 dim3(static_cast<unsigned>(args.tiles.slots), static_cast<unsigned>(shape.H), 3),
                 kThreads, 0, stream, args);
  });
}

}  // namespace

void cast_fold(const CastShape& shape, const AttentionCall& call, const CastBackward& pass,
               cudaStream_t stream) {
  const AttentionGradients& to = pass.gradients;
  if (to.dq.present() || to.dk.present() || to.dv.present())
    dispatch_element(call.op, call.inputs.q.dtype, [&](auto tag) {
      fold_tokens<typename decltype(tag)::type>(shape, call, pass, stream);
    });
}

}  // namespace coterie::cuda
