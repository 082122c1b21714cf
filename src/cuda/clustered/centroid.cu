// SPDX-License-Identifier: MIT
// Attention of cluster means over all keys: with A_cj = softmax_j(scale mean_c . k_j),
//   centroid_lse_c, mass_c = sum of A_cj over the top keys T_c, out_c = sum of A_cj v_j outside T_c
// (plain clustered attention: T_c is empty, no mass). With near keys there is no mass either, and
// the softmax is over the keys outside T_c. Dropout multiplies the A_cj of out.
//
// centroid_attend_kernel: block number = (slot of a chunk of keys * H + head) * row tiles + tile; 4
// warps of 32 means each walk the chunk, 64 keys at a time, or 32 or 16 for rows of 256 or 512
// bytes. Means stay in registers for rows of 128 bytes. Shared memory: means, two stages of keys
// and values, masks of top keys; 51, 67 or 99 KiB for rows of 128, 256 or 512 bytes. Launch bounds:
// 3, 2 or 1 (f32) blocks of a multiprocessor. centroid_combine_kernel: a warp adds up the chunks of
// one mean, in order.
//
// Runs for f32, with dropout, and for all types if the device is not a Hopper GPU. Other 16-bit
// calls use centroid_sm90a.cu on Hopper, or select_attend_sm90a.cu if one kernel selects top keys
// and attends.
#include "cuda/clustered/centroid.cuh"
#include "cuda/clustered/clustered.h"
#include "cuda/launch/dispatch.h"
#include "cuda/launch/launch.h"
#include "cuda/prim/dependent.cuh"
#include "cuda/prim/dropout.cuh"
#include "cuda/prim/fragments.cuh"

namespace coterie::cuda {
namespace {

constexpr int kThreads = 128;  // 4 warps of 32 rows
constexpr int kCombineWarps = 4;

template <class T, int kDim>
struct CentroidTiles : AttendTiles<T, kDim, kCentroidRows, kTileKeys<T, kDim>> {
  static constexpr int kKeys = kTileKeys<T, kDim>;
  using AttendTiles<T, kDim, kCentroidRows, kKeys>::AttendTiles;

  __device__ void load(int stage, const Rows<const T>& k, const Rows<const T>& v, int begin,
                       int end) const {
    load_tile<kKeys, kThreads>(this->keys(stage), k, begin, end - begin);
    load_tile<kKeys, kThreads>(this->values(stage), v, begin, end - begin);
    cp_async_commit();
  }
};

// State of a warp's 32 rows: 2 x 16, of which a lane holds [m][half].
template <class T, int kDim>
struct WarpMeans {
  static constexpr int kBlock = sizeof(T) == 2 && kDim <= 64 ? 2 : 1;  // 16 keys each at a time
  QueryFragments<T, kDim, kDim * sizeof(T) <= 128> queries;
  RowSoftmax softmax[2][2];
  float mass[2][2] = {};
  Accumulator out[2][kDim / 16] = {};

  // whole: see RowSoftmax::raise_whole.
  __device__ void rescale(const Accumulator (&s)[kBlock][2], float exponent, bool whole) {
#pragma unroll
    for (int m = 0; m < 2; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float top = -INFINITY;
#pragma unroll
        for (int i = 0; i < 4 * kBlock; ++i)
          top = fmaxf(top, s[i / 4][m][i / 2 % 2][2 * half + i % 2]);
        top = quad_max(top);
        const float factor = whole ? softmax[m][half].raise_whole(top, exponent)
                                   : softmax[m][half].raise(top, exponent);
        mass[m][half] *= factor;
#pragma unroll
        for (int i = 0; i < kDim / 4; ++i) out[m][i / 4][i / 2 % 2][2 * half + i % 2] *= factor;
      }
  }

  // Calls body(m, half, element) for the elements of top keys, from a column on.
  template <class Body>
  __device__ static void for_top_keys(Accumulator (&s)[kBlock][2], int column,
                                      const unsigned long long* masks, const Body& body) {
    if (!masks) return;
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int m = 0; m < 2; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const auto bits =
            static_cast<unsigned>(masks[16 * m + 8 * half + lane / 4] >> (column + lane % 4 * 2));
        if ((bits & (kBlock == 2 ? 0x03030303u : 0x0303u)) == 0) continue;
#pragma unroll
        for (int i = 0; i < 4 * kBlock; ++i)
          if (bits >> (i / 2 * 8 + i % 2) & 1)
            body(m, half, s[i / 4][m][i / 2 % 2][2 * half + i % 2]);
      }
  }
  // Scores of 16 kBlock keys become weights; those of top keys are moved to the mass.
  __device__ void weigh(Accumulator (&s)[kBlock][2], int column, const unsigned long long* masks,
                        float exponent) {
#pragma unroll
    for (int i = 0; i < 16 * kBlock; ++i) {
      float& score = s[i / 16][i / 8 % 2][i / 4 % 2][i % 4];
      score = softmax[i / 8 % 2][i / 2 % 2].weight(score, exponent);
    }
    for_top_keys(s, column, masks, [&](int m, int half, float& weight) {
      mass[m][half] += weight;
      weight = 0.0f;
    });
  }

