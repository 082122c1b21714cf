// SPDX-License-Identifier: MIT
// Backward pass of sliding windows along all rows of an item (lists.h): dq, dk and dv in one kernel
// of five products, where backward_sm90a.cu has two kernels of eight. delta is exact (formulas:
// backward_tiles.cuh).
//
// Tiles of 64 queries and of 64 keys share their numbering: queries of tile t see only keys of the
// tiles t - 4 .. t, the first and the last of them in part. Grid: one block per multiprocessor,
// which walks along its share of the tiles, and four more whose dq belongs to the next block;
// blocks exchange no data. 512 threads of 128 registers: each of four warpgroups loads one tensor,
// handles 64 of the visible keys with their dk and dv in registers, and computes 32 queries at a
// time; two of them compute dq. The warpgroup with the oldest keys also takes the newest ones.
// Shared memory, 222 KB: 6 tiles of keys and values, 2 of queries and output gradients, weights and
// dS of 5 x 64 keys, 8 KB to store dq.
//
// Preconditions (plan.cu): windows of 129 to 256, aligned 16-bit rows of up to 64 elements, a key
// and value head for each query head, dq by row, delta not given, no statistics or factors. Other
// calls: backward_sm90a.cu. Registers are at their limit: check ptxas' output (C7512: serialised
// products) after every change.
#include <cstdint>
#include <type_traits>

#include "cuda/launch/launch.h"
#include "cuda/lists/backward.h"
#include "cuda/lists/rows.cuh"
#include "cuda/lists/stream.cuh"
#include "cuda/prim/bands.cuh"
#include "cuda/prim/dependent.cuh"
#include "cuda/prim/row_chunk.cuh"
#include "cuda/prim/softmax.cuh"
#include "cuda/prim/store.cuh"
#include "cuda/prim/warp.cuh"

namespace coterie::cuda {
namespace {

constexpr int kWalkKeys = 6, kWalkQueries = 2;  // places of tiles
constexpr int kWalkTile = kStreamRows * 128;    // bytes of a tensor
constexpr int kWalkHalf = 32;                   // queries of a half step
constexpr int kWalkPartStride = 20;  // floats: sums of a query by warp, free of bank conflicts

// Tiles [first, last) of an item and head that a block owns: their queries' dq, their keys' dk and
// dv. The block walks along the queries of [first, end).
struct alignas(16) WalkPart {
  int first, last, end;
  int next;  // number of the first tile after it
  int head, batch, q_begin, k_begin;
  int q_origin, k_origin;  // ranks of tile 0, may be negative
  int queries, keys;
  const float* lse;        // of rank 0
  float exponent, factor;  // of scores, in base 2; of dq and dk
};

// The part that begins with tile number `next`.
template <class T>
__device__ WalkPart find_part(const ListBackwardArgs<T>& args, const WalkCut& cut, int next,
                              int stop) {
  const ListProblem& problem = args.problem;
  WalkPart part;
  const int number = next / cut.per_head;
  int item = number / problem.q.heads, first = next - number * cut.per_head;
  int behind = cut.per_head;  // the first number after the item
  part.head = number % problem.q.heads;
  if (const std::int32_t* offsets = problem.q.spans.cu_seqlens) {
    const auto start = [&](int i) {
      return i * cut.per_item + min(max(offsets[i], 0), problem.q.spans.rows) / kStreamRows;
    };
    item = 0;
    for (int high = problem.q.items; high - item > 1;) {
      const int middle = (item + high) / 2;
      (start(middle) <= first ? item : high) = middle;
    }
    if (item + 1 < problem.q.items) behind = start(item + 1);
    behind = max(behind, first + 1) - start(item);
    first -= start(item);
  }
  const int count = min(behind - first, stop - next);
  const ItemSpan q = problem.q.spans.span(item), k = problem.k.spans.span(item);
  const int shift = (problem.offset_rows ? k.length - q.length : 0) + cut.reach;
  const auto tiles = [](int ranks) { return (max(ranks, 0) + kStreamRows - 1) / kStreamRows; };
  part.q_origin = -tiles(shift) * kStreamRows;
  part.k_origin = part.q_origin + shift;
  const int q_tiles = tiles(q.length - part.q_origin);
  part.next = next + count;
  part.first = first;
  part.last = min(first + count, max(q_tiles, tiles(k.length - part.k_origin)));
  part.end = max(part.last, min(part.last + kWalkGroups, q_tiles));
  part.batch = q.batch;
  part.q_begin = q.begin;
  part.k_begin = k.begin;
  part.queries = q.length;
  part.keys = k.length;
  const float score = problem.score_scale(part.head);
  part.exponent = score * kLog2e;
  part.factor = score / args.weight_scale;
  part.lse = args.lse.data + ListProblem::row_base(problem.q, q, part.head);
  return part;
}

struct WalkShape {
  static constexpr int kThreads = kWalkGroups * kWarpgroup;
  static constexpr int kQueriesAt = kWalkKeys * 2 * kWalkTile;
  static constexpr int kSlopesAt = kQueriesAt + kWalkQueries * 2 * kWalkTile;
  static constexpr int kWeightsAt = kSlopesAt + (kWalkGroups + 1) * kWalkTile;
  static constexpr int kStageAt = kWeightsAt + (kWalkGroups + 1) * kWalkTile;
  static constexpr int kShiftsAt = kStageAt + kWalkTile;
  static constexpr int kPartsAt = kShiftsAt + kWalkQueries * kStreamRows * 4;
  static constexpr int kPartAt = kPartsAt + 2 * kWalkHalf * kWalkPartStride * 4;
  static constexpr int kSourcesAt = kPartAt + 96;
  static constexpr int kBarrierAt = kSourcesAt + 4 * 48;
  static constexpr int kBytes = kBarrierAt + 16;
  static_assert(kBytes <= 227 * 1024, "more than the shared memory of a block");
  unsigned char* memory;
  std::uint32_t base;

