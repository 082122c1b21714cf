// SPDX-License-Identifier: MIT
// The backward pass of windows along a list of all rows (attend_window_bwd_sm90a.cu): shared memory
// of a block, and the part of an item that it walks along.
//
// Tiles of 64 queries and of 64 keys have the same numbers: queries of tile t see keys of the tiles
// t - 4 .. t only, the first and the last of them in part.
#pragma once

#include <cstdint>

#include "cuda/device/list_bwd_block.cuh"
#include "cuda/device/list_stream_copy.cuh"
#include "cuda/device/warp.cuh"

namespace coterie::cuda {

constexpr int kWalkGroups = 4;  // warpgroups, each with a tile of keys
constexpr int kWalkWindow = kWalkGroups * kStreamRows;
constexpr int kWalkKeys = 6, kWalkQueries = 2;  // places of tiles
constexpr int kWalkTile = kStreamRows * 128;    // bytes of a tensor
constexpr int kWalkHalf = 32;                   // queries of a half step
constexpr int kWalkPartStride = 20;  // floats: sums of a query by warp, no two lanes in a bank

// Tiles [first, last) of an item and head that a block owns: their queries' dq, their keys' dk and
// dv. It walks along the queries of [first, end).
struct alignas(16) WalkPart {
  int first, last, end;
  int next;  // number of the first tile behind it
  int head, batch, q_begin, k_begin;
  int q_origin, k_origin;  // ranks of tile 0, may be negative
  int queries, keys;
  const float* lse;        // of rank 0
  float exponent, factor;  // of scores, in base 2; of dq and dk
};

// Which tiles a block has. Tiles are numbered over the items of a head where items are packed, over
// the heads of an item otherwise; numbers may be without a tile.
struct WalkCut {
  int per_head;  // numbers of a head, or of an item and head
  int per_item;  // packed: numbers of an item, beside a number for every 64 rows
  int total, per_block;
  int reach;  // keys in sight behind a query's own
};

// The part that begins with tile number `next`.
template <class T>
__device__ WalkPart find_part(const ListBackwardArgs<T>& args, const WalkCut& cut, int next,
                              int stop) {
  const ListProblem& problem = args.problem;
  WalkPart part;
  const int number = next / cut.per_head;
  int item = number / problem.q.heads, first = next - number * cut.per_head;
  int behind = cut.per_head;  // the first number behind the item
  part.head = number % problem.q.heads;
  if (const std::int32_t* offsets = problem.q.spans.cu_seqlens) {
    const auto start = [&](int i) {
      return i * cut.per_item + min(max(offsets[i], 0), problem.q.spans.rows) / kStreamRows;
    };
    item = 0;
    for (int high = problem.q.items; high - item > 1;) {
      const int middle = (item + high) / 2;
      (start(middle) <= first ? item : high) = middle;
    }
    if (item + 1 < problem.q.items) behind = start(item + 1);
    behind = max(behind, first + 1) - start(item);
    first -= start(item);
  }
  const int count = min(behind - first, stop - next);
  const ItemSpan q = problem.q.spans.span(item), k = problem.k.spans.span(item);
  const int shift = (problem.offset_rows ? k.length - q.length : 0) + cut.reach;
  const auto tiles = [](int ranks) { return (max(ranks, 0) + kStreamRows - 1) / kStreamRows; };
  part.q_origin = -tiles(shift) * kStreamRows;
  part.k_origin = part.q_origin + shift;
  const int q_tiles = tiles(q.length - part.q_origin);
  part.next = next + count;
  part.first = first;
  part.last = min(first + count, max(q_tiles, tiles(k.length - part.k_origin)));
  part.end = max(part.last, min(part.last + kWalkGroups, q_tiles));
  part.batch = q.batch;
  part.q_begin = q.begin;
  part.k_begin = k.begin;
  part.queries = q.length;
  part.keys = k.length;
  const float score = problem.score_scale(part.head);
  part.exponent = score * kLog2e;
  part.factor = score / args.weight_scale;
  part.lse = args.lse.data + ListProblem::row_base(problem.q, q, part.head);
  return part;
}

struct WalkShape {
  static constexpr int kThreads = kWalkGroups * kWarpgroup;
  static constexpr int kQueriesAt = kWalkKeys * 2 * kWalkTile;
  static constexpr int kSlopesAt = kQueriesAt + kWalkQueries * 2 * kWalkTile;
  static constexpr int kWeightsAt = kSlopesAt + (kWalkGroups + 1) * kWalkTile;
  static constexpr int kStageAt = kWeightsAt + (kWalkGroups + 1) * kWalkTile;
  static constexpr int kShiftsAt = kStageAt + kWalkTile;
  static constexpr int kPartsAt = kShiftsAt + kWalkQueries * kStreamRows * 4;
  static constexpr int kPartAt = kPartsAt + 2 * kWalkHalf * kWalkPartStride * 4;
  static constexpr int kSourcesAt = kPartAt + 96;
  static constexpr int kBytes = kSourcesAt + 4 * 48;
  static_assert(kBytes <= 227 * 1024, "more than the shared memory of a block");
  unsigned char* memory;
  std::uint32_t base;

  __device__ explicit WalkShape(unsigned char* at) : memory(at), base(shared_address(at)) {}

  // Tensors: keys and values; queries and output gradients.
  __device__ std::uint32_t keys(int place, int tensor) const {
    return base + (2 * place + tensor) * kWalkTile;
  }
  __device__ std::uint32_t queries(int place, int tensor) const {
    return base + kQueriesAt + (2 * place + tensor) * kWalkTile;
  }
  // dS and weights, a row for each key: of a warpgroup's tile, and of the newest keys.
  __device__ std::uint32_t slopes(int place) const { return base + kSlopesAt + place * kWalkTile; }
  __device__ std::uint32_t weights(int place) const {
    return base + kWeightsAt + place * kWalkTile;
  }
  // dq on its way out.
  __device__ std::uint32_t stage() const { return base + kStageAt; }
  // Of logits in base 2; at first lse as it is.
  __device__ float* shifts(int place) const {
    return reinterpret_cast<float*>(memory + kShiftsAt) + place * kStreamRows;
  }
  // The part at work.
  __device__ WalkPart& part() const { return *reinterpret_cast<WalkPart*>(memory + kPartAt); }
  // Sums of 32 queries by warp, in turn.
  __device__ float* parts(int turn) const {
    return reinterpret_cast<float*>(memory + kPartsAt) + turn * kWalkHalf * kWalkPartStride;
  }
};

// The place of a number counted from another one's place.
template <int kPlaces>
__device__ __forceinline__ int place_before(int place, int count) {
  return place >= count ? place - count : place - count + kPlaces;
}
template <int kPlaces>
__device__ __forceinline__ int place_after(int place, int count) {
  return place + count >= kPlaces ? place + count - kPlaces : place + count;
}

}  // namespace coterie::cuda
