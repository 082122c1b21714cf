// SPDX-License-Identifier: MIT
// k-means of 64-bit codes in Hamming distance (mechanisms.md 5.2 step 2, 16), all iterations and
// the counting sort in one kernel. A team of blocks works on one (item, head).
//
// Assignment: 1-bit tensor-core products. The row [x, ~x] of 128 bits against the column [c, ~c]
// has popcount(and) = 64 - Hamming(x, c). Two products, as 16-bit halves of a word, times 512 plus
// the reversed number of the column tile, are keys whose maximum is the nearest centroid, the lower
// index on ties: one permute, one multiply-add and half a three-way maximum for two pairs.
//
// Update: only codes that changed their cluster vote. A block counts changes of its rows in shared
// memory, lane l of a warp bits l%16 and l%16 + 16 of word l/16 as two 16-bit halves of one
// counter; the owner of a cluster adds the blocks' changes to the cluster's votes. Bit 63, which
// codes leave free, counts the members. All sums are of integers, so the order of the atomics does
// not matter.
#include "coterie/random.h"
#include "cuda/device/group.cuh"
#include "cuda/hamming.h"

namespace coterie::cuda {

namespace {

constexpr int kThreads = 512, kWarps = kThreads / 32;
constexpr int kMTiles = 4, kTileRows = 16 * kMTiles;  // rows of a warp's tile
constexpr int kColumnStep = 128;                      // centroids of an unrolled sweep
constexpr int kMostColumns = 4096;                    // that 9 bits of column tile can tell apart
constexpr int kSegmentRows = 32704;                   // changes of a segment fit in 16 bits, signed
constexpr int kSharedBytes = 226 * 1024;              // of a block, static shared memory left out

struct HammingArgs {
  ClusterShape shape;
  Teams teams;
  HammingRun run;
  std::uint64_t* centroids;
  std::int32_t *votes, *histograms;
  std::uint32_t* changes;
  int* busy;     // (problems, iterations): changed labels plus empty clusters
  int segments;  // of a block's rows
  int columns;   // centroids in shared memory at a time, a multiple of kColumnStep
  int shared_words;
  unsigned key_scale;  // 512, unknown to the compiler so that it stays a multiply-add
};

struct Point {
  std::uint32_t value;  // 64 - Hamming distance
  int label;
};

// One (item, head) as its team sees it.
struct Problem {
  int number, count;  // `count` codes
  const std::uint64_t* codes;
  std::int32_t* labels;
  RowRange range;  // of this block
};

// The shared memory of a block.
struct Stage {
  uint4* fragments;        // columns x 16 bytes, in the order in which lanes read them
  std::uint32_t* changes;  // C x 32
  uint4* records;          // kTileRows a warp: code, offsets of the new and of the old cluster
};

__host__ __device__ int padded_columns(int clusters) {
  return (clusters + kColumnStep - 1) / kColumnStep * kColumnStep;
}

__device__ __forceinline__ void popcount_product(std::uint32_t (&d)[4], std::uint32_t a0,
                                                 std::uint32_t a1, std::uint32_t b) {
  asm("mma.sync.aligned.m16n8k128.row.col.s32.b1.b1.s32.and.popc {%0,%1,%2,%3}, {%4,%5}, {%6}, "
      "{%7,%7,%7,%7};"
      : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
      : "r"(a0), "r"(a1), "r"(b), "r"(0));
}

template <int kAddend>
__device__ __forceinline__ std::uint32_t multiply_add(std::uint32_t a, std::uint32_t b) {
  std::uint32_t d;
  asm("mad.lo.u32 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "n"(kAddend));
  return d;
}

// Calls body(std::integral_constant<int, i>) for i in [0, kCount).
template <int kCount, int kFirst = 0, class Body>
__device__ __forceinline__ void unrolled(Body&& body) {
  if constexpr (kFirst < kCount) {
    body(std::integral_constant<int, kFirst>{});
    unrolled<kCount, kFirst + 1>(body);
  }
}

// Centroid c, or where `initial`, the code it starts from.
__device__ std::uint64_t centroid(const HammingArgs& args, const Problem& problem, int c,
                                  bool initial) {
  if (!initial)
    return args.centroids[static_cast<std::int64_t>(problem.number) * args.shape.clusters + c];
  const RandomStream stream{args.shape.seed, RandomUse::initial_centroid,
                            static_cast<std::uint32_t>(problem.number)};
  return problem.codes[random_permutation(stream, static_cast<std::uint32_t>(c),
                                          static_cast<std::uint32_t>(problem.count))];
}

// Fragments of centroids [first, first + columns): lane l of column tile n holds word l%4 of
// [c, ~c], c = 8n + l/4; four tiles side by side. Beyond the last centroid zeros, which never win.
__device__ void stage_centroids(const HammingArgs& args, const Problem& problem, int first,
                                int columns, bool initial, uint4* fragments) {
  for (int i = threadIdx.x; i < columns; i += kThreads) {
    uint2 code = make_uint2(0, 0), inverse = code;
    if (first + i < args.shape.clusters) {
      const std::uint64_t bits = centroid(args, problem, first + i, initial);
      code = make_uint2(static_cast<unsigned>(bits), static_cast<unsigned>(bits >> 32));
      inverse = make_uint2(~code.x, ~code.y);
    }
    const int tile = i / 8;
    auto* to =
        reinterpret_cast<std::uint32_t*>(fragments) + (tile / 4 * 32 + i % 8 * 4) * 4 + tile % 4;
    to[0] = code.x;
    to[4] = code.y;
    to[8] = inverse.x;
    to[12] = inverse.y;
  }
}

// Best keys of the tile's rows over `columns` centroids: halves are this lane's two columns.
__device__ __forceinline__ void nearest_keys(const uint4* fragments, int columns,
                                             unsigned key_scale,
                                             const std::uint32_t (&a)[kMTiles][2],
                                             std::uint32_t (&best)[kMTiles][2]) {
  constexpr int kTiles = kColumnStep / 8;
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int m = 0; m < kMTiles; ++m) best[m][0] = best[m][1] = 0;
#pragma unroll 1
  for (int rest = columns / kColumnStep - 1; rest >= 0; --rest, fragments += kColumnStep) {
    std::uint32_t keys[kMTiles][2] = {};
    unrolled<kTiles / 2>([&](auto step) {
      constexpr int kTile = decltype(step)::value * 2;
      const auto* words = reinterpret_cast<const std::uint32_t*>(fragments + kTile / 4 * 32 + lane);
      const uint2 b = *reinterpret_cast<const uint2*>(words + kTile % 4);
      constexpr int kFirst = (kTiles - 1 - kTile) * 0x10001, kSecond = kFirst - 0x10001;
#pragma unroll
      for (int m = 0; m < kMTiles; ++m) {
        std::uint32_t d[4], e[4];
        popcount_product(d, a[m][0], a[m][1], b.x);
        popcount_product(e, a[m][0], a[m][1], b.y);
#pragma unroll
        for (int r = 0; r < 2; ++r)
          keys[m][r] = __vimax3_u16x2(
              keys[m][r],
              multiply_add<kFirst>(__byte_perm(d[2 * r], d[2 * r + 1], 0x5410), key_scale),
              multiply_add<kSecond>(__byte_perm(e[2 * r], e[2 * r + 1], 0x5410), key_scale));
      }
    });
#pragma unroll
    for (int m = 0; m < kMTiles; ++m)
#pragma unroll
      for (int r = 0; r < 2; ++r)
        best[m][r] = __vmaxu2(best[m][r], keys[m][r] + rest * kTiles * 0x10001u);
  }
}

// From keys to the nearest centroid of the two rows this lane answers for: 16 (l%4) + l/4 + {0, 8}.
__device__ __forceinline__ void decode_keys(const std::uint32_t (&best)[kMTiles][2], int columns,
                                            Point (&mine)[2]) {
  const int quad = threadIdx.x % 4;
  const std::uint32_t last = columns / 8 - 1;
#pragma unroll
  for (int m = 0; m < kMTiles; ++m)
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const std::uint32_t low = best[m][r] & 0xffffu, high = best[m][r] >> 16;
      const std::uint32_t even = (last - (low & 511)) * 8 + 2 * quad;
      const std::uint32_t odd = (last - (high & 511)) * 8 + 2 * quad + 1;
      std::uint32_t key =
          max((low >> 9) << 16 | (0xffffu - even), (high >> 9) << 16 | (0xffffu - odd));
      key = max(key, __shfl_xor_sync(0xffffffffu, key, 1));
      key = max(key, __shfl_xor_sync(0xffffffffu, key, 2));
      if (quad == m) mine[r] = {key >> 16, static_cast<int>(0xffffu - (key & 0xffffu))};
    }
}

// Rows of the warp's tile as the left factor; lanes 2 and 3 of four hold the complement.
__device__ __forceinline__ void load_codes(const Problem& problem, int first,
                                           std::uint32_t (&a)[kMTiles][2]) {
  const int lane = threadIdx.x % 32;
  const auto* words = reinterpret_cast<const std::uint32_t*>(problem.codes);
  const std::uint32_t flip = lane & 2 ? 0xffffffffu : 0u;
#pragma unroll
  for (int m = 0; m < kMTiles; ++m)
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = first + 16 * m + 8 * r + lane / 4;
      a[m][r] =
          (row < problem.range.end ? words[2 * static_cast<std::int64_t>(row) + (lane & 1)] : 0u) ^
          flip;
    }
}

