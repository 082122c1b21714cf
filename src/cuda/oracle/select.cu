// SPDX-License-Identifier: MIT
// Top keys of every query: those with the largest exact scores, without storing scores.
//
// A block takes 128 queries and walks all keys twice, in tiles.
// 1. Floors: a row's keys fall into kGroups groups, of which it keeps the largest scores. The j-th
//    largest of them has at least j keys at or above it, and no top key is below that of j = topk.
// 2. Candidates: four lanes hold the scores of a row, and each keeps a list of those that reach the
//    row's floor. When a list could overflow, the row's lists are cut back to the best.
// Floors only decide how much work is done, never what is selected; both walks compute a score by
// the same instructions, hence with the same bits. Blocks take tiles of queries in turn, so that
// lists exist for the resident blocks only.
#include <cfloat>
#include <cstdint>

#include "cuda/api/padding.h"
#include "cuda/launch/dispatch.h"
#include "cuda/launch/launch.h"
#include "cuda/oracle/oracle.h"
#include "cuda/prim/candidates.cuh"
#include "cuda/prim/fragments.cuh"
#include "cuda/prim/load.cuh"
#include "cuda/prim/splits.cuh"

namespace coterie::cuda {
namespace {

// Candidates for the top keys of queries: four lanes hold the scores of a row, and each keeps a
// list (select.cu).

constexpr int kOracleKeys = 64;  // of a tile
constexpr int kOracleLists = 4;  // of a row: one for each lane that holds scores of it
constexpr int kOracleOffered =
    kOracleKeys / kOracleLists;  // scores of a row that a lane has of a tile

// Of a list: a cut leaves a quarter of the top keys in each, and the next one should come late.
constexpr int oracle_capacity(int topk) {
  return (topk + kOracleLists - 1) / kOracleLists + 64 + kOracleOffered;
}
constexpr int kOracleMostOfLane = (kOracleLists * oracle_capacity(kMaxTopKeys) + 31) / 32;

// A lane's list of one row.
struct OracleList {
  CandidateKey* list;
  int count;
  float floor;  // scores below are no candidates

  __device__ bool filling(int capacity) const { return count > capacity - kOracleOffered; }

  // 4 scores: keys first, first + 1, first + 8, first + 9, those that admitted(key). NaN ranks
  // last.
  template <class Admitted>
  __device__ __forceinline__ void offer(float s0, float s1, float s2, float s3, int first,
                                        const Admitted& admitted) {
    if (fmaxf(fmaxf(s0, s1), fmaxf(s2, s3)) < floor) return;
    unsigned left = (s0 < floor ? 0u : 1u) | (s1 < floor ? 0u : 2u) | (s2 < floor ? 0u : 4u) |
                    (s3 < floor ? 0u : 8u);
    while (left) {
      const int i = __ffs(static_cast<int>(left)) - 1, key = first + (i & 1) + (i & 2) * 4;
      left &= left - 1;
      float score = i & 2 ? (i & 1 ? s3 : s2) : (i & 1 ? s1 : s0);
      if (isnan(score)) score = -FLT_MAX;
      if (score >= floor && admitted(key)) list[count++] = candidate_key(score, key);
    }
  }
};

// All candidates of the row of lanes 4 * quad .. 4 * quad + 3, spread over the lanes of the warp.
struct RowCandidates {
  CandidateKey keys[kOracleMostOfLane];  // 0: none
  CandidateKey* lists[kOracleLists];
  int total = 0;

