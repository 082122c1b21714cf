// SPDX-License-Identifier: MIT
// The summaries of CAST's clusters: attention of a cluster's surrogate S over its members,
//   R = sum_j beta_j v_j,   beta = softmax_j or laplace(scale psi(-phi_j) S . k_j),
// with dropout by (cluster, token).
//
// Grid: a block of two warps per (item, head, cluster), 8 blocks per multiprocessor. A group of
// lanes handles 8 members at a time, 16 bytes of their keys and values per lane (CastLanes). The
// warps' parts are combined at the end. Shared memory: 16 chunks of 16 bytes per thread and a row
// of floats per warp, 17 KiB. Unaligned rows are loaded element by element. No preconditions.
#include "cuda/cast/cast.cuh"
#include "cuda/cast/stages.h"
#include "cuda/launch/dispatch.h"
#include "cuda/launch/launch.h"
#include "cuda/prim/dependent.cuh"
#include "cuda/prim/dropout.cuh"

namespace coterie::cuda {
namespace {

constexpr int kSummaryThreads = 64, kSummaryWarps = kSummaryThreads / 32;

template <class T>
struct SummaryArgs {
  CastShape shape;
  CastSaved saved;
  Tensor4<const T> k, v;
  T *surrogates, *summaries;  // rounded, or null
};

// Fetches this lane's 16 bytes of several rows (an arbitrary row for a negative number) to its own
// column of `to`; lanes beyond the width fetch other columns. The caller waits.
template <int kCount, class Layout, class T>
__device__ __forceinline__ void fetch_rows(uint4 (*to)[kSummaryThreads], const Layout& lanes,
                                           const Rows<const T>& rows, int known) {
  const T* column = rows.data + (lanes.column() < rows.width ? lanes.column() : 0);
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const int number = max(__shfl_sync(~0u, known, i, Layout::kLanes), 0);
    if (rows.aligned)
      cp_async16(shared_address(&to[i][threadIdx.x]), column + number * rows.pitch, 16);
    else
      to[i][threadIdx.x] = load_chunk(rows.row(number), lanes.column(), rows.width);
  }
}

// A block per cluster. A group of lanes handles kBatch members at a time, lane i knows the i-th
// one's number; keys and values of the next members are in flight, as are the numbers and gates of
// those that follow. Warps synchronise only at the end.
template <class T, int kDim>
__global__ void __launch_bounds__(kSummaryThreads, 8)
    summary_kernel(const __grid_constant__ SummaryArgs<T> args) {
  release_next();
  using Layout = CastLanes<T, kDim>;
  constexpr int kBatch = 8, kChunk = kSummaryThreads / Layout::kLanes * kBatch;
  __shared__ uint4 staged[2 * kBatch][kSummaryThreads];  // keys, values
  __shared__ float sums[kSummaryWarps][kDim], shifts[kSummaryWarps], totals[kSummaryWarps];
  const CastShape& shape = args.shape;
  const int cluster = static_cast<int>(blockIdx.x % shape.clusters);
  const int head = static_cast<int>(blockIdx.x / shape.clusters % shape.H);
  const int item = static_cast<int>(blockIdx.x / shape.clusters / shape.H);
  const ItemSpan span = shape.tokens.span(item);
  const Rows<const T> keys = args.k.rows(span.batch, head / shape.group, span.begin);
  const Rows<const T> values = args.v.rows(span.batch, head / shape.group, span.begin);
  const std::int32_t* list = shape.list(item, head, cluster);
  const float* gates = shape.gates(span);
  const Layout lanes;
  const auto find = [&](int first) {
    const int own = first + lanes.group * kBatch + lanes.lane;
    return lanes.lane < kBatch && own < shape.width ? list[own] : -1;
  };
  int token = find(0), next = find(kChunk);
  float gate = token < 0 ? 0.0f : gates[token];
  const typename Layout::Floats surrogate = lanes.load_floats(
      shape.surrogates + (static_cast<std::int64_t>(head) * shape.clusters + cluster) * shape.D,
      shape.D);
  const auto fetch = [&](int known) {
    fetch_rows<kBatch>(staged, lanes, keys, known);
    fetch_rows<kBatch>(staged + kBatch, lanes, values, known);
    cp_async_commit();
  };
  fetch(token);
  typename Layout::Floats sum{};
  float shift = -INFINITY, total = 0.0f;
  const bool drops = shape.dropout.on();
  DropoutRow words{};
  if (drops)
    words = shape.dropout.cluster(static_cast<std::int64_t>(item) * shape.H + head, cluster);
  for (int first = 0; first < shape.width; first += kChunk) {
    if (!__any_sync(~0u, token >= 0)) break;  // lists are filled from the front
    int tokens[kBatch];
    uint4 k[kBatch], v[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) tokens[i] = __shfl_sync(~0u, token, i, Layout::kLanes);
    cp_async_wait<0>();
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      k[i] = staged[i][threadIdx.x];
      v[i] = staged[kBatch + i][threadIdx.x];
    }
    if (__any_sync(~0u, next >= 0)) fetch(next);
    const float next_gate = next < 0 ? 0.0f : gates[next];
    const int after = find(first + 2 * kChunk);
    const float factor = shape.scale * gate_factor(shape, -gate);
    float logits[kBatch], largest = -INFINITY;
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const float logit = lanes.dot(surrogate, Layout::to_floats(k[i])) *
                          __shfl_sync(~0u, factor, i, Layout::kLanes);
      logits[i] = tokens[i] < 0 ? -INFINITY : logit;
      largest = fmaxf(largest, logits[i]);
    }
    float rescale = 1.0f;
    if (!shape.laplace) {
#pragma unroll
      for (int step = Layout::kLanes; step < 32; step *= 2)
        largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, step));
      largest = fmaxf(shift, largest);
      if (largest > -INFINITY) rescale = expf(shift - largest);
      shift = largest;
    }
    sum.scale(rescale);
    total *= rescale;
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (tokens[i] < 0) continue;
      const float weight = shape.laplace ? laplace(logits[i]) : expf(logits[i] - shift);
      total += weight;
      const float factor_of_value = drops ? kept(shape.dropout, words, tokens[i]) : 1.0f;
      lanes.add(sum, weight * factor_of_value, Layout::to_floats(v[i]));
    }
    token = next;
    gate = next_gate;
    next = after;
  }
