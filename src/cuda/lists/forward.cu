// SPDX-License-Identifier: MIT
// Forward pass of lists (lists.h) by mma.sync: out = softmax(scale q kᵀ) v over the keys that a
// query sees, or laplace weights without normalisation, and log-sum-exps. Supports every call: all
// types, widths, filters, masks and dropout (kDrop); on Hopper forward_sm90a.cu handles most calls
// of 16-bit types.
//
// Grid (tiles of 128 queries of a list, heads), 128 threads: a warp handles 32 queries, and the
// block walks over the tiles of 64 keys that any query sees; of 32 or 16 for rows of 256 or 512
// bytes. Warps skip keys that none of their queries sees. Shared memory, 48 to 96 KiB and row
// metadata: the queries and two stages of keys and values; the metadata of the queries is where the
// second stage will be. Up to 255 registers. Unaligned rows are loaded element by element.
#include <cstdint>

#include "cuda/launch/dispatch.h"
#include "cuda/launch/launch.h"
#include "cuda/lists/forward.h"
#include "cuda/lists/rows.cuh"
#include "cuda/prim/dropout.cuh"
#include "cuda/prim/fragments.cuh"
#include "cuda/prim/load.cuh"
#include "cuda/prim/store.cuh"

namespace coterie::cuda {
namespace {

constexpr int kForwardThreads = 128, kForwardRows = 1 << kForwardTileBits;

// Query metadata for the scores.
struct QueryFacts {
  float mean, inverse;  // mean is scaled by the row's width; inverse has the sign of the scale
  QueryFilter filter;

  __device__ void load(const ListProblem& problem, const ListPair& pair, int head, int rank) {
    mean = 0.0f;
    inverse = 1.0f;
    if (problem.q_stats) {
      const RowStatistics own =
          problem.q_stats[ListProblem::row_base(problem.q, pair.q_span, head) + pair.q.row(rank)];
      mean = own.mean * static_cast<float>(problem.width);
      inverse = own.inverse;
    }
    if (problem.score_scale(head) < 0.0f) inverse = -inverse;  // weights use |scale|
    filter = QueryFilter(problem, pair, head, rank);
  }
};

// The score of a query and a key, from the product of the raw rows.
__device__ __forceinline__ float finished_score(const ListProblem& problem, float product,
                                                const QueryFacts& query, const ListKey& key) {
  float score = product;
  if (problem.k_stats) score = fmaf(-query.mean, key.stats.mean, score) * key.stats.inverse;
  score *= query.inverse;
  return query.filter.sees(key.row) ? score : -INFINITY;
}

// What the threads of a block look up for each other, once.
template <bool kDrop>
struct QueryTable {
  RankRange ranges[kForwardRows];
  QueryFacts facts[kForwardRows];
  DropoutRow words[kDrop ? kForwardRows : 1];
};

template <class T, int kDim>
struct ForwardTiles : AttendTiles<T, kDim, kForwardRows, kTileKeys<T, kDim>> {
  static constexpr int kKeys = kTileKeys<T, kDim>;
  using AttendTiles<T, kDim, kForwardRows, kKeys>::AttendTiles;

  // Loads the ranks from `begin` on of the key list.
  __device__ void load(int stage, const Rows<const T>& k, const Rows<const T>& v,
                       const SlotList& list, int begin) const {
    const int left = list.count - begin;
    load_tile<kKeys, kForwardThreads>(this->keys(stage), k, begin, left, list.index_at(begin));
    load_tile<kKeys, kForwardThreads>(this->values(stage), v, begin, left, list.index_at(begin));
    cp_async_commit();
  }
};

// A warp's 32 queries: 2 x 16, indexed [m][half] in a lane.
template <class T, int kDim, bool kDrop>
struct ForwardRows {
  static constexpr int kBlock = sizeof(T) == 2 && kDim <= 64 ? 2 : 1;  // 16 keys each at a time

