// SPDX-License-Identifier: MIT
// Far keys of clustered attention with near keys (near.h) in the forward pass, of heads that add.
//
// far_kernel: the means over a chunk of keys, without their top keys, once upwards and once
// downwards. After each block of positions the sums so far are written for those members of the
// clusters whose near keys begin after the next block (upwards), or end before it (downwards).
// Block number = (slot of a chunk * H + head) * row tiles + tile; 4 warps of 32 means each, 16 keys
// at a time. Shared memory as in centroid.cu.
// chunk_scan_kernel: the sums of all chunks before each chunk and after it, a warp per mean.
// All types and devices; every sum has a fixed order. Dropout multiplies the weights of values.
#include <cstddef>
#include <cstdint>

#include "cuda/clustered/near.cuh"
#include "cuda/launch/dispatch.h"
#include "cuda/launch/launch.h"
#include "cuda/prim/dependent.cuh"
#include "cuda/prim/dropout.cuh"
#include "cuda/prim/fragments.cuh"

namespace coterie::cuda {
namespace {

constexpr int kThreads = 128;  // 4 warps

// The members of one cluster in ascending order: those from `at` on have not been written upwards,
// those before it not downwards.
struct MemberWalk {
  const std::int32_t* list = nullptr;
  int count = 0, at = 0;

  __device__ int next() const { return at < count ? list[at] : INT_MAX; }
  __device__ int previous() const { return at > 0 ? list[at - 1] : -1; }
};

// The lse of a row of MemberRows, and the factor of its sums.
__device__ __forceinline__ float member_lse(float shift, float sum) {
  return sum == 0.0f ? kLowestShift : shift + log2f(sum);
}
__device__ __forceinline__ float member_factor(float sum) {
  return sum == 0.0f ? 0.0f : 1.0f / sum;
}

// A warp's 32 means: 2 x 16, of which a lane holds [m][half].
template <class T, int kDim>
struct FarRows {
  QueryFragments<T, kDim, kDim * sizeof(T) <= 128> queries;
  RowSoftmax softmax[2][2];
  Accumulator out[2][kDim / 16];
  MemberWalk members[2][2];

  __device__ static int row(int m, int half) {
    return static_cast<int>(threadIdx.x) / 32 * 32 + 16 * m + 8 * half +
           static_cast<int>(threadIdx.x) % 32 / 4;
  }
  __device__ void clear_sums() {
#pragma unroll
    for (int m = 0; m < 2; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) softmax[m][half] = {kLowestShift, 0.0f};
#pragma unroll
    for (int m = 0; m < 2; ++m)
#pragma unroll
      for (int d = 0; d < kDim / 16; ++d) clear(out[m][d]);
  }

  // Keys column .. column + 15 of a tile, of which `left` exist. masks: top keys of the warp's
  // rows; words: for dropout of the keys from `first_key` on, or null.
  __device__ void attend(const Tile<T, kDim>& keys, const Tile<T, kDim>& values, int column,
                         int left, const unsigned long long* masks, float exponent, int first_key,
                         const Dropout& dropout, const DropoutRow* words) {
    const int lane = threadIdx.x % 32;
    Accumulator s[2];
    queries.scores(s, keys, column);
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const int m = i / 8, n = i / 4 % 2, half = i / 2 % 2;
      const int key = 8 * n + lane % 4 * 2 + i % 2;
      const bool listed = masks && (masks[16 * m + 8 * half + lane / 4] >> (column + key) & 1);
      if (key >= left || listed) s[m][n][i % 4] = -INFINITY;
    }
#pragma unroll
    for (int m = 0; m < 2; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float top = -INFINITY;
#pragma unroll
        for (int i = 0; i < 4; ++i) top = fmaxf(top, s[m][i / 2][2 * half + i % 2]);
        top = quad_max(top);
        if (!(top > softmax[m][half].limit(1.0f / exponent))) continue;
        const float factor = softmax[m][half].raise(top, exponent);
#pragma unroll
        for (int i = 0; i < kDim / 4; ++i) out[m][i / 4][i / 2 % 2][2 * half + i % 2] *= factor;
      }
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      float& score = s[i / 8][i / 4 % 2][i % 4];
      score = softmax[i / 8][i / 2 % 2].weight(score, exponent);
      if (words)
        score *= kept(dropout, words[16 * (i / 8) + 8 * (i / 2 % 2) + lane / 4],
                      first_key + 8 * (i / 4 % 2) + lane % 4 * 2 + i % 2);
    }
    add_values(out, s, values, column);
  }

