// SPDX-License-Identifier: MIT
// Backward pass over the members of the clusters and their top keys (backward.h): the top
// keys' part of dq, dk and dv of the top keys, and the sums of g_i and e_i. Weights are recomputed
// from the saved lse. With dropout (kDrop) those of dv, and dP, are multiplied by its factors.
//
// Grid (units, H, tiles of 32 slots), 2 or 4 warps. A block takes a unit, up to kUnitRows members
// of one cluster gathered in sorted order, 16 rows a warp at a time, with all top keys of the
// cluster in shared memory:
//
//   row tile x 32 slots: P = exp2(Q Kᵀ), dP = G Vᵀ  ->  e of a row  ->  dS = P (dP - e), to shared
//   dq rows = dS K, at their places      dk slots += dSᵀ Q, dv slots += Pᵀ G      sum of G's rows
//
// If the unit is the whole cluster, the block also computes the operands of the centroid kernels
// (ClusterRow). Clusters of several units need a second launch for them. Shared memory
// (MemberShape): two stages of rows, and keys, values and dS of all slots; 54 KiB for 4 warps, 32
// top keys and 16-bit rows of 64; lean blocks have at most 94 KiB. Launch bounds: 6 or 4 blocks per
// multiprocessor for 16-bit rows of 64, 2 for rows of 128, 1 for f32. All devices and element
// types.
#include <cstdint>

#include "cuda/clustered/backward.h"
#include "cuda/launch/dispatch.h"
#include "cuda/launch/launch.h"
#include "cuda/prim/dependent.cuh"
#include "cuda/prim/dropout.cuh"
#include "cuda/prim/element.cuh"
#include "cuda/prim/load.cuh"
#include "cuda/prim/mma.cuh"
#include "cuda/prim/row_chunk.cuh"
#include "cuda/prim/softmax.cuh"
#include "cuda/prim/store.cuh"
#include "cuda/prim/warp.cuh"

