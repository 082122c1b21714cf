// SPDX-License-Identifier: MIT
// Outputs of the queries of improved clustered attention.
//
// out_i = mass_c * (attention of query i over the top keys of its cluster c) + bottom_c.
// A block takes up to 32 or 64 queries a warp of one cluster. It gathers the cluster's keys and
// values to shared memory once; each warp then streams 16 queries at a time through its registers
// and writes each output to its query's place. Causal: attention over those top keys that are not
// after the query, and nothing else.
#include <climits>

#include "cuda/clustered.h"
#include "cuda/device/ascending.cuh"
#include "cuda/device/await.cuh"
#include "cuda/device/load.cuh"
#include "cuda/device/mma.cuh"
#include "cuda/device/query_tiles.cuh"
#include "cuda/device/softmax.cuh"
#include "cuda/device/store.cuh"
#include "cuda/device/topk_rows.cuh"
#include "cuda/launch.h"
#include "cuda/padding.h"
#include "cuda/tuning.h"

namespace coterie::cuda {
namespace {

constexpr int kTileBits[] = {5, 8};  // queries of a tile of one warp, of four: powers of two
constexpr int kSmallCluster = 96;    // mean size up to which one warp takes a tile

template <class T>
struct TopArgs {
  ItemSpans spans;
  QueryTiles tiles;
  Tensor4<const T> q, k, v;
  Tensor4<T> out;
  const std::int32_t *order, *offsets, *top_keys;
  const float *mass, *bottom;  // null: 1 and 0
  float* lse;
  int H, group, N, topk, padded;  // padded: topk rounded up to a multiple of kTopKeys, not 0
  float exponent;                 // scale log2(e)
  bool causal;                    // keys after a query are out of its sight
  bool clusters_ready;            // before the kernel that may still run ends
};

// log(2^shift * sum) by few instructions, -inf where nothing was added up.
__device__ __forceinline__ float quick_lse(float shift, float sum) {
  float digits;
  asm("lg2.approx.f32 %0, %1;" : "=f"(digits) : "f"(sum));
  return (shift + digits) * kLn2;
}

// store_columns for aligned rows of 16-bit elements; a row below 0 is none.
template <class T>
__device__ __forceinline__ void store_aligned(const Rows<T>& out, int row, int column,
                                              const Accumulator (&pair)[2], int half) {
  std::uint32_t word[4];
#pragma unroll
  for (int n = 0; n < 4; ++n)
    word[n] = pack2<T>(pair[n / 2][n % 2][2 * half], pair[n / 2][n % 2][2 * half + 1]);
  transpose_quad(word);
  const int first = column + 8 * (static_cast<int>(threadIdx.x) % 4);
  if (row >= 0 && first < out.width) store_global(out.row(row) + first, word);
}

// The same for any rows.
template <class T>
__device__ __forceinline__ void store_slowly(const Rows<T>& out, int row, int column,
                                             const Accumulator (&pair)[2], int half) {
#pragma unroll
  for (int i = 0; i < 8; ++i)
    if (const int d = column + i / 2 * 8 + static_cast<int>(threadIdx.x) % 4 * 2 + i % 2;
        row >= 0 && d < out.width)
      out.row(row)[d] = from_float<T>(pair[i / 4][i / 2 % 2][2 * half + i % 2]);
}

// The outputs of 16 queries, mass * out / sum + bottom, to their places, and their log-sum-exps.
// bottom has kDim elements.
template <class T, int kDim>
__device__ __forceinline__ void write_rows(const QueryRows<T, kDim>& queries,
                                           const TopKeyRows<T, kDim>& rows, const Rows<T>& out,
                                           float* lse, float mass, const float* bottom) {
  const int lane = threadIdx.x % 32;
  float factor[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float sum = quad_sum(rows.sum[half]);
    factor[half] = sum == 0.0f ? 0.0f : __fdividef(mass, sum);
    const float own = quick_lse(rows.shift[half], sum);
    if (lane % 4 == 0 && queries.rows[half] >= 0) lse[queries.rows[half]] = own;
  }
  const auto mix = [&](Accumulator(&pair)[2], int column) {
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      const float2 add = *reinterpret_cast<const float2*>(bottom + column + 8 * n + lane % 4 * 2);
#pragma unroll
      for (int i = 0; i < 4; ++i)
        pair[n / 2][n % 2][i] =
            fmaf(rows.out[column / 16 + n / 2][n % 2][i], factor[i / 2], i % 2 ? add.y : add.x);
    }
  };
  const auto for_columns = [&](const auto& store) {
#pragma unroll
    for (int column = 0; column < kDim; column += 32) {
      Accumulator pair[2];
      mix(pair, column);
#pragma unroll
      for (int half = 0; half < 2; ++half) store(queries.rows[half], column, pair, half);
    }
  };
  if constexpr (sizeof(T) == 4)
    for_columns([&](int row, int column, const Accumulator(&pair)[2], int half) {
      store_columns(out, row, row >= 0, column, pair, half);
    });
  else if (out.aligned)  // one branch around all: registers are few
    for_columns([&](int row, int column, const Accumulator(&pair)[2], int half) {
      store_aligned(out, row, column, pair, half);
    });
  else
    for_columns([&](int row, int column, const Accumulator(&pair)[2], int half) {
      store_slowly(out, row, column, pair, half);
    });
}

// As many warps on a multiprocessor as registers allow.
template <class T, int kDim>
constexpr int kResidentWarps = sizeof(T) == 4 || kDim > 64 ? 8 : 16;

template <class T, int kDim, int kWarps>
__global__ void __launch_bounds__(32 * kWarps, kResidentWarps<T, kDim> / kWarps)
    topk_attend_kernel(const __grid_constant__ TopArgs<T> args) {
  release_next();
  if (!args.clusters_ready) await_writes();
  extern __shared__ __align__(128) unsigned char memory[];
  __shared__ __align__(16) float bottom[kDim];
  const int head = blockIdx.y, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const QueryTile tile =
      args.tiles.find(args.spans.q, args.offsets, args.H, head, static_cast<int>(blockIdx.x));
  if (tile.count == 0) {
    await_writes();
    return;
  }
  const std::int64_t line = static_cast<std::int64_t>(tile.span.batch) * args.H + head;
  const std::int32_t* order = args.order + line * args.N + tile.span.begin + tile.first;
  const auto number = [&](int group, int half) {
    const int r = 16 * group + 8 * half + lane / 4;
    return r < tile.count ? order[r] : -1;
  };
  await_writes();
  QueryRows<T, kDim> queries;
  int after[2];  // numbers of the next queries
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    queries.rows[half] = number(warp, half);
    after[half] = number(warp + kWarps, half);
  }
  const std::int64_t problem = static_cast<std::int64_t>(tile.item) * args.H + head;
  const std::int64_t cluster_row = problem * args.tiles.clusters + tile.cluster;
  const float mass = args.mass ? args.mass[cluster_row] : 1.0f;
  const int width = args.v.width;
  constexpr int kTail = (kDim + 32 * kWarps - 1) / (32 * kWarps);
  float tail[kTail] = {};  // of the bottom; waited for with all else
  if (args.bottom)
#pragma unroll
    for (int i = 0; i < kTail; ++i)
      tail[i] = args.bottom[cluster_row * width +
                            min(static_cast<int>(threadIdx.x) + i * 32 * kWarps, width - 1)];
  const TopKeyTile<T, kDim> keys{shared_address(memory)};
  const Tile<T, kDim> values{keys.below(args.padded).base};
  const ItemSpan span = args.spans.k.span(tile.item);
  const Rows<const T> k = args.k.rows(span.batch, head / args.group, span.begin);
  const Rows<const T> v = args.v.rows(span.batch, head / args.group, span.begin);
  const std::int32_t* top = args.top_keys + cluster_row * args.topk;
  // One branch around all copies, so that they are on their way together.
  const int count = k.aligned && v.aligned && max(k.pitch, v.pitch) <= UINT_MAX
                        ? gather<true, T, kDim, 32 * kWarps>(keys, values, k, v, top, args.topk)
                        : gather<false, T, kDim, 32 * kWarps>(keys, values, k, v, top, args.topk);
  cp_async_commit();
  const Rows<const T> q = args.q.rows(tile.span.batch, head, tile.span.begin);
  queries.load(q);
  const Rows<T> out = args.out.rows(tile.span.batch, head, tile.span.begin);
  float* lse = args.lse + line * args.N + tile.span.begin;
#pragma unroll
  for (int i = 0; i < kTail; ++i)
    if (const int d = static_cast<int>(threadIdx.x) + i * 32 * kWarps; d < kDim)
      bottom[d] = d < width ? tail[i] : 0.0f;
  cp_async_wait<0>();
  __syncthreads();

#pragma unroll 1
  for (int group = warp; 16 * group < tile.count; group += kWarps) {
    TopKeyRows<T, kDim> rows;
    int seen[2] = {count, count};
    if (args.causal)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        seen[half] = count_up_to(top, count, queries.rows[half] + span.length - tile.span.length);
    int first = 0;
    if constexpr (sizeof(T) == 2) {
      rows.template attend<true>(queries, keys, values, seen, args.exponent);
      first = kTopKeys;
    } else {  // short code
      rows.clear();
    }
#pragma unroll 1
    for (; first < count; first += kTopKeys) {
      const int left[2] = {seen[0] - first, seen[1] - first};
      rows.template attend<false>(queries, keys.below(first), values.below(first), left,
                                  args.exponent);
    }
    write_rows(queries, rows, out, lse, mass, bottom);
    if (16 * (group + kWarps) >= tile.count) break;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      queries.rows[half] = after[half];
      after[half] = number(group + 2 * kWarps, half);
    }
    queries.load(q);
  }
}

