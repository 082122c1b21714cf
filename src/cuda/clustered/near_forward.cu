// SPDX-License-Identifier: MIT
// Forward pass with near keys (near.h).
//
// far_kernel: the means over a chunk of keys, without their top keys, once upwards and once
// downwards. After each block of keys the sums so far are written for those members of the clusters
// whose near keys begin after the next block (upwards), or end before it (downwards). Block number
// = (slot of a chunk * H + head) * row tiles + tile; 4 warps of 32 means each, 16 keys at a time.
// Shared memory as in centroid.cu. f32 and 16-bit types, all devices.
// chunk_scan_kernel: the sums of all chunks before each chunk and after it, a warp per mean.
// merge_kernel: a warp per query adds near, top and far keys. All sums have a fixed order.
#include <cstddef>
#include <cstdint>

#include "cuda/api/padding.h"
#include "cuda/clustered/centroid.cuh"
#include "cuda/clustered/near.h"
#include "cuda/launch/dispatch.h"
#include "cuda/launch/launch.h"
#include "cuda/lists/lists.h"
#include "cuda/prim/fragments.cuh"

namespace coterie::cuda {
namespace {

constexpr int kThreads = 128;  // 4 warps
constexpr int kChunkRows = 1024;
// Below all others, but finite: scores of -inf have weight 0 from the start.
constexpr float kLowest = -3e38f;

// Sums relative to a shift in base 2, for rows of floats.
struct RowSums {
  float2* rows;  // shift, sum
  float* outs;   // (.., pitch)
};

template <class T>
struct FarArgs {
  CentroidQueries queries;
  Tensor4<const T> k, v;
  const std::int32_t *top_keys, *order;
  int topk, N, near, pitch;
  RowSums totals;         // (slots, H, C): of a chunk
  RowSums before, after;  // (B, H, N): of the chunk that the query's near keys begin or end in
};

// The members of one cluster, in ascending order.
struct MemberWalk {
  const std::int32_t* list = nullptr;
  int count = 0, at = 0;

  __device__ int next() const { return at < count ? list[at] : INT_MAX; }
  __device__ int previous() const { return at > 0 ? list[at - 1] : -1; }
};

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
      for (int half = 0; half < 2; ++half) softmax[m][half] = {kLowest, 0.0f};
#pragma unroll
    for (int m = 0; m < 2; ++m)
#pragma unroll
      for (int d = 0; d < kDim / 16; ++d) clear(out[m][d]);
  }

  // Keys column .. column + 15 of a tile, of which `left` exist. masks: top keys of the warp's
  // rows.
  __device__ void attend(const Tile<T, kDim>& keys, const Tile<T, kDim>& values, int column,
                         int left, const unsigned long long* masks, float exponent) {
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
    }
    add_values(out, s, values, column);
  }

  // The sum over the four lanes of a row.
  __device__ void write(const RowSums& to, std::int64_t place, int pitch, int m, int half,
                        float sum) const {
    const int lane = threadIdx.x % 4;
    if (lane == 0) to.rows[place] = make_float2(softmax[m][half].shift, sum);
    float* values = to.outs + place * pitch + lane * 2;
#pragma unroll
    for (int n = 0; n < kDim / 8; ++n)
      store2(values + 8 * n, out[m][n / 2][n % 2][2 * half], out[m][n / 2][n % 2][2 * half + 1]);
  }

  // Writes the sums for members at positions below `bound` (upwards), or not below it.
  template <bool kUp>
  __device__ void emit(const RowSums& to, std::int64_t first, int pitch, int bound) {
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
      if (kUp)
        for (; walk.next() < bound; ++walk.at)
          write(to, first + walk.next(), pitch, i / 2, i % 2, sum[i]);
      else
        for (; walk.previous() >= bound; --walk.at)
          write(to, first + walk.previous(), pitch, i / 2, i % 2, sum[i]);
    }
  }
};

template <class T, int kDim>
struct FarTiles : AttendTiles<T, kDim, kCentroidRows, kAttendKeys> {
  using AttendTiles<T, kDim, kCentroidRows, kAttendKeys>::AttendTiles;

  __device__ void load(int stage, const Rows<const T>& k, const Rows<const T>& v, int begin,
                       int end) const {
    load_tile<kAttendKeys, kThreads>(this->keys(stage), k, begin, end - begin);
    load_tile<kAttendKeys, kThreads>(this->values(stage), v, begin, end - begin);
    cp_async_commit();
  }
};

