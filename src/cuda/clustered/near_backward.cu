// SPDX-License-Identifier: MIT
// Near keys in the backward pass (near.h; formulas in backward.h): delta, and the near pairs' parts
// of dq, dk, dv and dmean. Where far keys are subtracted, every pair also takes back what the mean
// of the query's cluster contributes to it.
//
// A kernel for each side; grid (tiles of 64 positions, heads), 4 warps; 32 and 2 for f32 rows of
// 128. Blocks own queries and walk
// their near keys, or own keys and walk the queries that are near them. A warp owns 16 rows, which
// have the same near rows, and multiplies 16 of these at a time. Scores are computed twice, and no
// block waits for another one.
//   queries: S = Q Kᵀ, Z = M Kᵀ, dP = G Vᵀ      dq += dS K, dmean -= dR K
//   keys:    Sᵀ = K Qᵀ, Zᵀ = K Mᵀ, dPᵀ = V Gᵀ   dk += dSᵀ Q - dRᵀ M, dv += (P - R)ᵀ G
// Shared memory (PairShape): 64 KiB for 16-bit rows of 64 elements, 80 KiB for others.
// Launch bounds: 3 blocks per multiprocessor for 16-bit rows of 64. All types and devices; every
// sum has one writer and a fixed order. With dropout, where all heads add, dP and the P of dv are
// multiplied by its factors.
#include <cstdint>

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

template <class T, int kWidth>
struct PairShape {
  static constexpr int kWalked = kNearWalked<T, kWidth>;
  static constexpr int kRowBytes = Tile<T, kWidth>::kRowBytes;
  static constexpr int kOwned = kRowBytes <= 256 ? 64 : 32, kThreads = 2 * kOwned;
  static constexpr int kBytes = (2 * kOwned + 3 * kWalked) * kRowBytes;  // owned keys
  static_assert(kBytes >= (3 * kOwned + 2 * kWalked) * kRowBytes, "owned queries");
  static constexpr bool kResident = sizeof(T) == 2 && kWidth <= 64;
  static constexpr int kMinBlocks = sizeof(T) == 4 ? 1 : kWidth <= 64 ? 3 : 2;
};

// Facts of queries in shared memory: of owned ones, or of walked ones.
template <int kRows>
struct QueryFacts {
  std::int32_t clusters[kRows];
  float lse[kRows];  // base 2; +inf, which makes weights 0, for rows without keys
  float delta[kRows];
  DropoutRow words[kRows];
};

template <class T, int kWidth>
struct PairBlock {
  using S = PairShape<T, kWidth>;
  static constexpr int kWalked = S::kWalked;
  const BackwardArgs<T>& args;
  const CentroidQueries& queries;
  std::uint32_t base;
  QueryFacts<kWalked>& facts;
  std::uint32_t* words;  // top keys: bits of walked keys for owned queries, or the reverse
  ItemChunk own;
  ItemSpan q_span, k_span;
  bool subtract;

