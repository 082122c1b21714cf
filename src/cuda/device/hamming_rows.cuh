// SPDX-License-Identifier: MIT
// The assignment of a block's codes to their nearest centroids (hamming.cu); those that change
// their cluster vote.
//
// Once few centroids move, a pass looks at these only: a row that is as near to its own centroid as
// before has no other candidates. Rows that lost similarity are listed and compare with all.
#pragma once

#include "cuda/device/hamming_stage.cuh"

namespace coterie::cuda {

namespace hamming_detail {

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

// The assignment by one warp.
template <bool kShared>
struct RowAssigner {
  const HammingArgs& args;
  const Problem& problem;
  const Stage& stage;
  const bool initial, vote;
  const int lane, warp;

  // Of the block's rows, from shared memory where they fit.
  __device__ __forceinline__ std::uint64_t code_of(int row) const {
    return stage.held ? stage.codes[row] : problem.codes[row];
  }
  __device__ __forceinline__ std::uint32_t code_word(int word) const {
    return stage.held ? reinterpret_cast<const std::uint32_t*>(stage.codes)[word]
                      : reinterpret_cast<const std::uint32_t*>(problem.codes)[word];
  }
  __device__ __forceinline__ int label_of(int row) const {
    return stage.held ? stage.labels[row] : problem.labels[row];
  }

  // Rows as the left factor, where row(m, r) is number l/4 + 8 r of row tile m, or -1; lanes 2 and
  // 3 of four hold the complement.
  template <int kTiles, class Row>
  __device__ __forceinline__ void load_codes(const Row& row, std::uint32_t (&a)[kTiles][2]) const {
    const std::uint32_t flip = lane & 2 ? 0xffffffffu : 0u;
#pragma unroll
    for (int m = 0; m < kTiles; ++m)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int number = row(m, r);
        a[m][r] = (number >= 0 ? code_word(2 * number + (lane & 1)) : 0u) ^ flip;
      }
  }

  // What a lane found for a row.
  struct Answer {
    int row;  // -1 where there is none, or it must be compared with all
    int label, old;
  };

  // This lane's row gets a new label, and counts if it differs from the old one. -1 is no row.
  __device__ __forceinline__ void relabel(const Answer& answer) const {
    const auto [row, label, old] = answer;
    const bool changed = row >= 0 && label != old;
    const unsigned lanes = __ballot_sync(0xffffffffu, changed);
    if (lanes == 0) return;
    uint4* records = stage.records + warp * kTileRows;
    if (changed) {
      if (stage.held)
        stage.labels[row] = label;
      else
        problem.labels[row] = label;
      const std::uint64_t code = code_of(row);
      records[__popc(lanes & ((1u << lane) - 1))] = make_uint4(
          static_cast<unsigned>(code), static_cast<unsigned>(code >> 32) | 0x80000000u,
          static_cast<unsigned>(label) * 32u, initial ? ~0u : static_cast<unsigned>(old) * 32u);
    }
    __syncwarp();
    if (vote)
      cast_votes<kShared>(
          records, __popc(lanes),
          kShared ? stage.changes
                  : reinterpret_cast<std::uint32_t*>(args.votes) +
                        static_cast<std::int64_t>(problem.number) * args.shape.clusters * 64);
    __syncwarp();
  }

  __device__ int own_row(int first, int end) const {
    const int row = first + answered_row();
    return row < end ? row : -1;
  }
  __device__ auto tile_row(int first, int end) const {
    return [=](int m, int r) {
      const int row = first + 16 * m + 8 * r + lane / 4;
      return row < end ? row : -1;
    };
  }

  // Rows [first, end) of a tile against all centroids. All warps of the block come here.
  __device__ __forceinline__ Answer assign_tile(int first, int end) const {
    const int clusters = args.shape.clusters, row = own_row(first, end);
    std::uint32_t a[kMTiles][2], best[kMTiles][2];
    load_codes(tile_row(first, end), a);
    const int old = initial || row < 0 ? -1 : label_of(row);
    Point mine{};
    for (int column = 0; column < clusters; column += args.columns) {
      const int columns = min(args.columns, padded_columns(clusters - column));
      if (clusters > args.columns) {  // more than fit: every round reads them again
        __syncthreads();
        stage_centroids(args, problem, column, columns, initial, stage.fragments);
        __syncthreads();
      }
      if (first >= end) continue;
      nearest_keys<kColumnStep>(stage.fragments, columns, args.key_scale, a, best);
      const Point next = decode_keys(best, columns);
      if (next.value > mine.value) mine = {next.value, column + next.label};
    }
    return {row, mine.label, old};
  }

