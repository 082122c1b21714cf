// SPDX-License-Identifier: MIT
// The k-means of codes (hamming.cu): its arguments, and the assignment of a block's rows, which
// count their votes.
#pragma once

#include "coterie/random.h"
#include "cuda/device/group.cuh"
#include "cuda/device/hamming.cuh"
#include "cuda/hamming.h"

namespace coterie::cuda {

namespace hamming_detail {

constexpr int kThreads = 512, kWarps = kThreads / 32;
constexpr int kSegmentRows = 32704;       // changes of a segment fit in 16 bits, signed
constexpr int kSharedBytes = 226 * 1024;  // of a block, static shared memory left out

struct HammingArgs {
  ClusterShape shape;
  Teams teams;
  HammingRun run;
  std::uint64_t* centroids;
  std::int32_t *votes, *histograms;
  std::uint32_t* changes;
  int* busy;     // (problems, iterations): changed labels plus empty clusters
  int segments;  // of a block's rows
  int columns;   // centroids in shared memory at a time, a multiple of kColumnStep
  int shared_words;
  unsigned key_scale;  // 512, unknown to the compiler so that it stays a multiply-add
};

// One (item, head) as its team sees it.
struct Problem {
  int number, count;  // `count` codes
  const std::uint64_t* codes;
  std::int32_t* labels;
  RowRange range;  // of this block
};

// The shared memory of a block.
struct Stage {
  uint4* fragments;        // columns x 16 bytes, in the order in which lanes read them
  std::uint32_t* changes;  // C x 32
  uint4* records;          // kTileRows a warp: code, offsets of the new and of the old cluster
};

// Centroid c, or where `initial`, the code it starts from.
__device__ inline std::uint64_t centroid(const HammingArgs& args, const Problem& problem, int c,
                                         bool initial) {
  if (!initial)
    return args.centroids[static_cast<std::int64_t>(problem.number) * args.shape.clusters + c];
  const RandomStream stream{args.shape.seed, RandomUse::initial_centroid,
                            static_cast<std::uint32_t>(problem.number)};
  return problem.codes[random_permutation(stream, static_cast<std::uint32_t>(c),
                                          static_cast<std::uint32_t>(problem.count))];
}

// Fragments of centroids [first, first + columns): lane l of column tile n holds word l%4 of
// [c, ~c], c = 8n + l/4; four tiles side by side. Beyond the last centroid zeros, which never win.
__device__ inline void stage_centroids(const HammingArgs& args, const Problem& problem, int first,
                                       int columns, bool initial, uint4* fragments) {
  for (int i = threadIdx.x; i < columns; i += kThreads) {
    uint2 code = make_uint2(0, 0), inverse = code;
    if (first + i < args.shape.clusters) {
      const std::uint64_t bits = centroid(args, problem, first + i, initial);
      code = make_uint2(static_cast<unsigned>(bits), static_cast<unsigned>(bits >> 32));
      inverse = make_uint2(~code.x, ~code.y);
    }
    const int tile = i / 8;
    auto* to =
        reinterpret_cast<std::uint32_t*>(fragments) + (tile / 4 * 32 + i % 8 * 4) * 4 + tile % 4;
    to[0] = code.x;
    to[4] = code.y;
    to[8] = inverse.x;
    to[12] = inverse.y;
  }
}

// Rows of the warp's tile as the left factor; lanes 2 and 3 of four hold the complement.
__device__ __forceinline__ void load_codes(const Problem& problem, int first,
                                           std::uint32_t (&a)[kMTiles][2]) {
  const int lane = threadIdx.x % 32;
  const auto* words = reinterpret_cast<const std::uint32_t*>(problem.codes);
  const std::uint32_t flip = lane & 2 ? 0xffffffffu : 0u;
#pragma unroll
  for (int m = 0; m < kMTiles; ++m)
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = first + 16 * m + 8 * r + lane / 4;
      a[m][r] =
          (row < problem.range.end ? words[2 * static_cast<std::int64_t>(row) + (lane & 1)] : 0u) ^
          flip;
    }
}

// Adds the bits of listed rows to their new clusters and takes them from the old ones.
template <bool kShared>
__device__ __forceinline__ void cast_votes(const uint4* records, int count, std::uint32_t* table) {
  const int lane = threadIdx.x % 32;
#pragma unroll 4
  for (int i = 0; i < count; ++i) {
    const std::uint32_t word = reinterpret_cast<const std::uint32_t*>(records + i)[lane / 16];
    const uint2 clusters = *(reinterpret_cast<const uint2*>(records + i) + 1);
    const std::uint32_t votes = (word >> (lane % 16)) & 0x00010001u;
    if constexpr (kShared) {
      atomicAdd(table + clusters.x + lane, votes);
      if (clusters.y != ~0u) atomicAdd(table + clusters.y + lane, 0u - votes);
    } else {
      const std::uint32_t low = votes & 1, high = votes >> 16;
      std::uint32_t* to = table + 2 * (static_cast<std::int64_t>(clusters.x) + lane);
      if (low) atomicAdd(to, 1u);
      if (high) atomicAdd(to + 1, 1u);
      if (clusters.y == ~0u) continue;
      to = table + 2 * (static_cast<std::int64_t>(clusters.y) + lane);
      if (low) atomicAdd(to, ~0u);
      if (high) atomicAdd(to + 1, ~0u);
    }
  }
}

// Writes new labels and lists the rows that changed; returns their number.
__device__ __forceinline__ int list_changes(const Problem& problem, int first, bool initial,
                                            const Point (&mine)[2], const int (&old)[2],
                                            uint4* records) {
  const int lane = threadIdx.x % 32, base = first + 16 * (lane % 4) + lane / 4;
  int count = 0;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = base + 8 * r;
    const bool changed = row < problem.range.end && mine[r].label != old[r];
    const unsigned lanes = __ballot_sync(0xffffffffu, changed);
    if (changed) {
      problem.labels[row] = mine[r].label;
      const std::uint64_t code = problem.codes[row];
      records[count + __popc(lanes & ((1u << lane) - 1))] =
          make_uint4(static_cast<unsigned>(code), static_cast<unsigned>(code >> 32) | 0x80000000u,
                     static_cast<unsigned>(mine[r].label) * 32u,
                     initial ? ~0u : static_cast<unsigned>(old[r]) * 32u);
    }
    count += __popc(lanes);
  }
  __syncwarp();
  return count;
}

