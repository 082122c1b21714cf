// SPDX-License-Identifier: MIT
// The backward pass of the attention inside CAST's clusters (device/cast_inner.cuh), for 16-bit
// types, softmax, rows of up to 64 elements.
//
// With p the weights inside a cluster, dp_ij = g_i . v_j and dot_i = sum_j p_ij dp_ij:
//   dq_i = alpha_i scale sum_j p_ij (dp_ij - dot_i) k_j,
//   dk_j = scale sum_i alpha_i p_ij (dp_ij - dot_i) q_i,   dv_j = sum_i alpha_i p_ij g_i.
#include "cuda/device/await.cuh"
#include "cuda/device/cast_inner.cuh"
#include "cuda/launch.h"

namespace coterie::cuda {
namespace {

// setmaxnreg: of 512 threads with 128 each.
constexpr int kLoadRegisters = 32, kComputeRegisters = 160;

template <class T, class Load, class Compute>
__device__ __forceinline__ void run_block(const InnerArgs<T>& args, unsigned char* shared,
                                          const Load& load, const Compute& compute) {
  const InnerMemory<T> memory(shared);
  if (threadIdx.x == 0) memory.start();
  __syncthreads();
  const std::int64_t total = args.clusters();
  const int begin = static_cast<int>(total * blockIdx.x / gridDim.x);
  const int end = static_cast<int>(total * (blockIdx.x + 1) / gridDim.x);
  if (threadIdx.x >= InnerMemory<T>::kGroups * kWarpgroup) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kLoadRegisters));
    load(memory, begin, end);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kComputeRegisters));
    compute(memory, begin, end);
  }
}

template <class T>
__device__ __forceinline__ void copy_keys(const InnerArgs<T>& args, const InnerCluster<T>& cluster,
                                          const MemberRows& rows, const Pair<T, 64>& to) {
  const int head = cluster.head / args.shape.group;
  rows.copy(to, args.k.rows(cluster.span.batch, head, cluster.span.begin),
            args.v.rows(cluster.span.batch, head, cluster.span.begin));
}
template <class T>
__device__ __forceinline__ void copy_queries(const InnerArgs<T>& args,
                                             const InnerCluster<T>& cluster, const MemberRows& rows,
                                             const Pair<T, 64>& to) {
  rows.copy(to, args.q.rows(cluster.span.batch, cluster.head, cluster.span.begin),
            args.grad_out.rows(cluster.span.batch, cluster.head, cluster.span.begin));
}

// Products of a group's own rows with the rows of their cluster, on their way.
template <class T>
__device__ __forceinline__ void narrow_products(float (&first)[4], float (&second)[4],
                                                const Pair<T, 64>& own, std::uint32_t cluster) {
  const Bands<T, 64, 64> rows{cluster};
#pragma unroll
  for (int i = 0; i < 4; ++i) first[i] = second[i] = 0.0f;
  wgmma_settle(first);
  wgmma_settle(second);
  wgmma_fence();
#pragma unroll
  for (int depth = 0; depth < 4; ++depth) {
    wgmma_narrow<T, 0>(first, own.first.by_columns(0, depth), rows.by_columns(0, depth));
    wgmma_narrow<T, 0>(second, own.second.by_columns(0, depth), rows.by_columns(0, depth));
  }
  wgmma_commit();
}
// Weights of rows in shared memory, and by them the sums of a group's own rows: their columns are
// the rows of the result, weights' numbers its columns. A float is two weights.
template <class T>
__device__ __forceinline__ void store_weight(const Tile<T, 64>& to, int number, int row,
                                             float value) {
  const T high = from_float<T>(value);
  const T part = number % 2 == 0 ? high : from_float<T>(value - to_float(high));
  asm volatile("st.shared.b16 [%0], %1;" ::"r"(to.address(number, row)),
               "h"(*reinterpret_cast<const std::uint16_t*>(&part))
               : "memory");
}
template <class T>
__device__ __forceinline__ void add_weighted_rows(float (&sums)[4], const Bands<T, 64, 64>& own,
                                                  std::uint32_t weights) {
  const Bands<T, 64, 64> factors{weights};
#pragma unroll
  for (int depth = 0; depth < 4; ++depth)
    wgmma_narrow<T, 1>(sums, own.by_rows(16 * depth, 0), factors.by_columns(0, depth));
}
// A lane's columns of a row of D floats.
__device__ __forceinline__ void load_columns(float2 (&columns)[8], const float* row, int D) {
  const int lane = static_cast<int>(threadIdx.x) % 4;
#pragma unroll
  for (int i = 0; i < 8; ++i)
    columns[i] = 8 * i < D ? *reinterpret_cast<const float2*>(row + 8 * i + 2 * lane)
                           : make_float2(0.0f, 0.0f);
}

