// SPDX-License-Identifier: MIT
// Backward pass of LSH attention. Where rounds form one softmax every part has the token's total
// log-sum-exp and delta = gradient . output; where they are averaged each round has its own, and
// what comes out is divided by their number. Gradients by slot are added up token by token, and
// those of the unit keys k = q / |q| go on to q:  dq += (I - k k^T) dk / |q|.
#include "cuda/launch/dispatch.h"
#include "cuda/launch/launch.h"
#include "cuda/lsh/lsh.cuh"
#include "cuda/lsh/lsh.h"
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

  LshScratch(Arena& arena, const LshLists& lists, const AttentionCall& call) {
    const auto take = [&](std::int64_t slots) {
      return SlotGradients{arena.take<float>(slots * call.Dk), arena.take<float>(slots * call.Dk),
                           arena.take<float>(slots * call.Dv)};
    };
    band = take(lists.band_slots(call));
    wrap = take(lists.wrap_slots(call));
    band_values = arena.take<float>(lists.band_slots(call));
    wrap_values = arena.take<float>(lists.wrap_slots(call));
    delta = arena.take<float>(lists.merges ? call.B * call.H * call.N : 0);
  }
};

// delta = sum of the parts'. A thread per token.
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

// Adds the token's rows of an array by slot over all rounds; `wrap_place` says which of its places
// in the wrap counts.
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

dim3 token_grid(const AttentionCall& call, std::int64_t each, std::int64_t heads) {
  return {static_cast<unsigned>((call.N + each - 1) / each), static_cast<unsigned>(heads),
          static_cast<unsigned>(call.B)};
}

// What both parts are told of the forward pass.
ListGradients known(const LshLists& lists, const LshScratch& scratch, const LshBackward& pass) {
  ListGradients gradients;
  gradients.grad_out = pass.grad_out;
  if (lists.merges)
    gradients.lse = {static_cast<const float*>(pass.lse.data), false};
  else
    gradients.lse = {scratch.band_values, true};
  return gradients;
}

// The same with the gradients that are asked for, by slot.
ListGradients wanted(const LshLists& lists, const LshScratch& scratch, const LshBackward& pass,
                     const SlotGradients& slots) {
  ListGradients gradients = known(lists, scratch, pass);
  if (lists.merges) gradients.delta = {scratch.delta, false};
  if (pass.gradients.dq.present()) {
    gradients.slot_dq = slots.dq;
    gradients.slot_dk = slots.dk;
  }
  if (pass.gradients.dv.present()) gradients.slot_dv = slots.dv;
  return gradients;
}

// Sums over the slots of every token.
template <class T>
void add_slots(const AttentionCall& call, const LshLists& lists, const LshScratch& scratch,
               const AttentionGradients& gradients, cudaStream_t stream) {
  TokenGradientArgs<T> args{};
  args.tokens = lsh_tokens(call, lists);
  args.band = scratch.band;
  args.wrap = scratch.wrap;
  args.q = tensor4<const T>(call.inputs.q);
  args.norms = lists.norms;
  args.group = static_cast<int>(call.H / call.value_heads);
  args.factor = lists.round_weight;
  dispatch_head_dim(call.op, call.Dk, [&](auto width) {
    constexpr int kWidth = decltype(width)::value;
    constexpr int kEach = kThreads / RowLanes<T, kWidth>::kLanes;
    if (gradients.dq.present()) {
      args.dq = tensor4<T>(gradients.dq);
      lsh_query_gradient_kernel<T, kWidth>
          <<<token_grid(call, kEach, call.H), kThreads, 0, stream>>>(args);
      COTERIE_LAUNCH("lsh_query_gradient");
    }
    if (gradients.dv.present()) {
      args.dv = tensor4<T>(gradients.dv);
      lsh_value_gradient_kernel<T, kWidth>
          <<<token_grid(call, kEach, call.value_heads), kThreads, 0, stream>>>(args);
      COTERIE_LAUNCH("lsh_value_gradient");
    }
  });
}

// The log-sum-exps of rounds by slot, or the deltas of tokens.
void prepare_values(const AttentionCall& call, const LshLists& lists, const LshScratch& scratch,
                    const LshBackward& pass, cudaStream_t stream) {
  const LshTokens tokens = lsh_tokens(call, lists);
  if (!lists.merges) {
    lsh_to_slots_kernel<<<token_grid(call, kThreads, call.H * lists.rounds), kThreads, 0, stream>>>(
        tokens, static_cast<const float*>(pass.lse.data), scratch.band_values);
    COTERIE_LAUNCH("lsh_to_slots");
    return;
  }
  const ListGradients gradients = known(lists, scratch, pass);
  lists_delta(call, lists.band(call, pass.order), gradients, scratch.band_values, stream);
  if (lists.wraps) lists_delta(call, lists.wrap(call), gradients, scratch.wrap_values, stream);
  lsh_delta_kernel<<<token_grid(call, kThreads, call.H), kThreads, 0, stream>>>(
      tokens, scratch.band_values, scratch.wrap_values, scratch.delta);
  COTERIE_LAUNCH("lsh_delta");
}

}  // namespace

void lsh_backward(const LshParams& params, const AttentionCall& call, const LshBackward& pass,
                  Arena& arena, cudaStream_t stream) {
  const LshLists lists(arena, params, call);
  const LshScratch scratch(arena, lists, call);
  if (call.B * call.H * call.N == 0) return;
  if (!arena.counting()) {
    find_lsh_lists(call, lists, pass.order, stream);
    prepare_values(call, lists, scratch, pass, stream);
  }
  lists_backward(call, lists.band(call, pass.order), wanted(lists, scratch, pass, scratch.band),
                 arena, stream);
  if (lists.wraps)
    lists_backward(call, lists.wrap(call), wanted(lists, scratch, pass, scratch.wrap), arena,
                   stream);
  if (arena.counting()) return;
  dispatch_element(call.op, call.inputs.q.dtype, [&](auto tag) {
    add_slots<typename decltype(tag)::type>(call, lists, scratch, pass.gradients, stream);
  });
}

}  // namespace coterie::cuda
