// SPDX-License-Identifier: MIT
// Candidates for routing's members: rows whose score, from bf16 factors on tensor cores, is not
// below a threshold of the centroid. The threshold comes from a sample of the rows, so that about
// kAim times as many rows as are wanted pass it; select_top (routing_top.cu) makes the selection
// exact.
#include "cuda/device/await.cuh"
#include "cuda/device/candidates.cuh"
#include "cuda/device/routing_table.cuh"
#include "cuda/launch.h"
#include "cuda/tuning.h"

namespace coterie::cuda {

namespace {

using Element = __nv_bfloat16;

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kMTiles = 2, kTileRows = 16 * kMTiles, kBlockRows = kWarps * kTileRows;
constexpr float kAim = 2.5f;
constexpr int kRoom = 4;  // times the wanted rows: of a list
constexpr int kLeastWidth = 32, kMostWidth = 1024, kLeastRows = 16;  // rows: times the width
constexpr int kSampled = 32;  // in width / kSampled rows one is in the sample
constexpr int kSampleColumns = 32,
              kGroups = 16 * kWarps;  // centroids of a block, parts of a sample

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

// Normalised rows first * step .. as left factors; `first` and `end` count steps.
template <int kChunks>
__device__ __forceinline__ void load_rows(const CandidateBlock& block, int first, int end, int step,
                                          unsigned zero,
                                          RowFragments<Element, kChunks, 1> (&left)[kMTiles]) {
  const Rows<const Element> strided{block.rows.data, block.rows.pitch * step, block.rows.width,
                                    block.rows.aligned};
  RowTile<Element, kChunks, kMTiles> tile;
  tile.load(strided, first, end);
#pragma unroll
  for (int m = 0; m < kMTiles; ++m)
#pragma unroll
    for (int s = 0; s < 2; ++s) {
      const int row = first + 16 * m + 8 * s + static_cast<int>(threadIdx.x) % 32 / 4;
      const RowStatistics stats =
          row < end ? block.stats[static_cast<std::int64_t>(row) * step] : RowStatistics{0, 0};
      left[m].set(s, normalised(tile.words[m][s], stats), zero);
    }
}

// The key that `rank` of a warp's 4 values a lane are not below, to its upper bits.
__device__ __forceinline__ std::uint32_t rank_key(const std::uint32_t (&key)[4], int rank) {
  std::uint32_t found = 0;
  for (int bit = 31; bit >= 8; --bit) {
    const std::uint32_t probe = found | 1u << bit;
    int count = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) count += __popc(__ballot_sync(~0u, key[i] >= probe));
    if (count >= rank) found = probe;
  }
  return found;
}

// Thresholds of kSampleColumns centroids: of 128 parts of a sample each has a largest score, and
// the threshold is the one of them that leaves about kAim * width rows.
template <int kChunks>
__global__ void __launch_bounds__(kThreads)
    thresholds_kernel(const __grid_constant__ CandidateArgs args) {
  await_previous();
  constexpr int kTiles = kSampleColumns / 8, kTileVectors = kChunks * 32;
  __shared__ uint4 table[kTiles * kTileVectors];
  __shared__ float maxima[kGroups][kSampleColumns + 1];
  const CandidateBlock block(args, static_cast<int>(blockIdx.y) >= args.sides[0].heads);
  const int clusters = args.centroids.clusters,
            first_column = static_cast<int>(blockIdx.x) * kSampleColumns;
  const int columns = min(kSampleColumns, args.centroids.padded - first_column);
  const int width = block.side.width, lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  float* thresholds = block.side.lists.thresholds + block.list + first_column;
  for (int c = threadIdx.x; c < columns && first_column + c < clusters; c += kThreads)
    block.side.lists.count[block.list + first_column + c] = 0;
  const int step = width / kSampled, rows = block.length / step / kBlockRows * kBlockRows;
  if (block.length < kLeastRows * width || rows == 0) {  // too few: no candidates
    for (int c = threadIdx.x; c < columns && first_column + c < clusters; c += kThreads)
      thresholds[c] = INFINITY;
    return;
  }
  stage_columns<kThreads, kChunks, 1>(args.centroids, block.head / block.side.group, first_column,
                                      columns, table);
  finish_stage();
  float most[kTiles][2][2];  // [tile][side][column]
#pragma unroll
  for (int t = 0; t < kTiles; ++t)
#pragma unroll
    for (int s = 0; s < 2; ++s) most[t][s][0] = most[t][s][1] = -INFINITY;
  for (int round = warp * kTileRows; round < rows; round += kBlockRows) {
    RowFragments<Element, kChunks, 1> left[kMTiles];
    load_rows<kChunks>(block, round, rows, step, args.zero, left);
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      if (8 * t >= columns) break;
      float d[kMTiles][4];
      multiply_rows<1, Element, kChunks, 1, 1>(left, table + t * kTileVectors + lane,
                                               make_float4(0.0f, 0.0f, 0.0f, 0.0f), d);
#pragma unroll
      for (int m = 0; m < kMTiles; ++m)
#pragma unroll
        for (int s = 0; s < 2; ++s) {
          most[t][s][0] = fmaxf(most[t][s][0], d[m][2 * s]);
          most[t][s][1] = fmaxf(most[t][s][1], d[m][2 * s + 1]);
        }
    }
  }
#pragma unroll
  for (int t = 0; t < kTiles; ++t)
#pragma unroll
    for (int s = 0; s < 2; ++s)
#pragma unroll
      for (int i = 0; i < 2; ++i)
        maxima[16 * warp + 8 * s + lane / 4][8 * t + lane % 4 * 2 + i] = most[t][s][i];
  __syncthreads();
  const float hits = kAim * static_cast<float>(width) * static_cast<float>(rows) /
                     static_cast<float>(block.length);
  const int rank = max(1, static_cast<int>(kGroups * (1.0f - expf(-hits / kGroups))));
  for (int c = warp; c < columns && first_column + c < clusters; c += kWarps) {
    std::uint32_t key[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) key[i] = ordered(maxima[lane + 32 * i][c]);
    const float threshold = from_ordered(rank_key(key, rank));
    if (lane == 0) thresholds[c] = threshold;
  }
}

