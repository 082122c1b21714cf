// SPDX-License-Identifier: MIT
// The backward pass of CAST's summaries: what members change in their gradients, and through them
// to the members. All sums run in ascending order.
#include "cuda/cast/backward.cuh"
#include "cuda/launch/dispatch.h"
#include "cuda/launch/launch.h"
#include "cuda/prim/dependent.cuh"

namespace coterie::cuda {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;

template <class T>
struct MemberArgs {
  CastShape shape;
  CastBackward pass;
  Tensor4<const T> q, k, v, grad_out;

  __device__ const float4* gates(const ItemSpan& span) const {
    return pass.gates + static_cast<std::int64_t>(span.batch) * shape.N + span.begin;
  }
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
  static constexpr int kBatch = 2, kGroups = kThreads / Layout::kLanes;
  using Sums = float[kWarps][kDim];

  const MemberArgs<T>& args;
  Sums& sums;
  Layout lanes;
  int item, head, cluster;
  ItemSpan span;
  std::int64_t number, first_slot;
  const std::int32_t* list;

  __device__ ClusterMembers(const MemberArgs<T>& a, Sums& memory) : args(a), sums(memory) {
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

  // The rows' sums of all threads.
  __device__ void store_sum(Floats& sum, float* to) const {
    __syncthreads();
    lanes.template fold<kWarps>(sum, sums);
    for (int d = threadIdx.x; d < args.shape.D; d += kThreads) {
      float value = 0.0f;
      for (int w = 0; w < kWarps; ++w) value += sums[w][d];
      to[d] = value;
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
  template <bool kMix, bool kAligned>
  __device__ void add(Floats& dsurrogate, Floats& dsummary) const {
    if constexpr (kMix)
      add_excess<kAligned>(dsurrogate, dsummary);
    else
      add_members<kAligned>(dsurrogate);
  }
  // Weights of the slots, and what membership changes in the gradients of the mix.
  template <bool kAligned>
  __device__ void add_excess(Floats& dsurrogate, Floats& dsummary) const {
    const CastShape& shape = args.shape;
    const CastBackward& pass = args.pass;
    const float4* gates = args.gates(span);
    const float* lse_rows = pass.saved.combine_lse;
    const std::int64_t row = shape.row(span, head);
    const Floats surrogate = lanes.load(args.surrogate_rows(head), cluster);
    const Floats summary = lanes.load(args.summary_rows(item, head), cluster);
    for_members<kAligned>(
        args.q.rows(span.batch, head, span.begin), args.grad_out.rows(span.batch, head, span.begin),
        [&](const int(&tokens)[kBatch], std::int64_t slot, const uint4(&words)[2][kBatch]) {
          float2 gate[kBatch];  // psi, sigmoid
          float lse[kBatch], dot[kBatch];
#pragma unroll
          for (int i = 0; i < kBatch; ++i) {
            const bool there = tokens[i] >= 0;
            gate[i] = *reinterpret_cast<const float2*>(gates + max(tokens[i], 0));
            lse[i] = there && !shape.laplace ? lse_rows[row + tokens[i]] : 0.0f;
            dot[i] = there ? pass.dots[slot + i * kGroups] : 0.0f;
          }
#pragma unroll
          for (int i = 0; i < kBatch; ++i) {
            const Floats query = Layout::to_floats(words[0][i]),
                         gradient = Layout::to_floats(words[1][i]);
            const float product = lanes.dot(surrogate, query);
            const float dalpha = lanes.dot(summary, gradient);
            if (tokens[i] < 0) continue;
            const float factor = shape.scale * gate[i].x;
            const MixWeight weight(shape, product * factor, lse[i]);
            const float excess = weight.slope * (dot[i] - dalpha);
            lanes.add(dsurrogate, factor * excess, query);
            lanes.add(dsummary, -weight.value, gradient);
            if (!lanes.first()) continue;
            const std::int64_t own = slot + i * kGroups;
            pass.weights[own] = weight.value;
            pass.weighted[own] = weight.value * dot[i];
            pass.excess[own] = excess;
            pass.query_factors[own] = factor * excess;
            if (shape.gate_scale)
              pass.dgate_slots[own] = shape.scale * gate[i].y * excess * product;
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
    const float4* gates = args.gates(span);
    const Floats surrogate = lanes.load_floats(
        shape.surrogates + (static_cast<std::int64_t>(head) * shape.clusters + cluster) * shape.D,
        shape.D);
    const Floats dsummary = lanes.load_floats(pass.dsummary + number * shape.D, shape.D);
    const float dot = shape.laplace ? 0.0f : pass.summary_dots[number];
    const float lse = shape.laplace ? 0.0f : pass.saved.summary_lse[number];
    for_members<kAligned>(
        args.k.rows(span.batch, head / shape.group, span.begin),
        args.v.rows(span.batch, head / shape.group, span.begin),
        [&](const int(&tokens)[kBatch], std::int64_t slot, const uint4(&words)[2][kBatch]) {
          float2 gate[kBatch];  // psi, sigmoid of the gate's opposite
          float before[kBatch];
#pragma unroll
          for (int i = 0; i < kBatch; ++i) {
            const bool there = tokens[i] >= 0;
            gate[i] = reinterpret_cast<const float2*>(gates + max(tokens[i], 0))[1];
            before[i] = there && shape.gate_scale ? pass.dgate_slots[slot + i * kGroups] : 0.0f;
          }
#pragma unroll
          for (int i = 0; i < kBatch; ++i) {
            const Floats key = Layout::to_floats(words[0][i]);
            const float product = lanes.dot(surrogate, key);
            const float dbeta = lanes.dot(dsummary, Layout::to_floats(words[1][i]));
            if (tokens[i] < 0) continue;
            const float factor = shape.scale * gate[i].x;
            const float logit = factor * product;
            const float beta = shape.laplace ? laplace(logit) : expf(logit - lse);
            const float dlogit = (shape.laplace ? laplace_slope(logit) : beta) * (dbeta - dot);
            lanes.add(dsurrogate, factor * dlogit, key);
            if (!lanes.first()) continue;
            const std::int64_t own = slot + i * kGroups;
            pass.summary_weights[own] = beta;
            pass.key_factors[own] = factor * dlogit;
            if (shape.gate_scale)
              pass.dgate_slots[own] = before[i] - shape.scale * gate[i].y * dlogit * product;
          }
        });
  }
};

// A block per cluster: by the mix (kMix), or through the summary.
template <class T, int kDim, bool kMix>
__global__ void __launch_bounds__(kThreads, 3)
    members_kernel(const __grid_constant__ MemberArgs<T> args) {
  await_previous();
  using Members = ClusterMembers<T, kDim>;
  __shared__ typename Members::Sums sums;
  const Members members(args, sums);
  const bool aligned =
      kMix ? args.q.aligned && args.grad_out.aligned : args.k.aligned && args.v.aligned;
  const int D = args.shape.D;
  typename Members::Floats dsurrogate{}, dsummary{};
  if (aligned)
    members.template add<kMix, true>(dsurrogate, dsummary);
  else
    members.template add<kMix, false>(dsurrogate, dsummary);
  float* to = kMix ? args.pass.member_parts + members.number * 2 * D
                   : args.pass.key_parts + members.number * D;
  members.store_sum(dsurrogate, to);
  if (kMix) members.store_sum(dsummary, to + D);
}

template <bool kMix>
void launch_members(const char* name, const CastShape& shape, const AttentionCall& call,
                    const CastBackward& pass, cudaStream_t stream) {
  const dim3 blocks(
      static_cast<unsigned>(static_cast<std::int64_t>(shape.items) * shape.H * shape.clusters));
  if (blocks.x == 0) return;
  dispatch_element(call.op, call.inputs.q.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const MemberArgs<T> args{shape,
                             pass,
                             tensor4<const T>(call.inputs.q),
                             tensor4<const T>(call.k),
                             tensor4<const T>(call.inputs.v),
                             tensor4<const T>(pass.grad_out)};
    dispatch_head_dim(call.op, call.Dk, [&](auto width) {
      launch_early(name, members_kernel<T, decltype(width)::value, kMix>, blocks, kThreads, 0,
                   stream, args);
    });
  });
}

}  // namespace

void cast_members_backward(const CastShape& shape, const AttentionCall& call,
                           const CastBackward& pass, cudaStream_t stream) {
  launch_members<true>("cast members", shape, call, pass, stream);
}

void cast_summaries_backward(const CastShape& shape, const AttentionCall& call,
                             const CastBackward& pass, cudaStream_t stream) {
  launch_members<false>("cast summaries backward", shape, call, pass, stream);
}

}  // namespace coterie::cuda