// Queries own the rows. What membership makes of the mix's gradients comes on the way (cast.h):
// tokens' logits and dalpha of their own cluster are products with two more rows.
template <class T>
struct InnerQueries {
  using Memory = InnerMemory<T>;
  const InnerArgs<T>& args;
  const Memory& memory;

  __device__ void load_own(int n, int tile, int place) const {
    const CastShape& shape = args.shape;
    const InnerCluster<T> cluster(args, n);
    const MemberRows rows(cluster.list, 64 * tile, shape.width);
    copy_queries(args, cluster, rows, memory.own(place));
    const float4* gates = args.pass.gates +
                          static_cast<std::int64_t>(cluster.span.batch) * shape.N +
                          cluster.span.begin;
    const float* lse = args.pass.saved.member_lse + cluster.first_slot + 64 * tile;
    const float* combine_lse = args.pass.saved.combine_lse + shape.row(cluster.span, cluster.head);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int token = rows.token[half], row = 32 * half + static_cast<int>(threadIdx.x) % 32;
      InnerRow query{INFINITY, 0.0f, 0.0f, 0.0f};  // no weight
      if (token >= 0) {
        const float4 gate = gates[token];
        query = {lse[row] * kLog2e, shape.scale * gate.x, combine_lse[token], shape.scale * gate.y};
      }
      memory.rows(place)[row] = query;
    }
  }
  __device__ void load_ring(int n, int tile, int place) const {
    const CastShape& shape = args.shape;
    const InnerCluster<T> cluster(args, n);
    const MemberRows rows(cluster.list, 64 * tile, shape.width);
    copy_keys(args, cluster, rows, memory.ring(place));
    const int count = rows.count(), lane = static_cast<int>(threadIdx.x) % 32, chunk = lane % 8;
    if (tile == 0 && lane < 16) {
      const std::int64_t surrogate = static_cast<std::int64_t>(cluster.head) * shape.clusters;
      const T* row = lane < 8 ? args.surrogates + (surrogate + cluster.cluster) * shape.D
                              : args.summaries + cluster.number * shape.D;
      const bool inside = chunk * 8 < shape.D;
      cp_async16(memory.beside(place).chunk(lane / 8, chunk), row + (inside ? chunk * 8 : 0),
                 inside ? 16 : 0);
    }
    if (lane == 0) memory.count(place) = count;
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
    wgmma_wait<0>();
  }
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
  float2 columns[8];
  load_columns(columns, args.surrogate(n), D);
  wgmma_wait<0>();
  wgmma_settle(logits);
  wgmma_settle(dalphas);
  const std::int64_t first = static_cast<std::int64_t>(n) * shape.width + 64 * tile;
