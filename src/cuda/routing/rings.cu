// SPDX-License-Identifier: MIT
// Strict routing one position at a time: the token's normalised key and its value go to slot
// counts[c] mod window of the ring of its cluster c; each query attends to the slots of its
// clusters,
//   out = sum_s w_s v_s / sum_s w_s,  w_s = exp(factor y_q . y_s)
// Its own slot is dropped where others are in sight and the own key is demoted; it is added where
// it is in none of its clusters and include_self asks for it.
//
// Grid and block: a block of 8 warps per batch entry and key head, which first writes the slot and
// then takes its query heads in turn. Warps share the slots in sight; a lane has up to 4 elements
// of a row. A running maximum and sum per warp, merged at the end. Shared memory: 4.2 KB. About 60
// registers.
// Preconditions: those of strict routing (rows of up to 128 elements; f32, bf16 or f16), one token
// for each batch entry, a selection of this call. Any alignment. No other kernel has this task.
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
  const std::int32_t *k_labels, *q_offsets;  // (B, key heads), (B, H, C + 1)
  float *ring_k, *ring_v;
  std::int64_t* counts;
  const float* head_scale;  // (H), or null
  float scale;
  int heads, key_heads, value_heads, clusters;
  std::int64_t window;
  bool demotes, include_self;
};

// This lane's elements of row 0.
template <class T>
__device__ void load_row(const Tensor4<const T>& x, int batch, int head, float (&row)[kParts]) {
  const T* from = x.rows(batch, head, 0).row(0);
  const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
  for (int i = 0; i < kParts; ++i)
    row[i] = lane + 32 * i < x.width ? to_float(from[lane + 32 * i]) : 0.0f;
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

  __device__ void add(float logit, const float* value, int width) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const float next = fmaxf(largest, logit);
    const float kept = largest == -INFINITY ? 0.0f : expf(largest - next);
    const float weight = expf(logit - next);
    sum = sum * kept + weight;
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
      const float own = lane + 32 * i < width ? value[lane + 32 * i] : 0.0f;
      out[i] = out[i] * kept + weight * own;
    }
    largest = next;
  }
};

