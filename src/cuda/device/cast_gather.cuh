// SPDX-License-Identifier: MIT
// What a token's own clusters change in CAST's mix, gathered by a warpgroup for the one beside it
// that multiplies (cast_mix_sm90a.cu): per token the sum over its slots of
//   2^(logit - shift) (inner output - summary),
// with the largest of the logits as its shift, from which the other's softmax goes on. A warp has
// 16 neighbouring tokens, whose slots lie side by side: lane i knows slot i.
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
  // Four floats of a row; `four` counts them.
  __device__ float* sums(int turn, int row, int four) const {
    return reinterpret_cast<float*>(stage_memory() + stage(turn) * (kTile + kSums) + kTile) +
           row * kDim + (four ^ row % 4 * 2) * 4;
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
    return reinterpret_cast<unsigned long long*>(memory + 2 * tiles * kTile +
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
  static constexpr int kSlots = Stages::kSlots, kLanes = kDim / 8, kGroups = 32 / kLanes;

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

  // Starts to fetch the inner outputs of `count` slots.
  __device__ void fetch(int own, int count) const {
    constexpr int kChunks = Stages::kRowBytes / 16, kTogether = 32 / kChunks;
    const std::uint32_t to = shared_address(stages.inner()) + lane * 16;
    const int column = lane % kChunks * 4;
#pragma unroll 4
    for (int i = 0; i < count; i += kTogether) {
      const int slot = i + lane / kChunks;
      const std::int64_t row = __shfl_sync(~0u, own, slot);
      const bool there = slot < count && column < args.shape.D;
      cp_async16(to + i * Stages::kRowBytes, there ? inner + row * args.shape.D + column : inner,
                 there ? 16 : 0);
    }
  }
  // 16 bytes of a row of a tile.
  __device__ static uint4 shared_chunk(std::uint32_t tile, int row, int chunk) {
    uint4 words;
    asm volatile("ld.shared.v4.b32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
                 : "r"(Tile<T, 64>{tile + chunk / 8 * Stages::kBand}.chunk(row, chunk % 8)));
    return words;
  }
  // Lane i: product of slot i's token (a row of the tile) and cluster.
  __device__ float dots(int turn, int row, int cluster, int count) const {
    float result = 0.0f;
#pragma unroll 2
    for (int first = 0; first < count; first += kGroups) {
      const int slot = first + lane / kLanes, chunk = lane % kLanes;
      const int own_row = __shfl_sync(~0u, row, slot), own = __shfl_sync(~0u, cluster, slot);
      const uint4 q = shared_chunk(stages.queries(turn), own_row, chunk);
      const uint4 s = shared_chunk(stages.clusters(own / kMixRows, 0), own % kMixRows, chunk);
      const T *a = reinterpret_cast<const T*>(&q), *b = reinterpret_cast<const T*>(&s);
      float dot = 0.0f;
#pragma unroll
      for (int i = 0; i < 8; ++i) dot = fmaf(to_float(a[i]), to_float(b[i]), dot);
#pragma unroll
      for (int step = 1; step < kLanes; step *= 2) dot += __shfl_xor_sync(~0u, dot, step);
      const float mine = __shfl_sync(~0u, dot, lane % kGroups * kLanes);
      if (lane / kGroups * kGroups == first) result = mine;
    }
    return result;
  }
  // Adds the weighted differences of slots first .. first + count - 1 to the rows' sums, a group of
  // lanes to a row. Lane l has the place of row l, lane i the weight and cluster of slot i.
  __device__ void add(int turn, const Place& place, int first, int count, float weight,
                      int cluster, float rescale) const {
    const float* memory = reinterpret_cast<const float*>(stages.inner()) + lane % kLanes * 8;
#pragma unroll 1
    for (int row = lane / kLanes; row < 16; row += kGroups) {
      const int begin = __shfl_sync(~0u, place.first, row) - first;
      const int end = min(begin + __shfl_sync(~0u, place.count, row), count);
      const float factor = __shfl_sync(~0u, rescale, row);
      float4* to[2];
      float sum[8] = {};
#pragma unroll
      for (int half = 0; half < 2; ++half)
        to[half] = reinterpret_cast<float4*>(
            stages.sums(turn, warp_row + row, lane % kLanes * 2 + half));
      if (factor > 0.0f)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float4 old = *to[half];
          sum[4 * half] = factor * old.x;
          sum[4 * half + 1] = factor * old.y;
          sum[4 * half + 2] = factor * old.z;
          sum[4 * half + 3] = factor * old.w;
        }
      for (int slot = max(begin, 0); __any_sync(~0u, slot < end); ++slot) {
        const int own = slot & 31;
        const float mine = __shfl_sync(~0u, weight, own);
        const int number = __shfl_sync(~0u, cluster, own);
        if (slot >= end) continue;
        const uint4 words =
            shared_chunk(stages.clusters(number / kMixRows, 1), number % kMixRows, lane % kLanes);
        const T* summary = reinterpret_cast<const T*>(&words);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float4 x = *reinterpret_cast<const float4*>(memory + own * kDim + 4 * half);
          float* four = sum + 4 * half;
          four[0] = fmaf(mine, x.x - to_float(summary[4 * half]), four[0]);
          four[1] = fmaf(mine, x.y - to_float(summary[4 * half + 1]), four[1]);
          four[2] = fmaf(mine, x.z - to_float(summary[4 * half + 2]), four[2]);
          four[3] = fmaf(mine, x.w - to_float(summary[4 * half + 3]), four[3]);
        }
      }
#pragma unroll
      for (int half = 0; half < 2; ++half)
        *to[half] = make_float4(sum[4 * half], sum[4 * half + 1], sum[4 * half + 2],
                                sum[4 * half + 3]);
    }
  }
  // One batch of slots, which lie in shared memory; `shift` is that of row l so far.
  __device__ void add_batch(int turn, const Place& place, int first, int count, int own,
                            float factor, float& shift) const {
    int row = 0;  // of this lane's slot: the last one that begins there or before
#pragma unroll
    for (int step = 8; step > 0; step /= 2)
      if (__shfl_sync(~0u, place.first, row + step) <= first + lane) row += step;
    const int cluster = own / args.shape.width;
    const bool there = lane < count;
    float logit = dots(turn, warp_row + row, cluster, count) * __shfl_sync(~0u, factor, row);
    if (!there) logit = -INFINITY;
    // Largest logit of a row, by the lane of the row.
    float largest = shift;
    const int begin = place.first - first, end = min(begin + place.count, count);
    const int longest = __reduce_max_sync(~0u, end - max(begin, 0));
    for (int i = 0; i < longest; ++i) {
      const int slot = max(begin, 0) + i;
      const float other = __shfl_sync(~0u, logit, slot & 31);
      if (slot < end) largest = fmaxf(largest, other);
    }
    const float rescale = shift == -INFINITY ? 0.0f : exp2_approximate(shift - largest);
    shift = largest;
    const float weight = exp2_approximate(logit - __shfl_sync(~0u, shift, row));
    add(turn, place, first, count, there ? weight : 0.0f, cluster, rescale);
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
      for (;;) {
        add_batch(turn, place, first, min(end - first, kSlots), own, factor, shift);
        first += kSlots;
        if (first >= end) break;
        __syncwarp();
        own = entry(first, end);
        fetch(own, min(end - first, kSlots));
        cp_async_commit();
        cp_async_wait<0>();
        __syncwarp();
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
