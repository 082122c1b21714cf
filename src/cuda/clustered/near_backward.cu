// SPDX-License-Identifier: MIT
// Backward pass with near keys (near.h). With p_ij = exp(s_ij - lse_i), delta_i = g_i . out_i:
//   near and top keys  ds_ij = p_ij (g_i . v_j - delta_i), as in full attention: lists, and
//                      member_backward.cu
//   far keys           with the sums over the members of cluster c that are far from key j,
//                      G = sum of exp(shift - lse_i) g_i and D = sum of exp(shift - lse_i) delta_i,
//                      dz_cj = exp(z_cj - shift) (G . v_j - D), dv_j += exp(z_cj - shift) G,
//                      dk_j += scale dz_cj mean_c, dmean_c = scale sum_j dz_cj k_j
// shift is the smallest lse of these members; exp(z_cj - lse_i) <= 1 for far pairs, so no factor is
// above 1. G and D of a block of keys are those of the members before the near blocks plus those of
// the members after them: two rows of running sums over the members of a cluster.
//
// delta_kernel, member_sums_kernel: a warp per query, or per cluster and direction.
// far_keys_kernel: a block owns up to 64 keys of one block of positions and walks all clusters, 64
// at a time, for which it makes G; adds to dk and dv. far_means_kernel: a block owns 64 clusters
// and walks a chunk of keys; G of clusters whose far members change is made again at every block of
// positions. 4 warps of 16 owned rows; shared memory: owned rows and 64 walked rows of two tensors,
// 33 to 130 KiB. mean_sum_kernel, query_kernel: dmean / size of the cluster, and dq. All types and
// devices; no float atomics, every sum has a fixed order.
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

constexpr int kThreads = 128, kWarps = kThreads / 32;
constexpr int kClusters = 64;       // made, or owned, at a time
constexpr int kKeys = kAttendKeys;  // owned, or walked, at a time
constexpr int kChunkKeys = 2048;
constexpr int kLaneColumns = kMaxHeadDim / 32;

// Running sums over the members of clusters, in the sorted order (B, H, N).
struct MemberSums {
  float2* rows;      // shift (base 2) and D
  float* gradients;  // (.., pitch): G
};

template <class T>
struct NearArgs {
  CentroidQueries queries;  // chunks: of far_means_kernel
  ItemChunks blocks;        // of positions
  BackwardShape shape;
  const std::int32_t *order, *labels, *top_keys;
  const float* lse;
  float* delta;  // (B, H, N)
  MemberSums before, after;
  float *mean_slices, *dmean;  // (slots, H, C, pitch), (items, H, C, pitch)
  Tensor4<const T> q, k, v, g, out;
  Tensor4<T> dq, dk, dv, top_dq;  // data is null when absent
  int near, N, topk, pitch, items;
};

// Index of the first query of an item and head in (B, H, N) tensors.
template <class T>
__device__ __forceinline__ std::int64_t first_query(const NearArgs<T>& args, const ItemSpan& span,
                                                    int head) {
  return (static_cast<std::int64_t>(span.batch) * args.queries.H + head) * args.N + span.begin;
}

template <class T>
__global__ void __launch_bounds__(kThreads) delta_kernel(const __grid_constant__ NearArgs<T> args) {
  const int row = static_cast<int>(blockIdx.x * kWarps + threadIdx.x / 32);
  const int head = blockIdx.y, batch = blockIdx.z, lane = threadIdx.x % 32;
  if (row >= args.N) return;
  const std::int64_t place =
      (static_cast<std::int64_t>(batch) * args.queries.H + head) * args.N + row;
  float sum = 0.0f;
  if (args.queries.spans.q.item_of(batch, row, args.items) >= 0) {
    const T* g = args.g.rows(batch, head, row).data;
    const T* out = args.out.rows(batch, head, row).data;
    for (int column = lane; column < args.out.width; column += 32)
      sum = fmaf(to_float(g[column]), to_float(out[column]), sum);
  }
  sum = warp_sum(sum);
  if (lane == 0) args.delta[place] = sum;
}