namespace coterie::cuda {
namespace {

// p and g . v of 16 rows from `row` on over 16 kCount slots from `slot` on; the lane's two rows see
// the first keys[] slots of the tile. lse in base 2.
template <class T, int kWidth, int kCount>
__device__ __forceinline__ void weights(Accumulator (&p)[kCount], Accumulator (&gv)[kCount],
                                        const Tile<T, kWidth>& sQ, const Tile<T, kWidth>& sG,
                                        const Tile<T, kWidth>& sK, const Tile<T, kWidth>& sV,
                                        int row, int slot, const float (&lse)[2],
                                        const int (&keys)[2], float scale) {
#pragma unroll
  for (int n = 0; n < kCount; ++n) clear(p[n]), clear(gv[n]);
  for_depths<T, kWidth / 16>([&](int d) {
    FragmentA<T> q, g;
    load_a(q, sQ, row, 16 * d);
    load_a(g, sG, row, 16 * d);
#pragma unroll
    for (int n = 0; n < kCount; ++n) {
      FragmentB<T> b;
      load_b(b, sK, slot + 16 * n, 16 * d);
      multiply_add(p[n], q, b);
      load_b(b, sV, slot + 16 * n, 16 * d);
      multiply_add(gv[n], g, b);
    }
  });
#pragma unroll
  for (int i = 0; i < 8 * kCount; ++i) {
    float& x = p[i / 8][i / 4 % 2][i % 4];
    const int column = slot + i / 4 * 8 + static_cast<int>(threadIdx.x) % 4 * 2 + i % 2;
    x = column < keys[i / 2 % 2] ? exp2_approximate(fmaf(x, scale, -lse[i / 2 % 2])) : 0.0f;
  }
}

// Rounds a 16 x 16 accumulator to T and writes it to a tile, from a row and column on.
template <class T, int kWidth>
__device__ __forceinline__ void store_fragment(const Tile<T, kWidth>& tile, int row, int column,
                                               const Accumulator& acc) {
  const int lane = threadIdx.x % 32;
#if __CUDA_ARCH__ >= 900
  constexpr bool kMatrices = sizeof(T) == 2;
#else
  constexpr bool kMatrices = false;
#endif
  if constexpr (kMatrices) {
    FragmentA<T> a;
    to_fragment(a, acc);
    stmatrix_x4(tile.below(row).address(lane % 16, column + lane / 16 * 8), a.r);
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const std::uint32_t to =
          tile.below(row).address(lane / 4 + i % 2 * 8, column + i / 2 * 8 + lane % 4 * 2);
      const float low = acc[i / 2][i % 2 * 2], high = acc[i / 2][i % 2 * 2 + 1];
      if constexpr (sizeof(T) == 2)
        asm volatile("st.shared.b32 [%0], %1;" ::"r"(to), "r"(pack2<T>(low, high)) : "memory");
      else
        asm volatile("st.shared.v2.f32 [%0], {%1,%2};" ::"r"(to), "f"(low), "f"(high) : "memory");
    }
  }
}
// The warp's 16 rows of weights.
template <class T>
__device__ __forceinline__ void store_weights(const Tile<T, kSlotTile>& tile,
                                              const Accumulator (&acc)[2]) {
  const int row = static_cast<int>(threadIdx.x) / 32 * 16;
  store_fragment(tile, row, 0, acc[0]);
  store_fragment(tile, row, 16, acc[1]);
}

// The weights of 16 rows as a left factor whose rows are all the same.
template <class T, class Weight>
__device__ __forceinline__ FragmentA<T> row_weights(const Weight& weight) {
  FragmentA<T> a;
  const int depth = static_cast<int>(threadIdx.x) % 4 * 2;
#pragma unroll
  for (int group = 0; group < 2; ++group) {
    const float low = weight(8 * group + depth), high = weight(8 * group + depth + 1);
    if constexpr (sizeof(T) == 2) {
      a.r[2 * group] = a.r[2 * group + 1] = pack2<T>(low, high);
    } else {
      a.r[4 * group] = a.r[4 * group + 1] = __float_as_uint(low);
      a.r[4 * group + 2] = a.r[4 * group + 3] = __float_as_uint(high);
    }
  }
  return a;
}

// dk and dv of kSlotTile slots and the sum of the rows of G, weighted by a product with
// row_weights; each warp takes a share of the columns.
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
  // Adds dSᵀ Q, Pᵀ G and the sum of G's rows, times weight(row), over the first `rows` rows of the
  // tiles.
  template <class Weight>
  __device__ void add(const Tile<T, kSlotTile>& sD, const Tile<T, kSlotTile>& sP,
                      const Tile<T, kWidth>& sQ, const Tile<T, kWidth>& sG, int rows,
                      const Weight& weight) {
    if constexpr (sizeof(T) == 2) {
#pragma unroll
      for (int r = 0; r < 16 * kWarps; r += 16) {
        if (r >= rows) break;
        add_rows(sD, sP, sQ, sG, r, weight);
      }
    } else {  // see for_depths
#pragma unroll 1
      for (int r = 0; r < rows; r += 16) add_rows(sD, sP, sQ, sG, r, weight);
    }
  }
  // The same for 16 rows from r on.
  template <class Weight>
  __device__ __forceinline__ void add_rows(const Tile<T, kSlotTile>& sD,
                                           const Tile<T, kSlotTile>& sP, const Tile<T, kWidth>& sQ,
                                           const Tile<T, kWidth>& sG, int r, const Weight& weight) {
    const FragmentA<T> own_weights = row_weights<T>([&](int i) { return weight(r + i); });
    const auto add_to = [&](Accumulator(&to)[kColumns][2], const Tile<T, kSlotTile>& left,
                            const Tile<T, kWidth>& right, bool sum_rows) {
      FragmentA<T> a[2];
      FragmentB<T> b;
      load_a_transposed(a[0], left, 0, r);
      load_a_transposed(a[1], left, 16, r);
#pragma unroll
      for (int d = 0; d < kColumns; ++d) {
        load_b_transposed(b, right, 16 * (first() + d), r);
        multiply_add(to[d][0], a[0], b);
        multiply_add(to[d][1], a[1], b);
        if (sum_rows) multiply_add(rows_sum[d], own_weights, b);
      }
    };
    add_to(dk, sD, sQ, false);
    add_to(dv, sP, sG, true);
  }
  // Puts dk times `scale` and dv into two tiles of kSlotTile rows.
  __device__ void store(const Tile<T, kWidth>& to_dk, const Tile<T, kWidth>& to_dv,
                        float scale) const {
#pragma unroll
    for (int m = 0; m < 2; ++m)
#pragma unroll
      for (int d = 0; d < kColumns; ++d) {
        Accumulator scaled;
#pragma unroll
        for (int i = 0; i < 8; ++i) scaled[i / 4][i % 4] = dk[d][m][i / 4][i % 4] * scale;
        store_fragment(to_dk, 16 * m, 16 * (first() + d), scaled);
        store_fragment(to_dv, 16 * m, 16 * (first() + d), dv[d][m]);
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

// Sums over the members, in shared memory.
template <int kWidth, int kWarps>
struct MemberSums {
  float dout[kWidth];
  float dmass[kWarps];
  float delta;
  float dmean[kWarps][kWidth];  // of near keys, by warp
};

// Shared memory: two stages of Q and dO rows with their numbers and lse, weights of kSlotTile
// slots, a buffer for 32 columns of dq, mean and output of the cluster, the top keys' numbers; then
// dS, keys and values for every kSlotTile slots. Sums are where the second stage of rows was.
//
// Lean blocks are for GPUs whose shared memory does not hold that, and for f32 rows of 128: one
// stage of rows, and keys and values of kSlotTile slots, which are fetched again whenever others
// were there (stream).
template <class T, int kWidth, int kBlockWarps, bool kLean>
struct MemberShape {
  static constexpr int kWarps = kBlockWarps;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kRowTile = 16 * kWarps;  // members at a time
  static constexpr int kRowTileBytes = kRowTile * kWidth * static_cast<int>(sizeof(T));
  static constexpr int kSlotTileBytes = kSlotTile * kWidth * static_cast<int>(sizeof(T));
  static constexpr int kWeightBytes = kRowTile * kSlotTile * static_cast<int>(sizeof(T));
  static constexpr int kStages = kLean ? 1 : 2;
  static constexpr int kWeights = 2 * kStages * kRowTileBytes;
  static constexpr int kFacts = kWeights + 2 * kWeightBytes;
  static constexpr int kCluster = kFacts + kStages * kRowTile * 8;
  static constexpr int kKeys = kCluster + 2 * kWidth * 4;
  static constexpr int kEnd = kKeys + kMaxTopKeys * 4;
  static constexpr int kSums = kLean ? kEnd : 2 * kRowTileBytes;
  static constexpr int kSumBytes =
      (static_cast<int>(sizeof(MemberSums<kWidth, kWarps>)) + 127) / 128 * 128;
  static constexpr int kSlots = kEnd + (kLean ? kSumBytes : 0);
  static constexpr int kSlotBytes = 2 * kSlotTileBytes;  // keys and values of kSlotTile slots
  // From one tile of slots to the next.
  static constexpr int kTileBytes = kWeightBytes + (kLean ? 0 : kSlotBytes);
  static constexpr int kMinBlocks = sizeof(T) == 4 ? 1 : kWidth > 64 ? 2 : kWarps == 2 ? 6 : 4;
  static constexpr int bytes(int tiles) {
    return kSlots + (kLean ? kSlotBytes : 0) + tiles * kTileBytes;
  }
  static_assert(kSlotTileBytes <= kRowTileBytes, "write_slots stages slots where rows were");
};

// Rows of a tile that this thread copies, by number; the same rows of two tensors.
template <class T, int kWidth, int kRows, int kThreads>
struct Gather {
  static constexpr int kChunks = Tile<T, kWidth>::kChunks;
  static constexpr int kStep = kThreads / kChunks, kCount = kRows / kStep;
  static_assert(kStep > 0 && kThreads % kChunks == 0 && kRows % kStep == 0, "whole rows");
  const std::int32_t* list;  // from this thread's first row on
  int left;                  // entries from there on
  int number[kCount];

  __device__ void find(const std::int32_t* order, int first, int end) {
    const int r = first + static_cast<int>(threadIdx.x) / kChunks;
    list = order + r;
    left = end - r;
#pragma unroll
    for (int i = 0; i < kCount; ++i) number[i] = i * kStep < left ? list[i * kStep] : -1;
  }
  __device__ void load(const Tile<T, kWidth>& tile, const Rows<const T>& rows) const {
    const int r = static_cast<int>(threadIdx.x) / kChunks, chunk = threadIdx.x % kChunks;
    const int column = chunk * Tile<T, kWidth>::kVector;
    if (in_vectors(rows)) {
      const bool inside = column < rows.width;
      const T* from = rows.data + (inside ? column : 0);
      const int pitch = pitch_bytes(rows);
#pragma unroll
      for (int i = 0; i < kCount; ++i)
        cp_async16(tile.chunk(r + i * kStep, chunk), row_address(from, max(number[i], 0), pitch),
                   number[i] >= 0 && inside ? 16 : 0);
      return;
    }
#pragma unroll 1
    for (int i = 0; i < kCount; ++i) {
      const int row = i * kStep < left ? list[i * kStep] : -1;
      store_shared16(
          tile.chunk(r + i * kStep, chunk),
          load_slowly(rows.row(max(row, 0)) + column, row >= 0 ? rows.width - column : 0));
    }
  }
};

// The sum of near_dmean over the rows of a unit, 16 bytes of a row in each thread.
template <class T, int kWidth, int kWarps>
struct NearSums {
  static constexpr int kVector = Tile<T, kWidth>::kVector, kChunks = Tile<T, kWidth>::kChunks;
  static constexpr int kStep = 32 * kWarps / kChunks;  // rows at a time
  float sum[kVector] = {};

  // Adds the rows of a tile. rows: of the item's queries; numbers: of the tile's rows, -1 for none.
  __device__ __forceinline__ void add(const T* rows, const std::int32_t* numbers) {
    const int r = static_cast<int>(threadIdx.x) / kChunks,
              column = static_cast<int>(threadIdx.x) % kChunks * kVector;
    constexpr int kCount = 16 * kWarps / kStep;
    uint4 words[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const int row = numbers[r + i * kStep];
      words[i] = make_uint4(0, 0, 0, 0);
      if (row >= 0)
        words[i] = *reinterpret_cast<const uint4*>(rows + static_cast<std::int64_t>(row) * kWidth +
                                                   column);
    }
#pragma unroll
    for (int i = 0; i < kCount; ++i) add_chunk<T>(sum, words[i]);
  }
  // The sums of a warp's threads.
  __device__ void write(MemberSums<kWidth, kWarps>& to) const {
    static_assert(kChunks <= 32, "a warp has all columns");
    const int column = static_cast<int>(threadIdx.x) % kChunks * kVector;
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      float total = sum[i];
#pragma unroll
      for (int step = kChunks; step < 32; step *= 2) total += __shfl_xor_sync(~0u, total, step);
      to.dmean[threadIdx.x / 32][column + i] = total;
    }
  }
};

// What a block works on: members [unit.first, unit.first + unit.count) in sorted order.
template <class T, int kWidth, int kWarps, bool kLean>
struct MemberBlock {
  using S = MemberShape<T, kWidth, kWarps, kLean>;
  const BackwardArgs<T>& args;
  unsigned char* memory;
  std::uint32_t base;
  int head;
  ClusterUnit unit;
  ItemSpan k_span;
  int row;                    // of the cluster
  std::int64_t token;         // of the item's first query in (B, H, N) tensors
  const std::int32_t* order;  // of the members

  __device__ MemberBlock(const BackwardArgs<T>& a, unsigned char* m, int h, const ClusterUnit& u)
      : args(a), memory(m), base(shared_address(m)), head(h), unit(u) {
    const BackwardShape& shape = args.shape;
    k_span = shape.spans.k.span(unit.item);
    row = shape.units.row(unit.item, head, unit.cluster);
    token =
        (static_cast<std::int64_t>(unit.span.batch) * shape.H + head) * shape.N + unit.span.begin;
    order = args.lists.order + token + unit.first;
  }

  __device__ static int stage(int first) { return first / S::kRowTile % S::kStages; }
  __device__ Tile<T, kWidth> rows(int first, int tensor) const {
    return {base + (2 * stage(first) + tensor) * S::kRowTileBytes};
  }
  // Numbers (-1: none) and lse of the rows of a stage.
  __device__ std::int32_t* numbers(int first) const {
    return reinterpret_cast<std::int32_t*>(memory + S::kFacts) + stage(first) * 2 * S::kRowTile;
  }
  __device__ float* lse(int first) const {
    return reinterpret_cast<float*>(numbers(first) + S::kRowTile);
  }
  __device__ float* mean() const { return reinterpret_cast<float*>(memory + S::kCluster); }
  __device__ float* out() const { return mean() + kWidth; }
  __device__ std::int32_t* keys() const {
    return reinterpret_cast<std::int32_t*>(memory + S::kKeys);
  }
  __device__ Tile<T, kSlotTile> weights() const { return {base + S::kWeights}; }
  __device__ Tile<T, kSlotTile> staging() const { return {base + S::kWeights + S::kWeightBytes}; }
  // dS, and keys or values, of slots [kSlotTile tile, kSlotTile (tile + 1)).
  __device__ Tile<T, kSlotTile> derivatives(int tile) const {
    return {base + S::kSlots + (kLean ? S::kSlotBytes : 0) + tile * S::kTileBytes};
  }
  __device__ Tile<T, kWidth> slots(int tile, int tensor) const {
    const int at = kLean ? 0 : tile * S::kTileBytes + S::kWeightBytes;
    return {base + S::kSlots + at + tensor * S::kSlotTileBytes};
  }
  __device__ MemberSums<kWidth, kWarps>& sums() const {
    return *reinterpret_cast<MemberSums<kWidth, kWarps>*>(memory + S::kSums);
  }
  // Whether this warp has rows in a tile.
  __device__ bool active(int first) const {
    return first + static_cast<int>(threadIdx.x) / 32 * 16 < unit.count;
  }

  // Returns the number of top keys; fills keys() where they are needed. Called by whole warps.
  __device__ int count_keys() const {
    const int lane = threadIdx.x % 32, topk = args.shape.topk;
    const std::int32_t* list = args.lists.top_keys + static_cast<std::int64_t>(row) * topk;
    int count = 0;
    for (int slot = lane; slot - lane < topk; slot += 32) {
      const int key = slot < topk ? list[slot] : -1;
      if (args.shape.causal || args.shape.near > 0 || args.shape.dropout.on()) keys()[slot] = key;
      count += __popc(__ballot_sync(~0u, key >= 0));
    }
    return count;
  }
  // Multiplies dP of 16 kCount slots from `slot` on by the factors of dropout; words: of the lane's
  // two rows. Bit i of the result: the weight of element i is kept.
  template <int kCount>
  __device__ __forceinline__ unsigned drop(Accumulator (&d)[kCount], int slot,
                                           const DropoutRow (&words)[2]) const {
    const Dropout& dropout = args.shape.dropout;
    unsigned bits = 0;
#pragma unroll
    for (int i = 0; i < 8 * kCount; ++i) {
      const int key = keys()[slot + i / 4 * 8 + static_cast<int>(threadIdx.x) % 4 * 2 + i % 2];
      const float factor = kept(dropout, words[i / 2 % 2], key);
      d[i / 8][i / 4 % 2][i % 4] *= factor;
      bits |= factor != 0.0f ? 1u << i : 0u;
    }
    return bits;
  }
  // The same of weights.
  template <int kCount>
  __device__ __forceinline__ void drop_weights(Accumulator (&p)[kCount], unsigned bits) const {
    const auto keep = static_cast<float>(args.shape.dropout.keep_scale);
#pragma unroll
    for (int i = 0; i < 8 * kCount; ++i) p[i / 8][i / 4 % 2][i % 4] *= bits >> i & 1 ? keep : 0.0f;
  }
  __device__ std::int64_t problem() const {
    return static_cast<std::int64_t>(unit.item) * args.shape.H + head;
  }
  // How many of the `count` top keys a member sees.
  __device__ int visible(int member, int count) const {
    if (!args.shape.causal) return count;
    return count_up_to(keys(), count, member + k_span.length - unit.span.length);
  }
  // Ranks [first, end) of the top keys that are near a member.
  __device__ void near_keys(int member, int count, int& first, int& end) const {
    const int near = args.shape.near, at = max(member, 0) / near;
    first = count_up_to(keys(), count, (at - 1) * near - 1);
    end = count_up_to(keys(), count, (at + 2) * near - 1);
  }
  __device__ void load_slots(int tile) const {
    const int group = args.shape.group, topk = args.shape.topk;
    const int key_head = group > 1 ? head / group : head;
    Gather<T, kWidth, kSlotTile, S::kThreads> gather;
    gather.find(args.lists.top_keys + static_cast<std::int64_t>(row) * topk, tile * kSlotTile,
                topk);
    gather.load(slots(tile, 0), args.k.rows(k_span.batch, key_head, k_span.begin));
    gather.load(slots(tile, 1), args.v.rows(k_span.batch, key_head, k_span.begin));
  }
  // Keys and values of all slots for which there is room.
  __device__ void load_slots() const {
    for (int tile = 0; tile * kSlotTile < args.shape.topk && (tile == 0 || !kLean); ++tile)
      load_slots(tile);
  }
  // Lean blocks: the keys and values of a tile of slots. Called by all threads.
  __device__ __forceinline__ void stream(int tile) const {
    if (!kLean || args.shape.topk <= kSlotTile) return;
    __syncthreads();
    load_slots(tile);
    cp_async_commit();
    cp_async_wait<0>();
    __syncthreads();
  }
  // Mean and output of the cluster.
  __device__ void load_cluster() const {
    const float* mean_row = args.lists.centroids + static_cast<std::int64_t>(row) * args.k.width;
    const bool rows_have_delta = args.shape.near > 0;  // and the cluster's output is not needed
    const float* out_row =
        rows_have_delta ? mean_row : args.lists.out + static_cast<std::int64_t>(row) * args.v.width;
#pragma unroll
    for (int i = 0; i < kWidth; i += S::kThreads) {
      const int column = i + static_cast<int>(threadIdx.x);
      if (column >= kWidth) break;
      cp_async4(shared_address(mean() + column), mean_row + min(column, args.k.width - 1),
                column < args.k.width);
      cp_async4(shared_address(out() + column), out_row + min(column, args.v.width - 1),
                column < args.v.width);
    }
  }

  // Stores the sums over a unit's members where finish_cluster (`whole`) or add_units reads them.
  template <bool kNear>
  __device__ __forceinline__ void store_sums(const SlotSums<T, kWidth, kWarps>& slot_sums,
                                             const NearSums<T, kWidth, kWarps>& near, float dmass,
                                             bool whole) const {
    const std::int64_t place = unit.place;
    slot_sums.write_rows_sum(whole ? sums().dout : args.scratch.unit_dout + place * kWidth);
    if constexpr (kNear) near.write(sums());
    dmass = warp_sum(dmass);
    if (threadIdx.x % 32 == 0) sums().dmass[threadIdx.x / 32] = dmass;
    if (whole) return;
    __syncthreads();
    float sum = 0.0f;
    for (const float part : sums().dmass) sum += part;
    if (threadIdx.x == 0) args.scratch.unit_dmass[place] = sum;
    if constexpr (kNear)
      for (int column = static_cast<int>(threadIdx.x); column < kWidth; column += S::kThreads)
        args.scratch.unit_dmean[place * kWidth + column] = near_dmean(column);
  }
  // The sum of near_dmean over the members.
  __device__ float near_dmean(int column) const {
    float sum = 0.0f;
    for (int warp = 0; warp < kWarps; ++warp) sum += sums().dmean[warp][column];
    return sum;
  }
  // The sums of all units of the cluster, in their order.
  template <bool kNear>
  __device__ __forceinline__ void add_units() const {
    const BackwardScratch<T>& scratch = args.scratch;
    const int more = (unit.size - 1) / kUnitRows;
    const std::int64_t second = args.shape.units.second_place(head, unit.span, unit.first);
    for (int column = static_cast<int>(threadIdx.x); column < kWidth; column += S::kThreads) {
      float sum = scratch.unit_dout[static_cast<std::int64_t>(row) * kWidth + column];
      for (int i = 0; i < more; ++i) sum += scratch.unit_dout[(second + i) * kWidth + column];
      sums().dout[column] = sum;
      if constexpr (kNear) {
        sum = scratch.unit_dmean[static_cast<std::int64_t>(row) * kWidth + column];
        for (int i = 0; i < more; ++i) sum += scratch.unit_dmean[(second + i) * kWidth + column];
        for (int warp = 0; warp < kWarps; ++warp)
          sums().dmean[warp][column] = warp == 0 ? sum : 0.0f;
      }
    }
    if (threadIdx.x >= S::kWarps) return;
    float sum = scratch.unit_dmass[row];
    for (int i = 0; i < more; ++i) sum += scratch.unit_dmass[second + i];
    sums().dmass[threadIdx.x] = threadIdx.x == 0 ? sum : 0.0f;
  }
  // dq of 16 rows over all slots, 32 columns: dS times the keys.
  __device__ __forceinline__ void multiply_keys(Accumulator (&dq)[2], int first, int column) const {
    const int tiles = (args.shape.topk + kSlotTile - 1) / kSlotTile;
    clear(dq[0]), clear(dq[1]);
#pragma unroll 1
    for (int tile = 0; tile < tiles; ++tile) {
      stream(tile);
#pragma unroll
      for (int n = 0; n < kSlotTile; n += 16) {
        FragmentA<T> ds;
        load_a(ds, derivatives(tile), first, n);
#pragma unroll
        for (int d = 0; d < 2; ++d) {
          FragmentB<T> b;
          load_b_transposed(b, slots(tile, 0), column + 16 * d, n);
          multiply_add(dq[d], ds, b);
        }
      }
    }
  }
  // Writes the sums of slot tile `own` to their rows in scratch memory, or adds them to the values
  // there.
  __device__ __forceinline__ void write_slots(const SlotSums<T, kWidth, kWarps>& slot_sums, int own,
                                              bool add) const {
    constexpr int kChunks = Tile<T, kWidth>::kChunks, kStep = S::kThreads / kChunks;
    const int topk = args.shape.topk, count = min(topk - own * kSlotTile, kSlotTile);
    const auto tile = [&](int tensor) {
      return Tile<T, kWidth>{base + tensor * S::kSlotTileBytes};
    };
    __syncthreads();
    slot_sums.store(tile(0), tile(1), args.shape.scale);
    __syncthreads();
    const int r = static_cast<int>(threadIdx.x) / kChunks, chunk = threadIdx.x % kChunks;
    T* to = args.scratch.slots +
            (static_cast<std::int64_t>(unit.place) * topk + own * kSlotTile + r / 2) * 2 * kWidth +
            r % 2 * kWidth + chunk * Tile<T, kWidth>::kVector;
    const auto copy = [&](int i, bool sum) {
      const int slot = (r + i) / 2;
      if (slot >= count) return;
      uint4 words = load_shared16(tile(r % 2).chunk(slot, chunk));
      uint4* place = reinterpret_cast<uint4*>(to + i * kWidth);
      if (sum) {
        float total[16 / sizeof(T)] = {};
        add_chunk<T>(total, words);
        add_chunk<T>(total, *place);
        words = pack_chunk<T>(total);
      }
      *place = words;
    };
    if (add) {
#pragma unroll 1
      for (int i = 0; i < 2 * kSlotTile; i += kStep) copy(i, true);
    } else {
#pragma unroll
      for (int i = 0; i < 2 * kSlotTile; i += kStep) copy(i, false);
    }
  }
};

// Copies the members of a unit to shared memory, a tile at a time: find() loads the numbers of its
// rows, load() copies the rows.
template <class T, int kWidth, int kWarps, bool kLean>
struct UnitRows {
  using Block = MemberBlock<T, kWidth, kWarps, kLean>;
  using S = MemberShape<T, kWidth, kWarps, kLean>;
  const Block& block;
  Rows<const T> q, g;
  Gather<T, kWidth, S::kRowTile, S::kThreads> gather;
  int own;  // number of the row whose lse this thread copies

  __device__ explicit UnitRows(const Block& b)
      : block(b),
        q(b.args.q.rows(b.unit.span.batch, b.head, b.unit.span.begin)),
        g(b.args.g.rows(b.unit.span.batch, b.head, b.unit.span.begin)) {}

  __device__ void find(int first) {
    const int r = first + static_cast<int>(threadIdx.x);
    if (first >= block.unit.count) return;
    gather.find(block.order, first, block.unit.count);
    own = r < block.unit.count ? block.order[r] : -1;
  }
  __device__ void load(int first) const {
    if (first >= block.unit.count) return cp_async_commit();
    const bool top = block.args.shape.topk > 0;
    if (top) gather.load(block.rows(first, 0), q);
    gather.load(block.rows(first, 1), g);
    if (threadIdx.x < S::kRowTile) {
      block.numbers(first)[threadIdx.x] = own;
      if (top || block.args.shape.near > 0)
        cp_async4(shared_address(block.lse(first) + threadIdx.x),
                  block.args.lists.lse + block.token + max(own, 0), own >= 0);
    }
    cp_async_commit();
  }
};

// The end of a cluster: operands of the centroid kernels from the sums over its members, and the
// correction of those kernels for its top keys. dS should be A (dm - delta) and the weight 0, but
// they use A (dout . v - delta) and A. The difference is that of one more member, row 0 of the
// first stage, with the mean as query and dout as output gradient. The first two warps share the
// work. With near keys there is nothing to correct, and delta is the sum over the members that is
// elsewhere dmass.
template <class T, int kWidth, int kWarps, bool kLean>
struct ClusterRow {
  static constexpr int kColumns = kWidth / 32;  // of a lane
  static constexpr float kMost = 128.0f;
  const MemberBlock<T, kWidth, kWarps, kLean>& block;
  MemberSums<kWidth, kWarps>& sums;
  float lse, dmass = 0.0f;

  __device__ ClusterRow(const MemberBlock<T, kWidth, kWarps, kLean>& b, float mean_lse)
      : block(b), sums(b.sums()) {
    lse = mean_lse == -INFINITY ? INFINITY : mean_lse * kLog2e - block.args.shape.weight_bits;
    if (block.args.shape.mass_grad || block.args.shape.near > 0)
      for (const float part : sums.dmass) dmass += part;
    dmass *= block.args.shape.gradient_scale;
  }

  // Rounds the mean (warp 0) and dout (warp 1) into the row, clears the other 15 rows, and writes
  // mean, dout, lse and delta to scratch memory if `write`. delta is computed from the rounded sum:
  // dout . v - delta then cancels as in exact arithmetic.
  __device__ void write_operands(float mass, bool write) const {
    const BackwardScratch<T>& scratch = block.args.scratch;
    const int lane = threadIdx.x % 32, first = lane * kColumns, tensor = threadIdx.x / 32;
    const Tile<T, kWidth> tile = block.rows(0, tensor);
    const float* from = tensor == 0 ? block.mean() : sums.dout;
    const float factor = tensor == 0 ? 1.0f : block.args.shape.gradient_scale;
    T* to = (tensor == 0 ? scratch.mean : scratch.dout) +
            static_cast<std::int64_t>(block.row) * kWidth + first;
#pragma unroll
    for (int i = 0; i < 16 * tile.kChunks; i += 32)
      store_shared16(tile.base + (i + lane) * 16, make_uint4(0, 0, 0, 0));
    __syncwarp();
    float delta = 0.0f;
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      const T value = from_float<T>(from[first + i] * factor);
      store_element(tile.address(0, first + i), value);
      if (write) to[i] = value;
      delta = fmaf(to_float(value), block.out()[first + i], delta);
    }
    if (tensor == 0) return;
    delta = block.args.shape.near > 0 ? dmass : warp_sum(delta) + mass * dmass;
    if (lane > 0) return;
    sums.delta = delta;
    if (!write) return;
    scratch.row_lse[block.row] = lse;
    scratch.row_delta[block.row] = delta;
  }

  // Writes dS of all slots and the weights of slot tile `own` to shared memory, like those of
  // members; each of two warps takes half of the slots of a tile. Lean: called by all threads.
  template <bool kDrop>
  __device__ void differentiate(int num_keys, int own) const {
    const BackwardShape& shape = block.args.shape;
    const float power = shape.unscale > kMost ? kMost : shape.unscale, delta = sums.delta;
    const float lses[2] = {threadIdx.x % 32 < 4 ? lse : INFINITY, INFINITY};
    const int slot = static_cast<int>(threadIdx.x) / 32 * 16;
    DropoutRow words[2] = {};
    if constexpr (kDrop) words[0] = shape.dropout.cluster(block.problem(), block.unit.cluster);
#pragma unroll 1
    for (int tile = 0; tile * kSlotTile < shape.topk; ++tile) {
      block.stream(tile);
      if (kLean && threadIdx.x >= 64) continue;
      const int left[2] = {num_keys - tile * kSlotTile, 0};
      Accumulator p[1], d[1];
      weights(p, d, block.rows(0, 0), block.rows(0, 1), block.slots(tile, 0), block.slots(tile, 1),
              0, slot, lses, left, shape.scale * kLog2e);
      unsigned bits = 0;
      if constexpr (kDrop) bits = block.drop(d, tile * kSlotTile + slot, words);
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        float& a = p[0][j / 4][j % 4];
        float& x = d[0][j / 4][j % 4];
        x = (a * (dmass - delta) - to_float(from_float<T>(a * (x - delta)))) * shape.unscale;
        if constexpr (kDrop)
          a *= bits >> j & 1 ? static_cast<float>(shape.dropout.keep_scale) : 0.0f;
        a = -to_float(from_float<T>(a)) * power;
      }
      if (tile == own) store_fragment(block.weights(), 0, slot, p[0]);
      store_fragment(block.derivatives(tile), 0, slot, d[0]);
    }
  }
  // Writes what top keys add to the gradient of the mean. Called by all warps.
  __device__ void write_mean() const {
    float* to = block.args.scratch.top_dmean + static_cast<std::int64_t>(block.row) * kWidth;
    const float scale = block.args.shape.scale;
    const int lane = threadIdx.x % 32;
#pragma unroll 1
    for (int column = static_cast<int>(threadIdx.x) / 32 * 32; column < kWidth;
         column += 32 * kWarps) {
      Accumulator dq[2];
      block.multiply_keys(dq, 0, column);
      if (lane >= 4) continue;  // the first row
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        const int at = column + 8 * n + 2 * lane;
        store2(to + at, dq[n / 2][n % 2][0] * scale, dq[n / 2][n % 2][1] * scale);
      }
    }
  }
  // Writes what near keys add to it.
  __device__ void write_near_mean() const {
    float* to = block.args.scratch.top_dmean + static_cast<std::int64_t>(block.row) * kWidth;
    for (int column = static_cast<int>(threadIdx.x); column < kWidth; column += 32 * kWarps)
      to[column] = block.near_dmean(column);
  }
  // The product of dout and weights must be unscaled. The missing power of two goes to the weights
  // up to kMost, so that they fit fp16, and the rest to dout.
  __device__ void unscale_dout() const {
    const float rest = block.args.shape.unscale / kMost;
    if (rest <= 1.0f) return;
    for (int column = static_cast<int>(threadIdx.x); column < kWidth; column += 32 * kWarps) {
      const T rounded = from_float<T>(sums.dout[column] * block.args.shape.gradient_scale);
      store_element(block.rows(0, 1).address(0, column), from_float<T>(to_float(rounded) * rest));
    }
    __syncthreads();
  }
  __device__ static void store_element(std::uint32_t to, T value) {
    if constexpr (sizeof(T) == 2)
      asm volatile("st.shared.b16 [%0], %1;" ::"r"(to),
                   "h"(*reinterpret_cast<const unsigned short*>(&value))
                   : "memory");
    else
      asm volatile("st.shared.f32 [%0], %1;" ::"r"(to), "f"(value) : "memory");
  }
};