// Adds the bits of listed rows to their new clusters and takes them from the old ones.
template <bool kShared>
__device__ __forceinline__ void cast_votes(const uint4* records, int count, std::uint32_t* table) {
  const int lane = threadIdx.x % 32;
#pragma unroll 4
  for (int i = 0; i < count; ++i) {
    const std::uint32_t word = reinterpret_cast<const std::uint32_t*>(records + i)[lane / 16];
    const uint2 clusters = *(reinterpret_cast<const uint2*>(records + i) + 1);
    const std::uint32_t votes = (word >> (lane % 16)) & 0x00010001u;
    if constexpr (kShared) {
      atomicAdd(table + clusters.x + lane, votes);
      if (clusters.y != ~0u) atomicAdd(table + clusters.y + lane, 0u - votes);
    } else {
      const std::uint32_t low = votes & 1, high = votes >> 16;
      std::uint32_t* to = table + 2 * (static_cast<std::int64_t>(clusters.x) + lane);
      if (low) atomicAdd(to, 1u);
      if (high) atomicAdd(to + 1, 1u);
      if (clusters.y == ~0u) continue;
      to = table + 2 * (static_cast<std::int64_t>(clusters.y) + lane);
      if (low) atomicAdd(to, ~0u);
      if (high) atomicAdd(to + 1, ~0u);
    }
  }
}

