// SPDX-License-Identifier: MIT
// The computing warpgroups of the backward pass of windows (window_walk.cuh).
#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/device/window_walk_load.cuh"
#include "cuda/device/window_walk_rows.cuh"
#include "cuda/device/window_walk_tile.cuh"

namespace coterie::cuda {

template <class T>
struct WalkGroup {
  const ListBackwardArgs<T>& args;
  const WalkShape& shape;
  int group;
  float dk[32], dv[32];

  __device__ WalkGroup(const ListBackwardArgs<T>& list_args, const WalkShape& block)
      : args(list_args), shape(block), group(uniform(static_cast<int>(threadIdx.x) / kWarpgroup)) {}

  // d = rows of a tile of keys or values times 32 queries or output gradients.
  __device__ void start(float (&to)[16], std::uint32_t rows, std::uint32_t columns,
                        int half) const {
    const WalkTile a{rows}, b{columns};
    wgmma<T, 0, 0>(to, a.by_columns(0, 0), b.by_columns(half * kWalkHalf, 0));
#pragma unroll
    for (int k = 1; k < 4; ++k)
      wgmma<T, 1, 0>(to, a.by_columns(0, k), b.by_columns(half * kWalkHalf, k));
  }
  __device__ static void finish() {
    wgmma_commit();
    wgmma_wait<0>();
  }
  __device__ void settle_sums() {
    wgmma_settle(dk);
    wgmma_settle(dv);
  }

  // 32 queries and the keys of a tile, `behind` tiles behind them.
  __device__ void half_step(const WalkPart& part, int tile, int behind, int key_place,
                            int query_place, int half) const {
    float s[16], d[16];
    wgmma_fence();
    start(s, shape.keys(key_place, 0), shape.queries(query_place, 0), half);
    start(d, shape.keys(key_place, 1), shape.queries(query_place, 1), half);
    wgmma_commit();
    const int window = args.problem.window, first = part.k_origin + (tile - behind) * kStreamRows;
    const bool whole = behind * kStreamRows + kStreamRows <= window && first >= 0 &&
                       first + kStreamRows <= part.keys;
    const float exponent = part.exponent;
    wgmma_wait<0>();
    wgmma_settle(s);
    wgmma_settle(d);
    const unsigned thread = walk_thread();
    float sum[8];
    int low[2] = {0, 0}, count[2] = {0, 0};
    if (whole) {
      weigh_window<false>(s, d, sum, shape.shifts(query_place), half, exponent, low, count, thread);
    } else {
#pragma unroll
      for (int side = 0; side < 2; ++side) {
        const int row = walk_row(thread) + 8 * side;
        low[side] = row - behind * kStreamRows;
        count[side] =
            static_cast<unsigned>(first + row) < static_cast<unsigned>(part.keys) ? window : 0;
      }
      weigh_window<true>(s, d, sum, shape.shifts(query_place), half, exponent, low, count, thread);
    }
    exchange<T>(sum, shape.parts(half), thread);
    const std::uint32_t at = factor_place(half, thread);
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      std::uint32_t p[4], ds[4];
      window_factors<T>(p, ds, k, s, d, sum);
      stmatrix_x4(shape.weights(group) + (at ^ 32 * k), p);
      stmatrix_x4(shape.slopes(group) + (at ^ 32 * k), ds);
    }
  }

