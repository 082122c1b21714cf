// SPDX-License-Identifier: MIT
// Outputs of the queries of clustered attention.
//
// Improved: out_i = mass_c * (attention of query i over the top keys of its cluster c) + bottom_c.
// A block takes up to 256 queries of one cluster. It gathers the cluster's keys and values to
// shared memory once; each warp then streams 16 queries at a time through its registers and writes
// each output to its query's place. Plain: out_i = centroid_out_c.
//
// Lanes read and write rows in pieces of 16 bytes. That deals columns to lanes in another order
// than the products do, so keys and values are put into shared memory in a matching order
// (load_permuted): products do not care in which order depths are added, and outputs come out in
// the order to write.
#include "cuda/clustered.h"
#include "cuda/device/load.cuh"
#include "cuda/device/mma.cuh"
#include "cuda/device/softmax.cuh"
#include "cuda/device/units.cuh"
#include "cuda/launch.h"
#include "cuda/tuning.h"

namespace coterie::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / 32;
constexpr int kQueries = 256;  // of a block
constexpr int kKeys = 32;      // multiplied at a time

template <class T>
struct TopArgs {
  ItemSpans spans;
  QueryTiles<kQueries> tiles;
  Tensor4<const T> q, k, v;
  Tensor4<T> out;
  const std::int32_t *order, *offsets, *top_keys;
  const float *mass, *bottom;
  float* lse;
  int H, group, N, topk, padded;  // padded: topk rounded up to a multiple of kKeys
  float exponent;                 // scale log2(e)
};

// Number of entries before the first -1, by all lanes of a warp.
__device__ __forceinline__ int listed(const std::int32_t* list, int width) {
  int count = 0;
  for (int first = 0; first < width; first += 32) {
    const int i = first + threadIdx.x % 32;
    count += __popc(__ballot_sync(~0u, i < width && list[i] >= 0));
  }
  return count;
}

// Rows of a tile by their index lists, as load_tile; but in every 64 bytes of a row the word that
// lane l of a product holds first comes from piece l % 4 of the row.
template <class T, int kDim>
__device__ __forceinline__ void load_permuted(const Tile<T, kDim>& tile, const Rows<const T>& rows,
                                              int count, const std::int32_t* index) {
  constexpr int kChunks = Tile<T, kDim>::kChunks, kVector = Tile<T, kDim>::kVector;
  const int padded = (count + kKeys - 1) / kKeys * kKeys;
#pragma unroll 4
  for (int number = threadIdx.x; number < padded * kChunks; number += kThreads) {
    const int r = number / kChunks, chunk = number % kChunks, column = chunk * kVector;
    const int row = r < count ? index[r] : -1;
    uint4 words = make_uint4(0, 0, 0, 0);
    if (row >= 0 && column < rows.width)
      words = rows.aligned ? *reinterpret_cast<const uint4*>(rows.row(row) + column)
                           : load_chunk(rows.row(row), column, rows.width);
    const int first = chunk / 4 * 4, piece = chunk % 4;
    if constexpr (sizeof(T) == 2) {
      const std::uint32_t parts[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
      for (int i = 0; i < 4; ++i)
        asm volatile("st.shared.b32 [%0], %1;" ::"r"(tile.chunk(r, first + i) + 4 * piece),
                     "r"(parts[i])
                     : "memory");
    } else {
      const std::uint32_t to = tile.chunk(r, first + piece / 2) + piece % 2 * 8;
      const std::uint32_t then = tile.chunk(r, first + 2 + piece / 2) + piece % 2 * 8;
      asm volatile("st.shared.v2.b32 [%0], {%1,%2};" ::"r"(to), "r"(words.x), "r"(words.y)
                   : "memory");
      asm volatile("st.shared.v2.b32 [%0], {%1,%2};" ::"r"(then), "r"(words.z), "r"(words.w)
                   : "memory");
    }
  }
}

// 16 queries of a warp in registers: lane l has pieces l % 4, l % 4 + 4, ... of rows l / 4 and
// l / 4 + 8.
template <class T, int kDim>
struct QueryRows {
  static constexpr int kPieces = Tile<T, kDim>::kChunks / 4;
  static constexpr int kVector = Tile<T, kDim>::kVector;
  int rows[2];  // numbers of the queries, -1 for none
  uint4 pieces[2][kPieces];

  __device__ void load(const Rows<const T>& from) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int i = 0; i < kPieces; ++i) {
        const int column = (4 * i + lane % 4) * kVector;
        pieces[half][i] = make_uint4(0, 0, 0, 0);
        if (rows[half] < 0 || column >= from.width) continue;
        const T* row = from.row(rows[half]);
        pieces[half][i] = from.aligned ? __ldcs(reinterpret_cast<const uint4*>(row + column))
                                       : load_chunk(row, column, from.width);
      }
  }
  // Depths 16 d .. 16 d + 15 in the order of load_permuted.
  __device__ FragmentA<T> fragment(int d) const {
    FragmentA<T> a;
    const uint4& low = pieces[0][sizeof(T) == 2 ? d / 2 : d];
    const uint4& high = pieces[1][sizeof(T) == 2 ? d / 2 : d];
    if constexpr (sizeof(T) == 2) {
      a.r[0] = d % 2 == 0 ? low.x : low.z;
      a.r[1] = d % 2 == 0 ? high.x : high.z;
      a.r[2] = d % 2 == 0 ? low.y : low.w;
      a.r[3] = d % 2 == 0 ? high.y : high.w;
    } else {
      a.r[0] = low.x;
      a.r[1] = high.x;
      a.r[2] = low.y;
      a.r[3] = high.y;
      a.r[4] = low.z;
      a.r[5] = high.z;
      a.r[6] = low.w;
      a.r[7] = high.w;
    }
    return a;
  }
};