#pragma unroll
  for (int step = Layout::kLanes; step < 32; step *= 2) total += __shfl_xor_sync(~0u, total, step);
  if (threadIdx.x % 32 == 0) {
    shifts[threadIdx.x / 32] = shift;
    totals[threadIdx.x / 32] = total;
  }
  lanes.template fold<kSummaryWarps>(sum, sums);
  // Combines the warps' parts with a common shift.
  float factors[kSummaryWarps], largest = -INFINITY;
  total = 0.0f;
#pragma unroll
  for (int w = 0; w < kSummaryWarps; ++w) largest = fmaxf(largest, shifts[w]);
#pragma unroll
  for (int w = 0; w < kSummaryWarps; ++w) {
    factors[w] = shape.laplace ? 1.0f : shifts[w] > -INFINITY ? expf(shifts[w] - largest) : 0.0f;
    total = fmaf(totals[w], factors[w], total);
  }
  const float inverse = shape.laplace ? 1.0f : total > 0.0f ? 1.0f / total : 0.0f;
  const std::int64_t number = shape.cluster(item, head, cluster);
  for (int d = threadIdx.x; d < shape.D; d += kSummaryThreads) {
    float value = 0.0f;
#pragma unroll
    for (int w = 0; w < kSummaryWarps; ++w) value = fmaf(sums[w][d], factors[w], value);
    value *= inverse;
    const std::int64_t place = number * shape.D + d;
    args.saved.summary[place] = value;
    if (!args.summaries) continue;
    args.summaries[place] = from_float<T>(value);
    if (item == 0) args.surrogates[place] = from_float<T>(shape.surrogates[place]);
  }
  if (!shape.laplace && threadIdx.x == 0)
    args.saved.summary_lse[number] = total > 0.0f ? largest + logf(total) : -INFINITY;
  await_writes();  // completion of this kernel implies that of the preceding one
}

}  // namespace

void cast_summaries(const CastShape& shape, const AttentionCall& call, const CastSaved& saved,
                    void* rounded, cudaStream_t stream) {
  const dim3 grid(
      static_cast<unsigned>(static_cast<std::int64_t>(shape.items) * shape.H * shape.clusters));
  if (grid.x == 0) return;
  dispatch_element(call.op, call.inputs.q.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    T* table = static_cast<T*>(rounded);
    const SummaryArgs<T> args{shape,
                              saved,
                              tensor4<const T>(call.k),
                              tensor4<const T>(call.inputs.v),
                              table,
                              table ? table + call.H * shape.clusters * call.Dk : nullptr};
    dispatch_head_dim(call.op, call.Dk, [&](auto width) {
      launch_early("cast summaries", summary_kernel<T, decltype(width)::value>, grid,
                   kSummaryThreads, 0, stream, args);
    });
  });
}

}  // namespace coterie::cuda
