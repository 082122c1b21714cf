// SPDX-License-Identifier: MIT
// Forward pass with near keys (near.h).
//
// near_attend_kernel: a query's near keys, plus its top keys that are not near (computed before, by
// topk.cu), plus its far keys. Grid (tiles of 64 queries, H); 4 warps of 16 queries, which have the
// same near keys, 16 of these at a time. Subtracting (kSubtract): the mean of a query's cluster is
// a second row of scores, whose weights are taken from the sums of the mean over all keys. They are
// rounded as there, under a shift that is a whole number as well, so that only the rounding of sums
// is left of a near key. Adding: the far keys' sums come from far_forward.cu.
// Shared memory: queries, their means, 32 to 128 keys and values: 48 KiB for 16-bit rows of 64
// elements, 96 KiB for f32 rows of 128. Launch bounds: 4 blocks per multiprocessor for 16-bit rows
// of 64. All types and devices; every sum has a fixed order. Dropout multiplies the weights of
// values; heads with dropout add.
#include <cstddef>
#include <cstdint>

#include "cuda/api/entry.h"
#include "cuda/api/padding.h"
#include "cuda/clustered/near.cuh"
#include "cuda/clustered/near.h"
#include "cuda/launch/dispatch.h"
#include "cuda/launch/launch.h"
#include "cuda/prim/dependent.cuh"
#include "cuda/prim/dropout.cuh"
#include "cuda/prim/fragments.cuh"
#include "cuda/prim/store.cuh"

namespace coterie::cuda {
namespace {

constexpr int kChunkRows = 1024;  // keys of a chunk of far_kernel

template <class T, int kDim, bool kSubtract>
struct NearShape {
  static constexpr int kRowBytes = Tile<T, kDim>::kRowBytes, kWalked = kNearWalked<T, kDim>;
  static constexpr int kMeans = kNearOwned * kRowBytes;
  static constexpr int kKeys = (kSubtract ? 2 : 1) * kNearOwned * kRowBytes;
  static constexpr int kValues = kKeys + kWalked * kRowBytes;
  static constexpr int kBytes = kValues + kWalked * kRowBytes;
  static constexpr bool kResident = sizeof(T) == 2 && kDim <= 64;
  static constexpr int kMinBlocks = sizeof(T) == 4 ? 1 : kDim <= 64 ? 4 : 2;
};

// Two neighbouring elements of a row; `left` of them exist. Even rows are read in pairs.
template <class T>
__device__ __forceinline__ float2 load_pair(const T* from, int left, bool even) {
  if (left <= 0) return make_float2(0.0f, 0.0f);
  if (!even) return make_float2(to_float(from[0]), left > 1 ? to_float(from[1]) : 0.0f);
  return load2(from);
}

// 16 queries of a warp, of which a lane holds two rows.
template <class T, int kDim, bool kSubtract>
struct NearRows {
  using S = NearShape<T, kDim, kSubtract>;
  QueryFragments<T, kDim, S::kResident, 1> queries, means;
  Accumulator out[kDim / 16];
  float shift[2];                    // whole numbers, base 2
  float sum[2] = {}, taken[2] = {};  // this lane's weights of near keys, and those of their means
  DropoutRow words[2];               // of this lane's rows

  __device__ void start(const float (&largest)[2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half)
      shift[half] = largest[half] > kLowestShift ? ceilf(largest[half]) : kLowestShift;
#pragma unroll
    for (int d = 0; d < kDim / 16; ++d) clear(out[d]);
  }

