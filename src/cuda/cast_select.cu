// SPDX-License-Identifier: MIT
// Which tokens form the clusters of CAST: products of tokens and surrogates, summed over the heads
// that share a clustering. Affinities are kept for as many clusters at a time as there is room for;
// when not for all, the softmax's normalisers are found in a pass of their own.
#include "cuda/cast_select.h"

#include "cuda/device/await.cuh"
#include "cuda/device/cast_affinities.cuh"
#include "cuda/hopper.h"
#include "cuda/launch.h"
#include "cuda/tuning.h"

namespace coterie::cuda {
namespace {

template <class T>
__global__ void __launch_bounds__(kAffinityThreads, 1)
    affinity_kernel(const __grid_constant__ AffinityArgs<T> args) {
  extern __shared__ __align__(128) unsigned char memory[];
  await_previous();
  // Units side by side read the same tokens.
  AffinityBlock<T> block{
      args, args.tiles.find(args.scores.shape.tokens, static_cast<int>(blockIdx.x / args.units))};
  if (block.tile.begin >= block.tile.end) return;
  block.unit = args.scores.first_unit + static_cast<int>(blockIdx.x % args.units);
  block.list_head = block.unit / args.scores.blocks;
  block.first = block.unit % args.scores.blocks * kUnitClusters;
  const auto stage = [&](int step) {
    return AffinityStage<T>{shared_address(memory) +
                            step % kAffinityStages * AffinityStage<T>::kBytes};
  };
  const int warp = threadIdx.x / 32, row = warp / 2 * 32, column = warp % 2 * kAffinityHalf;
  const int steps = block.steps();
  Accumulator sums[2][2][4] = {};
#pragma unroll
  for (int step = 0; step < kAffinityStages - 1; ++step) {
    if (step < steps) block.load(stage(step), step);
    cp_async_commit();
  }
  for (int step = 0; step < steps; ++step) {
    cp_async_wait<kAffinityStages - 2>();
    __syncthreads();
    if (step + kAffinityStages - 1 < steps)
      block.load(stage(step + kAffinityStages - 1), step + kAffinityStages - 1);
    cp_async_commit();
    add_step(sums, stage(step), row, column);
  }
  write_affinities(block, sums, row, column);
}

// The norms of ScoreRow, from the partial sums over the clusters.
__global__ void norms_kernel(CastScores scores, const float2* partials, float2* norms) {
  await_previous();
  const CastShape& shape = scores.shape;
  const std::int64_t rows = scores.rows();
  const std::int64_t number = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (number >= shape.list_heads * rows) return;
  const std::int64_t position = number % rows, list_head = number / rows;
  const float gate = shape.gate[position];
  if (shape.laplace) {
    const float open = gate_sigmoid(gate);
    norms[number] = make_float2(open, 1.0f - open);
    return;
  }
  const int halves = (shape.clusters + kAffinityHalf - 1) / kAffinityHalf;
  float lse[2];
  for (int side = 0; side < 2; ++side) {
    const float2* part = partials + (list_head * scores.blocks * 4 + side) * rows + position;
    float largest = -INFINITY, sum = 0.0f;
    for (int half = 0; half < halves; ++half) largest = fmaxf(largest, part[2 * half * rows].x);
    for (int half = 0; half < halves; ++half) {
      const float2 values = part[2 * half * rows];
      sum += values.y * expf(values.x - largest);
    }
    lse[side] = largest + logf(sum);
  }
  norms[number] = make_float2(lse[0] + softplus(-gate), lse[1] + softplus(gate));
}

// How affinities or scores are kept: `stored` units at a time.
struct SelectPlan {
  bool scored;  // scores only
  int blocks, units, stored;

