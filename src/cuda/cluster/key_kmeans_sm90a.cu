// SPDX-License-Identifier: MIT
// All passes of the k-means by keys (stages.h) in one kernel: covariance of the keys, first
// centroids, labels argmax_c x.m_c + b_c, means, and at the end the stable sort of the rows by
// label.
//
// Grid and block: cooperative; a team of up to kMostParts blocks of 4 warpgroups takes one item and
// head. Each block takes a part of its rows, and in the steps by centroids a part of these; blocks
// exchange sums and tables through global memory. Three team barriers for two passes.
//   start    every block makes the covariance and the first table itself, which takes less time
//            than an exchange: one warpgroup multiplies the keys, one sums them, two load the first
//            centroids. A warpgroup makes 64 columns m_c = S (mu_c - r) of the table, both factors
//            as sums of two bf16 numbers
//   labels   a round is 256 rows, 64 per warpgroup, times all centroids, as in nearest_sm90a.cu
//   lists    a warp picks the rows of its 16 clusters, in order
//   sums     onehot(labels)^T times the listed rows by mma.sync: exact products, summed in fp32
//            registers over many rounds. A round is labelled before the previous one is listed
// Shared memory: struct Memory, about 209 KB, most of it a ring of four rounds of rows (128 KB) and
// the table (40 KB). __launch_bounds__(512, 1): 128 registers; loops stay rolled where that costs
// nothing, because at 4k most of this code runs once or twice and instruction fetches dominate.
// Preconditions: key_kmeans_serves (Hopper, aligned 16-bit rows of up to 64 elements, up to 256
// clusters). Otherwise the stages of key_metric.cu, means.cu and nearest.cu run.
#include <cstdint>

#include "coterie/random.h"
#include "cuda/cluster/first_sync.cuh"
#include "cuda/cluster/nearest.cuh"
#include "cuda/cluster/stages.h"
#include "cuda/launch/device.h"
#include "cuda/launch/dispatch.h"
#include "cuda/prim/dependent.cuh"
#include "cuda/prim/mma.cuh"
#include "cuda/prim/team.cuh"
#include "cuda/prim/warp.cuh"
#include "cuda/prim/wgmma.cuh"

namespace coterie::cuda {

namespace {

constexpr int kGroups = 4, kThreads = kGroups * kWarpgroup, kWarps = kThreads / 32;
constexpr int kWidth = 64, kClusters = 64 * kGroups;
constexpr int kOwn = kClusters / kWarps;          // clusters of a warp
constexpr int kRound = 64 * kGroups, kSlots = 4;  // rows; rounds in shared memory
constexpr int kTileBytes = 64 * 128, kSlotBytes = kGroups * kTileBytes;
constexpr int kStep = 64;             // centroids at a time
constexpr int kMostParts = 8;         // of a problem's rows
constexpr int kSamples = 8 * kWidth;  // keys of the covariance, at most
// A table of centroids: rows, then biases; in global memory, bounds of the blocks' warps follow.
constexpr int kTableBytes = kClusters * (128 + kBiasBytes);
constexpr int kSharedTableBytes = kTableBytes + kMostParts * kWarps * 8;
constexpr int kMostRows = 1 << 24;  // fp32 counts of rows are exact below this

template <class T>
struct KeyKMeansArgs : KeyKMeansPlan {
  Tensor4<const T> q, k;
  float *covariance, *centroids;
  KeyKMeansRun run;
  int width;
  unsigned key_scale;  // 512, unknown to the compiler: see best_key
};

// Shared memory of a block, at a multiple of 1024 bytes.
struct Memory {
  unsigned char ring[kSlots * kSlotBytes];   // rows; at first keys and centroids
  unsigned char table[kTableBytes];          // m_c, biases in bf16 parts; at first key products
  unsigned char metric[2][kTileBytes];       // the covariance in bf16: high parts, low parts
  std::uint32_t lists[kWarps][kRound + 16];  // rows of a warp's clusters
  std::uint8_t labels[kSlots][kRound];       // of row r at r % 32 * 8 + r / 32
  float column_sums[4][kWidth];              // of the keys, by warps
  alignas(16) float reference[kWidth];       // the fixed query
  uint2 bounds[kWarps];
  std::int32_t numbers[kSamples];       // rows of the sampled keys
  std::int32_t initial[kClusters + 1];  // rows of the first centroids; later places of clusters
  int2 scan[kWarps];
  std::uint64_t ready[kSlots], free[kSlots];
  RowRange share;  // of the centroids, for this block
  int poisoned;    // a row of cluster 0 is not finite
};

// The same value, opaque to the compiler: values that depend on it are not hoisted out of loops,
// which lowers register pressure. Spills are slow here, with so little L1 left.
template <class Value>
__device__ __forceinline__ Value afresh(Value value) {
  if constexpr (sizeof(Value) == 8)
    asm volatile("" : "+l"(value));
  else
    asm volatile("" : "+r"(value));
  return value;
}

using cuda::uniform;  // in addition to the overload below
__device__ __forceinline__ ItemSpan uniform(const ItemSpan& span) {
  return {uniform(span.batch), uniform(span.begin), uniform(span.length)};
}

// a / b in a few instructions, exact where the quotient is a float; `inverse` is 1 / b, rounded.
__device__ __forceinline__ float divide(float a, float b, float inverse) {
  const float quotient = a * inverse;
  return fmaf(fmaf(-quotient, b, a), inverse, quotient);
}

// The same rows, known to the compiler as aligned: key_kmeans_serves checked that.
template <class T>
__device__ __forceinline__ Rows<const T> aligned_rows(Rows<const T> rows) {
  rows.aligned = true;
  return rows;
}

// 1 where two pairs of numbers are equal, else 0.
__device__ __forceinline__ std::uint32_t equal_pairs(std::uint32_t a, std::uint32_t b, Bf16) {
  std::uint32_t ones;
  asm("set.eq.bf16x2.bf16x2 %0, %1, %2;" : "=r"(ones) : "r"(a), "r"(b));
  return ones;
}
__device__ __forceinline__ std::uint32_t equal_pairs(std::uint32_t a, std::uint32_t b, F16) {
  std::uint32_t ones;
  asm("set.eq.f16x2.f16x2 %0, %1, %2;" : "=r"(ones) : "r"(a), "r"(b));
  return ones;
}

// A list entry: the row in the upper half, the cluster as a number of either type in the lower
// half; distinct bits are distinct numbers here. kNobody is no cluster.
constexpr std::uint32_t kNumber = 0x4000, kNobody = 0x5000;

// The bits of infinity.
template <class T>
constexpr std::uint32_t kInfinity = std::is_same_v<T, F16> ? 0x7c00u : 0x7f80u;

// The absolute value with these bits of T, as a float.
template <class T>
__device__ __forceinline__ float magnitude(std::uint32_t bits) {
  if constexpr (std::is_same_v<T, F16>) return to_float(F16{static_cast<std::uint16_t>(bits)});
  return __uint_as_float(bits << 16);
}

// One problem of a team, from its keys to the order of its rows.
template <class T>
struct KeyKMeans {
  const KeyKMeansArgs<T>& args;
  Memory& memory;
  Team& team;
  const int warp, group;  // of this thread; a warpgroup has four warps
  const int problem, item, head;
  const ItemSpan span;
  const RowRange range;
  const Rows<const T> rows;
  const int rounds;
  int done;  // rounds of earlier passes, for the phases of the barriers