// Attention of 16 queries of a warp over the cluster's top keys.
template <class T, int kDim>
struct TopRows {
  Accumulator out[kDim / 16] = {};
  float shift[2] = {-INFINITY, -INFINITY}, sum[2] = {};

  // The weights of kKeys keys, of which `left` are there, from their scores.
  __device__ void weigh(Accumulator (&s)[2], int left, float exponent) {
    float largest[2] = {shift[0], shift[1]};
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      float& score = s[i / 8][i / 4 % 2][i % 4];
      const int key = i / 8 * 16 + i / 4 % 2 * 8 + threadIdx.x % 4 * 2 + i % 2;
      score = key < left ? score * exponent : -INFINITY;
      largest[i / 2 % 2] = fmaxf(largest[i / 2 % 2], score);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      largest[half] = quad_max(largest[half]);
      if (largest[half] == -INFINITY) largest[half] = 0.0f;
      const float factor = exp2_approximate(shift[half] - largest[half]);
      shift[half] = largest[half];
      sum[half] *= factor;
#pragma unroll
      for (int i = 0; i < kDim / 4; ++i) out[i / 4][i / 2 % 2][2 * half + i % 2] *= factor;
    }
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      float& score = s[i / 8][i / 4 % 2][i % 4];
      score = exp2_approximate(score - shift[i / 2 % 2]);
      sum[i / 2 % 2] += score;
    }
  }

  __device__ void attend(const QueryRows<T, kDim>& queries, const Tile<T, kDim>& keys,
                         const Tile<T, kDim>& values, int left, float exponent) {
    Accumulator s[2];
#pragma unroll
    for (int d = 0; d < kDim / 16; ++d) {
      const FragmentA<T> q = queries.fragment(d);
#pragma unroll
      for (int b = 0; b < 2; ++b) {
        FragmentB<T> k;
        load_b(k, keys, 16 * b, 16 * d);
        if (d == 0)
          multiply(s[b], q, k);
        else
          multiply_add(s[b], q, k);
      }
    }
    weigh(s, left, exponent);
#pragma unroll
    for (int b = 0; b < 2; ++b) {
      FragmentA<T> p;
      to_fragment(p, s[b]);
#pragma unroll
      for (int d = 0; d < kDim / 16; ++d) {
        FragmentB<T> v;
        load_b_transposed(v, values, 16 * d, 16 * b);
        multiply_add(out[d], p, v);
      }
    }
  }

  // Piece i of row `half`: mass * out / sum + bottom, as T.
  __device__ uint4 piece(int half, int i, float factor, const float* bottom) const {
    constexpr int kVector = Tile<T, kDim>::kVector;
    float values[kVector];
#pragma unroll
    for (int e = 0; e < kVector; ++e) {
      const Accumulator& acc = out[sizeof(T) == 2 ? 2 * i + e / 4 : i];
      values[e] = fmaf(acc[e / 2 % 2][2 * half + e % 2], factor, bottom[e]);
    }
    if constexpr (sizeof(T) == 2)
      return make_uint4(pack2<T>(values[0], values[1]), pack2<T>(values[2], values[3]),
                        pack2<T>(values[4], values[5]), pack2<T>(values[6], values[7]));
    else
      return make_uint4(__float_as_uint(values[0]), __float_as_uint(values[1]),
                        __float_as_uint(values[2]), __float_as_uint(values[3]));
  }
};

