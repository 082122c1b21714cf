// SPDX-License-Identifier: MIT
// The backward pass of the attention inside CAST's clusters (inner_rows.cuh), for 16-bit
// types, softmax, rows of up to 64 elements: keys and values. With p, dp and dot as in
// inner_query_backward_sm90a.cu,
//   dk_j = scale sum_i alpha_i p_ij (dp_ij - dot_i) q_i,   dv_j = sum_i alpha_i p_ij g_i.
#include "cuda/cast/inner_rows.cuh"

namespace coterie::cuda {
namespace {

// Keys own the rows. Through the summary comes, with dR its gradient and dot = dR . summary,
//   dlogit_j = beta_j (dR . v_j - dot),   dv_j += beta_j dR,   dk_j += factor_j dlogit_j S.
template <class T>
struct InnerKeys {
  static constexpr bool kBeside = false;
  using Memory = InnerMemory<T>;
  const InnerArgs<T>& args;
  const Memory& memory;

  __device__ void load_own(const InnerCluster<T>& cluster, const MemberRows& rows, int tile,
                           int place) const {
    const CastShape& shape = args.shape;
    copy_keys(args, cluster, rows, memory.own(place));
    const float* dgate = args.pass.dgate_slots + cluster.first_slot + 64 * tile;
    load_row_facts(args, cluster, rows, memory.rows(place), [&](const float4& gate, int, int row) {
      return InnerRow{INFINITY, shape.scale * gate.z, shape.gate_scale ? dgate[row] : 0.0f,
                      shape.scale * gate.w};
    });
  }
  __device__ void load_ring(const InnerCluster<T>& cluster, const MemberRows& rows, int tile,
                            int place) const {
    const CastShape& shape = args.shape;
    const CastBackward& pass = args.pass;
    copy_queries(args, cluster, rows, memory.ring(place));
    const std::int64_t first = cluster.first_slot + 64 * tile;
    const int lane = static_cast<int>(threadIdx.x) % 32, count = rows.count();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = 32 * half + lane;
      const bool there = rows.token[half] >= 0;
      memory.facts(place)[row] = there ? pass.shifts[first + row] : INFINITY;
      memory.facts(place)[64 + row] = there ? pass.dots[first + row] : 0.0f;
    }
    if (tile == 0) {
      InnerFloats& floats = memory.cluster(place);
      const float2 gradient =
          lane_pair(pass.dsummary + static_cast<std::int64_t>(cluster.number) * shape.D, shape.D);
      split_row(floats.surrogate, memory.beside(place), 0,
                lane_pair(args.surrogate(cluster.number), shape.D));
      split_row(floats.summary, memory.beside(place), 2, gradient);
      if (lane == 0) {
        floats.lse = pass.saved.summary_lse[cluster.number];
        floats.dot = pass.summary_dots[cluster.number];
      }
    }
    if (lane == 0) memory.count(place) = count;
  }

  __device__ void compute(int n, int tile, int ring, int place) const;
  __device__ void finish(int n, int tile, int ring, int place, Sum<64>& dk, Sum<64>& dv) const;
};

template <class T>
__device__ void InnerKeys<T>::compute(int n, int tile, int ring, int place) const {
  const auto own = memory.own(place);
  const float exponent = args.shape.scale * kLog2e;
  const int lane = static_cast<int>(threadIdx.x) % 4;
  Sum<64> dk, dv;
  declare<64>(dk);
  declare<64>(dv);
#pragma unroll 1
  for (int step = 0; step < args.tiles(); ++step) {
    const int at = (ring + step) % Memory::kRing;
    if (__shfl_sync(~0u, memory.count(at), 0) == 0 && step > 0) break;
    const auto queries = memory.ring(at);
    const float2* facts = reinterpret_cast<const float2*>(memory.facts(at)) + lane;
    const auto weigh = [&](float(&s)[32]) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const float2 shift = facts[4 * i];
#pragma unroll
        for (int j = 4 * i; j < 4 * i + 4; ++j)
          s[j] = exp2_approximate(fmaf(s[j], exponent, -(j % 2 ? shift.y : shift.x)));
      }
    };
    const auto derive = [&](float(&d)[32], const float(&s)[32]) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const float2 dot = facts[32 + 4 * i];
#pragma unroll
        for (int j = 4 * i; j < 4 * i + 4; ++j) d[j] = s[j] * (d[j] - (j % 2 ? dot.y : dot.x));
      }
    };
    walk<T, 64>(own, queries, queries.second, dk, dv, step, weigh, derive);
  }
  wgmma_wait<0>();
  settle<64>(dk);
  settle<64>(dv);
  finish(n, tile, ring, place, dk, dv);
}