// A warp walks the members of a cluster up (blockIdx.y 0) or down.
template <class T>
__global__ void __launch_bounds__(kThreads)
    member_sums_kernel(const __grid_constant__ NearArgs<T> args) {
  const CentroidQueries& queries = args.queries;
  const std::int64_t mean = static_cast<std::int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  const std::int64_t problem = mean / queries.clusters;
  if (problem >= static_cast<std::int64_t>(args.items) * queries.H) return;
  const int item = static_cast<int>(problem / queries.H),
            head = static_cast<int>(problem % queries.H);
  const int cluster = static_cast<int>(mean % queries.clusters), lane = threadIdx.x % 32;
  const bool up = blockIdx.y == 0;
  const ItemSpan span = queries.spans.q.span(item);
  const std::int64_t base = first_query(args, span, head);
  const std::int32_t* offsets = queries.offsets + problem * (queries.clusters + 1) + cluster;
  const int first = offsets[0], count = offsets[1] - first;
  const Rows<const T> g = args.g.rows(span.batch, head, span.begin);
  const MemberSums& to = up ? args.before : args.after;
  float shift = INFINITY, sum = 0.0f, total[kLaneColumns] = {};
  // The rows of the next member are fetched before those of this one are added.
  const auto member = [&](int step) {
    return args.order[base + first + (up ? step : count - 1 - step)];
  };
  float lse = 0.0f, delta = 0.0f, row[kLaneColumns] = {};
  const auto fetch = [&](int step) {
    const int query = member(min(step, count - 1));
    lse = args.lse[base + query] * kLog2e;
    delta = args.delta[base + query];
#pragma unroll
    for (int i = 0; i < kLaneColumns; ++i)
      row[i] = lane + 32 * i < g.width ? to_float(g.row(query)[lane + 32 * i]) : 0.0f;
  };
  if (count > 0) fetch(0);
  for (int step = 0; step < count; ++step) {
    const float own_lse = lse, own_delta = delta;
    float own[kLaneColumns];
#pragma unroll
    for (int i = 0; i < kLaneColumns; ++i) own[i] = row[i];
    fetch(step + 1);
    if (own_lse != -INFINITY) {  // a query without weights has no gradient
      const float least = fminf(shift, own_lse);
      const float old_factor = shift == INFINITY ? 0.0f : exp2_approximate(least - shift);
      const float factor = exp2_approximate(least - own_lse);
      sum = sum * old_factor + own_delta * factor;
#pragma unroll
      for (int i = 0; i < kLaneColumns; ++i) total[i] = total[i] * old_factor + own[i] * factor;
      shift = least;
    }
    const std::int64_t place = base + first + (up ? step : count - 1 - step);
    if (lane == 0) to.rows[place] = make_float2(shift, sum);
#pragma unroll
    for (int i = 0; i < kLaneColumns; ++i)
      if (lane + 32 * i < args.pitch) to.gradients[place * args.pitch + lane + 32 * i] = total[i];
  }
}

// Shared by the two far kernels, per cluster of a tile.
struct ClusterFacts {
  float lse[kClusters];    // base 2, of the weights times weight_scale; +inf: no far member
  float delta[kClusters];  // times gradient_scale
  std::int64_t rows[2][kClusters];       // of the running sums before and after; -1: none
  unsigned long long listed[kClusters];  // bit b: key b of the tile is a top key
};

// The clusters [first, first + kClusters) of an item and head.
template <class T>
struct ClusterTile {
  const NearArgs<T>& args;
  int item, head, first;
  std::int64_t base;            // of the item's queries in (B, H, N) tensors
  const std::int32_t* offsets;  // of the first cluster

  __device__ ClusterTile(const NearArgs<T>& a, int item_number, int own_head, int first_cluster)
      : args(a), item(item_number), head(own_head), first(first_cluster) {
    const CentroidQueries& queries = args.queries;
    base = first_query(args, queries.spans.q.span(item), head);
    offsets = queries.offsets +
              (static_cast<std::int64_t>(item) * queries.H + head) * (queries.clusters + 1) + first;
  }
  __device__ bool has(int r) const { return first + r < args.queries.clusters; }

