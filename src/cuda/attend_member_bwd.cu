// SPDX-License-Identifier: MIT
// Backward pass over the members of the clusters and their top keys (clustered_bwd.h): the top
// keys' part of dq, dk and dv of the top keys, and the sums of g_i and e_i. Weights are recomputed
// from the saved lse.
//
// A block takes a unit, up to kUnitRows members of one cluster gathered in sorted order, a row
// tile at a time, with all top keys of the cluster in shared memory:
//
//   row tile x 32 slots: P = exp2(Q Kᵀ), dP = G Vᵀ  ->  e of a row  ->  dS = P (dP - e), to shared
//   dq rows = dS K, at their places      dk slots += dSᵀ Q, dv slots += Pᵀ G      sum of G's rows
#include <algorithm>

#include "cuda/device/early.cuh"
#include "cuda/device/member_block.cuh"
#include "cuda/device/store.cuh"
#include "cuda/launch.h"
#include "cuda/tuning.h"

namespace coterie::cuda {
namespace {

// Mean size of clusters up to which units are taken by blocks of two warps that load nothing ahead,
// so that more of them fit on a multiprocessor; others have four.
constexpr int kSmallUnit = 96;

template <class T>
__device__ __forceinline__ FragmentA<T> all_ones() {
  FragmentA<T> ones;
#pragma unroll
  for (std::uint32_t& word : ones.r)
    if constexpr (sizeof(T) == 2)
      word = pack2<T>(1.0f, 1.0f);
    else
      word = __float_as_uint(1.0f);
  return ones;
}

// dk and dv of kSlotTile slots and the sum of the rows of G (as a product with ones), a share of
// the columns for each warp.
template <class T, int kWidth, int kWarps>
struct SlotSums {
  static constexpr int kColumns = kWidth / kWarps / 16;  // in units of 16
  Accumulator dk[kColumns][2], dv[kColumns][2], rows_sum[kColumns];

