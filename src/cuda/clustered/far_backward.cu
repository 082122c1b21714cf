// SPDX-License-Identifier: MIT
// Far keys of clustered attention with near keys (near.h) in the backward pass, of heads that add.
// With the sums over the members i of cluster c that are far from key j,
//   G = sum of exp(shift - lse_i) g_i and D = sum of exp(shift - lse_i) delta_i:
//   dz_cj = exp(z_cj - shift) (G . v_j - D)   dv_j += exp(z_cj - shift) G
//   dk_j += scale dz_cj mean_c                dmean_c = scale sum_j dz_cj k_j
// shift is the smallest lse of these members; exp(z_cj - lse_i) <= 1 for far pairs, so no factor is
// above 1. G and D of a block of keys are those of the members before the near blocks plus those of
// the members after them: two rows of running sums over the members of a cluster.
//
// member_sums_kernel: a warp per cluster and direction. far_keys_kernel: a block owns up to 64 keys
// of one block of positions and walks all clusters, for which it makes G; adds to dk and dv.
// far_means_kernel: a block owns 64 clusters and walks a chunk of keys; G of clusters whose far
// members change is made again at every block of positions. 4 warps of 16 owned rows; shared
// memory: 64 owned rows and 64 walked rows (32 of 512 bytes) of two tensors, 33 to 99 KiB. All
// types and devices; no float atomics, every sum has a fixed order. Dropout multiplies G . v_j and
// the weights in dv.
#include <cstdint>

#include "cuda/clustered/near.cuh"
#include "cuda/clustered/near.h"
#include "cuda/launch/dispatch.h"
#include "cuda/launch/launch.h"
#include "cuda/prim/dependent.cuh"
#include "cuda/prim/dropout.cuh"
#include "cuda/prim/fragments.cuh"

namespace coterie::cuda {
namespace {

constexpr int kThreads = 128, kWarps = kThreads / 32;
constexpr int kClusters = 64;       // owned, or made at a time, at most
constexpr int kKeys = kAttendKeys;  // owned, or walked at a time, at most
constexpr int kLaneColumns = kMaxHeadDim / 32;

template <class T>
struct FarArgs {
  BackwardArgs<T> pass;
  CentroidQueries queries;  // chunks: of far_means_kernel
  ItemChunks blocks;        // of positions
  FarMembers sums;
};

// Index of the first query of an item and head in (B, H, N) tensors.
template <class T>
__device__ __forceinline__ std::int64_t first_query(const FarArgs<T>& args, const ItemSpan& span,
                                                    int head) {
  return (static_cast<std::int64_t>(span.batch) * args.queries.H + head) * args.pass.shape.N +
         span.begin;
}

// A warp walks the members of a cluster up (blockIdx.y 0) or down.
template <class T>
__global__ void __launch_bounds__(kThreads)
    member_sums_kernel(const __grid_constant__ FarArgs<T> args) {
  await_previous();
  const CentroidQueries& queries = args.queries;
  const std::int64_t mean = static_cast<std::int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  const std::int64_t problem = mean / queries.clusters;
  if (problem >= static_cast<std::int64_t>(args.pass.shape.items) * queries.H) return;
  const int item = static_cast<int>(problem / queries.H),
            head = static_cast<int>(problem % queries.H);
  if (!args.pass.adds(item, head)) return;
  const int cluster = static_cast<int>(mean % queries.clusters), lane = threadIdx.x % 32;
  const bool up = blockIdx.y == 0;
  const ItemSpan span = queries.spans.q.span(item);
  const std::int64_t base = first_query(args, span, head);
  const std::int32_t* offsets = queries.offsets + problem * (queries.clusters + 1) + cluster;
  const int first = offsets[0], count = offsets[1] - first;
  const Rows<const T> g = args.pass.g.rows(span.batch, head, span.begin);
  const MemberRuns& to = up ? args.sums.before : args.sums.after;
  float shift = INFINITY, sum = 0.0f, total[kLaneColumns] = {};
  // The rows of the next member are fetched before those of this one are added.
  const auto member = [&](int step) {
    return args.pass.lists.order[base + first + (up ? step : count - 1 - step)];
  };
  float lse = 0.0f, delta = 0.0f, row[kLaneColumns] = {};
  const auto fetch = [&](int step) {
    const int query = member(min(step, count - 1));
    lse = args.pass.lists.lse[base + query] * kLog2e;
    delta = args.pass.scratch.delta[base + query];
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
      if (lane + 32 * i < args.pass.shape.pitch)
        to.gradients[place * args.pass.shape.pitch + lane + 32 * i] = total[i];
  }
}

// Shared by the two far kernels, per cluster of a tile.
struct ClusterFacts {
  float lse[kClusters];    // base 2, of the weights times weight_scale; +inf: no far member
  float delta[kClusters];  // times gradient_scale
  std::int64_t rows[2][kClusters];       // of the running sums before and after; -1: none
  unsigned long long listed[kClusters];  // bit b: key b of the tile is a top key
  DropoutRow words[kClusters];
};

// The clusters [first, first + kClusters) of an item and head.
template <class T>
struct ClusterTile {
  const FarArgs<T>& args;
  int item, head, first;
  std::int64_t base;            // of the item's queries in (B, H, N) tensors
  const std::int32_t* offsets;  // of the first cluster

