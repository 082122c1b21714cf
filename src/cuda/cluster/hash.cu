// SPDX-License-Identifier: MIT
// Hash codes: bit r of query q is [p_r . q > t_r] (docs/mechanisms.md: hamming, hamming-keys).
// Planes are normal numbers, or sums of key differences with thresholds at the mean query.
//
// isotropic_planes: a thread per element of a plane. key_planes: blocks of 256 threads; the first
//   ones sum the queries of a split each, the others make planes, a warp per plane.
// hash: blocks of 256 threads share an item and head; a warp multiplies 16 or 32 rows at a time, in
//   registers, by all 64 planes with mma.sync; inputs with more digits than a factor are sums of
//   parts. Shared memory: planes as a table of columns and as floats, 50 to 130 KB; two blocks a
//   multiprocessor for 16-bit types (__launch_bounds__).
// Preconditions: up to 63 bits, Dk <= 128. Any alignment.
#include "cuda/cluster/stages.h"
#include "cuda/launch/dispatch.h"
#include "cuda/prim/dependent.cuh"
#include "cuda/prim/normal.cuh"
#include "cuda/prim/row_chunk.cuh"
#include "cuda/prim/row_fragments.cuh"
#include "cuda/prim/warp.cuh"

namespace coterie::cuda {

namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kPlanes = 64;  // of which `bits` are in use

struct HashArgs : HashPlan {
  int blocks;  // of the hash kernel, per problem
  ZeroedWords zeroed;
  std::uint32_t zero;  // 0, unknown to the compiler: see RowFragments
};

constexpr int kPairsPerPlane = 16;

// Planes rounded to bf16, so that products with 16-bit inputs are exact, and thresholds.
__global__ void __launch_bounds__(kThreads) isotropic_planes_kernel(HashArgs args, bool bias) {
  // Waits first: the next kernel may then read its inputs at once, as only this one still runs.
  await_writes();
  release_next();
  args.zeroed.zero();
  const int element = blockIdx.x * kThreads + threadIdx.x, total = args.bits * args.width;
  if (element < total) {
    const double value =
        normal({args.shape.seed, RandomUse::hash_plane, 0}, static_cast<std::uint64_t>(element));
    args.planes[element] = to_float(from_float<Bf16>(static_cast<float>(value)));
  } else if (element < total + args.bits) {
    const auto r = static_cast<std::uint64_t>(element - total);
    args.thresholds[r] =
        bias ? static_cast<float>(normal({args.shape.seed, RandomUse::hash_threshold, 0}, r))
             : 0.0f;
  }
}

// Plane r of an item and key head: the sum of (k_a - k_b) over random pairs of its keys, by a warp.
template <class T>
__device__ void key_plane(const HashArgs& args, const Tensor4<const T>& k, int key_problem, int r) {
  const int key_heads = args.shape.heads / args.shape.group, item = key_problem / key_heads;
  const ItemSpan span = args.shape.k.span(item);
  const Rows<const T> keys = k.rows(span.batch, key_problem % key_heads, span.begin);
  const RandomStream pairs{args.shape.seed, RandomUse::key_pair,
                           args.shape.key_stream(key_problem)};
  // Lane l draws number l of the plane's 2 * kPairsPerPlane = 32.
  const int lane = threadIdx.x % 32;
  const int drawn = span.length == 0
                        ? 0
                        : static_cast<int>(random_below(
                              pairs, static_cast<std::uint64_t>(r * 2 * kPairsPerPlane + lane),
                              static_cast<std::uint32_t>(span.length)));
  float* plane =
      args.planes + (static_cast<std::int64_t>(key_problem) * args.bits + r) * args.width;
  for (int d = lane; d - lane < args.width; d += 32) {
    float sum = 0.0f;
#pragma unroll 4
    for (int m = 0; m < kPairsPerPlane; ++m) {
      const int a = __shfl_sync(0xffffffffu, drawn, 2 * m),
                b = __shfl_sync(0xffffffffu, drawn, 2 * m + 1);
      if (span.length > 0 && d < args.width)
        sum += to_float(keys.row(a)[d]) - to_float(keys.row(b)[d]);
    }
    if (d < args.width) plane[d] = sum;
  }
}

// Writes the sum of rows [begin, end) to `sums`; threads share vectors and groups of rows.
template <class T>
__device__ void sum_queries(const Rows<const T>& rows, RowRange range, float* sums) {
  constexpr int kVector = VectorSum<T>::kVector;
  __shared__ float partial[kThreads * kVector];
  const int vectors = (rows.width + kVector - 1) / kVector, groups = kThreads / vectors;
  const int vector = threadIdx.x % vectors, group = threadIdx.x / vectors;
  VectorSum<T> sum;
  if (group < groups) {
    int row = range.begin + group;
    for (; row + 3 * groups < range.end; row += 4 * groups) {
      uint4 words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) words[i] = sum.load(rows, row + i * groups, vector * kVector);
#pragma unroll
      for (int i = 0; i < 4; ++i) sum.add(words[i]);
    }
    for (; row < range.end; row += groups) sum.add(sum.load(rows, row, vector * kVector));
#pragma unroll
    for (int i = 0; i < kVector; ++i)
      partial[(group * vectors + vector) * kVector + i] = sum.sum[i];
  }
  __syncthreads();
  for (int d = threadIdx.x; d < rows.width; d += kThreads) {
    float total = 0.0f;
    for (int g = 0; g < groups; ++g) total += partial[g * vectors * kVector + d];
    sums[d] = total;
  }
}

