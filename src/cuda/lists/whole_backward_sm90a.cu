// SPDX-License-Identifier: MIT
// Backward pass of lists that fit into a block as a whole (lists.h): dq, dk and dv in one kernel of
// five products, where backward_sm90a.cu has two kernels of eight. delta is exact, because a block
// has all keys of every query (formulas: backward_tiles.cuh).
//
// Grid: one block per multiprocessor, which takes one list after the other. 384 threads: two
// warpgroups compute with 232 registers, each with half of the keys, whose dk and dv stay in
// registers; four warps load with 40. Per 32 queries: scores and dP of 64 keys by 32, weights, sums
// over all keys through shared memory, dS; then dv and dk; dq of 64 queries over all keys.
// Shared memory, 215 KB: keys and values of two lists (128 KB), three tiles of queries and output
// gradients (48 KB), dS of 64 queries and 256 keys (32 KB), statistics, barriers.
//
// Preconditions (plan.cu): members of 65 to 256 queries and keys, aligned 16-bit rows of up to 64
// elements, gradients by slot, ranges from the first key on, a key head for each query head, delta
// not given. Other calls: backward_sm90a.cu. Registers are at their limit: check for spills and for
// ptxas' C7512 (serialised products) after every change.
#include <array>
#include <cstdint>
#include <type_traits>

#include "cuda/launch/launch.h"
#include "cuda/lists/backward.h"
#include "cuda/lists/rows.cuh"
#include "cuda/lists/stream.cuh"
#include "cuda/prim/bands.cuh"
#include "cuda/prim/dependent.cuh"
#include "cuda/prim/row_chunk.cuh"
#include "cuda/prim/store.cuh"
#include "cuda/prim/warp.cuh"

namespace coterie::cuda {
namespace {

constexpr int kTileBytes = kStreamRows * 128;    // per tensor
constexpr int kQueryPlaces = 3, kKeyPlaces = 2;  // tiles of queries, lists of keys

// log2 of ListBackwardArgs::weight_scale.
template <class T>
__device__ constexpr float scale_bits() {
  return std::is_same_v<T, F16> ? kHalfWeightBits : 0.0f;
}

// List metadata for the computing warps.
struct WholeList {
  int queries, keys;
  int key_tiles[kWholeTiles];  // visible to a tile of queries, from the first on
  float score;                 // factor of scores
  std::int64_t q_slot, k_slot;
};
// Metadata of 64 queries.
struct alignas(16) QueryLimits {
  float shift[2];  // of logits in base 2; includes the weight of the output gradient
  int end[2];      // of the visible ranks; beyond the list, that of its last query
};
struct WholeQueries {
  QueryLimits limits[kStreamRows / 2];  // of neighbours
  float2 score[kStreamRows];            // mean of the row and factor of its scores, in base 2
  float2 gradient[kStreamRows];         // inverse of the row; factor from weighted sum to mean
};

struct WholeShape {
  static constexpr int kThreads = 3 * kWarpgroup;
  static constexpr int kKeysAt = kQueryPlaces * 2 * kTileBytes;
  static constexpr int kSlopesAt = kKeysAt + kKeyPlaces * 2 * kWholeTiles * kTileBytes;
  static constexpr int kQueryFactsAt = kSlopesAt + kWholeTiles * kTileBytes;
  static constexpr int kKeyFactsAt =
      kQueryFactsAt + kQueryPlaces * static_cast<int>(sizeof(WholeQueries));
  static constexpr int kPartsAt =
      kKeyFactsAt + kKeyPlaces * kWholeRanks * static_cast<int>(sizeof(RowStatistics));
  static constexpr int kListsAt = kPartsAt + 2 * 8 * 32 * 4;
  static constexpr int kBarriersAt = kListsAt + kKeyPlaces * static_cast<int>(sizeof(WholeList));
  static constexpr int kBytes = kBarriersAt + 2 * (kQueryPlaces + kKeyPlaces + 1) * 8;
  static_assert(kBytes <= 227 * 1024, "more than the shared memory of a block");
  unsigned char* memory;
  std::uint32_t base;

  __device__ explicit WholeShape(unsigned char* at) : memory(at), base(shared_address(at)) {}

