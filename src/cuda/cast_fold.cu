// SPDX-License-Identifier: MIT
// The backward pass of CAST through the summaries, and the sums over slots, rows and items that
// make gradients of keys, values, gates and surrogates. All sums run in ascending order.
#include "cuda/device/await.cuh"
#include "cuda/device/cast.cuh"
#include "cuda/device/cast_rows.cuh"
#include "cuda/launch.h"
#include "cuda/padding.h"
#include "cuda/tuning.h"

namespace coterie::cuda {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;

template <class T>
struct FoldArgs {
  CastShape shape;
  CastBackward pass;
  Tensor4<const T> q, k, v, grad_out;
  Tensor4<T> dk, dv;
};

// One cluster. With dR its summary's gradient and dot = dR . summary, for a member j
//   dlogit_j = beta_j (dR . v_j - dot), or laplace'(logit_j) dR . v_j,
//   dv_j += beta_j dR,   dk_j += scale psi(-phi_j) dlogit_j S,
//   dphi_j -= scale sigmoid(-phi_j) dlogit_j S . k_j.
template <class T, int kDim>
__global__ void __launch_bounds__(kThreads)
    summaries_backward_kernel(const __grid_constant__ FoldArgs<T> args) {
  await_previous();
  using Layout = RowLanes<T, kDim>;
  using Floats = typename Layout::Floats;
  __shared__ float sums[kWarps][kDim], totals[2][kDim];
  const CastShape& shape = args.shape;
  const CastBackward& pass = args.pass;
  const int cluster = static_cast<int>(blockIdx.x % shape.clusters);
  const int head = static_cast<int>(blockIdx.x / shape.clusters % shape.H);
  const int item = static_cast<int>(blockIdx.x / shape.clusters / shape.H);
  const ItemSpan span = shape.tokens.span(item);
  const std::int64_t number = shape.cluster(item, head, cluster), first_slot = number * shape.width;
  const std::int32_t* list = shape.list(item, head, cluster);
  const float* gates = shape.gates(span);
  const Layout lanes;
  // Adds the rows' sums of all threads to totals[which], times `sign`.
  const auto add_total = [&](Floats& sum, int which, float sign) {
    __syncthreads();
    lanes.template fold<kWarps>(sum, sums);
    for (int d = threadIdx.x; d < shape.D; d += kThreads) {
      float value = 0.0f;
      for (int w = 0; w < kWarps; ++w) value += sums[w][d];
      totals[which][d] += sign * value;
    }
    __syncthreads();
  };
  const auto for_members = [&](const auto& body) {
    lanes.for_rows(shape.width, [&](int r) {
      const int token = list[r];
      if (token >= 0) body(token, first_slot + r);
    });
  };

  // The mix's gradients, all tokens as if they were in no cluster.
  const int parts = pass.chunks.count(span.length),
            first = pass.chunks.first_slot(shape.tokens, item);
  for (int i = threadIdx.x; i < 2 * kDim; i += kThreads) {
    float value = 0.0f;
    const int which = i / kDim, d = i % kDim;
    if (d < shape.D)
      for (int part = 0; part < parts; ++part)
        value += pass.partials[(((static_cast<std::int64_t>(first) + part) * shape.H + head) *
                                    shape.clusters +
                                cluster) *
                                   2 * shape.D +
                               which * shape.D + d];
    totals[which][d] = value;
  }
  // What changes by membership.
  const Rows<const T> queries = args.q.rows(span.batch, head, span.begin);
  const Rows<const T> gradients = args.grad_out.rows(span.batch, head, span.begin);
  Floats dsurrogate{}, taken{};
  for_members([&](int token, std::int64_t slot) {
    const float factor = shape.scale * gate_factor(shape, gates[token]);
    lanes.add(dsurrogate, factor * pass.excess[slot], lanes.load(queries, token));
    lanes.add(taken, pass.weights[slot], lanes.load(gradients, token));
  });
  add_total(taken, 1, -1.0f);

  const Rows<const T> keys = args.k.rows(span.batch, head / shape.group, span.begin);
  const Rows<const T> values = args.v.rows(span.batch, head / shape.group, span.begin);
  const Floats surrogate = lanes.load_floats(
      shape.surrogates + (static_cast<std::int64_t>(head) * shape.clusters + cluster) * shape.D,
      shape.D);
  const Floats dsummary = lanes.load_floats(totals[1], shape.D);
  const Floats summary = lanes.load_floats(pass.saved.summary + number * shape.D, shape.D);
  const float dot = shape.laplace ? 0.0f : lanes.dot(dsummary, summary);
  const float lse = shape.laplace ? 0.0f : pass.saved.summary_lse[number];
  for_members([&](int token, std::int64_t slot) {
    const float gate = gates[token], factor = shape.scale * gate_factor(shape, -gate);
    const Floats key = lanes.load(keys, token);
    const float product = lanes.dot(surrogate, key);
    const float dbeta = lanes.dot(dsummary, lanes.load(values, token));
    const float logit = factor * product;
    const float beta = shape.laplace ? laplace(logit) : expf(logit - lse);
    const float dlogit = (shape.laplace ? laplace_slope(logit) : beta) * (dbeta - dot);
    lanes.add(dsurrogate, factor * dlogit, key);
    if (!lanes.first()) return;
    pass.summary_weights[slot] = beta;
    pass.key_factors[slot] = factor * dlogit;
    if (shape.gate_scale)
      pass.dgate_slots[slot] = -shape.scale * gate_sigmoid(-gate) * dlogit * product;
  });
  add_total(dsurrogate, 0, 1.0f);
  for (int d = threadIdx.x; d < shape.D; d += kThreads) {
    pass.dsurrogate[number * shape.D + d] = totals[0][d];
    pass.dsummary[number * shape.D + d] = totals[1][d];
  }
}

// dk and dv of the tokens, lanes side by side for a token.
template <class T, int kDim>
__global__ void __launch_bounds__(kThreads)
    fold_kernel(const __grid_constant__ FoldArgs<T> args, KeyChunks tiles) {
  await_previous();
  using Layout = RowLanes<float, kDim>;
  using Floats = typename Layout::Floats;
  const CastShape& shape = args.shape;
  const CastBackward& pass = args.pass;
  const KeyChunk tile = tiles.find(shape.tokens, blockIdx.x);
  const int key_head = static_cast<int>(blockIdx.y);
  const std::int64_t per_head = static_cast<std::int64_t>(shape.clusters) * shape.width;
  const Layout lanes;
  lanes.for_rows(tile.end - tile.begin, [&](int r) {
    const int token = tile.begin + r;
    Floats dk{}, dv{};
    for (int head = key_head * shape.group; head < (key_head + 1) * shape.group; ++head) {
      const int list_head = shape.list_head(head);
      const std::int64_t row = pass.slots.row(tile.keys, list_head, token);
      const int begin = pass.slots.first[row], end = begin + pass.slots.count[row];
      const std::int32_t* entries =
          pass.slots.slots + pass.slots.start(tile.item, tile.keys, list_head);
      // A key head's slots hold the sum over its query heads, where these share lists.
      const bool by_head = pass.key_slot_heads == shape.H;
      const bool slots = by_head || head == key_head * shape.group;
      const std::int64_t key_slots = (static_cast<std::int64_t>(tile.item) * pass.key_slot_heads +
                                      (by_head ? head : key_head)) *
                                     per_head;
      const std::int64_t first_slot = shape.cluster(tile.item, head, 0) * shape.width;
      for (int e = begin; e < end; ++e) {
        const int entry = entries[e], c = entry / shape.width;
        const std::int64_t slot = first_slot + entry;
        if (slots) {
          lanes.add(dk, 1.0f,
                    lanes.load_floats(pass.dk_slots + (key_slots + entry) * shape.D, shape.D));
          lanes.add(dv, 1.0f,
                    lanes.load_floats(pass.dv_slots + (key_slots + entry) * shape.D, shape.D));
        }
        const float* surrogate =
            shape.surrogates + (static_cast<std::int64_t>(head) * shape.clusters + c) * shape.D;
        const float* dsummary = pass.dsummary + shape.cluster(tile.item, head, c) * shape.D;
        lanes.add(dk, pass.key_factors[slot], lanes.load_floats(surrogate, shape.D));
        lanes.add(dv, pass.summary_weights[slot], lanes.load_floats(dsummary, shape.D));
      }
    }
    if (args.dk.data)
      lanes.store(args.dk.rows(tile.keys.batch, key_head, tile.keys.begin), token, dk);
    if (args.dv.data)
      lanes.store(args.dv.rows(tile.keys.batch, key_head, tile.keys.begin), token, dv);
  });
}

// A warp per token: the gradients of its gate by the heads' rows and slots.
__global__ void __launch_bounds__(kThreads) fold_gate_kernel(CastShape shape, CastBackward pass) {
  await_previous();
  const std::int64_t number = static_cast<std::int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  if (number >= static_cast<std::int64_t>(shape.B) * shape.N) return;
  const int batch = static_cast<int>(number / shape.N), row = static_cast<int>(number % shape.N);
  const int item = shape.gate_scale ? shape.tokens.item_of(batch, row, shape.items) : -1;
  float sum = 0.0f;
  if (item >= 0) {
    const ItemSpan span = shape.tokens.span(item);
    const int token = row - span.begin;
    for (int head = threadIdx.x % 32; head < shape.H; head += 32) {
      const int list_head = shape.list_head(head);
      const std::int64_t place = pass.slots.row(span, list_head, token);
      const int begin = pass.slots.first[place], end = begin + pass.slots.count[place];
      const std::int32_t* entries = pass.slots.slots + pass.slots.start(item, span, list_head);
      sum += pass.dgate_rows[shape.row(span, head) + token];
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
  if (to.dk.present() || to.dv.present())
    dispatch_element(call.op, call.inputs.q.dtype, [&](auto tag) {
      using T = typename decltype(tag)::type;
      FoldArgs<T> args{};
      args.shape = shape;
      args.pass = pass;
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