  QueryFragments<T, kDim, kDim * sizeof(T) <= 128> queries;
  RankRange range[2][2];
  RankRange seen;  // by any of the warp's queries
  QueryFacts facts[2][2];
  RowSoftmax softmax[2][2];
  DropoutRow words[2][2];  // with dropout
  Accumulator out[2][kDim / 16] = {};

  // Row within the tile.
  __device__ static int row(int m, int half) {
    return static_cast<int>(threadIdx.x) / 32 * 32 + 16 * m + 8 * half +
           static_cast<int>(threadIdx.x) % 32 / 4;
  }

  // Reads the metadata of the block's queries.
  __device__ void start(const QueryTable<kDrop>& table) {
#pragma unroll
    for (int m = 0; m < 2; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        range[m][half] = table.ranges[row(m, half)];
        facts[m][half] = table.facts[row(m, half)];
        softmax[m][half] = {kLowestShift, 0.0f};
        if constexpr (kDrop) words[m][half] = table.words[row(m, half)];
      }
    seen = {__shfl_sync(~0u, range[0][0].low, 0), __shfl_sync(~0u, range[1][1].high, 31)};
  }

  // Turns products into scores, -inf for hidden keys.
  __device__ void finish_scores(const ListProblem& problem, Accumulator (&s)[kBlock][2],
                                const ListKey* keys) const {
#pragma unroll
    for (int column = 0; column < 4 * kBlock; ++column) {  // of this lane
      const int b = column / 4, n = column / 2 % 2, e = column % 2;
      const ListKey key = keys[16 * b + 8 * n + threadIdx.x % 4 * 2 + e];
#pragma unroll
      for (int row = 0; row < 4; ++row) {
        const int m = row / 2, half = row % 2;
        const bool seen = key.rank >= range[m][half].low && key.rank < range[m][half].high;
        float& score = s[b][m][n][2 * half + e];
        score = seen ? finished_score(problem, score, facts[m][half], key) : -INFINITY;
      }
    }
  }

  // New shifts for the rows that need one. Each row uses only its own scores.
  __device__ void rescale(const Accumulator (&s)[kBlock][2], float exponent, float inverse) {
#pragma unroll
    for (int m = 0; m < 2; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float top = -INFINITY;
#pragma unroll
        for (int i = 0; i < 4 * kBlock; ++i)
          top = fmaxf(top, s[i / 4][m][i / 2 % 2][2 * half + i % 2]);
        top = quad_max(top);
        if (!(top > softmax[m][half].limit(inverse))) continue;
        const float factor = softmax[m][half].raise(top, exponent);
#pragma unroll
        for (int i = 0; i < kDim / 4; ++i) out[m][i / 4][i / 2 % 2][2 * half + i % 2] *= factor;
      }
  }

  __device__ void weigh(Accumulator (&s)[kBlock][2], float exponent) {
    const float inverse = 1.0f / exponent;
    bool above = false;
#pragma unroll
    for (int i = 0; i < 16 * kBlock; ++i)
      above |=
          s[i / 16][i / 8 % 2][i / 4 % 2][i % 4] > softmax[i / 8 % 2][i / 2 % 2].limit(inverse);
    if (__any_sync(~0u, above)) rescale(s, exponent, inverse);
#pragma unroll
    for (int i = 0; i < 16 * kBlock; ++i) {
      float& score = s[i / 16][i / 8 % 2][i / 4 % 2][i % 4];
      score = softmax[i / 8 % 2][i / 2 % 2].weight(score, exponent);
    }
  }

  // Dropout of weights, which are already in the sums of their rows.
  __device__ void drop(const ListProblem& problem, Accumulator (&s)[kBlock][2],
                       const ListKey* keys) const {
#pragma unroll
    for (int column = 0; column < 4 * kBlock; ++column) {  // of this lane
      const int b = column / 4, n = column / 2 % 2, e = column % 2;
      const int key = keys[16 * b + 8 * n + threadIdx.x % 4 * 2 + e].row;
#pragma unroll
      for (int row = 0; row < 4; ++row)
        s[b][row / 2][n][2 * (row % 2) + e] *= kept(problem.dropout, words[row / 2][row % 2], key);
    }
  }