  // Dropout of weights of keys from `key` on; words: of the warp's rows.
  __device__ void drop(Accumulator (&s)[kBlock][2], int key, const Dropout& dropout,
                       const DropoutRow* words) const {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int row = 0; row < 4; ++row) {
      const int m = row / 2, half = row % 2;
      const DropoutRow own = words[16 * m + 8 * half + lane / 4];
#pragma unroll
      for (int i = 0; i < 4 * kBlock; ++i)
        s[i / 4][m][i / 2 % 2][2 * half + i % 2] *=
            kept(dropout, own, key + i / 2 * 8 + lane % 4 * 2 + i % 2);
    }
  }

  // Keys column .. column + 16 kBlock - 1 of a tile, of which `left` exist. hides: top keys have no
  // part in the sums; words: for dropout, or null.
  __device__ void attend(const Tile<T, kDim>& keys, const Tile<T, kDim>& values, int column,
                         int left, const unsigned long long* masks, bool hides, float exponent,
                         bool first, int key, const Dropout& dropout, const DropoutRow* words) {
    Accumulator s[kBlock][2];
#pragma unroll
    for (int b = 0; b < kBlock; ++b) queries.scores(s[b], keys, column + 16 * b);
    if (left < 16 * kBlock)
#pragma unroll
      for (int i = 0; i < 16 * kBlock; ++i) {
        const int key = i / 16 * 16 + i / 4 % 2 * 8 + threadIdx.x % 4 * 2 + i % 2;
        if (key >= left) s[i / 16][i / 8 % 2][i / 4 % 2][i % 4] = -INFINITY;
      }
    if (hides) for_top_keys(s, column, masks, [](int, int, float& score) { score = -INFINITY; });
    bool above = first;
#pragma unroll
    for (int i = 0; i < 16 * kBlock; ++i)
      above |= s[i / 16][i / 8 % 2][i / 4 % 2][i % 4] >
               softmax[i / 8 % 2][i / 2 % 2].limit(1.0f / exponent);
    if (__any_sync(~0u, above)) rescale(s, exponent, hides);
    weigh(s, column, masks, exponent);
    if (words) drop(s, key, dropout, words);
#pragma unroll
    for (int b = 0; b < kBlock; ++b) add_values(out, s[b], values, column + 16 * b);
  }
};

template <class T, int kDim>
__device__ void write_partial(const AttendArgs<T>& args, std::int64_t first_row, int rows,
                              const WarpMeans<T, kDim>& state) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
  for (int m = 0; m < 2; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int r = warp * 32 + 16 * m + 8 * half + lane / 4;
      const float sum = quad_sum(state.softmax[m][half].sum), mass = quad_sum(state.mass[m][half]);
      if (r >= rows) continue;
      if (lane % 4 == 0) args.rows[first_row + r] = {state.softmax[m][half].shift, sum, mass, 0.0f};
      float* out = args.outs + (first_row + r) * args.pitch + lane % 4 * 2;
#pragma unroll
      for (int i = 0; i < kDim / 8; ++i) {
        const float* pair = state.out[m][i / 2][i % 2] + 2 * half;
        store2(out + 8 * i, pair[0], pair[1]);
      }
    }
}

