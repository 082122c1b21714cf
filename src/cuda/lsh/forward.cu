// SPDX-License-Identifier: MIT
// LSH attention: every round attends along its own sorted order (lsh.cuh), and the rounds are
// combined per token: combine=lse by their log-sum-exps, as one softmax,
//   out_i = sum over rounds r and wraps of exp(lse_ir - lse_i) out_ir,   lse_i their log-sum-exp,
// or combine=mean. The attention within a round uses the list kernels (lists/lists.h).
//
// Grid of the combination: a token per group of lanes, each lane 16 bytes of a row (RowLanes); y =
// head, z = batch entry. No shared memory. Preconditions: rows of at most 128 elements; others are
// refused.
#include <algorithm>
#include <type_traits>

#include "cuda/api/pass.h"
#include "cuda/api/refusal.h"
#include "cuda/cluster/clustering.h"
#include "cuda/launch/dispatch.h"
#include "cuda/launch/launch.h"
#include "cuda/lsh/lsh.cuh"
#include "cuda/prim/row_lanes.cuh"

namespace coterie::cuda {
namespace {

constexpr int kThreads = 128;

struct LshCombineArgs {
  LshTokens tokens;
  const void *band, *wrap;  // outputs by slot, of the inputs' type
  const float *band_lse, *wrap_lse;
  bool merges;
  float round_weight;
  float* lse;  // (B, H, N) when rounds merge, else (B, H, R, N)
};

template <class T, int kWidth>
__global__ void __launch_bounds__(kThreads)
    lsh_combine_kernel(const __grid_constant__ LshCombineArgs args, Tensor4<T> out) {
  using Lanes = RowLanes<T, kWidth>;
  const int rows = args.tokens.spans.rows, rounds = args.tokens.rounds;
  const int row =
      static_cast<int>(blockIdx.x * (kThreads / Lanes::kLanes) + threadIdx.x / Lanes::kLanes);
  if (row >= rows) return;
  const LshToken token(args.tokens, blockIdx.z, blockIdx.y, row);
  // Calls visit(round, place, log-sum-exp, outputs) for the parts of the token.
  const auto for_parts = [&](auto together, const auto& visit) {
    const int there = token.item >= 0 ? rounds : 0;
#pragma unroll decltype(together)::value
    for (int round = 0; round < there; ++round) {
      const LshPlaces places = token.places(args.tokens, round);
      visit(round, places.band, args.band_lse[places.band], args.band);
      if (places.first >= 0) visit(round, places.first, args.wrap_lse[places.first], args.wrap);
    }
  };
  constexpr std::integral_constant<int, 4> kFour{};
  constexpr std::integral_constant<int, 2> kTwo{};
  const std::int64_t line = static_cast<std::int64_t>(token.batch) * args.tokens.H + token.head;
  float* to = args.lse + (args.merges ? line : line * rounds) * rows + row;
  float lse = -INFINITY;
  if (args.merges) {
    float largest = -INFINITY, total = 0.0f;
    for_parts(kFour,
              [&](int, std::int64_t, float own, const void*) { largest = fmaxf(largest, own); });
    if (largest > -INFINITY) {
      for_parts(kFour,
                [&](int, std::int64_t, float own, const void*) { total += expf(own - largest); });
      lse = largest + logf(total);
    }
    if (Lanes::column() == 0) *to = lse;
  } else if (token.item < 0 && Lanes::column() == 0) {
    for (int round = 0; round < rounds; ++round) to[static_cast<std::int64_t>(round) * rows] = lse;
  }
  typename Lanes::Values sum = {};
  if (!args.merges || lse > -INFINITY)
    for_parts(kTwo, [&](int round, std::int64_t place, float own, const void* outputs) {
      typename Lanes::Values x;
      Lanes::load(
          {static_cast<const T*>(outputs), out.width, out.width, out.width * sizeof(T) % 16 == 0},
          place, true, x);
      const float weight = args.merges ? expf(own - lse) : args.round_weight;
#pragma unroll
      for (int i = 0; i < Lanes::kVector; ++i) sum[i] = fmaf(weight, x[i], sum[i]);
      if (!args.merges && Lanes::column() == 0) to[static_cast<std::int64_t>(round) * rows] = own;
    });
  Lanes::store(out.rows(token.batch, token.head, 0), row, sum);
}

// `saved`: order, lse. With an arena that only counts, nothing is launched.
void lsh_forward(const LshParams& params, const AttentionCall& call, const AttentionResult& result,
                 Arena& arena, cudaStream_t stream) {
  const TensorView order = arena.counting() ? TensorView{} : result.saved[0];
  const LshPlan plan(params, call, order, arena);
  const std::int64_t row_bytes = call.Dv * dtype_bytes(call.inputs.q.dtype);
  ListOutputs band, wrap;
  band.slot_rows = arena.take<std::byte>(plan.band_slots * row_bytes);
  band.lse = arena.take<float>(plan.band_slots);
  wrap.slot_rows = arena.take<std::byte>(plan.wrap_slots * row_bytes);
  wrap.lse = arena.take<float>(plan.wrap_slots);
  if (arena.counting() || call.B * call.H * call.N == 0) return;
  lsh_find_lists(plan, call, order, stream);
  lists_forward(call, plan.band, band, stream);
  if (plan.tokens.wraps) lists_forward(call, plan.wrap, wrap, stream);
  const LshCombineArgs args{
      plan.tokens, band.slot_rows, wrap.slot_rows,    band.lse,
      wrap.lse,    plan.merges,    plan.round_weight, static_cast<float*>(result.saved[1].data)};
  dispatch_element(call.op, call.inputs.q.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    dispatch_head_dim(call.op, call.Dv, [&](auto width) {
      constexpr int kWidth = decltype(width)::value;
      constexpr int kEach = kThreads / RowLanes<T, kWidth>::kLanes;
      launch_kernel("lsh combine", {}, lsh_combine_kernel<T, kWidth>,
                    lsh_token_grid(call, kEach, call.H), kThreads, 0, stream, args,
                    tensor4<T>(result.out));
    });
  });
}

class LshPass : public Pass {
 public:
  LshPass(const LshParams& params, const AttentionCall& call)
      : Pass(call), params_(params), tokens_(call) {
    tokens_.inputs.k_sequences = tokens_.inputs.q_sequences;
  }

