// SPDX-License-Identifier: MIT
// Backward pass of attention over each cluster's top keys (clustered_bwd.h). A block takes a unit:
// up to kUnitRows members of one cluster, gathered in sorted order, against kSlotTile of its top
// keys, which stay in shared memory. Weights are recomputed from the saved lse, in two kernels:
//   segment_gradient_kernel: e_i, and sums of g_i and e_i over the unit
//   topk_gradient_kernel: dq_i, written to its place, and the unit's dk and dv of the top keys
#include "cuda/clustered_bwd.h"
#include "cuda/device/load.cuh"
#include "cuda/device/mma.cuh"
#include "cuda/device/softmax.cuh"
#include "cuda/device/store.cuh"
#include "cuda/launch.h"
#include "cuda/tuning.h"

namespace coterie::cuda {
namespace {

constexpr int kWarps = 4, kThreads = 32 * kWarps;
constexpr int kRowTile = 16 * kWarps;

template <class T, int kWidth>
struct Shape {
  // Memory-bound: as many blocks on a multiprocessor as shared memory allows.
  static constexpr int kMinBlocks = sizeof(T) == 2 ? (kWidth <= 64 ? 4 : 2) : 1;
  static constexpr int kRowTileBytes = kRowTile * kWidth * static_cast<int>(sizeof(T));
  static constexpr int kSlotTileBytes = kSlotTile * kWidth * static_cast<int>(sizeof(T));
  static constexpr int kWeightBytes = kRowTile * kSlotTile * static_cast<int>(sizeof(T));
  // Members and top keys, two stages of Q and dO rows, one tile of keys and values.
  static constexpr int kListBytes = (kUnitRows + kMaxTopKeys) * 4;
  static constexpr int kStages = kListBytes, kSlots = kStages + 4 * kRowTileBytes;
  static constexpr int kSegmentBytes = kSlots + 2 * kSlotTileBytes;
  // Then weights and their derivatives, what the sums need in the end, and a second tile of keys
  // and values.
  static constexpr int kWeights = kSegmentBytes, kAddends = kWeights + 2 * kWeightBytes;
  static constexpr int kTopkBytes = kAddends + (3 * kWidth + 2 * kSlotTile) * 4;
  static constexpr int kOthers = kTopkBytes, kLongTopkBytes = kOthers + 2 * kSlotTileBytes;
  static_assert(kTopkBytes % 128 == 0, "tiles are aligned");
};

// What is added to the sums of a unit: its share of the mean's gradient to dq, and to the slots of
// dk and dv what the centroid kernels got wrong, coefficient[slot] times a row of the cluster.
template <int kWidth>
struct Addends {
  float dmean[kWidth];
  float row[2][kWidth];             // mean, dout
  float coefficient[2][kSlotTile];  // of dk, dv
};

// What a block works on.
template <class T, int kWidth>
struct UnitBlock {
  using S = Shape<T, kWidth>;
  const BackwardArgs<T>& args;
  unsigned char* memory;
  std::uint32_t base;
  Unit unit;
  int head;
  ItemSpan q_span, k_span;
  std::int64_t row;    // of the cluster
  std::int64_t token;  // of the item's first query in (B, H, N) tensors
  int begin;           // of the cluster in the sorted order
  const std::int32_t* top_keys;

  __device__ UnitBlock(const BackwardArgs<T>& a, unsigned char* m)
      : args(a), memory(m), base(shared_address(m)) {
    const BackwardShape& shape = args.shape;
    unit = args.scratch.units[blockIdx.x];
    if (unit.count == 0) return;
    head = blockIdx.x / shape.units;
    q_span = shape.spans.q.span(unit.item);
    k_span = shape.spans.k.span(unit.item);
    const std::int64_t problem = static_cast<std::int64_t>(unit.item) * shape.H + head;
    row = problem * shape.clusters + unit.cluster;
    token = (static_cast<std::int64_t>(q_span.batch) * shape.H + head) * shape.N + q_span.begin;
    begin = args.lists.offsets[problem * (shape.clusters + 1) + unit.cluster];
    top_keys = args.lists.top_keys + row * shape.topk;
  }