  __device__ KeyKMeans(const KeyKMeansArgs<T>& a, Memory& m, Team& t, int number, int before)
      : args(a),
        memory(m),
        team(t),
        warp(uniform(static_cast<int>(threadIdx.x / 32))),
        group(warp / 4),
        problem(number),
        item(number / a.shape.heads),
        head(number % a.shape.heads),
        span(uniform(a.shape.q.span(item))),
        range(t.share(span.length)),
        rows(aligned_rows(a.q.rows(span.batch, head, span.begin))),
        rounds((range.end - range.begin + kRound - 1) / kRound),
        done(before) {}

  __device__ static int own_lane() { return static_cast<int>(afresh(threadIdx.x) % 32); }
  __device__ int place(int round) const { return static_cast<unsigned>(done + round) % kSlots; }
  __device__ std::uint32_t slot(int round) const {
    return shared_address(memory.ring) + place(round) * kSlotBytes;
  }
  __device__ std::int64_t first_centroid() const {
    return static_cast<std::int64_t>(problem) * args.shape.clusters;
  }
  // Where the sums and counts of a block of the team begin.
  __device__ std::int64_t part(int rank) const {
    return (static_cast<std::int64_t>(team.number) * team.size + rank) * kClusters;
  }

  // The block's share of the centroids, from make_metric on.
  __device__ RowRange share() const { return memory.share; }
  __device__ RowRange find_share() const {
    const int clusters = args.shape.clusters, each = (clusters + team.size - 1) / team.size;
    return {min(team.rank * each, clusters), min((team.rank + 1) * each, clusters)};
  }
  // Calls visit(cluster, column) for these, four columns at a time.
  template <class Visit>
  __device__ __forceinline__ void for_share(const Visit& visit) const {
    const RowRange own = share();
#pragma unroll 1
    for (int i = afresh(static_cast<int>(threadIdx.x)); i < (own.end - own.begin) * (kWidth / 4);
         i += kThreads)
      visit(own.begin + i / (kWidth / 4), i % (kWidth / 4) * 4);
  }

  // Shared memory of columns [column, column + 4) of row r of the centroids to be weighted, in
  // slots of the ring that the first two rounds leave free. Swizzled by row.
  __device__ std::uint32_t staged(int r, int column) const {
    return slot(2 + r / 128) + r % 128 * (4 * kWidth) + (column ^ (r & 7) * 8) * 4;
  }

  // Writes the means of the block's share of the clusters to `to`, and stages them if `stage`.
  // Empty clusters get zeros, or keep their centroids if `stage`.
  __device__ void write_means(float* to, bool stage) const {
    const float* from = afresh(args.sums) + part(0) * kWidth;
    const std::int32_t* sizes = afresh(args.counts) + part(0);
    for_share([&](int cluster, int column) {
      const auto* first = reinterpret_cast<const float4*>(from + cluster * kWidth + column);
      float4 sums[kMostParts];
      int counts[kMostParts];
#pragma unroll
      for (int rank = 0; rank < kMostParts; ++rank) {  // all loads are in flight together
        const bool there = rank < team.size;
        sums[rank] = there ? __ldcg(first + rank * (kClusters * kWidth / 4)) : float4{};
        counts[rank] = there ? __ldcg(sizes + cluster + rank * kClusters) : 0;
      }
      float4 sum = sums[0];
      int members = counts[0];
#pragma unroll
      for (int rank = 1; rank < kMostParts; ++rank) {  // zeros change nothing
        sum.x += sums[rank].x;
        sum.y += sums[rank].y;
        sum.z += sums[rank].z;
        sum.w += sums[rank].w;
        members += counts[rank];
      }
      const float size = static_cast<float>(max(members, 1)), inverse = __frcp_rn(size);
      float4 mean = make_float4(divide(sum.x, size, inverse), divide(sum.y, size, inverse),
                                divide(sum.z, size, inverse), divide(sum.w, size, inverse));
      const bool inside = column < args.width;
      auto* kept =
          reinterpret_cast<float4*>(to + (first_centroid() + cluster) * args.width + column);
      if (members == 0 && stage && inside)
        mean = __ldcg(kept);
      else if (inside)
        *kept = mean;
      if (stage)
        store_shared16(staged(cluster - share().begin, column),
                       make_uint4(__float_as_uint(mean.x), __float_as_uint(mean.y),
                                  __float_as_uint(mean.z), __float_as_uint(mean.w)));
    });
  }

  // Labels and ranks of rows of the block, from a row on.
  static constexpr int kBatch = 4;
  struct Places {
    int labels[kBatch], ranks[kBatch];
  };
  __device__ __forceinline__ Places load_places(int begin) const {
    const std::int64_t first = args.shape.start(span, head);
    Places places;
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {  // all loads are in flight together
      const std::int64_t row =
          first + min(range.begin + begin + i * kThreads, max(range.end, 1) - 1);
      places.labels[i] = args.run.out.labels[row];
      places.ranks[i] = args.ranks[row];
    }
    return places;
  }

  // Rows of cluster `threadIdx.x`: in all blocks, in those before this one, in this one.
  struct Members {
    int total, before, own;
  };
  __device__ __forceinline__ Members load_members() const {
    const int c = afresh(static_cast<int>(threadIdx.x));
    const std::int32_t* sizes = afresh(args.counts) + part(0);
    Members members{0, 0, 0};
    if (c < args.shape.clusters)
#pragma unroll
      for (int rank = 0; rank < kMostParts; ++rank) {
        const int count = rank < team.size ? __ldcg(sizes + rank * kClusters + c) : 0;
        members.before += rank < team.rank ? count : 0;
        members.own += rank == team.rank ? count : 0;
        members.total += count;
      }
    return members;
  }

