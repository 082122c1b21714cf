// SPDX-License-Identifier: MIT
// Tiles of tokens against all clusters of CAST, as the kernels of its mix share them: products by
// warps of 16 or 32 tokens, then what a token's own clusters change, by lanes side by side along
// the token's row.
#pragma once

#include <cstdint>

#include "cuda/cast/cast.cuh"
#include "cuda/cast/rows.cuh"
#include "cuda/prim/fragments.cuh"

namespace coterie::cuda {

// kGradients: with a tile of output gradients beside that of queries.
template <class T, int kDim, bool kGradients>
struct MixTile {
  static constexpr int kWarps = 4, kThreads = kWarps * 32;
  static constexpr bool kHeld = sizeof(T) == 2 && kDim <= 64;  // fragments stay in registers
  static constexpr int kM = kHeld ? 2 : 1;                     // times 16 tokens of a warp
  static constexpr int kRows = kWarps * 16 * kM;
  static constexpr int kBlocks = kHeld ? 3 : 1;              // on a multiprocessor, at least
  static constexpr int kColumns = sizeof(T) == 2 ? 64 : 32;  // clusters of a step
  static constexpr int kSides = kGradients ? 2 : 1;
  using Shape = Tile<T, kDim>;
  // Rows of floats, over the clusters' tiles when these are done with.
  static constexpr int kPitch = kDim + 4;
  static constexpr int kTileBytes = kSides * kRows * Shape::kRowBytes;
  static constexpr int kStageBytes = 4 * kColumns * Shape::kRowBytes;
  static constexpr int kFloatBytes = kRows * kPitch * static_cast<int>(sizeof(float));
  static constexpr int kWorkBytes = kStageBytes > kFloatBytes ? kStageBytes : kFloatBytes;
  static constexpr int kFactsBytes = 3 * kRows * static_cast<int>(sizeof(float));
  static constexpr int kBytes = kTileBytes + kWorkBytes + kFactsBytes;

  const CastShape& shape;
  unsigned char* memory;
  ItemChunk tile;
  int head, warp_row, lane;
  Rows<const T> keys, values;  // surrogates and summaries
  QueryFragments<T, kDim, kHeld, kM> held[kSides];

  __device__ MixTile(const CastShape& cast, unsigned char* shared, const ItemChunk& tokens,
                     const T* surrogates, const T* summaries)
      : shape(cast),
        memory(shared),
        tile(tokens),
        head(static_cast<int>(blockIdx.y)),
        warp_row(static_cast<int>(threadIdx.x) / 32 * 16 * kM),
        lane(static_cast<int>(threadIdx.x) % 32),
        keys(dense_rows(surrogates + static_cast<std::int64_t>(head) * cast.clusters * cast.D,
                        cast.D)),
        values(dense_rows(summaries + cast.cluster(tokens.item, head, 0) * cast.D, cast.D)) {}

  __device__ Shape tokens(int side) const {
    return {shared_address(memory) + side * kRows * Shape::kRowBytes};
  }
  __device__ Shape stage(int step, int which) const {
    return {shared_address(memory) + kTileBytes +
            (step % 2 * 2 + which) * kColumns * Shape::kRowBytes};
  }
  __device__ float* row_floats(int row) const {
    return reinterpret_cast<float*>(memory + kTileBytes) + row * kPitch;
  }
  // Of a row: factor of the logits, log-sum-exp, delta.
  __device__ float& fact(int which, int row) const {
    return reinterpret_cast<float*>(memory + kTileBytes + kWorkBytes)[which * kRows + row];
  }
  __device__ int token(int row) const { return tile.begin + row; }
  __device__ bool there(int row) const { return token(row) < tile.end; }
  // The row of a lane's accumulators.
  __device__ int row(int m, int half) const { return warp_row + 16 * m + 8 * half + lane / 4; }
  __device__ int steps() const { return (shape.clusters + kColumns - 1) / kColumns; }

  __device__ void load_tokens(int side, const Tensor4<const T>& from) const {
    load_tile<kRows, kThreads>(tokens(side), from.rows(tile.span.batch, head, tile.span.begin),
                               tile.begin, tile.end - tile.begin);
  }
  __device__ void load_clusters(int step) const {
    const int first = step * kColumns, count = shape.clusters - first;
    load_tile<kColumns, kThreads>(stage(step, 0), keys, first, count);
    load_tile<kColumns, kThreads>(stage(step, 1), values, first, count);
    cp_async_commit();
  }
  // Factors of the rows; log-sum-exps and deltas where they are known. Others see them after the
  // next synchronisation.
  __device__ void load_facts(const float* lse, const float* delta) const {
    for (int r = threadIdx.x; r < kRows; r += kThreads) {
      const std::int64_t place = shape.row(tile.span, head) + token(r);
      fact(0, r) = there(r) ? factor(gate(r)) : 0.0f;
      if (lse) fact(1, r) = there(r) ? lse[place] : 0.0f;
      if (delta) fact(2, r) = there(r) ? delta[place] : 0.0f;
    }
  }
  __device__ float gate(int row) const { return shape.gates(tile.span)[token(row)]; }
  __device__ float factor(float gate) const { return shape.scale * gate_factor(shape, gate); }