  SelectPlan(const CastParams& params, const AttentionCall& call, const CastShape& shape)
      : scored(call.inputs.q.dtype != DType::f32 && !shape.laplace &&
               shape.clusters <= kMostScored && on_hopper()),
        blocks((shape.clusters + kUnitClusters - 1) / kUnitClusters),
        units(blocks * shape.list_heads) {
    // As much memory as the inner outputs will take, or as the queries.
    const std::int64_t unit = sides() * kUnitClusters * call.B * call.N;
    const std::int64_t room =
        max(shape.slots(), call.B * call.H * call.N) * call.Dk / max(unit, std::int64_t{1});
    stored = static_cast<int>(min(max(room, std::int64_t{1}), std::int64_t{units}));
    // A list head's clusters must be there together.
    if (scored || params.mode == CastMode::single) stored = max(stored / blocks, 1) * blocks;
  }
  int sides() const { return scored ? 1 : 2; }
};

}  // namespace

void cast_select(const CastParams& params, const AttentionCall& call, std::int32_t* members,
                 Arena& arena, cudaStream_t stream) {
  const CastShape shape = cast_shape(params, call, members);
  const SelectPlan plan(params, call, shape);
  const std::int64_t rows = call.B * call.N;
  const bool norms_wanted = !plan.scored, softmax = !shape.laplace;
  float* affinities = arena.take<float>(plan.sides() * static_cast<std::int64_t>(plan.stored) *
                                        kUnitClusters * rows);
  float2* norms = norms_wanted ? arena.take<float2>(shape.list_heads * rows) : nullptr;
  float2* partials =
      norms_wanted && softmax ? arena.take<float2>(4ll * plan.units * rows) : nullptr;
  void* table = plan.scored ? arena.take<std::uint16_t>(call.H * kMostScored * 128) : nullptr;
  const void* surrogates = plan.scored
                               ? nullptr
                               : cast_rounded(call.inputs.q.dtype, shape.surrogates,
                                              call.H * params.clusters * call.Dk, arena, stream);
  const bool single = params.mode == CastMode::single;
  Arena none;
  const SingleBuffers buffers(single ? arena : none, shape);
  if (arena.counting() || rows == 0) return;
  CastScores scores{shape, plan.blocks, 0, plan.sides(), affinities, norms};
  const ItemChunks tiles = token_tiles(shape, kAffinityTokens);
  const auto multiply = [&](int first, int units, bool keep, bool sum) {
    scores.first_unit = first;
    dispatch_element(call.op, call.inputs.q.dtype, [&](auto tag) {
      using T = typename decltype(tag)::type;
      if (plan.scored) {
        if constexpr (sizeof(T) == 2)
          scores_sm90a<T>(scores, call, first / plan.blocks, units / plan.blocks, table, stream);
        return;
      }
      const AffinityArgs<T> args{scores,
                                 tiles,
                                 static_cast<unsigned>(units),
                                 tensor4<const T>(call.inputs.q),
                                 tensor4<const T>(call.k),
                                 static_cast<const T*>(surrogates),
                                 sum ? partials : nullptr,
                                 keep};
      launch_early("cast affinities", affinity_kernel<T>,
                   dim3(static_cast<unsigned>(units) * static_cast<unsigned>(tiles.slots)),
                   kAffinityThreads, kAffinityStages * AffinityStage<T>::kBytes, stream, args);
    });
  };
  const bool once = !plan.scored && plan.stored == plan.units;
  if (once || partials) multiply(0, plan.units, once, softmax);
  constexpr int kNormThreads = 256;
  if (norms)
    launch_early(
        "cast norms", norms_kernel,
        dim3(static_cast<unsigned>((shape.list_heads * rows + kNormThreads - 1) / kNormThreads)),
        kNormThreads, 0, stream, scores, const_cast<const float2*>(partials), norms);
  for (int first = 0; first < plan.units; first += plan.stored) {
    const int units = min(plan.stored, plan.units - first);
    if (!once) multiply(first, units, true, false);
    scores.first_unit = first;
    if (single)
      cast_single(scores, units, buffers, params.size, members, stream);
    else
      cast_top(scores, units, members, stream);
  }
}

}  // namespace coterie::cuda
