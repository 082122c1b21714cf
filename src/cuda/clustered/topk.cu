// SPDX-License-Identifier: MIT
// Outputs of the queries of improved clustered attention:
//   out_i = mass_c * (attention of query i over the top keys of its cluster c) + bottom_c
// Causal: attention over those top keys that are not after the query, and nothing else. Dropout
// (kDrop) multiplies the weights of the top keys.
//
// Grid (tiles of sorted queries, H). A block of 4 warps takes up to 256 queries of one cluster; if
// clusters have up to 96 members on average, a block of one warp takes up to 32. It gathers the
// cluster's keys and values to shared memory once (8 KiB for 32 top keys and 16-bit rows of 64
// elements, at most 64 KiB; of f32 rows of 128, 32 at a time for the block's warps together, 32
// KiB, and again for each group of queries if there are more); each warp then streams 16 queries at
// a time through its registers and writes each output to its query's place. Launch bounds: 16 warps
// per multiprocessor for 16-bit rows of 64, 8 for others. Rows that are not aligned to 16 bytes are
// copied element by element. All devices and element types.
#include <climits>
#include <cstdint>

#include "cuda/api/padding.h"
#include "cuda/clustered/clustered.h"
#include "cuda/launch/dispatch.h"
#include "cuda/launch/launch.h"
#include "cuda/prim/dependent.cuh"
#include "cuda/prim/dropout.cuh"
#include "cuda/prim/load.cuh"
#include "cuda/prim/mma.cuh"
#include "cuda/prim/softmax.cuh"
#include "cuda/prim/sorted_tiles.cuh"
#include "cuda/prim/store.cuh"
#include "cuda/prim/warp.cuh"

namespace coterie::cuda {
namespace {

// Lanes read rows of queries in pieces of 16 bytes, so they get the columns in another order than a
// product expects. Keys are read from shared memory in the same order, and the order in which
// depths are added does not matter.

constexpr int kTopKeys = 32;  // multiplied at a time
// Whether shared memory holds kTopKeys keys and values at a time instead of all.
template <class T, int kDim>
constexpr bool kStreamed = Tile<T, kDim>::kRowBytes > 256;

// Keys in shared memory, of which a lane reads the piece of 16 bytes that it holds of a query.
// Neighbouring rows are in different halves of 128 bytes, so 8 lanes have no bank conflicts.
template <class T, int kDim>
struct TopKeyTile {
  static constexpr int kChunks = Tile<T, kDim>::kChunks;
  std::uint32_t base;