// Computes all that depends on the sums over the members, which are in shared memory; adds to the
// sums of the slots. Blocks with own > 0 write nothing else. Called by all threads.
template <bool kNear, bool kDrop, class T, int kWidth, int kWarps, bool kLean>
__device__ __forceinline__ void finish_cluster(const MemberBlock<T, kWidth, kWarps, kLean>& block,
                                               SlotSums<T, kWidth, kWarps>& slot_sums, int num_keys,
                                               int own, float mass, float mean_lse) {
  const BackwardShape& shape = block.args.shape;
  const bool empty = block.unit.size == 0, top = shape.topk > 0 && !empty;
  const bool first_warps = threadIdx.x < 64;
  __syncthreads();
  const ClusterRow<T, kWidth, kWarps, kLean> row(block, empty ? -INFINITY : mean_lse);
  if (first_warps) row.write_operands(top ? mass : 0.0f, own == 0);
  if (kNear && own == 0 && block.args.dq.data) row.write_near_mean();
  if (kNear || !top) return;  // with near keys the centroid kernels leave top keys out
  __syncthreads();
  if (kLean || first_warps) row.template differentiate<kDrop>(num_keys, own);
  __syncthreads();
  if (own == 0 && block.args.dq.data) row.write_mean();
  row.unscale_dout();
  slot_sums.add(block.derivatives(own), block.weights(), block.rows(0, 0), block.rows(0, 1), 1,
                [](int) { return 1.0f; });
}