  // The last member of cluster r before the near blocks of `block` (side 0), or the first after
  // them (side 1): its place in the sorted order, or -1.
  __device__ std::int64_t far_row(int r, int side, int block) const {
    if (!has(r)) return -1;
    const std::int64_t begin = base + offsets[r];
    const int count = offsets[r + 1] - offsets[r], near = args.near;
    const int found = side == 0 ? count_up_to(args.order + begin, count, (block - 1) * near - 1) - 1
                                : count_up_to(args.order + begin, count, (block + 2) * near - 1);
    return found >= 0 && found < count ? begin + found : -1;
  }
  // Top keys of cluster r among keys begin .. begin + kKeys - 1.
  __device__ unsigned long long listed(int r, int begin) const {
    if (args.topk == 0 || !has(r)) return 0;
    const std::int32_t* list = args.top_keys + args.queries.row(item, head, first + r) * args.topk;
    return listed_mask(list, listed_keys(list, args.topk), begin);
  }
  // G of cluster r, from facts.rows, as a row of the tile; by a warp.
  template <int kWidth>
  __device__ void make(const Tile<T, kWidth>& tile, ClusterFacts& facts, int r) const {
    const int lane = threadIdx.x % 32;
    const std::int64_t before = facts.rows[0][r], after = facts.rows[1][r];
    const float2 none = make_float2(INFINITY, 0.0f);
    const float2 a = before >= 0 ? args.before.rows[before] : none;
    const float2 b = after >= 0 ? args.after.rows[after] : none;
    const float least = fminf(a.x, b.x);
    const float scale = args.shape.gradient_scale;
    const float a_factor = a.x == INFINITY ? 0.0f : exp2_approximate(least - a.x) * scale;
    const float b_factor = b.x == INFINITY ? 0.0f : exp2_approximate(least - b.x) * scale;
    constexpr int kColumns = kWidth / 32;
    float sum[kColumns] = {};
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      const int column = lane + 32 * i;
      if (a_factor != 0.0f) sum[i] = a_factor * args.before.gradients[before * args.pitch + column];
      if (b_factor != 0.0f)
        sum[i] = fmaf(b_factor, args.after.gradients[after * args.pitch + column], sum[i]);
    }
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      const T rounded = from_float<T>(sum[i]);
      const std::uint32_t to = tile.address(r, lane + 32 * i);
      if constexpr (sizeof(T) == 2)
        asm volatile("st.shared.b16 [%0], %1;" ::"r"(to),
                     "h"(*reinterpret_cast<const unsigned short*>(&rounded))
                     : "memory");
      else
        asm volatile("st.shared.f32 [%0], %1;" ::"r"(to), "f"(rounded) : "memory");
    }
    if (lane > 0) return;
    facts.lse[r] = least == INFINITY ? INFINITY : least - args.shape.weight_bits;
    facts.delta[r] = a.y * a_factor + b.y * b_factor;
  }
};

// Two owned tiles and two walked ones.
template <class T, int kWidth>
struct FarShape {
  static constexpr int kTileBytes = 64 * kWidth * static_cast<int>(sizeof(T));
  static constexpr int kBytes = 4 * kTileBytes;
  static constexpr bool kResident = sizeof(T) == 2 && kWidth <= 64;
  __device__ static Tile<T, kWidth> tile(const void* memory, int number) {
    return {shared_address(memory) + number * kTileBytes};
  }
};

template <class T>
__device__ __forceinline__ void add_pair(const Rows<T>& rows, int row, int column, float low,
                                         float high) {
  T* to = rows.row(row) + column;
  if (column < rows.width) to[0] = from_float<T>(to_float(to[0]) + low);
  if (column + 1 < rows.width) to[1] = from_float<T>(to_float(to[1]) + high);
}