  // Sums over the threads before this one.
  __device__ __forceinline__ int2 scan(int2 value) const {
    const int lane = own_lane();
    int2 sum = value;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int x = __shfl_up_sync(~0u, sum.x, step), y = __shfl_up_sync(~0u, sum.y, step);
      if (lane >= step) sum.x += x, sum.y += y;
    }
    if (lane == 31) memory.scan[warp] = sum;
    __syncthreads();
    const int2 other = memory.scan[lane % kWarps];
    return make_int2(sum.x - value.x + __reduce_add_sync(~0u, lane < warp ? other.x : 0),
                     sum.y - value.y + __reduce_add_sync(~0u, lane < warp ? other.y : 0));
  }

  // The sort: offsets of the clusters, then every row to its place. Many rows are sorted in shared
  // memory first, where scattered stores are cheap. `places` are those of the first batch.
  __device__ void write_order(const Members& members, Places places) const {
    const int clusters = args.shape.clusters, c = afresh(static_cast<int>(threadIdx.x));
    const int count = range.end - range.begin;
    const bool staged = count > 8 * kThreads && count <= kSlots * kSlotBytes / 2;
    const int2 start = scan(make_int2(members.total, members.own));
    if (c <= clusters) {  // the last entry is the end of all
      memory.initial[c] = start.x + members.before;
      memory.numbers[c] = start.y;
      if (team.rank == 0)
        args.run.out.offsets[static_cast<std::int64_t>(problem) * (clusters + 1) + c] = start.x;
    }
    __syncthreads();
    auto* sorted = reinterpret_cast<std::uint16_t*>(memory.ring);
    std::int32_t* order = args.run.out.order + args.shape.start(span, head);
#pragma unroll 1
    for (int begin = c; begin < count;) {
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int row = begin + i * kThreads;
        if (row >= count) continue;
        if (staged)
          sorted[memory.numbers[places.labels[i]] + places.ranks[i]] =
              static_cast<std::uint16_t>(row);
        else
          order[memory.initial[places.labels[i]] + places.ranks[i]] = range.begin + row;
      }
      begin += kBatch * kThreads;
      if (begin < count) places = load_places(begin);
    }
    if (!staged) return;
    __syncthreads();
#pragma unroll 1
    for (int cluster = warp * kOwn; cluster < min(warp * kOwn + kOwn, clusters); ++cluster) {
      const int from = memory.numbers[cluster], to = memory.initial[cluster];
#pragma unroll 1
      for (int i = own_lane(); i < memory.numbers[cluster + 1] - from; i += 32)
        order[to + i] = range.begin + sorted[from + i];
    }
  }

  // Every row is its own cluster.
  __device__ void run_single() const {
    const std::int64_t start = args.shape.start(span, head);
    const int clusters = args.shape.clusters;
    std::int32_t* offsets =
        args.run.out.offsets + static_cast<std::int64_t>(problem) * (clusters + 1);
    for (int i = range.begin + threadIdx.x; i < range.end; i += kThreads)
      args.run.out.labels[start + i] = args.run.out.order[start + i] = i;
    if (team.rank == 0)
      for (int c = threadIdx.x; c <= clusters; c += kThreads) offsets[c] = min(c, span.length);
    if (!args.run.means) return;
    __syncthreads();
    if (threadIdx.x == 0) memory.share = find_share();
    __syncthreads();
    for_share([&](int cluster, int column) {
      if (column >= args.width) return;
      float values[4] = {};
      if (cluster < span.length)
        for (int i = 0; i < 4; ++i) values[i] = to_float(rows.row(cluster)[column + i]);
      *reinterpret_cast<float4*>(args.run.means + (first_centroid() + cluster) * args.width +
                                 column) = make_float4(values[0], values[1], values[2], values[3]);
    });
  }

  // Chooses the row of a first centroid; called by one half of the warps.
  __device__ __forceinline__ void choose_row() const {
    const RandomStream stream{args.shape.seed, RandomUse::initial_centroid,
                              args.shape.stream(problem)};
    const int place = (warp - kWarps / 2) * 32 + own_lane(),
              c = min(place, args.shape.clusters - 1);
    const auto row = static_cast<std::int32_t>(random_permutation(
        stream, static_cast<std::uint32_t>(c), static_cast<std::uint32_t>(span.length)));
    memory.initial[place] = row;
    prefetch(rows.row(row));
  }

  // Starts to load the sampled keys, padded with zeros; called by the other half, 64 keys per warp.
  __device__ __forceinline__ void load_keys(const ItemSpan& keys, int samples) const {
    const int lane = own_lane(), first = warp * 64;
    const Rows<const T> from =
        aligned_rows(args.k.rows(keys.batch, head / args.shape.group, keys.begin));
    const Tile<T, kWidth> tile{slot(first / kRound)};
    const int column = lane % 8 * 8, each = keys.length / max(samples, 1),
              rest = keys.length - each * samples;
#pragma unroll 1
    for (int half = first; half < first + 64; half += 32) {
      const int number = (half + lane) * each + (half + lane) * rest / max(samples, 1);
#pragma unroll
      for (int step = 0; step < 32; step += 4) {
        const int row = half + step + lane / 8, source = __shfl_sync(~0u, number, step + lane / 8);
        const bool there = row < samples && column < args.width;
        cp_async16(tile.chunk(row % kRound, lane % 8),
                   there ? from.row(source) + column : from.data, there ? 16 : 0);
      }
    }
    cp_async_commit();
  }

