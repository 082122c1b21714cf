// SPDX-License-Identifier: MIT
// Candidates for routing's members: rows whose score, from half-precision factors on tensor cores,
// is not below a threshold of the centroid. The threshold comes from a sample of the rows, so that
// about kAim times as many rows as are wanted pass it; routing_choose.cu makes the selection exact.
//
// Half precision because normalised rows are at most sqrt(Dk) long: their elements fit, and scores
// are eight times as close as those of bf16 factors.
#include "cuda/device/await.cuh"
#include "cuda/device/routing_top.cuh"
#include "cuda/device/row_fragments.cuh"
#include "cuda/launch.h"
#include "cuda/tuning.h"

namespace coterie::cuda {

namespace {

using Element = __nv_bfloat16;

constexpr int kMTiles = 2, kTileRows = 16 * kMTiles;
constexpr float kAim = 2.5f;
constexpr int kRoom = 4;  // times the wanted rows: of a list
constexpr int kLeastWidth = 32, kMostWidth = 1024, kLeastRows = 16;  // rows: times the width
constexpr int kSampled = 32;  // in width / kSampled rows one is in the sample

struct CandidateSide {
  Tensor4<const Element> x;
  SequenceSpans spans;
  int heads, group;
  const RowStatistics* stats;
  int width;  // of the members
  CandidateLists lists;
};

struct CandidateArgs {
  CandidateSide sides[2];
  CentredCentroids centroids;
  std::int32_t* zeroed;
  int columns;    // of a block
  unsigned zero;  // 0, unknown to the compiler: see RowFragments
};

// What a block works on: head y of the queries, then of the keys, of batch entry z.
struct CandidateBlock {
  const CandidateSide& side;
  int head, batch, length;
  Rows<const Element> rows;
  const RowStatistics* stats;
  std::int64_t list;  // of the head's first centroid

  __device__ CandidateBlock(const CandidateArgs& args, bool keys)
      : side(args.sides[keys]),
        head(static_cast<int>(blockIdx.y) - (keys ? args.sides[0].heads : 0)),
        batch(static_cast<int>(blockIdx.z)),
        length(side.spans.span(batch).length),
        rows(side.x.rows(batch, head, 0)),
        stats(side.stats +
              (static_cast<std::int64_t>(batch) * side.heads + head) * side.spans.rows),
        list((static_cast<std::int64_t>(batch) * side.heads + head) * args.centroids.clusters) {}
};

// Columns [first, first + columns) of a head's centroids, times their scales, to shared memory as
// RowFragments wants them: 8 elements by a lane.
template <int kThreads, int kChunks>
__device__ __forceinline__ void stage_centroids(const CentredCentroids& centroids, int head,
                                                int first, int columns, uint4* table) {
  constexpr int kLanes = 4 * kChunks;
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  for (int base = 0; base < columns; base += kThreads / kLanes) {
    const int column = base + static_cast<int>(threadIdx.x) / kLanes, cluster = first + column;
    float4 x[2] = {};
    if (column < columns && cluster < centroids.clusters) {
      const auto* from = reinterpret_cast<const float4*>(
          centroids.rows +
          (static_cast<std::int64_t>(head) * centroids.clusters + cluster) * centroids.pitch);
      x[0] = from[2 * lane], x[1] = from[2 * lane + 1];
    }
    float most = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; ++i) most = fmaxf(most, fabsf((&x[0].x)[i]));
#pragma unroll
    for (int step = 1; step < kLanes; step *= 2)
      most = fmaxf(most, __shfl_xor_sync(~0u, most, step));
    const float scale = centroid_scale(most);
    uint4 words;
#pragma unroll
    for (int i = 0; i < 4; ++i)
      (&words.x)[i] = pack2<__half>((&x[0].x)[2 * i] * scale, (&x[0].x)[2 * i + 1] * scale);
    if (column < columns)
      table[(column / 8 * kChunks + lane / 4) * 32 + column % 8 * 4 + lane % 4] = words;
  }
}

// Rows on their way, with their statistics.
template <int kChunks>
struct RowsAhead {
  RowWords<Element, kChunks> words[kMTiles][2];
  RowStatistics stats[kMTiles][2];

