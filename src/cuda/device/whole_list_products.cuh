// SPDX-License-Identifier: MIT
// The computing warpgroups of the backward pass of whole lists (whole_list.cuh).
#pragma once

#include <cstdint>

#include "cuda/device/whole_list_rows.cuh"
#include "cuda/device/whole_list_weights.cuh"

namespace coterie::cuda {

// A warpgroup has key tiles `group` and 3 - group: those that more queries see first.
template <class T>
struct WholeGroup {
  const ListBackwardArgs<T>& args;
  const WholeShape& shape;
  int group;  // 0 or 1
  float dk[2][32], dv[2][32];

  __device__ WholeGroup(const ListBackwardArgs<T>& list_args, const WholeShape& block)
      : args(list_args), shape(block), group(uniform(static_cast<int>(threadIdx.x) / kWarpgroup)) {}

  __device__ int tile_of(int x) const { return x == 0 ? group : 3 - group; }

  __device__ void clear() {
#pragma unroll
    for (int i = 0; i < 64; ++i) dk[i / 32][i % 32] = dv[i / 32][i % 32] = 0.0f;
  }

  // Products of 32 queries and the keys of one or two tiles start: tensor 0 for scores.
  template <int kCount>
  __device__ void start(float (&to)[2][16], int tensor, int place, int key_place, int half) const {
#pragma unroll
    for (int k = 0; k < 4; ++k)
#pragma unroll
      for (int x = 0; x < kCount; ++x) {
        const std::uint64_t key =
            Bands<T, 64, 64>{shape.keys(key_place, tensor, tile_of(x))}.by_columns(0, k);
        const std::uint64_t query =
            Bands<T, 64, 64>{shape.queries(place, tensor)}.by_columns(half * kStepQueries, k);
        wgmma_step<T, 0>(k, to[x], key, query);
      }
  }
  // Sums of rows of queries, or of their output gradients, start.
  template <int kCount>
  __device__ void start_sums(float (&to)[2][32], const std::uint32_t (&factor)[2][2][4], int tensor,
                             int place, int half) {
#pragma unroll
    for (int k = 0; k < 2; ++k)
#pragma unroll
      for (int x = 0; x < kCount; ++x)
        wgmma<T, 1, 1>(to[x], factor[x][k],
                       Bands<T, 64, 64>{shape.queries(place, tensor)}.by_rows(
                           half * kStepQueries + 16 * k, 0));
  }
  template <int kCount, int kSize>
  __device__ static void settle(float (&all)[2][kSize]) {
#pragma unroll
    for (int x = 0; x < kCount; ++x) wgmma_settle(all[x]);
  }

  // Sums of products over all keys of the list, of 8 queries: in two steps.
  __device__ void post(const float (&sum)[8], int half) const {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    shape.parts(half)[threadIdx.x / 32 * 32 + lane / 8 * 8 + lane % 4 * 2 + lane / 4 % 2] =
        reduce_columns(sum, lane);
  }
  __device__ void collect(float (&sum)[8], const WholeQueries& facts, int half) const {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const float* parts = shape.parts(half);
    shape.deltas().sync();
    float total = 0.0f;
#pragma unroll
    for (int warp = 0; warp < 8; ++warp) total += parts[warp * 32 + lane];
    total *= facts.gradient[half * kStepQueries + lane].y;
#pragma unroll
    for (int i = 0; i < 8; ++i)
      sum[i] = __shfl_sync(~0u, total, 8 * (i / 2) + lane % 4 * 2 + i % 2);
  }

  // 32 queries that see no key of this warpgroup.
  __device__ void pass(int place, int half) const {
    float sum[8] = {};
    post(sum, half);
    collect(sum, shape.query_facts(place), half);
  }
  // 32 queries and kCount tiles of this warpgroup. dv is on its way while deltas are exchanged.
  template <int kCount>
  __device__ void step(int place, int key_place, int half) {
    const WholeQueries& facts = shape.query_facts(place);
    float s[2][16], d[2][16];
    wgmma_fence();
    start<kCount>(s, 0, place, key_place, half);
    wgmma_commit();
    start<kCount>(d, 1, place, key_place, half);
    wgmma_commit();
    wgmma_wait<1>();
    settle<kCount>(s);
    const auto own_key = [&](int x, int row, RowStatistics(&key)[2]) {
#pragma unroll
      for (int side = 0; side < 2; ++side) {
        key[side] = shape.key_stats(key_place)[tile_of(x) * kStreamRows + row + 8 * side];
        key[side].mean *= -key[side].inverse * static_cast<float>(args.problem.width);
      }
    };
#pragma unroll
    for (int x = 0; x < kCount; ++x) {
      const int thread = static_cast<int>(thread_again());
      const int row = thread % kWarpgroup / 32 * 16 + thread % 32 / 4;
      RowStatistics key[2];
      own_key(x, row, key);
      const int rank = tile_of(x) * kStreamRows + row;
      const int last = tile_of(x) * kStreamRows + (row & ~15) + 15;
      if (facts.limits[half * kStepQueries / 2].end[0] > last)
        weigh<false>(s[x], facts, half, key, rank);
      else
        weigh<true>(s[x], facts, half, key, rank);
    }
    wgmma_wait<0>();
    settle<kCount>(d);
    float sum[8] = {};
#pragma unroll
    for (int x = 0; x < kCount; ++x) add_products(sum, s[x], d[x]);
    post(sum, half);
    std::uint32_t p[2][2][4], ds[2][2][4];
#pragma unroll
    for (int x = 0; x < kCount; ++x) pack_weights<T>(p[x], s[x]);
    wgmma_fence();
    start_sums<kCount>(dv, p, 1, place, half);
    wgmma_commit();
    collect(sum, facts, half);
#pragma unroll
    for (int x = 0; x < kCount; ++x) {
      const int thread = static_cast<int>(thread_again());
      const int row = thread % kWarpgroup / 32 * 16 + thread % 32 / 4;
      RowStatistics key[2];
      own_key(x, row, key);
      differentiate<T>(p[x], d[x], sum, facts, half, key, thread, shape.slopes(tile_of(x)), ds[x]);
    }
    wgmma_wait<0>();
    settle<kCount>(dv);
    wgmma_fence();
    start_sums<kCount>(dk, ds, 0, place, half);
    wgmma_commit();
    wgmma_wait<0>();
    settle<kCount>(dk);
  }