  // Prefetches a row of up to 128 bytes into L2.
  __device__ static void prefetch(const T* row) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(row));
  }

  // Sums of the keys' elements, by the second warpgroup: ones times the keys, 128 keys per warp.
  __device__ __forceinline__ void add_keys() const {
    const int lane = own_lane(), own = warp % 4;
    const Tile<T, kWidth> tile{slot(own / 2)};
    const std::uint32_t one = pack2<T>(1.0f, 1.0f), ones[4] = {one, one, one, one};
    float sums[kWidth / 8][4] = {};
#pragma unroll 2
    for (int first = own % 2 * 128; first < own % 2 * 128 + 128; first += 16) {
      std::uint32_t keys[kWidth / 16][4];
#pragma unroll
      for (int n = 0; n < kWidth / 16; ++n)
        ldmatrix_x4_trans(keys[n], tile.chunk(first + lane % 16, 2 * n + lane / 16));
#pragma unroll
      for (int n = 0; n < kWidth / 8; ++n)
        mma_m16n8k16<T>(sums[n], ones, keys[n / 2] + n % 2 * 2, sums[n]);
    }
    if (lane >= 4) return;  // all rows of the product are the same
#pragma unroll
    for (int n = 0; n < kWidth / 8; ++n)
      store2(&memory.column_sums[own][8 * n + 2 * lane], sums[n][0], sums[n][1]);
  }

  // Address of a sum of products of elements, in the memory of the table. Swizzled by row.
  __device__ float* product(int row, int column) const {
    return reinterpret_cast<float*>(memory.table) + row * kWidth + (column ^ (row & 3) * 8);
  }
  // Sums of products, by the first warpgroup.
  __device__ __forceinline__ void multiply_keys() const {
    const int lane = own_lane();
    float sum[32];
#pragma unroll
    for (int i = 0; i < 32; ++i) sum[i] = 0.0f;
    wgmma_fence();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const std::uint64_t keys = matrix_descriptor(slot(half));
#pragma unroll
      for (int step = 0; step < kRound / 16; ++step) {
        const std::uint64_t tile = descriptor_behind(keys, step * (16 * 128));
        wgmma<T, 1, 1, 1>(sum, tile, tile);
      }
    }
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_settle(sum);
    const int row = warp % 4 * 16 + lane / 4, column = lane % 4 * 2;
#pragma unroll
    for (int n = 0; n < kWidth / 8; ++n)