template <class T, int kDim>
__global__ void __launch_bounds__(kThreads) far_kernel(const __grid_constant__ FarArgs<T> args) {
  extern __shared__ __align__(128) unsigned char memory[];
  __shared__ unsigned long long masks[2][kCentroidRows];
  const FarTiles<T, kDim> tiles(memory);
  const CentroidQueries& queries = args.queries;
  const CentroidBlock block(queries, blockIdx.x);
  const ItemChunk chunk = queries.chunks.find(queries.spans.k, block.slot);
  if (chunk.begin >= chunk.end) return;

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

  for (int begin = chunk.begin, stage = 0; begin < chunk.end; begin += kAttendKeys, stage ^= 1) {
    cp_async_wait<0>();
    if (args.top_keys) masks[stage][thread] = listed_mask(listed, num_listed, begin);
    __syncthreads();
    if (begin + kAttendKeys < chunk.end)
      tiles.load(stage ^ 1, k, v, begin + kAttendKeys, chunk.end);
#pragma unroll 1
    for (int column = 0; column < kAttendKeys && begin + column < chunk.end; column += 16) {
      rows.attend(tiles.keys(stage), tiles.values(stage), column, chunk.end - begin - column,
                  own_masks[stage], queries.exponent);
      const int end = begin + column + 16;
      if (end % near == 0)
        rows.template emit<true>(args.before, first_row, args.pitch, end + 2 * near);
    }
  }
  const std::int64_t total = queries.row(block.slot, block.head, block.first);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float sum = quad_sum(rows.softmax[i / 2][i % 2].sum);
    const int own = rows.row(i / 2, i % 2);
    if (block.first + own < queries.clusters)
      rows.write(args.totals, total + own, args.pitch, i / 2, i % 2, sum);
  }

  rows.clear_sums();
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    MemberWalk& walk = rows.members[i / 2][i % 2];
    walk.at = count_up_to(walk.list, walk.count, (last_block - 1) * near - 1);
  }
  const int last_tile = chunk.begin + (chunk.end - 1 - chunk.begin) / kAttendKeys * kAttendKeys;
  __syncthreads();
  tiles.load(0, k, v, last_tile, chunk.end);
  for (int begin = last_tile, stage = 0; begin >= chunk.begin; begin -= kAttendKeys, stage ^= 1) {
    cp_async_wait<0>();
    if (args.top_keys) masks[stage][thread] = listed_mask(listed, num_listed, begin);
    __syncthreads();
    if (begin - kAttendKeys >= chunk.begin)
      tiles.load(stage ^ 1, k, v, begin - kAttendKeys, chunk.end);
#pragma unroll 1
    for (int column = kAttendKeys - 16; column >= 0; column -= 16) {
      const int key = begin + column;
      if (key >= chunk.end) continue;
      rows.attend(tiles.keys(stage), tiles.values(stage), column, chunk.end - key, own_masks[stage],
                  queries.exponent);
      if (key % near == 0 && key >= 2 * near)
        rows.template emit<false>(args.after, first_row, args.pitch, key - 2 * near);
    }
  }
}

