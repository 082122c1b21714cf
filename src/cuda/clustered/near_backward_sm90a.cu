// SPDX-License-Identifier: MIT
// near_gradient_kernel of near_backward.cu by Hopper's warpgroup products, for 16-bit types. A
// kernel for each side; a block is one warpgroup.
//
// query_kernel: grid (tiles of 64 queries, H). Left factors are the queries, the means of their
// clusters and the output gradients; walks their near keys.
//   S = Q Kᵀ, dP = G Vᵀ, Z = M Kᵀ      dq += dS K, dmean -= dR K      delta = g . out
// key_kernel: grid (tiles of 64 keys, key heads). Walks the queries that are near, 32 at a time, of
// all query heads of the key head; reads delta.
//   Sᵀ = K Qᵀ, dPᵀ = V Gᵀ, Zᵀ = K Mᵀ   dk += dSᵀ Q - dRᵀ M, dv += (P - R)ᵀ G
// A warp's 16 rows have the same near rows, in groups of 16; weights of other pairs of a tile are 0
// and not computed. Heads that add their far keys have no R.
// Shared memory for rows of 64 (128) elements: queries 56 (80) KiB, keys 64 (80) KiB. Launch
// bounds: 3 (2) blocks per multiprocessor. Every sum has one writer and a fixed order.
#include <cstdint>

#include "cuda/clustered/near.cuh"
#include "cuda/launch/dispatch.h"
#include "cuda/launch/launch.h"
#include "cuda/prim/bands.cuh"
#include "cuda/prim/dependent.cuh"