// Writes new labels and lists the rows that changed; returns their number.
__device__ __forceinline__ int list_changes(const Problem& problem, int first, bool initial,
                                            const Point (&mine)[2], const int (&old)[2],
                                            uint4* records) {
  const int lane = threadIdx.x % 32, base = first + 16 * (lane % 4) + lane / 4;
  int count = 0;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = base + 8 * r;
    const bool changed = row < problem.range.end && mine[r].label != old[r];
    const unsigned lanes = __ballot_sync(0xffffffffu, changed);
    if (changed) {
      problem.labels[row] = mine[r].label;
      const std::uint64_t code = problem.codes[row];
      records[count + __popc(lanes & ((1u << lane) - 1))] =
          make_uint4(static_cast<unsigned>(code), static_cast<unsigned>(code >> 32) | 0x80000000u,
                     static_cast<unsigned>(mine[r].label) * 32u,
                     initial ? ~0u : static_cast<unsigned>(old[r]) * 32u);
    }
    count += __popc(lanes);
  }
  __syncwarp();
  return count;
}

// Assigns rows [first, end) of the block's range and counts their votes unless this is the last
// pass; returns how many labels this warp changed.
template <bool kShared>
__device__ int assign_rows(const HammingArgs& args, const Problem& problem, const Stage& stage,
                           RowRange rows, int iteration) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, clusters = args.shape.clusters;
  const bool initial = iteration == 0, vote = iteration < args.run.iterations;
  uint4* records = stage.records + warp * kTileRows;
  std::uint32_t* table = kShared ? stage.changes
                                 : reinterpret_cast<std::uint32_t*>(args.votes) +
                                       static_cast<std::int64_t>(problem.number) * clusters * 64;
  int changed = 0;
  for (int round = rows.begin; round < rows.end; round += kWarps * kTileRows) {
    const int first = round + warp * kTileRows;
    std::uint32_t a[kMTiles][2], best[kMTiles][2];
    int old[2];
    Point mine[2] = {}, next[2] = {};
    load_codes(problem, first, a);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = first + 16 * (lane % 4) + lane / 4 + 8 * r;
      old[r] = initial || row >= problem.range.end ? -1 : problem.labels[row];
    }
    for (int column = 0; column < clusters; column += args.columns) {
      const int columns = min(args.columns, padded_columns(clusters - column));
      if (clusters > args.columns) {  // more than fit: every round reads them again
        __syncthreads();
        stage_centroids(args, problem, column, columns, initial, stage.fragments);
        __syncthreads();
      }
      if (first >= rows.end) continue;
      nearest_keys(stage.fragments, columns, args.key_scale, a, best);
      decode_keys(best, columns, next);
#pragma unroll
      for (int r = 0; r < 2; ++r)
        if (next[r].value > mine[r].value) mine[r] = {next[r].value, column + next[r].label};
    }
    if (first >= rows.end) continue;
    const int count = list_changes(problem, first, initial, mine, old, records);
    if (vote) cast_votes<kShared>(records, count, table);
    __syncwarp();
    changed += count;
  }
  return changed;
}