  __device__ Tile<T, kWidth> owned(int tensor) const {
    return {base + tensor * S::kOwned * S::kRowBytes};
  }
  // Walked rows are behind `owners` tensors of owned rows.
  __device__ Tile<T, kWidth> walked(int owners, int tensor) const {
    return {base + (owners * S::kOwned + tensor * kWalked) * S::kRowBytes};
  }
  __device__ std::int64_t line(int head) const {  // of the item's first query in (B, H, N) tensors
    return (static_cast<std::int64_t>(q_span.batch) * args.shape.H + head) * args.shape.N +
           q_span.begin;
  }
  __device__ Rows<const T> rows(const Tensor4<const T>& tensor, const ItemSpan& span,
                                int head) const {
    return tensor.rows(span.batch, head, span.begin);
  }
  // Clusters and lse of kRows queries from `first` on; the caller synchronises the threads.
  template <int kRows>
  __device__ void load_facts(int head, int first, int count) const {
    const int r = static_cast<int>(threadIdx.x);
    if (r >= kRows) return;
    const bool there = r < count;
    const std::int64_t at = line(head) + first + r;
    const float lse = there ? args.lists.lse[at] * kLog2e : INFINITY;
    facts.lse[r] = lse == -INFINITY ? INFINITY : lse;
    facts.clusters[r] = there ? args.lists.labels[at] : -1;
    if (args.shape.dropout.on())
      facts.words[r] = args.shape.dropout.query(
          static_cast<std::int64_t>(own.item) * args.shape.H + head, first + r);
  }
  // The means of queries from `first` on, and which of the keys from `key` on are their top keys.
  template <int kRows, int kWords>
  __device__ void load_means(const Tile<T, kWidth>& tile, int head, int first, int key) const {
    if (!subtract) return;
    const std::int64_t problem = queries.row(own.item, head, 0);  // its first mean
    load_tile<kRows, S::kThreads>(tile,
                                  {args.scratch.mean + problem * kWidth, kWidth, kWidth, true}, 0,
                                  kRows, facts.clusters);
    cp_async_commit();
    const int topk = args.shape.topk;
    if (topk > 0)
      mark_top_keys<kRows, kWords>(words, facts.clusters, args.lists.top_keys + problem * topk,
                                   topk, args.scratch.near_top + line(head) + first, key);
  }
  __device__ void clear_words() const {
    for (int i = threadIdx.x; i < S::kOwned * kWalked / 32; i += S::kThreads) words[i] = 0;
  }
  // delta of kRows queries, whose output gradients have arrived.
  template <int kRows>
  __device__ void find_deltas(const Tile<T, kWidth>& gradients, int head, int first,
                              int count) const {
    constexpr int kShares = S::kThreads / kRows;  // threads of a row
    constexpr int kChunks = Tile<T, kWidth>::kChunks / kShares, kVector = Tile<T, kWidth>::kVector;
    const int r = static_cast<int>(threadIdx.x) / kShares,
              chunk0 = static_cast<int>(threadIdx.x) % kShares * kChunks;
    const Rows<const T> out = rows(args.out, q_span, head);
    const T* from = out.row(first + min(r, max(count - 1, 0)));
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
      const int column = (chunk0 + i) * kVector;
      uint4 words_out = make_uint4(0, 0, 0, 0);
      if (column < out.width)
        words_out = out.aligned ? *reinterpret_cast<const uint4*>(from + column)
                                : load_chunk(from, column, out.width);
      float a[kVector] = {}, b[kVector] = {};
      add_chunk<T>(a, words_out);
      add_chunk<T>(b, load_shared16(gradients.chunk(r, chunk0 + i)));
#pragma unroll
      for (int e = 0; e < kVector; ++e) sum = fmaf(a[e], b[e], sum);
    }
#pragma unroll
    for (int step = 1; step < kShares; step *= 2) sum += __shfl_xor_sync(~0u, sum, step);
    if (chunk0 == 0) facts.delta[r] = sum;
  }
};

// 16 x 16 near pairs: weights of the exact scores and of the means', and both times dP - delta. The
// facts of a query are those of its row or, with kKeys, of its column.
struct Pairs {
  Accumulator p[1], r[1], d[1];

  // Dropout of dP, and with kKeys of the weights of dv; factor(half, column) of a pair.
  template <class Factor>
  __device__ __forceinline__ void drop(Accumulator& of, const Factor& factor) {
#pragma unroll
    for (int i = 0; i < 8; ++i)
      of[i / 4][i % 4] *=
          factor(i / 2 % 2, i / 4 * 8 + static_cast<int>(threadIdx.x) % 4 * 2 + i % 2);
  }

  // lse, delta and bits (of top keys) by query: called with the element's row half and column.
  template <bool kKeys, class Facts>
  __device__ __forceinline__ void differentiate(const Facts& facts, bool subtract, float exponent,
                                                int left) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int column = i / 4 * 8 + lane % 4 * 2 + i % 2, half = i / 2 % 2;
      float lse, delta;
      bool top;
      facts(half, column, lse, delta, top);
      float& weight = p[0][i / 4][i % 4];
      float& mean = r[0][i / 4][i % 4];
      float& x = d[0][i / 4][i % 4];
      const bool seen = kKeys || column < left;
      weight = seen ? exp2_approximate(fmaf(weight, exponent, -lse)) : 0.0f;
      mean = subtract && seen && !top ? exp2_approximate(fmaf(mean, exponent, -lse)) : 0.0f;
      x -= delta;
    }
  }
};

