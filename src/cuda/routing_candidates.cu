// SPDX-License-Identifier: MIT
// Candidates for routing's members: rows whose rounded score is not below a threshold of the
// centroid, which about kCandidateAim times as many rows as are wanted pass; routing_choose.cu
// makes the selection exact.
#include "cuda/device/await.cuh"
#include "cuda/device/routing_candidates.cuh"
#include "cuda/device/tile.cuh"
#include "cuda/launch.h"
#include "cuda/tuning.h"

namespace coterie::cuda {

namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32, kBlocks = 3;  // on a multiprocessor
constexpr int kLeastWidth = 32, kMostWidth = 1024;
constexpr int kTableBytes = 34 * 1024;

template <int kChunks>
constexpr int kBlockRows = kWarps * 16 * kCandidateTiles<kChunks>;

// Hits of a warp on their way to the lists.
struct HitBuffer {
  static constexpr int kSize = 64;        // flushed from 32 on
  static constexpr int kColumnBits = 10;  // of those in shared memory
  struct Memory {
    uint2 hit[kSize];  // score; row << kColumnBits | column, counted from the block's
  };
  std::uint32_t hits;  // address in shared memory
  int count;

  // By all lanes.
  __device__ __forceinline__ void push(bool hit, float score, int row, int column) {
    const unsigned lanes = __ballot_sync(~0u, hit);
    const int place = count + __popc(lanes & ((1u << (threadIdx.x % 32)) - 1));
    if (hit)
      asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(hits + 8 * place),
                   "r"(__float_as_uint(score)), "r"(row << kColumnBits | column)
                   : "memory");
    count += __popc(lanes);
  }
  __device__ __forceinline__ bool full() const { return count >= 32; }
  // The last 32 hits at most go to the lists from `list` on, rows from first_row on; a lane each.
  __device__ __forceinline__ void flush(const CandidateLists& lists, std::int64_t list,
                                        int first_row) {
    __syncwarp();
    const int place = count - 1 - static_cast<int>(threadIdx.x) % 32;
    if (place >= 0) {
      uint2 hit;
      asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];"
                   : "=r"(hit.x), "=r"(hit.y)
                   : "r"(hits + 8 * place)
                   : "memory");
      const std::int64_t own = list + (hit.y & ((1u << kColumnBits) - 1));
      const int rank = atomicAdd(lists.count + own, 1);
      if (rank < lists.capacity)
        lists.entries[own * lists.capacity + rank] =
            make_uint2(hit.x, first_row + (hit.y >> kColumnBits));
    }
    __syncwarp();
    count = max(count - 32, 0);
  }
};

// One of kCount registers.
template <int kCount>
__device__ __forceinline__ float pick(const float (&d)[kCount], int i) {
  if constexpr (kCount == 1) {
    return d[0];
  } else {
    float x[kCount / 2];
#pragma unroll
    for (int j = 0; j < kCount / 2; ++j) x[j] = i & kCount / 2 ? d[kCount / 2 + j] : d[j];
    return pick(x, i);
  }
}

// Columns [first, first + columns) of a head's centroids to shared memory, as left factors of
// tokens whose elements stand as RowFragments has them: 16 bytes for a lane and a step of 16
// depths. Limits are minus the thresholds.
template <int kChunks>
__device__ __forceinline__ void stage_columns(const CandidateArgs& args,
                                              const CandidateBlock& block, int first, int columns,
                                              std::uint32_t* table, float* limits) {
  constexpr int kLanes = 4 * kChunks;
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  for (int base = 0; base < columns; base += kThreads / kLanes) {
    const int column = base + static_cast<int>(threadIdx.x) / kLanes;
    const uint4 words = scaled_centroid<kLanes>(args.centroids, block.head / block.side.group,
                                                column < columns ? first + column : -1);
    if (column >= columns) continue;
    std::uint32_t* to = table +
                        ((column / 16 * kChunks + lane / 4) * 64 + column % 8 * 4 + lane % 4) * 4 +
                        column % 16 / 8;
    to[0] = words.x, to[2] = words.y;
    to[128] = words.z, to[130] = words.w;
  }
  const float* thresholds = block.side.lists.thresholds + block.list + first;
  for (int i = threadIdx.x; i < columns; i += kThreads)
    limits[i] = first + i < args.centroids.clusters ? -thresholds[i] : -INFINITY;
}

// What a block scans: rows of the range against the columns in shared memory from `column` on.
struct Scan {
  const CandidateBlock& block;
  const uint4* table;
  const float* limits;
  int columns, column;
  RowRange range;
};

// Rows from `first` on against all columns. A lane has scores of several tokens and two centroids:
// a token that is near many centroids gives its hits to many lanes.
template <int kChunks, int kTiles>
__device__ __forceinline__ void scan_columns(const Scan& scan,
                                             const RowWords<__half, kChunks> (&rows)[kTiles],
                                             int first, HitBuffer& buffer) {
  constexpr int kScores = 4 * kTiles;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const uint4* table = scan.table + lane;
  std::uint32_t limits = shared_address(scan.limits) + lane / 4 * 4;
  first += lane % 4 * 2;
#pragma unroll 1
  for (int t = 0; t < scan.columns; t += 16, table += kChunks * 64, limits += 64) {
    float d[kScores];  // [8 tokens][8 centroids][token]
    float low, high;   // kept addresses: the compiler would make them anew in every step
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(low) : "r"(limits));
    asm volatile("ld.shared.f32 %0, [%1+32];" : "=f"(high) : "r"(limits));
    const float start[4] = {low, low, high, high};
#pragma unroll
    for (int step = 0; step < 2 * kChunks; ++step) {
      const uint4 a4 = table[step * 32];
      const std::uint32_t a[4] = {a4.x, a4.y, a4.z, a4.w};
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
        const uint4& b = rows[n].word[step / 2];
        auto& own = *reinterpret_cast<float(*)[4]>(d + 4 * n);
        if (step == 0)
          multiply_tile<__half>(own, a, b.x, b.y, start);
        else
          multiply_tile<__half>(own, a, step % 2 ? b.z : b.x, step % 2 ? b.w : b.y, own);
      }
    }
    std::uint32_t signs[2] = {};