// Block number = (slot of a block of positions * parts + part of kKeys keys) * key heads + key
// head.
template <class T, int kWidth>
__global__ void __launch_bounds__(kThreads)
    far_keys_kernel(const __grid_constant__ NearArgs<T> args, int parts) {
  using S = FarShape<T, kWidth>;
  extern __shared__ __align__(128) unsigned char memory[];
  __shared__ ClusterFacts facts;
  const CentroidQueries& queries = args.queries;
  const int key_heads = queries.H / queries.group;
  const int key_head = static_cast<int>(blockIdx.x) % key_heads,
            place = static_cast<int>(blockIdx.x) / key_heads;
  const ItemChunk block = args.blocks.find(queries.spans.k, place / parts);
  const int begin = block.begin + place % parts * kKeys;
  const int count = min(block.end - begin, kKeys);
  if (count <= 0) return;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warp_row = 16 * warp;
  const Tile<T, kWidth> keys = S::tile(memory, 0), values = S::tile(memory, 1),
                        means = S::tile(memory, 2), gradients = S::tile(memory, 3);
  load_tile<kKeys, kThreads>(keys, args.k.rows(block.span.batch, key_head, block.span.begin), begin,
                             count);
  load_tile<kKeys, kThreads>(values, args.v.rows(block.span.batch, key_head, block.span.begin),
                             begin, count);
  cp_async_commit();
  cp_async_wait<0>();
  __syncthreads();
  QueryFragments<T, kWidth, S::kResident, 1> own[2];
  own[0].load(keys, warp_row);
  own[1].load(values, warp_row);
  Accumulator dk[1][kWidth / 16] = {}, dv[1][kWidth / 16] = {};
  const bool active = warp_row < count;
#pragma unroll 1
  for (int head = key_head * queries.group; head < (key_head + 1) * queries.group; ++head)
#pragma unroll 1
    for (int first = 0; first < queries.clusters; first += kClusters) {
      const ClusterTile<T> tile(args, block.item, head, first);
      __syncthreads();
      load_centroids<kClusters, kThreads>(means, queries, block.item, head, first);
      const int r = static_cast<int>(threadIdx.x) % kClusters,
                side = static_cast<int>(threadIdx.x) / kClusters;
      facts.rows[side][r] = tile.far_row(r, side, block.split);
      if (side == 0) facts.listed[r] = tile.listed(r, begin);
      __syncthreads();
      for (int i = warp; i < kClusters; i += kWarps) tile.make(gradients, facts, i);
      __syncthreads();
      if (!active) continue;
#pragma unroll 1
      for (int c = 0; c < kClusters && first + c < queries.clusters; c += 16) {
        Accumulator p[1], ds[1];
        own[0].scores(p, means, c);
        own[1].scores(ds, gradients, c);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          const int column = c + i / 4 * 8 + lane % 4 * 2 + i % 2;
          const int key = warp_row + i / 2 % 2 * 8 + lane / 4;
          float &w = p[0][i / 4][i % 4], &x = ds[0][i / 4][i % 4];
          const bool seen = key < count && !(facts.listed[column] >> key & 1);
          w = seen ? exp2_approximate(fmaf(w, queries.exponent, -facts.lse[column])) : 0.0f;
          x = seen ? w * (x - facts.delta[column]) : 0.0f;
        }
        add_values(dv, p, gradients, c);
        add_values(dk, ds, means, c);
      }
    }
  // The means have the sign of the scale.
  const float dk_factor = fabsf(args.shape.scale) * args.shape.unscale,
              dv_factor = args.shape.unscale;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = warp_row + 8 * half + lane / 4;
    if (row >= count) continue;
    const auto add = [&](const Tensor4<T>& tensor, const Accumulator(&sum)[1][kWidth / 16],
                         float factor) {
      if (!tensor.data) return;
      const Rows<T> rows = tensor.rows(block.span.batch, key_head, block.span.begin + begin);
#pragma unroll
      for (int n = 0; n < kWidth / 8; ++n)
        add_pair(rows, row, 8 * n + lane % 4 * 2, sum[0][n / 2][n % 2][2 * half] * factor,
                 sum[0][n / 2][n % 2][2 * half + 1] * factor);
    };
    add(args.dk, dk, dk_factor);
    add(args.dv, dv, dv_factor);
  }
}