// Writes the sums of a warp's 16 rows times a factor; `count` rows of the block exist. add: adds to
// what is there.
template <class T, int kDepths>
__device__ __forceinline__ void store_rows(const Rows<T>& to, const Accumulator (&sum)[kDepths],
                                           float factor, int count, bool add = false) {
#pragma unroll
  for (int d = 0; d < kDepths; d += 2) {
    Accumulator pair[2];
#pragma unroll
    for (int i = 0; i < 16; ++i)
      pair[i / 8][i / 4 % 2][i % 4] = sum[d + i / 8][i / 4 % 2][i % 4] * factor;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = static_cast<int>(threadIdx.x) / 32 * 16 + 8 * half +
                      static_cast<int>(threadIdx.x) % 32 / 4;
      if (add) add_columns(to, row, row < count, 16 * d, pair, half);
      store_columns(to, row, row < count, 16 * d, pair, half);
    }
  }
}

template <class T, int kWidth>
__device__ __forceinline__ void own_queries(const PairBlock<T, kWidth>& block, int head) {
  using S = PairShape<T, kWidth>;
  constexpr int kWalked = S::kWalked, kWords = kWalked / 32;
  const BackwardArgs<T>& args = block.args;
  const ItemChunk& own = block.own;
  const int count = own.end - own.begin, near = args.shape.near, length = block.k_span.length;
  const int kv_head = head / args.shape.group, lane = threadIdx.x % 32,
            warp_row = static_cast<int>(threadIdx.x) / 32 * 16;
  const int first = NearRange(own.begin, near, length).begin,
            end = NearRange(own.end - 1, near, length).end;
  const Tile<T, kWidth> keys = block.walked(3, 0), values = block.walked(3, 1);
  const auto load_keys = [&](int begin) {
    load_tile<kWalked, S::kThreads>(keys, block.rows(args.k, block.k_span, kv_head), begin,
                                    end - begin);
    load_tile<kWalked, S::kThreads>(values, block.rows(args.v, block.k_span, kv_head), begin,
                                    end - begin);
    cp_async_commit();
  };
  load_tile<S::kOwned, S::kThreads>(block.owned(0), block.rows(args.q, block.q_span, head),
                                    own.begin, count);
  load_tile<S::kOwned, S::kThreads>(block.owned(2), block.rows(args.g, block.q_span, head),
                                    own.begin, count);
  load_keys(first);
  block.template load_facts<S::kOwned>(head, own.begin, count);
  block.clear_words();
  __syncthreads();
  block.template load_means<S::kOwned, kWords>(block.owned(1), head, own.begin, first);
  cp_async_wait<0>();
  __syncthreads();
  block.template find_deltas<S::kOwned>(block.owned(2), head, own.begin, count);
  __syncthreads();
  if (static_cast<int>(threadIdx.x) < count)
    args.scratch.delta[block.line(head) + own.begin + threadIdx.x] = block.facts.delta[threadIdx.x];

  QueryFragments<T, kWidth, S::kResident, 1> q, means, g;
  q.load(block.owned(0), warp_row);
  means.load(block.owned(1), warp_row);
  g.load(block.owned(2), warp_row);
  float lse[2], delta[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    lse[half] = block.facts.lse[warp_row + 8 * half + lane / 4];
    delta[half] = block.facts.delta[warp_row + 8 * half + lane / 4];
  }
  const float exponent = args.shape.scale * kLog2e;
  Accumulator dq[kWidth / 16] = {}, dmean[kWidth / 16] = {};
  const NearRange range(own.begin + warp_row, near, length);
  for (int begin = first; begin < end; begin += kWalked) {
    const int last = warp_row < count ? min(range.end - begin, kWalked) : 0;
#pragma unroll 1
    for (int column = max(range.begin - begin, 0); column < last; column += 16) {
      Pairs pairs;
      q.scores(pairs.p, keys, column);
      if (block.subtract) means.scores(pairs.r, keys, column);
      g.scores(pairs.d, values, column);
      if (args.shape.dropout.on())
        pairs.drop(pairs.d[0], [&](int half, int key) {
          return kept(args.shape.dropout, block.facts.words[warp_row + 8 * half + lane / 4],
                      begin + column + key);
        });
      unsigned bits[2];
#pragma unroll
      for (int half = 0; half < 2; ++half)
        bits[half] =
            block.words[(warp_row + 8 * half + lane / 4) * kWords + column / 32] >> (column % 32);
      pairs.differentiate<false>(
          [&](int half, int key, float& l, float& e, bool& top) {
            l = lse[half];
            e = delta[half];
            top = bits[half] >> key & 1;
          },
          block.subtract, exponent, length - begin - column);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        pairs.p[0][i / 4][i % 4] *= pairs.d[0][i / 4][i % 4];
        pairs.r[0][i / 4][i % 4] *= pairs.d[0][i / 4][i % 4];
      }
      FragmentA<T> ds, dr;
      to_fragment(ds, pairs.p[0]);
      to_fragment(dr, pairs.r[0]);
#pragma unroll
      for (int d = 0; d < kWidth / 16; ++d) {
        FragmentB<T> k;
        load_b_transposed(k, keys, 16 * d, column);
        multiply_add(dq[d], ds, k);
        if (block.subtract) multiply_add(dmean[d], dr, k);
      }
    }
    if (begin + kWalked >= end) break;
    __syncthreads();
    load_keys(begin + kWalked);
    if (block.subtract && args.shape.topk > 0) {
      block.clear_words();
      __syncthreads();
      mark_top_keys<S::kOwned, kWords>(
          block.words, block.facts.clusters,
          args.lists.top_keys + block.queries.row(own.item, head, 0) * args.shape.topk,
          args.shape.topk, args.scratch.near_top + block.line(head) + own.begin, begin + kWalked);
    }
    cp_async_wait<0>();
    __syncthreads();
  }

  if (!args.dq.data) return;
  store_rows(args.dq.rows(block.q_span.batch, head, block.q_span.begin + own.begin), dq,
             args.shape.scale, count);
  if (!block.subtract) return;
  T* rows = args.scratch.near_dmean + (block.line(head) + own.begin) * kWidth;
  store_rows(Rows<T>{rows, kWidth, kWidth, true}, dmean, -args.shape.scale, count);
}