  __device__ std::int32_t* indices() const { return reinterpret_cast<std::int32_t*>(memory); }
  __device__ std::int32_t* keys() const { return indices() + kUnitRows; }
  __device__ Tile<T, kWidth> rows(int stage, int tensor) const {
    return {base + S::kStages + (2 * stage + tensor) * S::kRowTileBytes};
  }
  __device__ Tile<T, kWidth> slots(int offset, int tensor) const {
    return {base + offset + tensor * S::kSlotTileBytes};
  }

  // Fills indices() and keys(), and tells how many top keys there are. Synchronises the threads.
  __device__ int load_lists() const {
    static_assert(kMaxTopKeys <= kThreads, "a thread per slot");
    const int slot = static_cast<int>(threadIdx.x);
    const int key = slot < args.shape.topk ? top_keys[slot] : -1;
    const std::int32_t* order = args.lists.order + token + unit.first;
    for (int i = slot; i < unit.count; i += kThreads) indices()[i] = order[i];
    if (slot < kMaxTopKeys) keys()[slot] = key;
    return __syncthreads_count(key >= 0);
  }
  __device__ void load_rows(int first, bool queries) const {
    const int stage = first / kRowTile % 2, count = unit.count - first;
    if (queries)
      load_tile<kRowTile, kThreads>(rows(stage, 0), args.q.rows(q_span.batch, head, q_span.begin),
                                    0, count, indices() + first);
    load_tile<kRowTile, kThreads>(rows(stage, 1), args.g.rows(q_span.batch, head, q_span.begin), 0,
                                  count, indices() + first);
    cp_async_commit();
  }
  // Keys and values of slots [slot, slot + kSlotTile).
  __device__ void load_slots(int offset, int slot) const {
    const int key_head = head / args.shape.group, count = args.shape.topk - slot;
    load_tile<kSlotTile, kThreads>(slots(offset, 0),
                                   args.k.rows(k_span.batch, key_head, k_span.begin), 0, count,
                                   keys() + slot);
    load_tile<kSlotTile, kThreads>(slots(offset, 1),
                                   args.v.rows(k_span.batch, key_head, k_span.begin), 0, count,
                                   keys() + slot);
  }
  __device__ void load_addends(Addends<kWidth>& to, int slot) const {
    const BackwardScratch<T>& scratch = args.scratch;
    for (int i = threadIdx.x; i < kWidth; i += kThreads) {
      if (args.dq.data) to.dmean[i] = scratch.dmean[row * kWidth + i];
      to.row[0][i] = to_float(scratch.mean[row * kWidth + i]);
      to.row[1][i] = to_float(scratch.dout[row * kWidth + i]);
    }
    const int i = static_cast<int>(threadIdx.x);
    if (i >= 2 * kSlotTile) return;
    // The first unit of a cluster puts right what the centroid kernels did with its top keys.
    const bool there = unit.first == begin && slot + i % kSlotTile < args.shape.topk;
    const float* from = i < kSlotTile ? scratch.top_ds : scratch.top_weight;
    to.coefficient[i / kSlotTile][i % kSlotTile] =
        there ? from[row * args.shape.topk + slot + i % kSlotTile] : 0.0f;
  }
};

// lse of this lane's two rows in base 2; +inf, which makes weights 0, for rows without keys.
__device__ __forceinline__ float log2_lse(const float* lse, std::int64_t row, bool there) {
  const float value = there ? lse[row] * kLog2E : INFINITY;
  return value == -INFINITY ? INFINITY : value;
}

// p and g . v of the warp's 16 rows over kSlotTile slots, the first `keys` of which hold keys.
template <class T, int kWidth>
__device__ __forceinline__ void weights(Accumulator (&p)[2], Accumulator (&gv)[2],
                                        const Tile<T, kWidth>& sQ, const Tile<T, kWidth>& sG,
                                        const Tile<T, kWidth>& sK, const Tile<T, kWidth>& sV,
                                        const float (&lse)[2], int keys, float scale) {
  const int row = threadIdx.x / 32 * 16;
#pragma unroll
  for (int i = 0; i < 16; ++i) p[i / 8][i / 4 % 2][i % 4] = gv[i / 8][i / 4 % 2][i % 4] = 0.0f;
#pragma unroll
  for (int d = 0; d < kWidth; d += 16) {
    FragmentA<T> q, g;
    load_a(q, sQ, row, d);
    load_a(g, sG, row, d);
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      FragmentB<T> b;
      load_b(b, sK, 16 * n, d);
      multiply_add(p[n], q, b);
      load_b(b, sV, 16 * n, d);
      multiply_add(gv[n], g, b);
    }
  }
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    float& x = p[i / 8][i / 4 % 2][i % 4];
    const int column = i / 4 * 8 + static_cast<int>(threadIdx.x) % 4 * 2 + i % 2;
    x = column < keys ? exp2_approximate(fmaf(x, scale, -lse[i / 2 % 2])) : 0.0f;
  }
}