template <class T, int kDim>
__global__ void __launch_bounds__(kThreads, sizeof(T) == 4 ? 1
                                            : kDim <= 64   ? 3
                                                           : 2)
    centroid_attend_kernel(const __grid_constant__ AttendArgs<T> args) {
  await_previous();
  extern __shared__ __align__(128) unsigned char memory[];
  __shared__ unsigned long long masks[2][kCentroidRows];
  __shared__ DropoutRow words[kCentroidRows];
  const CentroidTiles<T, kDim> tiles(memory);
  const CentroidQueries& queries = args.queries;
  const CentroidBlock block(queries, blockIdx.x);
  const ItemChunk chunk = queries.chunks.find(queries.spans.k, block.slot);
  if (chunk.begin >= chunk.end) return;

  const int kv_head = block.head / queries.group;
  const Rows<const T> k = args.k.rows(chunk.span.batch, kv_head, chunk.span.begin);
  const Rows<const T> v = args.v.rows(chunk.span.batch, kv_head, chunk.span.begin);
  tiles.load(0, k, v, chunk.begin, chunk.end);
  load_centroids<kCentroidRows, kThreads>(tiles.queries, queries, chunk.item, block.head,
                                          block.first);
  TopWalk walk;
  const int thread = threadIdx.x, warp = thread / 32, cluster = block.first + thread;
  if (args.top_keys && cluster < queries.clusters)
    walk.start(args.top_keys + queries.row(chunk.item, block.head, cluster) * args.topk, args.topk,
               chunk.begin);
  const bool drops = queries.dropout.on();
  if (drops)
    words[thread] = queries.dropout.cluster(
        static_cast<std::int64_t>(chunk.item) * queries.H + block.head, cluster);
  __syncthreads();
  WarpMeans<T, kDim> rows;
  rows.queries.load(tiles.queries, warp * 32);
  constexpr int kKeys = CentroidTiles<T, kDim>::kKeys;
  for (int begin = chunk.begin, stage = 0; begin < chunk.end; begin += kKeys, stage ^= 1) {
    cp_async_wait<0>();
    if (args.top_keys) masks[stage][thread] = walk.mask(begin, kKeys);
    __syncthreads();
    if (begin + kKeys < chunk.end) tiles.load(stage ^ 1, k, v, begin + kKeys, chunk.end);
    constexpr int kStep = 16 * WarpMeans<T, kDim>::kBlock;
#pragma unroll 1
    for (int column = 0; column < kKeys; column += kStep)
      rows.attend(tiles.keys(stage), tiles.values(stage), column, chunk.end - begin - column,
                  args.top_keys ? masks[stage] + warp * 32 : nullptr, args.hides_top_keys(),
                  queries.exponent, begin + column == chunk.begin, begin + column, queries.dropout,
                  drops ? words + warp * 32 : nullptr);
  }
  write_partial(args, queries.row(block.slot, block.head, block.first),
                queries.clusters - block.first, rows);
}

// One warp per mean.
template <class T>
__global__ void __launch_bounds__(kCombineWarps * 32)
    centroid_combine_kernel(const __grid_constant__ AttendArgs<T> args) {
  await_previous();
  const CentroidQueries& queries = args.queries;
  const std::int64_t row = static_cast<std::int64_t>(blockIdx.x) * kCombineWarps + threadIdx.x / 32;
  const std::int64_t problem = row / queries.clusters;
  if (problem >= static_cast<std::int64_t>(queries.chunks.items) * queries.H) return;
  combine_row(args, static_cast<int>(problem / queries.H), static_cast<int>(problem % queries.H),
              static_cast<int>(row % queries.clusters));
}

}  // namespace

void attend_means(const ClusteredForward& pass, Arena& arena) {
  const ClusteredPlan& plan = pass.plan;
  const AttentionCall& call = plan.call;
  const std::int64_t partials = plan.means.chunks.slots * call.H * plan.clusters;
  const int pitch = static_cast<int>(call.Dk + 63) / 64 * 64;
  PartialRow* partial_rows = arena.take<PartialRow>(partials + 1);
  float* outs = arena.take<float>(partials * pitch + 1);
  if (arena.counting() || plan.num_means() == 0) return;
  Teams teams = plan.attention;
  teams.arrivals = pass.counters + plan.selection.teams.count;  // those of the selection come first
  dispatch_element(call.op, call.inputs.q.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const AttendArgs<T> args{plan.queries(pass.tensors),
                             tensor4<const T>(call.k),
                             tensor4<const T>(call.inputs.v),
                             ints(pass.tensors.top_keys),
                             plan.topk,
                             partial_rows,
                             outs,
                             pitch,
                             floats(pass.tensors.centroid_lse),
                             floats(pass.tensors.mass),
                             floats(pass.tensors.out),
                             static_cast<int>(call.Dv),
                             teams};
    if constexpr (sizeof(T) == 2)
      if (plan.sm90a) attend_chunks_sm90a(args, pass.stream);
    const auto tiles = static_cast<unsigned>(call.H * plan.means.row_tiles);
    if (!plan.sm90a)
      dispatch_head_dim(call.op, call.Dk, [&](auto dim) {
        constexpr int kDim = decltype(dim)::value;
        launch_early("centroid_attend", centroid_attend_kernel<T, kDim>,
                     tiles * plan.means.chunks.slots, kThreads, CentroidTiles<T, kDim>::kBytes,
                     pass.stream, args);
      });
    if (teams.size > 0) return;
    const std::int64_t blocks = (plan.num_means() + kCombineWarps - 1) / kCombineWarps;
    launch_early("centroid_combine", centroid_combine_kernel<T>, static_cast<unsigned>(blocks),
                 kCombineWarps * 32, 0, pass.stream, args);
  });
}

}  // namespace coterie::cuda