#pragma unroll
      for (int side = 0; side < 2; ++side)
        store2(product(row + 8 * side, 8 * n + column), sum[4 * n + 2 * side],
               sum[4 * n + 2 * side + 1]);
  }

  // A power of two that brings the mean variance near 1. It changes no label and keeps the table in
  // the range of fp16. The arguments are the means of a lane's two columns and of their squares.
  __device__ __forceinline__ float metric_scale(const float2& mean, const float2& square) const {
    const float trace = warp_sum((square.x - mean.x * mean.x) + (square.y - mean.y * mean.y));
    const std::uint32_t exponent = __float_as_uint(trace / static_cast<float>(args.width)) >> 23;
    return exponent > 1 && exponent < 253 ? __uint_as_float((254 - exponent) << 23) : 1.0f;
  }

  // S2 / n - mean mean^T, scaled, as right factor of the products, in two bf16 parts. By all
  // threads in a loop: instructions that run once are slower than the barrier. Every warp has all
  // means, two per lane.
  __device__ __forceinline__ void covariance(int samples) const {
    const float count = static_cast<float>(max(samples, 1)), inverse = __frcp_rn(count);
    float2 mean = make_float2(0.0f, 0.0f);
#pragma unroll
    for (int part = 0; part < 4; ++part) {
      const auto sums = reinterpret_cast<const float2*>(memory.column_sums[part])[own_lane()];
      mean = make_float2(mean.x + sums.x, mean.y + sums.y);
    }
    mean = make_float2(divide(mean.x, count, inverse), divide(mean.y, count, inverse));
    const auto square = [&](int d) { return divide(*product(d, d), count, inverse); };
    const int own = 2 * own_lane();
    const float scale = metric_scale(mean, make_float2(square(own), square(own + 1)));
    const bool keep = team.rank == 0 && head % args.shape.group == 0;
    float* kept = args.covariance +
                  static_cast<std::int64_t>(args.shape.key_problem(problem)) * kWidth * kWidth;
    const Tile<Bf16, kWidth> high{shared_address(memory.metric[0])},
        low{shared_address(memory.metric[1])};
#pragma unroll 1
    for (int i = threadIdx.x; i < kWidth * kWidth / 2; i += kThreads) {
      const int row = i / (kWidth / 2), column = i % (kWidth / 2) * 2;
      const float2 sum = *reinterpret_cast<const float2*>(product(row, column));
      const float other = __shfl_sync(~0u, row % 2 ? mean.y : mean.x, row / 2);
      const float x = divide(sum.x, count, inverse) - other * mean.x;
      const float y = divide(sum.y, count, inverse) - other * mean.y;
      if (keep) store2(kept + row * kWidth + column, x, y);
      std::uint32_t words[2];
      split_pair(x * scale, y * scale, words[0], words[1]);
      store_shared32(high.address(row, column), words[0]);
      store_shared32(low.address(row, column), words[1]);
    }
    fence_async_proxy();
  }
  __device__ static void store_shared32(std::uint32_t to, std::uint32_t word) {
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(to), "r"(word) : "memory");
  }
  __device__ static void split_pair(float a, float b, std::uint32_t& high, std::uint32_t& low) {
    high = pack2<Bf16>(a, b);
    low = pack2<Bf16>(a - __uint_as_float(high << 16), b - __uint_as_float(high & 0xffff0000u));
  }

  // Copies the first centroids to shared memory, by the last two warpgroups; the first centroid is
  // the reference. The block's share also goes to global memory: an empty cluster reuses its own.
  __device__ __forceinline__ void stage_initial() const {
    constexpr int kAtOnce = kThreads / 2 / 8, kLoads = 4;
    const int thread = static_cast<int>(threadIdx.x) - kThreads / 2, column = thread % 8 * 8;
    const bool inside = column < args.width;
    const RowRange share = this->share();
#pragma unroll 1
    for (int first = thread / 8; first < kClusters; first += kLoads * kAtOnce) {
      uint4 words[kLoads];
#pragma unroll
      for (int i = 0; i < kLoads; ++i)  // all in flight together
        words[i] = load_once(rows.row(memory.initial[first + i * kAtOnce]) + (inside ? column : 0),
                             inside);
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        const int c = first + i * kAtOnce;
        const auto* elements = reinterpret_cast<const T*>(&words[i]);
#pragma unroll
        for (int e = 0; e < 8; e += 4) {
          const float4 values = make_float4(to_float(elements[e]), to_float(elements[e + 1]),
                                            to_float(elements[e + 2]), to_float(elements[e + 3]));
          store_shared16(staged(c, column + e),
                         make_uint4(__float_as_uint(values.x), __float_as_uint(values.y),
                                    __float_as_uint(values.z), __float_as_uint(values.w)));
          if (c == 0) *reinterpret_cast<float4*>(&memory.reference[column + e]) = values;
          if (inside && c >= share.begin && c < share.end)
            *reinterpret_cast<float4*>(args.centroids + (first_centroid() + c) * args.width +
                                       column + e) = values;
        }
      }
    }
  }

  __device__ __forceinline__ void make_metric(FirstTeamSync& first_sync) const {
    const ItemSpan keys = uniform(args.shape.k.span(item));
    const int samples = min(keys.length, 8 * args.width);
    const int next = range.begin + static_cast<int>(threadIdx.x);  // of the first two rounds
    if (next < range.end) prefetch(rows.row(next));
    if (threadIdx.x == 0) memory.share = find_share();
    if (warp < kWarps / 2)  // the first warp is still busy with the grid barrier
      load_keys(keys, samples);
    else
      choose_row();
    cp_async_wait<0>();
    fence_async_proxy();
    __syncthreads();
    if (group == 0)
      multiply_keys();
    else if (group == 1)
      add_keys();
    else
      stage_initial();
    first_sync.wait();
    covariance(samples);
    __syncthreads();
  }

  // Computes the table's rows of `count` staged centroids, from cluster `first` on, and their
  // bounds for each warp.
  __device__ __forceinline__ void weigh(int first, int count) const {
    uint2 most = make_uint2(0, 0);
    if (group * 64 < count) most = weigh_rows(first, count);
    if (own_lane() == 0) memory.bounds[warp] = most;
    if (threadIdx.x == 0) memory.poisoned = 0;
    fence_async_proxy();
    __syncthreads();
  }

  // Copies the block's share of the table to global memory.
  __device__ __forceinline__ void share_table() const {
    const RowRange own = share();
    unsigned char* to = team_table();
#pragma unroll 1
    for (int i = own.begin * 8 + static_cast<int>(threadIdx.x); i < own.end * 8; i += kThreads) {
      copy16(to, row_offset(i / 8, i % 8));
      if (i % 8 == 0) copy16(to, bias_offset(i / 8));
    }
    if (threadIdx.x < kWarps) team_bounds(team.rank)[threadIdx.x] = memory.bounds[threadIdx.x];
  }
  __device__ void copy16(unsigned char* to, int offset) const {
    *reinterpret_cast<uint4*>(to + offset) = *reinterpret_cast<const uint4*>(memory.table + offset);
  }

  // Copies the team's table to shared memory, the last row repeated.
  __device__ __forceinline__ void stage_table() const {
    const unsigned char* from = team_table();
    const std::uint32_t to = shared_address(memory.table);
    const int last = args.shape.clusters - 1;
#pragma unroll 1
    for (int i = threadIdx.x; i < kClusters * 8; i += kThreads)
      cp_async16(to + row_offset(i / 8, i % 8), from + row_offset(min(i / 8, last), i % 8), 16);
    if (threadIdx.x < kClusters)
      cp_async16(to + bias_offset(threadIdx.x),
                 from + bias_offset(min(static_cast<int>(threadIdx.x), last)), 16);
    cp_async_commit();
    if (threadIdx.x < kWarps) {
      uint2 most = make_uint2(0, 0);
#pragma unroll
      for (int rank = 0; rank < kMostParts; ++rank) {
        const uint2 part = __ldcg(team_bounds(min(rank, team.size - 1)) + threadIdx.x);
        most = make_uint2(max(most.x, part.x), max(most.y, part.y));
      }
      memory.bounds[threadIdx.x] = most;
    }
    cp_async_wait<0>();
    fence_async_proxy();
    __syncthreads();
  }

  __device__ unsigned char* team_table() const {
    return args.tables + static_cast<std::int64_t>(team.number) * kSharedTableBytes;
  }
  __device__ uint2* team_bounds(int rank) const {
    return reinterpret_cast<uint2*>(team_table() + kTableBytes) + rank * kWarps;
  }
  // Offsets of columns [8 n, 8 n + 8) of a centroid in a table, and of its bias.
  __device__ static int row_offset(int c, int n) { return c * 128 + ((n ^ (c & 7)) << 4); }
  __device__ static int bias_offset(int c) {
    return kClusters * 128 + c / 8 * (8 * kBiasBytes) + c % 8 * 16;
  }

  __device__ __forceinline__ uint2 weigh_rows(int first, int count) const {
    const int lane = own_lane();
    const int row = warp * kOwn + lane / 4, column = lane % 4 * 2;
    std::uint32_t high[4][4], low[4][4];
#pragma unroll
    for (int step = 0; step < kWidth / 16; ++step)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int d = 16 * step + i / 2 * 8 + column;
        const float2 mu = element_pair(row + i % 2 * 8, d),
                     reference = *reinterpret_cast<const float2*>(&memory.reference[d]);
        split_pair(mu.x - reference.x, mu.y - reference.y, high[step][i], low[step][i]);
      }
    float weighed[kWidth / 2];
    const std::uint64_t metric = matrix_descriptor(shared_address(memory.metric[0]));
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kWidth / 16; ++step) {
      const std::uint64_t right = descriptor_behind(metric, step * 32);
      wgmma_step<Bf16, 0>(step, weighed, low[step], right);
      wgmma<Bf16, 1, 0>(weighed, high[step], descriptor_behind(right, kTileBytes));
      wgmma<Bf16, 1, 0>(weighed, high[step], right);
    }
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_settle(weighed);
    const std::uint32_t table = shared_address(memory.table) + lane % 4 * 4;
    uint2 most = make_uint2(0, 0);
