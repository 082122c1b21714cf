// SPDX-License-Identifier: MIT
// Contribution of the members of CAST's clusters to the gradients of mix and summaries, if the
// attention inside clusters uses lists (otherwise inner_backward_sm90a.cu). For a member i of a
// cluster with surrogate S, summary R and gradient dR of the summary,
//   by the mix (kMix): excess_i = slope_i (dot_i - g_i . R), dS += scale psi(phi_i) excess_i q_i,
//     dR -= alpha_i g_i, and as much of the gate as scale sigmoid(phi_i) excess_i q_i . S;
//   through the summary: dlogit_i = beta_i (dR . v_i - dR . R), or laplace'(logit_i) dR . v_i,
//     dS += scale psi(-phi_i) dlogit_i k_i, dphi_i -= scale sigmoid(-phi_i) dlogit_i S . k_i;
//     dropout multiplies dR . v_i and the weight of v_i.
// Factors of the rows that members receive are stored by slot, for cast_complete_slots.
//
// Grid: a block of 256 threads per cluster, one member at a time per group of lanes (CastLanes).
// Sums run over the members of a group, the groups of a warp, the warps. Shared memory: a row of
// floats per warp, 4 KiB. No preconditions.
#include "cuda/cast/cast.cuh"
#include "cuda/launch/dispatch.h"
#include "cuda/launch/launch.h"
#include "cuda/prim/dependent.cuh"
#include "cuda/prim/dropout.cuh"

namespace coterie::cuda {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;

template <class T>
struct MemberArgs {
  CastShape shape;
  CastBackward pass;
  Tensor4<const T> rows[2];  // queries and gradients of the output, or keys and values
  int group;                 // query heads per head of these
};

template <class T, int kDim, bool kMix>
__global__ void __launch_bounds__(kThreads)
    members_kernel(const __grid_constant__ MemberArgs<T> args) {
  await_previous();
  using Lanes = CastLanes<T, kDim>;
  __shared__ float sums[kWarps][kDim];
  const CastShape& shape = args.shape;
  const CastBackward& pass = args.pass;
  const int cluster = static_cast<int>(blockIdx.x % shape.clusters), D = shape.D;
  const int head = static_cast<int>(blockIdx.x / shape.clusters % shape.H);
  const int item = static_cast<int>(blockIdx.x / shape.clusters / shape.H);
  const ItemSpan span = shape.tokens.span(item);
  const std::int64_t number = shape.cluster(item, head, cluster), row = shape.row(span, head);
  const std::int32_t* list = shape.list(item, head, cluster);
  const float4* gates = pass.gates + static_cast<std::int64_t>(span.batch) * shape.N + span.begin;
  const Rows<const T> first = args.rows[0].rows(span.batch, head / args.group, span.begin);
  const Rows<const T> second = args.rows[1].rows(span.batch, head / args.group, span.begin);
  const Lanes lanes;
  auto surrogate = lanes.load_floats(shape.surrogates + shape.cluster(0, head, cluster) * D, D);
  auto summary = lanes.load_floats((kMix ? pass.saved.summary : pass.dsummary) + number * D, D);
  float dot = 0.0f, lse = 0.0f;
  if (kMix) {  // rounded as in the mix
    surrogate.round();
    summary.round();
  } else if (!shape.laplace) {
    dot = pass.summary_dots[number];
    lse = pass.saved.summary_lse[number];
  }
  const bool drops = !kMix && shape.dropout.on();
  DropoutRow words{};
  if (drops)
    words = shape.dropout.cluster(static_cast<std::int64_t>(item) * shape.H + head, cluster);
  typename Lanes::Floats dsurrogate{}, dsummary{};
#pragma unroll 2
  for (int place = lanes.group; place < shape.width; place += kThreads / Lanes::kLanes) {
    const int token = list[place];
    if (token < 0) break;  // lists are filled from the front
    const std::int64_t slot = number * shape.width + place;
    const auto a = lanes.load(first, token), b = lanes.load(second, token);
    const float product = lanes.dot(surrogate, a);
    const float value_factor = drops ? kept(shape.dropout, words, token) : 1.0f;
    const float inner = lanes.dot(summary, b) * value_factor;
    const float4 gate = gates[token];
    const float factor = shape.scale * (kMix ? gate.x : gate.z), logit = product * factor;
    if (kMix && !shape.laplace) lse = pass.saved.combine_lse[row + token];
    const float weight = shape.laplace ? laplace(logit)
                         : kMix        ? cast_weight(shape, logit, lse)
                                       : expf(logit - lse);
    const float slope = shape.laplace ? laplace_slope(logit) : weight;
    if (kMix) dot = pass.dots[slot];
    const float dlogit = slope * (kMix ? dot - inner : inner - dot);
    const float dgate = shape.scale * (kMix ? gate.y : gate.w) * dlogit * product;
    lanes.add(dsurrogate, factor * dlogit, a);
    if (kMix) lanes.add(dsummary, -weight, b);
    if (!lanes.first()) continue;
    (kMix ? pass.query_factors : pass.key_factors)[slot] = factor * dlogit;
    (kMix ? pass.weights : pass.summary_weights)[slot] = weight * value_factor;
    if (kMix) {
      pass.weighted[slot] = weight * dot;
      pass.excess[slot] = dlogit;
    }
    if (shape.gate_scale) pass.dgate_slots[slot] = kMix ? dgate : pass.dgate_slots[slot] - dgate;
  }
  const auto store_sum = [&](typename Lanes::Floats& sum, float* to) {
    __syncthreads();
    lanes.template fold<kWarps>(sum, sums);
    for (int d = threadIdx.x; d < D; d += kThreads) {
      float value = 0.0f;
      for (int w = 0; w < kWarps; ++w) value += sums[w][d];
      to[d] = value;
    }
  };
  store_sum(dsurrogate, kMix ? pass.member_parts + number * 2 * D : pass.key_parts + number * D);
  if (kMix) store_sum(dsummary, pass.member_parts + (number * 2 + 1) * D);
}

template <bool kMix>
void launch_members(const char* name, const CastShape& shape, const AttentionCall& call,
                    const CastBackward& pass, cudaStream_t stream) {
  const dim3 blocks(static_cast<unsigned>(call.num_items() * call.H * shape.clusters));
  if (blocks.x == 0) return;
  dispatch_element(call.op, call.inputs.q.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const MemberArgs<T> args{shape,
                             pass,
                             {tensor4<const T>(kMix ? call.inputs.q : call.k),
                              tensor4<const T>(kMix ? pass.grad_out : call.inputs.v)},
                             kMix ? 1 : shape.group};
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