  __device__ explicit WalkShape(unsigned char* at) : memory(at), base(shared_address(at)) {}

  // All threads, in both kinds of half steps, where __syncthreads() would diverge.
  __device__ PartBarrier<kThreads> sums_there() const { return {1, base + kBarrierAt}; }

  // Tensors: keys and values; queries and output gradients.
  __device__ std::uint32_t keys(int place, int tensor) const {
    return base + (2 * place + tensor) * kWalkTile;
  }
  __device__ std::uint32_t queries(int place, int tensor) const {
    return base + kQueriesAt + (2 * place + tensor) * kWalkTile;
  }
  // dS and weights, a row for each key: of a warpgroup's tile, and of the newest keys.
  __device__ std::uint32_t slopes(int place) const { return base + kSlopesAt + place * kWalkTile; }
  __device__ std::uint32_t weights(int place) const {
    return base + kWeightsAt + place * kWalkTile;
  }
  // dq before it is stored.
  __device__ std::uint32_t stage() const { return base + kStageAt; }
  // Shifts of logits in base 2; initially lse itself.
  __device__ float* shifts(int place) const {
    return reinterpret_cast<float*>(memory + kShiftsAt) + place * kStreamRows;
  }
  // The current part.
  __device__ WalkPart& part() const { return *reinterpret_cast<WalkPart*>(memory + kPartAt); }
  // Sums of 32 queries by warp; buffers alternate.
  __device__ float* parts(int turn) const {
    return reinterpret_cast<float*>(memory + kPartsAt) + turn * kWalkHalf * kWalkPartStride;
  }
};

// The place `count` before or after a place, of kPlaces.
template <int kPlaces>
__device__ __forceinline__ int place_before(int place, int count) {
  return place >= count ? place - count : place - count + kPlaces;
}
template <int kPlaces>
__device__ __forceinline__ int place_after(int place, int count) {
  return place + count >= kPlaces ? place + count - kPlaces : place + count;
}

// Weights of 32 queries and 64 keys and their derivatives, in the registers of a warpgroup whose
// rows are the keys.

// The mask tells the compiler how many threads there are.
__device__ __forceinline__ unsigned walk_thread() {
  return thread_again() & (kWalkGroups * kWarpgroup - 1);
}

// The upper of this thread's two keys; the other is 8 rows below.
__device__ __forceinline__ int walk_row(unsigned thread) {
  return static_cast<int>(thread % kWarpgroup / 32 * 16 + thread % 32 / 4);
}

// delta of 8 queries, over all keys.
template <class T>
__device__ __forceinline__ void exchange(float (&sum)[8], const WalkShape& shape, int half,
                                         unsigned thread) {
  float* parts = shape.parts(half);
  const unsigned own = thread % 32;
  parts[(own / 8 * 8 + own % 4 * 2 + own / 4 % 2) * kWalkPartStride + thread / 32] =
      reduce_columns(sum, own);
  shape.sums_there().sync();
  float total[4];
#pragma unroll
  for (int i = 0; i < kWalkGroups; ++i) {
    const float4 four = *reinterpret_cast<const float4*>(parts + own * kWalkPartStride + 4 * i);
    total[i] = (four.x + four.y) + (four.z + four.w);
  }
  float all = (total[0] + total[1]) + (total[2] + total[3]);
  if constexpr (std::is_same_v<T, F16>) all *= 1.0f / kHalfWeightScale;
#pragma unroll
  for (int i = 0; i < 8; ++i) sum[i] = __shfl_sync(~0u, all, 8 * (i / 2) + own % 4 * 2 + i % 2);
}

// Turns scores into weights. A lane's keys are seen by the queries [low, low + count).
template <bool kMasked>
__device__ __forceinline__ void weigh_window(float (&s)[16], const float (&d)[16], float (&sum)[8],
                                             const float* shifts, int half, float exponent,
                                             const int (&low)[2], const int (&count)[2],
                                             unsigned thread) {
  const int first = half * kWalkHalf + static_cast<int>(thread % 4 * 2);
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const float2 shift = *reinterpret_cast<const float2*>(shifts + first + 8 * j);
#pragma unroll
    for (int c = 0; c < 2; ++c) {
#pragma unroll
      for (int side = 0; side < 2; ++side) {
        float& x = s[4 * j + 2 * side + c];
        x = exp2_approximate(fmaf(x, exponent, c ? -shift.y : -shift.x));
        if (kMasked && static_cast<unsigned>(first + 8 * j + c - low[side]) >=
                           static_cast<unsigned>(count[side]))
          x = 0.0f;
      }
      sum[2 * j + c] = fmaf(s[4 * j + 2 + c], d[4 * j + 2 + c], s[4 * j + c] * d[4 * j + c]);
    }
  }
}
// For 16 queries: weight pairs as factors, and their derivatives.
template <class T>
__device__ __forceinline__ void window_factors(std::uint32_t (&p)[4], std::uint32_t (&ds)[4], int k,
                                               const float (&s)[16], const float (&d)[16],
                                               const float (&delta)[8]) {
#pragma unroll
  for (int word = 0; word < 4; ++word) {
    const int i = 8 * k + 2 * word, column = 4 * k + word / 2 * 2;
    p[word] = pack2<T>(s[i], s[i + 1]);
    ds[word] = pack2<T>(s[i] * (d[i] - delta[column]), s[i + 1] * (d[i + 1] - delta[column + 1]));
  }
}
// Where the first 16 of the half's queries go in a tile of weights or slopes; the others are at ^
// 32 bytes.
__device__ __forceinline__ std::uint32_t factor_place(int half, unsigned thread) {
  const unsigned row = thread % kWarpgroup / 32 * 16 + thread % 16;
  return row * 128 + ((static_cast<unsigned>(4 * half) + thread % 32 / 16 ^ thread % 8) << 4);
}

// Stores 2 kCount columns of sums, from column 32 `part` on, of the ranks from `first` on as whole
// pieces of rows, staged in `stage`.
template <class T, int kCount>
__device__ __forceinline__ void store_walk_rows(const float (&sum)[kCount], float factor,
                                                const Rows<T>& rows, int first, int count, int part,
                                                std::uint32_t stage) {
  constexpr unsigned kChunks = kCount / 4, kRows = 32 / kChunks;  // chunks per row; rows at a time
  const unsigned thread = walk_thread(), lane = thread % 32;
  const unsigned warp_row = thread % kWarpgroup / 32 * 16;
  const std::uint32_t tile = stage + warp_row * 128;
  const std::uint32_t at =
      tile + lane % 16 * 128 + ((lane / 16 + 4 * static_cast<unsigned>(part) ^ lane % 8) << 4);
  stage_sums<T>(at, sum, {factor, factor});
  const unsigned chunk = lane % kChunks + 4 * static_cast<unsigned>(part), row = lane / kChunks;
  const int rank = first + static_cast<int>(warp_row + row), pitch = pitch_bytes(rows);
  const bool inside = static_cast<int>(chunk * 8) < rows.width;
  const std::uint32_t from = tile + row * 128 + ((chunk ^ row % 8) << 4);
#pragma unroll
  for (unsigned i = 0; i < 16 / kRows; ++i) {
    const uint4 word = load_shared16((from ^ i * kRows % 8 * 16) + i * kRows * 128);
    const int at_rank = rank + static_cast<int>(i * kRows);
    if (static_cast<unsigned>(at_rank) < static_cast<unsigned>(count) && inside)
      store_global(row_address(rows.data + chunk * 8, at_rank, pitch), word);
  }
  __syncwarp();
}

// Each of the four warpgroups loads one of the four tensors.

// A warpgroup's tensor: keys, values, queries or output gradients of an item and head.
template <class T>
struct alignas(16) WalkSource {
  const T* data;  // of rank 0
  std::int64_t pitch;
  int origin, count;
  int width;