  // The sums times a factor.
  template <class To>
  __device__ void write(To* outs, std::int64_t place, int pitch, int m, int half,
                        float factor) const {
    To* values = outs + place * pitch + threadIdx.x % 4 * 2;
#pragma unroll
    for (int n = 0; n < kDim / 8; ++n)
      store2(values + 8 * n, out[m][n / 2][n % 2][2 * half] * factor,
             out[m][n / 2][n % 2][2 * half + 1] * factor);
  }

  // Writes the sums for members at positions below `bound` (upwards), or not below it.
  template <bool kUp>
  __device__ void emit(const MemberRows<T>& to, std::int64_t first, int pitch, int bound) {
    bool any = false;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const MemberWalk& walk = members[i / 2][i % 2];
      any |= kUp ? walk.next() < bound : walk.previous() >= bound;
    }
    if (!__any_sync(~0u, any)) return;
    float sum[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) sum[i] = quad_sum(softmax[i / 2][i % 2].sum);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      MemberWalk& walk = members[i / 2][i % 2];
      while (kUp ? walk.next() < bound : walk.previous() >= bound) {
        const std::int64_t place = first + (kUp ? walk.next() : walk.previous());
        walk.at += kUp ? 1 : -1;
        if (threadIdx.x % 4 == 0) to.lse[place] = member_lse(softmax[i / 2][i % 2].shift, sum[i]);
        write(to.outs, place, pitch, i / 2, i % 2, member_factor(sum[i]));
      }
    }
  }
};

template <class T, int kDim>
struct FarTiles : AttendTiles<T, kDim, kCentroidRows, kTileKeys<T, kDim>> {
  static constexpr int kKeys = kTileKeys<T, kDim>;
  using AttendTiles<T, kDim, kCentroidRows, kKeys>::AttendTiles;

  __device__ void load(int stage, const Rows<const T>& k, const Rows<const T>& v, int begin,
                       int end) const {
    load_tile<kKeys, kThreads>(this->keys(stage), k, begin, end - begin);
    load_tile<kKeys, kThreads>(this->values(stage), v, begin, end - begin);
    cp_async_commit();
  }
};

