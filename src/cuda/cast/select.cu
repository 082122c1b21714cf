// SPDX-License-Identifier: MIT
// Which tokens form the clusters of CAST: affinities, products of tokens and surrogates summed over
// the heads that share a clustering, become scores (select.h). They are stored for as many clusters
// at a time as memory allows; if not for all, the softmax's normalisers are found in a separate
// pass. Members follow in top.cu or single.cu.
//
// Affinities are for f32, laplace, more than 256 clusters and other devices; else scores_sm90a.cu.
// Grid: a block of 8 warps per 128 tokens and unit of 128 clusters; a warp handles 32 tokens,
// queries and keys, and 64 clusters (mma.sync). Shared memory: two stages of 128 bytes of 384
// rows, 96 KiB. Scores: a thread per token and unit. No preconditions.
#include <cstdint>

#include "cuda/cast/select.h"
#include "cuda/launch/device.h"
#include "cuda/launch/dispatch.h"
#include "cuda/launch/launch.h"
#include "cuda/prim/dependent.cuh"

namespace coterie::cuda {
namespace {

constexpr int kAffinityTokens = 128, kAffinityThreads = 256, kAffinityStages = 2;
constexpr int kScoringThreads = 256;
constexpr int kAffinityHalf = 64;  // clusters per warp, over which it sums

// Elements of a row multiplied at a time: 128 bytes.
template <class T>
constexpr int kAffinityDepth = 128 / static_cast<int>(sizeof(T));

template <class T>
struct AffinityArgs {
  CastScores scores;
  ItemChunks tiles;
  unsigned units;
  Tensor4<const T> q, k;
  const T* surrogates;  // (H, C, D)
  float2* partials;     // (2 units, 2, B, N): largest affinity and sum of exponentials, or null
  bool keep;            // store affinities
};

// The tiles of one step in shared memory: queries and keys of the tokens, surrogates.
template <class T>
struct AffinityStage {
  using Shape = Tile<T, kAffinityDepth<T>>;
  static constexpr int kTileBytes = kAffinityTokens * Shape::kRowBytes;
  static constexpr int kBytes = 3 * kTileBytes;
  std::uint32_t base;