  __device__ WalkSource(const ListBackwardArgs<T>& args, const WalkPart& part, int group) {
    const Tensor4<const T>& keys = group == 0 ? args.k : args.v;
    const Tensor4<const T>& queries = group == 2 ? args.q : args.g;
    const Rows<const T> rows = group < 2 ? keys.rows(part.batch, part.head, part.k_begin)
                                         : queries.rows(part.batch, part.head, part.q_begin);
    data = rows.data;
    pitch = rows.pitch;
    width = rows.width;
    origin = group < 2 ? part.k_origin : part.q_origin;
    count = group < 2 ? part.keys : part.queries;
  }
  // Starts copying a tile; ranks outside [0, count) become zeros.
  __device__ void load(std::uint32_t to, int tile) const {
    const unsigned thread = thread_again();
    const unsigned row = thread % kWarpgroup / 8, chunk = thread % 8;
    const std::uint32_t at = to + row * 128 + ((chunk ^ row % 8) << 4);
    const int first = origin + tile * kStreamRows, rank = first + static_cast<int>(row);
    const int step = static_cast<int>(pitch) * static_cast<int>(sizeof(T)), all = count;
    const bool inside = static_cast<int>(chunk * 8) < width;
    const T* from = data + (inside ? chunk * 8 : 0);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const bool there =
          static_cast<unsigned>(rank + 16 * i) < static_cast<unsigned>(all) && inside;
      cp_async16(at + 2048 * i, row_address(from, there ? rank + 16 * i : 0, step), there ? 16 : 0);
    }
  }
};