template <class T, int kWidth>
__device__ __forceinline__ void own_keys(const PairBlock<T, kWidth>& block, int kv_head) {
  using S = PairShape<T, kWidth>;
  constexpr int kWalked = S::kWalked, kWords = S::kOwned / 32;
  const BackwardArgs<T>& args = block.args;
  const ItemChunk& own = block.own;
  const int count = own.end - own.begin, near = args.shape.near, length = block.q_span.length;
  const int lane = threadIdx.x % 32, warp_row = static_cast<int>(threadIdx.x) / 32 * 16;
  const int first = NearRange(own.begin, near, length).begin,
            end = NearRange(own.end - 1, near, length).end;
  const Tile<T, kWidth> queries = block.walked(2, 0), means = block.walked(2, 1),
                        gradients = block.walked(2, 2);
  load_tile<S::kOwned, S::kThreads>(block.owned(0), block.rows(args.k, block.k_span, kv_head),
                                    own.begin, count);
  load_tile<S::kOwned, S::kThreads>(block.owned(1), block.rows(args.v, block.k_span, kv_head),
                                    own.begin, count);
  QueryFragments<T, kWidth, S::kResident, 1> k, v;
  const float exponent = args.shape.scale * kLog2e;
  Accumulator dk[kWidth / 16] = {}, dv[kWidth / 16] = {};
  const NearRange range(own.begin + warp_row, near, length);
  bool start = true;
#pragma unroll 1
  for (int head = kv_head * args.shape.group; head < (kv_head + 1) * args.shape.group; ++head)
#pragma unroll 1
    for (int begin = first; begin < end; begin += kWalked) {
      const int walked = min(end - begin, kWalked);
      if (!start) __syncthreads();  // the tiles are free
      load_tile<kWalked, S::kThreads>(queries, block.rows(args.q, block.q_span, head), begin,
                                      walked);
      load_tile<kWalked, S::kThreads>(gradients, block.rows(args.g, block.q_span, head), begin,
                                      walked);
      cp_async_commit();
      block.template load_facts<kWalked>(head, begin, walked);
      block.clear_words();
      __syncthreads();
      block.template load_means<kWalked, kWords>(means, head, begin, own.begin);
      cp_async_wait<0>();
      __syncthreads();
      block.template find_deltas<kWalked>(gradients, head, begin, walked);
      if (start) {
        k.load(block.owned(0), warp_row);
        v.load(block.owned(1), warp_row);
        start = false;
      }
      __syncthreads();
      const int last = warp_row < count ? min(range.end - begin, kWalked) : 0;
#pragma unroll 1
      for (int column = max(range.begin - begin, 0); column < last; column += 16) {
        Pairs pairs;
        k.scores(pairs.p, queries, column);
        if (block.subtract) k.scores(pairs.r, means, column);
        v.scores(pairs.d, gradients, column);
        const auto factor = [&](int half, int query) {
          return kept(args.shape.dropout, block.facts.words[column + query],
                      own.begin + warp_row + 8 * half + lane / 4);
        };
        if (args.shape.dropout.on()) pairs.drop(pairs.d[0], factor);
        const int own_word = warp_row / 32, own_bit = warp_row % 32 + lane / 4;
        pairs.differentiate<true>(
            [&](int half, int query, float& l, float& e, bool& top) {
              l = block.facts.lse[column + query];
              e = block.facts.delta[column + query];
              top = block.words[(column + query) * kWords + own_word] >> (own_bit + 8 * half) & 1;
            },
            block.subtract, exponent, 16);
        Accumulator difference;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          float& p = pairs.p[0][i / 4][i % 4];
          float& r = pairs.r[0][i / 4][i % 4];
          const float x = pairs.d[0][i / 4][i % 4];
          difference[i / 4][i % 4] = p - r;
          p *= x;
          r *= -x;
        }
        if (args.shape.dropout.on()) pairs.drop(difference, factor);
        FragmentA<T> w, ds, dr;
        to_fragment(w, difference);
        to_fragment(ds, pairs.p[0]);
        to_fragment(dr, pairs.r[0]);
#pragma unroll
        for (int d = 0; d < kWidth / 16; ++d) {
          FragmentB<T> b;
          load_b_transposed(b, gradients, 16 * d, column);
          multiply_add(dv[d], w, b);
          load_b_transposed(b, queries, 16 * d, column);
          multiply_add(dk[d], ds, b);
          if (!block.subtract) continue;
          load_b_transposed(b, means, 16 * d, column);
          multiply_add(dk[d], dr, b);
        }
      }
    }

  // Heads that add their far keys have no gradients of centroids.
  const auto store = [&](const Tensor4<T>& tensor, Accumulator(&sum)[kWidth / 16], float factor) {
    if (tensor.data)
      store_rows(tensor.rows(block.k_span.batch, kv_head, block.k_span.begin + own.begin), sum,
                 factor, count, block.subtract);
  };
  store(args.dk, dk, args.shape.scale);
  store(args.dv, dv, 1.0f);
}