  // Keys column .. column + 15 of a tile, of which `left` exist; the first is number `key0`. top:
  // bits of the lane's two rows for these keys.
  __device__ __forceinline__ void attend(const Tile<T, kDim>& keys, const Tile<T, kDim>& values,
                                         int column, int left, int key0, const unsigned (&top)[2],
                                         const CentroidQueries& scale) {
    const int lane = threadIdx.x % 32;
    Accumulator s[1], z[1];
    queries.scores(s, keys, column);
    if constexpr (kSubtract) means.scores(z, keys, column);
    const float exponent = scale.sign * scale.exponent;
    float largest[2] = {-INFINITY, -INFINITY};
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      float& score = s[0][i / 4][i % 4];
      score = __fmul_rn(score, exponent);
      if (i / 4 * 8 + lane % 4 * 2 + i % 2 >= left) score = -INFINITY;
      largest[i / 2 % 2] = fmaxf(largest[i / 2 % 2], score);
    }
    const bool above =
        largest[0] > shift[0] + RowSoftmax::kSlack || largest[1] > shift[1] + RowSoftmax::kSlack;
    if (__any_sync(~0u, above)) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float old = shift[half];
        shift[half] = fmaxf(old, ceilf(quad_max(largest[half])));
        const float factor = exp2_approximate(old - shift[half]);
        sum[half] *= factor;
        taken[half] *= factor;
#pragma unroll
        for (int i = 0; i < kDim / 4; ++i) out[i / 4][i / 2 % 2][2 * half + i % 2] *= factor;
      }
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      float& score = s[0][i / 4][i % 4];
      score = exp2_approximate(score - shift[i / 2 % 2]);
      sum[i / 2 % 2] += score;
      if constexpr (!kSubtract)
        if (scale.dropout.on())
          score *= kept(scale.dropout, words[i / 2 % 2], key0 + i / 4 * 8 + lane % 4 * 2 + i % 2);
      if constexpr (kSubtract) {
        float& mean = z[0][i / 4][i % 4];
        const int key = i / 4 * 8 + lane % 4 * 2 + i % 2;
        mean = shifted_weight(mean, exponent, shift[i / 2 % 2]);
        if (key >= left || (top[i / 2 % 2] >> key & 1)) mean = 0.0f;
        taken[i / 2 % 2] += mean;
        mean = -mean;
      }
    }
    FragmentA<T> p, minus;
    to_fragment(p, s[0]);
    if constexpr (kSubtract) to_fragment(minus, z[0]);
#pragma unroll
    for (int d = 0; d < kDim / 16; ++d) {
      FragmentB<T> v;
      load_b_transposed(v, values, 16 * d, column);
      multiply_add(out[d], p, v);
      if constexpr (kSubtract) multiply_add(out[d], minus, v);
    }
  }

  // Adds a row of `width` elements times a weight.
  template <class From>
  __device__ __forceinline__ void add_row(int half, const From* row, float weight, int width) {
    const int first = static_cast<int>(threadIdx.x) % 4 * 2;
#pragma unroll
    for (int n = 0; n < kDim / 8; ++n) {
      const int column = 8 * n + first;
      const float2 two = load_pair(row + column, width - column, width % 2 == 0);
      float* to = out[n / 2][n % 2] + 2 * half;
      to[0] = fmaf(weight, two.x, to[0]);
      to[1] = fmaf(weight, two.y, to[1]);
    }
  }
};

// Sums of far keys of one query: at most two of its own, two of its cluster.
template <class T>
struct FarParts {
  const T* own[2];
  const float* cluster[2];
  float lse[2], shift[2], sum[2];  // base 2

  __device__ FarParts(const NearArgs<T>& args, int item, int head, int cluster_number, int position,
                      int length, std::int64_t place) {
    const FarSums<T>& far = args.far;
    const int block = position / args.near;
    const int slot = far.chunks.first_slot(args.queries.spans.k, item);
#pragma unroll
    for (int side = 0; side < 2; ++side) {
      const int other = side == 0 ? block - 2 : block + 2;  // the nearest block of far keys
      const bool there = other >= 0 && other * args.near < length;
      const MemberRows<T>& rows = side == 0 ? far.before : far.after;
      const RowSums& chunks = side == 0 ? far.chunks_before : far.chunks_after;
      const std::int64_t at = there ? args.queries.row(slot + other * args.near / far.chunks.chunk,
                                                       head, cluster_number)
                                    : 0;
      own[side] = rows.outs + (there ? place * args.pitch : 0);
      lse[side] = there ? rows.lse[place] : kLowestShift;
      const float2 facts = there ? chunks.rows[at] : make_float2(kLowestShift, 0.0f);
      cluster[side] = chunks.outs + at * args.pitch;
      shift[side] = facts.x;
      sum[side] = facts.y;
    }
  }
  __device__ float largest() const {
    return fmaxf(fmaxf(lse[0], lse[1]), fmaxf(shift[0], shift[1]));
  }
};

