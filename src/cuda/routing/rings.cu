// SPDX-License-Identifier: MIT
// Strict routing of tokens that follow those in the rings: each query attends to the latest keys of
// its clusters up to its own token, those of the call and before them those of the rings,
//   out = sum_s w_s v_s / sum_s w_s,  w_s = exp(factor y_q . y_s)
// Its own key is dropped where others are in sight and the own key is demoted; it is added where it
// is in none of its clusters and include_self asks for it. Then the latest `window` tokens of each
// cluster c join its ring: number i of them is in slot i mod window.
//
// attend_rings: a block of 8 warps per query. Warps share the keys in sight; a lane has up to 4
// elements of a row. A running maximum and sum per warp, merged at the end. Keys of the call are
// normalised when they are read. Shared memory: 4.2 KB. About 60 registers.
// join_rings: a block of 8 warps per batch entry, key head and cluster; a warp per token.
// Preconditions: those of strict routing (rows of up to 128 elements; f32, bf16 or f16), a
// selection of this call. Any alignment. No other kernel has this task.
#include "coterie/routing.h"
#include "cuda/api/entry.h"
#include "cuda/launch/dispatch.h"
#include "cuda/launch/guard.h"
#include "cuda/launch/launch.h"
#include "cuda/prim/element.cuh"
#include "cuda/prim/row_lanes.cuh"
#include "cuda/prim/tensor.cuh"
#include "cuda/prim/warp.cuh"
#include "cuda/routing/plan.h"

namespace coterie::cuda {

namespace {

constexpr int kWarps = 8, kThreads = 32 * kWarps;
constexpr int kParts = kMaxHeadDim / 32;  // elements of a row in a lane: lane, lane + 32, ...

template <class T>
struct StepProblem {
  Tensor4<const T> q, k, v;
  Tensor4<T> out;
  const std::int32_t *q_order, *q_offsets;  // (B, H, N clusters of a query), (B, H, C + 1)
  const std::int32_t *k_order, *k_offsets;  // (B, key heads, N), (B, key heads, C + 1)
  float *ring_k, *ring_v;
  std::int64_t* counts;
  const float* head_scale;  // (H), or null
  float scale;
  int tokens, per_query;
  int heads, key_heads, value_heads, clusters;
  std::int64_t window;
  bool demotes, include_self;

  __device__ int value_head(int key_head) const { return key_head / (key_heads / value_heads); }
};

// The tokens of one cluster, ascending.
struct Run {
  const std::int32_t* tokens;
  int count;

  __device__ Run(const std::int32_t* order, const std::int32_t* offsets, int cluster)
      : tokens(order + offsets[cluster]), count(offsets[cluster + 1] - offsets[cluster]) {}
  __device__ int up_to(int token) const { return count_up_to(tokens, count, token); }
  __device__ bool contains(int token) const {
    const int before = up_to(token);
    return before > 0 && tokens[before - 1] == token;
  }
};

// This lane's elements of a row.
template <class T>
__device__ void load_row(const Tensor4<const T>& x, int batch, int head, int token,
                         float (&row)[kParts]) {
  const T* from = x.rows(batch, head, 0).row(token);
  const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
  for (int i = 0; i < kParts; ++i)
    row[i] = lane + 32 * i < x.width ? to_float(from[lane + 32 * i]) : 0.0f;
}
__device__ void load_row(const float* from, int width, float (&row)[kParts]) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
  for (int i = 0; i < kParts; ++i) row[i] = lane + 32 * i < width ? from[lane + 32 * i] : 0.0f;
}
__device__ void store_row(const float (&row)[kParts], int width, float* to) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
  for (int i = 0; i < kParts; ++i)
    if (lane + 32 * i < width) to[lane + 32 * i] = row[i];
}

// Zero mean and unit variance, as in RowLanes.
__device__ void normalise(int width, float (&row)[kParts]) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  float sum = 0.0f, squares = 0.0f;
#pragma unroll
  for (int i = 0; i < kParts; ++i) sum += row[i];
  const float mean = warp_sum(sum) / static_cast<float>(width);
#pragma unroll
  for (int i = 0; i < kParts; ++i) {
    row[i] = lane + 32 * i < width ? row[i] - mean : 0.0f;
    squares = fmaf(row[i], row[i], squares);
  }
  const float inverse = inverse_sigma(warp_sum(squares) / static_cast<float>(width));
#pragma unroll
  for (int i = 0; i < kParts; ++i) row[i] *= inverse;
}

