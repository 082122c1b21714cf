// SPDX-License-Identifier: MIT
// The loading warps of the backward pass of whole lists (whole_list.cuh).
#pragma once

#include <cstdint>

#include "cuda/device/cleared.cuh"
#include "cuda/device/whole_list.cuh"

namespace coterie::cuda {

// The loading warps: each 16 rows of every tile.
template <class T>
struct WholeLoader {
  const ListBackwardArgs<T>& args;
  const WholeShape& shape;
  int warp, lane;
  struct Facts {
    float shift;
    float2 score, gradient;
    int end;
  };

  // This warp's rows of all tiles: of ranks 64 tile + 16 warp + (0 .. 15), -1 beyond the last.
  __device__ void find_rows(int (&row)[2], const SlotList& list) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int rank = rank_of(2 * half + lane / 16);
      row[half] = rank < list.count ? list.row(rank) : -1;
    }
  }
  __device__ int rank_of(int tile) const { return tile * kStreamRows + warp * 16 + lane % 16; }
  // Row of rank_of(tile).
  __device__ int own_row(const int (&row)[2], int tile) const {
    return __shfl_sync(~0u, tile < 2 ? row[0] : row[1], tile % 2 * 16 + lane % 16);
  }

  __device__ void copy(const std::uint32_t (&to)[2], const Rows<const T> (&rows)[2],
                       const int (&row)[2], int tile) const {
    const int r = lane / 8, chunk = lane % 8;
    const bool inside = chunk * 8 < rows[0].width;
#pragma unroll 2
    for (int i = 0; i < 4; ++i) {
      const int number = __shfl_sync(~0u, tile < 2 ? row[0] : row[1], tile % 2 * 16 + 4 * i + r);
      const int at = (warp * 16 + 4 * i + r) * 128 + ((chunk ^ (4 * i + r) % 8) << 4);
#pragma unroll
      for (int x = 0; x < 2; ++x)
        cp_async16(to[x] + at, rows[x].row(max(number, 0)) + (inside ? chunk * 8 : 0),
                   number >= 0 && inside ? 16 : 0);
    }
  }

  __device__ void keys(const ListPair& pair, int head, int place) const {
    const ListProblem& problem = args.problem;
    int row[2];
    find_rows(row, pair.k);
    const Rows<const T> rows[2] = {
        args.k.rows(pair.k_span.batch, head, pair.k_span.begin),
        args.v.rows(pair.k_span.batch, head / problem.value_group, pair.k_span.begin)};
    const std::int64_t base = ListProblem::row_base(problem.k, pair.k_span, head);
#pragma unroll 1
    for (int tile = 0; tile < kWholeTiles; ++tile) {
      if (tile * kStreamRows >= pair.k.count) break;
      const std::uint32_t to[2] = {shape.keys(place, 0, tile), shape.keys(place, 1, tile)};
      copy(to, rows, row, tile);
      const int own = own_row(row, tile);
      if (lane < 16)
        copy_statistics(shape.key_stats(place)[rank_of(tile)], problem.k_stats, base + max(own, 0),
                        own >= 0);
    }
  }

  // What is known of this lane's two queries, ready for use.
  __device__ void find_facts(Facts (&facts)[2], const ListPair& pair, int head, const int (&row)[2],
                             float score) const {
    const ListProblem& problem = args.problem;
    const std::int64_t base = ListProblem::row_base(problem.q, pair.q_span, head);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const bool there = row[half] >= 0;
      const int rank = max(min(rank_of(2 * half + lane / 16), pair.q.count - 1), 0);
      const std::int64_t by_row = base + max(row[half], 0), by_slot = pair.q.slot_of(rank);
      const auto value = [&](const ListValues& values) {
        return values.data[values.by_slot ? by_slot : by_row];
      };
      Facts& own = facts[half];
      own = {INFINITY, {0.0f, 0.0f}, {0.0f, 0.0f}, 0};
      if (pair.q.count > 0) own.end = problem.range(pair, rank).high;
      if (!there) continue;
      const float lse = value(args.lse), weight = args.weight.data ? value(args.weight) : 1.0f;
      if (lse != -INFINITY) own.shift = fmaf(lse, kLog2e, -scale_bits<T>() - log2f(weight));
      own.gradient.y = weight > 0.0f ? exp2f(-scale_bits<T>()) / weight : 0.0f;
      RowStatistics stats = kNoStatistics;
      if (problem.q_stats) stats = problem.q_stats[by_row];
      own.score = make_float2(stats.mean, stats.inverse * score * kLog2e);
      own.gradient.x = inverse_factor<T>(stats.inverse);
    }
  }
  __device__ void queries(const ListPair& pair, int head, const int (&row)[2],
                          const Facts (&facts)[2], int tile, int place) const {
    const ItemSpan& span = pair.q_span;
    const Rows<const T> rows[2] = {args.q.rows(span.batch, head, span.begin),
                                   args.g.rows(span.batch, head, span.begin)};
    const std::uint32_t to[2] = {shape.queries(place, 0), shape.queries(place, 1)};
    copy(to, rows, row, tile);
    if (lane / 16 != tile % 2) return;
    WholeQueries& all = shape.query_facts(place);
    const int at = warp * 16 + lane % 16;
    const Facts& own = tile < 2 ? facts[0] : facts[1];
    all.limits[at / 2].shift[at % 2] = own.shift;
    all.limits[at / 2].end[at % 2] = own.end;
    all.score[at] = own.score;
    all.gradient[at] = own.gradient;
  }

  // By one thread.
  __device__ void describe(const ListPair& pair, float score, WholeList& list) const {
    list.queries = pair.q.count;
    list.keys = pair.k.count;
    list.score = score;
    list.q_slot = pair.q.slot;
    list.k_slot = pair.k.slot;
#pragma unroll 1
    for (int tile = 0; tile < kWholeTiles; ++tile) {
      const int last = min((tile + 1) * kStreamRows, pair.q.count) - 1;
      const int high = last < tile * kStreamRows ? 0 : args.problem.range(pair, last).high;
      list.key_tiles[tile] = (high + kStreamRows - 1) / kStreamRows;
    }
  }
};