namespace coterie::cuda {
namespace {

constexpr int kRows = 64;  // of a block

template <int kBands>
__device__ __forceinline__ void settle(float (&sum)[kBands][32]) {
#pragma unroll
  for (int band = 0; band < kBands; ++band) wgmma_settle(sum[band]);
}
template <int kBands>
__device__ __forceinline__ void clear(float (&sum)[kBands][32]) {
#pragma unroll
  for (int i = 0; i < kBands * 32; ++i) sum[i / 32][i % 32] = 0.0f;
  settle(sum);
}

// Adds rows in shared memory to the block's rows.
template <class T, int kWidth>
__device__ __forceinline__ void add_rows(float (&sum)[kWidth / 64][32],
                                         const Bands<T, kWidth, kRows>& rows) {
#pragma unroll
  for (int i = 0; i < kWidth / 4; ++i) {  // pairs of columns: upper and lower row in turn
    const int band = i / 16, chunk = i / 2 % 8, side = i % 2;
    const std::uint32_t from =
        Tile<T, 64>{rows.base + band * rows.kBandBytes}.chunk(group_row(side), chunk) +
        threadIdx.x % 4 * 4;
    std::uint32_t word;
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(word) : "r"(from) : "memory");
    const float2 two = unpack2<T>(word);
    float* pair = sum[band] + 4 * chunk + 2 * side;
    pair[0] += two.x;
    pair[1] += two.y;
  }
}

template <int kBands>
__device__ __forceinline__ void scale_rows(float (&sum)[kBands][32], float factor) {
#pragma unroll
  for (int i = 0; i < kBands * 32; ++i) sum[i / 32][i % 32] *= factor;
}
// Writes the block's rows; `count` of them exist.
template <class T, int kBands>
__device__ __forceinline__ void store_rows(const Rows<T>& to, const float (&sum)[kBands][32],
                                           int count) {
#pragma unroll
  for (int band = 0; band < kBands; ++band) store_band(to, sum[band], 0, count, 64 * band);
}

// A query without weights has an lse of +inf, which makes its weights 0.
__device__ __forceinline__ float base2_lse(float lse) {
  return lse == -INFINITY ? INFINITY : lse * kLog2e;
}

template <class T>
__device__ __forceinline__ std::int64_t first_query(const BackwardArgs<T>& args,
                                                    const ItemSpan& span, int head) {
  return (static_cast<std::int64_t>(span.batch) * args.shape.H + head) * args.shape.N + span.begin;
}

// Shared memory of query_kernel.
template <class T, int kWidth>
struct QueryShape {
  static constexpr int kKeys = 32;                        // of a tile
  static constexpr int kSpan = 512, kWords = kSpan / 32;  // keys whose bits of top keys are kept
  using Owned = Bands<T, kWidth, kRows>;
  using Walked = Bands<T, kWidth, kKeys>;
  static constexpr int kRing = kWidth == 64 ? 4 : 2;
  static constexpr int kBytes = 3 * Owned::kBytes + 2 * kRing * Walked::kBytes;
};

template <class T, int kWidth>
__global__ void __launch_bounds__(kNearThreads, kWidth == 64 ? 3 : 2)
    query_kernel(const __grid_constant__ BackwardArgs<T> args,
                 const __grid_constant__ CentroidQueries queries, ItemChunks tiles) {
  await_writes();  // first: later kernels read what earlier ones wrote before they wait
  release_next();
  using S = QueryShape<T, kWidth>;
  constexpr int kKeys = S::kKeys, kWords = S::kWords, kRing = S::kRing;
  extern __shared__ __align__(1024) unsigned char memory[];
  __shared__ std::int32_t clusters[kRows];
  __shared__ float lses[kRows], deltas[kRows];
  __shared__ std::uint32_t top_words[kRows * kWords];
  const int head = static_cast<int>(blockIdx.y), kv_head = head / args.shape.group,
            thread = static_cast<int>(threadIdx.x);
  const ItemChunk own = tiles.find(queries.spans.q, static_cast<int>(blockIdx.x));
  if (own.begin >= own.end) return;
  const int count = own.end - own.begin, near = args.shape.near, topk = args.shape.topk;
  const std::int64_t line = first_query(args, own.span, head) + own.begin;
  if (thread < kRows) {
    const bool there = thread < count;
    clusters[thread] = there ? args.lists.labels[line + thread] : -1;
    lses[thread] = there ? base2_lse(args.lists.lse[line + thread]) : INFINITY;
  }
  const bool subtract = !args.adds(own.item, head);
  const ItemSpan k_span = queries.spans.k.span(own.item);
  const int length = k_span.length;
  const int first = NearRange(own.begin, near, length).begin,
            end = NearRange(own.end - 1, near, length).end;
  const typename S::Owned q{shared_address(memory)}, means{q.base + S::Owned::kBytes},
      g{q.base + 2 * S::Owned::kBytes};
  const auto tile = [&](int number, int tensor) {
    return typename S::Walked{q.base + 3 * S::Owned::kBytes +
                              (number % kRing * 2 + tensor) * S::Walked::kBytes};
  };
  q.template load<kRows, kNearThreads>(0, args.q.rows(own.span.batch, head, own.span.begin),
                                       own.begin, count);
  g.template load<kRows, kNearThreads>(0, args.g.rows(own.span.batch, head, own.span.begin),
                                       own.begin, count);
  cp_async_commit();
  const Rows<const T> k = args.k.rows(k_span.batch, kv_head, k_span.begin),
                      v = args.v.rows(k_span.batch, kv_head, k_span.begin);
  const auto load_keys = [&](int number) {
    const int begin = first + number * kKeys;
    if (begin < end) {
      tile(number, 0).template load<kKeys, kNearThreads>(0, k, begin, end - begin);
      tile(number, 1).template load<kKeys, kNearThreads>(0, v, begin, end - begin);
    }
    cp_async_commit();
  };
  // Two threads have half a row of the output each.
  constexpr int kHalf = kWidth / 16;  // chunks of 8 elements
  const int row = thread / 2, chunk0 = thread % 2 * kHalf;
  uint4 outs[kHalf];
  {
    const Rows<const T> out = args.out.rows(own.span.batch, head, own.span.begin);
    const T* from = out.row(own.begin + min(row, count - 1));
#pragma unroll
    for (int i = 0; i < kHalf; ++i) {
      const int column = (chunk0 + i) * 8;
      outs[i] = make_uint4(0, 0, 0, 0);
      if (column < out.width)
        outs[i] = out.aligned ? *reinterpret_cast<const uint4*>(from + column)
                              : load_chunk(from, column, out.width);
    }
  }
  const std::int64_t problem = queries.row(own.item, head, 0);  // its first mean
  const bool top = subtract && topk > 0;
  // Which keys from `begin` on are top keys; the caller synchronises the threads.
  const auto find_top = [&](int begin) {
    if (!top || thread >= kRows) return;
#pragma unroll 1
    for (int w = 0; w < kWords && 32 * w < end - begin; ++w) top_words[w * kRows + thread] = 0;
    if (thread >= count) return;
    args.scratch.near_top[line + thread].for_each(
        args.lists.top_keys + (problem + clusters[thread]) * topk, [&](int key) {
          const auto at = static_cast<unsigned>(key - begin);
          if (at < S::kSpan) top_words[at / 32 * kRows + thread] |= 1u << at % 32;
        });
  };
  __syncthreads();
  means.template load<kRows, kNearThreads>(
      0, {args.scratch.mean + problem * kWidth, kWidth, kWidth, true}, 0, subtract ? kRows : 0,
      clusters);
#pragma unroll
  for (int number = 0; number < kRing; ++number) load_keys(number);
  find_top(first);
  cp_async_wait<kRing>();
  __syncthreads();
  {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kHalf; ++i) {
      const int chunk = chunk0 + i;
      const uint4 words = load_shared16(
          Tile<T, 64>{g.base + chunk / 8 * S::Owned::kBandBytes}.chunk(row, chunk % 8));
      float a[8] = {}, b[8] = {};
      add_chunk<T>(a, outs[i]);
      add_chunk<T>(b, words);
#pragma unroll
      for (int e = 0; e < 8; ++e) sum = fmaf(a[e], b[e], sum);
    }
    sum += __shfl_xor_sync(~0u, sum, 1);
    if (thread % 2 == 0) {
      deltas[row] = sum;
      if (row < count) args.scratch.delta[line + row] = sum;
    }
  }
  __syncthreads();