  __device__ Shape tile(int which) const { return {base + which * kTileBytes}; }
};
static_assert(kAffinityTokens == kUnitClusters, "tiles of one size");

// Adds the products of a step: 32 tokens and 64 clusters of a warp, for queries and keys.
template <class T>
__device__ __forceinline__ void add_step(Accumulator (&sums)[2][2][4],
                                         const AffinityStage<T>& stage, int row, int column) {
#pragma unroll
  for (int depth = 0; depth < kAffinityDepth<T>; depth += 16) {
    FragmentA<T> a[2][2];
#pragma unroll
    for (int side = 0; side < 2; ++side)
#pragma unroll
      for (int m = 0; m < 2; ++m) load_a(a[side][m], stage.tile(side), row + 16 * m, depth);
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      FragmentB<T> b;
      load_b(b, stage.tile(2), column + 16 * n, depth);
#pragma unroll
      for (int side = 0; side < 2; ++side)
#pragma unroll
        for (int m = 0; m < 2; ++m) multiply_add(sums[side][m][n], a[side][m], b);
    }
  }
}

// Largest affinity and sum of exponentials of a row that four lanes share, of clusters below `end`.
__device__ __forceinline__ float2 row_partial(const Accumulator (&sums)[4], int half_row,
                                              int column, int end) {
  float largest = -INFINITY, sum = 0.0f;
  const auto visit = [&](const auto& body) {
#pragma unroll
    for (int i = 0; i < 16; ++i)
      if (column + i / 4 * 16 + i / 2 % 2 * 8 + i % 2 < end)
        body(sums[i / 4][i / 2 % 2][2 * half_row + i % 2]);
  };
  visit([&](float value) { largest = fmaxf(largest, value); });
  largest = quad_max(largest);
  visit([&](float value) { sum += expf(value - largest); });
  return make_float2(largest, quad_sum(sum));
}

template <class T>
__global__ void __launch_bounds__(kAffinityThreads, 1)
    affinity_kernel(const __grid_constant__ AffinityArgs<T> args) {
  extern __shared__ __align__(128) unsigned char memory[];
  await_previous();
  const CastScores& scores = args.scores;
  const CastShape& shape = scores.shape;
  // Neighbouring units read the same tokens.
  const ItemChunk tokens = args.tiles.find(shape.tokens, static_cast<int>(blockIdx.x / args.units));
  if (tokens.begin >= tokens.end) return;
  const int unit = scores.first_unit + static_cast<int>(blockIdx.x % args.units);
  const int list_head = unit / scores.blocks, cluster = unit % scores.blocks * kUnitClusters;
  const int chunks = (shape.D + kAffinityDepth<T> - 1) / kAffinityDepth<T>;
  const int steps = chunks * (shape.list_heads == 1 ? shape.H : 1);
  const auto stage = [&](int step) {
    return AffinityStage<T>{shared_address(memory) +
                            step % kAffinityStages * AffinityStage<T>::kBytes};
  };
  const auto load = [&](int step) {
    const int head = list_head + step / chunks, column = step % chunks * kAffinityDepth<T>;
    const auto load_part = [&](int which, Rows<const T> rows, int first, int count) {
      rows.data += column;
      rows.width -= column;
      load_tile<kAffinityTokens, kAffinityThreads>(stage(step).tile(which), rows, first, count);
    };
    const int count = tokens.end - tokens.begin;
    const ItemSpan& span = tokens.span;
    load_part(0, args.q.rows(span.batch, head, span.begin), tokens.begin, count);
    load_part(1, args.k.rows(span.batch, head / shape.group, span.begin), tokens.begin, count);
    load_part(2, dense_rows(args.surrogates + shape.cluster(0, head, 0) * shape.D, shape.D),
              cluster, shape.clusters - cluster);
  };
  const int warp = threadIdx.x / 32, row = warp / 2 * 32, column = warp % 2 * kAffinityHalf;
  Accumulator sums[2][2][4] = {};
#pragma unroll
  for (int step = 0; step < kAffinityStages - 1; ++step) {
    if (step < steps) load(step);
    cp_async_commit();
  }
  for (int step = 0; step < steps; ++step) {
    cp_async_wait<kAffinityStages - 2>();
    __syncthreads();
    if (step + kAffinityStages - 1 < steps) load(step + kAffinityStages - 1);
    cp_async_commit();
    add_step(sums, stage(step), row, column);
  }
  const int lane = threadIdx.x % 32, end = shape.clusters - cluster, own = column + lane % 4 * 2;
  const std::int64_t first = static_cast<std::int64_t>(tokens.span.batch) * shape.N +
                             tokens.span.begin + tokens.begin + row + lane / 4;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int side = i / 4, m = i / 2 % 2, half = i % 2, below = 16 * m + 8 * half;
    const bool there = tokens.begin + row + below + lane / 4 < tokens.end;
    if (args.partials) {
      const float2 partial = row_partial(sums[side][m], half, own, end);
      const int part = (2 * unit + column / kAffinityHalf) * 2 + side;
      if (there && lane % 4 == 0) args.partials[part * scores.rows() + first + below] = partial;
    }
    if (!args.keep || !there) continue;
#pragma unroll
    for (int j = 0; j < 16; ++j) {
      const int c = own + j / 4 * 16 + j / 2 % 2 * 8 + j % 2;
      if (c < end)
        scores.affinity(unit, side, c)[first + below] =
            sums[side][m][j / 4][j / 2 % 2][2 * half + j % 2];
    }
  }
}

// Replaces affinities by queries with scores: a thread per token and stored unit. A softmax is
// exp(A - norm), where the norm is the log-sum-exp of the partial sums minus the logarithm of the
// factor; for laplace the norms are the factors.
__global__ void __launch_bounds__(kScoringThreads)
    affinity_scores_kernel(const __grid_constant__ CastScores scores, unsigned units,
                           const float2* partials) {
  await_previous();
  const CastShape& shape = scores.shape;
  const std::int64_t rows = scores.rows();
  const std::int64_t position =
      static_cast<std::int64_t>(blockIdx.x / units) * kScoringThreads + threadIdx.x;
  if (position >= rows) return;
  const int unit = scores.first_unit + static_cast<int>(blockIdx.x % units);
  const int list_head = unit / scores.blocks;
  const float gate = shape.gate[position];
  const int halves = (shape.clusters + kAffinityHalf - 1) / kAffinityHalf;
  float norm[2] = {gate_sigmoid(gate), 1.0f - gate_sigmoid(gate)};
  for (int side = 0; !shape.laplace && side < 2; ++side) {
    const float2* part = partials +
                         (static_cast<std::int64_t>(list_head) * scores.blocks * 4 + side) * rows +
                         position;
    float largest = -INFINITY, sum = 0.0f;
    for (int half = 0; half < halves; ++half) largest = fmaxf(largest, part[2 * half * rows].x);
    for (int half = 0; half < halves; ++half) {
      const float2 values = part[2 * half * rows];
      sum += values.y * expf(values.x - largest);
    }
    norm[side] = largest + logf(sum) + softplus(side == 0 ? -gate : gate);
  }
  const int count = min(kUnitClusters, shape.clusters - unit % scores.blocks * kUnitClusters);
  for (int c = 0; c < count; ++c) {
    float& q = scores.affinity(unit, 0, c)[position];
    const float k = scores.affinity(unit, 1, c)[position];
    const float sum = shape.laplace ? norm[0] * laplace(q) + norm[1] * laplace(k)
                                    : expf(q - norm[0]) + expf(k - norm[1]);
    q = isnan(sum) ? -INFINITY : sum;
  }
}