// Blocks below problems x splits sum queries, the others make planes, a warp per plane.
template <class T>
__global__ void __launch_bounds__(kThreads)
    key_planes_kernel(HashArgs args, Tensor4<const T> q, Tensor4<const T> k) {
  args.zeroed.zero();
  const int sums = args.shape.problems() * args.splits, block = blockIdx.x;
  if (block >= sums) {
    const int plane = (block - sums) * kWarps + threadIdx.x / 32;
    if (plane < args.shape.key_problems() * args.bits)
      key_plane(args, k, plane / args.bits, plane % args.bits);
    return;
  }
  const int problem = block / args.splits, split = block % args.splits;
  const ItemSpan span = args.shape.q.span(problem / args.shape.heads);
  const int begin = min(split * args.split_rows, span.length);
  sum_queries(q.rows(span.batch, problem % args.shape.heads, span.begin),
              RowRange{begin, min(begin + args.split_rows, span.length)},
              args.query_sums + static_cast<std::int64_t>(block) * args.width);
}

// How a type is multiplied: parts of rows and planes, row tiles of a warp, blocks. Planes from keys
// have more digits than bf16 and fp16.
template <class T, int kChunks>
struct HashParts {
  static constexpr int kRow = sizeof(T) == 2 ? 1 : 3, kPlane = sizeof(T) == 2 ? 2 : 3;
  static constexpr int kMTiles = sizeof(T) == 2 && kChunks <= 2 ? 2 : 1;
  static constexpr int kBlocks = sizeof(T) == 2 ? 2 : 1;  // of a multiprocessor, at least
};

// The planes of a problem as a table of columns, and their thresholds; +inf beyond the last bit.
template <class T, int kChunks>
__device__ void stage_planes(const HashArgs& args, int problem, int length, float* planes,
                             Factor<T>* table, float* thresholds) {
  constexpr int kParts = HashParts<T, kChunks>::kPlane;
  __shared__ double mean[32 * kChunks];
  const bool by_keys = args.by_keys;
  const int lane = threadIdx.x % 32, elements = args.bits * args.width;
  const float* set = args.planes;
  if (by_keys) set += static_cast<std::int64_t>(args.shape.key_problem(problem)) * elements;
#pragma unroll 8
  for (int i = threadIdx.x; i < elements; i += kThreads) planes[i] = set[i];
  for (int d = threadIdx.x; by_keys && d < 32 * kChunks; d += kThreads) {
    double sum = 0.0;
    const float* sums =
        args.query_sums + static_cast<std::int64_t>(problem) * args.splits * args.width + d;
    for (int split = 0; d < args.width && split < args.splits; ++split)
      sum += sums[static_cast<std::int64_t>(split) * args.width];
    mean[d] = length > 0 ? sum / length : 0.0;
  }
  __syncthreads();
  for (int r = threadIdx.x / 32; r < kPlanes; r += kWarps) {
    float value[kChunks], largest = 0.0f;
    double projection = 0.0;
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
      const int d = lane + 32 * i;
      const bool there = r < args.bits && d < args.width;
      value[i] = there ? planes[r * args.width + d] : 0.0f;
      largest = fmaxf(largest, fabsf(value[i]));
      if (by_keys) projection += value[i] * mean[d];
    }
    // A power of two brings planes into the range of fp16; signs do not change.
    float scale = 1.0f;
    if (by_keys) {
      largest = warp_max(largest);
      projection = warp_sum(projection);
      const std::uint32_t exponent = __float_as_uint(largest) >> 23;
      if (exponent > 0 && exponent < 254) scale = __uint_as_float((254 - exponent) << 23);
    }
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
      Factor<T> part[kParts];
      split_factor(value[i] * scale, part);
#pragma unroll
      for (int p = 0; p < kParts; ++p)
        table[table_index(kChunks, kParts, r, lane + 32 * i, p)] = part[p];
    }
    if (lane != 0) continue;
    float threshold = INFINITY;
    if (r < args.bits)
      threshold = by_keys ? static_cast<float>(projection) * scale : args.thresholds[r];
    thresholds[r] = threshold;
  }
}