template <class T>
__device__ void InnerKeys<T>::finish(int n, int tile, int ring, int place, Sum<64>& dk,
                                     Sum<64>& dv) const {
  const CastShape& shape = args.shape;
  const CastBackward& pass = args.pass;
  const int lane = static_cast<int>(threadIdx.x) % 4, D = shape.D;
  const int group = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / kWarpgroup, 0);
  const int count = memory.count((ring + tile) % Memory::kRing);
  const auto own = memory.own(place);
  float products[4], dbetas[4];
  narrow_products<T>(products, dbetas, own, memory.beside(ring % Memory::kRing).base);
  const InnerFloats& floats = memory.cluster(ring % Memory::kRing);
  const float2* surrogate = reinterpret_cast<const float2*>(floats.surrogate) + lane;
  const float2* summary = reinterpret_cast<const float2*>(floats.summary) + lane;
  const float lse = floats.lse, dot = floats.dot;
  wgmma_wait<0>();
  wgmma_settle(products);
  wgmma_settle(dbetas);
  const std::int64_t first = static_cast<std::int64_t>(n) * shape.width + 64 * tile;
  float dgate[2];  // stored behind the fence, which would wait for it
#pragma unroll
  for (int side = 0; side < 2; ++side) {
    const int row = group_row(side);
    const bool there = row < count;
    const InnerRow key = memory.rows(place)[row];
    const float product = __shfl_sync(~0u, products[2 * side] + products[2 * side + 1], 0, 4);
    const float dbeta = __shfl_sync(~0u, dbetas[2 * side] + dbetas[2 * side + 1], 1, 4);
    const float beta = there ? exp2_approximate(fmaf(product, key.factor, -lse) * kLog2e) : 0.0f;
    const float dlogit = there ? beta * (dbeta - dot) : 0.0f, factor = key.factor * dlogit;
    dgate[side] = key.other - key.slope * dlogit * product;
    if (lane < 2) store_weight(memory.sums(group), lane, row, factor);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float2 a = surrogate[4 * i], b = summary[4 * i];
      float *key_row = dk[0] + 4 * i + 2 * side, *value_row = dv[0] + 4 * i + 2 * side;
      key_row[0] = fmaf(shape.scale, key_row[0], factor * a.x);
      key_row[1] = fmaf(shape.scale, key_row[1], factor * a.y);
      value_row[0] = fmaf(beta, b.x, value_row[0]);
      value_row[1] = fmaf(beta, b.y, value_row[1]);
    }
  }
  // What keys add to the gradient of the surrogate.
  float keys[4] = {};
  fence_async_proxy();
  sync_group();
  wgmma_settle(keys);
  wgmma_fence();
  add_weighted_rows<T>(keys, own.first, memory.sums(group).base);
  wgmma_commit();
#pragma unroll
  for (int side = 0; side < 2; ++side)
    if (group_row(side) < count && lane == 0 && shape.gate_scale)
      pass.dgate_slots[first + group_row(side)] = dgate[side];
  wgmma_wait<0>();
  wgmma_settle(keys);
  float* to = pass.key_parts + (static_cast<std::int64_t>(n) * args.tiles() + tile) * D;
#pragma unroll
  for (int side = 0; side < 2; ++side)
    if (lane == 0 && group_row(side) < D) to[group_row(side)] = keys[2 * side] + keys[2 * side + 1];
  sync_group();  // rows and weights were read
  const int row = static_cast<int>(threadIdx.x) % kWarpgroup / 32 * 16;
  store_rows(static_cast<T*>(pass.dk_slots) + (first + row) * D, D, count - row, D, own.first.base,
             dk[0]);
  store_rows(static_cast<T*>(pass.dv_slots) + (first + row) * D, D, count - row, D, own.second.base,
             dv[0]);
}

}  // namespace

void cast_inner_keys(const CastShape& shape, const AttentionCall& call, const CastBackward& pass,
                     cudaStream_t stream) {
  launch_inner<InnerKeys>("cast inner keys", shape, call, pass, stream);
}

}  // namespace coterie::cuda
