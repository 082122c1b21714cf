// SPDX-License-Identifier: MIT
// near_attend_kernel of near_forward.cu, where far keys are subtracted, by Hopper's warpgroup
// products; for 16-bit types.
//
// Grid (tiles of 64 queries, H); a block is one warpgroup, which has 64 queries and the means of
// their clusters as left factors and walks 64 near keys at a time:
//   S = Q Kᵀ, Z = M Kᵀ      out += P V - R V
// The sums start with the rows that do not depend on near keys, those of the mean over all keys but
// its top keys and those of the top keys, which are read while the tiles arrive. A warp's 16
// queries have the same near keys; weights of other keys of a tile are not computed. Z is computed
// by the same products and rounded under whole-numbered shifts as in centroid_sm90a.cu, so that R V
// cancels what was added there up to the rounding of sums. Shared memory: queries, means, two
// stages of keys and values (48 KiB for rows of 64 elements, 96 KiB for 128) and bits of top keys.
// Launch bounds: 3 blocks per multiprocessor, 2 for 128.
#include <cstdint>

#include "cuda/clustered/near.cuh"
#include "cuda/launch/dispatch.h"
#include "cuda/launch/launch.h"
#include "cuda/prim/bands.cuh"
#include "cuda/prim/dependent.cuh"

namespace coterie::cuda {
namespace {

constexpr int kRows = 64;   // queries of a block
constexpr int kKeys = 32;   // of a tile
constexpr int kRing = 4;    // tiles in shared memory
constexpr int kSpan = 512;  // keys whose bits of top keys are kept
constexpr int kWords = kSpan / 32;

// Two rows of a lane, of 64 queries of the block.
template <class T, int kDim>
struct NearSums {
  float out[kDim / 64][32] = {};
  float shift[2];                    // whole numbers, base 2
  float sum[2] = {}, taken[2] = {};  // this lane's weights of near keys, and those of their means

