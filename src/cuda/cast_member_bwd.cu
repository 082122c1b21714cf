// SPDX-License-Identifier: MIT
// The backward pass of CAST's summaries: what members change in their gradients, and through them
// to the members. All sums run in ascending order.
#include "cuda/device/await.cuh"
#include "cuda/device/cast_bwd.cuh"
#include "cuda/launch.h"
#include "cuda/tuning.h"

namespace coterie::cuda {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;

template <class T>
struct MemberArgs {
  CastShape shape;
  CastBackward pass;
  Tensor4<const T> q, k, v, grad_out;

  __device__ Rows<const T> surrogate_rows(int head) const {
    return dense_rows(static_cast<const T*>(pass.surrogates) +
                          static_cast<std::int64_t>(head) * shape.clusters * shape.D,
                      shape.D);
  }
  __device__ Rows<const T> summary_rows(int item, int head) const {
    return dense_rows(
        static_cast<const T*>(pass.summaries) + shape.cluster(item, head, 0) * shape.D, shape.D);
  }
};

// The members of one cluster.
template <class T, int kDim>
struct ClusterMembers {
  using Layout = CastLanes<T, kDim>;
  using Floats = typename Layout::Floats;
  static constexpr int kBatch = 4, kGroups = kThreads / Layout::kLanes;
  struct Totals {
    float sums[kWarps][kDim], value[2][kDim];  // value: of the surrogate and the summary
  };

  const MemberArgs<T>& args;
  Totals& totals;
  Layout lanes;
  int item, head, cluster;
  ItemSpan span;
  std::int64_t number, first_slot;
  const std::int32_t* list;