  __device__ std::uint32_t chunk(int row, int index) const {
    const int moved = kChunks % 8 == 0 ? index ^ (row & 1) << 2 : index;
    return base + row * Tile<T, kDim>::kRowBytes + moved * 16;
  }
  __device__ TopKeyTile below(int row) const { return {base + row * Tile<T, kDim>::kRowBytes}; }
  __device__ uint4 piece(int row, int index) const { return load_shared16(chunk(row, index)); }
};

// Starts to copy the rows of a list of `topk` to shared memory, zeros up to a multiple of kTopKeys,
// which is not 0; with kStreamed only the first kTopKeys. Returns how many the list has. With
// kAligned, pitches fit 32 bits: an address takes one instruction. Called by all threads; the
// caller commits, waits and synchronises.
template <bool kAligned, class T, int kDim, int kBlockThreads>
__device__ __forceinline__ int gather(const TopKeyTile<T, kDim>& keys, const Tile<T, kDim>& values,
                                      const Rows<const T>& k, const Rows<const T>& v,
                                      const std::int32_t* top, int topk) {
  constexpr int kChunks = Tile<T, kDim>::kChunks;
  static_assert(kTopKeys * kChunks % kBlockThreads == 0, "lanes stay together for the shuffles");
  constexpr int kSteps = kTopKeys * kChunks / kBlockThreads;
  // Fully unrolled where it matters: other cases would take many instructions.
  constexpr int kUnrolled = !kAligned ? 1 : sizeof(T) == 4 ? 4 : kSteps;
  const int lane = threadIdx.x % 32;
  int count = 0;
#pragma unroll 1
  for (int first = 0; first == 0 || first < topk; first += kTopKeys) {
    const int own = first + lane < topk ? top[first + lane] : -1;
    count += __popc(__ballot_sync(~0u, own >= 0));
    if (kStreamed<T, kDim> && first > 0) continue;
#pragma unroll kUnrolled
    for (int step = 0; step < kSteps; ++step) {
      const int number = step * kBlockThreads + static_cast<int>(threadIdx.x);
      const int r = number / kChunks, chunk = number % kChunks;
      const int column = chunk * Tile<T, kDim>::kVector, row = __shfl_sync(~0u, own, r);
      const bool there = row >= 0 && column < k.width;
      const auto place = static_cast<std::uint64_t>(max(row, 0));
      const std::uint32_t to_k = keys.chunk(first + r, chunk),
                          to_v = values.chunk(first + r, chunk);
      if constexpr (kAligned) {
        cp_async16(to_k, k.data + column + place * static_cast<unsigned>(k.pitch), there ? 16 : 0);
        cp_async16(to_v, v.data + column + place * static_cast<unsigned>(v.pitch), there ? 16 : 0);
      } else {
        const uint4 zero = make_uint4(0, 0, 0, 0);
        store_shared16(to_k, there ? load_chunk(k.row(row), column, k.width) : zero);
        store_shared16(to_v, there ? load_chunk(v.row(row), column, v.width) : zero);
      }
    }
  }
  return count;
}

// Word i of 16 bytes in registers; i is known to the compiler.
__device__ __forceinline__ std::uint32_t word_of(const uint4& words, int i) {
  return i < 2 ? (i == 0 ? words.x : words.y) : (i == 2 ? words.z : words.w);
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
    from.aligned ? load_all<true>(from) : load_all<false>(from);
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
    constexpr int kWords = sizeof(a.r) / 8;  // of a piece
#pragma unroll
    for (int w = 0; w < 2 * kWords; ++w) a.r[w] = word_of(pieces[w % 2][i], step * kWords + w / 2);
    return a;
  }
};

// The right factors of the same steps: pieces of keys l / 4 and l / 4 + 8 of 16.
template <class T>
__device__ __forceinline__ FragmentB<T> key_fragment(const uint4& low, const uint4& high,
                                                     int step) {
  FragmentB<T> b;
  constexpr int kWords = sizeof(b.r) / 8;
#pragma unroll
  for (int w = 0; w < 2 * kWords; ++w)
    b.r[w] = word_of(w < kWords ? low : high, step * kWords + w % kWords);
  return b;
}

// Top keys that are near the lane's two queries, by rank in the list.
struct HiddenKeys {
  int first[2], end[2];
};

// Dropout: the random words of the lane's two queries, and the keys that are multiplied.
struct DroppedTopKeys {
  const Dropout& dropout;
  DropoutRow words[2];
  const std::int32_t* keys;
  int last;  // of these keys

  __device__ void apply(Accumulator (&s)[2]) const {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int at = i / 4 * 16 + i / 2 % 2 * 8 + static_cast<int>(threadIdx.x) % 4 * 2 + i % 2;
      const int key = keys[min(at, last)];
#pragma unroll
      for (int half = 0; half < 2; ++half)
        s[i / 4][i / 2 % 2][2 * half + i % 2] *= kept(dropout, words[half], key);
    }
  }
};

// Attention of 16 queries of a warp over the cluster's top keys.
template <class T, int kDim>
struct TopKeyRows {
  Accumulator out[kDim / 16];
  float shift[2], sum[2];

