// SPDX-License-Identifier: MIT
// What the two kernels of cast_inner_*_bwd_sm90a.cu share: rows of members, and their products with
// rows of the cluster.
#pragma once

#include "cuda/device/await.cuh"
#include "cuda/device/cast_inner.cuh"
#include "cuda/launch.h"

namespace coterie::cuda {

// A lane's two of up to 64 floats.
__device__ __forceinline__ float2 lane_pair(const float* from, int D) {
  const int column = static_cast<int>(threadIdx.x) % 32 * 2;
  return column < D ? *reinterpret_cast<const float2*>(from + column) : make_float2(0.0f, 0.0f);
}
// By a warp: a row of such pairs as floats and, rounded, as two rows of T, whose sum it is.
template <class T>
__device__ __forceinline__ void split_row(float (&floats)[64], const Tile<T, 64>& to, int row,
                                          const float2& two) {
  const int column = static_cast<int>(threadIdx.x) % 32 * 2;
  const std::uint32_t high = pack2<T>(two.x, two.y);
  const T* part = reinterpret_cast<const T*>(&high);
  const std::uint32_t low = pack2<T>(two.x - to_float(part[0]), two.y - to_float(part[1]));
  *reinterpret_cast<float2*>(floats + column) = two;
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(to.address(row, column)), "r"(high) : "memory");
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(to.address(row + 1, column)), "r"(low) : "memory");
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
// What a group has to know of its own rows: make(gate, token, row) of those that are there.
template <class T, class Make>
__device__ __forceinline__ void load_row_facts(const InnerArgs<T>& args,
                                               const InnerCluster<T>& cluster,
                                               const MemberRows& rows, InnerRow* to,
                                               const Make& make) {
  const float4* gates = args.pass.gates +
                        static_cast<std::int64_t>(cluster.span.batch) * args.shape.N +
                        cluster.span.begin;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int token = rows.token[half], row = 32 * half + static_cast<int>(threadIdx.x) % 32;
    InnerRow fact{INFINITY, 0.0f, 0.0f, 0.0f};  // no weight
    if (token >= 0) fact = make(gates[token], token, row);
    to[row] = fact;
  }
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
    wgmma<T, 1, 0>(first, own.first.by_columns(0, depth), rows.by_columns(0, depth));
    wgmma<T, 1, 0>(second, own.second.by_columns(0, depth), rows.by_columns(0, depth));
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
    wgmma<T, 1, 0, 1>(sums, own.by_rows(16 * depth, 0), factors.by_columns(0, depth));
}
// setmaxnreg: of 384 threads with 168 each.
constexpr int kLoadRegisters = 72, kComputeRegisters = 216;

template <class T, class Load, class Compute>
__device__ __forceinline__ void run_block(const InnerArgs<T>& args, unsigned char* shared,
                                          const Load& load, const Compute& compute) {
  const InnerMemory<T> memory(shared);
  if (threadIdx.x == 0) memory.start();
  __syncthreads();
  // The last blocks have a cluster less: kernels ahead may still be where they go.
  const int block = static_cast<int>(blockIdx.x), blocks = static_cast<int>(gridDim.x);
  const int each = args.clusters() / blocks, more = args.clusters() % blocks;
  const int begin = block * each + min(block, more), end = begin + each + (block < more);
  if (threadIdx.x >= InnerMemory<T>::kGroups * kWarpgroup) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kLoadRegisters));
    load(memory, begin, end);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kComputeRegisters));
    compute(memory, begin, end);
  }
}

template <class T, template <class> class Part>
__global__ void __launch_bounds__(InnerMemory<T>::kThreads, 1)
    inner_kernel(const __grid_constant__ InnerArgs<T> args) {
  extern __shared__ __align__(1024) unsigned char shared[];
  if (!Part<T>::kBeside) await_previous();
  run_block<T>(
      args, shared,
      [&](const InnerMemory<T>& memory, int begin, int end) {
        const Part<T> part{args, memory};
        load_clusters<T>(
            args, memory, begin, end,
            [&](int n, int tile, int place) {
              const InnerCluster<T> cluster(args, n);
              const MemberRows rows(cluster.list, 64 * tile, args.shape.width);
              part.load_own(cluster, rows, tile, place);
            },
            [&](int n, int tile, int place) {
              const InnerCluster<T> cluster(args, n);
              const MemberRows rows(cluster.list, 64 * tile, args.shape.width);
              part.load_ring(cluster, rows, tile, place);
            });
        if (!Part<T>::kBeside) return;
        await_writes();
        release_next();
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
                            tensor4<const T>(pass.grad_out)};
    const dim3 grid(
        static_cast<unsigned>(min(std::int64_t{clusters}, std::int64_t{multiprocessors()})));
    launch_early(name, inner_kernel<T, Part>, grid, InnerMemory<T>::kThreads,
                 InnerMemory<T>::kBytes, stream, args);
  };
  if (call.inputs.q.dtype == DType::bf16)
    launch(Bf16{});
  else
    launch(F16{});
}

}  // namespace coterie::cuda