#pragma unroll
    for (int side = 0; side < 2; ++side) {
      const int r = row + 8 * side, c = first + r;
      const bool there = r < count;
      float own = 0.0f, shared = 0.0f, norm = 0.0f;
#pragma unroll
      for (int n = 0; n < kWidth / 8; ++n) {
        const float2 mu = element_pair(r, 8 * n + column),
                     reference =
                         *reinterpret_cast<const float2*>(&memory.reference[8 * n + column]);
        const float x = weighed[4 * n + 2 * side], y = weighed[4 * n + 2 * side + 1];
        const std::uint32_t word = pack2<T>(x, y);
        const auto* rounded = reinterpret_cast<const T*>(&word);
        const float rx = to_float(rounded[0]), ry = to_float(rounded[1]);
        own = fmaf(mu.x, fmaf(-0.5f, x, rx), own);
        own = fmaf(mu.y, fmaf(-0.5f, y, ry), own);
        shared = fmaf(reference.x, x, shared);
        shared = fmaf(reference.y, y, shared);
        norm += fabsf(rx) + fabsf(ry);
        if (there) store_shared32(table + row_offset(c, n), word);
      }
      // -(mu + r).m / 2 - mu.(m' - m)
      float bias = -(own + 0.5f * shared);
#pragma unroll
      for (int step = 1; step <= 2; step *= 2) {
        bias += __shfl_xor_sync(~0u, bias, step);
        norm += __shfl_xor_sync(~0u, norm, step);
      }
      if (!there) continue;
      most.x = max(most.x, magnitude_bits(norm));
      most.y = max(most.y, magnitude_bits(bias));
      if (lane % 4 == 0) store_bias(shared_address(memory.table) + bias_offset(c), bias);
    }
    return make_uint2(__reduce_max_sync(~0u, most.x), __reduce_max_sync(~0u, most.y));
  }
  __device__ float2 element_pair(int r, int column) const {
    float2 pair;
    asm volatile("ld.shared.v2.f32 {%0,%1}, [%2];"
                 : "=f"(pair.x), "=f"(pair.y)
                 : "r"(staged(r, column))
                 : "memory");
    return pair;
  }
  // Absolute values as integers have the same order, with NaN above all: it
  // must reach key_offset.
  __device__ static std::uint32_t magnitude_bits(float value) {
    return __float_as_uint(value) & 0x7fffffffu;
  }
  // The largest |m_c|_1 and |b_c| of the table.
  __device__ float2 table_bounds() const {
    const uint2 part = memory.bounds[own_lane() % kWarps];
    return make_float2(__uint_as_float(__reduce_max_sync(~0u, part.x)),
                       __uint_as_float(__reduce_max_sync(~0u, part.y)));
  }

  __device__ std::uint32_t ready(int round) const {
    return shared_address(memory.ready + place(round));
  }
  __device__ std::uint32_t free(int round) const {
    return shared_address(memory.free + place(round));
  }
  __device__ int phase(int round) const { return static_cast<unsigned>(done + round) / kSlots & 1; }

  // Starts to load this warp's 16 rows of a round, zeros after the last one.
  __device__ __forceinline__ void load(int round) const {
    const int lane = own_lane(), r = warp % 4 * 16 + lane / 8, chunk = lane % 8;
    const int count = left(round) - group * 64;
    if (round < rounds) {
      const Tile<T, 64> tile{slot(round) + group * kTileBytes};
      const std::int64_t first = range.begin + round * kRound + group * 64;
      const T* from = rows.data + first * rows.pitch + (r * rows.pitch + chunk * 8);
#pragma unroll
      for (int step = 0; step < 16; step += 4)
        cp_async16(tile.chunk(r + step, chunk), from + step * rows.pitch,
                   chunk * 8 < args.width && r + step < count ? 16 : 0);
    }
    cp_async_commit();
  }
  // Rows of the block from a round on.
  __device__ int left(int round) const { return range.end - range.begin - round * kRound; }
  // Where the block's rows of a round begin in labels and ranks.
  __device__ std::int64_t first_row(int round) const {
    return args.shape.start(span, head) + range.begin + round * kRound;
  }

  // Labels this warpgroup's rows of a round; writes them to global memory in the last pass.
  __device__ __forceinline__ void label(int round, const float2& bounds, bool last) const {
    const Tile<T, 64> tile{slot(round) + group * kTileBytes};
    const int lane = own_lane(), warp_row = warp % 4 * 16, quad = lane % 4;
    const std::uint32_t ones = quad == 0 ? 0x3f803f80u : 0, with_offset = quad == 1 ? ~0u : 0;
    std::uint32_t a[4][4], shift[4] = {}, most[2] = {}, best[2] = {};
    float offset[2];
#pragma unroll
    for (int d = 0; d < 4; ++d)
      ldmatrix_x4(a[d], tile.address(warp_row + lane % 16, 16 * d + lane / 16 * 8));
#pragma unroll
    for (int d = 0; d < 4; ++d)
#pragma unroll
      for (int i = 0; i < 4; ++i) most[i % 2] = __vmaxu2(most[i % 2], a[d][i] & 0x7fff7fffu);
#pragma unroll
    for (int side = 0; side < 2; ++side) most[side] = max(most[side] & 0xffffu, most[side] >> 16);
#pragma unroll
    for (int step = 1; step <= 2; step *= 2)
#pragma unroll
      for (int side = 0; side < 2; ++side)
        most[side] = max(most[side], __shfl_xor_sync(~0u, most[side], step));
#pragma unroll
    for (int side = 0; side < 2; ++side) {
      offset[side] = key_offset(magnitude<T>(most[side]), bounds.x, bounds.y);
      // 1, 1 | 1, K in bf16: K has two significant bits
      shift[side] =
          ones | (((__float_as_uint(offset[side]) & 0xffff0000u) | 0x3f80u) & with_offset);
    }
    const int columns = (args.shape.clusters + kStep - 1) / kStep * kStep;
    // Descriptors are advanced from step to step, so that products are issued back to back.
    std::uint64_t table[4],
        bias = narrow_descriptor(shared_address(memory.table) + kClusters * 128);
#pragma unroll
    for (int step = 0; step < 4; ++step)
      table[step] = matrix_descriptor(shared_address(memory.table) + step * 32);
#pragma unroll 1
    for (int column = 0; column < columns; column += kStep) {
      float d[kStep / 2];
      wgmma_fence();
      wgmma<T, 0, 0>(d, a[0], table[0]);
#pragma unroll
      for (int step = 1; step < 4; ++step) wgmma<T, 1, 0>(d, a[step], table[step]);
      // Last, so that the bits which adding K rounds off are lost only once.
      wgmma<Bf16, 1, 0>(d, shift, bias);
#pragma unroll
      for (int step = 0; step < 4; ++step)
        table[step] = descriptor_behind(table[step], kStep * 128);
      bias = descriptor_behind(bias, kStep * kBiasBytes);
      wgmma_commit();
      wgmma_wait<0>();
      wgmma_settle(d);
      std::uint32_t found[2] = {};
#pragma unroll
      for (int j = 0; j < kStep / 8; ++j)
#pragma unroll
        for (int side = 0; side < 2; ++side)
          found[side] = best_key(found[side], d[4 * j + 2 * side], d[4 * j + 2 * side + 1],
                                 args.key_scale, 511 - 8 * j);
#pragma unroll
      for (int side = 0; side < 2; ++side)
        best[side] = max(best[side], found[side] - static_cast<std::uint32_t>(column + 2 * quad));
    }
#pragma unroll
    for (int step = 1; step <= 2; step *= 2)
#pragma unroll
      for (int side = 0; side < 2; ++side)
        best[side] = max(best[side], __shfl_xor_sync(~0u, best[side], step));
    // The first two of four lanes write a label each.
    const unsigned row = group * 64 + warp_row + quad % 2 * 8 + lane / 4;
    const bool valid = (quad % 2 ? offset[1] : offset[0]) < INFINITY;
    const int number = 511 - static_cast<int>((quad % 2 ? best[1] : best[0]) & 511u);
    const int label = valid ? min(number, args.shape.clusters - 1) : 0;
    if (quad < 2) {
      memory.labels[place(round)][row % 32 * 8 + row / 32] = static_cast<std::uint8_t>(label);
      if (last && static_cast<int>(row) < left(round))
        args.run.out.labels[first_row(round) + row] = label;
    }
    if (__any_sync(~0u, max(most[0], most[1]) >= kInfinity<T>)) clear(tile, warp_row, most);
    mbarrier_arrive(ready(round));
  }

  // Clears rows that are not finite: 0 times such a row would spoil all sums.
  __device__ void clear(const Tile<T, 64>& tile, int warp_row,
                        const std::uint32_t (&most)[2]) const {
    const int lane = own_lane(), quad = lane % 4;
    for (int side = 0; side < 2; ++side) {
      if ((side ? most[1] : most[0]) < kInfinity<T>) continue;
      const int r = warp_row + 8 * side + lane / 4;
      store_shared16(tile.chunk(r, 2 * quad), make_uint4(0, 0, 0, 0));
      store_shared16(tile.chunk(r, 2 * quad + 1), make_uint4(0, 0, 0, 0));
      memory.poisoned = 1;
    }
  }

  __device__ __forceinline__ static void store_where(bool condition, std::uint32_t* to,
                                                     std::uint32_t word) {
    asm volatile("{.reg .pred p; setp.ne.b32 p, %0, 0; @p st.shared.b32 [%1], %2;}" ::"r"(
                     static_cast<int>(condition)),
                 "r"(shared_address(to)), "r"(word)
                 : "memory");
  }

  // Lists the round's rows of this warp's clusters, in order; padded to a multiple of 16.
  __device__ __forceinline__ int list(int round, std::uint32_t* entries) const {
    const int lane = own_lane();
    const uint2 packed = reinterpret_cast<const uint2*>(memory.labels[place(round)])[lane];
    const int count = left(round);
    const std::uint32_t own = warp * 0x10101010u, below = (1u << lane) - 1;
    const std::uint32_t low = static_cast<std::uint32_t>(lane) << 16 | kNumber;
    int found = 0;
#pragma unroll
    for (int i = 0; i < kRound / 32; ++i) {
      const std::uint32_t word = (i < 4 ? packed.x : packed.y) ^ own;
      const bool mine = (word & 0xf0u << i % 4 * 8) == 0 && 32 * i + lane < count;
      const unsigned lanes = __ballot_sync(~0u, mine);
      store_where(mine, entries + found + __popc(lanes & below),
                  (low + (32u * i << 16)) | (word >> i % 4 * 8 & 15u));
      found += __popc(lanes);
    }
    if (lane < 16) entries[found + lane] = kNobody;
    __syncwarp();
    return found;
  }

  // Ranks of the listed rows among those of their cluster; lane c counts cluster c.
  __device__ __forceinline__ void rank(int round, const std::uint32_t* entries, int found,
                                       int& members) const {
    const int lane = own_lane();
    std::int32_t* ranks = args.ranks + first_row(round);
#pragma unroll 1
    for (int first = 0; first < found; first += 32) {
      const bool there = first + lane < found;
      const std::uint32_t entry = there ? entries[first + lane] : 0;
      unsigned alike = __ballot_sync(~0u, there), own = alike;
#pragma unroll
      for (int bit = 0; bit < 4; ++bit) {
        const unsigned lanes = __ballot_sync(~0u, entry >> bit & 1);
        alike &= entry >> bit & 1 ? lanes : ~lanes;
        own &= lane >> bit & 1 ? lanes : ~lanes;
      }
      const int before = __shfl_sync(~0u, members, entry & 15);
      if (there) ranks[entry >> 16] = before + __popc(alike & ((1u << lane) - 1));
      members += __popc(own);
    }
  }

  // Adds the listed rows of a round to the sums of this warp's clusters, and to their counts.
  __device__ __forceinline__ void add(int round, const std::uint32_t* entries, int found,
                                      float (&sums)[kWidth / 8][4], float (&counts)[4]) const {
    const int lane = own_lane();
    const std::uint32_t own[2] = {(kNumber | lane / 4) * 0x10001u,
                                  (kNumber | (lane / 4 + 8)) * 0x10001u};
    const std::uint32_t one = pack2<T>(1.0f, 1.0f), ones[2] = {one, one};
    const Tile<T, kWidth> tile{slot(round)};
#pragma unroll 1
    for (int first = 0; first < found; first += 16) {
      const uint2* pairs = reinterpret_cast<const uint2*>(entries + first) + lane % 4;
      const std::uint32_t row = entries[first + lane % 16] >> 16;
      const uint2 low = pairs[0], high = pairs[4];
      std::uint32_t right[kWidth / 16][4];
#pragma unroll
      for (int n = 0; n < kWidth / 16; ++n)
        ldmatrix_x4_trans(right[n], tile.chunk(row, 2 * n + lane / 16));
      const std::uint32_t numbers[2] = {__byte_perm(low.x, low.y, 0x5410),
                                        __byte_perm(high.x, high.y, 0x5410)};
      std::uint32_t left[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) left[i] = equal_pairs(numbers[i / 2], own[i % 2], T());
      mma_m16n8k16<T>(counts, left, ones, counts);
#pragma unroll
      for (int n = 0; n < kWidth / 8; ++n)
        mma_m16n8k16<T>(sums[n], left, right[n / 2] + n % 2 * 2, sums[n]);
    }
  }

  // Writes the warp's sums to global memory, added to those there if `more`, and clears them.
  __device__ __forceinline__ void flush(float (&sums)[kWidth / 8][4], bool more) const {
    const int lane = own_lane();
    const std::int64_t row = part(team.rank) + warp * kOwn;
    auto* to = reinterpret_cast<float2*>(args.sums + row * kWidth) + lane / 4 * 32 + lane % 4;
    if (more)
#pragma unroll
      for (int n = 0; n < kWidth / 8; ++n)
#pragma unroll
        for (int side = 0; side < 2; ++side) {
          const float2 before = to[4 * n + 256 * side];
          sums[n][2 * side] += before.x;
          sums[n][2 * side + 1] += before.y;
        }
#pragma unroll
    for (int n = 0; n < kWidth / 8; ++n)
#pragma unroll
      for (int side = 0; side < 2; ++side) {
        to[4 * n + 256 * side] = make_float2(sums[n][2 * side], sums[n][2 * side + 1]);
        sums[n][2 * side] = sums[n][2 * side + 1] = 0.0f;
      }
  }

  // Labels the block's rows and writes its clusters' sums and sizes to global memory.
  __device__ void pass(bool last) {
    constexpr int kTogether = 64;  // rounds that the tensor cores sum: their sums lose digits
    const float2 bounds = table_bounds();
    float sums[kWidth / 8][4] = {}, counts[4] = {};
    int members = 0;
#pragma unroll 1
    for (int round = 0; round <= rounds; ++round) {
      if (round < rounds) {
        cp_async_wait<1>();
        __syncwarp();
        label(round, bounds, last);
        if (done + round >= 2) mbarrier_wait(free(round + 2), phase(round - 2));
        load(round + 2);
      }
      if (round > 0) {
        std::uint32_t* entries = memory.lists[warp];
        mbarrier_wait(ready(round - 1), phase(round - 1));
        const int found = list(round - 1, entries);
        if (last) rank(round - 1, entries, found, members);
        add(round - 1, entries, found, sums, counts);
        __syncwarp();  // before the next list
        mbarrier_arrive(free(round - 1));
      } else if (rounds > 0) {
        continue;
      }
      if (round % kTogether == 0 || round == rounds) flush(sums, round > kTogether);
    }
    cp_async_wait<0>();
    __syncthreads();
    done += rounds;
    const std::int64_t start = part(team.rank);
    const int lane = own_lane();
    if (lane % 4 == 0) {
      args.counts[start + warp * kOwn + lane / 4] = static_cast<int>(counts[0]);
      args.counts[start + warp * kOwn + lane / 4 + 8] = static_cast<int>(counts[2]);
    }
    if (memory.poisoned && threadIdx.x < kWidth) args.sums[start * kWidth + threadIdx.x] = NAN;
  }

  // Returns the rounds so far.
  __device__ int run(FirstTeamSync& first_sync) {
    fill_padding(args.shape, team, item, head, args.run.out.labels, args.run.out.order);
    if (span.length <= args.shape.clusters) {
      run_single();
      return done;
    }
    make_metric(first_sync);
    load(0);
    load(1);
#pragma unroll 1
    for (int number = 0;; ++number) {
      // Every block makes the whole first table itself; the team shares later ones.
      const bool alone = number == 0;
      const RowRange own = share();
      weigh(alone ? 0 : own.begin, alone ? kClusters : own.end - own.begin);
      if (!alone) share_table();
      if (!alone) {
        team.sync();
        stage_table();
      }
      pass(number + 1 == args.run.passes);
      if (number + 1 == args.run.passes) break;
      team.arrive();
      load(0);
      load(1);
      team.wait();
      write_means(args.centroids, true);
      __syncthreads();
    }
    team.arrive();
    const auto places = load_places(static_cast<int>(threadIdx.x));
    team.wait();
    const auto members = load_members();
    if (args.run.means) write_means(args.run.means, false);
    write_order(members, places);
    __syncthreads();  // before the next problem's keys
    return done;
  }
};