// One assignment pass over the block's rows, and its changes to global memory.
template <bool kShared>
__device__ void assign_pass(const HammingArgs& args, const Problem& problem, const Stage& stage,
                            int iteration) {
  const int clusters = args.shape.clusters;
  const bool vote = iteration < args.run.iterations;
  if (clusters <= args.columns)
    stage_centroids(args, problem, 0, padded_columns(clusters), iteration == 0, stage.fragments);
  int changed = 0;
  for (int segment = 0; segment < args.segments; ++segment) {
    const int begin = min(problem.range.begin + segment * kSegmentRows, problem.range.end);
    if (kShared && vote)
      for (int i = threadIdx.x; i < clusters * 8; i += kThreads)
        reinterpret_cast<uint4*>(stage.changes)[i] = make_uint4(0, 0, 0, 0);
    __syncthreads();
    changed += assign_rows<kShared>(
        args, problem, stage, {begin, min(begin + kSegmentRows, problem.range.end)}, iteration);
    __syncthreads();
    if (kShared && vote) {
      auto* to = reinterpret_cast<uint4*>(args.changes) +
                 (static_cast<std::int64_t>(blockIdx.x) * args.segments + segment) * clusters * 8;
      for (int i = threadIdx.x; i < clusters * 8; i += kThreads)
        to[i] = reinterpret_cast<const uint4*>(stage.changes)[i];
    }
  }
  if (vote && threadIdx.x % 32 == 0 && changed > 0)
    atomicAdd(args.busy + problem.number * args.run.iterations + iteration, changed);
}

