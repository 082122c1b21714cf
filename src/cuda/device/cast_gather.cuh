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
  static constexpr int kMost = kDim == 64 ? 3 : 2;     // warpgroups
  static constexpr int kQueries = kDim == 64 ? 2 : 1;  // tiles of queries
  static constexpr int kSlots = kDim == 64 ? 32 : 24;  // of a warp that have room
  static constexpr int kBand = kMixRows * 128;         // 64 columns of a tile
  static constexpr int kTile = kDim / 64 * kBand;
  static constexpr int kInnerBand = kSlots * 128;
  static constexpr int kWeights = 16 * 128;  // of a tile of clusters
  static constexpr int kWarp = kDim / 64 * kInnerBand + kWeights;
  static constexpr int kGroup = kQueries * kTile + kWarp * (kWarpgroup / 32);
  static constexpr int kPointers = 80;

  static constexpr int bytes(int tiles, int groups) {
    return tiles * (2 * kTile + 8) + groups * kGroup + kPointers;
  }
  // How many warpgroups have room.
  static int groups(int tiles) { return min((227 * 1024 - bytes(tiles, 0)) / kGroup, kMost); }

  std::uint32_t base, group, own;  // of the block, of the warpgroup, of the warp
  int tiles;

  __device__ MixMemory(std::uint32_t shared, int count)
      : base(shared),
        group(shared + 2 * count * kTile + static_cast<int>(threadIdx.x) / kWarpgroup * kGroup),
        own(group + kQueries * kTile + static_cast<int>(threadIdx.x) % kWarpgroup / 32 * kWarp),
        tiles(count) {}

  // Surrogates (0) or summaries (1) of 64 clusters.
  __device__ std::uint32_t clusters(int tile, int which) const {
    return base + (2 * tile + which) * kTile;
  }
  __device__ std::uint32_t queries(int turn) const { return group + turn % kQueries * kTile; }
  __device__ std::uint32_t weights() const { return own; }
  __device__ std::uint32_t inner() const { return own + kWeights; }
  // Which clusters of a tile are there: 64 bits.
  __device__ std::uint32_t bits(int tile) const {
    return clusters(tiles, 0) + static_cast<int>(blockDim.x) / kWarpgroup * kGroup + tile * 8;
  }
  __device__ std::uint32_t pointers() const { return bits(tiles); }
};

// Tiles of one (item, head) that a block works on: numbers first .. end - 1 in the item.
struct MixRun {
  int item, head, first, end;
  ItemSpan span;
};

// What a run's tensors begin with. It stays in shared memory, for want of registers.
struct MixPointers {
  enum Field { entries, tokens, first, count, gates, queries, inner, out, lse };

  std::uint32_t base;

  template <class Pointer>
  __device__ Pointer get(Field field) const {
    std::uint64_t address;
    asm volatile("ld.shared.b64 %0, [%1];" : "=l"(address) : "r"(base + 8 * field) : "memory");
    return reinterpret_cast<Pointer>(address);
  }
  __device__ void set(Field field, const void* pointer) const {
    asm volatile("st.shared.b64 [%0], %1;" ::"r"(base + 8 * field), "l"(pointer) : "memory");
  }
  // By one thread.
  template <class T>
  __device__ void set_all(const MixArgs<T>& args, const MixRun& run) const {
    const CastShape& shape = args.shape;
    const int list_head = shape.list_head(run.head);
    const std::int64_t start = args.slots.start(run.item, run.span, list_head);
    const std::int64_t row = args.slots.row(run.span, list_head, 0);
    set(entries, args.slots.slots + start);
    set(tokens, args.slots.index + start);
    set(first, args.slots.first + row);
    set(count, args.slots.count + row);
    set(gates, shape.gates(run.span));
    set(queries, args.q.rows(run.span.batch, run.head, run.span.begin).data);
    set(inner, args.inner + shape.cluster(run.item, run.head, 0) * shape.width * shape.D);
    set(out, args.out.rows(run.span.batch, run.head, run.span.begin).data);
    set(lse, args.lse + shape.row(run.span, run.head));
  }
};

// Loads of a warp. Slots are looked up two tiles ahead, their entries and the queries one; the
// inner outputs come while the clusters are multiplied.
template <class T, int kDim>
struct MixLoader {
  using Memory = MixMemory<T, kDim>;
  using Index = const std::int32_t*;

  // Slots of the warp's tokens.
  struct Range {
    int begin, count;
  };