  __device__ ClusterTile(const FarArgs<T>& a, int item_number, int own_head, int first_cluster)
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
    const int count = offsets[r + 1] - offsets[r], near = args.pass.shape.near;
    const int found =
        side == 0 ? count_up_to(args.pass.lists.order + begin, count, (block - 1) * near - 1) - 1
                  : count_up_to(args.pass.lists.order + begin, count, (block + 2) * near - 1);
    return found >= 0 && found < count ? begin + found : -1;
  }
  __device__ DropoutRow words(int r) const {
    return args.queries.dropout.cluster(static_cast<std::int64_t>(item) * args.queries.H + head,
                                        first + r);
  }
  // Top keys of cluster r among keys begin .. begin + kKeys - 1.
  __device__ unsigned long long listed(int r, int begin) const {
    if (args.pass.shape.topk == 0 || !has(r)) return 0;
    const std::int32_t* list =
        args.pass.lists.top_keys + args.queries.row(item, head, first + r) * args.pass.shape.topk;
    return listed_mask(list, listed_keys(list, args.pass.shape.topk), begin);
  }
  // G of cluster r, from facts.rows, as a row of the tile; by a warp.
  template <int kWidth>
  __device__ void make(const Tile<T, kWidth>& tile, ClusterFacts& facts, int r) const {
    const int lane = threadIdx.x % 32;
    const std::int64_t before = facts.rows[0][r], after = facts.rows[1][r];
    const float2 none = make_float2(INFINITY, 0.0f);
    const float2 a = before >= 0 ? args.sums.before.rows[before] : none;
    const float2 b = after >= 0 ? args.sums.after.rows[after] : none;
    const float least = fminf(a.x, b.x);
    const float scale = args.pass.shape.gradient_scale;
    const float a_factor = a.x == INFINITY ? 0.0f : exp2_approximate(least - a.x) * scale;
    const float b_factor = b.x == INFINITY ? 0.0f : exp2_approximate(least - b.x) * scale;
    constexpr int kColumns = kWidth / 32;
    float sum[kColumns] = {};
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      const int column = lane + 32 * i;
      if (a_factor != 0.0f)
        sum[i] = a_factor * args.sums.before.gradients[before * args.pass.shape.pitch + column];
      if (b_factor != 0.0f)
        sum[i] = fmaf(b_factor, args.sums.after.gradients[after * args.pass.shape.pitch + column],
                      sum[i]);
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
    facts.lse[r] = least == INFINITY ? INFINITY : least - args.pass.shape.weight_bits;
    facts.delta[r] = a.y * a_factor + b.y * b_factor;
  }
};

// Two owned tiles of 64 rows and two walked ones.
template <class T, int kWidth>
struct FarShape {
  static constexpr int kTileBytes = 64 * Tile<T, kWidth>::kRowBytes;
  static constexpr int kWalked = Tile<T, kWidth>::kRowBytes <= 256 ? 64 : 32;
  static constexpr int kWalkedBytes = kWalked * Tile<T, kWidth>::kRowBytes;
  static constexpr int kBytes = 2 * kTileBytes + 2 * kWalkedBytes;
  static constexpr bool kResident = sizeof(T) == 2 && kWidth <= 64;
  __device__ static Tile<T, kWidth> owned(const void* memory, int number) {
    return {shared_address(memory) + number * kTileBytes};
  }
  __device__ static Tile<T, kWidth> walked(const void* memory, int number) {
    return {owned(memory, 2).base + number * kWalkedBytes};
  }
};

template <class T>
__device__ __forceinline__ void add_pair(const Rows<T>& rows, int row, int column, float low,
                                         float high) {
  T* to = rows.row(row) + column;
  if (column < rows.width) to[0] = from_float<T>(to_float(to[0]) + low);
  if (column + 1 < rows.width) to[1] = from_float<T>(to_float(to[1]) + high);
}

// Work `number` = (slot of a block of positions * parts + part of kKeys keys) * key heads + key
// head.
template <class T, int kWidth>
__device__ __forceinline__ void far_keys(const FarArgs<T>& args, int parts, int number) {
  using S = FarShape<T, kWidth>;
  extern __shared__ __align__(128) unsigned char memory[];
  __shared__ ClusterFacts facts;
  const CentroidQueries& queries = args.queries;
  const int key_heads = queries.H / queries.group;
  const int key_head = number % key_heads, place = number / key_heads;
  const ItemChunk block = args.blocks.find(queries.spans.k, place / parts);
  const int begin = block.begin + place % parts * kKeys;
  const int count = min(block.end - begin, kKeys);
  if (count <= 0 || !args.pass.adds(block.item, key_head * queries.group)) return;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warp_row = 16 * warp;
  const Tile<T, kWidth> keys = S::owned(memory, 0), values = S::owned(memory, 1),
                        means = S::walked(memory, 0), gradients = S::walked(memory, 1);
  load_tile<kKeys, kThreads>(keys, args.pass.k.rows(block.span.batch, key_head, block.span.begin),
                             begin, count);
  load_tile<kKeys, kThreads>(values, args.pass.v.rows(block.span.batch, key_head, block.span.begin),
                             begin, count);
  cp_async_commit();
  cp_async_wait<0>();
  __syncthreads();
  QueryFragments<T, kWidth, S::kResident, 1> own[2];
  own[0].load(keys, warp_row);
  own[1].load(values, warp_row);
  Accumulator dk[1][kWidth / 16] = {}, dv[1][kWidth / 16] = {};
  const bool active = warp_row < count, drops = queries.dropout.on();
#pragma unroll 1
  for (int head = key_head * queries.group; head < (key_head + 1) * queries.group; ++head)
#pragma unroll 1
    for (int first = 0; first < queries.clusters; first += S::kWalked) {
      const ClusterTile<T> tile(args, block.item, head, first);
      __syncthreads();
      load_centroids<S::kWalked, kThreads>(means, queries, block.item, head, first);
      const int r = static_cast<int>(threadIdx.x) % S::kWalked,
                side = static_cast<int>(threadIdx.x) / S::kWalked;
      if (side < 2) facts.rows[side][r] = tile.far_row(r, side, block.split);
      if (side == 0) facts.listed[r] = tile.listed(r, begin);
      if (side == 0 && drops) facts.words[r] = tile.words(r);
      __syncthreads();
      for (int i = warp; i < S::kWalked; i += kWarps) tile.make(gradients, facts, i);
      __syncthreads();
      if (!active) continue;
#pragma unroll 1
      for (int c = 0; c < S::kWalked && first + c < queries.clusters; c += 16) {
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
          const float factor =
              drops ? kept(queries.dropout, facts.words[column], begin + key) : 1.0f;
          if (drops) x *= factor;
          x = seen ? w * (x - facts.delta[column]) : 0.0f;
          if (drops) w *= factor;
        }
        add_values(dv, p, gradients, c);
        add_values(dk, ds, means, c);
      }
    }
  // The means have the sign of the scale.
  const float dk_factor = fabsf(args.pass.shape.scale) * args.pass.shape.unscale,
              dv_factor = args.pass.shape.unscale;
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
    add(args.pass.dk, dk, dk_factor);
    add(args.pass.dv, dv, dv_factor);
  }
}