// Codes of the 16 * kMTiles rows in `rows`; all four lanes of a row get its code.
template <int kSum, class T, int kChunks, int kRowParts, int kMTiles>
__device__ __forceinline__ void hash_rows(
    const RowFragments<T, kChunks, kRowParts> (&rows)[kMTiles], const uint4* table,
    const float* thresholds, std::uint64_t (&code)[kMTiles][2]) {
  constexpr int kParts = HashParts<T, kChunks>::kPlane;
  const int lane = threadIdx.x % 32;
  std::uint32_t half[kMTiles][2][2] = {};
#pragma unroll
  for (int word = 0; word < 2; ++word)
#pragma unroll 1
    for (int tile = 0; tile < 4; ++tile) {  // of 8 planes
      const float4 zero = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      float d[kMTiles][4];
      const int number = 4 * word + tile;
      multiply_rows<kSum, T, kChunks, kRowParts, kParts>(
          rows, table + number * kParts * kChunks * 32 + lane, zero, d);
      const float2 threshold =
          *reinterpret_cast<const float2*>(thresholds + number * 8 + lane % 4 * 2);
#pragma unroll
      for (int m = 0; m < kMTiles; ++m)
#pragma unroll
        for (int side = 0; side < 2; ++side) {
          const std::uint32_t bits = (d[m][2 * side] > threshold.x ? 1u : 0u) |
                                     (d[m][2 * side + 1] > threshold.y ? 2u : 0u);
          half[m][side][word] |= bits << (tile * 8 + lane % 4 * 2);
        }
    }
#pragma unroll
  for (int m = 0; m < kMTiles; ++m)
#pragma unroll
    for (int side = 0; side < 2; ++side) {
#pragma unroll
      for (int word = 0; word < 2; ++word) {
        half[m][side][word] |= __shfl_xor_sync(0xffffffffu, half[m][side][word], 1);
        half[m][side][word] |= __shfl_xor_sync(0xffffffffu, half[m][side][word], 2);
      }
      code[m][side] = (static_cast<std::uint64_t>(half[m][side][1]) << 32) | half[m][side][0];
    }
}

template <class T, int kChunks>
__global__ void __launch_bounds__(kThreads, HashParts<T, kChunks>::kBlocks)
    hash_kernel(HashArgs args, Tensor4<const T> q) {
  release_next();
  using Parts = HashParts<T, kChunks>;
  constexpr int kRows = 16 * Parts::kMTiles;
  extern __shared__ uint4 shared[];
  auto* thresholds = reinterpret_cast<float*>(shared);
  uint4* table = shared + kPlanes / 4;
  auto* planes = reinterpret_cast<float*>(table + kPlanes * 4 * kChunks * Parts::kPlane);
  const int problem = blockIdx.x / args.blocks, head = problem % args.shape.heads;
  const ItemSpan span = args.shape.q.span(problem / args.shape.heads);
  const Rows<const T> rows = q.rows(span.batch, head, span.begin);
  int tile = blockIdx.x % args.blocks * kWarps + threadIdx.x / 32;
  RowTile<T, kChunks, Parts::kMTiles> ahead;
  ahead.load(rows, tile * kRows, span.length);
  await_writes();
  if (span.length <= args.shape.clusters) return;  // every row is its own cluster, without a code
  stage_planes<T, kChunks>(args, problem, span.length, planes, reinterpret_cast<Factor<T>*>(table),
                           thresholds);
  __syncthreads();
  std::uint64_t* codes = args.codes + args.shape.start(span, head);
  const int lane = threadIdx.x % 32;
  const bool exact = !args.by_keys;  // planes are one part
  for (; tile * kRows < span.length; tile += args.blocks * kWarps) {
    RowFragments<T, kChunks, Parts::kRow> left[Parts::kMTiles];
#pragma unroll
    for (int m = 0; m < Parts::kMTiles; ++m)
#pragma unroll
      for (int side = 0; side < 2; ++side) left[m].set(side, ahead.words[m][side], args.zero);
    ahead.load(rows, (tile + args.blocks * kWarps) * kRows, span.length);
    std::uint64_t code[Parts::kMTiles][2];
    if (sizeof(T) == 2 && exact)
      hash_rows<1, T, kChunks>(left, table, thresholds, code);
    else
      hash_rows<Parts::kPlane, T, kChunks>(left, table, thresholds, code);
#pragma unroll
    for (int m = 0; m < Parts::kMTiles; ++m)
#pragma unroll
      for (int side = 0; side < 2; ++side) {
        const int row = tile * kRows + 16 * m + 8 * side + lane / 4;
        if (lane % 4 == 2 * m + side && row < span.length) codes[row] = code[m][side];
      }
  }
}