// Block number = (slot of a chunk * H + head) * tiles of clusters + tile.
template <class T, int kWidth>
__global__ void __launch_bounds__(kThreads)
    far_means_kernel(const __grid_constant__ NearArgs<T> args, int tiles) {
  using S = FarShape<T, kWidth>;
  extern __shared__ __align__(128) unsigned char memory[];
  __shared__ ClusterFacts facts;
  const CentroidQueries& queries = args.queries;
  const int first = static_cast<int>(blockIdx.x) % tiles * kClusters,
            head = static_cast<int>(blockIdx.x) / tiles % queries.H,
            slot = static_cast<int>(blockIdx.x) / tiles / queries.H;
  const ItemChunk chunk = queries.chunks.find(queries.spans.k, slot);
  if (chunk.begin >= chunk.end) return;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warp_row = 16 * warp;
  const int kv_head = head / queries.group, near = args.near;
  const Tile<T, kWidth> means = S::tile(memory, 0), gradients = S::tile(memory, 1),
                        keys = S::tile(memory, 2), values = S::tile(memory, 3);
  const Rows<const T> k = args.k.rows(chunk.span.batch, kv_head, chunk.span.begin);
  const Rows<const T> v = args.v.rows(chunk.span.batch, kv_head, chunk.span.begin);
  const ClusterTile<T> tile(args, chunk.item, head, first);
  load_centroids<kClusters, kThreads>(means, queries, chunk.item, head, first);
  const int r = static_cast<int>(threadIdx.x) % kClusters,
            side = static_cast<int>(threadIdx.x) / kClusters;
  facts.rows[side][r] = -2;  // nothing made yet
  __syncthreads();
  QueryFragments<T, kWidth, S::kResident, 1> own;
  QueryFragments<T, kWidth, false, 1> own_gradients;  // the tile changes
  own.load(means, warp_row);
  own_gradients.load(gradients, warp_row);
  Accumulator sum[1][kWidth / 16] = {};
#pragma unroll 1
  for (int block = chunk.begin / near; block * near < chunk.end; ++block) {
    const int end = min((block + 1) * near, chunk.end);
#pragma unroll 1
    for (int begin = block * near; begin < end; begin += kKeys) {
      __syncthreads();  // the tiles are free
      load_tile<kKeys, kThreads>(keys, k, begin, end - begin);
      load_tile<kKeys, kThreads>(values, v, begin, end - begin);
      cp_async_commit();
      if (begin == block * near) {
        // Both threads of a cluster look up their side; the cluster is made again if one changes.
        __shared__ bool changed[2][kClusters];
        const std::int64_t row = tile.far_row(r, side, block);
        changed[side][r] = row != facts.rows[side][r];
        facts.rows[side][r] = row;
        __syncthreads();
        for (int i = warp; i < kClusters; i += kWarps)
          if (changed[0][i] || changed[1][i]) tile.make(gradients, facts, i);
      }
      if (side == 0) facts.listed[r] = tile.listed(r, begin);
      cp_async_wait<0>();
      __syncthreads();
#pragma unroll 1
      for (int c = 0; c < kKeys && begin + c < end; c += 16) {
        Accumulator p[1], ds[1];
        own.scores(p, keys, c);
        own_gradients.scores(ds, values, c);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          const int column = c + i / 4 * 8 + lane % 4 * 2 + i % 2;
          const int row = warp_row + i / 2 % 2 * 8 + lane / 4;
          const bool seen = begin + column < end && !(facts.listed[row] >> column & 1);
          const float w =
              exp2_approximate(fmaf(p[0][i / 4][i % 4], queries.exponent, -facts.lse[row]));
          float& x = ds[0][i / 4][i % 4];
          x = seen ? w * (x - facts.delta[row]) : 0.0f;
        }
        add_values(sum, ds, keys, c);
      }
    }
  }
  const float factor = args.shape.scale * args.shape.unscale;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = warp_row + 8 * half + lane / 4;
    if (!tile.has(row)) continue;
    float* to = args.mean_slices + queries.row(slot, head, first + row) * args.pitch + lane % 4 * 2;
#pragma unroll
    for (int n = 0; n < kWidth / 8; ++n)
      store2(to + 8 * n, sum[0][n / 2][n % 2][2 * half] * factor,
             sum[0][n / 2][n % 2][2 * half + 1] * factor);
  }
}