  const int lane = thread % 32, warp_row = thread / 32 * 16;
  const NearRange range(own.begin + warp_row, near, length);
  const float exponent = args.shape.scale * kLog2e;
  const float lse[2] = {lses[group_row(0)], lses[group_row(1)]},
              delta[2] = {deltas[group_row(0)], deltas[group_row(1)]};
  float dq[kWidth / 64][32], dmean[kWidth / 64][32];
  clear(dq);
  clear(dmean);
#pragma unroll 1
  for (int number = 0, begin = first; begin < end; ++number, begin += kKeys) {
    if (number > 0 && number % (S::kSpan / kKeys) == 0) find_top(begin);
    cp_async_wait<kRing - 1>();
    fence_async_proxy();
    __syncthreads();
    const typename S::Walked keys = tile(number, 0), values = tile(number, 1);
    float s[kKeys / 2], d[kKeys / 2];
    std::uint32_t ds[kKeys / 16][4], dr[kKeys / 16][4];
    // Weights of scores, times dP - delta; 0 for keys that are not near or not there.
    const auto differentiate = [&] {
#pragma unroll
      for (int group = 0; group < kKeys / 16; ++group) {
        const int key = begin + 16 * group;
        if (key < range.begin || key >= range.end) {
#pragma unroll
          for (int i = 8 * group; i < 8 * group + 8; ++i) s[i] = 0.0f;
          continue;
        }
#pragma unroll
        for (int i = 8 * group; i < 8 * group + 8; ++i)
          s[i] = exp2_approximate(fmaf(s[i], exponent, -lse[i / 2 % 2])) * d[i];
      }
      if (range.end >= begin + kKeys) return;
#pragma unroll
      for (int i = 0; i < kKeys / 2; ++i)
        if (begin + i / 4 * 8 + lane % 4 * 2 + i % 2 >= range.end) s[i] = 0.0f;
    };
    wgmma_fence();
    start_products(s, q, keys);
    start_products(d, g, values);
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_settle(s);
    wgmma_settle(d);
#pragma unroll
    for (int i = 0; i < kKeys / 2; ++i) d[i] -= delta[i / 2 % 2];
    differentiate();
    round_factor<T>(ds, s);
    wgmma_fence();
    start_sums(dq, ds, keys);
    start_products(s, means, keys);
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_settle(s);
    settle(dq);
    differentiate();
    if (top) {
#pragma unroll
      for (int part = 0; part < kKeys / 16; ++part) {
        const int half = part % 2;
        const std::uint32_t bits =
            top_words[((begin - first) % S::kSpan / 32 + part / 2) * kRows + group_row(half)] >>
            (lane % 4 * 2);
        if ((bits & 0x03030303u) == 0) continue;
#pragma unroll
        for (int i = 0; i < 8; ++i)
          if (bits >> (i / 2 * 8 + i % 2) & 1)
            s[part / 2 * 16 + i / 2 * 4 + 2 * half + i % 2] = 0.0f;
      }
    }
    round_factor<T>(dr, s);
    wgmma_fence();
    start_sums(dmean, dr, keys);
    wgmma_commit();
    wgmma_wait<0>();
    settle(dmean);
    if (begin + kKeys >= end) break;
    __syncthreads();
    load_keys(number + kRing);
  }

