// SPDX-License-Identifier: MIT
// The k-means of codes (hamming.cu): its arguments, a block's shared memory, and the centroids in
// it.
#pragma once

#include "coterie/random.h"
#include "cuda/device/hamming.cuh"
#include "cuda/device/team.cuh"
#include "cuda/hamming.h"

namespace coterie::cuda {

namespace hamming_detail {

constexpr int kThreads = 512, kWarps = kThreads / 32;
constexpr int kSegmentRows = 32704;       // changes of a segment fit in 16 bits, signed
constexpr int kSharedBytes = 225 * 1024;  // of a block, static shared memory left out
constexpr int kPending = kTileRows + 16;  // rows of a warp that compare with all centroids
constexpr int kRowBytes = 8 + 4;          // code and label
constexpr int kFew = 8;                   // centroids that lanes compare with one by one

struct HammingArgs {
  ClusterShape shape;
  Teams teams;
  HammingRun run;
  std::uint64_t* centroids;
  std::int32_t *votes, *histograms;
  std::uint32_t* changes;
  int* busy;           // (problems, iterations): whether a centroid moved or was drawn anew
  int segments;        // of a block's rows
  int columns;         // centroids in shared memory at a time, a multiple of kColumnStep
  int held_rows;       // of a block that shared memory holds, or 0
  int shared_words;    // for the sort
  unsigned key_scale;  // 512, unknown to the compiler so that it stays a multiply-add
};

// One (item, head) as its team sees it.
struct Problem {
  int number, count;  // `count` codes
  const std::uint64_t* all_codes;
  RowRange range;              // of this block
  const std::uint64_t* codes;  // of the range, as the labels
  std::int32_t* labels;

  __device__ int rows() const { return range.end - range.begin; }
};

// The shared memory of a block.
struct Stage {
  uint4* records;          // kTileRows a warp: code, offsets of the new and of the old cluster
  uint4* fragments;        // columns x 16 bytes, in the order in which lanes read them
  uint4* moved;            // half as many: centroids that moved
  ulonglong2* centroids;   // of the pass before and of this one
  std::uint32_t* changes;  // C x 32
  std::int32_t* pending;   // kPending a warp
  std::int32_t* counts;    // kWarps
  std::uint16_t* numbers;  // of the centroids that moved
  bool held;               // codes and labels of the block's rows are here
  std::uint64_t* codes;
  std::int32_t* labels;

  __device__ Stage(uint4* shared, const HammingArgs& args, bool votes) {
    records = shared;
    fragments = records + kWarps * kTileRows;
    moved = fragments + args.columns;
    centroids = reinterpret_cast<ulonglong2*>(moved + args.columns / 2);
    changes = reinterpret_cast<std::uint32_t*>(centroids + args.columns);
    pending = reinterpret_cast<std::int32_t*>(changes + (votes ? args.shape.clusters * 32 : 0));
    counts = pending + kWarps * kPending;
    numbers = reinterpret_cast<std::uint16_t*>(counts + kWarps);
    held = args.held_rows > 0;
    codes = reinterpret_cast<std::uint64_t*>(shared + args.shared_words / 4);
    labels = reinterpret_cast<std::int32_t*>(codes + args.held_rows);
  }
  static std::size_t bytes(int columns, int clusters, bool votes) {
    return kWarps * (kTileRows * sizeof(uint4) + kPending * 4 + 4) +
           static_cast<std::size_t>(columns) * (16 + 8 + 16 + 1) +
           (votes ? static_cast<std::size_t>(clusters) * 128 : 0);
  }
};

// Centroid c, or where `initial`, the code it starts from.
__device__ inline std::uint64_t centroid(const HammingArgs& args, const Problem& problem, int c,
                                         bool initial) {
  if (!initial)
    return args.centroids[static_cast<std::int64_t>(problem.number) * args.shape.clusters + c];
  const RandomStream stream{args.shape.seed, RandomUse::initial_centroid,
                            static_cast<std::uint32_t>(problem.number)};
  return problem.all_codes[random_permutation(stream, static_cast<std::uint32_t>(c),
                                              static_cast<std::uint32_t>(problem.count))];
}

// Column i of the fragments: lane l of column tile n holds word l%4 of [c, ~c], c = 8n + l/4; four
// tiles side by side.
__device__ __forceinline__ void store_column(uint4* fragments, int i, std::uint64_t code,
                                             std::uint64_t inverse) {
  auto* to =
      reinterpret_cast<std::uint32_t*>(fragments) + (i / 32 * 32 + i % 8 * 4) * 4 + i / 8 % 4;
  to[0] = static_cast<std::uint32_t>(code);
  to[4] = static_cast<std::uint32_t>(code >> 32);
  to[8] = static_cast<std::uint32_t>(inverse);
  to[12] = static_cast<std::uint32_t>(inverse >> 32);
}

// Fragments of centroids [first, first + columns). Beyond the last centroid zeros, which never win.
__device__ inline void stage_centroids(const HammingArgs& args, const Problem& problem, int first,
                                       int columns, bool initial, uint4* fragments) {
  for (int i = threadIdx.x; i < columns; i += kThreads) {
    const bool there = first + i < args.shape.clusters;
    const std::uint64_t code = there ? centroid(args, problem, first + i, initial) : 0;
    store_column(fragments, i, code, there ? ~code : 0);
  }
}

// Threads before this one where `value` is true; `carry` is added, and becomes the next carry.
__device__ inline int count_before(bool value, const Stage& stage, int& carry) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const unsigned lanes = __ballot_sync(0xffffffffu, value);
  if (lane == 0) stage.counts[warp] = __popc(lanes);
  __syncthreads();
  const int other = lane < kWarps ? stage.counts[lane] : 0;
  const int before = __reduce_add_sync(0xffffffffu, lane < warp ? other : 0);
  const int result = carry + before + __popc(lanes & ((1u << lane) - 1));
  carry += __reduce_add_sync(0xffffffffu, other);
  return result;
}

// The same for all centroids at once, and for those that moved by themselves, unless they are more
// than half; returns the number of these.
__device__ inline int stage_all(const HammingArgs& args, const Problem& problem, bool initial,
                                const Stage& stage) {
  const int columns = padded_columns(args.shape.clusters);
  int carry = 0;
  for (int first = 0; first < columns; first += kThreads) {
    if (first > 0) __syncthreads();
    const int i = first + static_cast<int>(threadIdx.x);
    const bool there = i < args.shape.clusters;
    const std::uint64_t code = there ? centroid(args, problem, i, initial) : 0;
    bool moves = false;
    if (i < columns) {
      store_column(stage.fragments, i, code, there ? ~code : 0);
      const std::uint64_t before = initial ? 0 : stage.centroids[i].y;
      moves = there && (initial || before != code);
      stage.centroids[i] = make_ulonglong2(before, code);
    }
    const int place = count_before(moves, stage, carry);
    if (!moves || place >= columns / 2) continue;
    store_column(stage.moved, place, code, ~code);
    stage.numbers[place] = static_cast<std::uint16_t>(i);
  }
  const int end = min(padded_columns<kMovedStep>(carry), columns / 2);
  for (int i = carry + threadIdx.x; i < end; i += kThreads) store_column(stage.moved, i, 0, 0);
  return carry;
}

}  // namespace hamming_detail

}  // namespace coterie::cuda
