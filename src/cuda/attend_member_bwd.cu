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
//
// Where the unit is the whole cluster, the block has all that the operands of the centroid kernels
// are made of (device/cluster_row.cuh). For clusters of several units that is a second launch.
#include "cuda/device/await.cuh"
#include "cuda/device/cluster_row.cuh"
#include "cuda/device/member_products.cuh"
#include "cuda/launch.h"
#include "cuda/tuning.h"

namespace coterie::cuda {
namespace {

// Mean size of clusters up to which blocks have two warps, and twice as many fit on a
// multiprocessor; others have four.
constexpr int kSmallCluster = 40;

// One row tile in a warp: 16 of its rows.
template <class T, int kWidth, int kWarps>
struct MemberTile {
  const MemberBlock<T, kWidth, kWarps>& block;
  int first;  // of the tile's rows

  // Writes dS of all slots and the weights of slot tile `own` to shared memory, both times the
  // mass; returns the sum of e of this lane's rows, once for the four lanes of a row. Up through
  // the tiles for e, and back for the derivatives.
  __device__ float differentiate(int num_keys, int own, float mass) const {
    const BackwardShape& shape = block.args.shape;
    const int tiles = (shape.topk + kSlotTile - 1) / kSlotTile;
    float inner[2] = {0.0f, 0.0f}, lse[2];
    int seen[2];
#pragma unroll
    for (int side = 0; side < 2; ++side) {
      const int r = static_cast<int>(threadIdx.x) / 32 * 16 + 8 * side + threadIdx.x % 32 / 4;
      const int member = block.numbers(first)[r];
      // +inf, which makes weights 0, for rows without keys.
      lse[side] = block.lse(first)[r] * kLog2e;
      if (member < 0 || lse[side] == -INFINITY) lse[side] = INFINITY;
      seen[side] = block.visible(member, num_keys);
    }
#pragma unroll 1
    for (int i = 0; i < 2 * tiles - 1; ++i) {
      const int tile = i < tiles ? i : 2 * tiles - 2 - i;
      const int left[2] = {seen[0] - tile * kSlotTile, seen[1] - tile * kSlotTile};
      Accumulator p[2], d[2];
      weights(p, d, block.rows(first, 0), block.rows(first, 1), block.slots(tile, 0),
              block.slots(tile, 1), static_cast<int>(threadIdx.x) / 32 * 16, 0, lse, left,
              shape.scale * kLog2e);
      if (i < tiles) {
#pragma unroll
        for (int side = 0; side < 2; ++side) {
          float sum[2] = {0.0f, 0.0f};
#pragma unroll
          for (int j = 0; j < 8; ++j)
            sum[j % 2] = fmaf(p[j / 4][j / 2 % 2][2 * side + j % 2],
                              d[j / 4][j / 2 % 2][2 * side + j % 2], sum[j % 2]);
          inner[side] += quad_sum(sum[0] + sum[1]);
        }
      }
      if (i < tiles - 1) continue;
#pragma unroll
      for (int j = 0; j < 16; ++j) {
        float& w = p[j / 8][j / 4 % 2][j % 4];
        float& x = d[j / 8][j / 4 % 2][j % 4];
        w *= mass;
        x = w * (x - inner[j / 2 % 2]);
      }
      if (tile == own) store_weights(block.weights(), p);
      store_weights(block.derivatives(tile), d);
    }
    __syncwarp();
    return threadIdx.x % 4 == 0 ? inner[0] + inner[1] : 0.0f;
  }

  // dq of the top keys, behind differentiate: through shared memory, so that rows are written in
  // pieces of 16 bytes.
  __device__ void write_queries() const {
    using Staging = Tile<T, kSlotTile>;
    constexpr int kStep = 32 / Staging::kChunks;  // rows at a time
    const Rows<T> dq = block.args.dq.rows(block.unit.span.batch, block.head, block.unit.span.begin);
    const int lane = threadIdx.x % 32, warp_row = static_cast<int>(threadIdx.x) / 32 * 16;
    const int r = warp_row + lane / Staging::kChunks, chunk = lane % Staging::kChunks;
    const int pitch = pitch_bytes(dq);
    const bool fast = in_vectors(dq);
    for_depths<T, kWidth / 32>([&](int part) {
      const int column = 32 * part;
      Accumulator sum[2];
      multiply_keys(sum, block, warp_row, column);
#pragma unroll
      for (int i = 0; i < 16; ++i) sum[i / 8][i / 4 % 2][i % 4] *= block.args.shape.scale;
      store_weights(block.staging(), sum);
      __syncwarp();
      const int at = column + chunk * Staging::kVector;
#pragma unroll
      for (int i = 0; i < 16; i += kStep) {
        const int member = block.numbers(first)[r + i];
        const uint4 words = load_shared16(block.staging().chunk(r + i, chunk));
        if (member < 0 || at >= dq.width) continue;
        if (fast)
          *reinterpret_cast<uint4*>(row_address(dq.data + at, member, pitch)) = words;
        else
          store_slowly(dq.row(member) + at, words, dq.width - at);
      }
      __syncwarp();
    });
  }
};

// Asks for a line of memory.
__device__ __forceinline__ void fetch_ahead(const void* from) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(from));
}