// New centroids of the clusters that this block owns, a warp for each, by majority of the votes.
template <bool kShared>
__device__ void update_centroids(const HammingArgs& args, const Team& team, const Problem& problem,
                                 int iteration) {
  const int clusters = args.shape.clusters, lane = threadIdx.x % 32;
  const RandomStream stream{args.shape.seed, RandomUse::empty_cluster,
                            static_cast<std::uint32_t>(problem.number)};
  const std::uint64_t mask = (std::uint64_t{1} << args.run.bits) - 1;
  const int parts = kShared ? team.size * args.segments : 0;
  for (int c = threadIdx.x / 32 * team.size + team.rank; c < clusters; c += kWarps * team.size) {
    const std::int64_t row = static_cast<std::int64_t>(problem.number) * clusters + c;
    auto* votes = reinterpret_cast<int2*>(args.votes) + row * 32 + lane;
    int2 sum = kShared && iteration == 0 ? make_int2(0, 0) : *votes;
    const std::uint32_t* changes =
        args.changes +
        (static_cast<std::int64_t>(team.number) * team.size * args.segments * clusters + c) * 32 +
        lane;
#pragma unroll 8
    for (int part = 0; part < parts; ++part) {
      const std::uint32_t packed = changes[static_cast<std::int64_t>(part) * clusters * 32];
      const int low = static_cast<std::int16_t>(packed & 0xffffu);
      sum.x += low;
      sum.y += static_cast<int>(packed - static_cast<std::uint32_t>(low)) >> 16;
    }
    if (kShared) *votes = sum;
    const int members = __shfl_sync(0xffffffffu, sum.y, 31);
    const unsigned even = __ballot_sync(0xffffffffu, 2 * sum.x > members);
    const unsigned odd = __ballot_sync(0xffffffffu, 2 * sum.y > members);
    if (lane != 0) continue;
    const std::uint32_t low = (even & 0xffffu) | (odd << 16);
    const std::uint32_t high = (even >> 16) | (odd & 0xffff0000u);
    std::uint64_t code = (static_cast<std::uint64_t>(high) << 32) | low;
    if (members == 0) {
      code = random_u64(stream, static_cast<std::uint64_t>(iteration) * clusters + c);
      atomicAdd(args.busy + problem.number * args.run.iterations + iteration, 1);
    }
    args.centroids[row] = code & mask;
  }
}

template <bool kShared>
__device__ void cluster_codes(const HammingArgs& args, Team& team, const Problem& problem,
                              const Stage& stage) {
  if (!kShared) {
    const std::int64_t first = static_cast<std::int64_t>(problem.number) * args.shape.clusters * 64;
    for (int i = team.rank * kThreads + threadIdx.x; i < args.shape.clusters * 64;
         i += team.size * kThreads)
      args.votes[first + i] = 0;
    team.sync();
  }
  for (int iteration = 0; iteration <= args.run.iterations; ++iteration) {
    assign_pass<kShared>(args, problem, stage, iteration);
    if (iteration == args.run.iterations) break;
    team.sync();
    update_centroids<kShared>(args, team, problem, iteration);
    team.sync();
    // Without changes and re-seeded clusters the next pass would repeat this one.
    if (args.busy[problem.number * args.run.iterations + iteration] == 0) break;
  }
}

template <bool kShared>
__global__ void __launch_bounds__(kThreads, 1) hamming_kmeans_kernel(HammingArgs args) {
  await_previous();
  extern __shared__ uint4 shared[];
  const ClusterShape& shape = args.shape;
  Stage stage;
  stage.records = shared;
  stage.fragments = stage.records + kWarps * kTileRows;
  stage.changes = reinterpret_cast<std::uint32_t*>(stage.fragments + args.columns);
  Team team(args.teams);
  int turn = 0;
  for (int number = team.number; number < shape.problems(); number += args.teams.count, turn ^= 1) {
    const int item = number / shape.heads, head = number % shape.heads;
    const ItemSpan span = shape.q.span(item);
    const std::int64_t start = shape.start(span, head);
    const Problem problem{number, span.length, args.run.codes + start, args.run.labels + start,
                          team.share(span.length)};
    __syncthreads();  // the sort of the last problem used the same memory
    if (span.length <= shape.clusters) {
      for (int i = problem.range.begin + threadIdx.x; i < problem.range.end; i += kThreads)
        problem.labels[i] = i;
    } else {
      cluster_codes<kShared>(args, team, problem, stage);
    }
    fill_padding(shape, team, item, head, args.run.labels, args.run.order);
    const GroupLists lists{
        problem.labels, args.run.order + start,
        args.run.offsets + static_cast<std::int64_t>(number) * (shape.clusters + 1),
        histograms_of(args.histograms, args.teams, team, turn, shape.clusters), shape.clusters};
    group_rows(team, problem.range, lists, reinterpret_cast<std::int32_t*>(shared),
               args.shared_words);
  }
}