  __device__ static int first() { return static_cast<int>(threadIdx.x) / 32 * kColumns; }
  __device__ void clear() {
#pragma unroll
    for (int d = 0; d < kColumns; ++d)
#pragma unroll
      for (int i = 0; i < 8; ++i)
        dk[d][0][i / 4][i % 4] = dk[d][1][i / 4][i % 4] = dv[d][0][i / 4][i % 4] =
            dv[d][1][i / 4][i % 4] = rows_sum[d][i / 4][i % 4] = 0.0f;
  }
  // Adds dSᵀ Q, Pᵀ G and the sum of the first rows of the tiles.
  __device__ void add(const Tile<T, kSlotTile>& sD, const Tile<T, kSlotTile>& sP,
                      const Tile<T, kWidth>& sQ, const Tile<T, kWidth>& sG, int rows) {
    const FragmentA<T> ones = all_ones<T>();
#pragma unroll
    for (int r = 0; r < 16 * kWarps; r += 16) {
      if (r >= rows) break;
      FragmentA<T> a[2];
      FragmentB<T> b;
      load_a_transposed(a[0], sD, 0, r);
      load_a_transposed(a[1], sD, 16, r);
#pragma unroll
      for (int d = 0; d < kColumns; ++d) {
        load_b_transposed(b, sQ, 16 * (first() + d), r);
        multiply_add(dk[d][0], a[0], b);
        multiply_add(dk[d][1], a[1], b);
      }
      load_a_transposed(a[0], sP, 0, r);
      load_a_transposed(a[1], sP, 16, r);
#pragma unroll
      for (int d = 0; d < kColumns; ++d) {
        load_b_transposed(b, sG, 16 * (first() + d), r);
        multiply_add(dv[d][0], a[0], b);
        multiply_add(dv[d][1], a[1], b);
        multiply_add(rows_sum[d], ones, b);
      }
    }
  }
  // Writes rows of scratch.slots.
  __device__ void write(T* to, int slots, float dk_factor, float dv_factor) const {
    const Rows<T> rows{to, 2 * kWidth, 2 * kWidth, true};
#pragma unroll
    for (int m = 0; m < 2; ++m)
#pragma unroll
      for (int d = 0; d < kColumns; ++d) {
        Accumulator pair[2];
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          pair[0][i / 4][i % 4] = dk[d][m][i / 4][i % 4] * dk_factor;
          pair[1][i / 4][i % 4] = dv[d][m][i / 4][i % 4] * dv_factor;
        }
#pragma unroll
        for (int side = 0; side < 2; ++side) {
          const int slot = 16 * m + 8 * side + static_cast<int>(threadIdx.x) % 32 / 4;
          store_columns(rows, slot, slot < slots, 32 * (first() + d), pair, side);
        }
      }
  }
  __device__ void write_rows_sum(float* to) const {
    const int lane = threadIdx.x % 32;
    if (lane >= 4) return;  // all rows of the product are the same
#pragma unroll
    for (int n = 0; n < 2 * kColumns; ++n)
      store2(to + 16 * first() + 8 * n + 2 * lane, rows_sum[n / 2][n % 2][0],
             rows_sum[n / 2][n % 2][1]);
  }
};

// Block y writes the slots from y kSlotTile on; block 0 also dq and the sums.
template <class T, int kWidth, int kWarps>
__global__ void __launch_bounds__(32 * kWarps, MemberShape<T, kWidth, kWarps>::kMinBlocks)
    member_gradient_kernel(const __grid_constant__ BackwardArgs<T> args) {
  await_writes();  // first: the kernels behind this one read what was there before it early
  release_next();
  using S = MemberShape<T, kWidth, kWarps>;
  constexpr int kRowTile = S::kRowTile;
  extern __shared__ __align__(128) unsigned char memory[];
  const MemberBlock<T, kWidth, kWarps> block(args, memory);
  const QueryTile& unit = block.unit;
  if (unit.count == 0) return;
  const int topk = args.shape.topk, lane = threadIdx.x % 32, own = static_cast<int>(blockIdx.y);
  const int tiles = (topk + kSlotTile - 1) / kSlotTile;
  const bool keys = topk > 0 && (args.dk.data || args.dv.data), sums = !args.shape.causal;
  const bool queries = topk > 0 && args.dq.data && own == 0;
  const Rows<const T> q = args.q.rows(unit.span.batch, block.head, unit.span.begin);
  const Rows<const T> g = args.g.rows(unit.span.batch, block.head, unit.span.begin);
  Gather<T, kWidth, kRowTile, S::kThreads> gather;
  gather.find(block.order, 0, unit.count);
  for (int tile = 0; tile < tiles; ++tile) block.load_slots(tile);
  const auto load_rows = [&](int first) {
    if (topk > 0) gather.load(block.rows(first, 0), q);
    gather.load(block.rows(first, 1), g);
    cp_async_commit();
  };
  load_rows(0);
  const int num_keys = block.count_keys();
  const float mass = !sums || topk == 0 ? 1.0f : args.lists.mass[block.row];
  const float scale = args.shape.scale * kLog2E;
  SlotSums<T, kWidth, kWarps> slot_sums;
  slot_sums.clear();
  float dmass = 0.0f;
#pragma unroll 1
  for (int first = 0; first < unit.count; first += kRowTile) {
    const Tile<T, kWidth> sQ = block.rows(first, 0), sG = block.rows(first, 1);
    const int next = first + kRowTile;
    int index[2], seen[2];
    float lse[2];
#pragma unroll
    for (int side = 0; side < 2; ++side) {
      const int r = first + threadIdx.x / 32 * 16 + 8 * side + lane / 4;
      index[side] = r < unit.count ? block.order[r] : -1;
      lse[side] =
          topk > 0 ? log2_lse(args.lists.lse, block.token + max(index[side], 0), index[side] >= 0)
                   : INFINITY;
    }
    if (S::kStages == 1 && first > 0) {
      __syncthreads();
      load_rows(first);
    }
    if (next < unit.count) gather.find(block.order, next, unit.count);
    cp_async_wait<0>();
    __syncthreads();
    if (S::kStages == 2 && next < unit.count) load_rows(next);
    const int rows = min(kRowTile, (unit.count - first + 15) / 16 * 16);
    if (topk > 0 && block.active(first)) {
      float inner[2] = {0.0f, 0.0f};
#pragma unroll
      for (int side = 0; side < 2; ++side) seen[side] = block.visible(index[side], num_keys);
        // Up through the tiles for e, and back for the derivatives.
#pragma unroll 1
      for (int i = 0; i < 2 * tiles - 1; ++i) {
        const int tile = i < tiles ? i : 2 * tiles - 2 - i;
        const int left[2] = {seen[0] - tile * kSlotTile, seen[1] - tile * kSlotTile};
        Accumulator p[2], d[2];
        weights(p, d, sQ, sG, block.slots(tile, 0), block.slots(tile, 1), lse, left, scale);
        if (i < tiles) {
#pragma unroll
          for (int side = 0; side < 2; ++side) {
            float sum = 0.0f;
#pragma unroll
            for (int j = 0; j < 8; ++j)
              sum += p[j / 4][j / 2 % 2][2 * side + j % 2] * d[j / 4][j / 2 % 2][2 * side + j % 2];
            inner[side] += quad_sum(sum);
          }
        }
        if (i < tiles - 1) continue;
#pragma unroll
        for (int j = 0; j < 16; ++j) {
          float& x = d[j / 8][j / 4 % 2][j % 4];
          x = p[j / 8][j / 4 % 2][j % 4] * (x - inner[j / 2 % 2]);
        }
        if (tile == own) store_weights(block.weights(), p);
        store_weights(block.derivatives(tile), d);
      }
      if (lane % 4 == 0) dmass += inner[0] + inner[1];
      __syncwarp();
      if (queries) {
        const Rows<T> to = args.dq.rows(unit.span.batch, block.head, unit.span.begin);
#pragma unroll
        for (int column = 0; column < kWidth; column += 32) {
          Accumulator dq[2] = {};
#pragma unroll 1
          for (int tile = 0; tile < tiles; ++tile)
#pragma unroll
            for (int n = 0; n < kSlotTile; n += 16) {
              FragmentA<T> ds;
              load_a(ds, block.derivatives(tile), threadIdx.x / 32 * 16, n);
#pragma unroll
              for (int d = 0; d < 2; ++d) {
                FragmentB<T> b;
                load_b_transposed(b, block.slots(tile, 0), column + 16 * d, n);
                multiply_add(dq[d], ds, b);
              }
            }
#pragma unroll
          for (int i = 0; i < 16; ++i) dq[i / 8][i / 4 % 2][i % 4] *= args.shape.scale * mass;
#pragma unroll
          for (int side = 0; side < 2; ++side)
            store_columns(to, index[side], index[side] >= 0, column, dq, side);
        }
      }
    }
    __syncthreads();
    slot_sums.add(block.derivatives(own), block.weights(), sQ, sG, rows);
  }
  if (keys) {
    const std::int64_t slot = static_cast<std::int64_t>(blockIdx.x) * topk + own * kSlotTile;
    slot_sums.write(args.scratch.slots + slot * 2 * kWidth, topk - own * kSlotTile,
                    args.shape.scale * mass, mass);
  }
  if (!sums || own > 0) return;
  slot_sums.write_rows_sum(args.scratch.unit_dout + static_cast<std::int64_t>(blockIdx.x) * kWidth);
  float* masses = reinterpret_cast<float*>(block.keys());
  for (int step = 16; step > 0; step /= 2) dmass += __shfl_down_sync(~0u, dmass, step);
  if (lane == 0) masses[threadIdx.x / 32] = dmass;
  __syncthreads();
  if (threadIdx.x > 0) return;
  for (int warp = 1; warp < kWarps; ++warp) dmass += masses[warp];
  args.scratch.unit_dmass[blockIdx.x] = args.shape.mass_grad ? dmass : 0.0f;
}

}  // namespace