// Softmax so far, of this warp; the accumulator is spread over the lanes.
struct Running {
  float largest = -INFINITY, sum = 0.0f;
  float out[kParts] = {};

  __device__ void add(float logit, const float (&value)[kParts]) {
    const float next = fmaxf(largest, logit);
    const float kept = largest == -INFINITY ? 0.0f : expf(largest - next);
    const float weight = expf(logit - next);
    sum = sum * kept + weight;
#pragma unroll
    for (int i = 0; i < kParts; ++i) out[i] = out[i] * kept + weight * value[i];
    largest = next;
  }
};

template <class T>
__global__ void __launch_bounds__(kThreads) attend_rings(StepProblem<T> p) {
  __shared__ float largest[kWarps], sums[kWarps], parts[kWarps][kMaxHeadDim];
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int token = static_cast<int>(blockIdx.x) % p.tokens;
  const int batch_head = static_cast<int>(blockIdx.x) / p.tokens;
  const int batch = batch_head / p.heads, head = batch_head % p.heads;
  const int key_head = head / (p.heads / p.key_heads), value_head = p.value_head(key_head);
  const int Dk = p.k.width, Dv = p.v.width;
  const std::int64_t own = static_cast<std::int64_t>(batch) * p.key_heads + key_head;
  const std::int64_t* counts = p.counts + own * p.clusters;
  const float* ring_k = p.ring_k + own * p.clusters * p.window * Dk;
  const float* ring_v = p.ring_v + own * p.clusters * p.window * Dv;
  const std::int32_t* k_order = p.k_order + own * p.tokens;
  const std::int32_t* k_offsets = p.k_offsets + own * (p.clusters + 1);
  const std::int32_t* q_order =
      p.q_order + static_cast<std::int64_t>(batch_head) * p.tokens * p.per_query;
  const std::int32_t* q_offsets =
      p.q_offsets + static_cast<std::int64_t>(batch_head) * (p.clusters + 1);
  const auto asks = [&](int cluster) { return Run(q_order, q_offsets, cluster).contains(token); };

  // Keys in sight, and whether the own one is among them.
  long long seen = 0;
  bool found = false;
  for (int c = lane; c < p.clusters; c += 32)
    if (asks(c)) {
      const Run run(k_order, k_offsets, c);
      seen += min(counts[c] + run.up_to(token), p.window);
      found = found || run.contains(token);
    }
  seen = warp_sum(seen);
  found = __any_sync(~0u, found);
  const bool demoted = p.demotes && seen > (found ? 1 : 0);
  const bool dropped = found && demoted, added = !found && p.include_self && !demoted;

  float row[kParts];
  load_row(p.q, batch, head, token, row);
  normalise(Dk, row);
  const float factor = p.scale * (p.head_scale ? p.head_scale[head] : 1.0f);
  Running running;
  const auto attend = [&](const float(&key)[kParts], const float(&value)[kParts]) {
    float product = 0.0f;
#pragma unroll
    for (int i = 0; i < kParts; ++i) product = fmaf(row[i], key[i], product);
    running.add(warp_sum(product) * factor, value);
  };
  const auto attend_token = [&](int other) {
    float key[kParts], value[kParts];
    load_row(p.k, batch, key_head, other, key);
    normalise(Dk, key);
    load_row(p.v, batch, value_head, other, value);
    attend(key, value);
  };
  for (int first = 0; first < p.clusters; first += 32) {
    unsigned chosen = __ballot_sync(~0u, first + lane < p.clusters && asks(first + lane));
    for (; chosen != 0; chosen &= chosen - 1) {
      const int c = first + __ffs(static_cast<int>(chosen)) - 1;
      const Run run(k_order, k_offsets, c);
      const int here = run.up_to(token);
      const std::int64_t newer = min(static_cast<std::int64_t>(here), p.window);
      const std::int64_t older = min(counts[c], p.window - newer);
      for (std::int64_t s = warp; s < older; s += kWarps) {
        const std::int64_t slot = c * p.window + (counts[c] - older + s) % p.window;
        float key[kParts], value[kParts];
        load_row(ring_k + slot * Dk, Dk, key);
        load_row(ring_v + slot * Dv, Dv, value);
        attend(key, value);
      }
      for (std::int64_t s = here - newer + warp; s < here; s += kWarps) {
        const int other = run.tokens[s];
        if (!dropped || other != token) attend_token(other);
      }
    }
  }
  if (added && warp == 0) attend_token(token);

  if (lane == 0) {
    largest[warp] = running.largest;
    sums[warp] = running.sum;
  }
#pragma unroll
  for (int i = 0; i < kParts; ++i) parts[warp][lane + 32 * i] = running.out[i];
  __syncthreads();
  float most = -INFINITY;
  for (int w = 0; w < kWarps; ++w) most = fmaxf(most, largest[w]);
  for (int d = threadIdx.x; d < Dv; d += kThreads) {
    float total = 0.0f, out = 0.0f;
    for (int w = 0; w < kWarps; ++w) {
      const float weight = largest[w] == -INFINITY ? 0.0f : expf(largest[w] - most);
      total += sums[w] * weight;
      out += parts[w][d] * weight;
    }
    p.out.rows(batch, head, 0).row(token)[d] = from_float<T>(total == 0.0f ? 0.0f : out / total);
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads) join_rings(StepProblem<T> p) {
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int cluster = static_cast<int>(blockIdx.x) % p.clusters;
  const int own = static_cast<int>(blockIdx.x) / p.clusters;
  const int batch = own / p.key_heads, key_head = own % p.key_heads;
  const int Dk = p.k.width, Dv = p.v.width;
  const Run run(p.k_order + static_cast<std::int64_t>(own) * p.tokens,
                p.k_offsets + static_cast<std::int64_t>(own) * (p.clusters + 1), cluster);
  const std::int64_t before = p.counts[blockIdx.x];
  const std::int64_t ring = static_cast<std::int64_t>(blockIdx.x) * p.window;
  const std::int64_t kept = min(static_cast<std::int64_t>(run.count), p.window);
  for (std::int64_t i = run.count - kept + warp; i < run.count; i += kWarps) {
    const std::int64_t slot = ring + (before + i) % p.window;
    float row[kParts];
    load_row(p.k, batch, key_head, run.tokens[i], row);
    normalise(Dk, row);
    store_row(row, Dk, p.ring_k + slot * Dk);
    load_row(p.v, batch, p.value_head(key_head), run.tokens[i], row);
    store_row(row, Dv, p.ring_v + slot * Dv);
  }
  __syncthreads();
  if (threadIdx.x == 0) p.counts[blockIdx.x] = before + run.count;
}

}  // namespace