template <class T>
__device__ __forceinline__ void store_chunk(const Rows<T>& to, int row, int column,
                                            const uint4& words) {
  constexpr int kVector = 16 / sizeof(T);
  if (column >= to.width) return;
  T* target = to.row(row) + column;
  if (to.aligned) return __stcs(reinterpret_cast<uint4*>(target), words);
  union {
    uint4 words;
    T elements[kVector];
  } chunk;
  chunk.words = words;
#pragma unroll
  for (int i = 0; i < kVector; ++i)
    if (column + i < to.width) target[i] = chunk.elements[i];
}

// The outputs of 16 queries to their places, and their log-sum-exps. bottom has kDim elements.
template <class T, int kDim>
__device__ __forceinline__ void write_rows(const QueryRows<T, kDim>& queries,
                                           const TopRows<T, kDim>& rows, const Rows<T>& out,
                                           float* lse, float mass, const float* bottom) {
  constexpr int kVector = Tile<T, kDim>::kVector;
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float sum = quad_sum(rows.sum[half]);
    const float factor = sum == 0.0f ? 0.0f : mass / sum;
    const int row = queries.rows[half];
    if (row < 0) continue;
    if (lane % 4 == 0)
      lse[row] = sum == 0.0f ? -INFINITY : (rows.shift[half] + log2f(sum)) * 0.693147180559945f;
#pragma unroll
    for (int i = 0; i < QueryRows<T, kDim>::kPieces; ++i) {
      const int column = (4 * i + lane % 4) * kVector;
      store_chunk(out, row, column, rows.piece(half, i, factor, bottom + column));
    }
  }
}