template <class T, int kDim, int kWarps>
void launch_topk(const TopArgs<T>& args, cudaStream_t stream) {
  const int bytes = 2 * args.padded * Tile<T, kDim>::kRowBytes;
  const dim3 grid(static_cast<unsigned>(args.tiles.total), static_cast<unsigned>(args.H));
  launch_early("topk_attend", topk_attend_kernel<T, kDim, kWarps>, grid, 32 * kWarps,
               static_cast<std::size_t>(bytes), stream, args);
}

}  // namespace

void topk_forward(const AttentionCall& call, const ClusteredSizes& sizes,
                  const ClusteredTensors& tensors, const TensorView& out, cudaStream_t stream,
                  bool after_select) {
  if (call.B * call.H * call.N == 0) return;
  zero_padding(out, call.inputs.q_sequences, call.num_items(), stream);
  fill_padding(static_cast<float*>(tensors.lse.data), call.B, call.H, call.N,
               call.inputs.q_sequences, call.num_items(), -INFINITY, stream);
  const auto ints = [](const TensorView& view) {
    return static_cast<const std::int32_t*>(view.data);
  };
  const auto floats = [](const TensorView& view) { return static_cast<float*>(view.data); };
  dispatch_element(call.op, call.inputs.q.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    TopArgs<T> args;
    args.spans = item_spans(call.inputs);
    args.q = tensor4<const T>(call.inputs.q);
    args.k = tensor4<const T>(call.k);
    args.v = tensor4<const T>(call.inputs.v);
    args.out = tensor4<T>(out);
    args.order = ints(tensors.order);
    args.offsets = ints(tensors.offsets);
    args.top_keys = ints(tensors.top_keys);
    args.mass = floats(tensors.mass);
    args.bottom = floats(tensors.out);
    args.lse = floats(tensors.lse);
    args.H = static_cast<int>(call.H);
    args.group = static_cast<int>(call.H / call.value_heads);
    args.N = static_cast<int>(call.N);
    args.topk = static_cast<int>(sizes.topk);
    args.padded = (max(args.topk, 1) + kTopKeys - 1) / kTopKeys * kTopKeys;
    args.exponent = static_cast<float>(call.scale * 1.4426950408889634);
    args.causal = call.causal;
    args.clusters_ready = after_select;
    // A warp alone where clusters are small: it waits for nobody.
    const int warps = call.N <= kSmallCluster * sizes.clusters ? 1 : 4;
    args.tiles = query_tiles(call, sizes.clusters, kTileBits[warps > 1]);
    dispatch_head_dim(call.op, call.Dk, [&](auto dim) {
      constexpr int kDim = decltype(dim)::value;
      warps == 1 ? launch_topk<T, kDim, 1>(args, stream) : launch_topk<T, kDim, 4>(args, stream);
    });
  });
}

}  // namespace coterie::cuda