  __device__ ClusterMembers(const MemberArgs<T>& a, Totals& memory) : args(a), totals(memory) {
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

  // Adds the rows' sums of all threads to a total.
  __device__ void add_total(Floats& sum, int which) const {
    __syncthreads();
    lanes.template fold<kWarps>(sum, totals.sums);
    for (int d = threadIdx.x; d < args.shape.D; d += kThreads) {
      float value = 0.0f;
      for (int w = 0; w < kWarps; ++w) value += totals.sums[w][d];
      totals.value[which][d] += value;
    }
    __syncthreads();
  }
  // The mix's gradients: all tokens as if they were in no cluster, and what members change.
  __device__ void load_totals() const {
    const CastShape& shape = args.shape;
    const CastBackward& pass = args.pass;
    const KeyChunks& chunks = pass.chunks;
    const int parts = chunks.count(span.length), first = chunks.first_slot(shape.tokens, item);
    const std::int64_t step = static_cast<std::int64_t>(shape.H) * shape.clusters * 2 * shape.D;
    const float* from = pass.partials + first * step +
                        (static_cast<std::int64_t>(head) * shape.clusters + cluster) * 2 * shape.D;
    for (int i = threadIdx.x; i < 2 * kDim; i += kThreads) {
      const int which = i / kDim, d = i % kDim;
      float value = 0.0f;
      if (d < shape.D) {
        value = (which == 0 ? pass.dsurrogate : pass.dsummary)[number * shape.D + d];
#pragma unroll 8
        for (int part = 0; part < parts; ++part) value += from[part * step + which * shape.D + d];
      }
      totals.value[which][d] = value;
    }
    __syncthreads();
  }
  __device__ void clear_totals() const {
    for (int i = threadIdx.x; i < 2 * kDim; i += kThreads) totals.value[i / kDim][i % kDim] = 0.0f;
  }
  __device__ void store_totals() const {
    for (int d = threadIdx.x; d < args.shape.D; d += kThreads) {
      args.pass.dsurrogate[number * args.shape.D + d] = totals.value[0][d];
      args.pass.dsummary[number * args.shape.D + d] = totals.value[1][d];
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
  // Weights of the slots, and what membership changes in the gradients of the mix.
  template <bool kAligned>
  __device__ void add_excess(Floats& dsurrogate, Floats& dsummary) const {
    const CastShape& shape = args.shape;
    const CastBackward& pass = args.pass;
    const float *gates = shape.gates(span), *lse_rows = pass.saved.combine_lse;
    const std::int64_t row = shape.row(span, head);
    const Floats surrogate = lanes.load(args.surrogate_rows(head), cluster);
    const Floats summary = lanes.load(args.summary_rows(item, head), cluster);
    for_members<kAligned>(
        args.q.rows(span.batch, head, span.begin), args.grad_out.rows(span.batch, head, span.begin),
        [&](const int(&tokens)[kBatch], std::int64_t slot, const uint4(&words)[2][kBatch]) {
          float gate[kBatch], lse[kBatch], dot[kBatch];
#pragma unroll
          for (int i = 0; i < kBatch; ++i) {
            const bool there = tokens[i] >= 0;
            gate[i] = there ? gates[tokens[i]] : 0.0f;
            lse[i] = there && !shape.laplace ? lse_rows[row + tokens[i]] : 0.0f;
            dot[i] = there ? pass.dots[slot + i * kGroups] : 0.0f;
          }
#pragma unroll
          for (int i = 0; i < kBatch; ++i) {
            const Floats query = to_floats<T, kDim>(words[0][i]),
                         gradient = to_floats<T, kDim>(words[1][i]);
            const float product = lanes.dot(surrogate, query);
            const float dalpha = lanes.dot(summary, gradient);
            if (tokens[i] < 0) continue;
            const float factor = shape.scale * gate_factor(shape, gate[i]);
            const MixWeight weight(shape, product * factor, lse[i]);
            const float excess = weight.slope * (dot[i] - dalpha);
            lanes.add(dsurrogate, factor * excess, query);
            lanes.add(dsummary, -weight.value, gradient);
            if (!lanes.first()) continue;
            const std::int64_t own = slot + i * kGroups;
            pass.weights[own] = weight.value;
            pass.weighted[own] = weight.value * dot[i];
            pass.excess[own] = excess;
            if (shape.gate_scale)
              pass.dgate_slots[own] = shape.scale * gate_sigmoid(gate[i]) * excess * product;
          }
        });
  }
  // Through the summary: with dR its gradient and dot = dR . summary, for a member j
  //   dlogit_j = beta_j (dR . v_j - dot), or laplace'(logit_j) dR . v_j,
  //   dv_j += beta_j dR,   dk_j += scale psi(-phi_j) dlogit_j S,
  //   dphi_j -= scale sigmoid(-phi_j) dlogit_j S . k_j.
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
__global__ void __launch_bounds__(kThreads, 2)
    member_weights_kernel(const __grid_constant__ MemberArgs<T> args) {
  await_previous();
  using Members = ClusterMembers<T, kDim>;
  __shared__ typename Members::Totals totals;
  const Members members(args, totals);
  members.clear_totals();
  typename Members::Floats dsurrogate{}, dsummary{};
  if (args.q.aligned && args.grad_out.aligned)
    members.template add_excess<true>(dsurrogate, dsummary);
  else
    members.template add_excess<false>(dsurrogate, dsummary);
  members.add_total(dsurrogate, 0);
  members.add_total(dsummary, 1);
  members.store_totals();
}

template <class T, int kDim>
__global__ void __launch_bounds__(kThreads, 2)
    summaries_backward_kernel(const __grid_constant__ MemberArgs<T> args) {
  await_previous();
  using Members = ClusterMembers<T, kDim>;
  __shared__ typename Members::Totals totals;
  const Members members(args, totals);
  members.load_totals();
  typename Members::Floats dsurrogate{};
  if (args.k.aligned && args.v.aligned)
    members.template add_members<true>(dsurrogate);
  else
    members.template add_members<false>(dsurrogate);
  members.add_total(dsurrogate, 0);
  members.store_totals();
}

// The facts of rows (cast.h); a thread has one.
__global__ void __launch_bounds__(kThreads)
    row_facts_kernel(const __grid_constant__ CastShape shape,
                     const __grid_constant__ CastBackward pass, KeyChunks tiles) {
  await_previous();
  const KeyChunk tile = tiles.find(shape.tokens, static_cast<int>(blockIdx.x));
  const int head = static_cast<int>(blockIdx.y), list_head = shape.list_head(head);
  const int token = tile.begin + static_cast<int>(threadIdx.x);
  if (token >= tile.end) return;
  const std::int64_t place = shape.row(tile.keys, head) + token;
  const std::int64_t row = pass.slots.row(tile.keys, list_head, token);
  const std::int32_t* entries =
      pass.slots.slots + pass.slots.start(tile.item, tile.keys, list_head) + pass.slots.first[row];
  const float* excess = pass.excess + shape.cluster(tile.item, head, 0) * shape.width;
  const int count = pass.slots.count[row];
  const float lse = shape.laplace ? 0.0f : pass.saved.combine_lse[place];
  const float factor = shape.scale * gate_factor(shape, shape.gates(tile.keys)[token]);
  float sum = 0.0f;
  for (int e = 0; e < count; ++e) sum += excess[entries[e]];
  pass.facts[place] = make_float4(factor * kLog2e, lse * kLog2e, sum, 0.0f);
}

// body(arguments, blocks, integral_constant width)
template <class Body>
void for_clusters(const CastShape& shape, const AttentionCall& call, const CastBackward& pass,
                  const Body& body) {
  const unsigned blocks =
      static_cast<unsigned>(static_cast<std::int64_t>(shape.items) * shape.H * shape.clusters);
  if (blocks == 0) return;
  dispatch_element(call.op, call.inputs.q.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const MemberArgs<T> args{shape,
                             pass,
                             tensor4<const T>(call.inputs.q),
                             tensor4<const T>(call.k),
                             tensor4<const T>(call.inputs.v),
                             tensor4<const T>(pass.grad_out)};
    dispatch_wide_dim(call.op, call.Dk, [&](auto width) { body(args, blocks, width); });
  });
}

}  // namespace

void cast_members_backward(const CastShape& shape, const AttentionCall& call,
                           const CastBackward& pass, cudaStream_t stream) {
  for_clusters(shape, call, pass, [&](const auto& args, unsigned blocks, auto width) {
    using T = std::remove_const_t<std::remove_pointer_t<decltype(args.q.data)>>;
    launch_early("cast members", member_weights_kernel<T, decltype(width)::value>, dim3(blocks),
                 kThreads, 0, stream, args);
  });
  const KeyChunks tiles = token_tiles(shape, kThreads);
  if (tiles.slots > 0)
    launch_early("cast rows", row_facts_kernel,
                 dim3(static_cast<unsigned>(tiles.slots), static_cast<unsigned>(shape.H)), kThreads,
                 0, stream, shape, pass, tiles);
}

void cast_summaries_backward(const CastShape& shape, const AttentionCall& call,
                             const CastBackward& pass, cudaStream_t stream) {
  for_clusters(shape, call, pass, [&](const auto& args, unsigned blocks, auto width) {
    using T = std::remove_const_t<std::remove_pointer_t<decltype(args.q.data)>>;
    launch_early("cast summaries backward", summaries_backward_kernel<T, decltype(width)::value>,
                 dim3(blocks), kThreads, 0, stream, args);
  });
}

}  // namespace coterie::cuda