template <class T>
void member_gradients(const BackwardArgs<T>& args, cudaStream_t stream) {
  const BackwardShape& shape = args.shape;
  const int tiles = (shape.topk + kSlotTile - 1) / kSlotTile;
  const dim3 grid(static_cast<unsigned>(shape.H * shape.units.total),
                  static_cast<unsigned>(std::max(tiles, 1)));
  dispatch_wide_dim("clustered", shape.pitch, [&](auto width) {
    const auto launch = [&](auto warps) {
      constexpr int kWidth = decltype(width)::value, kWarps = decltype(warps)::value;
      using S = MemberShape<T, kWidth, kWarps>;
      launch_early("member_gradient", member_gradient_kernel<T, kWidth, kWarps>, grid, S::kThreads,
                   static_cast<std::size_t>(S::bytes(std::max(tiles, 1))), stream, args);
    };
    if constexpr (sizeof(T) == 2)
      if (shape.N > kSmallUnit * shape.clusters) return launch(std::integral_constant<int, 4>{});
    launch(std::integral_constant<int, 2>{});
  });
}

template void member_gradients(const BackwardArgs<float>&, cudaStream_t);
template void member_gradients(const BackwardArgs<__nv_bfloat16>&, cudaStream_t);
template void member_gradients(const BackwardArgs<__half>&, cudaStream_t);

}  // namespace coterie::cuda
