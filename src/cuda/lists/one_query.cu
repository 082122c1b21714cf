// SPDX-License-Identifier: MIT
// Attention of one query per batch entry and head over many keys, as in decoding:
//   out = sum over the visible keys j of exp(s_j) v_j / sum of exp(s_j),  s_j = scale * q . k_j
// Keys are cut into parts. part_kernel: a block of 256 threads per part, head and batch entry; a
// group of lanes takes a key at a time, kInFlight of them in flight, with a running maximum; the
// groups of a block are combined in shared memory (up to 17 KB). combine_kernel: a block of 128
// threads per head and batch entry adds up the parts. The cut depends on the shapes alone.
// Traffic: keys and values once. Preconditions: takes_one_query. Any alignment.
#include <algorithm>
#include <cmath>

#include "cuda/launch/dispatch.h"
#include "cuda/launch/launch.h"
#include "cuda/lists/plan.h"
#include "cuda/prim/dependent.cuh"
#include "cuda/prim/row_lanes.cuh"

namespace coterie::cuda {
namespace {

constexpr int kThreads = 256, kInFlight = 4;
constexpr std::int64_t kPartKeys = 256, kMostParts = 64;
constexpr float kLog2e = 1.4426950408889634f, kLn2 = 0.6931471805599453f;

int parts_of(const AttentionCall& call) {
  return static_cast<int>(
      std::clamp((call.S + kPartKeys - 1) / kPartKeys, std::int64_t{1}, kMostParts));
}

// Weights relative to 2^most, their sum and the weighted sum of one element of the values.
struct Softmax {
  float most = -INFINITY, sum = 0.0f, value = 0.0f;

  // Adds another in place; one without keys has a sum of 0.
  __device__ void add(float other_most, float other_sum, float other_value) {
    if (other_sum == 0.0f) return;
    const float both = fmaxf(most, other_most);
    const float own = sum == 0.0f ? 0.0f : exp2f(most - both), other = exp2f(other_most - both);
    sum = sum * own + other_sum * other;
    value = value * own + other_value * other;
    most = both;
  }
};

template <class T>
struct OneQueryArgs {
  ListProblem problem;
  Tensor4<const T> q, k, v;
  Tensor4<T> out;
  float* lse;
  float *part_most, *part_sum, *part_values;  // (B, H, parts), the last (B, H, parts, Dv)
  int parts;

  // Of one element of the output; column 0 also writes the log-sum-exp.
  __device__ void write(const Softmax& all, int batch, int head, int column) const {
    out.rows(batch, head, 0).row(0)[column] =
        from_float<T>(all.sum == 0.0f ? 0.0f : all.value / all.sum);
    if (column == 0 && lse)
      lse[static_cast<std::int64_t>(batch) * problem.q.heads + head] =
          (all.most + log2f(all.sum)) * kLn2;
  }
};

template <class T, int kWidth>
__global__ void __launch_bounds__(kThreads)
    part_kernel(const __grid_constant__ OneQueryArgs<T> args) {
  await_previous();
  using Lanes = RowLanes<T, kWidth>;
  constexpr int kGroups = kThreads / Lanes::kLanes;
  __shared__ float most_of[kGroups], sum_of[kGroups], values_of[kGroups][kWidth + 1];
  const ListProblem& problem = args.problem;
  const int part = blockIdx.x, head = blockIdx.y, batch = blockIdx.z;
  const int group = static_cast<int>(threadIdx.x) / Lanes::kLanes;
  const ListPair pair = problem.pair(batch, head, 0);
  RankRange seen{0, 0};
  if (pair.q.count > 0) seen = problem.range(pair, 0);
  const int length = (seen.high - seen.low + args.parts - 1) / args.parts;
  const int first = seen.low + part * length, end = min(first + length, seen.high);
  const Rows<const T> keys = args.k.rows(batch, head / problem.group, 0);
  const Rows<const T> values = args.v.rows(batch, head / problem.value_group, 0);
  const float scale = problem.score_scale(head) * kLog2e;
  typename Lanes::Values query, sums = {};
  Lanes::load(args.q.rows(batch, head, 0), 0, true, query);
  float most = -INFINITY, sum = 0.0f;
  for (int next = first; next < end; next += kGroups * kInFlight) {
    typename Lanes::Values key[kInFlight], value[kInFlight];
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      const int row = next + i * kGroups + group;
      Lanes::load(keys, row, row < end, key[i]);
      Lanes::load(values, row, row < end, value[i]);
    }
    float score[kInFlight], higher = most;
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      const float product = Lanes::dot(query, key[i]) * scale;
      score[i] = next + i * kGroups + group < end ? product : -INFINITY;
      higher = fmaxf(higher, score[i]);
    }
    if (next + group >= end) continue;  // no key for this group
    const float old = sum == 0.0f ? 0.0f : exp2f(most - higher);
    most = higher;
    sum *= old;
#pragma unroll
    for (int d = 0; d < Lanes::kVector; ++d) sums[d] *= old;
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      const float weight = exp2f(score[i] - most);
      sum += weight;
#pragma unroll
      for (int d = 0; d < Lanes::kVector; ++d) sums[d] = fmaf(weight, value[i][d], sums[d]);
    }
  }
  if (Lanes::column() == 0) {
    most_of[group] = most;
    sum_of[group] = sum;
  }
