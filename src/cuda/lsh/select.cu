// SPDX-License-Identifier: MIT
// Hash buckets of LSH attention and the order of tokens by bucket. The bucket of a token in a round
// is the arg-max of [x R ; -x R] for a random rotation R (docs/mechanisms.md: lsh): a product with
// the columns of all rounds, split into parts (prim/row_fragments.cuh) that keep fp32 precision.
// Only the largest and the smallest entry are kept.
//
// Grids: a thread per entry of the rotation table; for the product, blocks of 8 warps per (item,
// head). A warp handles 16 or 32 rows at a time, which stay in registers while the table streams
// through the caches. No shared memory. The order is a stable sort by bucket (cluster/group.h).
// Preconditions: rows of at most 128 elements.
#include "cuda/cluster/group.h"
#include "cuda/launch/dispatch.h"
#include "cuda/launch/launch.h"
#include "cuda/lsh/lsh.cuh"
#include "cuda/prim/normal.cuh"
#include "cuda/prim/row_fragments.cuh"

namespace coterie::cuda {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kColumnParts = 3;  // 24 bits in bf16

template <class T, int kChunks>
struct LshHashTile {
  static constexpr int kRowParts = sizeof(T) == 2 ? 1 : 3;
  static constexpr int kMTiles = sizeof(T) == 2 && kChunks <= 2 ? 2 : 1;
  static constexpr int kRows = 16 * kMTiles;  // of a warp
};

struct LshHashArgs {
  ClusterShape shape;               // head count is that of the queries
  int rounds, half, padded, width;  // half: buckets / 2; padded: to whole tiles of 8
  int blocks;                       // per problem
  uint4* table;                     // columns of all rounds, see table_index
  std::int32_t* labels;             // (B, H, R, N)
  std::uint32_t zero;               // 0, unknown to the compiler: see RowFragments
};

// Entry (d, b) of a round's rotation, split into parts.
template <class F, int kChunks>
__global__ void __launch_bounds__(kThreads) lsh_rotations_kernel(LshHashArgs args) {
  const int element = static_cast<int>(blockIdx.x) * kThreads + static_cast<int>(threadIdx.x);
  const int depth = element % (32 * kChunks), column = element / (32 * kChunks);
  const int round = column / args.padded, b = column % args.padded;
  if (round >= args.rounds) return;
  float value = 0.0f;
  if (depth < args.width && b < args.half)
    value = static_cast<float>(
        normal({args.shape.seed, RandomUse::lsh_rotation, static_cast<std::uint32_t>(round)},
               static_cast<std::uint64_t>(depth) * args.half + b));
  F part[kColumnParts];
  split_factor(value, part);
  F* table = reinterpret_cast<F*>(args.table);
#pragma unroll
  for (int p = 0; p < kColumnParts; ++p)
    table[table_index(kChunks, kColumnParts, column, depth, p)] = part[p];
}

// The largest and the smallest entry of a row of x R so far, lower columns first.
struct Extremes {
  float high = -INFINITY, low = INFINITY;
  int high_at = 0, low_at = 0;

