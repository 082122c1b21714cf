// SPDX-License-Identifier: MIT
// Per-row scalars of CAST's backward pass, and its gradients of gates and surrogates. With
// dalpha_ic = g_i . summary_c, for softmax
//   dlogit_ic = alpha_ic (dalpha_ic - delta_i), delta_i = sum_c alpha_ic dalpha_ic,
// for laplace dlogit_ic = laplace'(logit_ic) dalpha_ic. In its own clusters a token has g_i .
// inner_slot instead of dalpha; `excess` is what that adds to dlogit. The mix treats all tokens as
// if they were in no cluster, up to delta.
//
// Grids: a thread per element (prepare), per row of (B, H, N) (facts), up to 32 threads per token
// (gates), a warp per cluster (totals), a thread per element of the surrogates. No shared memory.
// All sums run in a fixed order. No preconditions.
#include "cuda/cast/cast.cuh"
#include "cuda/launch/dispatch.h"
#include "cuda/launch/launch.h"
#include "cuda/prim/dependent.cuh"
#include "cuda/prim/warp.cuh"

namespace coterie::cuda {
namespace {

constexpr int kThreads = 256;

// The gradient of a cluster's surrogate (`which` 0) or summary (1) by the mix, in parts that are
// added in order: those of the members, then those of the tokens. The latter are (chunks, H, C, 2,
// D) with warpgroups, else (2, items, H, runs, C, D).
struct MixParts {
  int members, chunks;  // parts of the members, of the tokens
  std::int64_t member_step, step;
  const float *of_members, *of_tokens;