  // Turns the scores of kTopKeys keys, of which the lane's two rows see the first left[], into
  // weights. kStart: they are the first keys. kNear: keys hidden.first .. hidden.end - 1 are near.
  template <bool kStart, bool kNear>
  __device__ __forceinline__ void weigh(Accumulator (&s)[2], const int (&left)[2],
                                        const HiddenKeys& hidden, float exponent) {
#pragma unroll
    for (int i = 0; i < 16; ++i) s[i / 8][i / 4 % 2][i % 4] *= exponent;
    if constexpr (kNear) {
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        const int key = i / 8 * 16 + i / 4 % 2 * 8 + threadIdx.x % 4 * 2 + i % 2;
        if (key >= hidden.first[i / 2 % 2] && key < hidden.end[i / 2 % 2])
          s[i / 8][i / 4 % 2][i % 4] = -INFINITY;
      }
    }
    if (__any_sync(~0u, min(left[0], left[1]) < kTopKeys)) {
      __syncwarp();  // keeps the compiler from doing this where all are seen
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        const int key = i / 8 * 16 + i / 4 % 2 * 8 + threadIdx.x % 4 * 2 + i % 2;
        if (key >= left[i / 2 % 2]) s[i / 8][i / 4 % 2][i % 4] = -INFINITY;
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float four[4];
#pragma unroll
      for (int i = 0; i < 4; ++i)
        four[i] = fmaxf(s[i / 2][i % 2][2 * half], s[i / 2][i % 2][2 * half + 1]);
      float largest = quad_max(fmaxf(fmaxf(four[0], four[1]), fmaxf(four[2], four[3])));
      if (!kStart) largest = fmaxf(largest, shift[half]);
      if (largest == -INFINITY) largest = 0.0f;
      if (!kStart) {
        const float factor = exp2_approximate(shift[half] - largest);
        sum[half] *= factor;
#pragma unroll
        for (int i = 0; i < kDim / 4; ++i) out[i / 4][i / 2 % 2][2 * half + i % 2] *= factor;
      }
      shift[half] = largest;
      float part[4] = {};
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        float& score = s[i / 4][i / 2 % 2][2 * half + i % 2];
        score = exp2_approximate(score - largest);
        part[i % 4] += score;
      }
      const float total = (part[0] + part[1]) + (part[2] + part[3]);
      sum[half] = kStart ? total : sum[half] + total;
    }
  }

  template <bool kStart, bool kNear, bool kDrop>
  __device__ __forceinline__ void attend(const QueryRows<T, kDim>& queries,
                                         const TopKeyTile<T, kDim>& keys,
                                         const Tile<T, kDim>& values, const int (&left)[2],
                                         const HiddenKeys& hidden, float exponent,
                                         const DroppedTopKeys* dropped) {
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
    weigh<kStart, kNear>(s, left, hidden, exponent);
    if constexpr (kDrop) dropped->apply(s);
#pragma unroll
    for (int b = 0; b < 2; ++b) {
      FragmentA<T> p;
      to_fragment(p, s[b]);
#pragma unroll
      for (int d = 0; d < kDim / 16; ++d) {
        FragmentB<T> v;
        load_b_transposed(v, values, 16 * d, 16 * b);
        if (kStart && b == 0)
          multiply(out[d], p, v);
        else
          multiply_add(out[d], p, v);
      }
    }
  }
};

constexpr int kAloneBits = 5, kTogetherBits = 8;  // queries of a tile of one warp, of four
constexpr int kSmallCluster = 96;                 // mean size up to which one warp takes a tile

template <class T>
struct TopkArgs {
  ItemSpans spans;
  QueryTiles tiles;
  Tensor4<const T> q, k, v;
  Tensor4<T> out;
  const std::int32_t *order, *offsets, *top_keys;
  const float *mass, *bottom;  // null: 1 and 0
  float* lse;
  int H, group, N, topk, padded;  // padded: topk rounded up to a multiple of kTopKeys, not 0
  float exponent;                 // scale log2(e)
  bool causal;                    // keys after a query are not visible to it
  int near;                       // block length of positions whose keys are left out; 0: none
  bool clusters_ready;            // even while the previous kernel still runs
  Dropout dropout;
};

