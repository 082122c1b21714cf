// SPDX-License-Identifier: MIT
// The backward pass of CAST through the summaries, and the sums over slots, rows and items that
// make gradients of keys, values, gates and surrogates. All sums run in ascending order.
#include "cuda/device/await.cuh"
#include "cuda/device/cast_bwd.cuh"
#include "cuda/launch.h"
#include "cuda/padding.h"
#include "cuda/tuning.h"

namespace coterie::cuda {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr float kLn2 = 0.6931471806f;

template <class T>
struct FoldArgs {
  CastShape shape;
  CastBackward pass;
  Tensor4<const T> q, k, v, grad_out;
  Tensor4<T> dq, dk, dv;
};

// One cluster. With dR its summary's gradient and dot = dR . summary, for a member j
//   dlogit_j = beta_j (dR . v_j - dot), or laplace'(logit_j) dR . v_j,
//   dv_j += beta_j dR,   dk_j += scale psi(-phi_j) dlogit_j S,
//   dphi_j -= scale sigmoid(-phi_j) dlogit_j S . k_j.
template <class T, int kDim>
struct ClusterMembers {
  using Layout = RowLanes<T, kDim>;
  using Floats = typename Layout::Floats;
  static constexpr int kBatch = 4, kGroups = kThreads / Layout::kLanes;
  struct Totals {
    float sums[kWarps][kDim], value[2][kDim];  // value: of the surrogate and the summary
  };

  const FoldArgs<T>& args;
  Totals& totals;
  Layout lanes;
  int item, head, cluster;
  ItemSpan span;
  std::int64_t number, first_slot;
  const std::int32_t* list;

  __device__ ClusterMembers(const FoldArgs<T>& a, Totals& memory) : args(a), totals(memory) {
    const CastShape& shape = args.shape;
    const int block = static_cast<int>(blockIdx.x);
    cluster = block % shape.clusters;
    head = block / shape.clusters % shape.H;
    item = block / shape.clusters / shape.H;
    span = shape.tokens.span(item);
    number = shape.cluster(item, head, cluster);
    first_slot = number * shape.width;
    list = shape.list(item, head, cluster);
  }