#pragma unroll
  for (int side = 0; side < 2; ++side) {
    const int row = group_row(side);
    const bool there = row < count;
    const InnerRow query = memory.rows(place)[row];
    const float e = quad_sum(error[side]), dot = guess[side] + e;
    const float product = __shfl_sync(~0u, logits[2 * side], 0, 4);
    const float dalpha = __shfl_sync(~0u, dalphas[2 * side + 1], 0, 4);
    const float exponent = fmaf(product, query.factor, -query.combine_lse) * kLog2e;
    const float weight = there ? exp2_approximate(exponent) : 0.0f;
    const float excess = there ? weight * (dot - dalpha) : 0.0f;
    const float factor = query.factor * excess, scale = shape.scale * weight;
    if (there && lane == 0) {
      pass.shifts[first + row] = query.lse - exponent;
      pass.dots[first + row] = dot;
      pass.excess[first + row] = excess;
      if (shape.gate_scale) pass.dgate_slots[first + row] = query.slope * excess * product;
    }
    store_weight(memory.sums(group), lane, row, lane < 2 ? factor : -weight);
#pragma unroll
    for (int i = 0; i < 8; ++i)
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int at = 4 * i + 2 * side + j;
        const float value = fmaf(-e, mean[0][at], sum[0][at]);
        sum[0][at] = fmaf(scale, value, factor * (j == 0 ? columns[i].x : columns[i].y));
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

// Keys own the rows. Through the summary comes, with dR its gradient and dot = dR . summary,
//   dlogit_j = beta_j (dR . v_j - dot),   dv_j += beta_j dR,   dk_j += factor_j dlogit_j S.
template <class T>
struct InnerKeys {
  using Memory = InnerMemory<T>;
  const InnerArgs<T>& args;
  const Memory& memory;

  __device__ void load_own(int n, int tile, int place) const {
    const CastShape& shape = args.shape;
    const InnerCluster<T> cluster(args, n);
    const MemberRows rows(cluster.list, 64 * tile, shape.width);
    copy_keys(args, cluster, rows, memory.own(place));
    const float4* gates = args.pass.gates +
                          static_cast<std::int64_t>(cluster.span.batch) * shape.N +
                          cluster.span.begin;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int token = rows.token[half], row = 32 * half + static_cast<int>(threadIdx.x) % 32;
      InnerRow key{INFINITY, 0.0f, 0.0f, 0.0f};
      if (token >= 0) {
        const float4 gate = gates[token];
        key.factor = shape.scale * gate.z;
        key.slope = shape.scale * gate.w;
      }
      memory.rows(place)[row] = key;
    }
  }
  __device__ void load_ring(int n, int tile, int place) const {
    const CastShape& shape = args.shape;
    const InnerCluster<T> cluster(args, n);
    const MemberRows rows(cluster.list, 64 * tile, shape.width);
    copy_queries(args, cluster, rows, memory.ring(place));
    const std::int64_t first = cluster.first_slot + 64 * tile;
    const int lane = static_cast<int>(threadIdx.x) % 32, count = rows.count();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = 32 * half + lane;
      const bool there = rows.token[half] >= 0;
      memory.facts(place)[row] = there ? args.pass.shifts[first + row] : INFINITY;
      memory.facts(place)[64 + row] = there ? args.pass.dots[first + row] : 0.0f;
    }
    if (tile == 0) {
      split_row(memory.beside(place), 0, args.surrogate(n));
      split_row(memory.beside(place), 2, args.pass.dsummary + cluster.number * shape.D);
    }
    if (lane == 0) memory.count(place) = count;
  }
  // A row of floats as two rows of T.
  __device__ void split_row(const Tile<T, 64>& to, int row, const float* from) const {
    const int column = static_cast<int>(threadIdx.x) % 32 * 2;
    const float2 two = column < args.shape.D ? *reinterpret_cast<const float2*>(from + column)
                                             : make_float2(0.0f, 0.0f);
    const std::uint32_t high = pack2<T>(two.x, two.y);
    const T* part = reinterpret_cast<const T*>(&high);
    const std::uint32_t low = pack2<T>(two.x - to_float(part[0]), two.y - to_float(part[1]));
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(to.address(row, column)), "r"(high) : "memory");
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(to.address(row + 1, column)), "r"(low) : "memory");
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
    wgmma_wait<0>();
  }
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
  float2 surrogate[8], summary[8];
  load_columns(surrogate, args.surrogate(n), D);
  load_columns(summary, pass.dsummary + static_cast<std::int64_t>(n) * D, D);
  const float lse = pass.saved.summary_lse[n], dot = pass.summary_dots[n];
  wgmma_wait<0>();
  wgmma_settle(products);
  wgmma_settle(dbetas);
  const std::int64_t first = static_cast<std::int64_t>(n) * shape.width + 64 * tile;