  // Tensors: queries and output gradients; keys and values.
  __device__ std::uint32_t queries(int place, int tensor) const {
    return base + (2 * place + tensor) * kTileBytes;
  }
  __device__ std::uint32_t keys(int place, int tensor, int tile) const {
    return base + kKeysAt + ((2 * place + tensor) * kWholeTiles + tile) * kTileBytes;
  }
  // dS, a row for each key, of 64 queries.
  __device__ std::uint32_t slopes(int tile) const { return base + kSlopesAt + tile * kTileBytes; }
  __device__ WholeQueries& query_facts(int place) const {
    return reinterpret_cast<WholeQueries*>(memory + kQueryFactsAt)[place];
  }
  __device__ RowStatistics* key_stats(int place) const {
    return reinterpret_cast<RowStatistics*>(memory + kKeyFactsAt) + place * kWholeRanks;
  }
  // Sums of 32 queries over the keys of a warp; buffers alternate.
  __device__ float* parts(int turn) const {
    return reinterpret_cast<float*>(memory + kPartsAt) + turn % 2 * 8 * 32;
  }
  __device__ WholeList& list(int place) const {
    return reinterpret_cast<WholeList*>(memory + kListsAt)[place];
  }
  __device__ std::uint32_t queries_full(int place) const { return base + kBarriersAt + place * 8; }
  __device__ std::uint32_t queries_empty(int place) const {
    return queries_full(place) + kQueryPlaces * 8;
  }
  __device__ std::uint32_t keys_full(int place) const {
    return base + kBarriersAt + (2 * kQueryPlaces + place) * 8;
  }
  __device__ std::uint32_t keys_empty(int place) const { return keys_full(place) + kKeyPlaces * 8; }
  // Barriers of both computing warpgroups: parts of delta are complete, and slopes.
  __device__ PartBarrier<2 * kWarpgroup> deltas() const { return {3, keys_empty(kKeyPlaces)}; }
  __device__ PartBarrier<2 * kWarpgroup> slopes_there() const { return {4, deltas().memory + 8}; }