  // Waits for the clusters of a step and sends for the next; in the first, takes what the rows are
  // multiplied by.
  __device__ void begin(int step, float (&factor)[kM][2]) {
    cp_async_wait<0>();
    __syncthreads();
    if (step + 1 < steps()) load_clusters(step + 1);
    if (step > 0) return;
#pragma unroll
    for (int side = 0; side < kSides; ++side) held[side].load(tokens(side), warp_row);
#pragma unroll
    for (int i = 0; i < 2 * kM; ++i) factor[i / 2][i % 2] = fact(0, row(i / 2, i % 2));
  }
  // Products of the warp's tokens with 16 clusters: of queries with surrogates (side 0), of
  // gradients with summaries (side 1).
  __device__ __forceinline__ void products(Accumulator (&acc)[kM], int side, int step,
                                           int column) const {
    held[side].scores(acc, stage(step, side), column);
  }

  // The sums of a warp's rows from accumulators to row_floats, once all warps are here.
  __device__ void spread(const Accumulator (&sums)[kM][kDim / 16]) const {
    __syncthreads();
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int d = 0; d < kDim / 8; ++d)
          store2(row_floats(row(m, half)) + 8 * d + lane % 4 * 2, sums[m][d / 2][d % 2][2 * half],
                 sums[m][d / 2][d % 2][2 * half + 1]);
    __syncwarp();
  }
};

// A warp's rows by groups of lanes, neighbouring rows to a group, and the slots of their tokens,
// which lie side by side.
template <class Mix, class T, int kDim>
struct OwnRows {
  using Lanes = CastLanes<T, kDim>;
  using Floats = typename Lanes::Floats;
  static constexpr int kGroups = 32 / Lanes::kLanes;
  static constexpr int kEach = 16 * Mix::kM / kGroups;  // rows of a group
  static constexpr int kBatch = 4;                      // slots whose rows are fetched together

  const Mix& mix;
  Lanes lanes;
  const std::int32_t* entries;
  std::int64_t first_slot;
  int ends[kEach], begin;  // ends of the rows' slots

  __device__ OwnRows(const Mix& tile, const TokenSlots& slots)
      : mix(tile),
        entries(slots.slots +
                slots.start(tile.tile.item, tile.tile.span, tile.shape.list_head(tile.head))),
        first_slot(tile.shape.cluster(tile.tile.item, tile.head, 0) * tile.shape.width),
        begin(0) {
    const std::int64_t place =
        slots.row(mix.tile.span, mix.shape.list_head(mix.head), mix.token(row(0)));
    if (mix.there(row(0))) begin = slots.first[place];
#pragma unroll
    for (int k = 0; k < kEach; ++k)
      ends[k] = mix.there(row(k)) ? slots.first[place + k] + slots.count[place + k] : -1;
  }
  __device__ int row(int k) const { return mix.warp_row + mix.lane / Lanes::kLanes * kEach + k; }

  // For the rows' slots in order, all lanes of a warp together: use(load(slot, cluster), k, there,
  // slot). Lanes without a slot have there = false and some slot.
  template <class Load, class Use>
  __device__ __forceinline__ void for_slots(const Load& load, const Use& use) const {
    int end = begin;
#pragma unroll
    for (int k = 0; k < kEach; ++k) end = max(end, ends[k]);
    for (int first = begin; __any_sync(~0u, first < end); first += kBatch) {
      int entry[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) entry[i] = first + i < end ? entries[first + i] : 0;
      decltype(load(first_slot, 0)) data[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i)
        data[i] = load(first_slot + entry[i], entry[i] / mix.shape.width);
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        int k = 0;
#pragma unroll
        for (int j = 0; j + 1 < kEach; ++j) k += ends[j] >= 0 && ends[j] <= first + i;
        use(data[i], k, first + i < end, first_slot + entry[i]);
      }
    }
  }

  // A row of a tile of tokens.
  __device__ Floats token_row(int side, int k) const {
    return lanes.load_shared(mix.tokens(side).chunk(row(k), lanes.lane));
  }
  // This lane's part of row_floats.
  __device__ float* floats(int k) const { return mix.row_floats(row(k)) + lanes.column(); }
  __device__ void add(int k, float weight, const Floats& values) const {
    float* to = floats(k);
#pragma unroll
    for (int i = 0; i < Lanes::kVector; ++i) to[i] = fmaf(weight, values.value[i], to[i]);
  }
  __device__ void set(int k, const Floats& values) const {
#pragma unroll
    for (int i = 0; i < Lanes::kVector; ++i) floats(k)[i] = values.value[i];
  }
  __device__ Floats get(int k) const {
    Floats values;
#pragma unroll
    for (int i = 0; i < Lanes::kVector; ++i) values.value[i] = floats(k)[i];
    return values;
  }
};
static_assert(CastLanes<float, 64>::kLanes == 16 && CastLanes<float, 128>::kLanes == 32,
              "no lane beyond a row");

}  // namespace coterie::cuda
