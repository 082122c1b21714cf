// SPDX-License-Identifier: MIT
// What a token's own clusters change in CAST's mix, gathered by a warpgroup for the one beside it
// that multiplies (cast_mix_sm90a.cu): per token the sum over its slots of
//   2^(logit - shift) (inner output - summary),
// with the largest of the logits as its shift, from which the other's softmax goes on. A warp has
// 16 neighbouring tokens, whose slots lie side by side, and takes 16 of these at a time: lane i
// knows slot i % 16. Logits are the diagonal of a product of gathered rows, and the sums are a
// product with a matrix of weights, one in each column.
#pragma once

#include <cstdint>

#include "cuda/cast_mix.h"
#include "cuda/device/cast.cuh"
#include "cuda/device/wgmma.cuh"

namespace coterie::cuda {

constexpr int kMixRows = 64;  // tokens of a tile, clusters of a tile

// Shared memory: the clusters of an (item, head), and for each pair of warpgroups some stages.
template <class T, int kDim>
struct MixStages {
  static constexpr int kPairs = kDim == 64 ? 2 : 1, kStages = kDim == 64 ? 2 : 1;
  static constexpr int kSlots = kDim == 64 ? 32 : 16;  // of a warp at a time
  static constexpr int kRowBytes = kDim * static_cast<int>(sizeof(float));
  static constexpr int kInner = kPairs * (kWarpgroup / 32) * kSlots * kRowBytes;
  static constexpr int kBand = kMixRows * 128;  // 64 columns of a tile
  static constexpr int kTile = kDim / 64 * kBand;
  static constexpr int kSums = kMixRows * kDim * static_cast<int>(sizeof(float));
  static constexpr int kFacts = 2 * kMixRows * static_cast<int>(sizeof(float));

  static constexpr int bytes(int tiles) {
    return tiles * (2 * kTile + 8) + kInner + kPairs * kStages * (kTile + kSums + kFacts + 16);
  }

  unsigned char* memory;
  int tiles, pair;

  // Surrogates (0) or summaries (1) of 64 clusters.
  __device__ std::uint32_t clusters(int tile, int which) const {
    return shared_address(memory) + (2 * tile + which) * kTile;
  }
  __device__ int stage(int turn) const { return pair * kStages + turn % kStages; }
  // Inner outputs of a warp's slots.
  __device__ unsigned char* inner() const {
    const int warp = pair * (kWarpgroup / 32) + static_cast<int>(threadIdx.x) % kWarpgroup / 32;
    return memory + 2 * tiles * kTile + warp * (kSlots * kRowBytes);
  }
  __device__ unsigned char* stage_memory() const { return memory + 2 * tiles * kTile + kInner; }
  __device__ std::uint32_t queries(int turn) const {
    return shared_address(stage_memory()) + stage(turn) * (kTile + kSums);
  }
  // The rows of this warp as an accumulator: a thread's four of 8 columns.
  __device__ float4* sums(int turn, int eight) const {
    const int warp = static_cast<int>(threadIdx.x) % kWarpgroup / 32;
    return reinterpret_cast<float4*>(stage_memory() + stage(turn) * (kTile + kSums) + kTile) +
           (warp * (kDim / 8) + eight) * 32 + threadIdx.x % 32;
  }
  // Of a row: factor of its logits, to base 2 for a softmax (0), and shift (1).
  __device__ float* facts(int turn, int which) const {
    return reinterpret_cast<float*>(stage_memory() + kPairs * kStages * (kTile + kSums) +
                                    stage(turn) * kFacts) +
           which * kMixRows;
  }
  __device__ std::uint32_t barriers() const {
    return shared_address(stage_memory()) + kPairs * kStages * (kTile + kSums + kFacts);
  }
  __device__ std::uint32_t full(int turn) const { return barriers() + stage(turn) * 16; }
  __device__ std::uint32_t free(int turn) const { return full(turn) + 8; }
  __device__ int phase(int turn) const { return turn / kStages & 1; }
  // Which clusters of a tile are there.
  __device__ unsigned long long* bits() const {
    return reinterpret_cast<unsigned long long*>(stage_memory() +
                                                 kPairs * kStages * (kTile + kSums + kFacts + 16));
  }
  __device__ void init() const {
    if (threadIdx.x < 2 * kPairs * kStages)
      mbarrier_init(barriers() + threadIdx.x * 8, kWarpgroup / 32);
  }
};

// Tiles of one (item, head) that a block works on: numbers first .. end - 1 in the item.
struct MixRun {
  int item, head, first, end;
  ItemSpan span;
};

template <class T, int kDim>
struct MixGather {
  using Stages = MixStages<T, kDim>;
  static constexpr int kSlots = Stages::kSlots;