  // Adds the rows' sums of all threads to a total, times `sign`.
  __device__ void add_total(Floats& sum, int which, float sign) const {
    __syncthreads();
    lanes.template fold<kWarps>(sum, totals.sums);
    for (int d = threadIdx.x; d < args.shape.D; d += kThreads) {
      float value = 0.0f;
      for (int w = 0; w < kWarps; ++w) value += totals.sums[w][d];
      totals.value[which][d] += sign * value;
    }
    __syncthreads();
  }
  // The mix's gradients, all tokens as if they were in no cluster.
  __device__ void add_parts() const {
    const CastShape& shape = args.shape;
    const KeyChunks& chunks = args.pass.chunks;
    const int parts = chunks.count(span.length), first = chunks.first_slot(shape.tokens, item);
    const std::int64_t step = static_cast<std::int64_t>(shape.H) * shape.clusters * 2 * shape.D;
    const float* from = args.pass.partials + first * step +
                        (static_cast<std::int64_t>(head) * shape.clusters + cluster) * 2 * shape.D;
    for (int i = threadIdx.x; i < 2 * kDim; i += kThreads) {
      float value = 0.0f;
      const int which = i / kDim, d = i % kDim;
      if (d < shape.D)
#pragma unroll 8
        for (int part = 0; part < parts; ++part) value += from[part * step + which * shape.D + d];
      totals.value[which][d] = value;
    }
  }
  // Calls body(tokens, slots, rows of a, rows of b) for batches of this group's members; tokens are
  // -1 where there is no member.
  template <bool kAligned, class Body>
  __device__ void for_members(const Rows<const T>& a, const Rows<const T>& b,
                              const Body& body) const {
#pragma unroll 1
    for (int first = lanes.group; first < args.shape.width; first += kBatch * kGroups) {
      int tokens[kBatch];
      uint4 words[2][kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i)
        tokens[i] = first + i * kGroups < args.shape.width ? list[first + i * kGroups] : -1;
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        words[0][i] = fetch<kAligned>(a, tokens[i], lanes.column(), tokens[i] >= 0);
        words[1][i] = fetch<kAligned>(b, tokens[i], lanes.column(), tokens[i] >= 0);
      }
      body(tokens, first_slot + first, words);
    }
  }
  // What membership changes in the gradients of the mix.
  template <bool kAligned>
  __device__ void add_excess(Floats& dsurrogate) const {
    const CastShape& shape = args.shape;
    const float4* facts = args.pass.facts + shape.row(span, head);
    Floats taken{};
    for_members<kAligned>(
        args.q.rows(span.batch, head, span.begin), args.grad_out.rows(span.batch, head, span.begin),
        [&](const int(&tokens)[kBatch], std::int64_t slot, const uint4(&words)[2][kBatch]) {
          float factor[kBatch], weight[kBatch];
#pragma unroll
          for (int i = 0; i < kBatch; ++i) {
            const bool there = tokens[i] >= 0;
            factor[i] =
                there ? facts[tokens[i]].x * kLn2 * args.pass.excess[slot + i * kGroups] : 0.0f;
            weight[i] = there ? args.pass.weights[slot + i * kGroups] : 0.0f;
          }
#pragma unroll
          for (int i = 0; i < kBatch; ++i) {
            lanes.add(dsurrogate, factor[i], to_floats<T, kDim>(words[0][i]));
            lanes.add(taken, weight[i], to_floats<T, kDim>(words[1][i]));
          }
        });
    add_total(taken, 1, -1.0f);
  }
  template <bool kAligned>
  __device__ void add_members(Floats& dsurrogate) const {
    const CastShape& shape = args.shape;
    const CastBackward& pass = args.pass;
    const float* gates = shape.gates(span);
    const Floats surrogate = lanes.load_floats(
        shape.surrogates + (static_cast<std::int64_t>(head) * shape.clusters + cluster) * shape.D,
        shape.D);
    const Floats dsummary = lanes.load_floats(totals.value[1], shape.D);
    const Floats summary = lanes.load_floats(pass.saved.summary + number * shape.D, shape.D);
    const float dot = shape.laplace ? 0.0f : lanes.dot(dsummary, summary);
    const float lse = shape.laplace ? 0.0f : pass.saved.summary_lse[number];
    for_members<kAligned>(
        args.k.rows(span.batch, head / shape.group, span.begin),
        args.v.rows(span.batch, head / shape.group, span.begin),
        [&](const int(&tokens)[kBatch], std::int64_t slot, const uint4(&words)[2][kBatch]) {
          float gate[kBatch], before[kBatch];
#pragma unroll
          for (int i = 0; i < kBatch; ++i) {
            const bool there = tokens[i] >= 0;
            gate[i] = there ? gates[tokens[i]] : 0.0f;
            before[i] = there && shape.gate_scale ? pass.dgate_slots[slot + i * kGroups] : 0.0f;
          }
#pragma unroll
          for (int i = 0; i < kBatch; ++i) {
            const Floats key = to_floats<T, kDim>(words[0][i]);
            const float product = lanes.dot(surrogate, key);
            const float dbeta = lanes.dot(dsummary, to_floats<T, kDim>(words[1][i]));
            if (tokens[i] < 0) continue;
            const float factor = shape.scale * gate_factor(shape, -gate[i]);
            const float logit = factor * product;
            const float beta = shape.laplace ? laplace(logit) : expf(logit - lse);
            const float dlogit = (shape.laplace ? laplace_slope(logit) : beta) * (dbeta - dot);
            lanes.add(dsurrogate, factor * dlogit, key);
            if (!lanes.first()) continue;
            const std::int64_t own = slot + i * kGroups;
            pass.summary_weights[own] = beta;
            pass.key_factors[own] = factor * dlogit;
            if (shape.gate_scale)
              pass.dgate_slots[own] =
                  before[i] - shape.scale * gate_sigmoid(-gate[i]) * dlogit * product;
          }
        });
  }
};

template <class T, int kDim>
__global__ void __launch_bounds__(kThreads, 3)
    summaries_backward_kernel(const __grid_constant__ FoldArgs<T> args) {
  await_previous();
  using Members = ClusterMembers<T, kDim>;
  __shared__ typename Members::Totals totals;
  const Members members(args, totals);
  members.add_parts();
  typename Members::Floats dsurrogate{};
  if (args.q.aligned && args.k.aligned && args.v.aligned && args.grad_out.aligned) {
    members.template add_excess<true>(dsurrogate);
    members.template add_members<true>(dsurrogate);
  } else {
    members.template add_excess<false>(dsurrogate);
    members.template add_members<false>(dsurrogate);
  }
  members.add_total(dsurrogate, 0, 1.0f);
  const int D = args.shape.D;
  for (int d = threadIdx.x; d < D; d += kThreads) {
    args.pass.dsurrogate[members.number * D + d] = totals.value[0][d];
    args.pass.dsummary[members.number * D + d] = totals.value[1][d];
  }
}

// dk and dv of tokens, and what their slots add to dq; lanes side by side for a token.
template <class T, int kDim>
struct TokenFold {
  using Layout = RowLanes<float, kDim>;
  static constexpr int kTogether = 2, kGroups = kThreads / Layout::kLanes;

  const FoldArgs<T>& args;
  const KeyChunk& tile;
  int key_head;
  Layout lanes;