// Hits of a warp on their way to the lists: (row of the tile) << 16 | column.
struct HitBuffer {
  static constexpr int kSize = 64, kMost = 32;  // flushed before more than kMost are in it
  std::uint32_t* hits;
  int count;

  __device__ __forceinline__ void push(bool hit, std::uint32_t code) {
    const unsigned lanes = __ballot_sync(~0u, hit);
    if (!lanes) return;
    if (hit) hits[count + __popc(lanes & ((1u << (threadIdx.x % 32)) - 1))] = code;
    count += __popc(lanes);
  }
  // By all lanes: a lane per hit.
  __device__ __forceinline__ void flush(const CandidateLists& lists, std::int64_t list,
                                        int first_row, int first_column) {
    __syncwarp();
    for (int i = static_cast<int>(threadIdx.x) % 32; i < count; i += 32) {
      const std::int64_t own = list + first_column + static_cast<int>(hits[i] & 0xffffu);
      const int place = atomicAdd(lists.count + own, 1);
      if (place < lists.capacity)
        lists.rows[own * lists.capacity + place] = first_row + static_cast<int>(hits[i] >> 16);
    }
    __syncwarp();
    count = 0;
  }
};

// All rows against all centroids. Blocks (x, y, z) share the rows of a head.
template <int kChunks>
__global__ void __launch_bounds__(kThreads, 2)
    candidates_kernel(const __grid_constant__ CandidateArgs args) {
  await_previous();
  extern __shared__ uint4 table[];
  __shared__ std::uint32_t hits[kWarps][HitBuffer::kSize];
  constexpr int kTileVectors = kChunks * 32;
  const CandidateBlock block(args, static_cast<int>(blockIdx.y) >= args.sides[0].heads);
  const int clusters = args.centroids.clusters, padded = args.centroids.padded;
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const int parts = static_cast<int>(gridDim.x) * kBlockRows;
  const int each = (block.length + parts - 1) / parts * kBlockRows;
  const int begin = min(static_cast<int>(blockIdx.x) * each, block.length);
  const int end = min(begin + each, block.length);
  if (begin >= end) return;
  const float* thresholds = block.side.lists.thresholds + block.list;
  auto* limits = reinterpret_cast<float2*>(table + args.columns / 8 * kTileVectors);
  HitBuffer buffer{hits[warp], 0};
  for (int column = 0; column < padded; column += args.columns) {
    const int columns = min(args.columns, padded - column);
    __syncthreads();
    stage_columns<kThreads, kChunks, 1>(args.centroids, block.head / block.side.group, column,
                                        columns, table);
    for (int i = threadIdx.x; i < columns / 2; i += kThreads) {
      const auto limit = [&](int c) { return c < clusters ? -thresholds[c] : -INFINITY; };
      limits[i] = make_float2(limit(column + 2 * i), limit(column + 2 * i + 1));
    }
    finish_stage();
    for (int round = begin + warp * kTileRows; round < end; round += kBlockRows) {
      RowFragments<Element, kChunks, 1> left[kMTiles];
      load_rows<kChunks>(block, round, end, 1, args.zero, left);
      const int rows = end - round - lane / 4;  // row 16 m + 8 s of this lane is there if below
#pragma unroll 1
      for (int t = 0; t < columns / 8; ++t) {
        const float2 limit = limits[4 * t + lane % 4];
        float d[kMTiles][4];
        multiply_rows<1, Element, kChunks, 1, 1>(left, table + t * kTileVectors + lane,
                                                 make_float4(limit.x, limit.y, limit.x, limit.y),
                                                 d);
        float most = d[0][0];
#pragma unroll
        for (int i = 1; i < 4 * kMTiles; ++i) most = fmaxf(most, d[i / 4][i % 4]);
        if (!__any_sync(~0u, most >= 0.0f)) continue;
#pragma unroll
        for (int m = 0; m < kMTiles; ++m) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const int row = 16 * m + i / 2 * 8;
            if (buffer.count > HitBuffer::kMost)
              buffer.flush(block.side.lists, block.list, round, column);
            buffer.push(d[m][i] >= 0.0f && row < rows,
                        static_cast<std::uint32_t>(row + lane / 4) << 16 |
                            static_cast<std::uint32_t>(8 * t + lane % 4 * 2 + i % 2));
          }
        }
      }
      buffer.flush(block.side.lists, block.list, round, column);
    }
  }
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
  rows = arena.take<std::int32_t>(lists * capacity);
}

void find_candidates(const AttentionCall& call, const CentredCentroids& centroids,
                     const CandidateRun* queries, const CandidateRun* keys, cudaStream_t stream) {
  if (!queries) std::swap(queries, keys);
  if (!queries || queries->side.count() == 0) return;
  CandidateArgs args{};
  args.sides[0] = candidate_side(*queries);
  if (keys) args.sides[1] = candidate_side(*keys);
  args.centroids = centroids;
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
    constexpr int kTableBytes = 96 * 1024;
    args.columns = std::min(centroids.padded, kTableBytes / kColumnBytes / 16 * 16);
    launch_early("thresholds", thresholds_kernel<kChunks>,
                 grid((centroids.padded + kSampleColumns - 1) / kSampleColumns), kThreads, 0,
                 stream, args);
    launch_early("candidates", candidates_kernel<kChunks>, grid(parts), kThreads,
                 static_cast<std::size_t>(args.columns) * kColumnBytes, stream, args);
  });
}

}  // namespace coterie::cuda