template <class T, int kDim>
__global__ void __launch_bounds__(kThreads, sizeof(T) == 4 ? 2
                                            : kDim <= 64   ? 4
                                                           : 3)
    topk_attend_kernel(const __grid_constant__ TopArgs<T> args) {
  extern __shared__ __align__(128) unsigned char memory[];
  __shared__ __align__(16) float bottom[kDim];
  const int head = blockIdx.y, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const QueryTile tile =
      args.tiles.find(args.spans.q, args.offsets, args.H, head, static_cast<int>(blockIdx.x));
  if (tile.count == 0) return;
  const std::int64_t line = static_cast<std::int64_t>(tile.span.batch) * args.H + head;
  const std::int32_t* order = args.order + line * args.N + tile.span.begin + tile.first;
  const auto number = [&](int group, int half) {
    const int r = 16 * group + 8 * half + lane / 4;
    return r < tile.count ? order[r] : -1;
  };
  QueryRows<T, kDim> next;
  int after[2];  // numbers of the queries after the next
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    next.rows[half] = number(warp, half);
    after[half] = number(warp + kWarps, half);
  }
  const Rows<const T> q = args.q.rows(tile.span.batch, head, tile.span.begin);
  next.load(q);

  const Tile<T, kDim> keys{shared_address(memory)}, values = keys.below(args.padded);
  const std::int64_t problem = static_cast<std::int64_t>(tile.item) * args.H + head;
  const std::int64_t cluster_row = problem * args.tiles.clusters + tile.cluster;
  const std::int32_t* top = args.top_keys + cluster_row * args.topk;
  const ItemSpan span = args.spans.k.span(tile.item);
  load_permuted(keys, args.k.rows(span.batch, head / args.group, span.begin), args.topk, top);
  load_permuted(values, args.v.rows(span.batch, head / args.group, span.begin), args.topk, top);
  for (int d = threadIdx.x; d < kDim; d += kThreads)
    bottom[d] = d < args.v.width ? args.bottom[cluster_row * args.v.width + d] : 0.0f;
  const int count = listed(top, args.topk);
  const float mass = args.mass[cluster_row];
  const Rows<T> out = args.out.rows(tile.span.batch, head, tile.span.begin);
  float* lse = args.lse + line * args.N + tile.span.begin;
  __syncthreads();

#pragma unroll 1
  for (int group = warp; 16 * group < tile.count; group += kWarps) {
    const QueryRows<T, kDim> queries = next;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      next.rows[half] = after[half];
      after[half] = number(group + 2 * kWarps, half);
    }
    next.load(q);
    TopRows<T, kDim> rows;
    for (int first = 0; first < count; first += kKeys)
      rows.attend(queries, keys.below(first), values.below(first), count - first, args.exponent);
    write_rows(queries, rows, out, lse, mass, bottom);
  }
}

// Rows of the padding: outputs 0, log-sum-exps -inf. One warp per row.
template <class T>
__global__ void __launch_bounds__(kThreads)
    padding_kernel(const __grid_constant__ Tensor4<T> out, float* lse, SequenceSpans queries,
                   int items) {
  const int row = static_cast<int>(blockIdx.x) * (kThreads / 32) + threadIdx.x / 32;
  const int head = blockIdx.y, batch = blockIdx.z;
  if (row >= queries.rows || queries.item_of(batch, row, items) >= 0) return;
  T* to = out.rows(batch, head, row).data;
  for (int column = threadIdx.x % 32; column < out.width; column += 32)
    to[column] = from_float<T>(0.0f);
  if (threadIdx.x % 32 == 0)
    lse[(static_cast<std::int64_t>(batch) * gridDim.y + head) * queries.rows + row] = -INFINITY;
}

// Row i becomes row labels[i] of `from` (items, H, C, width), or 0 in the padding. One thread per
// 16 bytes of output.
template <class T>
__global__ void __launch_bounds__(kThreads)
    broadcast_kernel(const __grid_constant__ Tensor4<T> out, const float* from,
                     const std::int32_t* labels, int clusters, SequenceSpans queries, int items) {
  constexpr int kVector = 16 / sizeof(T);
  const int chunks = (out.width + kVector - 1) / kVector;
  const int number = static_cast<int>(blockIdx.x * kThreads + threadIdx.x);
  const int row = number / chunks, column = number % chunks * kVector;
  const int head = blockIdx.y, batch = blockIdx.z, H = gridDim.y;
  if (row >= queries.rows) return;
  const int item = queries.item_of(batch, row, items);
  const int label =
      item < 0 ? -1 : labels[(static_cast<std::int64_t>(batch) * H + head) * queries.rows + row];
  union {
    uint4 words;
    T elements[kVector];
  } chunk;
  chunk.words = make_uint4(0, 0, 0, 0);
  if (label >= 0 && label < clusters) {
    const float* source =
        from + ((static_cast<std::int64_t>(item) * H + head) * clusters + label) * out.width;
#pragma unroll
    for (int i = 0; i < kVector; ++i)
      if (column + i < out.width) chunk.elements[i] = from_float<T>(source[column + i]);
  }
  T* to = out.rows(batch, head, row).data + column;
  if (out.aligned) {
    *reinterpret_cast<uint4*>(to) = chunk.words;
  } else {
#pragma unroll
    for (int i = 0; i < kVector; ++i)
      if (column + i < out.width) to[i] = chunk.elements[i];
  }
}