// Sums of a row in the lanes of a warp: columns lane, lane + 32, ...
struct LaneSums {
  float shift = kLowest, sum = 0.0f;
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

struct ScanArgs {
  CentroidQueries queries;
  RowSums totals, before, after;  // (slots, H, C)
  int pitch;
};

__global__ void __launch_bounds__(kThreads)
    chunk_scan_kernel(const __grid_constant__ ScanArgs args) {
  const CentroidQueries& queries = args.queries;
  const std::int64_t mean =
      static_cast<std::int64_t>(blockIdx.x) * (kThreads / 32) + threadIdx.x / 32;
  const std::int64_t problem = mean / queries.clusters;
  if (problem >= static_cast<std::int64_t>(queries.chunks.items) * queries.H) return;
  const int item = static_cast<int>(problem / queries.H),
            head = static_cast<int>(problem % queries.H);
  const int count = queries.chunks.count(queries.spans.k.span(item).length);
  const int first = queries.chunks.first_slot(queries.spans.k, item);
  const auto place = [&](int chunk) {
    return queries.row(first + chunk, head, static_cast<int>(mean % queries.clusters));
  };
#pragma unroll 1
  for (int up = 0; up < 2; ++up) {
    LaneSums sums;
#pragma unroll 1
    for (int step = 0; step < count; ++step) {
      const std::int64_t at = place(up ? step : count - 1 - step);
      sums.write(up ? args.before : args.after, at, args.pitch);
      sums.add(args.totals.rows[at], args.totals.outs + at * args.pitch, args.pitch);
    }
  }
}

template <class T>
struct MergeArgs {
  CentroidQueries queries;
  int items, B, N, near, pitch;
  const std::int32_t* labels;
  RowSums before, after;                // (B, H, N)
  RowSums chunks_before, chunks_after;  // (slots, H, C)
  Tensor4<T> out;                       // near keys, then the result
  float* lse;
  Tensor4<T> top;  // null: no top keys
  const float* top_lse;
};

template <class T>
__global__ void __launch_bounds__(kThreads)
    merge_kernel(const __grid_constant__ MergeArgs<T> args) {
  const CentroidQueries& queries = args.queries;
  const int row = static_cast<int>(blockIdx.x * (kThreads / 32) + threadIdx.x / 32);
  const int head = blockIdx.y, batch = blockIdx.z, lane = threadIdx.x % 32;
  if (row >= args.N) return;
  const int item = queries.spans.q.item_of(batch, row, args.items);
  if (item < 0) return;
  const std::int64_t place = (static_cast<std::int64_t>(batch) * queries.H + head) * args.N + row;
  const int position = row - queries.spans.q.span(item).begin, width = args.out.width;
  const int length = queries.spans.k.span(item).length, block = position / args.near;
  const int cluster = args.labels[place];
  const int slot = queries.chunks.first_slot(queries.spans.k, item), chunk = queries.chunks.chunk;
  LaneSums sums;
  const auto add = [&](const RowSums& from, std::int64_t at) {
    sums.add(from.rows[at], from.outs + at * args.pitch, width);
  };
  if (block >= 2 && (block - 2) * args.near < length) {
    add(args.before, place);
    add(args.chunks_before, queries.row(slot + (block - 2) * args.near / chunk, head, cluster));
  }
  if ((block + 2) * args.near < length) {
    add(args.after, place);
    add(args.chunks_after, queries.row(slot + (block + 2) * args.near / chunk, head, cluster));
  }
  const auto add_rounded = [&](const Tensor4<T>& from, float lse) {
    float values[kMaxHeadDim / 32];
    const T* own = from.rows(batch, head, row).data;
    const float largest = fmaxf(sums.shift, lse * kLog2e);
    const float old_factor = exp2_approximate(sums.shift - largest),
                factor = exp2_approximate(lse * kLog2e - largest);
    sums.sum = sums.sum * old_factor + factor;
    sums.shift = largest;
#pragma unroll
    for (int i = 0; i < kMaxHeadDim / 32; ++i) {
      values[i] = lane + 32 * i < width ? to_float(own[lane + 32 * i]) : 0.0f;
      sums.out[i] = sums.out[i] * old_factor + values[i] * factor;
    }
  };
  if (args.top.data && args.top_lse[place] != -INFINITY) add_rounded(args.top, args.top_lse[place]);
  const float near_lse = args.lse[place];
  if (near_lse != -INFINITY) add_rounded(args.out, near_lse);
  const float inverse = sums.sum == 0.0f ? 0.0f : 1.0f / sums.sum;
  T* to = args.out.rows(batch, head, row).data;
#pragma unroll
  for (int i = 0; i < kMaxHeadDim / 32; ++i)
    if (lane + 32 * i < width) to[lane + 32 * i] = from_float<T>(sums.out[i] * inverse);
  __syncwarp();
  if (lane == 0) args.lse[place] = row_lse(sums.shift, sums.sum);
}

RowSums take_sums(Arena& arena, std::int64_t rows, int pitch) {
  return {arena.take<float2>(rows + 1), arena.take<float>(rows * pitch + 1)};
}

}  // namespace