// log(2^shift * sum) in few instructions, -inf if nothing was summed.
__device__ __forceinline__ float quick_lse(float shift, float sum) {
  float digits;
  asm("lg2.approx.f32 %0, %1;" : "=f"(digits) : "f"(sum));
  return (shift + digits) * kLn2;
}

// store_columns for aligned rows of 16-bit elements; a negative row is skipped.
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

// Writes the outputs of 16 queries, mass * out / sum + bottom, and their log-sum-exps. bottom has
// kDim elements.
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
  else if (out.aligned)  // one branch around all stores saves registers
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

template <class T, int kDim, int kWarps, bool kNear, bool kDrop>
__global__ void __launch_bounds__(32 * kWarps, kResidentWarps<T, kDim> / kWarps)
    topk_attend_kernel(const __grid_constant__ TopkArgs<T> args) {
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
  float tail[kTail] = {};  // of the bottom; waited for with the other loads
  if (args.bottom)
#pragma unroll
    for (int i = 0; i < kTail; ++i)
      tail[i] = args.bottom[cluster_row * width +
                            min(static_cast<int>(threadIdx.x) + i * 32 * kWarps, width - 1)];
  const TopKeyTile<T, kDim> keys{shared_address(memory)};
  const Tile<T, kDim> values{keys.below(kStreamed<T, kDim> ? kTopKeys : args.padded).base};
  const ItemSpan span = args.spans.k.span(tile.item);
  const Rows<const T> k = args.k.rows(span.batch, head / args.group, span.begin);
  const Rows<const T> v = args.v.rows(span.batch, head / args.group, span.begin);
  const std::int32_t* top = args.top_keys + cluster_row * args.topk;
  // One branch around all copies, so that they are in flight together.
  const auto gather_from = [&](int first) {
    return k.aligned && v.aligned && max(k.pitch, v.pitch) <= UINT_MAX
               ? gather<true, T, kDim, 32 * kWarps>(keys, values, k, v, top + first,
                                                    args.topk - first)
               : gather<false, T, kDim, 32 * kWarps>(keys, values, k, v, top + first,
                                                     args.topk - first);
  };
  const int count = gather_from(0);
  cp_async_commit();
  // Keys from `first` on for all warps, where they are not all there. Called by all threads.
  const auto stream = [&](int first) {
    if (!kStreamed<T, kDim> || count <= kTopKeys) return;
    __syncthreads();
    gather_from(first);
    cp_async_commit();
    cp_async_wait<0>();
    __syncthreads();
  };
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
  for (int group = warp; 16 * (kStreamed<T, kDim> ? group - warp : group) < tile.count;
       group += kWarps) {
    if (group >= kWarps) stream(0);
    TopKeyRows<T, kDim> rows;
    int seen[2] = {count, count};
    if (args.causal)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        seen[half] = count_up_to(top, count, queries.rows[half] + span.length - tile.span.length);
    HiddenKeys hidden{};
    if constexpr (kNear)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int block = max(queries.rows[half], 0) / args.near;
        hidden.first[half] = count_up_to(top, count, (block - 1) * args.near - 1);
        hidden.end[half] = count_up_to(top, count, (block + 2) * args.near - 1);
      }
    const DroppedTopKeys* dropped = nullptr;
    DroppedTopKeys drop{args.dropout, {}, top, args.topk - 1};
    if constexpr (kDrop) {
#pragma unroll
      for (int half = 0; half < 2; ++half)
        drop.words[half] = args.dropout.query(problem, max(queries.rows[half], 0));
      dropped = &drop;
    }
    rows.template attend<true, kNear, kDrop>(queries, keys, values, seen, hidden, args.exponent,
                                             dropped);
#pragma unroll 1
    for (int first = kTopKeys; first < count; first += kTopKeys) {
      stream(first);
      const int left[2] = {seen[0] - first, seen[1] - first};
      if constexpr (kNear)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          hidden.first[half] -= kTopKeys;
          hidden.end[half] -= kTopKeys;
        }
      if constexpr (kDrop) {
        drop.keys = top + first;
        drop.last = args.topk - 1 - first;
      }
      const int at = kStreamed<T, kDim> ? 0 : first;
      rows.template attend<false, kNear, kDrop>(queries, keys.below(at), values.below(at), left,
                                                hidden, args.exponent, dropped);
    }
    write_rows(queries, rows, out, lse, mass, bottom);
    if (16 * ((kStreamed<T, kDim> ? group - warp : group) + kWarps) >= tile.count) break;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      queries.rows[half] = after[half];
      after[half] = number(group + 2 * kWarps, half);
    }
    queries.load(q);
  }
}