// The queries of tile `number`.
template <class T, int kDim, bool kSubtract>
__device__ __forceinline__ void attend_tile(const NearArgs<T>& args, int number) {
  using S = NearShape<T, kDim, kSubtract>;
  constexpr int kWalked = S::kWalked, kWords = kWalked / 32;
  extern __shared__ __align__(128) unsigned char memory[];
  __shared__ std::int32_t clusters[kNearOwned];
  __shared__ std::uint32_t top_words[kNearOwned * kWords];
  const CentroidQueries& queries = args.queries;
  const int head = static_cast<int>(blockIdx.y), kv_head = head / queries.group;
  const ItemChunk rows = args.tiles.find(queries.spans.q, number);
  if (rows.begin >= rows.end) return;
  if (!kSubtract && !args.heads.add(rows.item, head)) return;
  const int count = rows.end - rows.begin, thread = static_cast<int>(threadIdx.x);
  const std::int64_t line =
      (static_cast<std::int64_t>(rows.span.batch) * queries.H + head) * args.N + rows.span.begin +
      rows.begin;
  const ItemSpan keys_span = queries.spans.k.span(rows.item);
  const int length = keys_span.length;
  const int first = NearRange(rows.begin, args.near, length).begin,
            end = NearRange(rows.end - 1, args.near, length).end;
  const Tile<T, kDim> query_tile{shared_address(memory)}, mean_tile{query_tile.base + S::kMeans},
      keys{query_tile.base + S::kKeys}, values{query_tile.base + S::kValues};
  const Rows<const T> q = args.q.rows(rows.span.batch, head, rows.span.begin);
  const Rows<const T> k = args.k.rows(keys_span.batch, kv_head, keys_span.begin);
  const Rows<const T> v = args.v.rows(keys_span.batch, kv_head, keys_span.begin);
  const auto load_keys = [&](int begin) {
    load_tile<kWalked, kNearThreads>(keys, k, begin, end - begin);
    load_tile<kWalked, kNearThreads>(values, v, begin, end - begin);
    cp_async_commit();
  };
  load_tile<kNearOwned, kNearThreads>(query_tile, q, rows.begin, count);
  load_keys(first);
  if (thread < kNearOwned) clusters[thread] = thread < count ? args.labels[line + thread] : -1;
  const std::int64_t problem = queries.row(rows.item, head, 0);  // its first mean
  const bool top = kSubtract && args.top_keys;  // near keys that the mean's sums do not have
  const auto find_top = [&](int begin) {
    if constexpr (kSubtract) {
      if (!top) return;
      for (int i = thread; i < kNearOwned * kWords; i += kNearThreads) top_words[i] = 0;
      __syncthreads();
      mark_top_keys<kNearOwned, kWords>(top_words, clusters, args.top_keys + problem * args.topk,
                                        args.topk, args.near_top + line, begin);
    }
  };
  __syncthreads();
  if (kSubtract) {
    load_tile<kNearOwned, kNearThreads>(
        mean_tile, {args.means + problem * args.pitch, args.pitch, args.pitch, true}, 0, kNearOwned,
        clusters);
    cp_async_commit();
  }
  find_top(first);

  const int lane = thread % 32, warp_row = thread / 32 * 16;
  const NearRange range(rows.begin + warp_row, args.near, length);
  const bool active = warp_row < count;
  NearRows<T, kDim, kSubtract> own;
  float mean_lse[2], top_lse[2], largest[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = warp_row + 8 * half + lane / 4, cluster = max(clusters[row], 0);
    const bool there = row < count;
    if (!kSubtract && queries.dropout.on())
      own.words[half] = queries.dropout.query(
          static_cast<std::int64_t>(rows.item) * queries.H + head, rows.begin + row);
    mean_lse[half] = kSubtract && there ? args.mean_lse[problem + cluster] * kLog2e : kLowestShift;
    top_lse[half] = args.top && there ? args.top_lse[line + row] * kLog2e : -INFINITY;
    largest[half] = fmaxf(mean_lse[half], top_lse[half]);
    if (!kSubtract && there)
      largest[half] = fmaxf(largest[half], FarParts<T>(args, rows.item, head, cluster,
                                                       rows.begin + row, length, line + row)
                                               .largest());
  }
  own.start(largest);
  for (int begin = first; begin < end; begin += kWalked) {
    cp_async_wait<0>();
    __syncthreads();
    if (begin == first) {
      own.queries.load(query_tile, warp_row);
      if (kSubtract) own.means.load(mean_tile, warp_row);
    }
    if (active) {
      const int last = min(range.end - begin, kWalked);
#pragma unroll 1
      for (int column = max(range.begin - begin, 0); column < last; column += 16) {
        unsigned bits[2] = {0, 0};
        if (top)
#pragma unroll
          for (int half = 0; half < 2; ++half)
            bits[half] =
                top_words[(warp_row + 8 * half + lane / 4) * kWords + column / 32] >> (column % 32);
        own.attend(keys, values, column, length - begin - column, begin + column, bits, queries);
      }
    }
    if (begin + kWalked >= end) break;
    __syncthreads();
    load_keys(begin + kWalked);
    find_top(begin + kWalked);
  }
  if (!active) return;

  const int width = args.out.width;
  bool cancels = false;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = warp_row + 8 * half + lane / 4, cluster = max(clusters[row], 0);
    const bool there = row < count;
    const float shift = own.shift[half];
    float total = quad_sum(own.sum[half]);
    if (args.top && there && top_lse[half] != -INFINITY) {
      const float weight = exp2_approximate(top_lse[half] - shift);
      total += weight;
      own.add_row(half, args.top + (line + row) * width, weight, width);
    }
    if (kSubtract) {
      const float taken = quad_sum(own.taken[half]);
      const float weight = exp2_approximate(mean_lse[half] - shift);
      total += fmaxf(weight - taken, 0.0f);
      if (there) own.add_row(half, args.rest + (problem + cluster) * width, weight, width);
      cancels |= there && !(total * kMostCancelled >= weight);  // also if one is not a number
    } else if (there) {
      const FarParts<T> far(args, rows.item, head, cluster, rows.begin + row, length, line + row);
#pragma unroll
      for (int side = 0; side < 2; ++side) {
        const float one = exp2_approximate(far.lse[side] - shift),
                    all = exp2_approximate(far.shift[side] - shift);
        total += one + far.sum[side] * all;
        // Rows without keys were not written.
        if (one != 0.0f) own.add_row(half, far.own[side], one, width);
        if (all != 0.0f) own.add_row(half, far.cluster[side], all, width);
      }
    }
    const float inverse = total == 0.0f ? 0.0f : 1.0f / total;
#pragma unroll
    for (int i = 0; i < kDim / 4; ++i) own.out[i / 4][i / 2 % 2][2 * half + i % 2] *= inverse;
    if (there && lane % 4 == 0) args.lse[line + row] = row_lse(shift, total);
  }
  if (kSubtract && cancels)
    args.cancels[rows.item * (queries.H / queries.group) + kv_head] = 1;  // all write the same
  const Rows<T> out = args.out.rows(rows.span.batch, head, rows.span.begin);
