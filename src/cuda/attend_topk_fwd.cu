// SPDX-License-Identifier: MIT
// Outputs of the queries of clustered attention.
//
// Improved: out_i = mass_c * (attention of query i over the top keys of its cluster c) + bottom_c.
// A block takes up to 64 queries a warp of one cluster. It gathers the cluster's keys and values to
// shared memory once; each warp then streams 16 queries at a time through its registers and writes
// each output to its query's place. Causal: attention over those top keys that are not after the
// query, and nothing else. Plain: out_i = centroid_out_c.
//
// Lanes read rows of queries in pieces of 16 bytes. That deals columns to lanes in another order
// than the products do; keys are read from shared memory in the same way, and products do not care
// in which order depths are added.
#include "cuda/clustered.h"
#include "cuda/device/ascending.cuh"
#include "cuda/device/await.cuh"
#include "cuda/device/load.cuh"
#include "cuda/device/mma.cuh"
#include "cuda/device/softmax.cuh"
#include "cuda/device/store.cuh"
#include "cuda/device/units.cuh"
#include "cuda/launch.h"
#include "cuda/tuning.h"

namespace coterie::cuda {
namespace {

constexpr int kThreads = 128;      // of the kernels without top keys
constexpr int kWarpBits = 6;       // of a warp
constexpr int kKeys = 32;          // multiplied at a time
constexpr int kSmallCluster = 48;  // mean size up to which one warp takes a tile

template <class T>
struct TopArgs {
  ItemSpans spans;
  QueryTiles tiles;
  Tensor4<const T> q, k, v;
  Tensor4<T> out;
  const std::int32_t *order, *offsets, *top_keys;
  const float *mass, *bottom;  // null: 1 and 0
  float* lse;
  int H, group, N, topk, padded;  // padded: topk rounded up to a multiple of kKeys
  float exponent;                 // scale log2(e)
  bool causal;                    // keys after a query are out of its sight
};

// Keys in shared memory, of which a lane reads the piece of 16 bytes that it holds of a query.
// Neighbouring rows lie in different halves of 128 bytes, so that 8 lanes meet no bank twice.
template <class T, int kDim>
struct KeyTile {
  static constexpr int kChunks = Tile<T, kDim>::kChunks;
  std::uint32_t base;