// Assigns rows [first, end) of the block's range and counts their votes unless this is the last
// pass; returns how many labels this warp changed.
template <bool kShared>
__device__ int assign_rows(const HammingArgs& args, const Problem& problem, const Stage& stage,
                           RowRange rows, int iteration) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, clusters = args.shape.clusters;
  const bool initial = iteration == 0, vote = iteration < args.run.iterations;
  uint4* records = stage.records + warp * kTileRows;
  std::uint32_t* table = kShared ? stage.changes
                                 : reinterpret_cast<std::uint32_t*>(args.votes) +
                                       static_cast<std::int64_t>(problem.number) * clusters * 64;
  int changed = 0;
  for (int round = rows.begin; round < rows.end; round += kWarps * kTileRows) {
    const int first = round + warp * kTileRows;
    std::uint32_t a[kMTiles][2], best[kMTiles][2];
    int old[2];
    Point mine[2] = {}, next[2] = {};
    load_codes(problem, first, a);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = first + 16 * (lane % 4) + lane / 4 + 8 * r;
      old[r] = initial || row >= problem.range.end ? -1 : problem.labels[row];
    }
    for (int column = 0; column < clusters; column += args.columns) {
      const int columns = min(args.columns, padded_columns(clusters - column));
      if (clusters > args.columns) {  // more than fit: every round reads them again
        __syncthreads();
        stage_centroids(args, problem, column, columns, initial, stage.fragments);
        __syncthreads();
      }
      if (first >= rows.end) continue;
      nearest_keys(stage.fragments, columns, args.key_scale, a, best);
      decode_keys(best, columns, next);
#pragma unroll
      for (int r = 0; r < 2; ++r)
        if (next[r].value > mine[r].value) mine[r] = {next[r].value, column + next[r].label};
    }
    if (first >= rows.end) continue;
    const int count = list_changes(problem, first, initial, mine, old, records);
    if (vote) cast_votes<kShared>(records, count, table);
    __syncwarp();
    changed += count;
  }
  return changed;
}

}  // namespace hamming_detail

}  // namespace coterie::cuda