  // row_of(i), i = 0 .. kTileRows - 1, is a row, or negative.
  template <class RowOf>
  __device__ __forceinline__ void load(const CandidateBlock& block, const RowOf& row_of) {
    if (block.rows.aligned)  // one branch around all loads, so that they are on their way together
      load_all<true>(block, row_of);
    else
      load_all<false>(block, row_of);
  }

  // Normalised, as left factors.
  __device__ __forceinline__ void take(unsigned zero,
                                       RowFragments<__half, kChunks, 1> (&left)[kMTiles]) const {
#pragma unroll
    for (int m = 0; m < kMTiles; ++m)
#pragma unroll
      for (int s = 0; s < 2; ++s) {
        const float inverse = stats[m][s].inverse, shift = -stats[m][s].mean * inverse;
        RowWords<__half, kChunks> y;
#pragma unroll
        for (int i = 0; i < kChunks; ++i)
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            const std::uint32_t word = (&words[m][s].word[i].x)[j];
            (&y.word[i].x)[j] =
                pack2<__half>(fmaf(__uint_as_float(word << 16), inverse, shift),
                              fmaf(__uint_as_float(word & 0xffff0000u), inverse, shift));
          }
        left[m].set(s, y, zero);
      }
  }

 private:
  template <bool kAligned, class RowOf>
  __device__ __forceinline__ void load_all(const CandidateBlock& block, const RowOf& row_of) {
#pragma unroll
    for (int m = 0; m < kMTiles; ++m)
#pragma unroll
      for (int s = 0; s < 2; ++s) {
        const int row = row_of(16 * m + 8 * s + static_cast<int>(threadIdx.x) % 32 / 4);
        words[m][s].template load<kAligned>(block.rows, row, row >= 0);
        stats[m][s] = row >= 0 ? block.stats[row] : RowStatistics{0.0f, 0.0f};
      }
  }
};

// Of the thresholds' blocks: centroids, and parts of the sample.
constexpr int kSampleThreads = 512, kSampleWarps = kSampleThreads / 32;
constexpr int kSampleColumns = 64, kSampleTiles = kSampleColumns / 8;
constexpr int kSampleRows = kSampleWarps * kTileRows, kGroups = 16 * kSampleWarps;
constexpr int kMaximaPitch = kGroups + 1;

// One row of every `step`, at places without a period.
__device__ __forceinline__ int sampled_row(int number, int step) {
  const unsigned mixed = static_cast<unsigned>(number) * 2654435761u >> 16;
  return number * step + static_cast<int>(mixed % static_cast<unsigned>(step));
}

// The largest scores of the sample's parts: maxima[column][part].
template <int kChunks>
__device__ void find_maxima(const CandidateArgs& args, const CandidateBlock& block, int columns,
                            int rows, int step, const uint4* table, float* maxima) {
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  float most[kSampleTiles][2][2];  // [tile][side][column]
#pragma unroll
  for (int t = 0; t < kSampleTiles; ++t)
#pragma unroll
    for (int s = 0; s < 2; ++s) most[t][s][0] = most[t][s][1] = -INFINITY;
  const auto load = [&](RowsAhead<kChunks>& ahead, int first) {
    ahead.load(block, [&](int i) { return first + i < rows ? sampled_row(first + i, step) : -1; });
  };
  RowsAhead<kChunks> ahead;
  load(ahead, warp * kTileRows);
  for (int round = warp * kTileRows; round < rows; round += kSampleRows) {
    RowFragments<__half, kChunks, 1> left[kMTiles];
    ahead.take(args.zero, left);
    load(ahead, round + kSampleRows);
#pragma unroll
    for (int t = 0; t < kSampleTiles; ++t) {
      if (8 * t >= columns) break;
      float d[kMTiles][4];
      multiply_rows<1, __half, kChunks, 1, 1>(left, table + t * kChunks * 32 + lane,
                                              make_float4(0.0f, 0.0f, 0.0f, 0.0f), d);
#pragma unroll
      for (int m = 0; m < kMTiles; ++m)
#pragma unroll
        for (int i = 0; i < 4; ++i) most[t][i / 2][i % 2] = fmaxf(most[t][i / 2][i % 2], d[m][i]);
    }
  }
#pragma unroll
  for (int t = 0; t < kSampleTiles; ++t)
#pragma unroll
    for (int i = 0; i < 4; ++i)
      maxima[(8 * t + lane % 4 * 2 + i % 2) * kMaximaPitch + 16 * warp + i / 2 * 8 + lane / 4] =
          most[t][i / 2][i % 2];
}