template <class T, int kDim>
__global__ void __launch_bounds__(kThreads) far_kernel(const __grid_constant__ FarForward<T> args) {
  await_previous();
  extern __shared__ __align__(128) unsigned char memory[];
  __shared__ unsigned long long masks[2][kCentroidRows];
  __shared__ DropoutRow words[kCentroidRows];
  const FarTiles<T, kDim> tiles(memory);
  const CentroidQueries& queries = args.queries;
  const CentroidBlock block(queries, blockIdx.x);
  const ItemChunk chunk = args.sums.chunks.find(queries.spans.k, block.slot);
  if (chunk.begin >= chunk.end || !args.heads.add(chunk.item, block.head)) return;

  const int kv_head = block.head / queries.group, near = args.near;
  const Rows<const T> k = args.k.rows(chunk.span.batch, kv_head, chunk.span.begin);
  const Rows<const T> v = args.v.rows(chunk.span.batch, kv_head, chunk.span.begin);
  tiles.load(0, k, v, chunk.begin, chunk.end);
  load_centroids<kCentroidRows, kThreads>(tiles.queries, queries, chunk.item, block.head,
                                          block.first);
  const int thread = threadIdx.x, warp = thread / 32, cluster = block.first + thread;
  const std::int32_t* listed = nullptr;
  int num_listed = 0;
  if (args.top_keys && cluster < queries.clusters) {
    listed = args.top_keys + queries.row(chunk.item, block.head, cluster) * args.topk;
    num_listed = listed_keys(listed, args.topk);
  }
  if (queries.dropout.on())
    words[thread] = queries.dropout.cluster(
        static_cast<std::int64_t>(chunk.item) * queries.H + block.head, cluster);
  const DropoutRow* own_words = queries.dropout.on() ? words + warp * 32 : nullptr;
  const ItemSpan q_span = queries.spans.q.span(chunk.item);
  const std::int64_t first_row =
      (static_cast<std::int64_t>(q_span.batch) * queries.H + block.head) * args.N + q_span.begin;
  __syncthreads();
  FarRows<T, kDim> rows;
  rows.queries.load(tiles.queries, warp * 32);
  rows.clear_sums();
  const std::int32_t* offsets =
      queries.offsets +
      (static_cast<std::int64_t>(chunk.item) * queries.H + block.head) * (queries.clusters + 1);
  const int first_block = chunk.begin / near, last_block = (chunk.end - 1) / near;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int own = block.first + rows.row(i / 2, i % 2);
    if (own >= queries.clusters) continue;
    MemberWalk& walk = rows.members[i / 2][i % 2];
    walk.list = args.order + first_row + offsets[own];
    walk.count = offsets[own + 1] - offsets[own];
    walk.at = count_up_to(walk.list, walk.count, (first_block + 2) * near - 1);
  }
  const unsigned long long* own_masks[2] = {args.top_keys ? masks[0] + warp * 32 : nullptr,
                                            args.top_keys ? masks[1] + warp * 32 : nullptr};

  constexpr int kKeys = FarTiles<T, kDim>::kKeys;
  for (int begin = chunk.begin, stage = 0; begin < chunk.end; begin += kKeys, stage ^= 1) {
    cp_async_wait<0>();
    if (args.top_keys) masks[stage][thread] = listed_mask(listed, num_listed, begin);
    __syncthreads();
    if (begin + kKeys < chunk.end) tiles.load(stage ^ 1, k, v, begin + kKeys, chunk.end);
#pragma unroll 1
    for (int column = 0; column < kKeys && begin + column < chunk.end; column += 16) {
      rows.attend(tiles.keys(stage), tiles.values(stage), column, chunk.end - begin - column,
                  own_masks[stage], queries.exponent, begin + column, queries.dropout, own_words);
      const int end = begin + column + 16;
      if (end % near == 0)
        rows.template emit<true>(args.sums.before, first_row, args.pitch, end + 2 * near);
    }
  }
  const std::int64_t total = queries.row(block.slot, block.head, block.first);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float sum = quad_sum(rows.softmax[i / 2][i % 2].sum);
    const int own = rows.row(i / 2, i % 2);
    if (block.first + own >= queries.clusters) continue;
    if (threadIdx.x % 4 == 0)
      args.sums.totals.rows[total + own] = make_float2(rows.softmax[i / 2][i % 2].shift, sum);
    rows.write(args.sums.totals.outs, total + own, args.pitch, i / 2, i % 2, 1.0f);
  }

  rows.clear_sums();
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    MemberWalk& walk = rows.members[i / 2][i % 2];
    walk.at = count_up_to(walk.list, walk.count, (last_block - 1) * near - 1);
  }
  const int last_tile = chunk.begin + (chunk.end - 1 - chunk.begin) / kKeys * kKeys;
  __syncthreads();
  tiles.load(0, k, v, last_tile, chunk.end);
  for (int begin = last_tile, stage = 0; begin >= chunk.begin; begin -= kKeys, stage ^= 1) {
    cp_async_wait<0>();
    if (args.top_keys) masks[stage][thread] = listed_mask(listed, num_listed, begin);
    __syncthreads();
    if (begin - kKeys >= chunk.begin) tiles.load(stage ^ 1, k, v, begin - kKeys, chunk.end);
#pragma unroll 1
    for (int column = kKeys - 16; column >= 0; column -= 16) {
      const int key = begin + column;
      if (key >= chunk.end) continue;
      rows.attend(tiles.keys(stage), tiles.values(stage), column, chunk.end - key, own_masks[stage],
                  queries.exponent, key, queries.dropout, own_words);
      if (key % near == 0 && key >= 2 * near)
        rows.template emit<false>(args.sums.after, first_row, args.pitch, key - 2 * near);
    }
  }
}