  template <bool kAligned>
  __device__ float4 fetch_floats(const float* row, bool there) const {
    return there ? fetch_row<kAligned>(row) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  }
  template <bool kAligned>
  __device__ float4 fetch_row(const float* row) const {
    const int column = lanes.column(), width = args.shape.D;
    if constexpr (kAligned)
      return column < width ? *reinterpret_cast<const float4*>(row + column)
                            : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    const auto at = [&](int i) { return column + i < width ? row[column + i] : 0.0f; };
    return make_float4(at(0), at(1), at(2), at(3));
  }
  __device__ static void add(float4& sum, float factor, const float4& a) {
    sum.x = fmaf(factor, a.x, sum.x);
    sum.y = fmaf(factor, a.y, sum.y);
    sum.z = fmaf(factor, a.z, sum.z);
    sum.w = fmaf(factor, a.w, sum.w);
  }
  __device__ void store(const Tensor4<T>& to, int head, int token, const float4& sum) const {
    const typename Layout::Floats floats{{sum.x, sum.y, sum.z, sum.w}};
    lanes.store(to.rows(tile.keys.batch, head, tile.keys.begin), token, floats);
  }
  __device__ float4 load(const Tensor4<T>& from, int head, int token) const {
    const Rows<T> rows = from.rows(tile.keys.batch, head, tile.keys.begin);
    const T* row = rows.row(token);
    const int column = lanes.column();
    const auto at = [&](int i) {
      return column + i < rows.width ? to_float(row[column + i]) : 0.0f;
    };
    if (rows.aligned && column < rows.width) {
      struct alignas(4 * sizeof(T)) Four {
        T element[4];
      };
      const Four four = *reinterpret_cast<const Four*>(row + column);
      return make_float4(to_float(four.element[0]), to_float(four.element[1]),
                         to_float(four.element[2]), to_float(four.element[3]));
    }
    return make_float4(at(0), at(1), at(2), at(3));
  }

  // The slots of one query head for the tokens first, first + kGroups, ...
  template <bool kAligned>
  __device__ void add_head(int head, int first, float4 (&dk)[kTogether],
                           float4 (&dv)[kTogether]) const {
    const CastShape& shape = args.shape;
    const CastBackward& pass = args.pass;
    const int list_head = shape.list_head(head), D = shape.D;
    const std::int32_t* entries =
        pass.slots.slots + pass.slots.start(tile.item, tile.keys, list_head);
    // A key head's slots hold the sum over its query heads, where these share lists.
    const bool by_head = pass.key_slot_heads == shape.H;
    const bool key_slots = by_head || head == key_head * shape.group;
    const std::int64_t per_head = static_cast<std::int64_t>(shape.clusters) * shape.width;
    const std::int64_t first_slot = shape.cluster(tile.item, head, 0) * shape.width;
    const std::int64_t first_key_slot =
        (static_cast<std::int64_t>(tile.item) * pass.key_slot_heads + (by_head ? head : key_head)) *
        per_head;
    const float* surrogates =
        shape.surrogates + static_cast<std::int64_t>(head) * shape.clusters * D;
    const float* dsummaries = pass.dsummary + shape.cluster(tile.item, head, 0) * D;
    int begin[kTogether], count[kTogether], most = 0;
    float factor[kTogether];
#pragma unroll
    for (int u = 0; u < kTogether; ++u) {
      const int token = first + u * kGroups;
      const bool there = token < tile.end;
      const std::int64_t row = pass.slots.row(tile.keys, list_head, there ? token : 0);
      begin[u] = pass.slots.first[row];
      count[u] = there ? pass.slots.count[row] : 0;
      factor[u] = pass.facts[shape.row(tile.keys, head) + (there ? token : 0)].x * kLn2;
      most = max(most, count[u]);
    }
    float4 dq[kTogether] = {};
#pragma unroll 1
    for (int i = 0; i < most; ++i) {
      bool there[kTogether];
      int entry[kTogether];
#pragma unroll
      for (int u = 0; u < kTogether; ++u) {
        there[u] = i < count[u];
        entry[u] = there[u] ? entries[begin[u] + i] : 0;
      }
      float4 row_q[kTogether], row_k[kTogether], row_v[kTogether], surrogate[kTogether],
          dsummary[kTogether];
      float excess[kTogether], key_factor[kTogether], beta[kTogether];
#pragma unroll
      for (int u = 0; u < kTogether; ++u) {
        const std::int64_t slot = first_slot + entry[u], key_slot = first_key_slot + entry[u];
        const int cluster = entry[u] / shape.width;
        row_q[u] = fetch_floats<kAligned>(pass.dq_slots + slot * D, there[u] && args.dq.data);
        row_k[u] = fetch_floats<kAligned>(pass.dk_slots + key_slot * D, there[u] && key_slots);
        row_v[u] = fetch_floats<kAligned>(pass.dv_slots + key_slot * D, there[u] && key_slots);
        surrogate[u] = fetch_floats<kAligned>(surrogates + cluster * D, there[u]);
        dsummary[u] = fetch_floats<kAligned>(dsummaries + cluster * D, there[u]);
        excess[u] = there[u] ? pass.excess[slot] : 0.0f;
        key_factor[u] = there[u] ? pass.key_factors[slot] : 0.0f;
        beta[u] = there[u] ? pass.summary_weights[slot] : 0.0f;
      }
#pragma unroll
      for (int u = 0; u < kTogether; ++u) {
        add(dq[u], 1.0f, row_q[u]);
        add(dq[u], factor[u] * excess[u], surrogate[u]);
        add(dk[u], 1.0f, row_k[u]);
        add(dk[u], key_factor[u], surrogate[u]);
        add(dv[u], 1.0f, row_v[u]);
        add(dv[u], beta[u], dsummary[u]);
      }
    }
    if (!args.dq.data) return;
#pragma unroll
    for (int u = 0; u < kTogether; ++u) {
      const int token = first + u * kGroups;
      if (count[u] == 0) continue;
      add(dq[u], 1.0f, load(args.dq, head, token));
      store(args.dq, head, token, dq[u]);
    }
  }
  template <bool kAligned>
  __device__ void run() const {
#pragma unroll 1
    for (int first = tile.begin + lanes.group; first < tile.end; first += kTogether * kGroups) {
      float4 dk[kTogether] = {}, dv[kTogether] = {};
      for (int head = key_head * args.shape.group; head < (key_head + 1) * args.shape.group; ++head)
        add_head<kAligned>(head, first, dk, dv);
#pragma unroll
      for (int u = 0; u < kTogether; ++u) {
        const int token = first + u * kGroups;
        if (token >= tile.end) continue;
        if (args.dk.data) store(args.dk, key_head, token, dk[u]);
        if (args.dv.data) store(args.dv, key_head, token, dv[u]);
      }
    }
  }
};