// A warp per mean: dmean / size of the cluster, from the slices.
template <class T>
__global__ void __launch_bounds__(kThreads)
    mean_sum_kernel(const __grid_constant__ NearArgs<T> args) {
  const CentroidQueries& queries = args.queries;
  const std::int64_t mean = static_cast<std::int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  const std::int64_t problem = mean / queries.clusters;
  if (problem >= static_cast<std::int64_t>(args.items) * queries.H) return;
  const int item = static_cast<int>(problem / queries.H),
            head = static_cast<int>(problem % queries.H);
  const int cluster = static_cast<int>(mean % queries.clusters);
  const int count = queries.chunks.count(queries.spans.k.span(item).length);
  const int first = queries.chunks.first_slot(queries.spans.k, item);
  const std::int32_t* offsets = queries.offsets + problem * (queries.clusters + 1) + cluster;
  const float share = 1.0f / static_cast<float>(max(offsets[1] - offsets[0], 1));
  for (int column = threadIdx.x % 32; column < args.pitch; column += 32) {
    float sum = 0.0f;
    for (int chunk = 0; chunk < count; ++chunk)
      sum += args.mean_slices[queries.row(first + chunk, head, cluster) * args.pitch + column];
    args.dmean[mean * args.pitch + column] = sum * share;
  }
}

// dq of near keys, to which the top keys' part and the mean's are added.
template <class T>
__global__ void __launch_bounds__(kThreads) query_kernel(const __grid_constant__ NearArgs<T> args) {
  const CentroidQueries& queries = args.queries;
  const int row = static_cast<int>(blockIdx.x * kWarps + threadIdx.x / 32);
  const int head = blockIdx.y, batch = blockIdx.z;
  if (row >= args.N) return;
  const int item = queries.spans.q.item_of(batch, row, args.items);
  if (item < 0) return;
  const std::int64_t place = (static_cast<std::int64_t>(batch) * queries.H + head) * args.N + row;
  const float* mean = args.dmean + queries.row(item, head, args.labels[place]) * args.pitch;
  T* to = args.dq.rows(batch, head, row).data;
  const T* top = args.top_dq.data ? args.top_dq.rows(batch, head, row).data : nullptr;
  for (int column = threadIdx.x % 32; column < args.dq.width; column += 32) {
    float sum = to_float(to[column]) + mean[column];
    if (top) sum += to_float(top[column]);
    to[column] = from_float<T>(sum);
  }
}

MemberSums take_member_sums(Arena& arena, std::int64_t rows, int pitch) {
  return {arena.take<float2>(rows + 1), arena.take<float>(rows * pitch + 1)};
}

template <class T>
void launch_far(const NearArgs<T>& args, cudaStream_t stream) {
  const CentroidQueries& queries = args.queries;
  dispatch_head_dim("clustered", args.pitch, [&](auto width) {
    constexpr int kWidth = decltype(width)::value, kBytes = FarShape<T, kWidth>::kBytes;
    if (args.dk.data || args.dv.data) {
      const int parts = (args.near + kKeys - 1) / kKeys;
      const auto kernel = far_keys_kernel<T, kWidth>;
      allow_shared_memory(kernel, kBytes);
      const auto blocks =
          static_cast<unsigned>(args.blocks.slots * parts * (queries.H / queries.group));
      kernel<<<blocks, kThreads, kBytes, stream>>>(args, parts);
      COTERIE_LAUNCH("far_keys");
    }
    if (args.dq.data) {
      const int tiles = (queries.clusters + kClusters - 1) / kClusters;
      const auto kernel = far_means_kernel<T, kWidth>;
      allow_shared_memory(kernel, kBytes);
      const auto blocks = static_cast<unsigned>(queries.chunks.slots * queries.H * tiles);
      kernel<<<blocks, kThreads, kBytes, stream>>>(args, tiles);
      COTERIE_LAUNCH("far_means");
    }
  });
}

}  // namespace