#pragma unroll
  for (int d = 0; d < kDim / 16; d += 2)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = warp_row + 8 * half + lane / 4;
      store_columns(out, rows.begin + row, row < count, 16 * d, own.out + d, half);
    }
}

template <class T, int kDim, bool kSubtract>
__global__ void __launch_bounds__(kNearThreads, (NearShape<T, kDim, kSubtract>::kMinBlocks))
    near_attend_kernel(const __grid_constant__ NearArgs<T> args) {
  await_previous();
  if (!kSubtract && args.heads.cancels &&
      !any_set(args.heads.cancels, args.tiles.items * args.heads.key_heads))
    return;
  for (int number = static_cast<int>(blockIdx.x); number < args.tiles.slots;
       number += static_cast<int>(gridDim.x)) {
    attend_tile<T, kDim, kSubtract>(args, number);
    __syncthreads();
  }
}

// Grid (tiles of 64 queries, H); 8 lanes per query.
__global__ void __launch_bounds__(kNearThreads)
    near_top_kernel(const __grid_constant__ CentroidQueries queries, ItemChunks tiles,
                    const std::int32_t* labels, const std::int32_t* top_keys, int topk, int N,
                    int near, NearTopKeys* to) {
  await_previous();
  const ItemChunk rows = tiles.find(queries.spans.q, static_cast<int>(blockIdx.x));
  const int head = static_cast<int>(blockIdx.y), lane = threadIdx.x % 8;
  const std::int64_t line =
      (static_cast<std::int64_t>(rows.span.batch) * queries.H + head) * N + rows.span.begin;
  for (int first = rows.begin; first < rows.end; first += kNearThreads / 8) {
    const int row = min(first + static_cast<int>(threadIdx.x) / 8, rows.end - 1);
    const std::int32_t* list = top_keys + queries.row(rows.item, head, labels[line + row]) * topk;
    const NearRange range(row, near, INT_MAX);
    int counts = 0;  // of keys before the near ones, and of those before their end
    const auto count = [&](int key) {  // -1 behind the last one
      const auto at = static_cast<unsigned>(key);
      counts += (at < static_cast<unsigned>(range.begin) ? 1 : 0) +
                (at < static_cast<unsigned>(range.end) ? 1 << 16 : 0);
    };
    if (topk % 4 == 0 && reinterpret_cast<std::uintptr_t>(top_keys) % 16 == 0) {
      for (int i = 4 * lane; i < topk; i += 32) {
        const int4 keys = *reinterpret_cast<const int4*>(list + i);
        count(keys.x), count(keys.y), count(keys.z), count(keys.w);
      }
    } else {
      for (int i = lane; i < topk; i += 8) count(list[i]);
    }
#pragma unroll
    for (int step = 1; step < 8; step *= 2) counts += __shfl_xor_sync(~0u, counts, step);
    const int before = counts & 0xffff;
    if (lane == 0) to[line + row] = NearTopKeys::of(before, (counts >> 16) - before);
  }
}