template <class T>
__global__ void __launch_bounds__(kThreads, 1)
    key_kmeans_kernel(const __grid_constant__ KeyKMeansArgs<T> args) {
  extern __shared__ __align__(1024) unsigned char shared[];
  Memory& memory = *reinterpret_cast<Memory*>(shared);
  if (threadIdx.x < kSlots) {
    mbarrier_init(shared_address(memory.ready + threadIdx.x), kThreads);
    mbarrier_init(shared_address(memory.free + threadIdx.x), kThreads);
  }
  Team team(args.teams);
  await_writes();
  FirstTeamSync first_sync(team);
  args.run.zeroed.zero();
  int done = 0;
  for (int number = team.number; number < args.shape.problems(); number += args.teams.count)
    done = KeyKMeans<T>(args, memory, team, number, done).run(first_sync);
}

}  // namespace

bool key_kmeans_fits(const AttentionCall& call, const ClusterShape& shape) {
  constexpr int kFewProblems = 8, kFewRows = 8192;  // fewer, larger problems need more blocks
  return call.inputs.q.dtype != DType::f32 && call.Dk <= kWidth && shape.clusters <= kClusters &&
         (shape.problems() >= kFewProblems || shape.rows <= kFewRows) && shape.rows < kMostRows &&
         on_hopper();
}

