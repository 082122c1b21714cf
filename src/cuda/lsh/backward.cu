// SPDX-License-Identifier: MIT
// Backward pass of LSH attention. If the rounds form one softmax, every part uses the token's total
// log-sum-exp and delta = gradient . output; if they are averaged, each round has its own, and the
// result is divided by the number of rounds. Gradients by slot are summed per token, and those of
// the unit keys k = q / |q| are propagated to q:  dq += (I - k k^T) dk / |q|.
//
// Grids: a thread per token for deltas and log-sum-exps, a token per group of lanes for gradients
// (RowLanes); y = head, z = batch entry. No shared memory. Rounds add up in ascending order.
// Preconditions: rows of at most 128 elements.
#include "cuda/launch/dispatch.h"
#include "cuda/launch/launch.h"
#include "cuda/lsh/lsh.cuh"
#include "cuda/prim/row_lanes.cuh"

namespace coterie::cuda {
namespace {

constexpr int kThreads = 128;

// Gradients by slot.
struct SlotGradients {
  float *dq, *dk, *dv;
};

struct LshScratch {
  SlotGradients band, wrap;
  float *band_values, *wrap_values;  // deltas by slot, or the band's log-sum-exps
  float* delta;                      // (B, H, N)

  LshScratch(const LshPlan& plan, const AttentionCall& call, Arena& arena) {
    const auto take = [&](std::int64_t slots) {
      return SlotGradients{arena.take<float>(slots * call.Dk), arena.take<float>(slots * call.Dk),
                           arena.take<float>(slots * call.Dv)};
    };
    band = take(plan.band_slots);
    wrap = take(plan.wrap_slots);
    band_values = arena.take<float>(plan.band_slots);
    wrap_values = arena.take<float>(plan.wrap_slots);
    delta = arena.take<float>(plan.merges ? call.B * call.H * call.N : 0);
  }
};

// delta = sum over the parts. A thread per token.
__global__ void __launch_bounds__(kThreads)
    lsh_delta_kernel(const __grid_constant__ LshTokens tokens, const float* band, const float* wrap,
                     float* delta) {
  const int row = static_cast<int>(blockIdx.x) * kThreads + static_cast<int>(threadIdx.x);
  if (row >= tokens.spans.rows) return;
  const LshToken token(tokens, blockIdx.z, blockIdx.y, row);
  float sum = 0.0f;
  for (int round = 0; token.item >= 0 && round < tokens.rounds; ++round) {
    const LshPlaces places = token.places(tokens, round);
    sum += band[places.band];
    if (places.first >= 0) sum += wrap[places.first];
  }
  delta[(static_cast<std::int64_t>(token.batch) * tokens.H + token.head) * tokens.spans.rows +
        row] = sum;
}

// to[slot] = from[token] for every round (z = batch, y = head * rounds + round). A thread per
// token.
__global__ void __launch_bounds__(kThreads)
    lsh_to_slots_kernel(const __grid_constant__ LshTokens tokens, const float* from, float* to) {
  const int row = static_cast<int>(blockIdx.x) * kThreads + static_cast<int>(threadIdx.x);
  if (row >= tokens.spans.rows) return;
  const int head = blockIdx.y / tokens.rounds, round = blockIdx.y % tokens.rounds;
  const LshToken token(tokens, blockIdx.z, head, row);
  if (token.item < 0) return;
  const std::int64_t line = static_cast<std::int64_t>(blockIdx.z) * gridDim.y + blockIdx.y;
  to[token.places(tokens, round).band] = from[line * tokens.spans.rows + row];
}

// Adds up the token's rows of an array by slot over all rounds; `wrap_place` selects which of its
// places in the wrap is used.
template <class Lanes>
__device__ void add_rounds(const LshTokens& tokens, const LshToken& token, const float* band,
                           const float* wrap, std::int64_t LshPlaces::*wrap_place, int width,
                           typename Lanes::Values& sum) {
  const auto add = [&](const float* row) {
    typename Lanes::Values x;
    Lanes::load_floats(row, width, x);
#pragma unroll
    for (int i = 0; i < Lanes::kVector; ++i) sum[i] += x[i];
  };
  for (int round = 0; round < tokens.rounds; ++round) {
    const LshPlaces places = token.places(tokens, round);
    add(band + places.band * width);
    if (places.*wrap_place >= 0) add(wrap + places.*wrap_place * width);
  }
}

template <class T>
struct TokenGradientArgs {
  LshTokens tokens;
  SlotGradients band, wrap;
  Tensor4<const T> q;
  const RowStatistics* norms;  // (B, H, N)
  Tensor4<T> dq, dv;
  int group;  // query heads of a value head
  float factor;
};

// y = head.
template <class T, int kWidth>
__global__ void __launch_bounds__(kThreads)
    lsh_query_gradient_kernel(const __grid_constant__ TokenGradientArgs<T> args) {
  using Lanes = RowLanes<T, kWidth>;
  const int row =
      static_cast<int>(blockIdx.x * (kThreads / Lanes::kLanes) + threadIdx.x / Lanes::kLanes);
  const bool inside = row < args.tokens.spans.rows;
  const LshToken token(args.tokens, blockIdx.z, blockIdx.y, inside ? row : 0);
  const bool there = inside && token.item >= 0;
  typename Lanes::Values dq = {}, dk = {}, unit;
  Lanes::load(args.q.rows(token.batch, token.head, 0), token.row, there, unit);
  float inverse = 0.0f;
  if (there) {
    add_rounds<Lanes>(args.tokens, token, args.band.dq, args.wrap.dq, &LshPlaces::first,
                      args.q.width, dq);
    add_rounds<Lanes>(args.tokens, token, args.band.dk, args.wrap.dk, &LshPlaces::last,
                      args.q.width, dk);
    inverse = args.norms[(static_cast<std::int64_t>(token.batch) * args.tokens.H + token.head) *
                             args.tokens.spans.rows +
                         row]
                  .inverse;
  }
#pragma unroll
  for (int i = 0; i < Lanes::kVector; ++i) unit[i] *= inverse;
  const float along = Lanes::dot(unit, dk);  // by all lanes of the warp
#pragma unroll
  for (int i = 0; i < Lanes::kVector; ++i)
    dq[i] = args.factor * fmaf(inverse, dk[i] - along * unit[i], dq[i]);
  if (inside) Lanes::store(args.dq.rows(token.batch, token.head, 0), row, dq);
}

// y = value head.
template <class T, int kWidth>
__global__ void __launch_bounds__(kThreads)
    lsh_value_gradient_kernel(const __grid_constant__ TokenGradientArgs<T> args) {
  using Lanes = RowLanes<T, kWidth>;
  const int row =
      static_cast<int>(blockIdx.x * (kThreads / Lanes::kLanes) + threadIdx.x / Lanes::kLanes);
  if (row >= args.tokens.spans.rows) return;
  typename Lanes::Values dv = {};
  const int value_head = blockIdx.y;
  for (int i = 0; i < args.group; ++i) {
    const LshToken token(args.tokens, blockIdx.z, value_head * args.group + i, row);
    if (token.item < 0) break;
    add_rounds<Lanes>(args.tokens, token, args.band.dv, args.wrap.dv, &LshPlaces::last,
                      args.dv.width, dv);
  }
#pragma unroll
  for (int i = 0; i < Lanes::kVector; ++i) dv[i] *= args.factor;
  Lanes::store(args.dv.rows(blockIdx.z, value_head, 0), row, dv);
}

// Inputs of both list parts from the forward pass; with `slots` also the deltas and the requested
// gradients.
ListGradients list_gradients(const LshPlan& plan, const LshScratch& scratch,
                             const LshBackward& pass, const SlotGradients* slots) {
  ListGradients gradients;
  gradients.grad_out = pass.grad_out;
  gradients.lse = {scratch.band_values, true};
  if (plan.merges) gradients.lse = {static_cast<const float*>(pass.lse.data), false};
  if (!slots) return gradients;
  if (plan.merges) gradients.delta = {scratch.delta, false};
  if (pass.gradients.dq.present()) {
    gradients.slot_dq = slots->dq;
    gradients.slot_dk = slots->dk;
  }
  if (pass.gradients.dv.present()) gradients.slot_dv = slots->dv;
  return gradients;
}

// The log-sum-exps of rounds by slot, or the deltas of tokens.
void prepare_values(const LshPlan& plan, const AttentionCall& call, const LshScratch& scratch,
                    const LshBackward& pass, cudaStream_t stream) {
  if (!plan.merges)
    return launch_kernel("lsh to slots", {}, lsh_to_slots_kernel,
                         lsh_token_grid(call, kThreads, call.H * plan.tokens.rounds), kThreads, 0,
                         stream, plan.tokens, static_cast<const float*>(pass.lse.data),
                         scratch.band_values);
  const ListGradients gradients = list_gradients(plan, scratch, pass, nullptr);
  lists_delta(call, plan.band, gradients, scratch.band_values, stream);
  if (plan.tokens.wraps) lists_delta(call, plan.wrap, gradients, scratch.wrap_values, stream);
  launch_kernel("lsh delta", {}, lsh_delta_kernel, lsh_token_grid(call, kThreads, call.H), kThreads,
                0, stream, plan.tokens, scratch.band_values, scratch.wrap_values, scratch.delta);
}

// Sums over the slots of every token.
void add_slots(const LshPlan& plan, const AttentionCall& call, const LshScratch& scratch,
               const AttentionGradients& gradients, cudaStream_t stream) {
  dispatch_element(call.op, call.inputs.q.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const auto view = [](const TensorView& rows) {
      return rows.present() ? tensor4<T>(rows) : Tensor4<T>{};
    };
    const TokenGradientArgs<T> args{plan.tokens,        scratch.band,
                                    scratch.wrap,       tensor4<const T>(call.inputs.q),
                                    plan.norms,         view(gradients.dq),
                                    view(gradients.dv), static_cast<int>(call.H / call.value_heads),
                                    plan.round_weight};
    dispatch_head_dim(call.op, call.Dk, [&](auto width) {
      constexpr int kWidth = decltype(width)::value;
      constexpr int kEach = kThreads / RowLanes<T, kWidth>::kLanes;
      if (args.dq.data)
        launch_kernel("lsh query gradient", {}, lsh_query_gradient_kernel<T, kWidth>,
                      lsh_token_grid(call, kEach, call.H), kThreads, 0, stream, args);
      if (args.dv.data)
        launch_kernel("lsh value gradient", {}, lsh_value_gradient_kernel<T, kWidth>,
                      lsh_token_grid(call, kEach, call.value_heads), kThreads, 0, stream, args);
    });
  });
}

}  // namespace

void lsh_backward(const LshParams& params, const AttentionCall& call, const LshBackward& pass,
                  Arena& arena, cudaStream_t stream) {
  const LshPlan plan(params, call, pass.order, arena);
  const LshScratch scratch(plan, call, arena);
  if (call.B * call.H * call.N == 0) return;
  if (!arena.counting()) {
    lsh_find_lists(plan, call, pass.order, stream);
    prepare_values(plan, call, scratch, pass, stream);
  }
  lists_backward(call, plan.band, list_gradients(plan, scratch, pass, &scratch.band), arena,
                 stream);
  if (plan.tokens.wraps)
    lists_backward(call, plan.wrap, list_gradients(plan, scratch, pass, &scratch.wrap), arena,
                   stream);
  if (!arena.counting()) add_slots(plan, call, scratch, pass.gradients, stream);
}

}  // namespace coterie::cuda