template <class T>
__global__ void __launch_bounds__(kNearThreads)
    round_means_kernel(const float* means, T* to, std::int64_t count, int width, int pitch) {
  await_previous();
  const std::int64_t at = static_cast<std::int64_t>(blockIdx.x) * kNearThreads + threadIdx.x;
  const int column = static_cast<int>(at % pitch);
  if (at < count)
    to[at] = from_float<T>(column < width ? means[at / pitch * width + column] : 0.0f);
}

template <class T, bool kSubtract>
void launch_near(const NearArgs<T>& args, cudaStream_t stream) {
  dispatch_head_dim("clustered", args.queries.width, [&](auto dim) {
    constexpr int kDim = decltype(dim)::value;
    // Few blocks where most heads have nothing to add.
    const int blocks =
        kSubtract ? args.tiles.slots : min(args.tiles.slots, few_blocks(args.queries.H));
    launch_early("near_attend", near_attend_kernel<T, kDim, kSubtract>,
                 dim3(static_cast<unsigned>(blocks), static_cast<unsigned>(args.queries.H)),
                 kNearThreads, NearShape<T, kDim, kSubtract>::kBytes, stream, args);
  });
}

template <class T>
void launch_subtracting(const NearArgs<T>& args, bool sm90a, cudaStream_t stream) {
  if constexpr (sizeof(T) == 2)
    if (sm90a) return attend_near_sm90a(args, stream);
  launch_near<T, true>(args, stream);
}

RowSums take_sums(Arena& arena, std::int64_t rows, int pitch) {
  return {arena.take<float2>(rows + 1), arena.take<float>(rows * pitch + 1)};
}
template <class T>
MemberRows<T> take_member_rows(Arena& arena, std::int64_t rows, int pitch) {
  return {arena.take<float>(rows + 1), arena.take<T>(rows * pitch + 1)};
}

}  // namespace

template <class T>
void round_means(const CentroidQueries& queries, int items, T* to, int pitch, cudaStream_t stream) {
  const std::int64_t count =
      static_cast<std::int64_t>(items) * queries.H * queries.clusters * pitch;
  launch_early("round_means", round_means_kernel<T>,
               static_cast<unsigned>((count + kNearThreads - 1) / kNearThreads), kNearThreads, 0,
               stream, queries.centroids, to, count, queries.width, pitch);
}
template void round_means(const CentroidQueries&, int, float*, int, cudaStream_t);
template void round_means(const CentroidQueries&, int, Bf16*, int, cudaStream_t);
template void round_means(const CentroidQueries&, int, F16*, int, cudaStream_t);

void find_near_top_keys(const CentroidQueries& queries, const std::int32_t* labels,
                        const std::int32_t* top_keys, int items, int topk, int N, int near,
                        NearTopKeys* to, cudaStream_t stream) {
  const ItemChunks tiles = row_tiles(queries.spans.q, items, kNearOwned);
  launch_early("near_top", near_top_kernel,
               dim3(static_cast<unsigned>(tiles.slots), static_cast<unsigned>(queries.H)),
               kNearThreads, 0, stream, queries, tiles, labels, top_keys, topk, N, near, to);
}

