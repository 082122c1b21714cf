// SPDX-License-Identifier: MIT
// Backward pass of attention over each cluster's top keys (clustered_bwd.h): dq of the members,
// written to their places, and the unit's dk and dv of the top keys. Weights are recomputed from
// the saved lse.
#include "cuda/device/await.cuh"
#include "cuda/device/mean_gradient.cuh"
#include "cuda/device/store.cuh"
#include "cuda/device/unit_block.cuh"
#include "cuda/launch.h"

namespace coterie::cuda {
namespace {

// Behind the memory of a unit: weights and their derivatives, what the sums need in the end, and a
// second tile of keys and values.
template <class T, int kWidth, int kWarps>
struct TopkShape : UnitShape<T, kWidth, kWarps> {
  using Base = UnitShape<T, kWidth, kWarps>;
  // As many blocks on a multiprocessor as shared memory allows.
  static constexpr int kMinBlocks = sizeof(T) == 4 ? 1 : kWidth > 64 ? 8 / kWarps : 16 / kWarps;
  static constexpr int kWeightBytes = Base::kRowTile * kSlotTile * static_cast<int>(sizeof(T));
  static constexpr int kWeights = Base::kBytes, kAddends = kWeights + 2 * kWeightBytes;
  static constexpr int kTopkBytes = kAddends + (3 * kWidth + 2 * kSlotTile) * 4;
  static constexpr int bytes(bool one_tile) {
    return kTopkBytes + (one_tile ? 0 : 2 * Base::kSlotTileBytes);
  }
  static_assert(kTopkBytes % 128 == 0, "tiles are aligned");
};

// What is added to the sums of a unit: its share of the mean's gradient to dq, and to the slots of
// dk and dv what the centroid kernels got wrong, coefficient[slot] times a row of the cluster.
// Nothing in the causal form.
template <int kWidth>
struct Addends {
  float dmean[kWidth];
  float row[2][kWidth];             // mean, dout
  float coefficient[2][kSlotTile];  // of dk, dv
};

template <class T, int kWidth, int kWarps>
__device__ void load_addends(const UnitBlock<T, kWidth, kWarps>& block, Addends<kWidth>& to,
                             int slot) {
  const BackwardArgs<T>& args = block.args;
  const BackwardScratch<T>& scratch = args.scratch;
  const int topk = args.shape.topk;
  const bool tail = !args.shape.causal;
  for (int i = threadIdx.x; i < kWidth; i += 32 * kWarps) {
    to.dmean[i] = tail && args.dq.data
                      ? mean_gradient(args, block.unit.item, block.head, block.unit.cluster, i)
                      : 0.0f;
    to.row[0][i] = tail ? to_float(scratch.mean[block.row * kWidth + i]) : 0.0f;
    to.row[1][i] = tail ? to_float(scratch.dout[block.row * kWidth + i]) : 0.0f;
  }
  // The first unit of a cluster puts right what the centroid kernels did with its top keys.
  for (int i = threadIdx.x; i < 2 * kSlotTile; i += 32 * kWarps) {
    const bool there = tail && block.unit.leads && slot + i % kSlotTile < topk;
    const float* from = i < kSlotTile ? scratch.top_ds : scratch.top_weight;
    to.coefficient[i / kSlotTile][i % kSlotTile] =
        there ? from[block.row * topk + slot + i % kSlotTile] : 0.0f;
  }
}

// dk (the first half of the warps) or dv of kSlotTile slots, a share of the columns for each warp.
template <class T, int kWidth, int kWarps>
struct SlotSums {
  static constexpr int kShares = kWarps / 2;
  static constexpr int kColumns = kWidth / kShares / 16;  // in units of 16
  Accumulator acc[kColumns][2];