  // Keys column .. column + 16 kBlock - 1 of the tile that starts at rank `begin`.
  __device__ void attend(const ListProblem& problem, const Tile<T, kDim>& keys,
                         const Tile<T, kDim>& values, const ListKey* key_facts, int begin,
                         int column, float scale) {
    const int first = begin + column;
    if (first >= seen.high || first + 16 * kBlock <= seen.low) return;
    Accumulator s[kBlock][2];
#pragma unroll
    for (int b = 0; b < kBlock; ++b) queries.scores(s[b], keys, column + 16 * b);
    finish_scores(problem, s, key_facts + column);
    if (problem.laplace) {
#pragma unroll
      for (int i = 0; i < 16 * kBlock; ++i) {
        float& score = s[i / 16][i / 8 % 2][i / 4 % 2][i % 4];
        score = laplace(score * scale);
      }
    } else {
      weigh(s, scale * kLog2e);
    }
    if constexpr (kDrop) drop(problem, s, key_facts + column);
#pragma unroll
    for (int b = 0; b < kBlock; ++b) add_values(out, s[b], values, column + 16 * b);
  }

  __device__ void write(const ListForwardArgs<T>& args, const ListPair& pair, int head, int first) {
    const ListProblem& problem = args.problem;
    Rows<T> rows = args.out.rows(pair.q_span.batch, head, pair.q_span.begin);
    if (args.slot_rows)
      rows = {args.slot_rows, problem.width, problem.width, problem.width * sizeof(T) % 16 == 0};
    const std::int64_t base =
        args.slot_rows ? 0 : ListProblem::row_base(problem.q, pair.q_span, head);
#pragma unroll
    for (int m = 0; m < 2; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int rank = first + row(m, half);
        const bool there = rank < pair.q.count;
        const std::int64_t to = !there           ? 0
                                : args.slot_rows ? pair.q.slot_of(rank)
                                                 : pair.q.row(rank);
        if (!problem.laplace) {
          const float sum = quad_sum(softmax[m][half].sum);
          if (there && args.lse && threadIdx.x % 4 == 0)
            args.lse[base + to] = row_lse(softmax[m][half].shift, sum);
          const float factor = sum == 0.0f ? 0.0f : 1.0f / sum;
#pragma unroll
          for (int i = 0; i < kDim / 4; ++i) out[m][i / 4][i / 2 % 2][2 * half + i % 2] *= factor;
        }
#pragma unroll
        for (int d = 0; d < kDim / 16; d += 2)
          store_columns(rows, to, there, 16 * d, out[m] + d, half);
      }
  }
};

// Members of a list end before its last slot: writes the log-sum-exps of the empty slots.
template <class T>
__device__ void write_empty(const ListForwardArgs<T>& args, const ListPair& pair, int first) {
  const int rank = first + static_cast<int>(threadIdx.x);
  if (args.problem.q.layout != ListLayout::members || !args.slot_rows || !args.lse) return;
  if (rank >= pair.q.count && rank < args.problem.q.width)
    args.lse[pair.q.slot_of(rank)] = -INFINITY;
}

template <class T, int kDim, bool kDrop>
__global__ void __launch_bounds__(kForwardThreads)
    list_forward_kernel(const __grid_constant__ ListForwardArgs<T> args) {
  extern __shared__ __align__(128) unsigned char memory[];
  using Tiles = ForwardTiles<T, kDim>;
  constexpr int kKeys = Tiles::kKeys;
  __shared__ ListKey facts[2][kKeys];
  const Tiles tiles(memory);
  auto& table = *reinterpret_cast<QueryTable<kDrop>*>(memory + Tiles::kBytes -
                                                      2 * Tiles::kTileBytes);  // of stage 1
  static_assert(sizeof(table) <= 2 * Tiles::kTileBytes, "room");
  const ListProblem& problem = args.problem;
  const int head = blockIdx.y;
  // With causal ranges the last tiles have the most work: they start first.
  const int number = problem.rule == ListRule::causal ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
  const ListTile tile = args.tiles.find(problem.q, head, number);
  if (tile.first == kNoRank) return;
  const ListPair pair = problem.pair(tile.item, head, tile.list);
  write_empty(args, pair, tile.first);
  if (tile.first >= pair.q.count) return;

  load_tile<kForwardRows, kForwardThreads>(
      tiles.queries, pair.q.rows(args.q.rows(pair.q_span.batch, head, pair.q_span.begin)),
      tile.first, pair.q.count - tile.first, pair.q.index_at(tile.first));
  const Rows<const T> k =
      pair.k.rows(args.k.rows(pair.k_span.batch, head / problem.group, pair.k_span.begin));
  const Rows<const T> v =
      pair.k.rows(args.v.rows(pair.k_span.batch, head / problem.value_group, pair.k_span.begin));
  // Each thread looks up one query; threads beyond the last query repeat it.
  const int own = min(tile.first + static_cast<int>(threadIdx.x), pair.q.count - 1);
  table.ranges[threadIdx.x] = problem.range(pair, own);
  table.facts[threadIdx.x].load(problem, pair, head, own);
  if constexpr (kDrop)
    table.words[threadIdx.x] = problem.dropout.query(
        static_cast<std::int64_t>(tile.item) * problem.q.heads + head, pair.q.row(own));
  __syncthreads();
  const int begin = table.ranges[0].low / kKeys * kKeys;
  const int end = table.ranges[kForwardRows - 1].high;
  const auto load_keys = [&](int stage, int from) {
    tiles.load(stage, k, v, pair.k, from);
    if (const int own = static_cast<int>(threadIdx.x); own < kKeys)
      facts[stage][own] = load_key(problem, pair, head / problem.group, from + own);
  };
  load_keys(0, begin);

  ForwardRows<T, kDim, kDrop> rows;
  rows.start(table);
  const float scale = problem.score_scale(head);
  cp_async_wait<0>();
  __syncthreads();
  rows.queries.load(tiles.queries, threadIdx.x / 32 * 32);
  for (int from = begin, stage = 0; from < end; from += kKeys, stage ^= 1) {
    cp_async_wait<0>();
    __syncthreads();
    if (from + kKeys < end) load_keys(stage ^ 1, from + kKeys);
    constexpr int kStep = 16 * ForwardRows<T, kDim, kDrop>::kBlock;
#pragma unroll 1
    for (int column = 0; column < kKeys; column += kStep)
      rows.attend(problem, tiles.keys(stage), tiles.values(stage), facts[stage], from, column,
                  fabsf(scale));
  }
  rows.write(args, pair, head, tile.first);
}

}  // namespace

template <class T>
void launch_list_forward(const ListForwardArgs<T>& args, cudaStream_t stream) {
  dispatch_head_dim("lists", args.problem.width, [&](auto width) {
    constexpr int kDim = decltype(width)::value, kBytes = ForwardTiles<T, kDim>::kBytes;
    const auto kernel = args.problem.dropout.on() ? list_forward_kernel<T, kDim, true>
                                                  : list_forward_kernel<T, kDim, false>;
    allow_shared_memory(kernel, kBytes);
    const dim3 grid(static_cast<unsigned>(args.tiles.total),
                    static_cast<unsigned>(args.problem.q.heads));
    kernel<<<grid, kForwardThreads, kBytes, stream>>>(args);
    COTERIE_LAUNCH("list_forward");
  });
}

template void launch_list_forward(const ListForwardArgs<float>&, cudaStream_t);
template void launch_list_forward(const ListForwardArgs<Bf16>&, cudaStream_t);
template void launch_list_forward(const ListForwardArgs<F16>&, cudaStream_t);

}  // namespace coterie::cuda