  __device__ void init() const {
    const int place = static_cast<int>(threadIdx.x);
    if (place < kQueryPlaces) {
      mbarrier_init(queries_full(place), 4 * (32 + kWarpArrivals));
      mbarrier_init(queries_empty(place), 8 * kWarpArrivals);
    }
    if (place < kKeyPlaces) {
      mbarrier_init(keys_full(place), 4 * (32 + kWarpArrivals));
      mbarrier_init(keys_empty(place), 8 * kWarpArrivals);
    }
    if (place == 0) {
      deltas().init();
      slopes_there().init();
    }
    __syncthreads();
  }
};

// Stores rows of sums times a factor to slots from `slot` on; `count` of them exist. Rounded rows
// are staged in `stage`, a tile of which a warp uses its own 16 rows, and written as whole rows.
template <class T>
__device__ __forceinline__ void store_rows(const float (&sum)[32], float factor, int width,
                                           const ListSums<T>& to, std::int64_t slot, int count,
                                           std::uint32_t stage) {
  if (!to.wanted()) return;
  const int thread = static_cast<int>(thread_again()), lane = thread % 32;
  const int warp_row = thread % kWarpgroup / 32 * 16;
  if (to.rounded) {
    const std::uint32_t at = stage + (warp_row + lane % 16) * 128 + ((lane / 16 ^ lane % 8) << 4);
    stage_sums<T>(at, sum, {factor, factor});
    const int row = warp_row + lane / 8;
    const std::uint32_t from = stage + row * 128 + ((lane % 8 ^ lane / 8) << 4);
    T* target = static_cast<T*>(to.slots) + (slot + row) * width + lane % 8 * 8;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint4 word = load_shared16((from ^ i % 2 * 64) + 512 * i);
      if (row + 4 * i < count && lane % 8 * 8 < width) store_global(target + 4 * i * width, word);
    }
    __syncwarp();
  } else {
#pragma unroll
    for (int side = 0; side < 2; ++side) {
      const int row = warp_row + 8 * side + lane / 4;
      if (row >= count) continue;
      float* row_of = static_cast<float*>(to.slots) + (slot + row) * width + lane % 4 * 2;
#pragma unroll
      for (int j = 0; j < 8; ++j)
        if (8 * j + lane % 4 * 2 < width)
          store2(row_of + 8 * j, sum[4 * j + 2 * side] * factor,
                 sum[4 * j + 2 * side + 1] * factor);
    }
  }
}

// Backward pass of the normalisation, for rows in shared memory.
template <class T, class Stats>
__device__ __forceinline__ void carry_back(float (&sum)[32], std::uint32_t rows, int width,
                                           const Stats& stats_of) {
  const auto pair_of = [&](int side) {
    return [rows, side](int column) {
      return unpack2<T>(load_shared32(Tile<T, 64>{rows}.address(group_row(side), column)));
    };
  };
  const RowStatistics both[2] = {stats_of(group_row(0)), stats_of(group_row(1))};
  denormalise<0>(sum, both[0], width, pair_of(0));
  denormalise<1>(sum, both[1], width, pair_of(1));
}

// Weights of 32 queries and 64 keys and their derivatives, in the registers of a warpgroup whose
// rows are the keys.

constexpr int kStepQueries = 32;

// Reads 16 bytes of shared memory where they are used. The assembler keeps no copies in registers:
// there are none to spare.
template <class Value>
__device__ __forceinline__ Value read_again(const Value* at) {
  static_assert(sizeof(Value) == 16, "four words");
  union {
    std::uint32_t word[4];
    Value value;
  } all;
  asm volatile("ld.volatile.shared.v4.b32 {%0,%1,%2,%3}, [%4];"
               : "=r"(all.word[0]), "=r"(all.word[1]), "=r"(all.word[2]), "=r"(all.word[3])
               : "r"(shared_address(at))
               : "memory");
  return all.value;
}

// Turns scores into weights.
template <bool kMasked>
__device__ __forceinline__ void weigh(float (&s)[16], const WholeQueries& facts, int half,
                                      const RowStatistics (&key)[2], int rank) {
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const QueryLimits limits =
        read_again(facts.limits + half * kStepQueries / 2 + 4 * j + threadIdx.x % 4);
    const float4 query =
        read_again(reinterpret_cast<const float4*>(facts.score + half * kStepQueries) + 4 * j +
                   threadIdx.x % 4);
#pragma unroll
    for (int c = 0; c < 2; ++c) {
#pragma unroll
      for (int side = 0; side < 2; ++side) {
        float& x = s[4 * j + 2 * side + c];
        x = fmaf(x, key[side].inverse, key[side].mean * (c ? query.z : query.x));
        x = exp2_approximate(fmaf(x, c ? query.w : query.y, -limits.shift[c]));
        if (kMasked && rank + 8 * side >= limits.end[c]) x = 0.0f;
      }
    }
  }
}
// Adds weights times products to the sums of 8 queries.
__device__ __forceinline__ void add_products(float (&sum)[8], const float (&s)[16],
                                             const float (&d)[16]) {
#pragma unroll
  for (int i = 0; i < 16; ++i) sum[i / 4 * 2 + i % 2] = fmaf(s[i], d[i], sum[i / 4 * 2 + i % 2]);
}
// Weights as left factor.
template <class T>
__device__ __forceinline__ void pack_weights(std::uint32_t (&p)[2][4], const float (&s)[16]) {
#pragma unroll
  for (int i = 0; i < 8; ++i) p[i / 4][i % 4] = pack2<T>(s[2 * i], s[2 * i + 1]);
}

// Derivatives as left factor, and in shared memory for dq.
template <class T>
__device__ __forceinline__ void differentiate(const std::uint32_t (&p)[2][4], const float (&d)[16],
                                              const float (&delta)[8], const WholeQueries& facts,
                                              int half, const RowStatistics (&key)[2], int thread,
                                              std::uint32_t slopes, std::uint32_t (&ds)[2][4]) {
#pragma unroll
  for (int k = 0; k < 2; ++k) {
    std::uint32_t out[4];
#pragma unroll
    for (int part = 0; part < 2; ++part) {
      const int j = 2 * k + part;
      const float4 query =
          read_again(reinterpret_cast<const float4*>(facts.gradient + half * kStepQueries) + 4 * j +
                     threadIdx.x % 4);
#pragma unroll
      for (int side = 0; side < 2; ++side) {
        const int i = 4 * j + 2 * side, word = 2 * part + side;
        const float2 weight = unpack2<T>(p[k][word]);
        const float first = weight.x * (d[i] - delta[2 * j]);
        const float second = weight.y * (d[i + 1] - delta[2 * j + 1]);
        ds[k][word] = pack2<T>(first * query.x, second * query.z);
        const float inverse = inverse_factor<T>(key[side].inverse);
        out[word] = pack2<T>(first * inverse, second * inverse);
      }
    }
    const int lane = thread % 32, chunk = 4 * half + 2 * k + lane / 16;
    const int row = thread % kWarpgroup / 32 * 16 + lane % 16;
    stmatrix_x4(slopes + row * 128 + ((chunk ^ lane % 8) << 4), out);
  }
}