// Mean size of clusters up to which blocks have two warps, and twice as many fit on a
// multiprocessor; others have four.
constexpr int kSmallCluster = 40;

// One row tile in a warp: 16 of its rows. kNear: rows do not see top keys that are near, and delta,
// which belongs to all keys, is given.
template <class T, int kWidth, int kWarps, bool kLean, bool kNear, bool kDrop>
struct MemberTile {
  const MemberBlock<T, kWidth, kWarps, kLean>& block;
  int first;  // of the tile's rows

  // Writes dS of all slots and the weights of slot tile `own` to shared memory, both times the
  // mass; returns the sum of e of this lane's rows, once for the four lanes of a row. Walks up the
  // tiles for e, and back down for the derivatives.
  __device__ float differentiate(int num_keys, int own, float mass) const {
    const BackwardShape& shape = block.args.shape;
    const int tiles = (shape.topk + kSlotTile - 1) / kSlotTile;
    float inner[2] = {0.0f, 0.0f}, lse[2];
    int seen[2], hidden[2][2];
    DropoutRow words[2];
#pragma unroll
    for (int side = 0; side < 2; ++side) {
      const int r = static_cast<int>(threadIdx.x) / 32 * 16 + 8 * side + threadIdx.x % 32 / 4;
      const int member = block.numbers(first)[r];
      // +inf, which makes weights 0, for rows without keys.
      lse[side] = block.lse(first)[r] * kLog2e;
      if (member < 0 || lse[side] == -INFINITY) lse[side] = INFINITY;
      seen[side] = block.visible(member, num_keys);
      if constexpr (kDrop) words[side] = shape.dropout.query(block.problem(), max(member, 0));
      if constexpr (kNear) {
        block.near_keys(member, num_keys, hidden[side][0], hidden[side][1]);
        if (member >= 0) inner[side] = block.args.scratch.delta[block.token + member];
      }
    }
#pragma unroll 1
    for (int i = kNear ? tiles - 1 : 0; i < 2 * tiles - 1; ++i) {
      const int tile = i < tiles ? i : 2 * tiles - 2 - i;
      block.stream(tile);
      const int left[2] = {seen[0] - tile * kSlotTile, seen[1] - tile * kSlotTile};
      Accumulator p[2], d[2];
      weights(p, d, block.rows(first, 0), block.rows(first, 1), block.slots(tile, 0),
              block.slots(tile, 1), static_cast<int>(threadIdx.x) / 32 * 16, 0, lse, left,
              shape.scale * kLog2e);
      unsigned bits = 0;
      if constexpr (kDrop) bits = block.drop(d, tile * kSlotTile, words);
      if constexpr (kNear) {
#pragma unroll
        for (int j = 0; j < 16; ++j) {
          const int rank =
              tile * kSlotTile + j / 4 * 8 + static_cast<int>(threadIdx.x) % 4 * 2 + j % 2;
          if (rank >= hidden[j / 2 % 2][0] && rank < hidden[j / 2 % 2][1])
            p[j / 8][j / 4 % 2][j % 4] = 0.0f;
        }
      }
      if (!kNear && i < tiles) {
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
      if constexpr (kDrop) block.drop_weights(p, bits);
      if (tile == own) store_weights(block.weights(), p);
      store_weights(block.derivatives(tile), d);
    }
    __syncwarp();
    if (kNear) return 0.0f;  // delta is summed for all rows, also without top keys
    return threadIdx.x % 4 == 0 ? inner[0] + inner[1] : 0.0f;
  }

  // The top keys' part of dq, after differentiate: through shared memory, so that rows are written
  // in pieces of 16 bytes.
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
      block.multiply_keys(sum, warp_row, column);
#pragma unroll
      for (int i = 0; i < 16; ++i) sum[i / 8][i / 4 % 2][i % 4] *= block.args.shape.scale;
      store_weights(block.staging(), sum);
      __syncwarp();
      const int at = column + chunk * Staging::kVector;
#pragma unroll
      for (int i = 0; i < 16; i += kStep) {
        const int member = block.numbers(first)[r + i];
        uint4 words = load_shared16(block.staging().chunk(r + i, chunk));
        if (member < 0 || at >= dq.width) continue;
        T* to = fast ? row_address(dq.data + at, member, pitch) : dq.row(member) + at;
        if constexpr (kNear) {  // near keys have written their part
          float sum[16 / sizeof(T)] = {};
          add_chunk<T>(sum, words);
          add_chunk<T>(sum,
                       fast ? *reinterpret_cast<const uint4*>(to) : load_slowly(to, dq.width - at));
          words = pack_chunk<T>(sum);
        }
        if (fast)
          *reinterpret_cast<uint4*>(to) = words;
        else
          store_slowly(to, words, dq.width - at);
      }
      __syncwarp();
    });
  }
};