  __device__ RowCandidates(const OracleList& own, int quad) {
    const auto address = reinterpret_cast<unsigned long long>(own.list);
    int ends[kOracleLists];
#pragma unroll
    for (int i = 0; i < kOracleLists; ++i) {
      lists[i] = reinterpret_cast<CandidateKey*>(__shfl_sync(~0u, address, 4 * quad + i));
      ends[i] = total += __shfl_sync(~0u, own.count, 4 * quad + i);
    }
#pragma unroll
    for (int t = 0; t < kOracleMostOfLane; ++t) {
      const int place = 32 * t + static_cast<int>(threadIdx.x) % 32;
      keys[t] = 0;
      if (place >= total) continue;
      const CandidateKey* from = lists[0] + place;
#pragma unroll
      for (int i = 1; i < kOracleLists; ++i)
        if (place >= ends[i - 1]) from = lists[i] + place - ends[i - 1];
      keys[t] = *from;
    }
  }
  // The worst of the best `wanted`, or 1, which is below all, where there are no more.
  __device__ CandidateKey cut(int wanted) const {
    if (total <= wanted) return 1;
    return find_cut(
        [&](const auto& visit) {
#pragma unroll
          for (int t = 0; t < kOracleMostOfLane; ++t)
            if (32 * t < total && keys[t] != 0) visit(keys[t]);
        },
        wanted, wanted);
  }
  // Calls keep(place, key) for the keys not below `cut`, places 0, 1, ...; returns their number.
  template <class Keep>
  __device__ int for_best(CandidateKey cut, const Keep& keep) const {
    int kept = 0;
#pragma unroll
    for (int t = 0; t < kOracleMostOfLane; ++t) {
      if (32 * t >= total) break;
      const unsigned votes = __ballot_sync(~0u, keys[t] >= cut);
      if (keys[t] >= cut) keep(kept + __popc(votes & ((1u << threadIdx.x % 32) - 1)), keys[t]);
      kept += __popc(votes);
    }
    __syncwarp();
    return kept;
  }
};

// Keeps the best `wanted` candidates of a row, dealt evenly to its lists, and raises its floor:
// keys to come have higher indices, so they must be strictly better than the worst. By all lanes;
// kept out of the registers of the kernel.
static __device__ __noinline__ OracleList cut_back(OracleList own, int quad, int wanted) {
  const RowCandidates row(own, quad);
  if (row.total <= wanted) return own;
  const CandidateKey cut = row.cut(wanted);
  row.for_best(cut, [&](int place, CandidateKey key) {
    row.lists[place % kOracleLists][place / kOracleLists] = key;
  });
  const int lane = threadIdx.x % 32;
  if (lane / 4 != quad) return own;
  own.count = (wanted - lane % 4 + kOracleLists - 1) / kOracleLists;
  own.floor = from_ordered(ordered(score_of(cut)) + 1);
  return own;
}

// Writes the indices of the best `topk` candidates of a row, ascending, -1 beyond them. By all
// lanes; `staged` is the warp's own room for kMaxTopKeys.
static __device__ __noinline__ void write_row(OracleList own, int quad, int topk,
                                              std::int32_t* staged, std::int32_t* to) {
  const int lane = threadIdx.x % 32;
  const RowCandidates row(own, quad);
  const int count = row.for_best(
      row.cut(topk), [&](int place, CandidateKey key) { staged[place] = index_of(key); });
  for (int i = lane; i < count; i += 32) {
    int place = 0;
    for (int j = 0; j < count; ++j) place += staged[j] < staged[i];
    to[place] = staged[i];
  }
  for (int i = count + lane; i < topk; i += 32) to[i] = -1;
  __syncwarp();
}

// Cuts back the lists that may overflow with the next tile.
__device__ __forceinline__ void make_room(OracleList (&lists)[4], int capacity, int wanted) {
  bool filling = false;
#pragma unroll
  for (int r = 0; r < 4; ++r) filling |= lists[r].filling(capacity);
  if (!__any_sync(~0u, filling)) return;
#pragma unroll
  for (int r = 0; r < 4; ++r) {
    const unsigned full = __ballot_sync(~0u, lists[r].filling(capacity));
#pragma unroll 1
    for (int quad = 0; quad < 8; ++quad)
      if (full >> (4 * quad) & 15u) lists[r] = cut_back(lists[r], quad, wanted);
  }
}

constexpr int kWarps = 4, kThreads = 32 * kWarps;
constexpr int kRows = 32 * kWarps;  // of a block
constexpr int kGroups = 32;         // of a row's keys: by their places in tiles
constexpr int kLaneGroups = kGroups / kOracleLists;
constexpr int kMostRank = kGroups / 2;  // of group maxima that floors are taken from

template <class T>
struct OracleArgs {
  ItemSpans spans;
  ItemChunks tiles;  // of the queries
  Tensor4<const T> q, k;
  const std::uint8_t* mask;  // or null
  std::int64_t mask_strides[4];
  int H, group, N, topk, capacity;
  bool causal, negative;     // negative: the smallest products are the largest scores
  CandidateKey* candidates;  // (blocks, kRows, kOracleLists, capacity)
  std::int32_t* top_keys;    // (B, H, N, topk)
};

// On a multiprocessor, as registers and shared memory allow.
template <class T, int kDim>
constexpr int kBlocks = sizeof(T) == 4 ? 1
                        : kDim <= 64   ? 3
                                       : 2;

template <class T, int kDim>
using Fragments = QueryFragments<T, kDim, sizeof(T) == 2 || kDim <= 32>;

// A tile of queries of one head, by all threads of a block.
template <class T, int kDim>
struct OracleTile {
  const OracleArgs<T>& args;
  Tile<T, kDim> queries;  // kRows rows, then two stages of keys
  ItemSpan q, k;
  int head, begin, end;  // rows of the item