  // 32 queries and the keys of the oldest tile, whose place the newest takes: a query sees no two
  // keys of the same row. Of a warp's 16 keys and 16 queries, all are of the old tile, of the new
  // one, or it is the blocks on the diagonal.
  __device__ void half_step_of_two(const WalkPart& part, int tile, int key_place, int query_place,
                                   int half) const {
    const unsigned thread = walk_thread();
    const int window = args.problem.window, first = part.k_origin + tile * kStreamRows;
    const int old_place = place_before<kWalkKeys>(key_place, kWalkGroups);
    // Of 16 elements, by bit: whether the query is at or behind the new key.
    const int ahead = static_cast<int>(thread % 4 * 2) - static_cast<int>(thread % 32 / 4);
    const unsigned both = (ahead >= 0 ? 1u : 0u) | (ahead + 1 >= 0 ? 2u : 0u);
    const int blocks = 2 * half - static_cast<int>(thread % kWarpgroup / 32);
    const auto of_block = [&](int block) {
      return block > 0 ? 0xffu : block < 0 ? 0u : both | 0x30u | both << 6;
    };
    const unsigned bits = of_block(blocks) | of_block(blocks + 1) << 8;
    const auto newer = [&](int i) { return (bits >> i & 1) != 0; };
    float s[16], d[16], fresh[16], sum[8];
    wgmma_fence();
    start(s, shape.keys(old_place, 0), shape.queries(query_place, 0), half);
    start(d, shape.keys(key_place, 0), shape.queries(query_place, 0), half);
    finish();
    wgmma_settle(s);
    wgmma_settle(d);
#pragma unroll
    for (int i = 0; i < 16; ++i)
      if (newer(i)) s[i] = d[i];
    wgmma_fence();
    start(d, shape.keys(old_place, 1), shape.queries(query_place, 1), half);
    start(fresh, shape.keys(key_place, 1), shape.queries(query_place, 1), half);
    finish();
    wgmma_settle(d);
    wgmma_settle(fresh);
#pragma unroll
    for (int i = 0; i < 16; ++i)
      if (newer(i)) d[i] = fresh[i];
    int none[2] = {0, 0};
    weigh_window<false>(s, d, sum, shape.shifts(query_place), half, part.exponent, none, none,
                        thread);
    if (window < kWalkWindow || first < kWalkWindow || first + kStreamRows > part.keys) {
      // The new and the old key of a row are seen by queries less than this behind the row.
      int ends[2][2];
#pragma unroll
      for (int side = 0; side < 2; ++side) {
        const int row = walk_row(thread) + 8 * side;
        const auto there = [&](int rank) {
          return static_cast<unsigned>(rank) < static_cast<unsigned>(part.keys);
        };
        ends[side][0] =
            row + (there(first + row - kWalkWindow) ? window - kWalkWindow : -kWalkWindow);
        ends[side][1] = row + (there(first + row) ? window : -kWalkWindow);
      }
#pragma unroll
      for (int i = 0; i < 8; ++i) sum[i] = 0.0f;
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        const int x = half * kWalkHalf + i / 4 * 8 + static_cast<int>(thread % 4 * 2) + i % 2;
        const int side = i / 2 % 2, end = newer(i) ? ends[side][1] : ends[side][0];
        if (x >= end) s[i] = 0.0f;
        sum[i / 4 * 2 + i % 2] = fmaf(s[i], d[i], sum[i / 4 * 2 + i % 2]);
      }
    }
    exchange<T>(sum, shape.parts(half), thread);
    const std::uint32_t at = factor_place(half, thread);
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      std::uint32_t p[4], ds[4], new_p[4], new_ds[4];
      window_factors<T>(p, ds, k, s, d, sum);
      const auto mask_of = [&](int word) {
        const unsigned two = bits >> (8 * k + 2 * word);
        return (two & 1 ? 0xffffu : 0u) | (two & 2 ? 0xffff0000u : 0u);
      };
      const std::uint32_t mask[4] = {mask_of(0), mask_of(1), mask_of(2), mask_of(3)};
#pragma unroll
      for (int word = 0; word < 4; ++word) {
        new_p[word] = p[word] & mask[word];
        new_ds[word] = ds[word] & mask[word];
        p[word] &= ~mask[word];
        ds[word] &= ~mask[word];
      }
      stmatrix_x4(shape.weights(group) + (at ^ 32 * k), p);
      stmatrix_x4(shape.slopes(group) + (at ^ 32 * k), ds);
      stmatrix_x4(shape.weights(kWalkGroups) + (at ^ 32 * k), new_p);
      stmatrix_x4(shape.slopes(kWalkGroups) + (at ^ 32 * k), new_ds);
    }
  }

  // Sums of 64 queries, from the weights and slopes in `slot`.
  __device__ void start_sums(int slot, int query_place, int add) {
    const WalkTile weights{shape.weights(slot)}, slopes{shape.slopes(slot)};
    const WalkTile rows{shape.queries(query_place, 0)}, out{shape.queries(query_place, 1)};
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      wgmma_from<T, 1>(dv, weights.by_columns(0, k), out.by_rows(16 * k), k > 0 ? 1 : add);
      wgmma_from<T, 1>(dk, slopes.by_columns(0, k), rows.by_rows(16 * k), k > 0 ? 1 : add);
    }
  }
  __device__ void add_sums(int slot, int query_place, int add) {
    wgmma_fence();
    start_sums(slot, query_place, add);
    finish();
    settle_sums();
  }
  // 32 columns of dq of 64 queries.
  __device__ void start_queries(float (&dq)[16], int tile, int key_place, int columns) const {
#pragma unroll
    for (int slot = 0; slot <= kWalkGroups; ++slot) {
      const int behind = slot == kWalkGroups ? 0 : (tile - slot - 1 & kWalkGroups - 1) + 1;
      const WalkTile slopes{shape.slopes(slot)};
      const WalkTile keys{shape.keys(place_before<kWalkKeys>(key_place, behind), 0) + 64 * columns};
#pragma unroll
      for (int k = 0; k < 4; ++k)
        if (slot + k == 0)
          wgmma<T, 0, 1, 1>(dq, slopes.by_rows(0), keys.by_rows(0));
        else
          wgmma<T, 1, 1, 1>(dq, slopes.by_rows(16 * k), keys.by_rows(16 * k));
    }
  }

  // The sums of a tile that no further query sees.
  __device__ void retire(const WalkPart& part, int tile, int place) const {
    if (tile < part.first || tile >= part.last) return;
    const std::uint32_t stage = shape.keys(place, 1);  // values, done with
    const int first = part.k_origin + tile * kStreamRows;
    if (args.dk.rows.data)
      store_walk_rows<T>(dk, part.factor, args.dk.rows.rows(part.batch, part.head, part.k_begin),
                         first, part.keys, 0, stage);
    if (args.dv.rows.data)
      store_walk_rows<T>(dv, 1.0f / args.weight_scale,
                         args.dv.rows.rows(part.batch, part.head, part.k_begin), first, part.keys,
                         0, stage);
  }

  // The tile's shifts from the lse that were copied, by the threads that copied them.
  __device__ void find_shifts(const WalkPart& part, int tile, int place) const {
    const int row = static_cast<int>(walk_thread()) - 2 * kWarpgroup;
    if (static_cast<unsigned>(row) >= kStreamRows) return;
    const int rank = part.q_origin + tile * kStreamRows + row;
    const bool there = static_cast<unsigned>(rank) < static_cast<unsigned>(part.queries);
    float& value = shape.shifts(place)[row];
    const float lse = value;
    value = there && lse != -INFINITY ? fmaf(lse, kLog2e, -log2f(args.weight_scale)) : INFINITY;
  }
  // Starts to copy all of a tile.
  __device__ void load(const WalkPart& part, int tile, int key_place, int query_place) const {
    const WalkSource<T>& source = walk_source<T>(shape, group);
    source.load(group < 2 ? shape.keys(key_place, group) : shape.queries(query_place, group - 2),
                tile);
    const int row = static_cast<int>(walk_thread()) - 2 * kWarpgroup;
    if (static_cast<unsigned>(row) >= kStreamRows) return;
    const int rank = part.q_origin + tile * kStreamRows + row;
    const bool there = static_cast<unsigned>(rank) < static_cast<unsigned>(part.queries);
    cp_async_value(shape.shifts(query_place) + row, part.lse + (there ? rank : 0), there);
  }

  __device__ void walk(const WalkCut& cut) {
    const WalkPart& part = shape.part();
    const auto stop = [&] {
      return min(static_cast<int>(blockIdx.x + 1) * cut.per_block, cut.total);
    };
#pragma unroll 1
    for (int next = static_cast<int>(blockIdx.x) * cut.per_block; next < stop();
         next = uniform(part.next)) {
      __syncthreads();  // all are done with the part before
      if (threadIdx.x < 4) {
        const WalkPart own = find_part(args, cut, next, stop());
        if (threadIdx.x == 0) shape.part() = own;
        walk_source<T>(shape, static_cast<int>(threadIdx.x)) =
            WalkSource<T>(args, own, static_cast<int>(threadIdx.x));
      }
      __syncthreads();
      if (part.first >= part.last) continue;
#pragma unroll
      for (int i = 0; i < 32; ++i) dk[i] = dv[i] = 0.0f;
      int key = kWalkGroups;  // place of the tile at work
      if (group < 2)
#pragma unroll 1
        for (int i = 0; i < kWalkGroups; ++i)
          walk_source<T>(shape, group).load(shape.keys(i, group), part.first - kWalkGroups + i);
      load(part, part.first, key, part.first & 1);
      cp_async_commit();
      cp_async_wait<0>();
      find_shifts(part, part.first, part.first & 1);
      fence_async_proxy();
      __syncthreads();
      const int end = uniform(part.end);
#pragma unroll 1
      for (int tile = uniform(part.first); tile < end; ++tile) {
        const int behind = (tile - group) & (kWalkGroups - 1), query = tile & 1;
        const int next_key = place_after<kWalkKeys>(key, 1);
#pragma unroll 1
        for (int half = 0; half < 2; ++half) {
          if (behind > 0)
            half_step(part, tile, behind, place_before<kWalkKeys>(key, behind), query, half);
          else
            half_step_of_two(part, tile, key, query, half);
          // All have met in between: what the step before used is free.
          if (half == 0) {
            if (tile + 1 < end) load(part, tile + 1, next_key, query ^ 1);
            cp_async_commit();
          }
        }
        cp_async_wait<0>();
        find_shifts(part, tile + 1, query ^ 1);
        fence_async_proxy();
        __syncthreads();
        if (behind == 0) {
          add_sums(group, query, 1);
          retire(part, tile - kWalkGroups, place_before<kWalkKeys>(key, kWalkGroups));
        }
        if (behind % 2 == 1 && tile < part.last && args.dq.rows.data) {
          float dq[16];
          wgmma_fence();
          start_queries(dq, tile, key, behind / 2);
          start_sums(group, query, 1);
          finish();
          settle_sums();
          wgmma_settle(dq);
          store_walk_rows<T>(
              dq, part.factor, args.dq.rows.rows(part.batch, part.head, part.q_begin),
              part.q_origin + tile * kStreamRows, part.queries, behind / 2, shape.stage());
        } else {
          add_sums(behind == 0 ? kWalkGroups : group, query, behind);
        }
        key = next_key;
      }
      // The tiles that are left; a warpgroup has the latest one of its number.
      const int behind = (end - 1 - group) & (kWalkGroups - 1);
      retire(part, end - 1 - behind, place_before<kWalkKeys>(key, behind + 1));
    }
  }
};

}  // namespace coterie::cuda