bool ragged(const AttentionCall& call) {
  return call.inputs.q_sequences.lengths.present() || call.inputs.q_sequences.cu_seqlens.present();
}

template <class T>
void fill_padding(const AttentionCall& call, const TensorView& out, float* lse,
                  cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>((call.N * 32 + kThreads - 1) / kThreads),
                  static_cast<unsigned>(call.H), static_cast<unsigned>(call.B));
  padding_kernel<T><<<grid, kThreads, 0, stream>>>(tensor4<T>(out), lse, item_spans(call.inputs).q,
                                                   static_cast<int>(call.num_items()));
  COTERIE_LAUNCH("padding");
}

template <class T, int kDim>
void launch_topk(const TopArgs<T>& args, cudaStream_t stream) {
  const int bytes = 2 * args.padded * Tile<T, kDim>::kRowBytes;
  allow_shared_memory(topk_attend_kernel<T, kDim>, static_cast<std::size_t>(bytes));
  const dim3 grid(static_cast<unsigned>(args.tiles.total), static_cast<unsigned>(args.H));
  topk_attend_kernel<T, kDim><<<grid, kThreads, bytes, stream>>>(args);
  COTERIE_LAUNCH("topk_attend");
}

}  // namespace

void topk_forward(const AttentionCall& call, const ClusteredSizes& sizes,
                  const ClusteredTensors& tensors, const TensorView& out, cudaStream_t stream) {
  if (call.B * call.H * call.N == 0) return;
  const auto ints = [](const TensorView& view) {
    return static_cast<const std::int32_t*>(view.data);
  };
  const auto floats = [](const TensorView& view) { return static_cast<float*>(view.data); };
  dispatch_element(call.op, call.inputs.q.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    TopArgs<T> args;
    args.spans = item_spans(call.inputs);
    args.tiles = query_tiles<kQueries>(call, sizes.clusters);
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
    args.padded = (args.topk + kKeys - 1) / kKeys * kKeys;
    args.exponent = static_cast<float>(call.scale * 1.4426950408889634);
    if (ragged(call)) fill_padding<T>(call, out, args.lse, stream);
    dispatch_head_dim(call.op, call.Dk,
                      [&](auto dim) { launch_topk<T, decltype(dim)::value>(args, stream); });
  });
}

void broadcast_forward(const AttentionCall& call, const ClusteredTensors& tensors,
                       const TensorView& out, cudaStream_t stream) {
  if (out.count() == 0) return;
  dispatch_element(call.op, call.inputs.q.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    constexpr std::int64_t kVector = 16 / sizeof(T);
    const std::int64_t chunks = call.N * ((call.Dv + kVector - 1) / kVector);
    const dim3 grid(static_cast<unsigned>((chunks + kThreads - 1) / kThreads),
                    static_cast<unsigned>(call.H), static_cast<unsigned>(call.B));
    broadcast_kernel<T><<<grid, kThreads, 0, stream>>>(
        tensor4<T>(out), static_cast<const float*>(tensors.out.data),
        static_cast<const std::int32_t*>(tensors.labels.data), static_cast<int>(tensors.clusters()),
        item_spans(call.inputs).q, static_cast<int>(call.num_items()));
    COTERIE_LAUNCH("broadcast");
  });
}

}  // namespace coterie::cuda