  __device__ MixParts(const CastShape& shape, const CastBackward& pass, int number, int which) {
    const CastPlan& plan = pass.plan;
    const int heads = shape.H * shape.clusters, item = number / heads;
    const int length = shape.tokens.span(item).length;
    members = plan.member_tiles;
    member_step = 2 * shape.D;
    of_members = pass.member_parts + number * member_step * members + which * shape.D;
    if (plan.warpgroups) {
      chunks = plan.chunks.count(length);
      step = heads * member_step;
      of_tokens = pass.partials + plan.chunks.first_slot(shape.tokens, item) * step +
                  number % heads * member_step + which * shape.D;
      return;
    }
    const int row = number / shape.clusters * plan.mix_runs * shape.clusters +
                    number % shape.clusters;  // of the first run
    chunks = (length + plan.mix_chunk - 1) / plan.mix_chunk;
    step = static_cast<std::int64_t>(shape.clusters) * shape.D;
    of_tokens = pass.partials + row * static_cast<std::int64_t>(shape.D) +
                which * step * shape.items * shape.H * plan.mix_runs;
  }
  __device__ float sum(int column) const {
    float value = 0.0f;
#pragma unroll 4
    for (int i = 0; i < members; ++i) value += of_members[i * member_step + column];
#pragma unroll 8
    for (int i = 0; i < chunks; ++i) value += of_tokens[i * step + column];
    return value;
  }
};

// Psi and sigmoid of gates and of their negatives; surrogates and summaries rounded to T, unless
// null.
template <class T>
__global__ void __launch_bounds__(kThreads)
    prepare_kernel(const __grid_constant__ CastShape shape, float4* gates, const float* summary,
                   T* surrogates, T* summaries) {
  await_previous();
  const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const std::int64_t table = static_cast<std::int64_t>(shape.H) * shape.clusters * shape.D;
  if (i < static_cast<std::int64_t>(shape.B) * shape.N) {
    const float gate = shape.gate[i];
    gates[i] = make_float4(gate_factor(shape, gate), gate_sigmoid(gate), gate_factor(shape, -gate),
                           gate_sigmoid(-gate));
  }
  if (!surrogates) return;
  if (i < table) surrogates[i] = from_float<T>(shape.surrogates[i]);
  if (i < shape.items * table) summaries[i] = from_float<T>(summary[i]);
}

// The facts of rows (stages.h); one row per thread. Inputs older than the attention inside clusters
// are read while that finishes, if they are known to be ready: see cast_inner_queries.
__global__ void __launch_bounds__(kThreads)
    row_facts_kernel(const __grid_constant__ CastShape shape,
                     const __grid_constant__ CastBackward pass, ItemChunks tiles) {
  constexpr int kNear = 4;
  release_next();
  if (!pass.plan.resident) await_writes();
  const ItemChunk tile = tiles.find(shape.tokens, static_cast<int>(blockIdx.x));
  const int head = static_cast<int>(blockIdx.y), list_head = shape.list_head(head);
  const int token = tile.begin + static_cast<int>(threadIdx.x);
  const bool there = token < tile.end;
  const std::int64_t place = shape.row(tile.span, head) + token;
  const std::int32_t* entries = nullptr;
  int count = 0, near[kNear];
  float4 fact = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  if (there) {
    const std::int64_t row = pass.slots.row(tile.span, list_head, token);
    const float4* gates = pass.gates + static_cast<std::int64_t>(tile.span.batch) * shape.N;
    fact.x = shape.scale * gates[tile.span.begin + token].x * kLog2e;
    fact.y = shape.laplace ? 0.0f : pass.saved.combine_lse[place] * kLog2e;
    count = pass.slots.count[row];
    entries = pass.slots.slots + pass.slots.start(tile.item, tile.span, list_head) +
              pass.slots.first[row];
  }
#pragma unroll
  for (int e = 0; e < kNear; ++e) near[e] = e < count ? entries[e] : 0;
  await_writes();
  const float* excess = pass.excess + shape.cluster(tile.item, head, 0) * shape.width;
#pragma unroll
  for (int e = 0; e < kNear; ++e) fact.z += e < count ? excess[near[e]] : 0.0f;
  for (int e = kNear; e < count; ++e) fact.z += excess[entries[e]];
  if (!there) return;
  pass.facts[place] = fact;
  if (!pass.plan.warpgroups && !shape.laplace) pass.delta[place] += fact.z;
}

// `lanes` threads per token, a power of two up to 32: the gradient of its gate from the heads' rows
// and slots.
__device__ __forceinline__ void fold_gates(const CastShape& shape, const CastBackward& pass,
                                           int lanes, int block) {
  const std::int64_t number = (static_cast<std::int64_t>(block) * kThreads + threadIdx.x) / lanes;
  const bool inside = number < static_cast<std::int64_t>(shape.B) * shape.N;
  const int batch = inside ? static_cast<int>(number / shape.N) : 0;
  const int row = inside ? static_cast<int>(number % shape.N) : 0;
  const int item = inside && shape.gate_scale ? shape.tokens.item_of(batch, row, shape.items) : -1;
  float sum = 0.0f;
  if (item >= 0) {
    const ItemSpan span = shape.tokens.span(item);
    const int token = row - span.begin;
    const float slope = shape.scale * pass.gates[number].y;
    for (int head = static_cast<int>(threadIdx.x) % lanes; head < shape.H; head += lanes) {
      const int list_head = shape.list_head(head);
      const std::int64_t place = pass.slots.row(span, list_head, token);
      const int begin = pass.slots.first[place], end = begin + pass.slots.count[place];
      const std::int32_t* entries = pass.slots.slots + pass.slots.start(item, span, list_head);
      const float* slots = pass.dgate_slots + shape.cluster(item, head, 0) * shape.width;
      sum = fmaf(slope, pass.dgate_rows[shape.row(span, head) + token], sum);
      for (int e = begin; e < end; ++e) sum += slots[entries[e]];
    }
  }
  for (int step = lanes / 2; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
  if (inside && threadIdx.x % lanes == 0)
    static_cast<float*>(pass.gradients.dgate.data)[number] = sum;
}

// A warp per cluster.
__global__ void __launch_bounds__(kThreads)
    totals_kernel(const __grid_constant__ CastShape shape,
                  const __grid_constant__ CastBackward pass) {
  await_previous();
  const int number = static_cast<int>(blockIdx.x) * (kThreads / 32) + threadIdx.x / 32;
  if (number >= shape.items * shape.H * shape.clusters) return;
  const std::int64_t place = static_cast<std::int64_t>(number) * shape.D;
  const MixParts parts(shape, pass, number, 1);
  float dot = 0.0f;
  for (int d = threadIdx.x % 32; d < shape.D; d += 32) {
    const float value = parts.sum(d);
    pass.dsummary[place + d] = value;
    dot = fmaf(value, pass.saved.summary[place + d], dot);
  }
  dot = warp_sum(dot);
  if (threadIdx.x % 32 == 0) pass.summary_dots[number] = dot;
}

// Gradients of surrogates, by the mix and through the summaries.
__device__ __forceinline__ void fold_surrogates(const CastShape& shape, const CastBackward& pass,
                                                int block) {
  const int heads = shape.H * shape.clusters;
  const std::int64_t i = static_cast<std::int64_t>(block) * kThreads + threadIdx.x;
  if (i >= static_cast<std::int64_t>(heads) * shape.D) return;
  const int cluster = static_cast<int>(i / shape.D), column = static_cast<int>(i % shape.D);
  float sum = 0.0f;
  for (int item = 0; item < shape.items; ++item) {
    const int number = item * heads + cluster;
    sum += MixParts(shape, pass, number, 0).sum(column);
    const float* keys = pass.key_parts +
                        static_cast<std::int64_t>(number) * shape.D * pass.plan.member_tiles +
                        column;
    for (int tile = 0; tile < pass.plan.member_tiles; ++tile) sum += keys[tile * shape.D];
  }
  static_cast<float*>(pass.gradients.dcentroids.data)[i] = sum;
}

__global__ void __launch_bounds__(kThreads)
    fold_heads_kernel(const __grid_constant__ CastShape shape,
                      const __grid_constant__ CastBackward pass, int lanes, int gate_blocks) {
  await_writes();
  release_next();
  const int block = static_cast<int>(blockIdx.x);
  if (block < gate_blocks)
    fold_gates(shape, pass, lanes, block);
  else
    fold_surrogates(shape, pass, block - gate_blocks);
}

}  // namespace

void cast_prepare(const CastShape& shape, const AttentionCall& call, CastBackward& pass,
                  Arena& arena, cudaStream_t stream) {
  const std::int64_t rows = call.B * call.N;
  const std::int64_t table = static_cast<std::int64_t>(shape.H) * shape.clusters * shape.D;
  pass.gates = arena.take<float4>(rows);
  pass.surrogates = shape.surrogates;
  pass.summaries = pass.saved.summary;
  dispatch_element(call.op, call.inputs.q.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    T *surrogates = nullptr, *summaries = nullptr;
    if constexpr (sizeof(T) == 2) {
      surrogates = arena.take<T>(table);
      summaries = arena.take<T>(shape.items * table);
      pass.surrogates = surrogates;
      pass.summaries = summaries;
    }
    if (arena.counting()) return;
    launch_early("cast prepare", prepare_kernel<T>,
                 dim3(blocks_of(max(rows, shape.items * table), kThreads)), kThreads, 0, stream,
                 shape, pass.gates, static_cast<const float*>(pass.saved.summary), surrogates,
                 summaries);
  });
}

void cast_facts(const CastShape& shape, const CastBackward& pass, cudaStream_t stream) {
  const ItemChunks tiles = token_tiles(shape, kThreads);
  if (tiles.slots == 0) return;
  launch_early("cast facts", row_facts_kernel,
               dim3(static_cast<unsigned>(tiles.slots), static_cast<unsigned>(shape.H)), kThreads,
               0, stream, shape, pass, tiles);
}

void cast_totals(const CastShape& shape, const CastBackward& pass, cudaStream_t stream) {
  const std::int64_t clusters = static_cast<std::int64_t>(shape.items) * shape.H * shape.clusters;
  if (clusters == 0) return;
  launch_early("cast totals", totals_kernel, dim3(blocks_of(clusters, kThreads / 32)), kThreads, 0,
               stream, shape, pass);
}

bool cast_fold_heads(const CastShape& shape, const AttentionCall& call, const CastBackward& pass,
                     cudaStream_t stream) {
  const AttentionGradients& to = pass.gradients;
  const std::int64_t count = static_cast<std::int64_t>(shape.H) * shape.clusters * shape.D;
  int lanes = 1;
  while (lanes < min(shape.H, 32)) lanes *= 2;
  const unsigned gates = to.dgate.present() ? blocks_of(call.B * call.N * lanes, kThreads) : 0;
  const unsigned surrogates = to.dcentroids.present() ? blocks_of(count, kThreads) : 0;
  if (gates + surrogates > 0)
    launch_early("cast heads' sums", fold_heads_kernel, dim3(gates + surrogates), kThreads, 0,
                 stream, shape, pass, lanes, static_cast<int>(gates));
  return gates + surrogates > 0;
}

}  // namespace coterie::cuda