#pragma unroll
  for (int side = 0; side < 2; ++side) {
    const int row = group_row(side);
    const bool there = row < count;
    const InnerRow key = memory.rows(place)[row];
    const float product = __shfl_sync(~0u, products[2 * side] + products[2 * side + 1], 0, 4);
    const float dbeta = __shfl_sync(~0u, dbetas[2 * side] + dbetas[2 * side + 1], 1, 4);
    const float beta = there ? exp2_approximate(fmaf(product, key.factor, -lse) * kLog2e) : 0.0f;
    const float dlogit = there ? beta * (dbeta - dot) : 0.0f, factor = key.factor * dlogit;
    if (there && lane == 0 && shape.gate_scale)
      pass.dgate_slots[first + row] -= key.slope * dlogit * product;
    if (lane < 2) store_weight(memory.sums(group), lane, row, factor);
#pragma unroll
    for (int i = 0; i < 8; ++i)
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int at = 4 * i + 2 * side + j;
        dk[0][at] =
            fmaf(shape.scale, dk[0][at], factor * (j == 0 ? surrogate[i].x : surrogate[i].y));
        dv[0][at] = fmaf(beta, j == 0 ? summary[i].x : summary[i].y, dv[0][at]);
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

template <class T, template <class> class Part>
__global__ void __launch_bounds__(InnerMemory<T>::kThreads, 1)
    inner_kernel(const __grid_constant__ InnerArgs<T> args) {
  extern __shared__ __align__(1024) unsigned char shared[];
  await_previous();
  run_block<T>(
      args, shared,
      [&](const InnerMemory<T>& memory, int begin, int end) {
        const Part<T> part{args, memory};
        load_clusters<T>(
            args, memory, begin, end,
            [&](int n, int tile, int place) { part.load_own(n, tile, place); },
            [&](int n, int tile, int place) { part.load_ring(n, tile, place); });
      },
      [&](const InnerMemory<T>& memory, int begin, int end) {
        const Part<T> part{args, memory};
        const int tiles = args.tiles();
        int n = begin, at = 0;  // the cluster whose first tile in the ring is at
        for_own_tiles<T>(args, memory, begin, end, [&](int ring, int tile, int place) {
          for (; at < ring; at += tiles) ++n;
          part.compute(n, tile, ring, place);
        });
      });
}

template <template <class> class Part>
void launch_inner(const char* name, const CastShape& shape, const AttentionCall& call,
                  const CastBackward& pass, cudaStream_t stream) {
  const std::int64_t clusters = static_cast<std::int64_t>(shape.items) * shape.H * shape.clusters;
  if (clusters == 0) return;
  const auto launch = [&](auto tag) {
    using T = decltype(tag);
    const InnerArgs<T> args{shape,
                            pass,
                            tensor4<const T>(call.inputs.q),
                            tensor4<const T>(call.k),
                            tensor4<const T>(call.inputs.v),
                            tensor4<const T>(pass.grad_out),
                            static_cast<const T*>(pass.surrogates),
                            static_cast<const T*>(pass.summaries)};
    const dim3 grid(static_cast<unsigned>(std::min<std::int64_t>(clusters, multiprocessors())));
    launch_early(name, inner_kernel<T, Part>, grid, InnerMemory<T>::kThreads,
                 InnerMemory<T>::kBytes, stream, args);
  };
  if (call.inputs.q.dtype == DType::bf16)
    launch(__nv_bfloat16{});
  else
    launch(__half{});
}

}  // namespace

void cast_inner_queries(const CastShape& shape, const AttentionCall& call, const CastBackward& pass,
                        cudaStream_t stream) {
  launch_inner<InnerQueries>("cast inner queries", shape, call, pass, stream);
}
void cast_inner_keys(const CastShape& shape, const AttentionCall& call, const CastBackward& pass,
                     cudaStream_t stream) {
  launch_inner<InnerKeys>("cast inner keys", shape, call, pass, stream);
}

}  // namespace coterie::cuda