// Block (x, y, z) has unit x of head y, and writes the slots from z kSlotTile on; with z = 0 also
// dq and what comes of the sums. Without `units`, block x does what is left to do for the cluster
// of several units whose second one is the x-th of those that are not their cluster's first.
template <class T, int kWidth, int kWarps>
__global__ void __launch_bounds__(MemberShape<T, kWidth, kWarps>::kThreads,
                                  MemberShape<T, kWidth, kWarps>::kMinBlocks)
    member_gradient_kernel(const __grid_constant__ BackwardArgs<T> args, bool units) {
  await_writes();  // first: the kernels behind this one read what was there before it early
  release_next();
  using S = MemberShape<T, kWidth, kWarps>;
  extern __shared__ __align__(128) unsigned char memory[];
  const BackwardShape& shape = args.shape;
  const int head = static_cast<int>(blockIdx.y), own = static_cast<int>(blockIdx.z);
  const int clusters = shape.items * shape.clusters;
  const int number = static_cast<int>(blockIdx.x) + (units ? 0 : clusters);
  // What only needs the cluster's number is on its way while its members are looked up.
  const int line = static_cast<int>(threadIdx.x) * 32;
  if (units && line < shape.topk && shape.items == 1 && number < shape.clusters)
    fetch_ahead(args.lists.top_keys +
                static_cast<std::int64_t>(head * shape.clusters + number) * shape.topk + line);
  ClusterUnit unit = shape.units.find(shape.spans.q, args.lists.offsets, args.lists.labels,
                                      args.lists.order, head, number);
  const bool whole = unit.part == 0 && unit.size == unit.count;
  if (!units) {
    if (unit.count == 0 || unit.part != 1) return;
    unit.first -= kUnitRows;
    unit.count = 0;  // its members were there before
    unit.place = shape.units.row(unit.item, head, unit.cluster);
  }
  const int count = unit.count, topk = shape.topk;
  if (units && count == 0 && (!whole || shape.causal || own > 0)) return;
  const MemberBlock<T, kWidth, kWarps> block(args, memory, head, unit);
  UnitRows<T, kWidth, kWarps> rows(block);
  rows.find(0);
  block.load_slots();
  if (!shape.causal) block.load_cluster();
  rows.load(0);
  rows.find(S::kRowTile);
  const int num_keys = block.count_keys();
  const float mass = shape.causal || topk == 0 ? 1.0f : args.lists.mass[block.row];
  const float mean_lse = shape.causal ? 0.0f : args.lists.centroid_lse[block.row];
  SlotSums<T, kWidth, kWarps> slot_sums;
  slot_sums.clear();
  float dmass = 0.0f;
#pragma unroll 1
  for (int first = 0; first < count; first += S::kRowTile) {
    cp_async_wait<0>();
    __syncthreads();
    rows.load(first + S::kRowTile);
    rows.find(first + 2 * S::kRowTile);
    if (topk > 0 && block.active(first)) {
      const MemberTile<T, kWidth, kWarps> tile{block, first};
      dmass += tile.differentiate(num_keys, own, mass);
      if (args.dq.data && own == 0) tile.write_queries();
    }
    __syncthreads();
    slot_sums.add(block.derivatives(own), block.weights(), block.rows(first, 0),
                  block.rows(first, 1), min(S::kRowTile, count - first));
  }
  if (!shape.causal) {
    cp_async_wait<0>();  // where there was no row
    __syncthreads();
    if (units)
      store_sums(block, slot_sums, dmass, whole);
    else
      add_units(block);
    if (whole || !units) finish_cluster(block, slot_sums, num_keys, own, mass, mean_lse);
  }
  if (topk > 0 && unit.size > 0 && (args.dk.data || args.dv.data))
    write_slots(block, slot_sums, own, !units);
}

}  // namespace

template <class T>
void member_gradients(const BackwardArgs<T>& args, cudaStream_t stream) {
  const BackwardShape& shape = args.shape;
  const auto heads = static_cast<unsigned>(shape.H);
  const int tiles = max((shape.topk + kSlotTile - 1) / kSlotTile, 1);
  const auto launch = [&](auto width, auto warps) {
    constexpr int kWidth = decltype(width)::value, kWarps = decltype(warps)::value;
    using S = MemberShape<T, kWidth, kWarps>;
    const auto blocks = [&](int count, bool units) {
      launch_early("member_gradient", member_gradient_kernel<T, kWidth, kWarps>,
                   dim3(static_cast<unsigned>(count), heads, static_cast<unsigned>(tiles)),
                   S::kThreads, static_cast<std::size_t>(S::bytes(tiles)), stream, args, units);
    };
    blocks(shape.units.blocks(), true);
    if (shape.N > kUnitRows && !shape.causal) blocks(shape.units.more, false);
  };
  dispatch_head_dim("clustered", shape.pitch, [&](auto width) {
    constexpr bool kWide = sizeof(T) == 2 && decltype(width)::value > 64;
    if constexpr (sizeof(T) == 2 && !kWide)
      if (shape.N > kSmallCluster * shape.clusters)
        return launch(width, std::integral_constant<int, 4>{});
    constexpr int kFew = kWide ? 4 : 2;
    launch(width, std::integral_constant<int, kFew>{});
  });
}

template void member_gradients(const BackwardArgs<float>&, cudaStream_t);
template void member_gradients(const BackwardArgs<Bf16>&, cudaStream_t);
template void member_gradients(const BackwardArgs<F16>&, cudaStream_t);

}  // namespace coterie::cuda