  std::string refusal() const override {
    const std::string buckets = refuse_more_than(kMaxClusters, "buckets", params_.buckets);
    if (!buckets.empty()) return buckets;
    const std::int64_t chunks = call_.B * (call_.N / std::max<std::int64_t>(params_.chunk, 1) + 1);
    for (const std::string& reason :
         {refuse_more_than(kMaxBlocks, "rounds of all heads", call_.H * params_.rounds),
          refuse_batches(call_.B),
          refuse_lists(std::max(chunks, call_.B * call_.H * params_.rounds * params_.buckets)),
          refuse_more_than(kMaxSlots, "elements in all rotations",
                           params_.rounds * (params_.buckets / 2 + 7) * kMaxHeadDim)})
      if (!reason.empty()) return reason;
    return "";
  }

  std::int64_t workspace_bytes() const override {
    Arena select, forward, backward;
    lsh_select(params_, tokens_, {}, select, nullptr);
    lsh_forward(params_, tokens_, {}, forward, nullptr);
    lsh_backward(params_, tokens_, {}, backward, nullptr);
    return std::max({select.used(), forward.used(), backward.used()});
  }

  void select(const std::vector<TensorView>& saved, const Workspace& workspace) const override {
    Arena arena = take_workspace(workspace);
    lsh_select(params_, tokens_, saved[0], arena, stream_of(workspace));
  }

  void attend(const AttentionResult& result, const Workspace& workspace) const override {
    Arena arena = take_workspace(workspace);
    lsh_forward(params_, tokens_, result, arena, stream_of(workspace));
  }

  void backward(const AttentionResult& result, const TensorView& grad_out,
                const AttentionGradients& gradients, const Workspace& workspace) const override {
    Arena arena = take_workspace(workspace);
    lsh_backward(params_, tokens_, {result.saved[0], result.saved[1], grad_out, gradients}, arena,
                 stream_of(workspace));
  }

 private:
  const LshParams& params_;
  AttentionCall tokens_;  // the call with the queries as keys
};

}  // namespace

std::unique_ptr<Pass> make_pass(const LshParams& params, const AttentionCall& call) {
  return std::make_unique<LshPass>(params, call);
}

}  // namespace coterie::cuda