  if (!args.dq.data) return;
  scale_rows(dq, args.shape.scale);
  store_rows(args.dq.rows(own.span.batch, head, own.span.begin + own.begin), dq, count);
  if (!subtract) return;
  scale_rows(dmean, -args.shape.scale);
  store_rows(Rows<T>{args.scratch.near_dmean + line * kWidth, kWidth, kWidth, true}, dmean, count);
}

// Shared memory of key_kernel: a ring of tiles of queries, and what belongs to their rows, which is
// loaded earlier.
constexpr int kQueries = 32;  // of a tile
constexpr int kAhead = 4, kPlaces = 8;
struct QueryRows {
  std::int32_t clusters[kQueries];
  float lse[kQueries], delta[kQueries];
  NearTopKeys near_top[kQueries];
  // Of a warp's 16 keys, those that are top keys of a query.
  alignas(4) std::uint16_t top[4][kQueries];
};
template <class T, int kWidth>
struct KeyShape {
  static constexpr int kRing = kWidth == 64 ? 4 : 2;
  static_assert(kRing <= kAhead && kAhead < kPlaces, "places of rows in use");
  using Owned = Bands<T, kWidth, kRows>;
  using Walked = Bands<T, kWidth, kQueries>;
  static constexpr int kBytes = 2 * Owned::kBytes + kRing * 3 * Walked::kBytes;
};