template <class T>
__device__ __forceinline__ WalkSource<T>& walk_source(const WalkShape& shape, int group) {
  static_assert(sizeof(WalkSource<T>) <= 48, "its place");
  return *reinterpret_cast<WalkSource<T>*>(shape.memory + WalkShape::kSourcesAt + group * 48);
}

// A tile of 128-byte rows in shared memory as a factor, like Bands, but in fewer instructions,
// because the address is known to fit in 18 bits.
struct WalkTile {
  std::uint32_t low;

  __device__ explicit WalkTile(std::uint32_t address) : low(address >> 4) {}
  __device__ std::uint64_t at(int bytes) const {
    return static_cast<std::uint64_t>(1024 >> 4 | 1u << 30) << 32 |
           (low + (bytes >> 4) + (1u << 16));
  }
  __device__ std::uint64_t by_columns(int row, int k) const { return at(row * 128 + k * 32); }
  __device__ std::uint64_t by_rows(int row) const { return at(row * 128); }
};

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

  // 32 queries and the keys of a tile, `behind` tiles before them.
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
    exchange<T>(sum, shape, half, thread);
    const std::uint32_t at = factor_place(half, thread);
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      std::uint32_t p[4], ds[4];
      window_factors<T>(p, ds, k, s, d, sum);
      stmatrix_x4(shape.weights(group) + (at ^ 32 * k), p);
      stmatrix_x4(shape.slopes(group) + (at ^ 32 * k), ds);
    }
  }

  // 32 queries and the keys of the oldest tile, whose place the newest takes: a query never sees
  // both keys of a row. For a warp's 16 keys and 16 queries, all are of the old tile, all of the
  // new one, or the block is on the diagonal.
  __device__ void half_step_of_two(const WalkPart& part, int tile, int key_place, int query_place,
                                   int half) const {
    const unsigned thread = walk_thread();
    const int window = args.problem.window, first = part.k_origin + tile * kStreamRows;
    const int old_place = place_before<kWalkKeys>(key_place, kWalkGroups);
    // One bit for each of 16 elements: whether the query is at or after the new key.
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
      // The new and old key of a row are visible to queries less than this far after the row.
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
    exchange<T>(sum, shape, half, thread);
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
    const std::uint32_t stage = shape.keys(place, 1);  // values are no longer needed
    const int first = part.k_origin + tile * kStreamRows;
    if (args.dk.rows.data)
      store_walk_rows<T>(dk, part.factor, args.dk.rows.rows(part.batch, part.head, part.k_begin),
                         first, part.keys, 0, stage);
    if (args.dv.rows.data)
      store_walk_rows<T>(dv, 1.0f / args.weight_scale,
                         args.dv.rows.rows(part.batch, part.head, part.k_begin), first, part.keys,
                         0, stage);
  }

  // Computes the tile's shifts from the copied lse, in the threads that copied them.
  __device__ void find_shifts(const WalkPart& part, int tile, int place) const {
    const int row = static_cast<int>(walk_thread()) - 2 * kWarpgroup;
    if (static_cast<unsigned>(row) >= kStreamRows) return;
    const int rank = part.q_origin + tile * kStreamRows + row;
    const bool there = static_cast<unsigned>(rank) < static_cast<unsigned>(part.queries);
    float& value = shape.shifts(place)[row];
    const float lse = value;
    value = there && lse != -INFINITY ? fmaf(lse, kLog2e, -log2f(args.weight_scale)) : INFINITY;
  }
  // Starts copying all of a tile.
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
      __syncthreads();  // all are done with the previous part
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
      int key = kWalkGroups;  // place of the current tile
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
          // All threads have synchronised in between: what the previous step used is free.
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
      // The remaining tiles; a warpgroup has the latest one of its number.
      const int behind = (end - 1 - group) & (kWalkGroups - 1);
      retire(part, end - 1 - behind, place_before<kWalkKeys>(key, behind + 1));
    }
  }
};

template <class T>
__global__ void __launch_bounds__(WalkShape::kThreads, 1)
    window_kernel(const __grid_constant__ ListBackwardArgs<T> args, const WalkCut cut) {
  await_previous();
  extern __shared__ __align__(1024) unsigned char memory[];
  const WalkShape shape(memory);
  if (threadIdx.x == 0) shape.sums_there().init();
  WalkGroup<T> group(args, shape);
  group.walk(cut);
}

}  // namespace

template <class T>
void launch_windows_sm90a(const ListBackwardArgs<T>& args, const WalkCut& cut,
                          cudaStream_t stream) {
  if (cut.total == 0) return;
  const int blocks = (cut.total + cut.per_block - 1) / cut.per_block;
  launch_early("window_kernel", window_kernel<T>, dim3(static_cast<unsigned>(blocks)),
               WalkShape::kThreads, WalkShape::kBytes, stream, args, cut);
}

template void launch_windows_sm90a(const ListBackwardArgs<Bf16>&, const WalkCut&, cudaStream_t);
template void launch_windows_sm90a(const ListBackwardArgs<F16>&, const WalkCut&, cudaStream_t);

}  // namespace coterie::cuda