  __device__ Tile<T, kDim> stage(int number) const {
    return queries.below(kRows + number % 2 * kOracleKeys);
  }
  // Of the lane's r-th row, counted from the item.
  __device__ int row(int r) const {
    return begin + static_cast<int>(threadIdx.x) / 32 * 32 + 8 * r +
           static_cast<int>(threadIdx.x) % 32 / 4;
  }
  // How many keys a row sees by its position.
  __device__ int visible(int row) const {
    if (!args.causal) return k.length;
    return min(max(row + k.length - q.length + 1, 0), k.length);
  }
  // Whether the mask, if any, lets a row see a key.
  __device__ bool unmasked(int row, int key) const {
    if (!args.mask) return true;
    const std::int64_t* strides = args.mask_strides;
    return args.mask[q.batch * strides[0] + head * strides[1] + (q.begin + row) * strides[2] +
                     (k.begin + key) * strides[3]] != 0;
  }

  __device__ void load_keys(int number, int turn, int last) const {
    const int first = number * kOracleKeys;
    if (first < last)
      load_tile<kOracleKeys, kThreads>(
          stage(turn), args.k.rows(k.batch, head / args.group, k.begin), first, last - first);
    cp_async_commit();
  }

  // Calls visit(n, key, s) with the scores of the warp's rows 16 m .. 16 m + 15, in s[m], and keys
  // key .. key + 15, for n = 0 .. 3 of tiles first, first + step, ... of the keys below `last`.
  template <class Visit>
  __device__ __forceinline__ void walk(Fragments<T, kDim>& fragments, int first, int step, int last,
                                       const Visit& visit) const {
    __syncthreads();  // whoever used the tiles before
    load_keys(first, 0, last);
#pragma unroll 1
    for (int number = first, turn = 0; number * kOracleKeys < last; number += step, ++turn) {
      cp_async_wait<0>();
      __syncthreads();
      load_keys(number + step, turn + 1, last);
#pragma unroll 2  // groups repeat every second n
      for (int n = 0; n < kOracleKeys / 16; ++n) {
        Accumulator s[2];
        fragments.scores(s, stage(turn), 16 * n);
        if (args.negative)
#pragma unroll
          for (int i = 0; i < 16; ++i) s[i / 8][i / 4 % 2][i % 4] *= -1.0f;
        visit(n, number * kOracleKeys + 16 * n, s);
      }
    }
  }

