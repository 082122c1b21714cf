// SPDX-License-Identifier: MIT
// LSH attention: every round attends along its own sorted order (lsh.h), and the rounds are
// combined token by token: combine=lse by their log-sum-exps, as one softmax, or combine=mean.
#include <algorithm>

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

// Outputs by slot of the band and of the wrap, of the inputs' type.
struct LshOutputs {
  void *band, *wrap;
  float *band_lse, *wrap_lse;
};

struct CombineArgs {
  LshTokens tokens;
  LshOutputs parts;
  bool merges;
  float* lse;  // (B, H, N) when rounds merge, else (B, H, R, N)
};

// Rows by slot.
template <class T>
__device__ Rows<const T> slot_rows(const void* data, int width) {
  return {static_cast<const T*>(data), width, width, width * sizeof(T) % 16 == 0};
}

// out = sum over the parts of exp(lse_part - lse) out_part.
template <class T, class Lanes>
__device__ float merge_rounds(const CombineArgs& args, const LshToken& token, int width,
                              typename Lanes::Values& sum) {
  const LshOutputs& parts = args.parts;
  const Rows<const T> band = slot_rows<T>(parts.band, width);
  const Rows<const T> wrap = slot_rows<T>(parts.wrap, width);
  float largest = -INFINITY, total = 0.0f;
  const auto for_parts = [&](const auto& visit) {
    for (int round = 0; round < args.tokens.rounds; ++round) {
      const LshPlaces places = token.places(args.tokens, round);
      visit(parts.band_lse[places.band], band, places.band);
      if (places.first >= 0) visit(parts.wrap_lse[places.first], wrap, places.first);
    }
  };
  for_parts([&](float lse, const auto&, auto) { largest = fmaxf(largest, lse); });
  if (largest == -INFINITY) return largest;
  for_parts([&](float lse, const auto&, auto) { total += expf(lse - largest); });
  const float lse = largest + logf(total);
  for_parts([&](float part_lse, const Rows<const T>& rows, std::int64_t place) {
    typename Lanes::Values x;
    Lanes::load(rows, place, true, x);
    const float weight = expf(part_lse - lse);
#pragma unroll
    for (int i = 0; i < Lanes::kVector; ++i) sum[i] = fmaf(weight, x[i], sum[i]);
  });
  return lse;
}

// The mean of the rounds' outputs; lse points at the token's in the first round.
template <class T, class Lanes>
__device__ void average_rounds(const CombineArgs& args, const LshToken& token, int width,
                               typename Lanes::Values& sum, float* lse) {
  const float weight = 1.0f / static_cast<float>(args.tokens.rounds);
  for (int round = 0; round < args.tokens.rounds; ++round) {
    const std::int64_t place = token.places(args.tokens, round).band;
    typename Lanes::Values x;
    Lanes::load(slot_rows<T>(args.parts.band, width), place, true, x);
#pragma unroll
    for (int i = 0; i < Lanes::kVector; ++i) sum[i] = fmaf(weight, x[i], sum[i]);
    if (Lanes::column() == 0)
      lse[static_cast<std::int64_t>(round) * args.tokens.spans.rows] = args.parts.band_lse[place];
  }
}

template <class T, int kWidth>
__global__ void __launch_bounds__(kThreads)
    lsh_combine_kernel(const __grid_constant__ CombineArgs args, Tensor4<T> out) {
  using Lanes = RowLanes<T, kWidth>;
  const int rows = args.tokens.spans.rows, rounds = args.tokens.rounds;
  const int row =
      static_cast<int>(blockIdx.x * (kThreads / Lanes::kLanes) + threadIdx.x / Lanes::kLanes);
  if (row >= rows) return;
  const LshToken token(args.tokens, blockIdx.z, blockIdx.y, row);
  const std::int64_t line = static_cast<std::int64_t>(token.batch) * args.tokens.H + token.head;
  typename Lanes::Values sum = {};
  if (args.merges) {
    const float lse =
        token.item >= 0 ? merge_rounds<T, Lanes>(args, token, out.width, sum) : -INFINITY;
    if (Lanes::column() == 0) args.lse[line * rows + row] = lse;
  } else {
    float* lse = args.lse + line * rounds * rows + row;
    if (token.item >= 0)
      average_rounds<T, Lanes>(args, token, out.width, sum, lse);
    else if (Lanes::column() == 0)
      for (int round = 0; round < rounds; ++round)
        lse[static_cast<std::int64_t>(round) * rows] = -INFINITY;
  }
  Lanes::store(out.rows(token.batch, token.head, 0), row, sum);
}

LshOutputs take_outputs(Arena& arena, const LshLists& lists, const AttentionCall& call) {
  LshOutputs parts;
  const std::int64_t row_bytes = call.Dv * dtype_bytes(call.inputs.q.dtype);
  parts.band = arena.take<std::byte>(lists.band_slots(call) * row_bytes);
  parts.band_lse = arena.take<float>(lists.band_slots(call));
  parts.wrap = arena.take<std::byte>(lists.wrap_slots(call) * row_bytes);
  parts.wrap_lse = arena.take<float>(lists.wrap_slots(call));
  return parts;
}

// `saved`: order, lse. With an arena that only counts nothing is launched.
void lsh_forward(const LshParams& params, const AttentionCall& call, const AttentionResult& result,
                 Arena& arena, cudaStream_t stream) {
  const LshLists lists(arena, params, call);
  const LshOutputs parts = take_outputs(arena, lists, call);
  if (arena.counting() || call.B * call.H * call.N == 0) return;
  const TensorView &order = result.saved[0], &lse = result.saved[1];
  find_lsh_lists(call, lists, order, stream);
  ListOutputs band, wrap;
  band.slot_rows = parts.band;
  band.lse = parts.band_lse;
  wrap.slot_rows = parts.wrap;
  wrap.lse = parts.wrap_lse;
  lists_forward(call, lists.band(call, order), band, stream);
  if (lists.wraps) lists_forward(call, lists.wrap(call), wrap, stream);
  const CombineArgs args{lsh_tokens(call, lists), parts, lists.merges,
                         static_cast<float*>(lse.data)};
  dispatch_element(call.op, call.inputs.q.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    dispatch_head_dim(call.op, call.Dv, [&](auto width) {
      constexpr int kWidth = decltype(width)::value;
      constexpr int kEach = kThreads / RowLanes<T, kWidth>::kLanes;
      const dim3 grid(static_cast<unsigned>((call.N + kEach - 1) / kEach),
                      static_cast<unsigned>(call.H), static_cast<unsigned>(call.B));
      lsh_combine_kernel<T, kWidth><<<grid, kThreads, 0, stream>>>(args, tensor4<T>(result.out));
      COTERIE_LAUNCH("lsh_combine");
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
  AttentionCall tokens_;  // the call, with keys that are the queries
};

}  // namespace

std::unique_ptr<Pass> make_pass(const LshParams& params, const AttentionCall& call) {
  return std::make_unique<LshPass>(params, call);
}

}  // namespace coterie::cuda