// Block (x, y, z) takes unit x of head y and writes the slots from z kSlotTile on; with z = 0 also
// dq and the results of the sums. Without `units`, block x finishes a cluster of several units: the
// one whose second unit is the x-th of the units that are not their cluster's first.
template <class T, int kWidth, int kWarps, bool kLean, bool kNear, bool kDrop>
__global__ void __launch_bounds__(MemberShape<T, kWidth, kWarps, kLean>::kThreads,
                                  MemberShape<T, kWidth, kWarps, kLean>::kMinBlocks)
    member_gradient_kernel(const __grid_constant__ BackwardArgs<T> args, bool units) {
  await_writes();  // first: later kernels read what earlier ones wrote before they wait
  release_next();
  using S = MemberShape<T, kWidth, kWarps, kLean>;
  extern __shared__ __align__(128) unsigned char memory[];
  const BackwardShape& shape = args.shape;
  const int head = static_cast<int>(blockIdx.y), own = static_cast<int>(blockIdx.z);
  const int clusters = shape.items * shape.clusters;
  const int number = static_cast<int>(blockIdx.x) + (units ? 0 : clusters);
  // The top keys need only the cluster's number: they are fetched while its members are looked up.
  const int line = static_cast<int>(threadIdx.x) * 32;
  if (units && line < shape.topk && shape.items == 1 && number < shape.clusters)
    asm volatile("prefetch.global.L2 [%0];" ::"l"(
        args.lists.top_keys +
        static_cast<std::int64_t>(head * shape.clusters + number) * shape.topk + line));
  ClusterUnit unit = shape.units.find(shape.spans.q, args.lists.offsets, args.lists.labels,
                                      args.lists.order, head, number);
  const bool whole = unit.part == 0 && unit.size == unit.count;
  if (!units) {
    if (unit.count == 0 || unit.part != 1) return;
    unit.first -= kUnitRows;
    unit.count = 0;  // the first launch added its members
    unit.place = shape.units.row(unit.item, head, unit.cluster);
  }
  const int count = unit.count, topk = shape.topk;
  const bool tail = shape.tail() && !(kNear && args.adds(unit.item, head));
  if (!units && !tail) return;
  if (units && count == 0 && (!whole || !tail || own > 0)) return;
  const MemberBlock<T, kWidth, kWarps, kLean> block(args, memory, head, unit);
  UnitRows<T, kWidth, kWarps, kLean> rows(block);
  rows.find(0);
  block.load_slots();
  if (tail) block.load_cluster();
  rows.load(0);
  rows.find(S::kRowTile);
  const int num_keys = block.count_keys();
  const float mass = kNear || !tail || topk == 0 ? 1.0f : args.lists.mass[block.row];
  const float mean_lse = tail ? args.lists.centroid_lse[block.row] : 0.0f;
  SlotSums<T, kWidth, kWarps> slot_sums;
  slot_sums.clear();
  NearSums<T, kWidth, kWarps> near_sums;
  float dmass = 0.0f;
  // Rows of a tile in the sum of G: the mean's sum over all keys in units of the row's.
  const auto weight = [&](int first, int r) {
    if (!kNear) return 1.0f;
    const float lse = block.lse(first)[r];
    if (block.numbers(first)[r] < 0 || lse == -INFINITY) return 0.0f;
    return exp2_approximate((mean_lse - lse) * kLog2e);
  };
#pragma unroll 1
  for (int first = 0; first < count; first += S::kRowTile) {
    if (kLean && first > 0) {
      __syncthreads();  // all have used the rows before
      rows.load(first);
      rows.find(first + S::kRowTile);
    }
    cp_async_wait<0>();
    __syncthreads();
    if (!kLean) {
      rows.load(first + S::kRowTile);
      rows.find(first + 2 * S::kRowTile);
    }
    if (topk > 0 && (kLean || block.active(first))) {  // lean blocks stream together
      const MemberTile<T, kWidth, kWarps, kLean, kNear, kDrop> tile{block, first};
      dmass += tile.differentiate(num_keys, own, mass);
      if (args.dq.data && own == 0) tile.write_queries();
    }
    if constexpr (kNear)
      if (tail) {
        const std::int32_t* numbers = block.numbers(first);
        if (args.dq.data) near_sums.add(args.scratch.near_dmean + block.token * kWidth, numbers);
        if (const int r = static_cast<int>(threadIdx.x); r < S::kRowTile && numbers[r] >= 0)
          dmass += weight(first, r) * args.scratch.delta[block.token + numbers[r]];
      }
    __syncthreads();
    slot_sums.add(block.derivatives(own), block.weights(), block.rows(first, 0),
                  block.rows(first, 1), min(S::kRowTile, count - first),
                  [&](int r) { return weight(first, r); });
  }
  if (tail) {
    cp_async_wait<0>();  // where there was no row
    __syncthreads();
    if (units)
      block.template store_sums<kNear>(slot_sums, near_sums, dmass, whole);
    else
      block.template add_units<kNear>();
    if (whole || !units)
      finish_cluster<kNear, kDrop>(block, slot_sums, num_keys, own, mass, mean_lse);
  }
  if (topk > 0 && unit.size > 0 && (args.dk.data || args.dv.data))
    block.write_slots(slot_sums, own, !units);
}

}  // namespace