  // Lower bounds of the scores of top keys, from the tiles first, first + step, ... of the keys:
  // the `rank`-th largest of each row's group maxima.
  __device__ void find_floors(Fragments<T, kDim>& fragments, int first, int step, int last,
                              const int (&seen)[4], int rank, float (&floors)[4]) const {
    const int lane = threadIdx.x % 32;
    const int common = visible(begin + static_cast<int>(threadIdx.x) / 32 * 32);  // to all rows
    float maxima[4][kLaneGroups];
#pragma unroll
    for (int i = 0; i < 4 * kLaneGroups; ++i) maxima[i / kLaneGroups][i % kLaneGroups] = -INFINITY;
    walk(fragments, first, step, last, [&](int n, int key, const Accumulator(&s)[2]) {
      const bool all = key + 16 <= common;
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        const int r = i / 4, e = i % 4;
        float score = s[r / 2][e / 2][r % 2 * 2 + e % 2];
        if (!all && key + lane % 4 * 2 + e / 2 * 8 + e % 2 >= seen[r]) score = -INFINITY;
        float& most = maxima[r][(4 * n + e) % kLaneGroups];
        most = fmaxf(most, score);
      }
    });
#pragma unroll
    for (int r = 0; r < 4; ++r) floors[r] = fminf(floors[r], ranked(maxima[r], rank));
  }

  // The `rank`-th largest of the values of a row's four lanes, bit by bit.
  __device__ static float ranked(const float (&values)[kLaneGroups], int rank) {
    std::uint32_t found = 0;
#pragma unroll 1
    for (int bit = 31; bit >= 0; --bit) {
      const std::uint32_t next = found | 1u << bit;
      int count = 0;
#pragma unroll
      for (int i = 0; i < kLaneGroups; ++i) count += ordered(values[i]) >= next;
      count += __shfl_xor_sync(~0u, count, 1);
      count += __shfl_xor_sync(~0u, count, 2);
      if (count >= rank) found = next;
    }
    return from_ordered(found);
  }

  __device__ void find(OracleList (&lists)[4]) const {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int last = visible(end - 1);  // the last row sees most
    __syncthreads();                    // whoever used the tiles before
    load_tile<kRows, kThreads>(queries, args.q.rows(q.batch, head, q.begin), begin, end - begin);
    cp_async_commit();
    cp_async_wait<0>();
    __syncthreads();
    Fragments<T, kDim> fragments;
    fragments.load(queries, warp * 32);
    int seen[4];
    float floors[4];
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      seen[r] = row(r) < end ? visible(row(r)) : 0;
      floors[r] = INFINITY;
    }
    // Where all keys fit into the lists, or a mask hides some, every key is a candidate.
    const bool few = args.mask || last <= kOracleLists * (args.capacity - kOracleOffered);
    const int parts = few ? 0 : (args.topk + kMostRank - 1) / kMostRank;
    for (int part = 0; part < parts; ++part)
      find_floors(fragments, part, parts, last, seen, (args.topk + parts - 1) / parts, floors);
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      lists[r].count = 0;
      lists[r].floor = parts > 0 ? fmaxf(floors[r], -FLT_MAX) : -FLT_MAX;
      if (row(r) >= end) lists[r].floor = INFINITY;
    }
    walk(fragments, 0, 1, last, [&](int n, int key, const Accumulator(&s)[2]) {
#pragma unroll
      for (int r = 0; r < 4; ++r)
        lists[r].offer(s[r / 2][0][r % 2 * 2], s[r / 2][0][r % 2 * 2 + 1], s[r / 2][1][r % 2 * 2],
                       s[r / 2][1][r % 2 * 2 + 1], key + lane % 4 * 2,
                       [&](int at) { return at < seen[r] && unmasked(row(r), at); });
      if (n < kOracleKeys / 16 - 1) return;
      __syncwarp();
      make_room(lists, args.capacity, args.topk);
    });
  }
};