bool key_kmeans_serves(const AttentionCall& call, const ClusterShape& shape) {
  return tensor4<const F16>(call.inputs.q).aligned && tensor4<const F16>(call.k).aligned &&
         key_kmeans_fits(call, shape);
}

KeyKMeansPlan::KeyKMeansPlan(Arena& arena, const AttentionCall& call, const ClusterShape& of)
    : shape(of), teams(make_teams(of.problems(), of.rows, multiprocessors(), nullptr)) {
  teams.size = min(teams.size, kMostParts);
  teams.count = min(of.problems(), multiprocessors() / teams.size);
  const std::int64_t parts = static_cast<std::int64_t>(teams.blocks()) * kClusters;
  sums = arena.take<float>(parts * kWidth);
  counts = arena.take<std::int32_t>(parts);
  ranks = arena.take<std::int32_t>(call.B * call.H * call.N);
  tables = arena.take<unsigned char>(static_cast<std::int64_t>(teams.count) * kSharedTableBytes);
  teams.arrivals = arena.take<unsigned>(teams.count);
}

void key_kmeans(const AttentionCall& call, const KeyKMeansPlan& plan,
                const KeyMetricBuffers& metric, const KeyKMeansRun& run, cudaStream_t stream) {
  const auto launch = [&](auto tag) {
    using T = typename decltype(tag)::type;
    const KeyKMeansArgs<T> args{plan,
                                tensor4<const T>(call.inputs.q),
                                tensor4<const T>(call.k),
                                metric.covariance,
                                metric.centroids,
                                run,
                                static_cast<int>(call.Dk),
                                512};
    launch_cooperative_early(key_kmeans_kernel<T>, plan.teams.blocks(), kThreads, sizeof(Memory),
                             stream, args);
  };
  if (call.inputs.q.dtype == DType::bf16)
    launch(TypeTag<Bf16>{});
  else
    launch(TypeTag<F16>{});
}

}  // namespace coterie::cuda