  __device__ void add(float value, int column) {
    if (value > high) high = value, high_at = column;
    if (value < low) low = value, low_at = column;
  }
  // Over the four lanes of a row.
  __device__ void merge() {
#pragma unroll
    for (int step = 1; step <= 2; step *= 2) {
      const float other_high = __shfl_xor_sync(~0u, high, step);
      const float other_low = __shfl_xor_sync(~0u, low, step);
      const int other_high_at = __shfl_xor_sync(~0u, high_at, step);
      const int other_low_at = __shfl_xor_sync(~0u, low_at, step);
      if (other_high > high || (other_high == high && other_high_at < high_at))
        high = other_high, high_at = other_high_at;
      if (other_low < low || (other_low == low && other_low_at < low_at))
        low = other_low, low_at = other_low_at;
    }
  }
  __device__ int bucket(int half) const { return high >= -low ? high_at : half + low_at; }
};

template <class T, int kChunks>
__global__ void __launch_bounds__(kThreads, sizeof(T) == 2 ? 2 : 1)
    lsh_hash_kernel(const __grid_constant__ LshHashArgs args, Tensor4<const T> q) {
  using Shape = LshHashTile<T, kChunks>;
  constexpr int kMTiles = Shape::kMTiles;
  const int problem = blockIdx.x / args.blocks, head = problem % args.shape.heads;
  const ItemSpan span = args.shape.q.span(problem / args.shape.heads);
  const Rows<const T> rows = q.rows(span.batch, head, span.begin);
  const int lane = threadIdx.x % 32;
  std::int32_t* labels = args.labels +
                         (static_cast<std::int64_t>(span.batch) * args.shape.heads + head) *
                             args.rounds * args.shape.rows +
                         span.begin;
  for (int tile = blockIdx.x % args.blocks * kWarps + threadIdx.x / 32;
       tile * Shape::kRows < span.length; tile += args.blocks * kWarps) {
    RowTile<T, kChunks, kMTiles> words;
    words.load(rows, tile * Shape::kRows, span.length);
    RowFragments<T, kChunks, Shape::kRowParts> left[kMTiles];
#pragma unroll
    for (int m = 0; m < kMTiles; ++m)
#pragma unroll
      for (int side = 0; side < 2; ++side) left[m].set(side, words.words[m][side], args.zero);
    const uint4* table = args.table + lane;
    for (int round = 0; round < args.rounds; ++round) {
      Extremes extremes[kMTiles][2];
#pragma unroll 1
      for (int first = 0; first < args.padded; first += 8, table += kColumnParts * kChunks * 32) {
        float d[kMTiles][4];
        multiply_rows<kColumnParts, T, kChunks, Shape::kRowParts, kColumnParts>(
            left, table, make_float4(0.0f, 0.0f, 0.0f, 0.0f), d);
#pragma unroll
        for (int i = 0; i < 4 * kMTiles; ++i) {
          const int column = first + lane % 4 * 2 + i % 2;
          if (column < args.half) extremes[i / 4][i / 2 % 2].add(d[i / 4][i % 4], column);
        }
      }
#pragma unroll
      for (int i = 0; i < 2 * kMTiles; ++i) {
        Extremes& found = extremes[i / 2][i % 2];
        found.merge();
        const int row = tile * Shape::kRows + 16 * (i / 2) + 8 * (i % 2) + lane / 4;
        if (lane % 4 == 0 && row < span.length)
          labels[static_cast<std::int64_t>(round) * args.shape.rows + row] =
              found.bucket(args.half);
      }
    }
  }
}

template <class T, int kChunks>
void hash_rows(const AttentionCall& call, LshHashArgs args, cudaStream_t stream) {
  const int elements = args.rounds * args.padded * 32 * kChunks;
  lsh_rotations_kernel<Factor<T>, kChunks>
      <<<static_cast<unsigned>((elements + kThreads - 1) / kThreads), kThreads, 0, stream>>>(args);
  COTERIE_LAUNCH("lsh_rotations");
  const int rows = kWarps * LshHashTile<T, kChunks>::kRows, problems = args.shape.problems();
  args.blocks =
      min(max(4 * multiprocessors() / problems, 1), max(1, (args.shape.rows + rows - 1) / rows));
  lsh_hash_kernel<T, kChunks>
      <<<static_cast<unsigned>(args.blocks * problems), kThreads, 0, stream>>>(
          args, tensor4<const T>(call.inputs.q));
  COTERIE_LAUNCH("lsh_hash");
}

}  // namespace

void lsh_select(const LshParams& params, const AttentionCall& call, const TensorView& order,
                Arena& arena, cudaStream_t stream) {
  LshHashArgs args{};
  args.shape = cluster_shape(call, params.buckets);
  args.rounds = static_cast<int>(params.rounds);
  args.half = static_cast<int>(params.buckets / 2);
  args.padded = (args.half + 7) / 8 * 8;
  args.width = static_cast<int>(call.Dk);
  const std::int64_t columns = static_cast<std::int64_t>(args.rounds) * args.padded;
  const std::int64_t depth =
      dispatch_head_dim(call.op, call.Dk, [](auto width) -> std::int64_t { return width; });
  args.table = arena.take<uint4>(columns * depth * kColumnParts / 8);
  args.labels = arena.take<std::int32_t>(call.B * call.H * params.rounds * call.N);
  ClusterShape rounds = args.shape;  // each round acts as a separate head
  rounds.heads *= args.rounds;
  rounds.group = 1;
  auto* offsets =
      arena.take<std::int32_t>(static_cast<std::int64_t>(rounds.problems()) * (params.buckets + 1));
  auto* sorted = static_cast<std::int32_t*>(order.data);
  if (!arena.counting() && rounds.problems() > 0)
    dispatch_element(call.op, call.inputs.q.dtype, [&](auto tag) {
      dispatch_head_dim(call.op, call.Dk, [&](auto width) {
        hash_rows<typename decltype(tag)::type, decltype(width)::value / 32>(call, args, stream);
      });
    });
  group_by_label(rounds, {args.labels, sorted, offsets}, arena, stream);
}

}  // namespace coterie::cuda