template <class T, int kWidth>
__global__ void __launch_bounds__(kThreads)
    far_keys_kernel(const __grid_constant__ FarArgs<T> args, int parts, int total) {
  await_previous();
  const BackwardShape& shape = args.pass.shape;
  if (shape.subtracts && !any_set(args.pass.lists.cancels, shape.items * (shape.H / shape.group)))
    return;
  for (int number = static_cast<int>(blockIdx.x); number < total;
       number += static_cast<int>(gridDim.x)) {
    far_keys<T, kWidth>(args, parts, number);
    __syncthreads();
  }
}

// Block number = (slot of a chunk * H + head) * tiles of clusters + tile.
template <class T, int kWidth>
__global__ void __launch_bounds__(kThreads)
    far_means_kernel(const __grid_constant__ FarArgs<T> args, int tiles) {
  await_previous();
  using S = FarShape<T, kWidth>;
  extern __shared__ __align__(128) unsigned char memory[];
  __shared__ ClusterFacts facts;
  const CentroidQueries& queries = args.queries;
  const int first = static_cast<int>(blockIdx.x) % tiles * kClusters,
            head = static_cast<int>(blockIdx.x) / tiles % queries.H,
            slot = static_cast<int>(blockIdx.x) / tiles / queries.H;
  const ItemChunk chunk = queries.chunks.find(queries.spans.k, slot);
  if (chunk.begin >= chunk.end || !args.pass.adds(chunk.item, head)) return;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warp_row = 16 * warp;
  const int kv_head = head / queries.group, near = args.pass.shape.near;
  const Tile<T, kWidth> means = S::owned(memory, 0), gradients = S::owned(memory, 1),
                        keys = S::walked(memory, 0), values = S::walked(memory, 1);
  const Rows<const T> k = args.pass.k.rows(chunk.span.batch, kv_head, chunk.span.begin);
  const Rows<const T> v = args.pass.v.rows(chunk.span.batch, kv_head, chunk.span.begin);
  const ClusterTile<T> tile(args, chunk.item, head, first);
  load_centroids<kClusters, kThreads>(means, queries, chunk.item, head, first);
  const int r = static_cast<int>(threadIdx.x) % kClusters,
            side = static_cast<int>(threadIdx.x) / kClusters;
  facts.rows[side][r] = -2;  // nothing made yet
  const bool drops = queries.dropout.on();
  if (side == 0 && drops) facts.words[r] = tile.words(r);
  __syncthreads();
  QueryFragments<T, kWidth, S::kResident, 1> own;
  QueryFragments<T, kWidth, false, 1> own_gradients;  // the tile changes
  own.load(means, warp_row);
  own_gradients.load(gradients, warp_row);
  Accumulator sum[1][kWidth / 16] = {};
#pragma unroll 1
  for (int block = chunk.begin / near; block * near < chunk.end; ++block) {
    const int first_key = max(block * near, chunk.begin), end = min((block + 1) * near, chunk.end);
#pragma unroll 1
    for (int begin = first_key; begin < end; begin += S::kWalked) {
      __syncthreads();  // the tiles are free
      load_tile<S::kWalked, kThreads>(keys, k, begin, end - begin);
      load_tile<S::kWalked, kThreads>(values, v, begin, end - begin);
      cp_async_commit();
      if (begin == first_key) {
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
      for (int c = 0; c < S::kWalked && begin + c < end; c += 16) {
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
          if (drops) x *= kept(queries.dropout, facts.words[row], begin + column);
          x = seen ? w * (x - facts.delta[row]) : 0.0f;
        }
        add_values(sum, ds, keys, c);
      }
    }
  }
  const float factor = args.pass.shape.scale * args.pass.shape.unscale;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = warp_row + 8 * half + lane / 4;
    if (!tile.has(row)) continue;
    float* to = args.pass.scratch.mean_slices +
                queries.row(slot, head, first + row) * args.pass.shape.pitch + lane % 4 * 2;
#pragma unroll
    for (int n = 0; n < kWidth / 8; ++n)
      store2(to + 8 * n, sum[0][n / 2][n % 2][2 * half] * factor,
             sum[0][n / 2][n % 2][2 * half + 1] * factor);
  }
}