  // Adds a row of `width` elements times a weight, or nothing. All loads of a lane are in flight
  // together.
  template <class From>
  __device__ __forceinline__ void add_row(int half, const From* row, float weight, int width,
                                          bool there) {
    const int first = static_cast<int>(threadIdx.x) % 4 * 2;
    float2 two[kDim / 8];
    if (width == kDim) {
#pragma unroll
      for (int n = 0; n < kDim / 8; ++n) two[n] = load2(row + first + 8 * n);
    } else {
#pragma unroll
      for (int n = 0; n < kDim / 8; ++n) {
        const int left = width - 8 * n - first;
        two[n].x = left > 0 ? to_float(row[first + 8 * n]) : 0.0f;
        two[n].y = left > 1 ? to_float(row[first + 8 * n + 1]) : 0.0f;
      }
    }
    if (!there) return;  // not before: the loads of all lanes are one instruction
#pragma unroll
    for (int n = 0; n < kDim / 8; ++n) {
      float* to = out[n / 8] + n % 8 * 4 + 2 * half;
      to[0] = fmaf(weight, two[n].x, to[0]);
      to[1] = fmaf(weight, two[n].y, to[1]);
    }
  }
  // Raises a shift that is far below the largest score of its row.
  __device__ __forceinline__ void follow(const float (&largest)[2]) {
    const bool above =
        largest[0] > shift[0] + RowSoftmax::kSlack || largest[1] > shift[1] + RowSoftmax::kSlack;
    if (!__any_sync(~0u, above)) return;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float old = shift[half];
      shift[half] = fmaxf(old, ceilf(quad_max(largest[half])));
      const float factor = exp2_approximate(old - shift[half]);
      sum[half] *= factor;
      taken[half] *= factor;
#pragma unroll
      for (int i = 0; i < kDim / 4; ++i) out[i / 16][i % 16 / 2 * 4 + 2 * half + i % 2] *= factor;
    }
  }
  __device__ void settle() {
#pragma unroll
    for (int band = 0; band < kDim / 64; ++band) wgmma_settle(out[band]);
  }
};

template <class T, int kDim>
__global__ void __launch_bounds__(kNearThreads, kDim == 64 ? 4 : 2)
    near_attend_sm90a_kernel(const __grid_constant__ NearArgs<T> args) {
  await_previous();
  extern __shared__ __align__(1024) unsigned char memory[];
  __shared__ std::int32_t clusters[kRows];
  __shared__ std::uint32_t top_words[kRows * kWords];
  using Matrix = Bands<T, kDim, kRows>;
  using Keys = Bands<T, kDim, kKeys>;
  const CentroidQueries& queries = args.queries;
  const int head = static_cast<int>(blockIdx.y), kv_head = head / queries.group;
  const ItemChunk rows = args.tiles.find(queries.spans.q, static_cast<int>(blockIdx.x));
  if (rows.begin >= rows.end) return;
  const int count = rows.end - rows.begin, thread = static_cast<int>(threadIdx.x);
  const std::int64_t line =
      (static_cast<std::int64_t>(rows.span.batch) * queries.H + head) * args.N + rows.span.begin +
      rows.begin;
  if (thread < kRows) clusters[thread] = thread < count ? args.labels[line + thread] : -1;
  const ItemSpan keys_span = queries.spans.k.span(rows.item);
  const int length = keys_span.length;
  const int first = NearRange(rows.begin, args.near, length).begin,
            end = NearRange(rows.end - 1, args.near, length).end;
  const Matrix q{shared_address(memory)}, means{q.base + Matrix::kBytes};
  const auto tile = [&](int number, int tensor) {
    return Keys{q.base + 2 * Matrix::kBytes + (number % kRing * 2 + tensor) * Keys::kBytes};
  };
  const Rows<const T> k = args.k.rows(keys_span.batch, kv_head, keys_span.begin);
  const Rows<const T> v = args.v.rows(keys_span.batch, kv_head, keys_span.begin);
  const auto load_keys = [&](int number) {
    const int begin = first + number * kKeys;
    if (begin < end) {
      tile(number, 0).template load<kKeys, kNearThreads>(0, k, begin, end - begin);
      tile(number, 1).template load<kKeys, kNearThreads>(0, v, begin, end - begin);
    }
    cp_async_commit();
  };
  q.template load<kRows, kNearThreads>(0, args.q.rows(rows.span.batch, head, rows.span.begin),
                                       rows.begin, count);
  const std::int64_t problem = queries.row(rows.item, head, 0);  // its first mean
  NearTopKeys near_top;                                          // of row `thread`
  if (args.near_top && thread < count) near_top = args.near_top[line + thread];
  // Which keys from `begin` on are top keys; the caller synchronises the threads.
  const auto find_top = [&](int begin) {
    if (!args.top_keys || thread >= kRows) return;
#pragma unroll 1
    for (int w = 0; w < kWords && 32 * w < end - begin; ++w) top_words[w * kRows + thread] = 0;
    if (thread >= count) return;
    args.near_top[line + thread].for_each(
        args.top_keys + (problem + max(clusters[thread], 0)) * args.topk, [&](int key) {
          const auto at = static_cast<unsigned>(key - begin);
          if (at < kSpan) top_words[at / 32 * kRows + thread] |= 1u << at % 32;
        });
  };
  __syncthreads();
  means.template load<kRows, kNearThreads>(
      0, {args.means + problem * args.pitch, args.pitch, args.pitch, true}, 0, kRows, clusters);
#pragma unroll
  for (int number = 0; number < kRing; ++number) load_keys(number);

  const int lane = thread % 32, warp_row = thread / 32 * 16, width = args.out.width;
  const NearRange range(rows.begin + warp_row, args.near, length);
  const float exponent = queries.sign * queries.exponent;
  NearSums<T, kDim> own;
  float mean_lse[2], top_lse[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = group_row(half), cluster = max(clusters[row], 0);
    const bool there = row < count;
    mean_lse[half] = there ? args.mean_lse[problem + cluster] * kLog2e : kLowestShift;
    top_lse[half] = args.top && there ? args.top_lse[line + row] * kLog2e : -INFINITY;
    const float largest = fmaxf(mean_lse[half], top_lse[half]);
    own.shift[half] = largest > kLowestShift ? ceilf(largest) : kLowestShift;
    own.add_row(half, args.rest + (problem + cluster) * width,
                exp2_approximate(mean_lse[half] - own.shift[half]), width, there);
    if (args.top)
      own.add_row(half, args.top + (line + min(row, count - 1)) * width,
                  exp2_approximate(top_lse[half] - own.shift[half]), width,
                  top_lse[half] != -INFINITY);
  }
  find_top(first);
#pragma unroll 1
  for (int number = 0, begin = first; begin < end; ++number, begin += kKeys) {
    if (number > 0 && number % (kSpan / kKeys) == 0) find_top(begin);
    cp_async_wait<kRing - 1>();
    fence_async_proxy();
    __syncthreads();
    float s[kKeys / 2], z[kKeys / 2];
    wgmma_fence();
    start_products(s, q, tile(number, 0));
    start_products(z, means, tile(number, 0));
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_settle(s);
    wgmma_settle(z);
#pragma unroll
    for (int i = 0; i < kKeys / 2; ++i) {
      s[i] = __fmul_rn(s[i], exponent);
      z[i] = __fmul_rn(z[i], exponent);
    }
    // Groups of 16 keys are near all 16 queries of the warp or none, but the sequence may end.
    if (range.end < begin + kKeys) {
#pragma unroll
      for (int i = 0; i < kKeys / 2; ++i)
        if (begin + i / 4 * 8 + lane % 4 * 2 + i % 2 >= range.end) s[i] = z[i] = -INFINITY;
    }
    if (args.top_keys) {
#pragma unroll
      for (int part = 0; part < kKeys / 16; ++part) {
        const int half = part % 2;
        const std::uint32_t bits =
            top_words[((begin - first) % kSpan / 32 + part / 2) * kRows + group_row(half)] >>
            (lane % 4 * 2);
        if ((bits & 0x03030303u) == 0) continue;
#pragma unroll
        for (int i = 0; i < 8; ++i)
          if (bits >> (i / 2 * 8 + i % 2) & 1)
            z[part / 2 * 16 + i / 2 * 4 + 2 * half + i % 2] = -INFINITY;
      }
    }
    const auto near = [&](int group) {
      const int key = begin + 16 * group;
      return key >= range.begin && key < range.end;
    };
    float largest[2] = {-INFINITY, -INFINITY};
#pragma unroll
    for (int group = 0; group < kKeys / 16; ++group) {
      if (!near(group)) continue;
#pragma unroll
      for (int i = 8 * group; i < 8 * group + 8; ++i)
        largest[i / 2 % 2] = fmaxf(largest[i / 2 % 2], s[i]);
    }
    own.follow(largest);
#pragma unroll
    for (int group = 0; group < kKeys / 16; ++group) {
      if (!near(group)) {
#pragma unroll
        for (int i = 8 * group; i < 8 * group + 8; ++i) s[i] = z[i] = 0.0f;
        continue;
      }
#pragma unroll
      for (int i = 8 * group; i < 8 * group + 8; ++i) {
        const int half = i / 2 % 2;
        s[i] = exp2_approximate(s[i] - own.shift[half]);
        z[i] = exp2_approximate(z[i] - own.shift[half]);
        own.sum[half] += s[i];
        own.taken[half] += z[i];
        z[i] = -z[i];
      }
    }
    std::uint32_t p[kKeys / 16][4], r[kKeys / 16][4];
    round_factor<T>(p, s);
    round_factor<T>(r, z);
    wgmma_fence();
    start_sums(own.out, p, tile(number, 1));
    start_sums(own.out, r, tile(number, 1));
    wgmma_commit();
    wgmma_wait<0>();
    own.settle();
    if (begin + kKeys >= end) break;
    __syncthreads();
    load_keys(number + kRing);
  }

  bool cancels = false;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = group_row(half);
    const bool there = row < count;
    const float shift = own.shift[half];
    const float weight = exp2_approximate(mean_lse[half] - shift);
    const float total = quad_sum(own.sum[half]) + exp2_approximate(top_lse[half] - shift) +
                        fmaxf(weight - quad_sum(own.taken[half]), 0.0f);
    cancels |= there && !(total * kMostCancelled >= weight);  // also if one is not a number
    const float inverse = total == 0.0f ? 0.0f : 1.0f / total;
#pragma unroll
    for (int i = 0; i < kDim / 4; ++i)
      own.out[i / 16][i % 16 / 2 * 4 + 2 * half + i % 2] *= inverse;
    if (there && lane % 4 == 0) args.lse[line + row] = row_lse(shift, total);
  }
  if (cancels)
    args.cancels[rows.item * (queries.H / queries.group) + kv_head] = 1;  // all write the same
  const Rows<T> out = args.out.rows(rows.span.batch, head, rows.span.begin);
#pragma unroll
  for (int band = 0; band < kDim / 64; ++band)
    store_band(out, own.out[band], rows.begin, count, 64 * band);
}

}  // namespace

template <class T>
void attend_near_sm90a(const NearArgs<T>& args, cudaStream_t stream) {
  dispatch_head_dim("clustered", args.queries.width, [&](auto dim) {
    constexpr int kDim = decltype(dim)::value;
    launch_early(
        "near_attend_sm90a", near_attend_sm90a_kernel<T, kDim>,
        dim3(static_cast<unsigned>(args.tiles.slots), static_cast<unsigned>(args.queries.H)),
        kNearThreads, 2 * Bands<T, kDim, kRows>::kBytes + 2 * kRing * Bands<T, kDim, kKeys>::kBytes,
        stream, args);
  });
}

template void attend_near_sm90a(const NearArgs<Bf16>&, cudaStream_t);
template void attend_near_sm90a(const NearArgs<F16>&, cudaStream_t);

}  // namespace coterie::cuda