  // dq of 64 queries, from the derivatives of `tiles` tiles of keys.
  __device__ void query_gradients(const WholeList& list, int tile, int tiles, int place,
                                  int key_place, float factor) const {
    float dq[32];
#pragma unroll
    for (int i = 0; i < 32; ++i) dq[i] = 0.0f;
    if (tiles > 0) {
      wgmma_fence();
#pragma unroll 1
      for (int x = 0; x < tiles; ++x) {
        const Bands<T, 64, 64> slopes{shape.slopes(x)}, keys{shape.keys(key_place, 0, x)};
#pragma unroll
        for (int k = 0; k < 4; ++k)
          wgmma<T, 1, 1, 1>(dq, slopes.by_rows(16 * k, 0), keys.by_rows(16 * k, 0));
      }
      wgmma_commit();
      wgmma_wait<0>();
      wgmma_settle(dq);
    }
    const WholeQueries& facts = shape.query_facts(place);
    if (args.normalise)
      carry_back<T>(dq, shape.queries(place, 0), args.problem.width, [&](int row) {
        return RowStatistics{facts.score[row].x, facts.gradient[row].x};
      });
    store_rows(dq, factor, args.problem.width, args.dq, list.q_slot + tile * kStreamRows,
               list.queries - tile * kStreamRows, shape.queries(place, 1));
  }
  __device__ void key_gradients(const WholeList& list, int key_place, float factor,
                                float unscaled) {
    sync_group();  // values are done with: their places are free
#pragma unroll
    for (int x = 0; x < 2; ++x) {
      const int first = tile_of(x) * kStreamRows;
      if (first >= list.keys) continue;
      if (args.normalise)
        carry_back<T>(dk[x], shape.keys(key_place, 0, tile_of(x)), args.problem.width,
                      [&](int row) { return shape.key_stats(key_place)[first + row]; });
      const std::uint32_t stage = shape.keys(key_place, 1, tile_of(x));
      store_rows(dk[x], factor, args.problem.width, args.dk, list.k_slot + first, list.keys - first,
                 stage);
      store_rows(dv[x], unscaled, args.problem.width, args.dv, list.k_slot + first,
                 list.keys - first, stage);
    }
  }
};

template <class T>
__device__ void compute_lists(const ListBackwardArgs<T>& args, const WholeShape& shape, int lists) {
  WholeGroup<T> own(args, shape);
  const float unscaled = exp2f(-scale_bits<T>());
  int turn = 0, tile_turn = 0;  // lists and tiles of queries so far
#pragma unroll 1
  for (; static_cast<int>(blockIdx.x + turn * gridDim.x) < lists; ++turn) {
    const int key_place = turn % kKeyPlaces;
    mbarrier_wait(shape.keys_full(key_place), turn / kKeyPlaces & 1);
    const WholeList& list = shape.list(key_place);
    own.clear();
#pragma unroll 1
    for (int tile = 0; tile * kStreamRows < uniform(list.queries); ++tile, ++tile_turn) {
      const int place = tile_turn % kQueryPlaces;
      const int tiles = uniform(list.key_tiles[tile]);
      mbarrier_wait(shape.queries_full(place), tile_turn / kQueryPlaces & 1);
      fence_async_proxy();
      // The warpgroup that has less to do with these queries.
      const bool mine = own.group == (tile == 0 || tile == 3);
      if (tiles > 0) {
        const int count = (own.group < tiles) + (3 - own.group < tiles);
#pragma unroll 1
        for (int half = 0; half < 2; ++half) {
          if (count == 2)
            own.template step<2>(place, key_place, half);
          else if (count == 1)
            own.template step<1>(place, key_place, half);
          else
            own.pass(place, half);
        }
        fence_async_proxy();
        if (mine)
          shape.slopes_there().sync();
        else
          shape.slopes_there().arrive();
      }
      if (mine) own.query_gradients(list, tile, tiles, place, key_place, list.score * unscaled);
      mbarrier_arrive_warp(shape.queries_empty(place));
    }
    own.key_gradients(list, key_place, list.score * unscaled, unscaled);
    mbarrier_arrive_warp(shape.keys_empty(key_place));
  }
}

}  // namespace coterie::cuda
