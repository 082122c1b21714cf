// SPDX-License-Identifier: MIT
// The backward pass of the attention inside CAST's clusters (inner_rows.cuh), for 16-bit
// types, softmax, rows of up to 64 elements: queries. With p the weights inside a
// cluster, dp_ij = g_i . v_j and dot_i = sum_j p_ij dp_ij,
//   dq_i = alpha_i scale sum_j p_ij (dp_ij - dot_i) k_j.
#include "cuda/cast/inner_rows.cuh"

namespace coterie::cuda {
namespace {

// Queries own the rows. What membership makes of the mix's gradients comes on the way (stages.h):
// tokens' logits and dalpha of their own cluster are products with rows of the cluster: surrogate
// and summary, rounded.
template <class T>
struct InnerQueries {
  static constexpr bool kBeside = true;  // the search of the slots
  using Memory = InnerMemory<T>;
  const InnerArgs<T>& args;
  const Memory& memory;

  __device__ void load_own(const InnerCluster<T>& cluster, const MemberRows& rows, int tile,
                           int place) const {
    const CastShape& shape = args.shape;
    copy_queries(args, cluster, rows, memory.own(place));
    const float* lse = args.pass.saved.member_lse + cluster.first_slot + 64 * tile;
    const float* combine_lse = args.pass.saved.combine_lse + shape.row(cluster.span, cluster.head);
    load_row_facts(args, cluster, rows, memory.rows(place),
                   [&](const float4& gate, int token, int row) {
                     return InnerRow{lse[row] * kLog2e, shape.scale * gate.x, combine_lse[token],
                                     shape.scale * gate.y};
                   });
  }
  __device__ void load_ring(const InnerCluster<T>& cluster, const MemberRows& rows, int tile,
                            int place) const {
    const CastShape& shape = args.shape;
    copy_keys(args, cluster, rows, memory.ring(place));
    const int count = rows.count();
    if (tile == 0) {
      InnerFloats& floats = memory.cluster(place);
      split_row(floats.surrogate, memory.beside(place), 0,
                lane_pair(args.surrogate(cluster.number), shape.D));
      split_row(
          floats.summary, memory.beside(place), 2,
          lane_pair(args.pass.saved.summary + static_cast<std::int64_t>(cluster.number) * shape.D,
                    shape.D));
    }
    if (threadIdx.x % 32 == 0) memory.count(place) = count;
  }