template <class T>
void member_gradients(const BackwardArgs<T>& args, cudaStream_t stream) {
  const BackwardShape& shape = args.shape;
  const auto heads = static_cast<unsigned>(shape.H);
  const int tiles = max((shape.topk + kSlotTile - 1) / kSlotTile, 1);
  const auto launch_as = [&](auto width, auto warps, auto lean, auto drops) {
    constexpr bool kLean = decltype(lean)::value, kDrop = decltype(drops)::value;
    constexpr int kWidth = decltype(width)::value, kWarps = decltype(warps)::value;
    using S = MemberShape<T, kWidth, kWarps, kLean>;
    const auto blocks = [&](int count, bool units) {
      const auto kernel = shape.near > 0
                              ? member_gradient_kernel<T, kWidth, kWarps, kLean, true, kDrop>
                              : member_gradient_kernel<T, kWidth, kWarps, kLean, false, kDrop>;
      launch_early("member_gradient", kernel,
                   dim3(static_cast<unsigned>(count), heads, static_cast<unsigned>(tiles)),
                   S::kThreads, static_cast<std::size_t>(S::bytes(tiles)), stream, args, units);
    };
    blocks(shape.units.blocks(), true);
    if (shape.N > kUnitRows && shape.tail()) blocks(shape.units.more, false);
  };
  const auto launch = [&](auto width, auto warps, auto drops) {
    constexpr int kWidth = decltype(width)::value, kWarps = decltype(warps)::value;
    constexpr int kRowBytes = Tile<T, kWidth>::kRowBytes;
    if constexpr (kRowBytes > 256) {
      launch_as(width, warps, std::true_type{}, drops);
    } else {
      if constexpr (kRowBytes > 128)
        if (MemberShape<T, kWidth, kWarps, false>::bytes(tiles) > shared_per_block())
          return launch_as(width, warps, std::true_type{}, drops);
      launch_as(width, warps, std::false_type{}, drops);
    }
  };
  dispatch_head_dim("clustered", shape.pitch, [&](auto width) {
    constexpr bool kWide = sizeof(T) == 2 && decltype(width)::value > 64;
    constexpr int kDropWarps = sizeof(T) == 2 ? 4 : 2;
    if (shape.dropout.on())
      return launch(width, std::integral_constant<int, kDropWarps>{}, std::true_type{});
    if constexpr (sizeof(T) == 2 && !kWide)
      if (shape.N > kSmallCluster * shape.clusters)
        return launch(width, std::integral_constant<int, 4>{}, std::false_type{});
    constexpr int kFew = kWide ? 4 : 2;
    launch(width, std::integral_constant<int, kFew>{}, std::false_type{});
  });
}

template void member_gradients(const BackwardArgs<float>&, cudaStream_t);
template void member_gradients(const BackwardArgs<Bf16>&, cudaStream_t);
template void member_gradients(const BackwardArgs<F16>&, cudaStream_t);

}  // namespace coterie::cuda