  // The slots of a warp's tokens: lane l knows token l, up to 16. Others are behind all slots.
  struct Place {
    int first = 0x7fffff00, count = 0;
    float gate = 0.0f;
  };

  const MixArgs<T>& args;
  const Stages& stages;
  const MixRun& run;
  const std::int32_t* entries;
  const float* inner;
  std::int64_t place_base;
  int lane, warp_row;
  float scale;

  __device__ MixGather(const MixArgs<T>& all, const Stages& memory, const MixRun& own)
      : args(all),
        stages(memory),
        run(own),
        lane(static_cast<int>(threadIdx.x) % 32),
        warp_row(static_cast<int>(threadIdx.x) % kWarpgroup / 32 * 16),
        scale(all.shape.scale * kLog2e) {
    const CastShape& shape = args.shape;
    const int list_head = shape.list_head(run.head);
    entries = args.slots.slots + args.slots.start(run.item, run.span, list_head);
    inner = args.inner + shape.cluster(run.item, run.head, 0) * shape.width * shape.D;
    place_base = args.slots.row(run.span, list_head, 0);
  }
  __device__ Place find(int tile) const {
    Place place;
    const int token = tile * kMixRows + warp_row + lane;
    if (lane >= 16 || tile >= run.end || token >= run.span.length) return place;
    place.first = args.slots.first[place_base + token];
    place.count = args.slots.count[place_base + token];
    place.gate = args.shape.gates(run.span)[token];
    return place;
  }
  __device__ static int first_of(const Place& place) { return __shfl_sync(~0u, place.first, 0); }
  // Beyond the last slot of the warp's tokens.
  __device__ static int end_of(const Place& place) {
    return __reduce_max_sync(~0u, place.count > 0 ? place.first + place.count : 0);
  }
  __device__ int entry(int first, int end) const {
    return lane < kSlots && first + lane < end ? entries[first + lane] : 0;
  }

  // Starts to fetch the inner outputs of `count` slots. The chunks of a row are permuted by its
  // number, so that the same column of four rows is in different banks.
  __device__ void fetch(int own, int count) const {
    constexpr int kChunks = Stages::kRowBytes / 16, kTogether = 32 / kChunks;
    const std::uint32_t to = shared_address(stages.inner());
    const int chunk = lane % kChunks;
    const bool inside = chunk * 4 < args.shape.D;
    const float* from = inner + (inside ? chunk * 4 : 0);
    const unsigned offset = static_cast<unsigned>(own) * static_cast<unsigned>(args.shape.D);
#pragma unroll 4
    for (int i = 0; i < count; i += kTogether) {
      const int slot = i + lane / kChunks;
      const unsigned row = __shfl_sync(~0u, offset, slot);
      cp_async16(to + slot * Stages::kRowBytes + (chunk ^ inner_swizzle(slot)) * 16, from + row,
                 inside && slot < count ? 16 : 0);
    }
  }
  __device__ static int inner_swizzle(int slot) { return (slot / 2 & 3) * 2; }
  __device__ float inner_value(int slot, int column) const {
    const float* memory = reinterpret_cast<const float*>(stages.inner());
    return memory[slot * kDim + ((column / 4) ^ inner_swizzle(slot)) * 4 + column % 4];
  }
  // The address of this lane's 16 bytes, for ldmatrix of rows that the lanes know.
  __device__ static std::uint32_t row_chunk(std::uint32_t tile, int row, int chunk) {
    return Tile<T, 64>{tile + chunk / 8 * Stages::kBand}.chunk(row, chunk % 8);
  }