// Tensors that become 0, a part with every list.
struct WholeCleared {
  ClearedSpan tensor[3];

  __device__ __forceinline__ void clear(int part) const {
#pragma unroll 1
    for (const ClearedSpan& each : tensor)
      each.clear(part, static_cast<int>(threadIdx.x) % kWarpgroup, kWarpgroup);
  }
};

// Lists of a block, one after the other.
template <class T>
__device__ void load_lists(const ListBackwardArgs<T>& args, const WholeCleared& cleared,
                           const WholeShape& shape, int lists) {
  const ListProblem& problem = args.problem;
  const WholeLoader<T> loader{args, shape, static_cast<int>(threadIdx.x) % kWarpgroup / 32,
                              static_cast<int>(threadIdx.x) % 32};
  const int of_head = problem.q.items * problem.q.lists;
  int key_place = 0, key_phase = 1, place = 0, phase = 1;  // places are empty at first
#pragma unroll 1
  for (int number = static_cast<int>(blockIdx.x); number < lists;
       number += static_cast<int>(gridDim.x)) {
    const int head = number / of_head, rest = number - head * of_head;
    const ListPair pair = problem.pair(rest / problem.q.lists, head, rest % problem.q.lists);
    const float score = problem.score_scale(head);
    mbarrier_wait(shape.keys_empty(key_place), key_phase);
    if (threadIdx.x % kWarpgroup == 0) loader.describe(pair, score, shape.list(key_place));
    loader.keys(pair, head, key_place);
    arrive_filled(shape.keys_full(key_place));
    cleared.clear(number);
    key_phase ^= key_place;
    key_place ^= 1;
    int row[2];
    loader.find_rows(row, pair.q);
    typename WholeLoader<T>::Facts facts[2];
    loader.find_facts(facts, pair, head, row, score);
#pragma unroll 1
    for (int tile = 0; tile * kStreamRows < pair.q.count; ++tile) {
      mbarrier_wait(shape.queries_empty(place), phase);
      loader.queries(pair, head, row, facts, tile, place);
      arrive_filled(shape.queries_full(place));
      phase ^= place == kQueryPlaces - 1;
      place = place == kQueryPlaces - 1 ? 0 : place + 1;
    }
  }
  asm volatile("cp.async.wait_all;" ::: "memory");  // threads that end take their copies along
}

}  // namespace coterie::cuda