  // A row and its own centroid.
  struct Own {
    int row;  // -1 where there is none, or it must be compared with all
    std::uint64_t code;
    int label, distance;
  };
  // A row that lost similarity goes to the list, of `listed` so far.
  __device__ __forceinline__ Own find_own(int row, int& listed) const {
    Own own{row, 0, 0, 0};
    if (row >= 0) own = {row, code_of(row), label_of(row), 0};
    const ulonglong2 centroid = stage.centroids[own.label];
    own.distance = __popcll(own.code ^ centroid.y);
    if (!__any_sync(0xffffffffu, row >= 0 && centroid.x != centroid.y)) return own;
    const bool lost = row >= 0 && __popcll(own.code ^ centroid.x) < own.distance;
    const unsigned lanes = __ballot_sync(0xffffffffu, lost);
    if (lost) {
      stage.pending[warp * kPending + listed + __popc(lanes & ((1u << lane) - 1))] = row;
      own.row = -1;
    }
    listed += __popc(lanes);
    return own;
  }

  // Rows of a tile against `moved` centroids that moved; returns the rows listed.
  __device__ __forceinline__ Answer assign_moved(int first, int end, int moved, int& listed) const {
    std::uint32_t a[kMTiles][2], best[kMTiles][2];
    load_codes(tile_row(first, end), a);
    const Own own = find_own(own_row(first, end), listed);
    const int columns = padded_columns<kMovedStep>(moved);
    nearest_keys<kMovedStep>(stage.moved, columns, args.key_scale, a, best);
    const Point next = decode_keys(best, columns);
    const int other = next.value > 0 ? stage.numbers[next.label] : 0;
    const int more = static_cast<int>(next.value) + own.distance - 64;
    return {own.row, more > 0 || (more == 0 && other < own.label) ? other : own.label, own.label};
  }
  // The same without the tensor cores, where very few moved.
  __device__ __forceinline__ Answer assign_few(int first, int end, int moved, int& listed) const {
    const Own own = find_own(first + lane < end ? first + lane : -1, listed);
    std::uint32_t best = static_cast<std::uint32_t>(own.distance) << 16 | own.label;
#pragma unroll 2
    for (int i = 0; i < moved; ++i) {
      const std::uint32_t number = stage.numbers[i];
      const int distance = __popcll(own.code ^ stage.centroids[number].y);
      best = min(best, static_cast<std::uint32_t>(distance) << 16 | number);
    }
    return {own.row, static_cast<int>(best & 0xffffu), own.label};
  }

  // The last up to 16 of the listed rows against all centroids.
  __device__ __forceinline__ Answer assign_listed(int& listed) const {
    __syncwarp();
    const int count = min(listed, 16), columns = padded_columns(args.shape.clusters);
    const std::int32_t* list = stage.pending + warp * kPending + listed - count;
    const auto listed_row = [&](int, int r) {
      const int number = lane / 4 + 8 * r;
      return number < count ? list[number] : -1;
    };
    std::uint32_t a[1][2], best[1][2];
    load_codes(listed_row, a);
    nearest_keys<32>(stage.fragments, columns, args.key_scale, a, best);
    const Point mine = decode_keys(best, columns);
    const int row = lane % 2 == 0 ? listed_row(0, lane % 4 / 2) : -1;
    listed -= count;
    __syncwarp();
    return {row, mine.label, row >= 0 ? label_of(row) : 0};
  }

  // Rows [begin, end) of the block's range; `moved` of the centroids moved since the last pass.
  __device__ void assign(int begin, int end, int moved) const {
    const bool all = initial || 3 * moved > args.shape.clusters;
    const int rounds = (end - begin + kWarps * kTileRows - 1) / (kWarps * kTileRows);
    int listed = 0;
#pragma unroll 1
    for (int round = 0; round < rounds || listed > 0;) {
      const int first = begin + (round * kWarps + warp) * kTileRows;
      Answer answer;
      if (listed >= 16 || round == rounds) {
        answer = assign_listed(listed);
      } else {
        if (all)
          answer = assign_tile(first, end);
        else if (moved <= kFew)
          answer = assign_few(first, end, moved, listed);
        else
          answer = assign_moved(first, end, moved, listed);
        ++round;
      }
      relabel(answer);
    }
  }
};

}  // namespace hamming_detail

}  // namespace coterie::cuda