  // Product of the token (a row of the tile) and the cluster of slot i % 16.
  __device__ float dots(int turn, int row, int cluster) const {
    const std::uint32_t table = stages.clusters(cluster / kMixRows, 0);
    Accumulator product = {};
#pragma unroll
    for (int d = 0; d < kDim / 16; ++d) {
      FragmentA<T> a;
      std::uint32_t s[4];
      ldmatrix_x4(a.r, row_chunk(stages.queries(turn), row, 2 * d + lane / 16));
      ldmatrix_x4(s, row_chunk(table, cluster % kMixRows, 2 * d + lane / 16));
      const FragmentB<T> b{{s[0], s[2], s[1], s[3]}};
      multiply_add(product, a, b);
    }
    // Lane 4 r + r / 2 has the elements of rows r and r + 8.
    const bool odd = lane / 4 % 2;
    const int from = lane % 8 * 4 + lane % 8 / 2;
    const float low = __shfl_sync(~0u, odd ? product[0][1] : product[0][0], from);
    const float high = __shfl_sync(~0u, odd ? product[1][3] : product[1][2], from);
    return lane % 16 < 8 ? low : high;
  }
  // Adds weights times (inner output - summary) of 16 slots from `base` of those in shared memory,
  // of which `count` are there. Lane i has row, weight and cluster of slot i % 16.
  __device__ void add(Accumulator (&sums)[kDim / 16], int base, int count, int row, float weight,
                      int cluster) const {
    const int own = lane / 4;
    int slots[4];
    float low[4], high[4];  // weights in rows own and own + 8
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      slots[i] = lane % 4 * 2 + i % 2 + i / 2 * 8;
      const float mine = __shfl_sync(~0u, weight, slots[i]);
      const int at = __shfl_sync(~0u, row, slots[i]);
      low[i] = at == own ? mine : 0.0f;
      high[i] = at == own + 8 ? mine : 0.0f;
    }
    FragmentA<T> minus;
    minus.r[0] = pack2<T>(-low[0], -low[1]);
    minus.r[1] = pack2<T>(-high[0], -high[1]);
    minus.r[2] = pack2<T>(-low[2], -low[3]);
    minus.r[3] = pack2<T>(-high[2], -high[3]);
    const std::uint32_t table = stages.clusters(cluster / kMixRows, 1);
#pragma unroll
    for (int d = 0; d < kDim / 16; ++d) {
      FragmentB<T> b;
      ldmatrix_x4_trans(b.r, row_chunk(table, cluster % kMixRows, 2 * d + lane / 16));
      multiply_add(sums[d], minus, b);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const std::uint32_t a[4] = {rounded(low[2 * half]), rounded(high[2 * half]),
                                  rounded(low[2 * half + 1]), rounded(high[2 * half + 1])};
#pragma unroll
      for (int j = 0; j < kDim / 8; ++j) {
        std::uint32_t b[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int slot = slots[2 * half + i];
          b[i] = rounded(slot < count ? inner_value(base + slot, 8 * j + own) : 0.0f);
        }
        mma_m16n8k8_tf32(sums[j / 2][j % 2], a, b);
      }
    }
  }
  __device__ static std::uint32_t rounded(float value) {
    std::uint32_t bits;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(value));
    return bits;
  }
  // 16 slots from `base` of those in shared memory, the first of which is `first` of all, `count`
  // of them there. `shift` is that of row l so far.
  __device__ void add_batch(Accumulator (&sums)[kDim / 16], int turn, const Place& place, int first,
                            int base, int count, int own_all, float factor, float& shift) const {
    const int slot = lane % 16;
    first += base;
    count = min(count - base, 16);
    const bool there = slot < count;
    const int own = __shfl_sync(~0u, own_all, base + slot);
    int row = 0;  // of this lane's slot: the last one that begins there or before
#pragma unroll
    for (int step = 8; step > 0; step /= 2)
      if (__shfl_sync(~0u, place.first, row + step) <= first + slot) row += step;
    const int cluster = there ? own / args.shape.width : 0;
    const float dot = dots(turn, warp_row + row, cluster);
    const float scaled = dot * __shfl_sync(~0u, factor, row);
    const float logit = there ? scaled : -INFINITY;
    // Largest logit of a row, by the lane of the row.
    float largest = shift;
    const int begin = max(place.first - first, 0);
    const int end = min(place.first - first + place.count, count);
    const int longest = __reduce_max_sync(~0u, end - begin);
    for (int i = 0; i < longest; ++i) {
      const float other = __shfl_sync(~0u, logit, (begin + i) & 15);
      if (begin + i < end) largest = fmaxf(largest, other);
    }
    const float rescale = shift == -INFINITY ? 0.0f : exp2_approximate(shift - largest);
    if (__any_sync(~0u, shift > -INFINITY)) {
      const float factors[2] = {__shfl_sync(~0u, rescale, lane / 4),
                                __shfl_sync(~0u, rescale, lane / 4 + 8)};
#pragma unroll
      for (int i = 0; i < kDim / 2; ++i) sums[i / 8][i / 4 % 2][i % 4] *= factors[i / 2 % 2];
    }
    shift = largest;
    const float weight = exp2_approximate(logit - __shfl_sync(~0u, shift, row));
    add(sums, base, count, row, there ? weight : 0.0f, cluster);
  }

  // Queries of this warp's rows.
  __device__ void load_queries(int turn, int tile) const {
    const int first = tile * kMixRows + warp_row;
    Rows<const T> rows = args.q.rows(run.span.batch, run.head, run.span.begin);
    rows.aligned = true;
#pragma unroll
    for (int band = 0; band < kDim / 64; ++band) {
      load_tile<16, 32>(Tile<T, 64>{stages.queries(turn) + band * Stages::kBand}.below(warp_row),
                        rows, first, run.span.length - first);
      rows.data += 64;
      rows.width -= 64;
    }
  }

  // Fills the stages of this pair's tiles; returns the next turn.
  __device__ int work(int turn) const {
    constexpr int kPairs = Stages::kPairs;
    int tile = run.first + stages.pair;
    Place place = find(tile), next_place = find(tile + kPairs);
    int first = first_of(place), end = end_of(place), own = entry(first, end);
#pragma unroll 1
    for (; tile < run.end; tile += kPairs, ++turn) {
      fetch(own, min(end - first, kSlots));
      if (turn >= Stages::kStages) mbarrier_wait(stages.free(turn), stages.phase(turn) ^ 1);
      load_queries(turn, tile);
      cp_async_commit();
      const int next_first = first_of(next_place), next_end = end_of(next_place);
      const int next_own = entry(next_first, next_end);
      const Place after = find(tile + 2 * kPairs);
      const float factor = scale * gate_factor(args.shape, place.gate);
      float shift = -INFINITY;
      cp_async_wait<0>();
      __syncwarp();
      Accumulator sums[kDim / 16] = {};
#pragma unroll 1
      for (;;) {
        const int count = min(end - first, kSlots);
#pragma unroll 1
        for (int base = 0; base < count; base += 16)
          add_batch(sums, turn, place, first, base, count, own, factor, shift);
        first += kSlots;
        if (first >= end) break;
        __syncwarp();
        own = entry(first, end);
        fetch(own, min(end - first, kSlots));
        cp_async_commit();
        cp_async_wait<0>();
        __syncwarp();
      }
#pragma unroll
      for (int j = 0; j < kDim / 8; ++j) {
        const float* four = sums[j / 2][j % 2];
        *stages.sums(turn, j) = make_float4(four[0], four[1], four[2], four[3]);
      }
      if (lane < 16) {
        stages.facts(turn, 0)[warp_row + lane] = fmaxf(fabsf(factor), 1e-30f);
        stages.facts(turn, 1)[warp_row + lane] = shift;
      }
      __syncwarp();
      if (lane == 0) mbarrier_arrive(stages.full(turn));
      place = next_place;
      next_place = after;
      first = next_first;
      end = next_end;
      own = next_own;
    }
    return turn;
  }
};

}  // namespace coterie::cuda