  const MixArgs<T>& args;
  const Memory memory;
  MixPointers pointers;
  int lane, warp_row, end, length;  // end of the tiles, tokens of the item

  __device__ MixLoader(const MixArgs<T>& all, const Memory& shared, const MixRun& run)
      : args(all),
        memory(shared),
        pointers{memory.pointers()},
        lane(static_cast<int>(threadIdx.x) % 32),
        warp_row(static_cast<int>(threadIdx.x) % kWarpgroup / 32 * 16),
        end(run.end),
        length(run.span.length) {}

  __device__ int first_row(int tile) const { return tile * kMixRows + warp_row; }
  // Lane 0: where the slots of the warp's first row begin; lanes 1 and 2: those of the last row and
  // how many they are.
  __device__ int fetch_bounds(int tile) const {
    const int begin = first_row(tile), last = min(begin + 16, length) - 1;
    if (tile >= end || begin > last || lane > 2) return 0;
    const MixPointers::Field field = lane == 2 ? MixPointers::count : MixPointers::first;
    return pointers.get<Index>(field)[lane == 0 ? begin : last];
  }
  __device__ static Range range(int bounds) {
    const int begin = __shfl_sync(~0u, bounds, 0);
    return {begin, __shfl_sync(~0u, bounds, 1) + __shfl_sync(~0u, bounds, 2) - begin};
  }
  __device__ int fetch_entry(const Range& range, int slot) const {
    return slot < range.count ? pointers.get<Index>(MixPointers::entries)[range.begin + slot] : 0;
  }
  __device__ int fetch_token(int entry) const {
    return pointers.get<Index>(MixPointers::tokens)[entry];
  }
  // Of row l % 16.
  __device__ float fetch_gate(int tile) const {
    return pointers.get<const float*>(
        MixPointers::gates)[min(first_row(tile) + lane % 16, length - 1)];
  }
  // Starts to copy rows lane / 8, lane / 8 + 4, ..., a chunk of each: those that are there, zeros
  // else. row(i) is the address of row lane / 8 + i and whether it is there.
  template <int kRows, class Row>
  __device__ void copy(std::uint32_t tile, int band_bytes, const Row& row) const {
    // The permutation of the chunks is that of every other row.
    const std::uint32_t even = Tile<T, 64>{tile}.chunk(lane / 8, lane % 8), odd = even ^ 64;
#pragma unroll
    for (int i = 0; i < kRows; i += 4) {
      bool there;
      const char* from = row(i, there);
#pragma unroll
      for (int band = 0; band < kDim / 64; ++band) {
        const bool inside = there && band * 64 + lane % 8 * 8 < args.shape.D;
        cp_async16((i % 8 == 0 ? even : odd) + i * 128 + band * band_bytes, from + band * 128,
                   inside ? 16 : 0);
      }
    }
  }
  __device__ void copy_queries(int turn, int tile) const {
    const int first = first_row(tile) + lane / 8;
    const auto pitch = static_cast<unsigned>(args.q.row * sizeof(T));
    const char* start = pointers.get<const char*>(MixPointers::queries) + lane % 8 * 16 +
                        static_cast<std::uint64_t>(pitch) * static_cast<unsigned>(first);
    copy<16>(memory.queries(turn) + warp_row * 128, Memory::kBand, [&](int i, bool& there) {
      there = first + i < length;
      return start + static_cast<std::uint64_t>(pitch) * i;
    });
    cp_async_commit();
  }
  // Lane i knows the entry of slot i.
  __device__ void copy_inner(int slots, int entry) const {
    const auto pitch = static_cast<unsigned>(args.shape.D * sizeof(T));
    const char* start = pointers.get<const char*>(MixPointers::inner) + lane % 8 * 16;
    const auto copy_some = [&](auto count, int first) {
      copy<decltype(count)::value>(
          memory.inner() + first * 128, Memory::kInnerBand, [&](int i, bool& there) {
            const int slot = first + i + lane / 8;
            there = slot < slots;
            return start + static_cast<std::uint64_t>(pitch) *
                               static_cast<unsigned>(__shfl_sync(~0u, entry, slot));
          });
    };
    copy_some(std::integral_constant<int, 16>(), 0);
    if (slots > 16) copy_some(std::integral_constant<int, Memory::kSlots - 16>(), 16);
    cp_async_commit();
  }
};

}  // namespace coterie::cuda