#pragma unroll
    for (int i = 0; i < kScores; ++i) {
      std::uint32_t& word = signs[i / (kScores / 2)];
      word = __funnelshift_l(__float_as_uint(d[i]), word, 1);
    }
    // Bit 31 - i: score i may be a hit.
    std::uint32_t hits = ~(signs[0] << (kScores / 2) | signs[1]) << (32 - kScores);
    while (__any_sync(~0u, hits != 0)) {
      const int i = __clz(static_cast<int>(hits)) & (kScores - 1);
      const int row = first + i / 4 * 8 + i % 2;
      const float score = pick(d, i);
      buffer.push(hits != 0 && score >= 0.0f && row < scan.range.end, score, row - scan.range.begin,
                  t + i / 2 % 2 * 8 + lane / 4);
      hits &= ~(0x80000000u >> i);
      if (buffer.full())
        buffer.flush(scan.block.side.lists, scan.block.list + scan.column, scan.range.begin);
    }
  }
}

// All rows against all centroids. Blocks (x, y, z) share the rows of a head.
template <int kChunks>
__global__ void __launch_bounds__(kThreads, kBlocks)
    candidates_kernel(const __grid_constant__ CandidateArgs args) {
  await_previous();
  extern __shared__ uint4 table[];
  __shared__ HitBuffer::Memory memory[kWarps];
  constexpr int kMTiles = kCandidateTiles<kChunks>, kRound = kBlockRows<kChunks>;
  const CandidateBlock block(args, static_cast<int>(blockIdx.y) >= args.sides[0].heads);
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int parts = static_cast<int>(gridDim.x) * kRound;
  const int each = (block.length + parts - 1) / parts * kRound;
  const int begin = min(static_cast<int>(blockIdx.x) * each, block.length);
  const RowRange range{begin, min(begin + each, block.length)};
  if (range.begin >= range.end) return;
  auto* limits = reinterpret_cast<float*>(table + args.columns * kChunks * 4);
  HitBuffer buffer{shared_address(memory[warp].hit), 0};
  for (int column = 0; column < args.centroids.padded; column += args.columns) {
    const int columns = min(args.columns, args.centroids.padded - column);
    __syncthreads();
    stage_columns<kChunks>(args, block, column, columns, reinterpret_cast<std::uint32_t*>(table),
                           limits);
    __syncthreads();
    const Scan scan{block, table, limits, columns, column, range};
    for (int first = begin + warp * 16 * kMTiles; first < range.end; first += kRound) {
      RowsAhead<kChunks, kMTiles> ahead;
      ahead.load(block, [&](int i) { return first + i < range.end ? first + i : -1; });
      RowWords<__half, kChunks> rows[2 * kMTiles];
      ahead.normalised(
          [&](int m, int s, const RowWords<__half, kChunks>& y) { rows[2 * m + s] = y; });
      scan_columns<kChunks>(scan, rows, first, buffer);
    }
    buffer.flush(block.side.lists, block.list + column, begin);
  }
}

CandidateSide candidate_side(const CandidateRun& run) {
  return {tensor4<const __nv_bfloat16>(run.side.rows),
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
      width > kMostWidth || side.shape.rows < kLeastCandidateRows * width)
    return;
  capacity = static_cast<int>(kCandidateRoom * width);
  const std::int64_t lists =
      side.rows.size(0) * static_cast<std::int64_t>(side.shape.heads) * side.shape.clusters;
  thresholds = arena.take<float>(lists);
  count = arena.take<std::int32_t>(lists);
  entries = arena.take<uint2>(lists * capacity);
}

void find_candidates(const AttentionCall& call, const CentredCentroids& centroids,
                     const CandidateRun& queries, const CandidateRun& keys,
                     const ZeroedWords& zeroed, cudaStream_t stream) {
  const bool both = queries.lists.capacity && keys.lists.capacity;
  CandidateArgs args{};
  args.sides[0] = candidate_side(queries.lists.capacity ? queries : keys);
  if (both) args.sides[1] = candidate_side(keys);
  args.centroids = centroids;
  args.zeroed = zeroed;
  const auto heads = static_cast<std::int64_t>(args.sides[0].heads) + args.sides[1].heads;
  const dim3 grid(1, static_cast<unsigned>(heads), static_cast<unsigned>(call.B));
  find_thresholds(call, args, grid, stream);
  dispatch_head_dim(call.op, call.Dk, [&](auto width) {
    constexpr int kChunks = decltype(width)::value / 32, kColumnBytes = kChunks * 64 + 4;
    // As many blocks as are resident, and no more than there are rounds.
    const std::int64_t rows = std::max(call.N, call.S), round = kBlockRows<kChunks>;
    const std::int64_t parts = std::clamp<std::int64_t>(
        kBlocks * multiprocessors() / (heads * call.B), 1 + (rows >> (32 - HitBuffer::kColumnBits)),
        std::max<std::int64_t>(1, (rows + round - 1) / round));
    args.columns = std::min(centroids.padded, kTableBytes / kColumnBytes / 16 * 16);
    launch_early("candidates", candidates_kernel<kChunks>,
                 dim3(static_cast<unsigned>(parts), grid.y, grid.z), kThreads,
                 static_cast<std::size_t>(args.columns) * kColumnBytes, stream, args);
  });
}

}  // namespace coterie::cuda