// Keys that `rank` of the parts' maxima are not below, to their upper bits, of as many columns as a
// warp has.
template <int kColumns>
__device__ __forceinline__ void rank_keys(const float* maxima, int rank,
                                          std::uint32_t (&found)[kColumns]) {
  constexpr int kEach = kGroups / 32;
  std::uint32_t key[kColumns][kEach];
#pragma unroll
  for (int c = 0; c < kColumns; ++c) {
    found[c] = 0;
#pragma unroll
    for (int i = 0; i < kEach; ++i)
      key[c][i] = ordered(maxima[c * kMaximaPitch + 32 * i + static_cast<int>(threadIdx.x) % 32]);
  }
  for (int bit = 31; bit >= 11; --bit)
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      const std::uint32_t probe = found[c] | 1u << bit;
      int count = 0;
#pragma unroll
      for (int i = 0; i < kEach; ++i) count += key[c][i] >= probe;
      if (__reduce_add_sync(~0u, count) >= rank) found[c] = probe;
    }
}

// Thresholds of kSampleColumns centroids: the parts of a sample have a largest score each, and the
// threshold is the one of them that leaves about kAim * width rows.
template <int kChunks>
__global__ void __launch_bounds__(kSampleThreads)
    thresholds_kernel(const __grid_constant__ CandidateArgs args) {
  await_previous();
  extern __shared__ uint4 table[];
  auto* maxima = reinterpret_cast<float*>(table + kSampleTiles * kChunks * 32);
  const CandidateBlock block(args, static_cast<int>(blockIdx.y) >= args.sides[0].heads);
  const int clusters = args.centroids.clusters,
            first_column = static_cast<int>(blockIdx.x) * kSampleColumns;
  const int columns = min(kSampleColumns, args.centroids.padded - first_column);
  const int width = block.side.width, real = min(columns, clusters - first_column);
  float* thresholds = block.side.lists.thresholds + block.list + first_column;
  if (blockIdx.x + blockIdx.y + blockIdx.z + threadIdx.x == 0) *args.zeroed = 0;
  for (int c = threadIdx.x; c < real; c += kSampleThreads)
    block.side.lists.count[block.list + first_column + c] = 0;
  const int step = width / kSampled, rows = block.length / step / kSampleRows * kSampleRows;
  if (block.length < kLeastRows * width || rows == 0) {  // too few: no candidates
    for (int c = threadIdx.x; c < real; c += kSampleThreads) thresholds[c] = INFINITY;
    return;
  }
  stage_centroids<kSampleThreads, kChunks>(args.centroids, block.head / block.side.group,
                                           first_column, columns, table);
  __syncthreads();
  find_maxima<kChunks>(args, block, columns, rows, step, table, maxima);
  __syncthreads();
  const float hits = kAim * static_cast<float>(width) * static_cast<float>(rows) /
                     static_cast<float>(block.length);
  const int rank = max(1, static_cast<int>(kGroups * (1.0f - expf(-hits / kGroups))));
  constexpr int kColumns = kSampleColumns / kSampleWarps;
  const int own = static_cast<int>(threadIdx.x) / 32 * kColumns;
  std::uint32_t found[kColumns];
  rank_keys<kColumns>(maxima + own * kMaximaPitch, rank, found);
#pragma unroll
  for (int c = 0; c < kColumns; ++c)
    if (threadIdx.x % 32 == 0 && own + c < real) thresholds[own + c] = from_ordered(found[c]);
}

constexpr int kThreads = 256, kWarps = kThreads / 32, kBlockRows = kWarps * kTileRows;

// Hits of a warp on their way to the lists.
struct HitBuffer {
  static constexpr int kSize = 64;
  struct Memory {
    float score[kSize];
    std::int32_t row[kSize], column[kSize];
  };
  Memory& memory;
  int count;