// kKeys: the block owns keys, otherwise queries.
template <class T, int kWidth, bool kKeys>
__global__ void __launch_bounds__((PairShape<T, kWidth>::kThreads),
                                  (PairShape<T, kWidth>::kMinBlocks))
    near_gradient_kernel(const __grid_constant__ BackwardArgs<T> args,
                         const __grid_constant__ CentroidQueries queries, ItemChunks tiles) {
  await_writes();  // first: later kernels read what earlier ones wrote before they wait
  release_next();
  extern __shared__ __align__(128) unsigned char memory[];
  using S = PairShape<T, kWidth>;
  __shared__ QueryFacts<S::kWalked> facts;
  __shared__ std::uint32_t words[S::kOwned * S::kWalked / 32];
  const int head = static_cast<int>(blockIdx.y);
  const ItemChunk own =
      tiles.find(kKeys ? queries.spans.k : queries.spans.q, static_cast<int>(blockIdx.x));
  if (own.begin >= own.end) return;
  const PairBlock<T, kWidth> block{args,
                                   queries,
                                   shared_address(memory),
                                   facts,
                                   words,
                                   own,
                                   queries.spans.q.span(own.item),
                                   queries.spans.k.span(own.item),
                                   !args.adds(own.item, kKeys ? head * args.shape.group : head)};
  if constexpr (kKeys)
    own_keys(block, head);
  else
    own_queries(block, head);
}