  __device__ void clear() {
#pragma unroll
    for (int d = 0; d < kColumns; ++d)
#pragma unroll
      for (int i = 0; i < 16; ++i) acc[d][i / 8][i / 4 % 2][i % 4] = 0.0f;
  }
  // Adds weightsᵀ times the first rows of a tile.
  __device__ void add(const Tile<T, kSlotTile>& sWeights, const Tile<T, kWidth>& sRows, int rows) {
    const int first = threadIdx.x / 32 % kShares * kColumns * 16;
#pragma unroll
    for (int r = 0; r < 16 * kWarps; r += 16) {
      if (r >= rows) break;
      FragmentA<T> a[2];
      load_a_transposed(a[0], sWeights, 0, r);
      load_a_transposed(a[1], sWeights, 16, r);
#pragma unroll
      for (int d = 0; d < kColumns; ++d) {
        FragmentB<T> b;
        load_b_transposed(b, sRows, first + 16 * d, r);
        multiply_add(acc[d][0], a[0], b);
        multiply_add(acc[d][1], a[1], b);
      }
    }
  }
  // Writes rows of `to`, (slots, 2, kWidth).
  __device__ void write(T* to, int slots, float factor, const Addends<kWidth>& addends) const {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, tensor = warp / kShares;
#pragma unroll
    for (int m = 0; m < 2; ++m)
#pragma unroll
      for (int side = 0; side < 2; ++side) {
        const int slot = 16 * m + 8 * side + lane / 4;
        if (slot >= slots) continue;
        const float coefficient = addends.coefficient[tensor][slot];
#pragma unroll
        for (int n = 0; n < 2 * kColumns; ++n) {
          const int column = warp % kShares * kColumns * 16 + 8 * n + lane % 4 * 2;
          const float2 row = *reinterpret_cast<const float2*>(addends.row[tensor] + column);
          store2(to + (2 * slot + tensor) * kWidth + column,
                 fmaf(acc[n / 2][m][n % 2][2 * side], factor, coefficient * row.x),
                 fmaf(acc[n / 2][m][n % 2][2 * side + 1], factor, coefficient * row.y));
        }
      }
  }
};

template <class T>
__device__ __forceinline__ void store_weights(const Tile<T, kSlotTile>& tile,
                                              const Accumulator (&acc)[2]) {
  const int lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16 + lane / 4;
#pragma unroll
  for (int n = 0; n < 4; ++n)
#pragma unroll
    for (int side = 0; side < 2; ++side) {
      const std::uint32_t to = tile.address(row + 8 * side, 8 * n + lane % 4 * 2);
      const float low = acc[n / 2][n % 2][2 * side], high = acc[n / 2][n % 2][2 * side + 1];
      if constexpr (sizeof(T) == 2)
        asm volatile("st.shared.b32 [%0], %1;" ::"r"(to), "r"(pack2<T>(low, high)) : "memory");
      else
        asm volatile("st.shared.v2.f32 [%0], {%1,%2};" ::"r"(to), "f"(low), "f"(high) : "memory");
    }
}

// Gradients of the warp's 16 members: products with the top keys, times a factor, and their share
// of the mean's. All columns, or kWidth at a time when there is one tile of slots.
template <class T, int kColumns>
struct QueryGradient {
  Accumulator acc[kColumns / 16];

  __device__ void clear() {
#pragma unroll
    for (int d = 0; d < kColumns / 16; ++d)
#pragma unroll
      for (int i = 0; i < 8; ++i) acc[d][i / 4][i % 4] = 0.0f;
  }
  template <int kWidth>
  __device__ void add(const FragmentA<T> (&ds)[2], const Tile<T, kWidth>& sK, int column) {
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int d = 0; d < kColumns / 16; ++d) {
        FragmentB<T> b;
        load_b_transposed(b, sK, column + 16 * d, 16 * n);
        multiply_add(acc[d], ds[n], b);
      }
  }
  __device__ void write(const Rows<T>& rows, const int (&index)[2], int column, float factor,
                        const float* dmean) {
#pragma unroll
    for (int d = 0; d < kColumns / 16; d += 2) {
      Accumulator pair[2];
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        const float2 mean =
            *reinterpret_cast<const float2*>(dmean + column + 16 * d + 8 * n + threadIdx.x % 4 * 2);
#pragma unroll
        for (int i = 0; i < 4; ++i)
          pair[n / 2][n % 2][i] = fmaf(acc[d + n / 2][n % 2][i], factor, i % 2 ? mean.y : mean.x);
      }
#pragma unroll
      for (int side = 0; side < 2; ++side)
        store_columns(rows, index[side], index[side] >= 0, column + 16 * d, pair, side);
    }
  }
};