  __device__ __forceinline__ void push(bool hit, float score, int row, int column) {
    const unsigned lanes = __ballot_sync(~0u, hit);
    const int place = count + __popc(lanes & ((1u << (threadIdx.x % 32)) - 1));
    if (hit) memory.score[place] = score, memory.row[place] = row, memory.column[place] = column;
    count += __popc(lanes);
  }
  // The last 32 hits at most leave the buffer, a lane for each.
  __device__ __forceinline__ void flush(const CandidateLists& lists, std::int64_t list) {
    __syncwarp();
    const int place = count - 1 - static_cast<int>(threadIdx.x) % 32;
    if (place >= 0) {
      const std::int64_t own = list + memory.column[place];
      const int rank = atomicAdd(lists.count + own, 1);
      if (rank < lists.capacity)
        lists.entries[own * lists.capacity + rank] = make_uint2(
            __float_as_uint(memory.score[place]), static_cast<unsigned>(memory.row[place]));
    }
    __syncwarp();
    count = max(count - 32, 0);
  }
};

// One of 16 registers.
__device__ __forceinline__ float pick(const float* d, int i) {
  float x[8];
#pragma unroll
  for (int j = 0; j < 8; ++j) x[j] = i & 8 ? d[8 + j] : d[j];
#pragma unroll
  for (int j = 0; j < 4; ++j) x[j] = i & 4 ? x[4 + j] : x[j];
#pragma unroll
  for (int j = 0; j < 2; ++j) x[j] = i & 2 ? x[2 + j] : x[j];
  return i & 1 ? x[1] : x[0];
}

// Rows from `first` on against `columns` centroids; rows from `end` on are no hits.
template <int kChunks>
__device__ __forceinline__ void scan_columns(
    const RowFragments<__half, kChunks, 1> (&left)[kMTiles], const uint4* table,
    const float2* limits, int columns, int first, int end, int first_column,
    const CandidateBlock& block, HitBuffer& buffer) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  table += lane;
#pragma unroll 1
  for (int t = 0; t < columns; t += 16, table += 2 * kChunks * 32) {
    float d[2 * kMTiles * 4];  // [half][16 rows][side][column]
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float2 limit = limits[t / 2 + 4 * half + lane % 4];
      multiply_rows<1, __half, kChunks, 1, 1>(
          left, table + half * kChunks * 32, make_float4(limit.x, limit.y, limit.x, limit.y),
          *reinterpret_cast<float(*)[kMTiles][4]>(d + half * kMTiles * 4));
    }
    std::uint32_t signs = 0;
#pragma unroll
    for (int i = 0; i < 16; ++i) signs = __funnelshift_l(__float_as_uint(d[i]), signs, 1);
    std::uint32_t hits = ~signs << 16;  // bit 31 - i: score i may be a hit
    while (__any_sync(~0u, hits != 0)) {
      const int i = __clz(static_cast<int>(hits)) & 15;
      const int row = first + i / 4 % 2 * 16 + i / 2 % 2 * 8 + lane / 4;
      const float score = pick(d, i);
      buffer.push(hits != 0 && score >= 0.0f && row < end, score, row,
                  first_column + t + i / 8 * 8 + lane % 4 * 2 + i % 2);
      hits &= ~(0x80000000u >> i);
      if (buffer.count >= 32) buffer.flush(block.side.lists, block.list);
    }
  }
}