template <class T, int kChunks>
void hash_rows_of(const AttentionCall& call, HashArgs args, cudaStream_t stream) {
  const int problems = args.shape.problems(), rows = kWarps * 16 * HashParts<T, kChunks>::kMTiles;
  args.blocks = min(max(HashParts<T, kChunks>::kBlocks * multiprocessors() / problems, 1),
                    max(1, (args.shape.rows + rows - 1) / rows));
  const std::size_t table = kPlanes * 32 * kChunks * 2 * HashParts<T, kChunks>::kPlane;
  const std::size_t shared =
      kPlanes * 4 + table + static_cast<std::size_t>(args.bits) * args.width * 4;
  launch_early("hash", hash_kernel<T, kChunks>, static_cast<unsigned>(args.blocks * problems),
               kThreads, shared, stream, args, tensor4<const T>(call.inputs.q));
}

void make_planes(const ClusteringParams& params, const AttentionCall& call, const HashArgs& args,
                 cudaStream_t stream) {
  if (!args.by_keys) {
    const int elements = args.bits * (args.width + 1);
    launch_early("isotropic_planes", isotropic_planes_kernel,
                 static_cast<unsigned>((elements + kThreads - 1) / kThreads), kThreads, 0, stream,
                 args, params.hash_bias);
    return;
  }
  const int planes = (args.shape.key_problems() * args.bits + kWarps - 1) / kWarps;
  dispatch_element(call.op, call.inputs.q.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    key_planes_kernel<T><<<args.shape.problems() * args.splits + planes, kThreads, 0, stream>>>(
        args, tensor4<const T>(call.inputs.q), tensor4<const T>(call.k));
  });
  COTERIE_LAUNCH("key_planes");
}

}  // namespace

HashPlan::HashPlan(Arena& arena, const ClusteringParams& params, const AttentionCall& call)
    : shape(cluster_shape(call, params.clusters)),
      bits(static_cast<int>(params.bits)),
      width(static_cast<int>(call.Dk)),
      by_keys(params.method == Clustering::hamming_keys) {
  // About 1024 blocks sum queries, regardless of the device.
  const int most = min(max(1024 / max(1, shape.problems()), 1), 128);
  split_rows = max(1024, (shape.rows + most - 1) / most);
  splits = (shape.rows + split_rows - 1) / split_rows;
  codes = arena.take<std::uint64_t>(call.B * call.H * call.N);
  planes = arena.take<float>((by_keys ? shape.key_problems() : 1) * params.bits * call.Dk);
  if (by_keys)
    query_sums = arena.take<float>(static_cast<std::int64_t>(shape.problems()) * splits * call.Dk);
  else
    thresholds = arena.take<float>(params.bits);
}

void hash_queries(const ClusteringParams& params, const AttentionCall& call, const HashPlan& plan,
                  const ZeroedWords& zeroed, cudaStream_t stream) {
  const HashArgs args{plan, 0, zeroed, 0};
  make_planes(params, call, args, stream);
  dispatch_element(call.op, call.inputs.q.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    dispatch_head_dim(call.op, call.Dk, [&](auto dim) {
      hash_rows_of<T, decltype(dim)::value / 32>(call, args, stream);
    });
  });
}

}  // namespace coterie::cuda