template <class T>
__global__ void round_kernel(const float* from, T* to, std::int64_t count) {
  await_previous();
  const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < count) to[i] = from_float<T>(from[i]);
}

// How affinities or scores are stored: `stored` units at a time.
struct CastSelectPlan {
  bool scored;  // scores only
  int blocks, units, stored;

  CastSelectPlan(const CastParams& params, const AttentionCall& call, const CastShape& shape)
      : scored(call.inputs.q.dtype != DType::f32 && !shape.laplace &&
               shape.clusters <= kMostScored && on_hopper()),
        blocks((shape.clusters + kUnitClusters - 1) / kUnitClusters),
        units(blocks * shape.list_heads) {
    // As much memory as the inner outputs or the queries take.
    const std::int64_t unit = sides() * kUnitClusters * call.B * call.N;
    const std::int64_t room =
        max(shape.slots(), call.B * call.H * call.N) * call.Dk / max(unit, std::int64_t{1});
    stored = static_cast<int>(min(max(room, std::int64_t{1}), std::int64_t{units}));
    // A list head's clusters must be stored together.
    if (scored || params.mode == CastMode::single) stored = max(stored / blocks, 1) * blocks;
  }
  int sides() const { return scored ? 1 : 2; }
};

}  // namespace

void cast_select(const CastParams& params, const AttentionCall& call, std::int32_t* members,
                 Arena& arena, cudaStream_t stream) {
  const CastShape shape = cast_shape(params, call, members);
  const CastSelectPlan plan(params, call, shape);
  const std::int64_t rows = call.B * call.N;
  const bool softmax = !shape.laplace;
  float* affinities = arena.take<float>(plan.sides() * static_cast<std::int64_t>(plan.stored) *
                                        kUnitClusters * rows);
  float2* partials =
      !plan.scored && softmax ? arena.take<float2>(4ll * plan.units * rows) : nullptr;
  void* table = plan.scored ? arena.take<std::uint16_t>(call.H * kMostScored * 128) : nullptr;
  const std::int64_t count = call.H * params.clusters * call.Dk;
  const bool rounds = !plan.scored && call.inputs.q.dtype != DType::f32;
  void* rounded = rounds ? arena.take<std::uint16_t>(count) : nullptr;
  const bool single = params.mode == CastMode::single;
  Arena none;
  const SingleBuffers buffers(single ? arena : none, shape);
  if (arena.counting() || rows == 0) return;
  if (rounds)
    dispatch_element(call.op, call.inputs.q.dtype, [&](auto tag) {
      using T = typename decltype(tag)::type;
      launch_early("cast rounding", round_kernel<T>, dim3(blocks_of(count, kScoringThreads)),
                   kScoringThreads, 0, stream, shape.surrogates, static_cast<T*>(rounded), count);
    });
  CastScores scores{shape, plan.blocks, 0, plan.sides(), affinities};
  const ItemChunks tiles = token_tiles(shape, kAffinityTokens);
  const auto multiply = [&](int first, int units, bool keep, bool sum) {
    scores.first_unit = first;
    if (plan.scored)
      return cast_scores_sm90a(scores, call, first / plan.blocks, units / plan.blocks, table,
                               stream);
    dispatch_element(call.op, call.inputs.q.dtype, [&](auto tag) {
      using T = typename decltype(tag)::type;
      const AffinityArgs<T> args{
          scores,
          tiles,
          static_cast<unsigned>(units),
          tensor4<const T>(call.inputs.q),
          tensor4<const T>(call.k),
          static_cast<const T*>(rounds ? rounded : call.inputs.centroids.data),
          sum ? partials : nullptr,
          keep};
      launch_early("cast affinities", affinity_kernel<T>,
                   dim3(static_cast<unsigned>(units) * static_cast<unsigned>(tiles.slots)),
                   kAffinityThreads, kAffinityStages * AffinityStage<T>::kBytes, stream, args);
    });
  };
  const bool once = !plan.scored && plan.stored == plan.units;
  if (once || partials) multiply(0, plan.units, once, softmax);
  for (int first = 0; first < plan.units; first += plan.stored) {
    const int units = min(plan.stored, plan.units - first);
    if (!once) multiply(first, units, true, false);
    scores.first_unit = first;
    if (!plan.scored)
      launch_early("cast affinity scores", affinity_scores_kernel,
                   dim3(blocks_of(rows, kScoringThreads) * static_cast<unsigned>(units)),
                   kScoringThreads, 0, stream, scores, static_cast<unsigned>(units),
                   const_cast<const float2*>(partials));
    if (single)
      cast_single(scores, units, buffers, params.size, members, stream);
    else
      cast_top(scores, units, members, stream);
  }
}

}  // namespace coterie::cuda