// All rows against all centroids. Blocks (x, y, z) share the rows of a head.
template <int kChunks>
__global__ void __launch_bounds__(kThreads, 2)
    candidates_kernel(const __grid_constant__ CandidateArgs args) {
  await_previous();
  extern __shared__ uint4 table[];
  __shared__ HitBuffer::Memory memory[kWarps];
  const CandidateBlock block(args, static_cast<int>(blockIdx.y) >= args.sides[0].heads);
  const int clusters = args.centroids.clusters, padded = args.centroids.padded;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int parts = static_cast<int>(gridDim.x) * kBlockRows;
  const int each = (block.length + parts - 1) / parts * kBlockRows;
  const int begin = min(static_cast<int>(blockIdx.x) * each, block.length);
  const int end = min(begin + each, block.length);
  if (begin >= end) return;
  const float* thresholds = block.side.lists.thresholds + block.list;
  auto* limits = reinterpret_cast<float2*>(table + args.columns / 8 * kChunks * 32);
  HitBuffer buffer{memory[warp], 0};
  for (int column = 0; column < padded; column += args.columns) {
    const int columns = min(args.columns, padded - column);
    const auto load = [&](RowsAhead<kChunks>& ahead, int first) {
      ahead.load(block, [&](int i) { return first + i < end ? first + i : -1; });
    };
    RowsAhead<kChunks> ahead;
    load(ahead, begin + warp * kTileRows);
    __syncthreads();
    stage_centroids<kThreads, kChunks>(args.centroids, block.head / block.side.group, column,
                                       columns, table);
    for (int i = threadIdx.x; i < columns / 2; i += kThreads) {
      const auto limit = [&](int c) { return c < clusters ? -thresholds[c] : -INFINITY; };
      limits[i] = make_float2(limit(column + 2 * i), limit(column + 2 * i + 1));
    }
    __syncthreads();
    for (int first = begin + warp * kTileRows; first < end; first += kBlockRows) {
      RowFragments<__half, kChunks, 1> left[kMTiles];
      ahead.take(args.zero, left);
      load(ahead, first + kBlockRows);
      scan_columns<kChunks>(left, table, limits, columns, first, end, column, block, buffer);
    }
  }
  if (buffer.count > 0) buffer.flush(block.side.lists, block.list);
}

CandidateSide candidate_side(const CandidateRun& run) {
  return {tensor4<const Element>(run.side.rows),
          run.side.shape.q,
          run.side.shape.heads,
          run.side.shape.group,
          run.side.stats,
          run.width,
          run.lists};
}

}  // namespace

CandidateLists::CandidateLists(Arena& arena, const RoutingSide& side, std::int64_t width) {
  if (side.rows.dtype != DType::bf16 || side.shape.q.cu_seqlens || width < kLeastWidth ||
      width > kMostWidth || side.shape.rows < kLeastRows * width)
    return;
  capacity = static_cast<int>(kRoom * width);
  const std::int64_t lists =
      side.rows.size(0) * static_cast<std::int64_t>(side.shape.heads) * side.shape.clusters;
  thresholds = arena.take<float>(lists);
  count = arena.take<std::int32_t>(lists);
  entries = arena.take<uint2>(lists * capacity);
}

void find_candidates(const AttentionCall& call, const CentredCentroids& centroids,
                     const CandidateRun& queries, const CandidateRun& keys, std::int32_t* zeroed,
                     cudaStream_t stream) {
  const bool both = queries.lists.capacity && keys.lists.capacity;
  CandidateArgs args{};
  args.sides[0] = candidate_side(queries.lists.capacity ? queries : keys);
  if (both) args.sides[1] = candidate_side(keys);
  args.centroids = centroids;
  args.zeroed = zeroed;
  const auto heads = static_cast<std::int64_t>(args.sides[0].heads) + args.sides[1].heads;
  const std::int64_t rows = std::max(call.N, call.S);
  const std::int64_t parts =
      std::clamp<std::int64_t>(2 * multiprocessors() / std::max<std::int64_t>(1, heads * call.B), 1,
                               (rows + kBlockRows - 1) / kBlockRows);
  const auto grid = [&](std::int64_t x) {
    return dim3(static_cast<unsigned>(x), static_cast<unsigned>(heads),
                static_cast<unsigned>(call.B));
  };
  dispatch_wide_dim(call.op, call.Dk, [&](auto width) {
    constexpr int kChunks = decltype(width)::value / 32, kColumnBytes = kChunks * 64 + 4;
    constexpr int kTableBytes = 72 * 1024;
    args.columns = std::min(centroids.padded, kTableBytes / kColumnBytes / 16 * 16);
    launch_early("thresholds", thresholds_kernel<kChunks>,
                 grid((centroids.padded + kSampleColumns - 1) / kSampleColumns), kSampleThreads,
                 static_cast<std::size_t>(kSampleColumns) * (kChunks * 64 + kMaximaPitch * 4),
                 stream, args);
    launch_early("candidates", candidates_kernel<kChunks>, grid(parts), kThreads,
                 static_cast<std::size_t>(args.columns) * kColumnBytes, stream, args);
  });
}

}  // namespace coterie::cuda