template <class T, int kWidth>
__global__ void __launch_bounds__(kNearThreads, kWidth == 64 ? 3 : 2)
    key_kernel(const __grid_constant__ BackwardArgs<T> args,
               const __grid_constant__ CentroidQueries queries, ItemChunks tiles) {
  await_previous();
  using S = KeyShape<T, kWidth>;
  constexpr int kRing = S::kRing;
  extern __shared__ __align__(1024) unsigned char memory[];
  __shared__ QueryRows rows[kPlaces];
  const int kv_head = static_cast<int>(blockIdx.y), group = args.shape.group,
            thread = static_cast<int>(threadIdx.x);
  const ItemChunk own = tiles.find(queries.spans.k, static_cast<int>(blockIdx.x));
  if (own.begin >= own.end) return;
  const int count = own.end - own.begin, near = args.shape.near, topk = args.shape.topk;
  const ItemSpan q_span = queries.spans.q.span(own.item);
  const int length = q_span.length;
  const int first = NearRange(own.begin, near, length).begin,
            end = NearRange(own.end - 1, near, length).end;
  const int per_head = (end - first + kQueries - 1) / kQueries, total = group * per_head;
  const bool subtract = !args.adds(own.item, kv_head * group), top = subtract && topk > 0;
  const typename S::Owned k{shared_address(memory)}, v{k.base + S::Owned::kBytes};
  const auto tile = [&](int number, int tensor) {
    return typename S::Walked{k.base + 2 * S::Owned::kBytes +
                              (number % kRing * 3 + tensor) * S::Walked::kBytes};
  };
  // Tile `number`: its head, its first query.
  const auto head_of = [&](int number) {
    return kv_head * group + (group == 1 ? 0 : number / per_head);
  };
  const auto begin_of = [&](int number) {
    return first + (group == 1 ? number : number % per_head) * kQueries;
  };
  struct Facts {
    int cluster;
    float lse, delta;
    NearTopKeys near_top;
  };
  const auto fetch = [&](int number, int r) {
    Facts facts{-1, INFINITY, 0.0f, {0}};
    if (number >= total || begin_of(number) + r >= end) return facts;
    const std::int64_t at = first_query(args, q_span, head_of(number)) + begin_of(number) + r;
    facts.cluster = args.lists.labels[at];
    facts.lse = base2_lse(args.lists.lse[at]);
    facts.delta = args.scratch.delta[at];
    if (top) facts.near_top = args.scratch.near_top[at];
    return facts;
  };
  const auto put = [&](int number, int r, const Facts& facts) {
    QueryRows& to = rows[number % kPlaces];
    to.clusters[r] = facts.cluster;
    to.lse[r] = facts.lse;
    to.delta[r] = facts.delta;
    to.near_top[r] = facts.near_top;
  };
  // After a barrier behind put.
  const auto load = [&](int number) {
    if (number < total) {
      const int head = head_of(number), begin = begin_of(number);
      QueryRows& place = rows[number % kPlaces];
      tile(number, 0).template load<kQueries, kNearThreads>(
          0, args.q.rows(q_span.batch, head, q_span.begin), begin, end - begin);
      tile(number, 2).template load<kQueries, kNearThreads>(
          0, args.g.rows(q_span.batch, head, q_span.begin), begin, end - begin);
      const std::int64_t problem = queries.row(own.item, head, 0);  // its first mean
      tile(number, 1).template load<kQueries, kNearThreads>(
          0, {args.scratch.mean + problem * kWidth, kWidth, kWidth, true}, 0,
          subtract ? kQueries : 0, place.clusters);
      if (top && thread < kQueries) {
        std::uint64_t bits = 0;
        place.near_top[thread].for_each(
            args.lists.top_keys + (problem + max(place.clusters[thread], 0)) * topk, [&](int key) {
              const auto at = static_cast<unsigned>(key - own.begin);
              if (at < static_cast<unsigned>(kRows)) bits |= 1ull << at;
            });
#pragma unroll
        for (int warp = 0; warp < 4; ++warp)
          place.top[warp][thread] = static_cast<std::uint16_t>(bits >> (16 * warp));
      }
    }
    cp_async_commit();
  };
  k.template load<kRows, kNearThreads>(0, args.k.rows(own.span.batch, kv_head, own.span.begin),
                                       own.begin, count);
  v.template load<kRows, kNearThreads>(0, args.v.rows(own.span.batch, kv_head, own.span.begin),
                                       own.begin, count);
  static_assert(kAhead * kQueries == kNearThreads, "a row for each thread");
  put(thread / kQueries, thread % kQueries, fetch(thread / kQueries, thread % kQueries));
  __syncthreads();
#pragma unroll
  for (int number = 0; number < kRing - 1; ++number) load(number);

  // What the gradients of the centroids have written; heads that add their far keys have none.
  const auto load_sums = [&](const typename S::Owned& to, const Tensor4<T>& tensor) {
    if (!tensor.data) return;
    const Rows<T> from = tensor.rows(own.span.batch, kv_head, own.span.begin);
    to.template load<kRows, kNearThreads>(0, {from.data, from.pitch, from.width, from.aligned},
                                          own.begin, count);
  };

  const int lane = thread % 32, warp_row = thread / 32 * 16;
  const NearRange range(own.begin + warp_row, near, length);
  const float exponent = args.shape.scale * kLog2e;
  float dk[kWidth / 64][32], dv[kWidth / 64][32];
  clear(dk);
  clear(dv);
#pragma unroll 1
  for (int number = 0; number < total; ++number) {
    if (number > 0) __syncthreads();  // all have read the tile before: its place is free
    load(number + kRing - 1);
    Facts later{};
    if (thread < kQueries) later = fetch(number + kAhead, thread);
    cp_async_wait<kRing - 1>();
    fence_async_proxy();
    __syncthreads();
    const QueryRows& place = rows[number % kPlaces];
    const int begin = begin_of(number);
    float s[16], d[16], z[16];
    wgmma_fence();
    start_products(s, k, tile(number, 0));
    start_products(d, v, tile(number, 2));
    start_products(z, k, tile(number, 1));
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_settle(s);
    wgmma_settle(d);
    wgmma_settle(z);
    if (thread < kQueries) put(number + kAhead, thread, later);
    if (number + 1 == total && subtract) {
      __syncthreads();  // all have read the keys and values: the sums so far take their place
      load_sums(k, args.dk);
      load_sums(v, args.dv);
      cp_async_commit();
    }
    // Pairs of queries in columns: s becomes P - R, d and z become dS and -dR.
#pragma unroll
    for (int column = 0; column < kQueries; column += 8) {
      const int query = begin + column / 16 * 16;
      const bool inside = query >= range.begin && query < range.end;
      const int at = column + lane % 4 * 2;
      const float2 lse = *reinterpret_cast<const float2*>(place.lse + at),
                   delta = *reinterpret_cast<const float2*>(place.delta + at);
      if (!inside) {
#pragma unroll
        for (int i = column / 2; i < column / 2 + 4; ++i) s[i] = d[i] = z[i] = 0.0f;
        continue;
      }
#pragma unroll
      for (int i = column / 2; i < column / 2 + 4; ++i) {
        const float shift = i % 2 ? lse.y : lse.x;
        s[i] = exp2_approximate(fmaf(s[i], exponent, -shift));
        z[i] = subtract ? exp2_approximate(fmaf(z[i], exponent, -shift)) : 0.0f;
      }
      const std::uint32_t bits =
          top ? *reinterpret_cast<const std::uint32_t*>(&place.top[warp_row / 16][at]) >> (lane / 4)
              : 0;
      if (bits & 0x01010101u) {
#pragma unroll
        for (int e = 0; e < 4; ++e)
          if (bits >> (e / 2 * 8 + e % 2 * 16) & 1) z[column / 2 + e] = 0.0f;
      }
#pragma unroll
      for (int i = column / 2; i < column / 2 + 4; ++i) {
        const float x = d[i] - (i % 2 ? delta.y : delta.x);
        d[i] = s[i] * x;
        s[i] -= z[i];
        z[i] *= -x;
      }
    }
    std::uint32_t w[2][4], ds[2][4], dr[2][4];
    round_factor<T>(w, s);
    round_factor<T>(ds, d);
    round_factor<T>(dr, z);
    wgmma_fence();
    start_sums(dv, w, tile(number, 2));
    start_sums(dk, ds, tile(number, 0));
    start_sums(dk, dr, tile(number, 1));
    wgmma_commit();
    wgmma_wait<0>();
    settle(dk);
    settle(dv);
  }
  scale_rows(dk, args.shape.scale);
  if (subtract) {
    cp_async_wait<0>();
    __syncthreads();
    add_rows(dk, k);
    add_rows(dv, v);
  }
  const auto store = [&](const Tensor4<T>& tensor, const float(&sum)[kWidth / 64][32]) {
    if (tensor.data)
      store_rows(tensor.rows(own.span.batch, kv_head, own.span.begin + own.begin), sum, count);
  };
  store(args.dk, dk);
  store(args.dv, dv);
}

}  // namespace