template <class T>
void launch_far(const FarArgs<T>& args, cudaStream_t stream) {
  const CentroidQueries& queries = args.queries;
  const BackwardArgs<T>& pass = args.pass;
  dispatch_head_dim("clustered", pass.shape.pitch, [&](auto width) {
    constexpr int kWidth = decltype(width)::value, kBytes = FarShape<T, kWidth>::kBytes;
    if (pass.dk.data || pass.dv.data) {
      const int parts = (pass.shape.near + kKeys - 1) / kKeys;
      const int key_heads = queries.H / queries.group,
                total = args.blocks.slots * parts * key_heads;
      launch_early("far_keys", far_keys_kernel<T, kWidth>,
                   static_cast<unsigned>(min(total, few_blocks(1))), kThreads, kBytes, stream, args,
                   parts, total);
    }
    if (pass.dq.data) {
      const int tiles = (queries.clusters + kClusters - 1) / kClusters;
      launch_early("far_means", far_means_kernel<T, kWidth>,
                   static_cast<unsigned>(queries.chunks.slots * queries.H * tiles), kThreads,
                   kBytes, stream, args, tiles);
    }
  });
}

}  // namespace

template <class T>
void far_key_gradients(const BackwardArgs<T>& args, const CentroidQueries& queries,
                       const FarMembers& sums, cudaStream_t stream) {
  const BackwardShape& shape = args.shape;
  FarArgs<T> far{args, queries, row_tiles(shape.spans.k, shape.items, shape.near), sums};
  far.queries.chunks = shape.chunks;
  const std::int64_t means = static_cast<std::int64_t>(shape.items) * shape.H * shape.clusters;
  if (far.blocks.slots == 0 || means == 0) return;
  launch_early("member_sums", member_sums_kernel<T>,
               dim3(static_cast<unsigned>((means + kWarps - 1) / kWarps), 2), kThreads, 0, stream,
               far);
  launch_far(far, stream);
}

template void far_key_gradients(const BackwardArgs<float>&, const CentroidQueries&,
                                const FarMembers&, cudaStream_t);
template void far_key_gradients(const BackwardArgs<Bf16>&, const CentroidQueries&,
                                const FarMembers&, cudaStream_t);
template void far_key_gradients(const BackwardArgs<F16>&, const CentroidQueries&, const FarMembers&,
                                cudaStream_t);

}  // namespace coterie::cuda