#pragma unroll
  for (int d = 0; d < Lanes::kVector; ++d)
    if (Lanes::column() + d < kWidth) values_of[group][Lanes::column() + d] = sums[d];
  __syncthreads();
  const int column = static_cast<int>(threadIdx.x);
  if (column >= args.v.width) return;
  Softmax all;
#pragma unroll 1
  for (int g = 0; g < kGroups; ++g) all.add(most_of[g], sum_of[g], values_of[g][column]);
  if (args.parts == 1) return args.write(all, batch, head, column);
  const std::int64_t place =
      (static_cast<std::int64_t>(batch) * problem.q.heads + head) * args.parts + part;
  args.part_values[place * args.v.width + column] = all.value;
  if (column > 0) return;
  args.part_most[place] = all.most;
  args.part_sum[place] = all.sum;
}

template <class T>
__global__ void __launch_bounds__(kMaxHeadDim)
    combine_kernel(const __grid_constant__ OneQueryArgs<T> args) {
  await_previous();
  const int head = blockIdx.x, batch = blockIdx.y, column = static_cast<int>(threadIdx.x);
  if (column >= args.v.width) return;
  const std::int64_t first =
      (static_cast<std::int64_t>(batch) * args.problem.q.heads + head) * args.parts;
  Softmax all;
#pragma unroll 8
  for (int part = 0; part < args.parts; ++part)
    all.add(args.part_most[first + part], args.part_sum[first + part],
            args.part_values[(first + part) * args.v.width + column]);
  args.write(all, batch, head, column);
}

}  // namespace

bool takes_one_query(const AttentionCall& call, const ListCall& lists) {
  return call.N == 1 && call.S > 0 && lists.lists == 1 && !call.dropout.on() &&
         lists.queries.layout == ListLayout::residues && !lists.filters.any() &&
         lists.weighting == ListWeighting::softmax && !lists.q_stats && !lists.k_stats &&
         !call.inputs.q_sequences.cu_seqlens.present() && call.B <= kMaxBlocks;
}

void attend_one_query(const AttentionCall& call, const ListCall& lists, const ListOutputs& outputs,
                      Arena& arena, cudaStream_t stream) {
  const int parts = parts_of(call);
  const std::int64_t sums = parts > 1 ? call.B * call.H * parts : 0;
  auto* most = arena.take<float>(sums);
  auto* sum = arena.take<float>(sums);
  auto* values = arena.take<float>(sums * call.Dv);
  if (arena.counting() || call.B * call.H == 0) return;
  const ListProblem problem = plan_lists_forward(call, lists, outputs).problem;
  dispatch_element(call.op, call.inputs.q.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const OneQueryArgs<T> args{problem,
                               tensor4<const T>(call.inputs.q),
                               tensor4<const T>(call.k),
                               tensor4<const T>(call.inputs.v),
                               tensor4<T>(outputs.out),
                               outputs.lse,
                               most,
                               sum,
                               values,
                               parts};
    const auto heads = static_cast<unsigned>(call.H), batches = static_cast<unsigned>(call.B);
    dispatch_head_dim(call.op, std::max(call.Dk, call.Dv), [&](auto width) {
      launch_early("one_query_parts", part_kernel<T, decltype(width)::value>,
                   dim3(static_cast<unsigned>(parts), heads, batches), kThreads, 0, stream, args);
    });
    if (parts > 1)
      launch_early("one_query_combine", combine_kernel<T>, dim3(heads, batches), kMaxHeadDim, 0,
                   stream, args);
  });
}

}  // namespace coterie::cuda