  __device__ void compute(int n, int tile, int ring, int place) const;
  __device__ void finish(int n, int tile, int ring, int place, Sum<64>& sum, const Sum<64>& mean,
                         const float (&error)[2], const float (&guess)[2]) const;
};

template <class T>
__device__ void InnerQueries<T>::compute(int n, int tile, int ring, int place) const {
  const auto own = memory.own(place);
  const float exponent = args.shape.scale * kLog2e;
  const float lse[2] = {memory.rows(place)[group_row(0)].lse, memory.rows(place)[group_row(1)].lse};
  Sum<64> sum, mean;
  declare<64>(sum);
  declare<64>(mean);
  float error[2] = {0.0f, 0.0f}, guess[2] = {0.0f, 0.0f};
#pragma unroll 1
  for (int step = 0; step < args.tiles(); ++step) {
    const int at = (ring + step) % Memory::kRing;
    const int count = __shfl_sync(~0u, memory.count(at), 0);
    if (count == 0 && step > 0) break;
    const auto keys = memory.ring(at);
    const auto weigh = [&](float(&s)[32]) {
#pragma unroll
      for (int j = 0; j < 32; ++j) s[j] = exp2_approximate(fmaf(s[j], exponent, -lse[j / 2 % 2]));
      if (count == 64) return;
#pragma unroll
      for (int j = 0; j < 32; ++j)
        if (j / 4 * 8 + static_cast<int>(threadIdx.x) % 4 * 2 + j % 2 >= count) s[j] = 0.0f;
    };
    const auto derive = [&](float(&d)[32], const float(&s)[32]) {
      if (step == 0) guess_delta(guess, d, s);
      float part[2][2] = {{0.0f, 0.0f}, {0.0f, 0.0f}};
#pragma unroll
      for (int j = 0; j < 32; ++j) {
        d[j] = s[j] * (d[j] - guess[j / 2 % 2]);
        part[j / 2 % 2][j % 2] += d[j];
      }
      error[0] += part[0][0] + part[0][1];
      error[1] += part[1][0] + part[1][1];
    };
    walk<T, 64>(own, keys, keys.first, sum, mean, step, weigh, derive);
  }
  wgmma_wait<0>();
  settle<64>(sum);
  settle<64>(mean);
  finish(n, tile, ring, place, sum, mean, error, guess);
}

template <class T>
__device__ void InnerQueries<T>::finish(int n, int tile, int ring, int place, Sum<64>& sum,
                                        const Sum<64>& mean, const float (&error)[2],
                                        const float (&guess)[2]) const {
  const CastShape& shape = args.shape;
  const CastBackward& pass = args.pass;
  const int lane = static_cast<int>(threadIdx.x) % 4, D = shape.D;
  const int group = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / kWarpgroup, 0);
  const int count = memory.count((ring + tile) % Memory::kRing);
  const auto own = memory.own(place);
  float logits[4], dalphas[4];
  narrow_products<T>(logits, dalphas, own, memory.beside(ring % Memory::kRing).base);
  wgmma_wait<0>();
  wgmma_settle(logits);
  wgmma_settle(dalphas);
  const std::int64_t first = static_cast<std::int64_t>(n) * shape.width + 64 * tile;
  const float2* surrogate =
      reinterpret_cast<const float2*>(memory.cluster(ring % Memory::kRing).surrogate) + lane;
  float4 facts[2];  // stored behind the fence, which would wait for them
#pragma unroll
  for (int side = 0; side < 2; ++side) {
    const int row = group_row(side);
    const bool there = row < count;
    const InnerRow query = memory.rows(place)[row];
    const float e = quad_sum(error[side]), dot = guess[side] + e;
    const float product = __shfl_sync(~0u, logits[2 * side], 0, 4);
    const float dalpha = __shfl_sync(~0u, dalphas[2 * side], 1, 4);
    const float exponent = fmaf(product, query.factor, -query.other) * kLog2e;
    const float weight = there ? exp2_approximate(exponent) : 0.0f;
    const float excess = there ? weight * (dot - dalpha) : 0.0f;
    const float factor = query.factor * excess, scale = shape.scale * weight;
    facts[side] = make_float4(query.lse - exponent, dot, excess, query.slope * excess * product);
    store_weight(memory.sums(group), lane, row, lane < 2 ? factor : -weight);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float2 two = surrogate[4 * i];
      float* value = sum[0] + 4 * i + 2 * side;
      const float* own_mean = mean[0] + 4 * i + 2 * side;
      value[0] = fmaf(scale, fmaf(-e, own_mean[0], value[0]), factor * two.x);
      value[1] = fmaf(scale, fmaf(-e, own_mean[1], value[1]), factor * two.y);
    }
  }
  // What membership adds to the gradients of the surrogate and the summary.
  float members[2][4] = {};
  fence_async_proxy();
  sync_group();
  wgmma_settle(members[0]);
  wgmma_settle(members[1]);
  wgmma_fence();
  add_weighted_rows<T>(members[0], own.first, memory.sums(group).base);
  add_weighted_rows<T>(members[1], own.second, memory.sums(group).base);
  wgmma_commit();
#pragma unroll
  for (int side = 0; side < 2; ++side) {
    const int row = group_row(side);
    if (row >= count || lane != 0) continue;
    pass.shifts[first + row] = facts[side].x;
    pass.dots[first + row] = facts[side].y;
    pass.excess[first + row] = facts[side].z;
    if (shape.gate_scale) pass.dgate_slots[first + row] = facts[side].w;
  }
  wgmma_wait<0>();
  wgmma_settle(members[0]);
  wgmma_settle(members[1]);
  float* to =
      pass.member_parts + ((static_cast<std::int64_t>(n) * args.tiles() + tile) * 2 + lane) * D;
#pragma unroll
  for (int side = 0; side < 2; ++side) {
    const float value = lane == 0 ? members[0][2 * side] + members[0][2 * side + 1]
                                  : members[1][2 * side] + members[1][2 * side + 1];
    if (lane < 2 && group_row(side) < D) to[group_row(side)] = value;
  }
  sync_group();  // rows and weights were read
  const int row = static_cast<int>(threadIdx.x) % kWarpgroup / 32 * 16;
  store_rows(static_cast<T*>(pass.dq_slots) + (first + row) * D, D, count - row, D, own.first.base,
             sum[0]);
}

}  // namespace

void cast_inner_queries(const CastShape& shape, const AttentionCall& call, const CastBackward& pass,
                        cudaStream_t stream) {
  launch_inner<InnerQueries>("cast inner queries", shape, call, pass, stream);
}

}  // namespace coterie::cuda