std::size_t shared_bytes(const ClusterShape& shape, int columns, bool shared_votes) {
  const std::size_t records = kWarps * kTileRows * sizeof(uint4);
  const std::size_t votes = shared_votes ? static_cast<std::size_t>(shape.clusters) * 128 : 0;
  return records + static_cast<std::size_t>(columns) * 16 + votes;
}

Teams hamming_teams(const ClusterShape& shape, unsigned* arrivals) {
  return make_teams(shape.problems(), shape.rows, multiprocessors(), arrivals);
}

int num_segments(const ClusterShape& shape, const Teams& teams) {
  const int rows = ((shape.rows + teams.size - 1) / teams.size + 63) / 64 * 64;
  return (rows + kSegmentRows - 1) / kSegmentRows;
}

bool votes_fit(const ClusterShape& shape) {
  return shared_bytes(shape, std::min(kMostColumns, padded_columns(shape.clusters)), true) <=
         static_cast<std::size_t>(kSharedBytes);
}

template <bool kShared>
void launch(HammingArgs args, cudaStream_t stream) {
  const std::size_t sort = group_shared_bytes(args.shape.clusters, kWarps);  // in the same memory
  const std::size_t bytes = std::max(sort, shared_bytes(args.shape, args.columns, kShared));
  args.shared_words = static_cast<int>(bytes / sizeof(std::int32_t));
  launch_cooperative_early(hamming_kmeans_kernel<kShared>, args.teams.blocks(), kThreads, bytes,
                           stream, args);
}

}  // namespace

HammingBuffers::HammingBuffers(Arena& arena, const ClusterShape& shape, int iterations) {
  const Teams teams = hamming_teams(shape, nullptr);
  const std::int64_t problems = shape.problems(), clusters = shape.clusters;
  centroids = arena.take<std::uint64_t>(problems * clusters);
  votes = arena.take<std::int32_t>(problems * clusters * 64);
  if (votes_fit(shape))
    changes = arena.take<std::uint32_t>(static_cast<std::int64_t>(teams.blocks()) *
                                        num_segments(shape, teams) * clusters * 32);
  histograms = arena.take<std::int32_t>(2 * static_cast<std::int64_t>(teams.blocks()) * clusters);
  zeroed_count = teams.count + problems * iterations;
  zeroed = arena.take<unsigned>(zeroed_count);
}

void hamming_kmeans(const ClusterShape& shape, const HammingRun& run, const HammingBuffers& buffers,
                    cudaStream_t stream) {
  HammingArgs args{};
  args.shape = shape;
  args.run = run;
  args.teams = hamming_teams(shape, buffers.zeroed);
  args.centroids = buffers.centroids;
  args.votes = buffers.votes;
  args.histograms = buffers.histograms;
  args.changes = buffers.changes;
  args.busy = reinterpret_cast<int*>(buffers.zeroed + args.teams.count);
  args.segments = num_segments(shape, args.teams);
  args.columns = std::min(kMostColumns, padded_columns(shape.clusters));
  args.key_scale = 512;
  if (votes_fit(shape))
    launch<true>(args, stream);
  else
    launch<false>(args, stream);
}

}  // namespace coterie::cuda