template <class T, int kDim>
__global__ void __launch_bounds__(kThreads, kBlocks<T, kDim>)
    oracle_select_kernel(const __grid_constant__ OracleArgs<T> args) {
  extern __shared__ __align__(128) unsigned char memory[];
  __shared__ std::int32_t staged[kWarps][kMaxTopKeys];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  for (int number = blockIdx.x; number < args.tiles.slots * args.H; number += gridDim.x) {
    const ItemChunk rows = args.tiles.find(args.spans.q, number / args.H);
    if (rows.begin >= rows.end) continue;
    const OracleTile<T, kDim> tile{args,
                                   {shared_address(memory)},
                                   rows.span,
                                   args.spans.k.span(rows.item),
                                   number % args.H,
                                   rows.begin,
                                   rows.end};
    OracleList lists[4];
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const std::int64_t list =
          (static_cast<std::int64_t>(blockIdx.x) * kRows + warp * 32 + 8 * r + lane / 4) *
              kOracleLists +
          lane % 4;
      lists[r].list = args.candidates + list * args.capacity;
    }
    tile.find(lists);
    std::int32_t* top =
        args.top_keys +
        ((static_cast<std::int64_t>(tile.q.batch) * args.H + tile.head) * args.N + tile.q.begin) *
            args.topk;
#pragma unroll
    for (int r = 0; r < 4; ++r)
#pragma unroll 1
      for (int quad = 0; quad < 8; ++quad) {
        const int row = tile.begin + warp * 32 + 8 * r + quad;
        if (row >= tile.end) break;
        write_row(lists[r], quad, args.topk, staged[warp],
                  top + static_cast<std::int64_t>(row) * args.topk);
      }
  }
}

template <class T, int kDim>
void launch_select(const OracleArgs<T>& args, int blocks, cudaStream_t stream) {
  constexpr std::size_t kBytes = (kRows + 2 * kOracleKeys) * Tile<T, kDim>::kRowBytes;
  allow_shared_memory(oracle_select_kernel<T, kDim>, kBytes);
  oracle_select_kernel<T, kDim><<<static_cast<unsigned>(blocks), kThreads, kBytes, stream>>>(args);
  COTERIE_LAUNCH("oracle_select");
}

}  // namespace

void oracle_select(const AttentionCall& call, std::int64_t topk, const TensorView& top_keys,
                   Arena& arena, cudaStream_t stream) {
  const ItemChunks tiles = row_tiles(sequence_spans(call.inputs.q_sequences, call.N),
                                     static_cast<int>(call.num_items()), kRows);
  const int resident = dispatch_element(call.op, call.inputs.q.dtype, [&](auto tag) {
    return dispatch_head_dim(call.op, call.Dk, [&](auto dim) {
      return kBlocks<typename decltype(tag)::type, decltype(dim)::value> * multiprocessors();
    });
  });
  const int blocks = static_cast<int>(min(tiles.slots * call.H, std::int64_t{resident}));
  const int capacity = oracle_capacity(static_cast<int>(topk));
  CandidateKey* candidates = arena.take<CandidateKey>(
      static_cast<std::int64_t>(blocks) * kRows * kOracleLists * capacity + 1);
  if (arena.counting()) return;
  if (ragged(call.inputs.q_sequences) && top_keys.count() > 0)
    COTERIE_CUDA(cudaMemsetAsync(top_keys.data, 0xff,
                                 static_cast<std::size_t>(top_keys.count()) * sizeof(std::int32_t),
                                 stream));
  if (blocks == 0 || topk == 0) return;
  dispatch_element(call.op, call.inputs.q.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    OracleArgs<T> args{};
    args.spans = item_spans(call.inputs);
    args.tiles = tiles;
    args.q = tensor4<const T>(call.inputs.q);
    args.k = tensor4<const T>(call.k);
    const TensorView& mask = call.inputs.mask;
    args.mask = static_cast<const std::uint8_t*>(mask.data);
    for (int dim = 0; mask.present() && dim < 4; ++dim) args.mask_strides[dim] = mask.stride(dim);
    args.H = static_cast<int>(call.H);
    args.group = static_cast<int>(call.H / call.key_heads);
    args.N = static_cast<int>(call.N);
    args.topk = static_cast<int>(topk);
    args.capacity = capacity;
    args.causal = call.causal;
    args.negative = call.scale < 0;
    args.candidates = candidates;
    args.top_keys = static_cast<std::int32_t*>(top_keys.data);
    dispatch_head_dim(call.op, call.Dk, [&](auto dim) {
      launch_select<T, decltype(dim)::value>(args, blocks, stream);
    });
  });
}

}  // namespace coterie::cuda