// Column sums of a tile over its rows: thread t holds columns 2 (t % pairs) and the next of every
// `groups`-th row.
template <class T, int kWidth>
struct ColumnSums {
  static constexpr int kPairs = kWidth / 2, kGroups = kThreads / kPairs;
  float low = 0.0f, high = 0.0f;

  __device__ void add(const Tile<T, kWidth>& tile) {
    const int pair = threadIdx.x % kPairs, group = threadIdx.x / kPairs;
    if (group >= kGroups) return;
#pragma unroll 8
    for (int r = group; r < kRowTile; r += kGroups) {
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
__device__ __forceinline__ float block_sum(float value, float* shared) {
  for (int step = 16; step > 0; step /= 2) value += __shfl_down_sync(0xffffffffu, value, step);
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = value;
  __syncthreads();
  float sum = shared[0];
  for (int warp = 1; warp < kWarps; ++warp) sum += shared[warp];
  return sum;
}

template <class T, int kWidth>
__global__ void __launch_bounds__(kThreads)
    segment_gradient_kernel(const __grid_constant__ BackwardArgs<T> args) {
  using S = Shape<T, kWidth>;
  extern __shared__ __align__(128) unsigned char memory[];
  const UnitBlock<T, kWidth> block(args, memory);
  const Unit& unit = block.unit;
  if (unit.count == 0) return;
  const int topk = args.shape.topk, lane = threadIdx.x % 32;
  const bool top = topk > 0;
  const int keys = block.load_lists();
  ColumnSums<T, kWidth> dout;
  float dmass = 0.0f;
#pragma unroll 1
  for (int slot = 0; slot < max(topk, 1); slot += kSlotTile) {
    if (top) block.load_slots(S::kSlots, slot);
    block.load_rows(0, top);
#pragma unroll 1
    for (int first = 0; first < unit.count; first += kRowTile) {
      const int stage = first / kRowTile % 2;
      std::int64_t row[2];
      bool there[2];
      float lse[2];
#pragma unroll
      for (int side = 0; side < 2; ++side) {
        const int r = first + threadIdx.x / 32 * 16 + 8 * side + lane / 4;
        there[side] = r < unit.count;
        row[side] = block.token + (there[side] ? block.indices()[r] : 0);
        if (top) lse[side] = log2_lse(args.lists.lse, row[side], there[side]);
      }
      cp_async_wait<0>();
      __syncthreads();
      if (first + kRowTile < unit.count) block.load_rows(first + kRowTile, top);
      if (slot == 0) dout.add(block.rows(stage, 1));
      if (!top) continue;
      Accumulator p[2], gv[2];
      weights(p, gv, block.rows(stage, 0), block.rows(stage, 1), block.slots(S::kSlots, 0),
              block.slots(S::kSlots, 1), lse, keys - slot, args.shape.scale * kLog2E);
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
  const std::int64_t number = blockIdx.x;
  float* shared = reinterpret_cast<float*>(memory + S::kStages);
  dout.write(shared, args.scratch.unit_dout + number * args.shape.pitch);
  const float sum = block_sum(dmass, shared);
  if (threadIdx.x == 0) args.scratch.unit_dmass[number] = args.shape.mass_grad ? sum : 0.0f;
}

// dk (warps 0, 1) or dv (2, 3) of kSlotTile slots, one half of the columns a warp.
template <class T, int kWidth>
struct SlotSums {
  static constexpr int kColumns = kWidth / 32;  // in units of 16
  Accumulator acc[kColumns][2];

  __device__ void clear() {
#pragma unroll
    for (int d = 0; d < kColumns; ++d)
#pragma unroll
      for (int i = 0; i < 16; ++i) acc[d][i / 8][i / 4 % 2][i % 4] = 0.0f;
  }
  // Adds weightsᵀ times rows.
  __device__ void add(const Tile<T, kSlotTile>& sWeights, const Tile<T, kWidth>& sRows) {
    const int half = threadIdx.x / 32 % 2;
#pragma unroll
    for (int r = 0; r < kRowTile; r += 16) {
      FragmentA<T> a[2];
      load_a_transposed(a[0], sWeights, 0, r);
      load_a_transposed(a[1], sWeights, 16, r);
#pragma unroll
      for (int d = 0; d < kColumns; ++d) {
        FragmentB<T> b;
        load_b_transposed(b, sRows, half * kWidth / 2 + 16 * d, r);
        multiply_add(acc[d][0], a[0], b);
        multiply_add(acc[d][1], a[1], b);
      }
    }
  }
  // Writes rows of `to`, (slots, 2, kWidth).
  __device__ void write(float* to, int slots, float factor, const Addends<kWidth>& addends) const {
    const int lane = threadIdx.x % 32, half = threadIdx.x / 32 % 2, tensor = threadIdx.x / 64;
#pragma unroll
    for (int m = 0; m < 2; ++m)
#pragma unroll
      for (int side = 0; side < 2; ++side) {
        const int slot = 16 * m + 8 * side + lane / 4;
        if (slot >= slots) continue;
        const float coefficient = addends.coefficient[tensor][slot];
#pragma unroll
        for (int n = 0; n < 2 * kColumns; ++n) {
          const int column = half * kWidth / 2 + 8 * n + lane % 4 * 2;
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
template <class T, int kWidth, bool kOneTile>
__global__ void __launch_bounds__(kThreads, kOneTile ? Shape<T, kWidth>::kMinBlocks : 1)
    topk_gradient_kernel(const __grid_constant__ BackwardArgs<T> args) {
  using S = Shape<T, kWidth>;
  extern __shared__ __align__(128) unsigned char memory[];
  const UnitBlock<T, kWidth> block(args, memory);
  const Unit& unit = block.unit;
  if (unit.count == 0) return;
  const int topk = args.shape.topk, lane = threadIdx.x % 32, slot = blockIdx.y * kSlotTile;
  const bool keys = args.dk.data || args.dv.data, queries = args.dq.data && slot == 0;
  if (!keys && !queries) return;
  const Tile<T, kSlotTile> sP{block.base + S::kWeights};
  const Tile<T, kSlotTile> sD{block.base + S::kWeights + S::kWeightBytes};
  const float scale = args.shape.scale * kLog2E, mass = args.lists.mass[block.row];
  Addends<kWidth>& addends = *reinterpret_cast<Addends<kWidth>*>(memory + S::kAddends);
  block.load_addends(addends, slot);
  const int num_keys = block.load_lists();
  block.load_slots(S::kSlots, slot);
  block.load_rows(0, true);
  SlotSums<T, kWidth> sums;
  sums.clear();
#pragma unroll 1
  for (int first = 0; first < unit.count; first += kRowTile) {
    const int stage = first / kRowTile % 2;
    const Tile<T, kWidth> sQ = block.rows(stage, 0), sG = block.rows(stage, 1);
    int index[2];
    float lse[2], inner[2];
#pragma unroll
    for (int side = 0; side < 2; ++side) {
      const int r = first + threadIdx.x / 32 * 16 + 8 * side + lane / 4;
      index[side] = r < unit.count ? block.indices()[r] : -1;
      const std::int64_t row = block.token + max(index[side], 0);
      lse[side] = log2_lse(args.lists.lse, row, index[side] >= 0);
      inner[side] = index[side] >= 0 ? args.scratch.inner[row] : 0.0f;
    }
    cp_async_wait<0>();
    __syncthreads();
    if (first + kRowTile < unit.count) block.load_rows(first + kRowTile, true);
    // ds of the slots in shared memory at `offset`.
    const auto differentiate = [&](int offset, int count, FragmentA<T>(&ds)[2]) {
      Accumulator p[2], d[2];
      weights(p, d, sQ, sG, block.slots(offset, 0), block.slots(offset, 1), lse, count, scale);
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
    const Rows<T> rows = args.dq.rows(block.q_span.batch, block.head, block.q_span.begin);
    const float factor = args.shape.scale * mass;
    FragmentA<T> ds[2];
    if constexpr (kOneTile) {
      differentiate(S::kSlots, num_keys, ds);
      if (queries) {
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
        const int offset = other == slot ? S::kSlots : S::kOthers;
        if (other != slot) {
          __syncthreads();
          block.load_slots(offset, other);
          cp_async_commit();
          cp_async_wait<0>();
          __syncthreads();
        }
        differentiate(offset, num_keys - other, ds);
        if (queries) dq.add(ds, block.slots(offset, 0), 0);
      }
      if (queries) dq.write(rows, index, 0, factor, addends.dmean);
    }
    if (!keys) continue;
    __syncthreads();
    const bool dk = threadIdx.x < 64;
    sums.add(dk ? sD : sP, dk ? sQ : sG);
  }
  if (!keys) return;
  const std::int64_t to = (static_cast<std::int64_t>(blockIdx.x) * topk + slot) * 2 * kWidth;
  sums.write(args.scratch.slots + to, topk - slot,
             threadIdx.x < 64 ? args.shape.scale * mass : mass, addends);
}

}  // namespace

template <class T>
void segment_gradients(const BackwardArgs<T>& args, cudaStream_t stream) {
  dispatch_head_dim("clustered", args.shape.pitch, [&](auto width) {
    using S = Shape<T, decltype(width)::value>;
    const auto kernel = &segment_gradient_kernel<T, decltype(width)::value>;
    allow_shared_memory(kernel, S::kSegmentBytes);
    kernel<<<static_cast<unsigned>(args.shape.H * args.shape.units), kThreads, S::kSegmentBytes,
             stream>>>(args);
    COTERIE_LAUNCH("segment_gradient_kernel");
  });
}

template <class T>
void topk_gradients(const BackwardArgs<T>& args, cudaStream_t stream) {
  const int tiles = (args.shape.topk + kSlotTile - 1) / kSlotTile;
  const dim3 grid(static_cast<unsigned>(args.shape.H * args.shape.units),
                  static_cast<unsigned>(tiles));
  dispatch_head_dim("i-clustered", args.shape.pitch, [&](auto width) {
    using S = Shape<T, decltype(width)::value>;
    const auto launch = [&](auto* kernel, int bytes) {
      allow_shared_memory(kernel, static_cast<std::size_t>(bytes));
      kernel<<<grid, kThreads, static_cast<unsigned>(bytes), stream>>>(args);
      COTERIE_LAUNCH("topk_gradient_kernel");
    };
    if (sizeof(T) == 2 && tiles == 1)  // fp32 makes do with the general one
      launch(&topk_gradient_kernel<T, decltype(width)::value, sizeof(T) == 2>, S::kTopkBytes);
    else
      launch(&topk_gradient_kernel<T, decltype(width)::value, false>, S::kLongTopkBytes);
  });
}

#define COTERIE_INSTANTIATE(T)                                           \
  template void segment_gradients(const BackwardArgs<T>&, cudaStream_t); \
  template void topk_gradients(const BackwardArgs<T>&, cudaStream_t);
COTERIE_INSTANTIATE(float)
COTERIE_INSTANTIATE(__nv_bfloat16)
COTERIE_INSTANTIATE(__half)
#undef COTERIE_INSTANTIATE

}  // namespace coterie::cuda