template <class T, int kDim, int kWarps, bool kNear, bool kDrop = false>
void launch_topk(const TopkArgs<T>& args, cudaStream_t stream) {
  const int keys = kStreamed<T, kDim> ? kTopKeys : args.padded;
  const int bytes = 2 * keys * Tile<T, kDim>::kRowBytes;
  const dim3 grid(static_cast<unsigned>(args.tiles.total), static_cast<unsigned>(args.H));
  launch_early("topk_attend", topk_attend_kernel<T, kDim, kWarps, kNear, kDrop>, grid, 32 * kWarps,
               static_cast<std::size_t>(bytes), stream, args);
}

}  // namespace

void attend_top_keys(const ClusteredForward& pass) {
  const ClusteredPlan& plan = pass.plan;
  const AttentionCall& call = plan.call;
  const ClusteredTensors& tensors = pass.tensors;
  if (call.B * call.H * call.N == 0) return;
  zero_padding(pass.out, call.inputs.q_sequences, call.num_items(), pass.stream);
  fill_padding(floats(tensors.lse), call.B, call.H, call.N, call.inputs.q_sequences,
               call.num_items(), -INFINITY, pass.stream);
  // One warp per block if clusters are small: it waits for no other.
  const bool alone = plan.near == 0 && !call.dropout.on() &&
                     call.N <= kSmallCluster * static_cast<std::int64_t>(plan.clusters);
  dispatch_element(call.op, call.inputs.q.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    TopkArgs<T> args;
    args.spans = plan.means.spans;
    args.tiles = query_tiles(call, plan.clusters, alone ? kAloneBits : kTogetherBits);
    args.q = tensor4<const T>(call.inputs.q);
    args.k = tensor4<const T>(call.k);
    args.v = tensor4<const T>(call.inputs.v);
    args.out = tensor4<T>(pass.out);
    args.order = ints(tensors.order);
    args.offsets = ints(tensors.offsets);
    args.top_keys = ints(tensors.top_keys);
    args.mass = floats(tensors.mass);
    args.bottom = floats(tensors.out);
    args.lse = floats(tensors.lse);
    args.H = static_cast<int>(call.H);
    args.group = plan.means.group;
    args.N = static_cast<int>(call.N);
    args.topk = plan.topk;
    args.padded = (max(args.topk, 1) + kTopKeys - 1) / kTopKeys * kTopKeys;
    args.exponent = static_cast<float>(call.scale * 1.4426950408889634);
    args.causal = call.causal;
    args.near = plan.near;
    args.clusters_ready = pass.selection_attends;
    args.dropout = call.dropout;
    dispatch_head_dim(call.op, call.Dk, [&](auto dim) {
      constexpr int kDim = decltype(dim)::value;
      if (args.dropout.on())
        return args.near > 0 ? launch_topk<T, kDim, 4, true, true>(args, pass.stream)
                             : launch_topk<T, kDim, 4, false, true>(args, pass.stream);
      if (args.near > 0) return launch_topk<T, kDim, 4, true>(args, pass.stream);
      alone ? launch_topk<T, kDim, 1, false>(args, pass.stream)
            : launch_topk<T, kDim, 4, false>(args, pass.stream);
    });
  });
}

}  // namespace coterie::cuda
