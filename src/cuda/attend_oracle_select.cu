// SPDX-License-Identifier: MIT
// Top keys of every query: those with the largest exact scores, without storing scores.
//
// A block takes 128 queries and walks all keys in tiles. Four lanes hold the scores of a row, and
// each keeps a list of those that reach the row's floor. When a list could overflow, the row's
// lists are cut back to the best, which raises the floor. Blocks take tiles of queries in turn, so
// that lists exist for the resident blocks only.
#include <algorithm>
#include <cfloat>

#include "cuda/device/candidates.cuh"
#include "cuda/device/load.cuh"
#include "cuda/device/query_fragments.cuh"
#include "cuda/device/splits.cuh"
#include "cuda/launch.h"
#include "cuda/oracle.h"
#include "cuda/tuning.h"

namespace coterie::cuda {
namespace {

constexpr int kWarps = 4, kThreads = 32 * kWarps;
constexpr int kRows = 32 * kWarps;        // of a block
constexpr int kKeys = 64;                 // of a tile
constexpr int kLists = 4;                 // of a row: one for each lane that holds scores of it
constexpr int kOffered = kKeys / kLists;  // scores of a row that a lane has of a tile

// Of a list: a cut leaves a quarter of the top keys in each, and the next one should come late.
constexpr int capacity_of(int topk) { return (topk + kLists - 1) / kLists + 64 + kOffered; }
constexpr int kMostOfLane = (kLists * capacity_of(kMaxTopKeys) + 31) / 32;

template <class T>
struct OracleArgs {
  ItemSpans spans;
  KeyChunks tiles;  // of the queries
  Tensor4<const T> q, k;
  const std::uint8_t* mask;  // or null
  std::int64_t mask_strides[4];
  int H, group, N, topk, capacity;
  bool causal, negative;     // negative: the smallest products are the largest scores
  CandidateKey* candidates;  // (blocks, kRows, kLists, capacity)
  std::int32_t* top_keys;    // (B, H, N, topk)
};

// On a multiprocessor, as registers and shared memory allow.
template <class T, int kDim>
constexpr int kBlocks = sizeof(T) == 4 ? 1
                        : kDim <= 64   ? 3
                                       : 2;

template <class T, int kDim>
using Fragments = QueryFragments<T, kDim, sizeof(T) == 2 || kDim <= 32>;

// A lane's list of one row.
struct LaneList {
  CandidateKey* list;
  int count;
  float floor;  // scores below are no candidates

  __device__ bool filling(int capacity) const { return count > capacity - kOffered; }

  // 4 scores: keys first, first + 1, first + 8, first + 9, those that admitted(key). NaN ranks
  // last.
  template <class Admitted>
  __device__ __forceinline__ void offer(float s0, float s1, float s2, float s3, int first,
                                        const Admitted& admitted) {
    if (fmaxf(fmaxf(s0, s1), fmaxf(s2, s3)) < floor) return;
    const auto offer_one = [&](float score, int key) {
      if (isnan(score)) score = -FLT_MAX;
      if (score >= floor && admitted(key)) list[count++] = candidate_key(score, key);
    };
    offer_one(s0, first);
    offer_one(s1, first + 1);
    offer_one(s2, first + 8);
    offer_one(s3, first + 9);
  }
};

// All candidates of the row of lanes 4 * quad .. 4 * quad + 3, spread over the lanes of the warp.
struct RowCandidates {
  CandidateKey keys[kMostOfLane];  // 0: none
  CandidateKey* lists[kLists];
  int total = 0;