// Block y takes slots from y kSlotTile on; block 0 also writes dq, for which it visits all slots.
// kOneTile: there are at most kSlotTile of them.
template <class T, int kWidth, int kWarps, bool kOneTile>
__global__ void __launch_bounds__(32 * kWarps,
                                  kOneTile ? TopkShape<T, kWidth, kWarps>::kMinBlocks : 1)
    topk_gradient_kernel(const __grid_constant__ BackwardArgs<T> args) {
  await_previous();
  using S = TopkShape<T, kWidth, kWarps>;
  constexpr int kRowTile = S::kRowTile;
  extern __shared__ __align__(128) unsigned char memory[];
  const UnitBlock<T, kWidth, kWarps> block(args, memory);
  const QueryTile& unit = block.unit;
  if (unit.count == 0) return;
  const int topk = args.shape.topk, lane = threadIdx.x % 32, slot = blockIdx.y * kSlotTile;
  const bool keys = args.dk.data || args.dv.data, queries = args.dq.data && slot == 0;
  if (!keys && !queries) return;
  const Tile<T, kSlotTile> sP{block.base + S::kWeights};
  const Tile<T, kSlotTile> sD{block.base + S::kWeights + S::kWeightBytes};
  const float scale = args.shape.scale * kLog2E;
  const float mass = args.shape.causal ? 1.0f : args.lists.mass[block.row];
  Addends<kWidth>& addends = *reinterpret_cast<Addends<kWidth>*>(memory + S::kAddends);
  const int num_keys = block.load_lists();
  block.load_slots(S::kSlots, slot);
  block.load_rows(0, true);
  SlotSums<T, kWidth, kWarps> sums;
  sums.clear();
#pragma unroll 1
  for (int first = 0; first < unit.count; first += kRowTile) {
    const Tile<T, kWidth> sQ = block.rows(first, 0), sG = block.rows(first, 1);
    const bool active = block.active(first);
    int index[2], seen[2];
    float lse[2], inner[2];
#pragma unroll
    for (int side = 0; side < 2; ++side) {
      const int r = first + threadIdx.x / 32 * 16 + 8 * side + lane / 4;
      index[side] = r < unit.count ? block.indices()[r] : -1;
      const std::int64_t row = block.token + max(index[side], 0);
      lse[side] = log2_lse(args.lists.lse, row, index[side] >= 0);
      inner[side] = index[side] >= 0 ? args.scratch.inner[row] : 0.0f;
      seen[side] = block.visible(index[side], num_keys);
    }
    if (first == 0) load_addends(block, addends, slot);
    block.next_rows(first, true);
    // ds of the slots from `begin` on, in shared memory at `offset`.
    const auto differentiate = [&](int offset, int begin, FragmentA<T>(&ds)[2]) {
      const int left[2] = {seen[0] - begin, seen[1] - begin};
      Accumulator p[2], d[2];
      weights(p, d, sQ, sG, block.slots(offset, 0), block.slots(offset, 1), lse, left, scale);
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        float& x = d[i / 8][i / 4 % 2][i % 4];
        x = p[i / 8][i / 4 % 2][i % 4] * (x - inner[i / 2 % 2]);
      }
      if (keys && offset == S::kSlots) {
        store_weights(sP, p);
        store_weights(sD, d);
      }
      to_fragment(ds[0], d[0]);
      to_fragment(ds[1], d[1]);
    };
    const Rows<T> rows = args.dq.rows(unit.span.batch, block.head, unit.span.begin);
    const float factor = args.shape.scale * mass;
    FragmentA<T> ds[2];
    if constexpr (kOneTile) {
      if (active) differentiate(S::kSlots, 0, ds);
      if (active && queries) {
#pragma unroll
        for (int column = 0; column < kWidth; column += 32) {
          QueryGradient<T, 32> dq;
          dq.clear();
          dq.add(ds, block.slots(S::kSlots, 0), column);
          dq.write(rows, index, column, factor, addends.dmean);
        }
      }
    } else {
      QueryGradient<T, kWidth> dq;
      dq.clear();
#pragma unroll 1
      for (int other = slot; other == slot || (queries && other < topk); other += kSlotTile) {
        const int offset = other == slot ? S::kSlots : S::kTopkBytes;
        if (other != slot) {
          __syncthreads();
          block.load_slots(offset, other);
          cp_async_commit();
          cp_async_wait<0>();
          __syncthreads();
        }
        if (!active) continue;
        differentiate(offset, other, ds);
        if (queries) dq.add(ds, block.slots(offset, 0), 0);
      }
      if (active && queries) dq.write(rows, index, 0, factor, addends.dmean);
    }
    if (!keys) continue;
    __syncthreads();
    const bool dk = threadIdx.x < S::kThreads / 2;
    sums.add(dk ? sD : sP, dk ? sQ : sG, block.tile_rows(first));
  }
  if (!keys) return;
  const std::int64_t to = (static_cast<std::int64_t>(blockIdx.x) * topk + slot) * 2 * kWidth;
  sums.write(args.scratch.slots + to, topk - slot,
             threadIdx.x < S::kThreads / 2 ? args.shape.scale * mass : mass, addends);
}

}  // namespace

template <class T>
void topk_gradients(const BackwardArgs<T>& args, cudaStream_t stream) {
  const int tiles = (args.shape.topk + kSlotTile - 1) / kSlotTile;
  const dim3 grid(static_cast<unsigned>(args.shape.H * args.shape.units.total),
                  static_cast<unsigned>(tiles));
  dispatch_head_dim("i-clustered", args.shape.pitch, [&](auto width) {
    constexpr int kWidth = decltype(width)::value;
    const auto launch = [&](auto* kernel, int threads, int bytes) {
      launch_early("topk_gradient", kernel, grid, threads, static_cast<std::size_t>(bytes), stream,
                   args);
    };
    if constexpr (sizeof(T) == 2) {  // fp32 makes do with the general one
      if (tiles == 1)
        return with_warps(args, [&](auto warps) {
          using S = TopkShape<T, kWidth, decltype(warps)::value>;
          launch(&topk_gradient_kernel<T, kWidth, S::kWarps, true>, S::kThreads, S::bytes(true));
        });
    }
    using S = TopkShape<T, kWidth, 4>;
    launch(&topk_gradient_kernel<T, kWidth, 4, false>, S::kThreads, S::bytes(false));
  });
}

template void topk_gradients(const BackwardArgs<float>&, cudaStream_t);
template void topk_gradients(const BackwardArgs<__nv_bfloat16>&, cudaStream_t);
template void topk_gradients(const BackwardArgs<__half>&, cudaStream_t);

}  // namespace coterie::cuda