// Sums of a row in the lanes of a warp: columns lane, lane + 32, ...
struct LaneSums {
  float shift = kLowestShift, sum = 0.0f;
  float out[kMaxHeadDim / 32] = {};

  __device__ void add(const float2& row, const float* values, int width) {
    const float largest = fmaxf(shift, row.x);
    const float old_factor = exp2_approximate(shift - largest),
                new_factor = exp2_approximate(row.x - largest);
    sum = sum * old_factor + row.y * new_factor;
    shift = largest;
#pragma unroll
    for (int i = 0; i < kMaxHeadDim / 32; ++i) {
      const int column = static_cast<int>(threadIdx.x) % 32 + 32 * i;
      if (column < width) out[i] = out[i] * old_factor + values[column] * new_factor;
    }
  }
  __device__ void write(const RowSums& to, std::int64_t place, int pitch) const {
    const int lane = threadIdx.x % 32;
    if (lane == 0) to.rows[place] = make_float2(shift, sum);
#pragma unroll
    for (int i = 0; i < kMaxHeadDim / 32; ++i)
      if (lane + 32 * i < pitch) to.outs[place * pitch + lane + 32 * i] = out[i];
  }
};

template <class T>
__global__ void __launch_bounds__(kThreads)
    chunk_scan_kernel(const __grid_constant__ FarForward<T> args) {
  await_previous();
  const CentroidQueries& queries = args.queries;
  const FarSums<T>& sums = args.sums;
  const std::int64_t mean =
      static_cast<std::int64_t>(blockIdx.x) * (kThreads / 32) + threadIdx.x / 32;
  const std::int64_t problem = mean / queries.clusters;
  if (problem >= static_cast<std::int64_t>(sums.chunks.items) * queries.H) return;
  const int item = static_cast<int>(problem / queries.H),
            head = static_cast<int>(problem % queries.H);
  if (!args.heads.add(item, head)) return;
  const int count = sums.chunks.count(queries.spans.k.span(item).length);
  const int first = sums.chunks.first_slot(queries.spans.k, item);
  const auto place = [&](int chunk) {
    return queries.row(first + chunk, head, static_cast<int>(mean % queries.clusters));
  };
#pragma unroll 1
  for (int up = 0; up < 2; ++up) {
    LaneSums total;
#pragma unroll 1
    for (int step = 0; step < count; ++step) {
      const std::int64_t at = place(up ? step : count - 1 - step);
      total.write(up ? sums.chunks_before : sums.chunks_after, at, args.pitch);
      total.add(sums.totals.rows[at], sums.totals.outs + at * args.pitch, args.pitch);
    }
  }
}

}  // namespace

template <class T>
void sum_far_keys(const FarForward<T>& args, cudaStream_t stream) {
  const CentroidQueries& queries = args.queries;
  dispatch_head_dim("clustered", queries.width, [&](auto dim) {
    constexpr int kDim = decltype(dim)::value;
    const auto blocks =
        static_cast<unsigned>(args.sums.chunks.slots * queries.H * queries.row_tiles);
    launch_early("far", far_kernel<T, kDim>, blocks, kThreads, FarTiles<T, kDim>::kBytes, stream,
                 args);
  });
  const std::int64_t means =
      static_cast<std::int64_t>(args.sums.chunks.items) * queries.H * queries.clusters;
  launch_early("chunk_scan", chunk_scan_kernel<T>,
               static_cast<unsigned>((means + kThreads / 32 - 1) / (kThreads / 32)), kThreads, 0,
               stream, args);
}

template void sum_far_keys(const FarForward<float>&, cudaStream_t);
template void sum_far_keys(const FarForward<Bf16>&, cudaStream_t);
template void sum_far_keys(const FarForward<F16>&, cudaStream_t);

}  // namespace coterie::cuda