void routing_step(const RoutingParams& params, const AttentionCall& call,
                  const std::vector<TensorView>& selection, const RoutingRings& rings,
                  const TensorView& out, const Workspace& workspace) {
  const DeviceGuard guard(call.op, call.device);
  const RoutingPlan plan(params, call);
  const RoutingSaved at(plan, selection);
  dispatch_element(call.op, call.inputs.q.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    StepProblem<T> problem;
    problem.q = tensor4<const T>(call.inputs.q);
    problem.k = tensor4<const T>(call.k);
    problem.v = tensor4<const T>(call.inputs.v);
    problem.out = tensor4<T>(out);
    problem.q_order = static_cast<const std::int32_t*>(at.q_order.data);
    problem.q_offsets = static_cast<const std::int32_t*>(at.q_offsets.data);
    problem.k_order = static_cast<const std::int32_t*>(at.k_order.data);
    problem.k_offsets = static_cast<const std::int32_t*>(at.k_offsets.data);
    problem.ring_k = static_cast<float*>(rings.k.data);
    problem.ring_v = static_cast<float*>(rings.v.data);
    problem.counts = static_cast<std::int64_t*>(rings.counts.data);
    problem.head_scale = static_cast<const float*>(call.inputs.logit_scale.data);
    problem.scale = static_cast<float>(call.scale);
    problem.tokens = static_cast<int>(call.N);
    problem.per_query = plan.per_row;
    problem.heads = static_cast<int>(call.H);
    problem.key_heads = static_cast<int>(call.key_heads);
    problem.value_heads = static_cast<int>(call.value_heads);
    problem.clusters = static_cast<int>(params.clusters);
    problem.window = params.window;
    problem.demotes = params.self == SelfAttention::demote;
    problem.include_self = params.include_self;
    const cudaStream_t stream = stream_of(workspace);
    attend_rings<<<static_cast<unsigned>(call.B * call.H * call.N), kThreads, 0, stream>>>(problem);
    COTERIE_LAUNCH("attend_rings");
    join_rings<<<static_cast<unsigned>(call.B * call.key_heads * params.clusters), kThreads, 0,
                 stream>>>(problem);
    COTERIE_LAUNCH("join_rings");
  });
}

}  // namespace coterie::cuda