  __device__ RowCandidates(const LaneList& own, int quad) {
    const auto address = reinterpret_cast<unsigned long long>(own.list);
    int ends[kLists];
#pragma unroll
    for (int i = 0; i < kLists; ++i) {
      lists[i] = reinterpret_cast<CandidateKey*>(__shfl_sync(~0u, address, 4 * quad + i));
      ends[i] = total += __shfl_sync(~0u, own.count, 4 * quad + i);
    }
#pragma unroll
    for (int t = 0; t < kMostOfLane; ++t) {
      const int place = 32 * t + static_cast<int>(threadIdx.x) % 32;
      keys[t] = 0;
      if (place >= total) continue;
      const CandidateKey* from = lists[0] + place;
#pragma unroll
      for (int i = 1; i < kLists; ++i)
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
          for (int t = 0; t < kMostOfLane; ++t)
            if (32 * t < total && keys[t] != 0) visit(keys[t]);
        },
        wanted, wanted);
  }
  // Calls keep(place, key) for the keys not below `cut`, places 0, 1, ...; returns their number.
  template <class Keep>
  __device__ int for_best(CandidateKey cut, const Keep& keep) const {
    int kept = 0;
#pragma unroll
    for (int t = 0; t < kMostOfLane; ++t) {
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
__device__ __noinline__ LaneList cut_back(LaneList own, int quad, int wanted) {
  const RowCandidates row(own, quad);
  if (row.total <= wanted) return own;
  const CandidateKey cut = row.cut(wanted);
  row.for_best(
      cut, [&](int place, CandidateKey key) { row.lists[place % kLists][place / kLists] = key; });
  const int lane = threadIdx.x % 32;
  if (lane / 4 != quad) return own;
  own.count = (wanted - lane % 4 + kLists - 1) / kLists;
  own.floor = from_ordered(ordered(score_of(cut)) + 1);
  return own;
}

// Writes the indices of the best `topk` candidates of a row, ascending, -1 beyond them. By all
// lanes; `staged` is the warp's own room for kMaxTopKeys.
__device__ __noinline__ void write_row(LaneList own, int quad, int topk, std::int32_t* staged,
                                       std::int32_t* to) {
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
__device__ __forceinline__ void make_room(LaneList (&lists)[4], int capacity, int wanted) {
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

// A tile of queries of one head, by all threads of a block.
template <class T, int kDim>
struct OracleTile {
  const OracleArgs<T>& args;
  Tile<T, kDim> queries;  // kRows rows, then two stages of keys
  ItemSpan q, k;
  int head, begin, end;  // rows of the item

  __device__ Tile<T, kDim> stage(int number) const {
    return queries.below(kRows + number % 2 * kKeys);
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

  __device__ void load_keys(int number, int last) const {
    const int first = number * kKeys;
    if (first < last)
      load_tile<kKeys, kThreads>(stage(number), args.k.rows(k.batch, head / args.group, k.begin),
                                 first, last - first);
    cp_async_commit();
  }

  __device__ void find(LaneList (&lists)[4]) const {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int last = visible(end - 1);  // the last row sees most
    int seen[4];
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const bool there = row(r) < end;
      seen[r] = there ? visible(row(r)) : 0;
      lists[r].count = 0;
      lists[r].floor = there ? -FLT_MAX : INFINITY;
    }
    __syncthreads();  // whoever used the tiles before
    load_tile<kRows, kThreads>(queries, args.q.rows(q.batch, head, q.begin), begin, end - begin);
    load_keys(0, last);
    cp_async_wait<0>();
    __syncthreads();
    Fragments<T, kDim> fragments;
    fragments.load(queries, warp * 32);
#pragma unroll 1
    for (int number = 0; number * kKeys < last; ++number) {
      cp_async_wait<0>();
      __syncthreads();
      load_keys(number + 1, last);
#pragma unroll
      for (int n = 0; n < kKeys / 16; ++n) {
        Accumulator s[2];
        fragments.scores(s, stage(number), 16 * n);
        if (args.negative)
#pragma unroll
          for (int i = 0; i < 16; ++i) s[i / 8][i / 4 % 2][i % 4] *= -1.0f;
#pragma unroll
        for (int r = 0; r < 4; ++r)
          lists[r].offer(s[r / 2][0][r % 2 * 2], s[r / 2][0][r % 2 * 2 + 1], s[r / 2][1][r % 2 * 2],
                         s[r / 2][1][r % 2 * 2 + 1], number * kKeys + 16 * n + lane % 4 * 2,
                         [&](int key) { return key < seen[r] && unmasked(row(r), key); });
      }
      __syncwarp();
      make_room(lists, args.capacity, args.topk);
    }
  }
};

template <class T, int kDim>
__global__ void __launch_bounds__(kThreads, kBlocks<T, kDim>)
    oracle_select_kernel(const __grid_constant__ OracleArgs<T> args) {
  extern __shared__ __align__(128) unsigned char memory[];
  __shared__ std::int32_t staged[kWarps][kMaxTopKeys];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  for (int number = blockIdx.x; number < args.tiles.slots * args.H; number += gridDim.x) {
    const KeyChunk rows = args.tiles.find(args.spans.q, number / args.H);
    if (rows.begin >= rows.end) continue;
    const OracleTile<T, kDim> tile{args,
                                   {shared_address(memory)},
                                   rows.keys,
                                   args.spans.k.span(rows.item),
                                   number % args.H,
                                   rows.begin,
                                   rows.end};
    LaneList lists[4];
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const std::int64_t list =
          (static_cast<std::int64_t>(blockIdx.x) * kRows + warp * 32 + 8 * r + lane / 4) * kLists +
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
  constexpr std::size_t kBytes = (kRows + 2 * kKeys) * Tile<T, kDim>::kRowBytes;
  allow_shared_memory(oracle_select_kernel<T, kDim>, kBytes);
  oracle_select_kernel<T, kDim><<<static_cast<unsigned>(blocks), kThreads, kBytes, stream>>>(args);
  COTERIE_LAUNCH("oracle_select");
}

// Tiles of the queries, kRows each.
KeyChunks query_chunks(const AttentionCall& call) {
  const bool packed = call.inputs.q_sequences.cu_seqlens.present();
  KeyChunks tiles{kRows, 0, static_cast<int>(call.num_items()), 0};
  tiles.per_item = packed ? 0 : tiles.count(static_cast<int>(call.N));
  tiles.slots =
      packed ? static_cast<int>(call.N / kRows) + tiles.items : tiles.items * tiles.per_item;
  return tiles;
}

}  // namespace

void oracle_select(const AttentionCall& call, std::int64_t topk, const TensorView& top_keys,
                   Arena& arena, cudaStream_t stream) {
  const KeyChunks tiles = query_chunks(call);
  const int resident = dispatch_element(call.op, call.inputs.q.dtype, [&](auto tag) {
    return dispatch_wide_dim(call.op, call.Dk, [&](auto dim) {
      return kBlocks<typename decltype(tag)::type, decltype(dim)::value> * multiprocessors();
    });
  });
  const int blocks = static_cast<int>(std::min<std::int64_t>(tiles.slots * call.H, resident));
  const int capacity = capacity_of(static_cast<int>(topk));
  CandidateKey* candidates =
      arena.take<CandidateKey>(static_cast<std::int64_t>(blocks) * kRows * kLists * capacity + 1);
  if (!candidates) return;
  if (call.num_items() == 0 || call.inputs.q_sequences.lengths.present() ||
      call.inputs.q_sequences.cu_seqlens.present())
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
    dispatch_wide_dim(call.op, call.Dk, [&](auto dim) {
      launch_select<T, decltype(dim)::value>(args, blocks, stream);
    });
  });
}

}  // namespace coterie::cuda