void attend_near(const ClusteredForward& pass, Arena& arena) {
  const ClusteredPlan& plan = pass.plan;
  const AttentionCall& call = plan.call;
  const std::int64_t rows = call.B * call.H * call.N;
  const int pitch = static_cast<int>(call.Dk + 63) / 64 * 64;
  const bool top = plan.topk > 0;
  const DType dtype = call.inputs.q.dtype;
  void* top_rows = arena.take<std::byte>(top ? rows * call.Dv * dtype_bytes(dtype) : 0);
  float* top_lse = arena.take<float>(top ? rows : 0);
  dispatch_element(call.op, dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    NearArgs<T> args{};
    FarSums<T>& far = args.far;
    far.chunks = near_chunks(call, plan.near, kChunkRows);
    const std::int64_t slots = static_cast<std::int64_t>(far.chunks.slots) * call.H * plan.clusters;
    far.before = take_member_rows<T>(arena, rows, pitch);
    far.after = take_member_rows<T>(arena, rows, pitch);
    far.totals = take_sums(arena, slots, pitch);
    far.chunks_before = take_sums(arena, slots, pitch);
    far.chunks_after = take_sums(arena, slots, pitch);
    T* means_rounded = arena.take<T>(plan.subtracts ? plan.num_means() * pitch : 0);
    auto* near_top = arena.take<NearTopKeys>(top && plan.subtracts ? rows : 0);
    if (arena.counting()) return;
    const ClusteredTensors& tensors = pass.tensors;
    zero_padding(pass.out, call.inputs.q_sequences, call.num_items(), pass.stream);
    fill_padding(floats(tensors.lse), call.B, call.H, call.N, call.inputs.q_sequences,
                 call.num_items(), -INFINITY, pass.stream);
    // Heads subtract until one of their queries fails the check.
    const Workspace on_stream{nullptr, 0, pass.stream};
    fill(tensors.cancels, plan.subtracts ? 0.0 : 1.0, on_stream);
    if (!plan.subtracts) fill(tensors.centroid_lse, 0.0, on_stream);
    if (rows == 0 || plan.num_means() == 0 || call.S == 0) return;
    if (top) {
      ClusteredForward alone = pass;
      alone.out =
          TensorView::contiguous(top_rows, dtype, {call.B, call.H, call.N, call.Dv}, Device::cuda);
      alone.tensors.lse =
          TensorView::contiguous(top_lse, DType::f32, {call.B, call.H, call.N}, Device::cuda);
      alone.tensors.mass = alone.tensors.out = {};
      attend_top_keys(alone);
    }
    args.queries = plan.queries(tensors);
    args.tiles = row_tiles(args.queries.spans.q, static_cast<int>(call.num_items()), kNearOwned);
    args.q = tensor4<const T>(call.inputs.q);
    args.k = tensor4<const T>(call.k);
    args.v = tensor4<const T>(call.inputs.v);
    args.labels = ints(tensors.labels);
    args.top_keys = top ? ints(tensors.top_keys) : nullptr;
    args.topk = plan.topk;
    args.N = static_cast<int>(call.N);
    args.near = plan.near;
    args.pitch = pitch;
    args.top = top ? static_cast<const T*>(top_rows) : nullptr;
    args.top_lse = top_lse;
    args.out = tensor4<T>(pass.out);
    args.lse = floats(tensors.lse);
    args.heads = {nullptr, static_cast<int>(call.value_heads), args.queries.group};
    if (plan.subtracts) {
      round_means(args.queries, static_cast<int>(call.num_items()), means_rounded, pitch,
                  pass.stream);
      if (top)
        find_near_top_keys(args.queries, args.labels, args.top_keys,
                           static_cast<int>(call.num_items()), plan.topk, args.N, plan.near,
                           near_top, pass.stream);
      args.near_top = near_top;
      args.means = means_rounded;
      args.mean_lse = floats(tensors.centroid_lse);
      args.rest = floats(tensors.out);
      args.cancels = ints(tensors.cancels);
      args.heads.cancels = args.cancels;
      launch_subtracting(args, plan.sm90a, pass.stream);
    }
    CentroidQueries means = args.queries;
    means.block_rows = kCentroidRows;
    means.row_tiles = (plan.clusters + kCentroidRows - 1) / kCentroidRows;
    sum_far_keys<T>({means, args.k, args.v, args.top_keys, ints(tensors.order), plan.topk, args.N,
                     args.near, pitch, args.heads, far},
                    pass.stream);
    launch_near<T, false>(args, pass.stream);
  });
}

}  // namespace coterie::cuda