void attend_near(const ClusteredForward& pass, Arena& arena) {
  const ClusteredPlan& plan = pass.plan;
  const AttentionCall& call = plan.call;
  const std::int64_t rows = call.B * call.H * call.N;
  CentroidQueries queries = plan.means;
  queries.block_rows = kCentroidRows;
  queries.row_tiles = (plan.clusters + kCentroidRows - 1) / kCentroidRows;
  queries.chunks = near_chunks(call, plan.near, kChunkRows);
  const std::int64_t slots =
      static_cast<std::int64_t>(queries.chunks.slots) * call.H * plan.clusters;
  const int pitch = static_cast<int>(call.Dk + 63) / 64 * 64;
  const RowSums totals = take_sums(arena, slots, pitch),
                chunks_before = take_sums(arena, slots, pitch),
                chunks_after = take_sums(arena, slots, pitch),
                before = take_sums(arena, rows, pitch), after = take_sums(arena, rows, pitch);
  const bool top = plan.topk > 0;
  const DType dtype = call.inputs.q.dtype;
  void* top_rows = arena.take<std::byte>(top ? rows * call.Dv * dtype_bytes(dtype) : 0);
  float* top_lse = arena.take<float>(top ? rows : 0);
  if (arena.counting()) return;

  ListCall lists;
  lists.ranges.rule = ListRule::blocked;
  lists.ranges.window = plan.near;
  lists.ranges.before = lists.ranges.after = 1;
  lists.scale = static_cast<float>(call.scale);
  ListOutputs outputs;
  outputs.out = pass.out;
  outputs.lse = floats(pass.tensors.lse);
  lists_forward(call, lists, outputs, pass.stream);
  if (rows == 0 || plan.num_means() == 0 || call.S == 0) return;
  ClusteredForward alone = pass;
  if (top) {
    alone.out =
        TensorView::contiguous(top_rows, dtype, {call.B, call.H, call.N, call.Dv}, Device::cuda);
    alone.tensors.lse =
        TensorView::contiguous(top_lse, DType::f32, {call.B, call.H, call.N}, Device::cuda);
    alone.tensors.mass = alone.tensors.out = {};
    attend_top_keys(alone);
  }
  queries.centroids = floats(pass.tensors.centroids);
  queries.offsets = ints(pass.tensors.offsets);
  dispatch_element(call.op, dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const FarArgs<T> far{queries,
                         tensor4<const T>(call.k),
                         tensor4<const T>(call.inputs.v),
                         top ? ints(pass.tensors.top_keys) : nullptr,
                         ints(pass.tensors.order),
                         plan.topk,
                         static_cast<int>(call.N),
                         plan.near,
                         pitch,
                         totals,
                         before,
                         after};
    dispatch_head_dim(call.op, call.Dk, [&](auto dim) {
      constexpr int kDim = decltype(dim)::value, kBytes = FarTiles<T, kDim>::kBytes;
      const auto kernel = far_kernel<T, kDim>;
      allow_shared_memory(kernel, kBytes);
      const auto blocks = static_cast<unsigned>(queries.chunks.slots * call.H * queries.row_tiles);
      kernel<<<blocks, kThreads, kBytes, pass.stream>>>(far);
      COTERIE_LAUNCH("far");
    });
    const std::int64_t scans = (plan.num_means() + kThreads / 32 - 1) / (kThreads / 32);
    const ScanArgs scan{queries, totals, chunks_before, chunks_after, pitch};
    chunk_scan_kernel<<<static_cast<unsigned>(scans), kThreads, 0, pass.stream>>>(scan);
    COTERIE_LAUNCH("chunk_scan");
    const MergeArgs<T> merge{queries,
                             static_cast<int>(call.num_items()),
                             static_cast<int>(call.B),
                             static_cast<int>(call.N),
                             plan.near,
                             pitch,
                             ints(pass.tensors.labels),
                             before,
                             after,
                             chunks_before,
                             chunks_after,
                             tensor4<T>(pass.out),
                             floats(pass.tensors.lse),
                             top ? tensor4<T>(alone.out) : Tensor4<T>{},
                             top_lse};
    const dim3 grid(static_cast<unsigned>((call.N + kThreads / 32 - 1) / (kThreads / 32)),
                    static_cast<unsigned>(call.H), static_cast<unsigned>(call.B));
    merge_kernel<T><<<grid, kThreads, 0, pass.stream>>>(merge);
    COTERIE_LAUNCH("merge");
  });
}

}  // namespace coterie::cuda