template <bool kKeys, class T>
void launch(const BackwardArgs<T>& args, const CentroidQueries& queries, cudaStream_t stream) {
  const BackwardShape& shape = args.shape;
  const int heads = kKeys ? shape.H / shape.group : shape.H;
  dispatch_head_dim("clustered", shape.pitch, [&](auto width) {
    constexpr int kWidth = decltype(width)::value;
    using S = PairShape<T, kWidth>;
    const ItemChunks tiles =
        row_tiles(kKeys ? shape.spans.k : shape.spans.q, shape.items, S::kOwned);
    launch_early("near_gradient", near_gradient_kernel<T, kWidth, kKeys>,
                 dim3(static_cast<unsigned>(tiles.slots), static_cast<unsigned>(heads)),
                 S::kThreads, S::kBytes, stream, args, queries, tiles);
  });
}

// One thread per entry of the lists of top keys. Bits are set in any order.
__global__ void __launch_bounds__(kNearThreads)
    top_bits_kernel(const __grid_constant__ BackwardShape shape, const std::int32_t* top_keys,
                    std::int64_t entries, TopKeyBits bits) {
  await_previous();
  const std::int64_t at = static_cast<std::int64_t>(blockIdx.x) * kNearThreads + threadIdx.x;
  const int key = at < entries ? top_keys[at] : -1;
  if (key < 0) return;
  const int row = static_cast<int>(at / shape.topk), problem = row / shape.clusters;
  const int item = problem / shape.H, head = problem % shape.H;
  const int centroid = head % shape.group * shape.clusters + row % shape.clusters;
  atomicOr(bits.rows(shape.spans.k.span(item), head / shape.group) +
               static_cast<std::int64_t>(key) * bits.count + centroid / 32,
           1u << centroid % 32);
}

void set_top_bits(const BackwardShape& shape, const std::int32_t* top_keys, const TopKeyBits& bits,
                  cudaStream_t stream) {
  const std::size_t words =
      static_cast<std::size_t>(shape.B) * bits.key_heads * bits.S * bits.count;
  COTERIE_CUDA(cudaMemsetAsync(bits.words, 0, words * sizeof(std::uint32_t), stream));
  const std::int64_t entries =
      static_cast<std::int64_t>(shape.items) * shape.H * shape.clusters * shape.topk;
  launch_early("top_bits", top_bits_kernel,
               static_cast<unsigned>((entries + kNearThreads - 1) / kNearThreads), kNearThreads, 0,
               stream, shape, top_keys, entries, bits);
}

}  // namespace

template <class T>
void near_query_gradients(const BackwardArgs<T>& args, const CentroidQueries& queries, bool sm90a,
                          cudaStream_t stream) {
  const BackwardShape& shape = args.shape;
  if (shape.subtracts) {
    if (shape.topk > 0) {
      set_top_bits(shape, args.lists.top_keys, args.scratch.top_bits, stream);
      find_near_top_keys(queries, args.lists.labels, args.lists.top_keys, shape.items, shape.topk,
                         shape.N, shape.near, args.scratch.near_top, stream);
    }
    round_means(queries, shape.items, args.scratch.mean, shape.pitch, stream);
  }
  if constexpr (sizeof(T) == 2)
    if (sm90a) return near_query_gradients_sm90a(args, queries, stream);
  launch<false>(args, queries, stream);
}

template <class T>
void near_key_gradients(const BackwardArgs<T>& args, const CentroidQueries& queries, bool sm90a,
                        cudaStream_t stream) {
  if (!args.dk.data && !args.dv.data) return;
  if constexpr (sizeof(T) == 2)
    if (sm90a) return near_key_gradients_sm90a(args, queries, stream);
  launch<true>(args, queries, stream);
}

template void near_query_gradients(const BackwardArgs<float>&, const CentroidQueries&, bool,
                                   cudaStream_t);
template void near_query_gradients(const BackwardArgs<Bf16>&, const CentroidQueries&, bool,
                                   cudaStream_t);
template void near_query_gradients(const BackwardArgs<F16>&, const CentroidQueries&, bool,
                                   cudaStream_t);
template void near_key_gradients(const BackwardArgs<float>&, const CentroidQueries&, bool,
                                 cudaStream_t);
template void near_key_gradients(const BackwardArgs<Bf16>&, const CentroidQueries&, bool,
                                 cudaStream_t);
template void near_key_gradients(const BackwardArgs<F16>&, const CentroidQueries&, bool,
                                 cudaStream_t);

}  // namespace coterie::cuda
