// SPDX-License-Identifier: MIT
// First stage of the backward pass (clustered_bwd.h): e_i of every query, and sums of g_i and e_i
// over the units. Weights over the top keys are recomputed from the saved lse. The causal form
// needs e_i only.
#include "cuda/device/await.cuh"
#include "cuda/device/unit_block.cuh"
#include "cuda/launch.h"

namespace coterie::cuda {
namespace {

// Column sums of a tile over its first rows: thread t holds columns 2 (t % pairs) and the next of
// every `groups`-th row.
template <class T, int kWidth, int kThreads>
struct ColumnSums {
  static constexpr int kPairs = kWidth / 2, kGroups = kThreads / kPairs;
  static_assert(kGroups > 0, "a thread for every pair of columns");
  float low = 0.0f, high = 0.0f;

  __device__ void add(const Tile<T, kWidth>& tile, int rows) {
    const int pair = threadIdx.x % kPairs, group = threadIdx.x / kPairs;
    if (group >= kGroups) return;
#pragma unroll 8
    for (int r = group; r < rows; r += kGroups) {
      if constexpr (sizeof(T) == 2) {
        union {
          std::uint32_t word;
          T element[2];
        } two;
        two.word = load_shared32(tile.address(r, 2 * pair));
        low += to_float(two.element[0]);
        high += to_float(two.element[1]);
      } else {
        std::uint32_t first, second;
        load_shared64(first, second, tile.address(r, 2 * pair));
        low += __uint_as_float(first);
        high += __uint_as_float(second);
      }
    }
  }
  // Adds up the groups in order, through shared memory for kThreads float2.
  __device__ void write(float* shared, float* to) const {
    float2* mine = reinterpret_cast<float2*>(shared);
    mine[threadIdx.x] = make_float2(low, high);
    __syncthreads();
    if (threadIdx.x < kPairs) {
      float2 sum = mine[threadIdx.x];
#pragma unroll
      for (int group = 1; group < kGroups; ++group) {
        sum.x += mine[group * kPairs + threadIdx.x].x;
        sum.y += mine[group * kPairs + threadIdx.x].y;
      }
      reinterpret_cast<float2*>(to)[threadIdx.x] = sum;
    }
    __syncthreads();
  }
};

// Sum over the block in a fixed order; valid in thread 0.
template <int kWarps>
__device__ __forceinline__ float block_sum(float value, float* shared) {
  for (int step = 16; step > 0; step /= 2) value += __shfl_down_sync(0xffffffffu, value, step);
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = value;
  __syncthreads();
  float sum = shared[0];
  for (int warp = 1; warp < kWarps; ++warp) sum += shared[warp];
  return sum;
}

// Blocks on a multiprocessor, as many as shared memory allows.
template <class T, int kWidth, int kWarps>
constexpr int kMinBlocks = sizeof(T) == 4 ? 1
                           : kWidth > 64  ? 8 / kWarps
                           : kWarps == 2  ? 10
                                          : 5;

template <class T, int kWidth, int kWarps>
__global__ void __launch_bounds__(32 * kWarps, kMinBlocks<T, kWidth, kWarps>)
    segment_gradient_kernel(const __grid_constant__ BackwardArgs<T> args) {
  await_previous();
  using S = UnitShape<T, kWidth, kWarps>;
  constexpr int kRowTile = S::kRowTile;
  extern __shared__ __align__(128) unsigned char memory[];
  const UnitBlock<T, kWidth, kWarps> block(args, memory);
  const QueryTile& unit = block.unit;
  if (unit.count == 0) return;
  const int topk = args.shape.topk, lane = threadIdx.x % 32;
  const bool top = topk > 0, sums = !args.shape.causal;
  const int keys = block.load_lists();
  ColumnSums<T, kWidth, S::kThreads> dout;
  float dmass = 0.0f;
#pragma unroll 1
  for (int slot = 0; slot < max(topk, 1); slot += kSlotTile) {
    if (top) block.load_slots(S::kSlots, slot);
    block.load_rows(0, top);
#pragma unroll 1
    for (int first = 0; first < unit.count; first += kRowTile) {
      std::int64_t row[2];
      bool there[2];
      float lse[2];
      int seen[2];
#pragma unroll
      for (int side = 0; side < 2; ++side) {
        const int r = first + threadIdx.x / 32 * 16 + 8 * side + lane / 4;
        there[side] = r < unit.count;
        const int member = there[side] ? block.indices()[r] : 0;
        row[side] = block.token + member;
        if (!top) continue;
        lse[side] = log2_lse(args.lists.lse, row[side], there[side]);
        seen[side] = block.visible(member, keys) - slot;
      }
      block.next_rows(first, top);
      if (sums && slot == 0) dout.add(block.rows(first, 1), min(unit.count - first, kRowTile));
      if (!top || !block.active(first)) continue;
      Accumulator p[2], gv[2];
      weights(p, gv, block.rows(first, 0), block.rows(first, 1), block.slots(S::kSlots, 0),
              block.slots(S::kSlots, 1), lse, seen, args.shape.scale * kLog2E);
#pragma unroll
      for (int side = 0; side < 2; ++side) {
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < 8; ++i)
          sum += p[i / 4][i / 2 % 2][2 * side + i % 2] * gv[i / 4][i / 2 % 2][2 * side + i % 2];
        sum = quad_sum(sum);
        if (lane % 4 != 0 || !there[side]) continue;
        float* inner = args.scratch.inner + row[side];
        *inner = slot == 0 ? sum : *inner + sum;
        dmass += sum;
      }
    }
    __syncthreads();  // before the tiles are loaded anew, or used for the sums below
  }
  if (!sums) return;
  const std::int64_t number = blockIdx.x;
  float* shared = reinterpret_cast<float*>(memory + S::kRows);
  dout.write(shared, args.scratch.unit_dout + number * args.shape.pitch);
  const float sum = block_sum<kWarps>(dmass, shared);
  if (threadIdx.x == 0) args.scratch.unit_dmass[number] = args.shape.mass_grad ? sum : 0.0f;
}

}  // namespace

template <class T>
void segment_gradients(const BackwardArgs<T>& args, cudaStream_t stream) {
  dispatch_head_dim("clustered", args.shape.pitch, [&](auto width) {
    with_warps(args, [&](auto warps) {
      constexpr int kWidth = decltype(width)::value, kWarps = decltype(warps)::value;
      using S = UnitShape<T, kWidth, kWarps>;
      launch_early("segment_gradient", segment_gradient_kernel<T, kWidth, kWarps>,
                   static_cast<unsigned>(args.shape.H * args.shape.units.total), S::kThreads,
                   S::kBytes, stream, args);
    });
  });
}

template void segment_gradients(const BackwardArgs<float>&, cudaStream_t);
template void segment_gradients(const BackwardArgs<__nv_bfloat16>&, cudaStream_t);
template void segment_gradients(const BackwardArgs<__half>&, cudaStream_t);

}  // namespace coterie::cuda