// A warpgroup handles key tiles `group` and 3 - group, first the one that more queries see.
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

  // Starts products of 32 queries and the keys of one or two tiles: tensor 0 for scores.
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
  // Starts sums of rows of queries, or of their output gradients.
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

  // Sums of products over all keys of the list, for 8 queries, in two steps.
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

  // For 32 queries that see no key of this warpgroup.
  __device__ void pass(int place, int half) const {
    float sum[8] = {};
    post(sum, half);
    collect(sum, shape.query_facts(place), half);
  }
  // 32 queries and kCount tiles of this warpgroup. dv is in flight while deltas are exchanged.
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
    sync_group();  // all are done with the values: their places are free
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
  int turn = 0, tile_turn = 0;  // lists and query tiles so far
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
      // The warpgroup that has less work with these queries.
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

// The loading warps: each loads 16 rows of every tile.
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

  // This warp's rows of all tiles: ranks 64 tile + 16 warp + (0 .. 15), -1 beyond the last.
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

  // Metadata of this lane's two queries, ready for use.
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

  // Called by one thread.
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

// A tensor without gaps that is zeroed, a part with every list: the loading warps have bandwidth to
// spare.
struct ClearedSpan {
  uint4* data;
  std::int64_t vectors, each;  // in total, and per list

  __device__ __forceinline__ void clear(int list) const {
    const std::int64_t first = list * each;
    const auto count = static_cast<int>(min(each, vectors - first));
    uint4* to = data + first;
#pragma unroll 4
    for (int i = static_cast<int>(threadIdx.x) % kWarpgroup; i < count; i += kWarpgroup)
      __stcs(to + i, make_uint4(0, 0, 0, 0));
  }
};
struct WholeCleared {
  ClearedSpan tensor[3];

  __device__ __forceinline__ void clear(int list) const {
#pragma unroll 1
    for (const ClearedSpan& each : tensor) each.clear(list);
  }
};

// Loads the lists of a block, one after the other.
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
  asm volatile("cp.async.wait_all;" ::: "memory");  // copies must finish before their threads exit
}

constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;

template <class T>
__global__ void __launch_bounds__(WholeShape::kThreads, 1)
    whole_list_kernel(const __grid_constant__ ListBackwardArgs<T> args,
                      const __grid_constant__ WholeCleared cleared, const int lists) {
  await_writes();  // first: sums after this kernel read the slots of tokens early
  release_next();
  extern __shared__ __align__(1024) unsigned char memory[];
  const WholeShape shape(memory);
  shape.init();
  if (threadIdx.x >= 2 * kWarpgroup) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kProducerRegisters));
    load_lists<T>(args, cleared, shape, lists);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kConsumerRegisters));
    compute_lists<T>(args, shape, lists);
  }
}

}  // namespace

template <class T>
void launch_whole_lists_sm90a(const ListBackwardArgs<T>& args, const ListBackwardPlan& plan,
                              const std::array<TensorView, 3>& cleared, cudaStream_t stream) {
  const int lists = plan.whole_lists;
  if (lists == 0) return;
  WholeCleared spans{};
  for (int i = 0; i < 3 && plan.clears; ++i) {
    const std::int64_t vectors = cleared[i].count() * dtype_bytes(cleared[i].dtype) / 16;
    spans.tensor[i] = {static_cast<uint4*>(cleared[i].data), vectors,
                       (vectors + lists - 1) / lists};
  }
  launch_early("whole_list_kernel", whole_list_kernel<T>,
               dim3(static_cast<unsigned>(min(lists, multiprocessors()))), WholeShape::kThreads,
               WholeShape::kBytes, stream, args, spans, lists);
}

#define COTERIE_INSTANTIATE(T)                                                                \
  template void launch_whole_lists_sm90a(const ListBackwardArgs<T>&, const ListBackwardPlan&, \
                                         const std::array<TensorView, 3>&, cudaStream_t)
COTERIE_INSTANTIATE(Bf16);
COTERIE_INSTANTIATE(F16);
#undef COTERIE_INSTANTIATE

}  // namespace coterie::cuda