  __device__ std::uint32_t chunk(int row, int index) const {
    const int moved = kChunks % 8 == 0 ? index ^ (row & 1) << 2 : index;
    return base + row * Tile<T, kDim>::kRowBytes + moved * 16;
  }
  __device__ KeyTile below(int row) const { return {base + row * Tile<T, kDim>::kRowBytes}; }
  __device__ uint4 piece(int row, int index) const {
    uint4 words;
    asm volatile("ld.shared.v4.b32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
                 : "r"(chunk(row, index))
                 : "memory");
    return words;
  }
};

// Starts to copy the rows of a list of `topk` to shared memory, zeros up to a multiple of kKeys;
// returns how many there are. By all threads; the caller commits, waits and synchronises.
template <bool kAligned, class T, int kDim, int kBlockThreads>
__device__ __forceinline__ int gather(const KeyTile<T, kDim>& keys, const Tile<T, kDim>& values,
                                      const Rows<const T>& k, const Rows<const T>& v,
                                      const std::int32_t* top, int topk) {
  constexpr int kChunks = Tile<T, kDim>::kChunks;
  static_assert(kKeys * kChunks % kBlockThreads == 0, "lanes stay together for the shuffles");
  const int lane = threadIdx.x % 32;
  int count = 0;
#pragma unroll 1
  for (int first = 0; first < topk; first += kKeys) {
    const int own = first + lane < topk ? top[first + lane] : -1;
    count += __popc(__ballot_sync(~0u, own >= 0));
#pragma unroll
    for (int step = 0; step < kKeys * kChunks; step += kBlockThreads) {
      const int number = step + static_cast<int>(threadIdx.x);
      const int r = number / kChunks, chunk = number % kChunks;
      const int column = chunk * Tile<T, kDim>::kVector, row = __shfl_sync(~0u, own, r);
      const bool there = row >= 0 && column < k.width;
      const std::uint32_t to_k = keys.chunk(first + r, chunk),
                          to_v = values.chunk(first + r, chunk);
      if constexpr (kAligned) {
        cp_async16(to_k, there ? k.row(row) + column : k.data, there ? 16 : 0);
        cp_async16(to_v, there ? v.row(row) + column : v.data, there ? 16 : 0);
      } else {
        const uint4 zero = make_uint4(0, 0, 0, 0);
        store_shared16(to_k, there ? load_chunk(k.row(row), column, k.width) : zero);
        store_shared16(to_v, there ? load_chunk(v.row(row), column, v.width) : zero);
      }
    }
  }
  return count;
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
    if (from.aligned)
      load_all<true>(from);
    else
      load_all<false>(from);
  }
  template <bool kAligned>
  __device__ __forceinline__ void load_all(const Rows<const T>& from) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const T* row = from.row(max(rows[half], 0));
#pragma unroll
      for (int i = 0; i < kPieces; ++i) {
        const int column = (4 * i + static_cast<int>(threadIdx.x) % 4) * kVector;
        const bool there = rows[half] >= 0 && column < from.width;
        pieces[half][i] = make_uint4(0, 0, 0, 0);
        if (kAligned && there)
          pieces[half][i] = __ldcs(reinterpret_cast<const uint4*>(row + column));
        if (!kAligned && there) pieces[half][i] = load_chunk(row, column, from.width);
      }
    }
  }
  // Step `step` of the depths in pieces i: two steps of 16-bit elements, one of fp32.
  __device__ FragmentA<T> fragment(int i, int step) const {
    FragmentA<T> a;
    const uint4 &low = pieces[0][i], &high = pieces[1][i];
    if constexpr (sizeof(T) == 2) {
      a.r[0] = step == 0 ? low.x : low.z;
      a.r[1] = step == 0 ? high.x : high.z;
      a.r[2] = step == 0 ? low.y : low.w;
      a.r[3] = step == 0 ? high.y : high.w;
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

// The right factors of the same steps: pieces of keys l / 4 and l / 4 + 8 of 16.
template <class T>
__device__ __forceinline__ FragmentB<T> key_fragment(const uint4& low, const uint4& high,
                                                     int step) {
  FragmentB<T> b;
  if constexpr (sizeof(T) == 2) {
    b.r[0] = step == 0 ? low.x : low.z;
    b.r[1] = step == 0 ? low.y : low.w;
    b.r[2] = step == 0 ? high.x : high.z;
    b.r[3] = step == 0 ? high.y : high.w;
  } else {
    const uint4* halves[] = {&low, &high};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      b.r[4 * half] = halves[half]->x;
      b.r[4 * half + 1] = halves[half]->y;
      b.r[4 * half + 2] = halves[half]->z;
      b.r[4 * half + 3] = halves[half]->w;
    }
  }
  return b;
}

// Attention of 16 queries of a warp over the cluster's top keys.
template <class T, int kDim>
struct TopRows {
  Accumulator out[kDim / 16] = {};
  float shift[2] = {-INFINITY, -INFINITY}, sum[2] = {};

  // The weights of kKeys keys, of which the lane's two rows see the first left[], from their
  // scores.
  __device__ void weigh(Accumulator (&s)[2], const int (&left)[2], float exponent) {
    float largest[2] = {shift[0], shift[1]};
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      float& score = s[i / 8][i / 4 % 2][i % 4];
      const int key = i / 8 * 16 + i / 4 % 2 * 8 + threadIdx.x % 4 * 2 + i % 2;
      score = key < left[i / 2 % 2] ? score * exponent : -INFINITY;
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

  __device__ void attend(const QueryRows<T, kDim>& queries, const KeyTile<T, kDim>& keys,
                         const Tile<T, kDim>& values, const int (&left)[2], float exponent) {
    constexpr int kSteps = sizeof(T) == 2 ? 2 : 1;
    const int lane = threadIdx.x % 32;
    Accumulator s[2];
#pragma unroll
    for (int i = 0; i < QueryRows<T, kDim>::kPieces; ++i)
#pragma unroll
      for (int b = 0; b < 2; ++b) {
        const uint4 low = keys.piece(16 * b + lane / 4, 4 * i + lane % 4);
        const uint4 high = keys.piece(16 * b + 8 + lane / 4, 4 * i + lane % 4);
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
          const FragmentB<T> k = key_fragment<T>(low, high, step);
          if (i == 0 && step == 0)
            multiply(s[b], queries.fragment(i, step), k);
          else
            multiply_add(s[b], queries.fragment(i, step), k);
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
};

// The outputs of 16 queries, mass * out / sum + bottom, to their places, and their log-sum-exps.
// bottom has kDim elements.
template <class T, int kDim>
__device__ __forceinline__ void write_rows(const QueryRows<T, kDim>& queries,
                                           const TopRows<T, kDim>& rows, const Rows<T>& out,
                                           float* lse, float mass, const float* bottom) {
  const int lane = threadIdx.x % 32;
  float factor[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float sum = quad_sum(rows.sum[half]);
    factor[half] = sum == 0.0f ? 0.0f : mass / sum;
    if (lane % 4 == 0 && queries.rows[half] >= 0)
      lse[queries.rows[half]] =
          sum == 0.0f ? -INFINITY : (rows.shift[half] + log2f(sum)) * 0.693147180559945f;
  }
#pragma unroll
  for (int column = 0; column < kDim; column += 32) {
    Accumulator pair[2];
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      const float2 add = *reinterpret_cast<const float2*>(bottom + column + 8 * n + lane % 4 * 2);
#pragma unroll
      for (int i = 0; i < 4; ++i)
        pair[n / 2][n % 2][i] =
            fmaf(rows.out[column / 16 + n / 2][n % 2][i], factor[i / 2], i % 2 ? add.y : add.x);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half)
      store_columns(out, queries.rows[half], queries.rows[half] >= 0, column, pair, half);
  }
}

// As many warps on a multiprocessor as registers allow.
template <class T, int kDim>
constexpr int kResidentWarps = sizeof(T) == 4 || kDim > 64 ? 8 : 16;

template <class T, int kDim, int kWarps>
__global__ void __launch_bounds__(32 * kWarps, kResidentWarps<T, kDim> / kWarps)
    topk_attend_kernel(const __grid_constant__ TopArgs<T> args) {
  await_previous();
  extern __shared__ __align__(128) unsigned char memory[];
  __shared__ __align__(16) float bottom[kDim];
  const int head = blockIdx.y, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const QueryTile tile =
      args.tiles.find(args.spans.q, args.offsets, args.H, head, static_cast<int>(blockIdx.x));
  if (tile.count == 0) return;
  // What depends on the tile only is on its way before anything is waited for.
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
  const KeyTile<T, kDim> keys{shared_address(memory)};
  const Tile<T, kDim> values{keys.below(args.padded).base};
  const ItemSpan span = args.spans.k.span(tile.item);
  const Rows<const T> k = args.k.rows(span.batch, head / args.group, span.begin);
  const Rows<const T> v = args.v.rows(span.batch, head / args.group, span.begin);
  const std::int32_t* top = args.top_keys + cluster_row * args.topk;
  // One branch around all copies, so that they are on their way together.
  const int count = k.aligned && v.aligned
                        ? gather<true, T, kDim, 32 * kWarps>(keys, values, k, v, top, args.topk)
                        : gather<false, T, kDim, 32 * kWarps>(keys, values, k, v, top, args.topk);
  cp_async_commit();
  const Rows<const T> q = args.q.rows(tile.span.batch, head, tile.span.begin);
  next.load(q);
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
    const QueryRows<T, kDim> queries = next;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      next.rows[half] = after[half];
      after[half] = number(group + 2 * kWarps, half);
    }
    next.load(q);
    TopRows<T, kDim> rows;
    int seen[2] = {count, count};
    if (args.causal)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        seen[half] = count_up_to(top, count, queries.rows[half] + span.length - tile.span.length);
    for (int first = 0; first < count; first += kKeys) {
      const int left[2] = {seen[0] - first, seen[1] - first};
      rows.attend(queries, keys.below(first), values.below(first), left, args.exponent);
    }
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

template <class T, int kDim, int kWarps>
void launch_topk(const TopArgs<T>& args, cudaStream_t stream) {
  const int bytes = 2 * args.padded * Tile<T, kDim>::kRowBytes;
  const dim3 grid(static_cast<unsigned>(args.tiles.total), static_cast<unsigned>(args.H));
  launch_early("topk_attend", topk_attend_kernel<T, kDim, kWarps>, grid, 32 * kWarps,
               static_cast<std::size_t>(bytes), stream, args);
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
    args.causal = call.causal;
    if (ragged(call)) fill_padding<T>(call, out, args.lse, stream);
    // A warp alone where clusters are small: it waits for nobody.
    const int warps = call.N <= kSmallCluster * sizes.clusters ? 1 : 4;
    args.tiles = query_tiles(call, sizes.clusters, warps == 1 ? kWarpBits : kWarpBits + 2);
    dispatch_head_dim(call.op, call.Dk, [&](auto dim) {
      constexpr int kDim = decltype(dim)::value;
      warps == 1 ? launch_topk<T, kDim, 1>(args, stream) : launch_topk<T, kDim, 4>(args, stream);
    });
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