template <class T, int kDim>
__global__ void __launch_bounds__(kThreads, 2)
    fold_kernel(const __grid_constant__ FoldArgs<T> args, KeyChunks tiles) {
  await_previous();
  const KeyChunk tile = tiles.find(args.shape.tokens, blockIdx.x);
  const TokenFold<T, kDim> fold{args, tile, static_cast<int>(blockIdx.y), {}};
  const bool aligned =
      args.shape.D % 4 == 0 && reinterpret_cast<std::uintptr_t>(args.shape.surrogates) % 16 == 0;
  if (aligned)
    fold.template run<true>();
  else
    fold.template run<false>();
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

void cast_summaries_backward(const CastShape& shape, const AttentionCall& call,
                             const CastBackward& pass, cudaStream_t stream) {
  const unsigned blocks =
      static_cast<unsigned>(static_cast<std::int64_t>(shape.items) * shape.H * shape.clusters);
  if (blocks == 0) return;
  dispatch_element(call.op, call.inputs.q.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const FoldArgs<T> args{shape,
                           pass,
                           tensor4<const T>(call.inputs.q),
                           tensor4<const T>(call.k),
                           tensor4<const T>(call.inputs.v),
                           tensor4<const T>(pass.grad_out),
                           {},
                           {},
                           {}};
    dispatch_wide_dim(call.op, call.Dk, [&](auto width) {
      launch_early("cast summaries backward", summaries_backward_kernel<T, decltype(width)::value>,
                   dim3(blocks), kThreads, 0, stream, args);
    });
  });
}

void cast_fold(const CastShape& shape, const AttentionCall& call, const CastBackward& pass,
               cudaStream_t stream) {
  const AttentionGradients& to = pass.gradients;
  if (to.dq.present() || to.dk.present() || to.dv.present())
    dispatch_element(call.op, call.inputs.q.dtype, [&](auto tag) {
      using T = typename decltype(tag)::type;
      FoldArgs<T> args{};
      args.shape = shape;
      args.pass = pass;
      if (to.dq.present()) args.dq = tensor4<T>(to.dq);
      if (to.dk.present()) args.dk = tensor4<T>(to.dk);
      if (to.dv.present()) args.dv = tensor4<T>(to.dv);
      const KeyChunks tiles = token_tiles(shape, 64);
      if (tiles.slots == 0) return;
      dispatch_wide_dim(call.op, call.Dk, [&](auto width) {
        launch_early(
            "cast fold", fold_kernel<T, decltype(width)::value>,
            dim3(static_cast<unsigned>(tiles.slots), static_cast<unsigned>(call.value_heads)),
            kThreads, 0, stream, args, tiles);
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