template <class T>
__global__ void __launch_bounds__(kThreads) step_rings(StepProblem<T> p) {
  __shared__ float largest[kWarps], sums[kWarps], parts[kWarps][kMaxHeadDim];
  const int batch = static_cast<int>(blockIdx.x) / p.key_heads;
  const int key_head = static_cast<int>(blockIdx.x) % p.key_heads;
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int Dk = p.k.width, Dv = p.v.width;
  std::int64_t* counts = p.counts + static_cast<std::int64_t>(blockIdx.x) * p.clusters;
  const std::int64_t first_slot = static_cast<std::int64_t>(blockIdx.x) * p.clusters * p.window;
  float* ring_k = p.ring_k + first_slot * Dk;
  float* ring_v = p.ring_v + first_slot * Dv;

  const int cluster = min(max(p.k_labels[blockIdx.x], 0), p.clusters - 1);
  const std::int64_t before = counts[cluster];
  const std::int64_t own_slot = cluster * p.window + before % p.window;
  __syncthreads();
  float row[kParts];
  if (warp == 0) {
    load_row(p.k, batch, key_head, row);
    normalise(Dk, row);
#pragma unroll
    for (int i = 0; i < kParts; ++i)
      if (lane + 32 * i < Dk) ring_k[own_slot * Dk + lane + 32 * i] = row[i];
    if (lane == 0) counts[cluster] = before + 1;
  } else if (warp == 1) {
    load_row(p.v, batch, key_head / (p.key_heads / p.value_heads), row);
#pragma unroll
    for (int i = 0; i < kParts; ++i)
      if (lane + 32 * i < Dv) ring_v[own_slot * Dv + lane + 32 * i] = row[i];
  }
  __syncthreads();

  const int sharing = p.heads / p.key_heads;
  for (int head = key_head * sharing; head < (key_head + 1) * sharing; ++head) {
    const std::int32_t* offsets =
        p.q_offsets + (static_cast<std::int64_t>(batch) * p.heads + head) * (p.clusters + 1);
    // Keys in sight, and whether the own one is among them.
    std::int64_t seen = 0;
    bool found = false;
    for (int c = lane; c < p.clusters; c += 32)
      if (offsets[c] < offsets[c + 1]) {
        seen += min(counts[c], p.window);
        found = found || c == cluster;
      }
    seen = warp_sum(static_cast<long long>(seen));
    found = __any_sync(~0u, found);
    const bool demoted = p.demotes && seen > (found ? 1 : 0);
    const bool dropped = found && demoted, added = !found && p.include_self && !demoted;

    load_row(p.q, batch, head, row);
    normalise(Dk, row);
    const float factor = p.scale * (p.head_scale ? p.head_scale[head] : 1.0f);
    Running running;
    const auto attend = [&](std::int64_t slot) {
      const float* key = ring_k + slot * Dk;
      float product = 0.0f;
#pragma unroll
      for (int i = 0; i < kParts; ++i)
        if (lane + 32 * i < Dk) product = fmaf(row[i], key[lane + 32 * i], product);
      running.add(warp_sum(product) * factor, ring_v + slot * Dv, Dv);
    };
    for (int first = 0; first < p.clusters; first += 32) {
      const int c = first + lane;
      unsigned chosen = __ballot_sync(~0u, c < p.clusters && offsets[c] < offsets[c + 1]);
      for (; chosen != 0; chosen &= chosen - 1) {
        const int own = first + __ffs(static_cast<int>(chosen)) - 1;
        const std::int64_t filled = min(counts[own], p.window);
        for (std::int64_t s = warp; s < filled; s += kWarps) {
          const std::int64_t slot = own * p.window + s;
          if (!dropped || slot != own_slot) attend(slot);
        }
      }
    }
    if (added && warp == 0) attend(own_slot);

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
      p.out.rows(batch, head, 0).row(0)[d] = from_float<T>(total == 0.0f ? 0.0f : out / total);
    }
    __syncthreads();
  }
}

}  // namespace

void routing_step(const RoutingParams& params, const AttentionCall& call,
                  const std::vector<TensorView>& selection, const RoutingRings& rings,
                  const TensorView& out, const Workspace& workspace) {
  const DeviceGuard guard(call.op, call.device);
  const RoutingSaved at(RoutingPlan(params, call), selection);
  dispatch_element(call.op, call.inputs.q.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    StepProblem<T> problem;
    problem.q = tensor4<const T>(call.inputs.q);
    problem.k = tensor4<const T>(call.k);
    problem.v = tensor4<const T>(call.inputs.v);
    problem.out = tensor4<T>(out);
    problem.k_labels = static_cast<const std::int32_t*>(at.k_labels.data);
    problem.q_offsets = static_cast<const std::int32_t*>(at.q_offsets.data);
    problem.ring_k = static_cast<float*>(rings.k.data);
    problem.ring_v = static_cast<float*>(rings.v.data);
    problem.counts = static_cast<std::int64_t*>(rings.counts.data);
    problem.head_scale = static_cast<const float*>(call.inputs.logit_scale.data);
    problem.scale = static_cast<float>(call.scale);
    problem.heads = static_cast<int>(call.H);
    problem.key_heads = static_cast<int>(call.key_heads);
    problem.value_heads = static_cast<int>(call.value_heads);
    problem.clusters = static_cast<int>(params.clusters);
    problem.window = params.window;
    problem.demotes = params.self == SelfAttention::demote;
    problem.include_self = params.include_self;
    step_rings<<<static_cast<unsigned>(call.B * call.key_heads), kThreads, 0,
                 stream_of(workspace)>>>(problem);
    COTERIE_LAUNCH("step_rings");
  });
}

}  // namespace coterie::cuda
