// SPDX-License-Identifier: MIT
// What CAST's mix has in shared memory (cast_mix_sm90a.cu): the clusters of an (item, head), and
// for each warp the queries of 16 tokens and the inner outputs of their slots, of this tile and the
// next. The slots of neighbouring tokens lie side by side.
#pragma once

#include <cstdint>

#include "cuda/cast_mix.h"
#include "cuda/device/cast.cuh"
#include "cuda/device/wgmma.cuh"

namespace coterie::cuda {

constexpr int kMixRows = 64;  // tokens of a tile, clusters of a tile

template <class T, int kDim>
struct MixMemory {
  static constexpr int kMost = kDim == 64 ? 3 : 2;  // warpgroups
  static constexpr int kSlots = 32;                 // of a warp that have room: one a lane
  static constexpr int kBand = kMixRows * 128;      // 64 columns of a tile
  static constexpr int kTile = kDim / 64 * kBand;
  static constexpr int kQueryBand = 16 * 128, kInnerBand = kSlots * 128;
  static constexpr int kStage = kDim / 64 * (kQueryBand + kInnerBand);
  static constexpr int kGroup = 2 * kStage * (kWarpgroup / 32);

  __host__ __device__ static constexpr int bytes(int tiles, int groups) {
    return tiles * (2 * kTile + 8) + groups * kGroup;
  }
  // How many warpgroups have room.
  static int groups(int tiles) { return std::min((227 * 1024 - bytes(tiles, 0)) / kGroup, kMost); }

  unsigned char* memory;
  int tiles;

  // Surrogates (0) or summaries (1) of 64 clusters.
  __device__ std::uint32_t clusters(int tile, int which) const {
    return shared_address(memory) + (2 * tile + which) * kTile;
  }
  __device__ std::uint32_t queries(int turn) const {
    return clusters(tiles, 0) + (static_cast<int>(threadIdx.x) / 32 * 2 + turn % 2) * kStage;
  }
  __device__ std::uint32_t inner(int turn) const { return queries(turn) + kDim / 64 * kQueryBand; }
  // Which clusters of a tile are there.
  __device__ unsigned long long* bits() const {
    const int groups = static_cast<int>(blockDim.x) / kWarpgroup;
    return reinterpret_cast<unsigned long long*>(memory + 2 * tiles * kTile + groups * kGroup);
  }
};

// Tiles of one (item, head) that a block works on: numbers first .. end - 1 in the item.
struct MixRun {
  int item, head, first, end;
  ItemSpan span;
};

// Loads of a warp, for every `step`-th tile of a run. Slots are looked up three tiles ahead, their
// entries two, and rows are copied one tile ahead.
template <class T, int kDim>
struct MixLoader {
  using Memory = MixMemory<T, kDim>;

  // Slots of the warp's tokens.
  struct Range {
    int begin, count;
  };
  // What the lanes know: of their slot the entry and the token, of their row the gate.
  struct Lanes {
    Range range;
    int entry, token;
    float gate;
  };

  const MixArgs<T>& args;
  const Memory memory;
  const MixRun run;
  const std::int32_t *entries, *tokens, *first, *count;
  const T* inner;
  const float* gates;
  int lane, warp_row;

  __device__ MixLoader(const MixArgs<T>& all, const Memory& shared, const MixRun& own)
      : args(all),
        memory(shared),
        run(own),
        lane(static_cast<int>(threadIdx.x) % 32),
        warp_row(static_cast<int>(threadIdx.x) % kWarpgroup / 32 * 16) {
    const CastShape& shape = args.shape;
    const int list_head = shape.list_head(run.head);
    const std::int64_t start = args.slots.start(run.item, run.span, list_head);
    const std::int64_t row = args.slots.row(run.span, list_head, 0);
    entries = args.slots.slots + start;
    tokens = args.slots.index + start;
    first = args.slots.first + row;
    count = args.slots.count + row;
    inner = args.inner + shape.cluster(run.item, run.head, 0) * shape.width * shape.D;
    gates = shape.gates(run.span);
  }

  __device__ int first_row(int tile) const { return tile * kMixRows + warp_row; }
  // Lane 0: where the slots of the warp's first row begin; lanes 1 and 2: those of the last row and
  // how many they are.
  __device__ int fetch_bounds(int tile) const {
    const int begin = first_row(tile), end = min(begin + 16, run.span.length);
    if (tile >= run.end || begin >= end || lane > 2) return 0;
    return (lane == 2 ? count : first)[lane == 0 ? begin : end - 1];
  }
  __device__ static Range range(int bounds) {
    const int begin = __shfl_sync(~0u, bounds, 0);
    return {begin, __shfl_sync(~0u, bounds, 1) + __shfl_sync(~0u, bounds, 2) - begin};
  }
  __device__ int fetch_entry(const Range& range, int slot) const {
    return slot < range.count ? entries[range.begin + slot] : -1;
  }
  __device__ void fetch_facts(Lanes& own, int tile) const {
    own.token = own.entry >= 0 ? tokens[own.entry] : 0;
    own.gate = gates[max(min(first_row(tile) + lane % 16, run.span.length - 1), 0)];
  }
  // Starts to copy the queries and inner outputs of a tile; eight lanes a row.
  __device__ void copy(int turn, int tile, const Lanes& own) const {
    const int chunk = lane % 8, some = lane / 8;
    const Rows<const T> rows = args.q.rows(run.span.batch, run.head, run.span.begin);
    const int D = args.shape.D, begin = first_row(tile) + some;
#pragma unroll
    for (int band = 0; band < kDim / 64; ++band) {
      const bool inside = band * 64 + chunk * 8 < D;
      const int column = inside ? band * 64 + chunk * 8 : 0;
      const Tile<T, 64> queries{memory.queries(turn) + band * Memory::kQueryBand};
      const T* from = rows.data + column;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const bool there = inside && begin + 4 * i < run.span.length;
        cp_async16(queries.chunk(some + 4 * i, chunk),
                   from + (there ? begin + 4 * i : 0) * rows.pitch, there ? 16 : 0);
      }
      const Tile<T, 64> to{memory.inner(turn) + band * Memory::kInnerBand};
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (own.range.count <= 16 * half) break;
#pragma unroll
        for (int i = 16 * half; i < 16 * half + 16; i += 4) {
          const int entry = __shfl_sync(~0u, own.entry, i + some);
          cp_async16(to.chunk(i + some, chunk),
                     inner + column + static_cast<std::int64_t>(max(entry, 0)) * D,
                     inside && entry >= 0 ? 16 : 0);
        }
      }
    }
    cp_async_commit();
  }
};

}  // namespace coterie::cuda