void near_gradients(const NearBackward& pass, Arena& arena) {
  const ClusteredPlan& plan = pass.plan;
  const AttentionCall& call = plan.call;
  const std::int64_t rows = call.B * call.H * call.N;
  const int pitch = plan.backward.pitch;
  CentroidQueries queries = plan.means;
  queries.chunks = near_chunks(call, plan.near, kChunkKeys);
  const bool top = plan.topk > 0;
  dispatch_element(call.op, call.inputs.q.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const auto tensor = [](const TensorView& view) {
      return view.present() ? tensor4<T>(view) : Tensor4<T>{};
    };
    NearArgs<T> args{};
    args.delta = arena.take<float>(rows);
    args.before = take_member_sums(arena, rows, pitch);
    args.after = take_member_sums(arena, rows, pitch);
    args.mean_slices = arena.take<float>(static_cast<std::int64_t>(queries.chunks.slots) * call.H *
                                         plan.clusters * pitch);
    args.dmean = arena.take<float>(plan.num_means() * pitch);
    T* top_rows = arena.take<T>(top ? rows * call.Dk : 0);
    BackwardArgs<T> members{plan.backward};
    members.scratch = {};
    members.scratch.slots = arena.take<T>(
        top ? plan.backward.units.places() * static_cast<std::int64_t>(plan.topk) * 2 * pitch : 0);
    ListCall lists;
    lists.ranges.rule = ListRule::blocked;
    lists.ranges.window = plan.near;
    lists.ranges.before = lists.ranges.after = 1;
    lists.scale = static_cast<float>(call.scale);
    ListGradients wanted;
    wanted.grad_out = pass.grad_out;
    wanted.lse.data = floats(pass.tensors.lse);
    wanted.delta.data = args.delta;
    wanted.dq = pass.dq;
    wanted.dk = pass.dk;
    wanted.dv = pass.dv;
    if (arena.counting()) return;

    const ClusteredTensors& tensors = pass.tensors;
    queries.centroids = floats(tensors.centroids);
    queries.offsets = ints(tensors.offsets);
    args.queries = queries;
    args.blocks = row_tiles(queries.spans.k, static_cast<int>(call.num_items()), plan.near);
    args.shape = plan.backward;
    args.order = ints(tensors.order);
    args.labels = ints(tensors.labels);
    args.top_keys = ints(tensors.top_keys);
    args.lse = floats(tensors.lse);
    args.q = tensor4<const T>(call.inputs.q);
    args.k = tensor4<const T>(call.k);
    args.v = tensor4<const T>(call.inputs.v);
    args.g = tensor4<const T>(pass.grad_out);
    args.out = tensor4<const T>(pass.out);
    args.dq = tensor(pass.dq);
    args.dk = tensor(pass.dk);
    args.dv = tensor(pass.dv);
    args.near = plan.near;
    args.N = static_cast<int>(call.N);
    args.topk = plan.topk;
    args.pitch = pitch;
    args.items = static_cast<int>(call.num_items());

    const bool nothing = rows == 0 || plan.num_means() == 0;
    const dim3 by_query(static_cast<unsigned>((call.N + kWarps - 1) / kWarps),
                        static_cast<unsigned>(call.H), static_cast<unsigned>(call.B));
    const auto by_mean = static_cast<unsigned>((plan.num_means() + kWarps - 1) / kWarps);
    if (!nothing) {
      delta_kernel<T><<<by_query, kThreads, 0, pass.stream>>>(args);
      COTERIE_LAUNCH("delta");
    }
    lists_backward(call, lists, wanted, arena, pass.stream);
    if (nothing || call.S == 0) return;
    member_sums_kernel<T><<<dim3(by_mean, 2), kThreads, 0, pass.stream>>>(args);
    COTERIE_LAUNCH("member_sums");
    launch_far(args, pass.stream);
    if (top) {
      members.lists = {args.order, args.labels, queries.offsets, args.top_keys, nullptr,
                       nullptr,    nullptr,     nullptr,         args.lse,      args.delta};
      members.q = args.q;
      members.k = args.k;
      members.v = args.v;
      members.g = args.g;
      members.dk = args.dk;
      members.dv = args.dv;
      if (args.dq.data) {
        args.top_dq = tensor4<T>(TensorView::contiguous(
            top_rows, call.inputs.q.dtype, {call.B, call.H, call.N, call.Dk}, Device::cuda));
        members.dq = args.top_dq;
      }
      member_gradients(members, pass.stream);
      if (args.dk.data || args.dv.data) sum_top_key_gradients(members, false, pass.stream);
    }
    if (!args.dq.data) return;
    mean_sum_kernel<T><<<by_mean, kThreads, 0, pass.stream>>>(args);
    COTERIE_LAUNCH("mean_sum");
    query_kernel<T><<<by_query, kThreads, 0, pass.stream>>>(args);
    COTERIE_LAUNCH("query");
  });
}

}  // namespace coterie::cuda