template <class T>
void near_query_gradients_sm90a(const BackwardArgs<T>& args, const CentroidQueries& queries,
                                cudaStream_t stream) {
  const BackwardShape& shape = args.shape;
  const ItemChunks tiles = row_tiles(shape.spans.q, shape.items, kRows);
  dispatch_head_dim("clustered", shape.pitch, [&](auto width) {
    constexpr int kWidth = decltype(width)::value;
    launch_early("near_query_gradient", query_kernel<T, kWidth>,
                 dim3(static_cast<unsigned>(tiles.slots), static_cast<unsigned>(shape.H)),
                 kNearThreads, QueryShape<T, kWidth>::kBytes, stream, args, queries, tiles);
  });
}

template <class T>
void near_key_gradients_sm90a(const BackwardArgs<T>& args, const CentroidQueries& queries,
                              cudaStream_t stream) {
  const BackwardShape& shape = args.shape;
  const ItemChunks tiles = row_tiles(shape.spans.k, shape.items, kRows);
  dispatch_head_dim("clustered", shape.pitch, [&](auto width) {
    constexpr int kWidth = decltype(width)::value;
    launch_early(
        "near_key_gradient", key_kernel<T, kWidth>,
        dim3(static_cast<unsigned>(tiles.slots), static_cast<unsigned>(shape.H / shape.group)),
        kNearThreads, KeyShape<T, kWidth>::kBytes, stream, args, queries, tiles);
  });
}

template void near_query_gradients_sm90a(const BackwardArgs<Bf16>&, const CentroidQueries&,
                                         cudaStream_t);
template void near_query_gradients_sm90a(const BackwardArgs<F16>&, const CentroidQueries&,
                                         cudaStream_t);
template void near_key_gradients_sm90a(const BackwardArgs<Bf16>&, const CentroidQueries&,
                                       cudaStream_t);
template void near_key_gradients_sm90a(const BackwardArgs<F16>&, const CentroidQueries&,
                                       cudaStream_t);

}  // namespace coterie::cuda
