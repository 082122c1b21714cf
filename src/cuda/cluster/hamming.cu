// SPDX-License-Identifier: MIT
// k-means of 64-bit codes in Hamming distance (docs/mechanisms.md: clustered), all iterations and
// the counting sort in one kernel.
//
// Grid and block: cooperative, one block of 512 threads a multiprocessor; a team of blocks works on
// one (item, head), a warp takes 32 rows at a time. Shared memory: centroids, changes of votes, and
// codes and labels of the block's rows where they fit, up to 225 KB or what the device has.
// __launch_bounds__(512, 1).
//
// Assignment: rows against centroids by 1-bit tensor-core products. Once few centroids move, a pass
// compares with these only: a row that is still as near to its own centroid as before has no other
// candidates. Rows that lost similarity are listed and compared with all.
//
// Update: only codes that changed their cluster vote. A block counts changes of its rows in shared
// memory: lane l of a warp counts bits l%16 and l%16 + 16 of word l/16 as two 16-bit halves of one
// counter. The owner of a cluster adds the blocks' changes to the cluster's votes. Bit 63, which
// codes leave free, counts the members. All sums are integers, so the order of the atomics does not
// matter. If shared memory cannot hold the changes of all clusters (kShared false), votes go
// directly to global memory. Preconditions: up to 63 bits, sm_80 or later. Any number of clusters.
#include <cstdint>

#include "coterie/random.h"
#include "cuda/cluster/group.cuh"
#include "cuda/cluster/stages.h"
#include "cuda/prim/team.cuh"

namespace coterie::cuda {

namespace {

// Nearest codes by 1-bit tensor-core products. The row [x, ~x] of 128 bits against the column [c,
// ~c] has popcount(and) = 64 - Hamming(x, c). Two products, as 16-bit halves of a word, times 512
// plus the reversed number of the column tile, are keys whose maximum is the nearest centroid, the
// lower index on ties: one permute, one multiply-add and half a three-way maximum for two pairs.

constexpr int kMTiles = 2, kTileRows = 16 * kMTiles;  // rows of a warp's tile, one a lane
constexpr int kColumnStep = 128;                      // centroids of an unrolled sweep
constexpr int kMovedStep = 16;                        // the same, if few are swept
constexpr int kMostColumns = 4096;                    // that 9 bits of column tile can tell apart

struct Point {
  std::uint32_t value;  // 64 - Hamming distance
  int label;
};

template <int kStep = kColumnStep>
__host__ __device__ inline int padded_columns(int clusters) {
  return (clusters + kStep - 1) / kStep * kStep;
}

__device__ __forceinline__ void popcount_product(std::uint32_t (&d)[4], std::uint32_t a0,
                                                 std::uint32_t a1, std::uint32_t b) {
  asm("mma.sync.aligned.m16n8k128.row.col.s32.b1.b1.s32.and.popc {%0,%1,%2,%3}, {%4,%5}, {%6}, "
      "{%7,%7,%7,%7};"
      : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
      : "r"(a0), "r"(a1), "r"(b), "r"(0));
}

// Best keys of rows over `columns` centroids, a multiple of kStep: halves are this lane's two
// columns.
template <int kStep, int kTiles>
__device__ __forceinline__ void nearest_keys(const uint4* fragments, int columns,
                                             unsigned key_scale,
                                             const std::uint32_t (&a)[kTiles][2],
                                             std::uint32_t (&best)[kTiles][2]) {
  const auto* words = reinterpret_cast<const uint2*>(fragments + threadIdx.x % 32);
  std::uint32_t addend = (columns / 8 - 1) * 0x10001u;  // of a column tile
#pragma unroll
  for (int m = 0; m < kTiles; ++m) best[m][0] = best[m][1] = 0;
#pragma unroll 1
  for (int column = 0; column < columns; column += kStep) {
#pragma unroll
    for (int pair = 0; pair < kStep / 16; ++pair) {
      // A lane has 16 bytes of 32 columns, 8 bytes for each pair of column tiles.
      const int number = kStep > 16 ? column / 16 + pair : column / 16;
      const uint2 b = words[number / 2 * 64 + number % 2];
#pragma unroll
      for (int m = 0; m < kTiles; ++m) {
        std::uint32_t d[4], e[4];
        popcount_product(d, a[m][0], a[m][1], b.x);
        popcount_product(e, a[m][0], a[m][1], b.y);
#pragma unroll
        for (int r = 0; r < 2; ++r)
          best[m][r] = __vimax3_u16x2(
              best[m][r], __byte_perm(d[2 * r], d[2 * r + 1], 0x5410) * key_scale + addend,
              __byte_perm(e[2 * r], e[2 * r + 1], 0x5410) * key_scale + (addend - 0x10001u));
      }
      addend -= 0x20002u;
    }
  }
}

// The row of a tile whose label this lane finds: row l/4 or l/4 + 8 of row tile l%2.
__device__ __forceinline__ int answered_row() {
  const int lane = static_cast<int>(threadIdx.x % 32);
  return lane % 2 * 16 + lane % 4 / 2 * 8 + lane / 4;
}

// Decodes keys to the nearest centroid of this lane's row. If kTiles is 1, odd lanes have none.
template <int kTiles>
__device__ __forceinline__ Point decode_keys(const std::uint32_t (&best)[kTiles][2], int columns) {
  const std::uint32_t quad = threadIdx.x % 4, reversed = 7 - 2 * quad;
  std::uint32_t key[2][2] = {};
#pragma unroll
  for (int m = 0; m < kTiles; ++m)
#pragma unroll
    for (int r = 0; r < 2; ++r)  // similarity, reversed number of the column
      key[m][r] = max((best[m][r] & 0xffffu) * 8 + reversed, (best[m][r] >> 16) * 8 + reversed - 1);
  // Four lanes have parts of four rows: each keeps one row.
  std::uint32_t kept[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const std::uint32_t other = __shfl_xor_sync(0xffffffffu, quad % 2 ? key[0][r] : key[1][r], 1);
    kept[r] = max(quad % 2 ? key[1][r] : key[0][r], other);
  }
  const std::uint32_t other = __shfl_xor_sync(0xffffffffu, quad / 2 ? kept[0] : kept[1], 2);
  const std::uint32_t own = max(quad / 2 ? kept[1] : kept[0], other);
  return {own >> 12,
          columns - 8 - static_cast<int>(own >> 3 & 511u) * 8 + 7 - static_cast<int>(own & 7u)};
}

constexpr int kThreads = 512, kWarps = kThreads / 32;
constexpr int kSegmentRows = 32704;       // changes of a segment fit in 16 bits, signed
constexpr int kPending = kTileRows + 16;  // rows of a warp to compare with all centroids
constexpr int kRowBytes = 8 + 4;          // code and label
constexpr int kFew = 8;                   // centroids that lanes compare with one by one

struct HammingArgs : HammingPlan {
  HammingRun run;
  int* busy;           // (problems, iterations): whether a centroid moved or was drawn anew
  int held_rows;       // of a block that shared memory holds, or 0
  int shared_words;    // for the sort
  unsigned key_scale;  // 512, unknown to the compiler so that it stays a multiply-add
};

// One (item, head) as its team sees it.
struct Problem {
  int number, count;  // `count` codes
  const std::uint64_t* all_codes;
  RowRange range;              // of this block
  const std::uint64_t* codes;  // of the range, like the labels
  std::int32_t* labels;

  __device__ int rows() const { return range.end - range.begin; }
};

// The shared memory of a block.
struct Stage {
  uint4* records;          // kTileRows a warp: code, offsets of the new and of the old cluster
  uint4* fragments;        // columns x 16 bytes, in the order in which lanes read them
  uint4* moved;            // half as many: centroids that moved
  ulonglong2* centroids;   // of the pass before and of this one
  std::uint32_t* changes;  // C x 32
  std::int32_t* pending;   // kPending a warp
  std::uint16_t* numbers;  // of the centroids that moved
  bool held;               // codes and labels of the block's rows are here
  std::uint64_t* codes;
  std::int32_t* labels;

  __device__ Stage(uint4* shared, const HammingArgs& args, bool votes) {
    records = shared;
    fragments = records + kWarps * kTileRows;
    moved = fragments + args.columns;
    centroids = reinterpret_cast<ulonglong2*>(moved + args.columns / 2);
    changes = reinterpret_cast<std::uint32_t*>(centroids + args.columns);
    pending = reinterpret_cast<std::int32_t*>(changes + (votes ? args.shape.clusters * 32 : 0));
    numbers = reinterpret_cast<std::uint16_t*>(pending + kWarps * kPending);
    held = args.held_rows > 0;
    codes = reinterpret_cast<std::uint64_t*>(shared + args.shared_words / 4);
    labels = reinterpret_cast<std::int32_t*>(codes + args.held_rows);
  }
  static std::size_t bytes(int columns, int clusters, bool votes) {
    return kWarps * (kTileRows * sizeof(uint4) + kPending * 4) +
           static_cast<std::size_t>(columns) * (16 + 8 + 16 + 1) +
           (votes ? static_cast<std::size_t>(clusters) * 128 : 0);
  }
};

// Shared memory of a block, without static arrays.
std::size_t room() { return static_cast<std::size_t>(shared_per_block()) - 2 * 1024; }

// The largest part of the centroids that fits.
int most_columns() {
  int columns = kMostColumns;
  while (Stage::bytes(columns, 0, false) > room()) columns -= kColumnStep;
  return columns;
}

// Centroid c, or if `initial`, the code it starts from.
__device__ inline std::uint64_t centroid(const HammingArgs& args, const Problem& problem, int c,
                                         bool initial) {
  if (!initial)
    return args.centroids[static_cast<std::int64_t>(problem.number) * args.shape.clusters + c];
  const RandomStream stream{args.shape.seed, RandomUse::initial_centroid,
                            args.shape.stream(problem.number)};
  return problem.all_codes[random_permutation(stream, static_cast<std::uint32_t>(c),
                                              static_cast<std::uint32_t>(problem.count))];
}

// Column i of the fragments: lane l of column tile n holds word l%4 of [c, ~c], c = 8n + l/4; four
// tiles side by side.
__device__ __forceinline__ void store_column(uint4* fragments, int i, std::uint64_t code,
                                             std::uint64_t inverse) {
  auto* to =
      reinterpret_cast<std::uint32_t*>(fragments) + (i / 32 * 32 + i % 8 * 4) * 4 + i / 8 % 4;
  to[0] = static_cast<std::uint32_t>(code);
  to[4] = static_cast<std::uint32_t>(code >> 32);
  to[8] = static_cast<std::uint32_t>(inverse);
  to[12] = static_cast<std::uint32_t>(inverse >> 32);
}

// Fragments of centroids [first, first + columns). Zeros after the last centroid never win.
__device__ inline void stage_centroids(const HammingArgs& args, const Problem& problem, int first,
                                       int columns, bool initial, uint4* fragments) {
  for (int i = threadIdx.x; i < columns; i += kThreads) {
    const bool there = first + i < args.shape.clusters;
    const std::uint64_t code = there ? centroid(args, problem, first + i, initial) : 0;
    store_column(fragments, i, code, there ? ~code : 0);
  }
}

// Fragments of all centroids at once, and separately of those that moved, unless more than half
// did; returns the number that moved.
__device__ inline int stage_all(const HammingArgs& args, const Problem& problem, bool initial,
                                const Stage& stage) {
  const int columns = padded_columns(args.shape.clusters);
  int carry = 0;
  for (int first = 0; first < columns; first += kThreads) {
    const int i = first + static_cast<int>(threadIdx.x);
    const bool there = i < args.shape.clusters;
    const std::uint64_t code = there ? centroid(args, problem, i, initial) : 0;
    bool moves = false;
    if (i < columns) {
      store_column(stage.fragments, i, code, there ? ~code : 0);
      const std::uint64_t before = initial ? 0 : stage.centroids[i].y;
      moves = there && (initial || before != code);
      stage.centroids[i] = make_ulonglong2(before, code);
    }
    const int place = block_exclusive_scan(moves, carry);
    if (!moves || place >= columns / 2) continue;
    store_column(stage.moved, place, code, ~code);
    stage.numbers[place] = static_cast<std::uint16_t>(i);
  }
  const int end = min(padded_columns<kMovedStep>(carry), columns / 2);
  for (int i = carry + threadIdx.x; i < end; i += kThreads) store_column(stage.moved, i, 0, 0);
  return carry;
}

// Adds the bits of listed rows to their new clusters and subtracts them from the old ones.
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

// The assignment by one warp.
template <bool kShared>
struct RowAssigner {
  const HammingArgs& args;
  const Problem& problem;
  const Stage& stage;
  const bool initial, vote;
  const int lane, warp;

  // Codes and labels of the block's rows, from shared memory if they fit.
  __device__ __forceinline__ std::uint64_t code_of(int row) const {
    return stage.held ? stage.codes[row] : problem.codes[row];
  }
  __device__ __forceinline__ std::uint32_t code_word(int word) const {
    return stage.held ? reinterpret_cast<const std::uint32_t*>(stage.codes)[word]
                      : reinterpret_cast<const std::uint32_t*>(problem.codes)[word];
  }
  __device__ __forceinline__ int label_of(int row) const {
    return stage.held ? stage.labels[row] : problem.labels[row];
  }

  // Rows as the left factor, where row(m, r) is number l/4 + 8 r of row tile m, or -1; lanes 2 and
  // 3 of four hold the complement.
  template <int kTiles, class Row>
  __device__ __forceinline__ void load_codes(const Row& row, std::uint32_t (&a)[kTiles][2]) const {
    const std::uint32_t flip = lane & 2 ? 0xffffffffu : 0u;
#pragma unroll
    for (int m = 0; m < kTiles; ++m)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int number = row(m, r);
        a[m][r] = (number >= 0 ? code_word(2 * number + (lane & 1)) : 0u) ^ flip;
      }
  }

  // What a lane found for a row.
  struct Answer {
    int row;  // -1 where there is none, or it must be compared with all
    int label, old;
  };

  // Sets the label of this lane's row, which votes if the label changed. Row -1 means none.
  __device__ __forceinline__ void relabel(const Answer& answer) const {
    const auto [row, label, old] = answer;
    const bool changed = row >= 0 && label != old;
    const unsigned lanes = __ballot_sync(0xffffffffu, changed);
    if (lanes == 0) return;
    uint4* records = stage.records + warp * kTileRows;
    if (changed) {
      if (stage.held)
        stage.labels[row] = label;
      else
        problem.labels[row] = label;
      const std::uint64_t code = code_of(row);
      records[__popc(lanes & ((1u << lane) - 1))] = make_uint4(
          static_cast<unsigned>(code), static_cast<unsigned>(code >> 32) | 0x80000000u,
          static_cast<unsigned>(label) * 32u, initial ? ~0u : static_cast<unsigned>(old) * 32u);
    }
    __syncwarp();
    if (vote)
      cast_votes<kShared>(
          records, __popc(lanes),
          kShared ? stage.changes
                  : reinterpret_cast<std::uint32_t*>(args.votes) +
                        static_cast<std::int64_t>(problem.number) * args.shape.clusters * 64);
    __syncwarp();
  }

  __device__ int own_row(int first, int end) const {
    const int row = first + answered_row();
    return row < end ? row : -1;
  }
  __device__ auto tile_row(int first, int end) const {
    return [=](int m, int r) {
      const int row = first + 16 * m + 8 * r + lane / 4;
      return row < end ? row : -1;
    };
  }

  // Rows [first, end) of a tile against all centroids. Called by all warps of the block.
  __device__ __forceinline__ Answer assign_tile(int first, int end) const {
    const int clusters = args.shape.clusters, row = own_row(first, end);
    std::uint32_t a[kMTiles][2], best[kMTiles][2];
    load_codes(tile_row(first, end), a);
    const int old = initial || row < 0 ? -1 : label_of(row);
    Point mine{};
    for (int column = 0; column < clusters; column += args.columns) {
      const int columns = min(args.columns, padded_columns(clusters - column));
      if (clusters > args.columns) {  // more than fit: every round reads them again
        __syncthreads();
        stage_centroids(args, problem, column, columns, initial, stage.fragments);
        __syncthreads();
      }
      if (first >= end) continue;
      nearest_keys<kColumnStep>(stage.fragments, columns, args.key_scale, a, best);
      const Point next = decode_keys(best, columns);
      if (next.value > mine.value) mine = {next.value, column + next.label};
    }
    return {row, mine.label, old};
  }

  // A row and its own centroid.
  struct Own {
    int row;  // -1 where there is none, or it must be compared with all
    std::uint64_t code;
    int label, distance;
  };
  // Appends a row that lost similarity to the list of `listed` rows.
  __device__ __forceinline__ Own find_own(int row, int& listed) const {
    Own own{row, 0, 0, 0};
    if (row >= 0) own = {row, code_of(row), label_of(row), 0};
    const ulonglong2 centroid = stage.centroids[own.label];
    own.distance = __popcll(own.code ^ centroid.y);
    if (!__any_sync(0xffffffffu, row >= 0 && centroid.x != centroid.y)) return own;
    const bool lost = row >= 0 && __popcll(own.code ^ centroid.x) < own.distance;
    const unsigned lanes = __ballot_sync(0xffffffffu, lost);
    if (lost) {
      stage.pending[warp * kPending + listed + __popc(lanes & ((1u << lane) - 1))] = row;
      own.row = -1;
    }
    listed += __popc(lanes);
    return own;
  }

  // Rows of a tile against the `moved` centroids that moved; adds to `listed`.
  __device__ __forceinline__ Answer assign_moved(int first, int end, int moved, int& listed) const {
    std::uint32_t a[kMTiles][2], best[kMTiles][2];
    load_codes(tile_row(first, end), a);
    const Own own = find_own(own_row(first, end), listed);
    const int columns = padded_columns<kMovedStep>(moved);
    nearest_keys<kMovedStep>(stage.moved, columns, args.key_scale, a, best);
    const Point next = decode_keys(best, columns);
    const int other = next.value > 0 ? stage.numbers[next.label] : 0;
    const int more = static_cast<int>(next.value) + own.distance - 64;
    return {own.row, more > 0 || (more == 0 && other < own.label) ? other : own.label, own.label};
  }
  // The same without the tensor cores, if very few moved.
  __device__ __forceinline__ Answer assign_few(int first, int end, int moved, int& listed) const {
    const Own own = find_own(first + lane < end ? first + lane : -1, listed);
    std::uint32_t best = static_cast<std::uint32_t>(own.distance) << 16 | own.label;
#pragma unroll 2
    for (int i = 0; i < moved; ++i) {
      const std::uint32_t number = stage.numbers[i];
      const int distance = __popcll(own.code ^ stage.centroids[number].y);
      best = min(best, static_cast<std::uint32_t>(distance) << 16 | number);
    }
    return {own.row, static_cast<int>(best & 0xffffu), own.label};
  }

  // Up to 16 of the listed rows, from the end, against all centroids.
  __device__ __forceinline__ Answer assign_listed(int& listed) const {
    __syncwarp();
    const int count = min(listed, 16), columns = padded_columns(args.shape.clusters);
    const std::int32_t* list = stage.pending + warp * kPending + listed - count;
    const auto listed_row = [&](int, int r) {
      const int number = lane / 4 + 8 * r;
      return number < count ? list[number] : -1;
    };
    std::uint32_t a[1][2], best[1][2];
    load_codes(listed_row, a);
    nearest_keys<32>(stage.fragments, columns, args.key_scale, a, best);
    const Point mine = decode_keys(best, columns);
    const int row = lane % 2 == 0 ? listed_row(0, lane % 4 / 2) : -1;
    listed -= count;
    __syncwarp();
    return {row, mine.label, row >= 0 ? label_of(row) : 0};
  }

  // Rows [begin, end) of the block's range; `moved` of the centroids moved since the last pass.
  __device__ void assign(int begin, int end, int moved) const {
    const bool all = initial || 3 * moved > args.shape.clusters;
    const int rounds = (end - begin + kWarps * kTileRows - 1) / (kWarps * kTileRows);
    int listed = 0;
#pragma unroll 1
    for (int round = 0; round < rounds || listed > 0;) {
      const int first = begin + (round * kWarps + warp) * kTileRows;
      Answer answer;
      if (listed >= 16 || round == rounds) {
        answer = assign_listed(listed);
      } else {
        if (all)
          answer = assign_tile(first, end);
        else if (moved <= kFew)
          answer = assign_few(first, end, moved, listed);
        else
          answer = assign_moved(first, end, moved, listed);
        ++round;
      }
      relabel(answer);
    }
  }
};

// Writes the block's changes to global memory and clears them.
__device__ __forceinline__ void write_changes(const HammingArgs& args, const Stage& stage,
                                              std::int64_t part) {
  auto* from = reinterpret_cast<uint4*>(stage.changes);
  auto* to = reinterpret_cast<uint4*>(args.changes) + part * args.shape.clusters * 8;
#pragma unroll 4
  for (int i = threadIdx.x; i < args.shape.clusters * 8; i += kThreads) {
    to[i] = from[i];
    from[i] = make_uint4(0, 0, 0, 0);
  }
}

// One assignment pass over the block's rows; writes its changes to global memory. `moved` centroids
// differ from those of the previous pass.
template <bool kShared>
__device__ void assign_pass(const HammingArgs& args, const Problem& problem, const Stage& stage,
                            int iteration, int moved) {
  const bool vote = iteration < args.run.iterations;
  const RowAssigner<kShared> assigner{args,
                                      problem,
                                      stage,
                                      iteration == 0,
                                      vote,
                                      static_cast<int>(threadIdx.x) % 32,
                                      static_cast<int>(threadIdx.x) / 32};
  for (int segment = 0; segment < args.segments; ++segment) {
    if (segment > 0) __syncthreads();
    const int begin = min(segment * kSegmentRows, problem.rows());
    assigner.assign(begin, min(begin + kSegmentRows, problem.rows()), moved);
    if (!kShared || !vote) continue;
    __syncthreads();
    const std::int64_t part = static_cast<std::int64_t>(blockIdx.x) * args.segments + segment;
    write_changes(args, stage, part);
  }
}

// New centroids of the clusters that this block owns, a warp per cluster, by majority of the votes.
template <bool kShared>
__device__ void update_centroids(const HammingArgs& args, const Team& team, const Problem& problem,
                                 int iteration) {
  const int clusters = args.shape.clusters, lane = threadIdx.x % 32;
  const RandomStream stream{args.shape.seed, RandomUse::empty_cluster,
                            args.shape.stream(problem.number)};
  const std::uint64_t mask = (std::uint64_t{1} << args.run.bits) - 1;
  const int parts = kShared ? team.size * args.segments : 0;
  for (int c = threadIdx.x / 32 * team.size + team.rank; c < clusters; c += kWarps * team.size) {
    const std::int64_t row = static_cast<std::int64_t>(problem.number) * clusters + c;
    auto* votes = reinterpret_cast<int2*>(args.votes) + row * 32 + lane;
    const std::uint64_t before = iteration == 0 ? 0 : args.centroids[row];
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
    if (members == 0)
      code = random_u64(stream, static_cast<std::uint64_t>(iteration) * clusters + c);
    code &= mask;
    args.centroids[row] = code;
    if (iteration == 0 || members == 0 || code != before)
      args.busy[problem.number * args.run.iterations + iteration] = 1;
  }
}

template <bool kShared>
__device__ void cluster_codes(const HammingArgs& args, Team& team, const Problem& problem,
                              const Stage& stage) {
  const int clusters = args.shape.clusters;
  if (kShared) {
    for (int i = threadIdx.x; i < clusters * 8; i += kThreads)
      reinterpret_cast<uint4*>(stage.changes)[i] = make_uint4(0, 0, 0, 0);
  } else {
    const std::int64_t first = static_cast<std::int64_t>(problem.number) * clusters * 64;
    for (int i = team.rank * kThreads + threadIdx.x; i < clusters * 64; i += team.size * kThreads)
      args.votes[first + i] = 0;
    team.sync();
  }
  for (int iteration = 0; iteration <= args.run.iterations; ++iteration) {
    // With the same centroids this pass would repeat the previous one.
    const int busy =
        iteration == 0 || args.busy[problem.number * args.run.iterations + iteration - 1];
    int moved = clusters;
    if (clusters <= args.columns) moved = stage_all(args, problem, iteration == 0, stage);
    if (!busy) break;
    __syncthreads();
    assign_pass<kShared>(args, problem, stage, iteration, moved);
    if (iteration == args.run.iterations) break;
    team.sync();
    update_centroids<kShared>(args, team, problem, iteration);
    team.sync();
  }
}

template <bool kShared>
__global__ void __launch_bounds__(kThreads, 1) hamming_kmeans_kernel(HammingArgs args) {
  await_previous();
  extern __shared__ uint4 shared[];
  const Stage stage(shared, args, kShared);
  group_problems(args.shape, args.teams, args.run.out, args.histograms,
                 reinterpret_cast<std::int32_t*>(shared), args.shared_words,
                 [&](Team& team, const TeamProblem& own) {
                   const RowRange& range = own.range;
                   const Problem problem{own.number,
                                         own.span.length,
                                         args.run.codes + own.start,
                                         range,
                                         args.run.codes + own.start + range.begin,
                                         args.run.out.labels + own.start + range.begin};
                   if (own.span.length <= args.shape.clusters) {
                     for (int i = threadIdx.x; i < problem.rows(); i += kThreads)
                       problem.labels[i] = range.begin + i;
                     return;
                   }
                   for (int i = threadIdx.x; stage.held && i < problem.rows(); i += kThreads)
                     stage.codes[i] = problem.codes[i];
                   cluster_codes<kShared>(args, team, problem, stage);
                   __syncthreads();
                   for (int i = threadIdx.x; stage.held && i < problem.rows(); i += kThreads)
                     problem.labels[i] = stage.labels[i];
                 });
}

template <bool kShared>
void launch(HammingArgs args, cudaStream_t stream) {
  const std::size_t sort = group_shared_bytes(args.shape.clusters, kWarps);  // in the same memory
  std::size_t bytes =
      (max(sort, Stage::bytes(args.columns, args.shape.clusters, kShared)) + 15) / 16 * 16;
  args.shared_words = static_cast<int>(bytes / sizeof(std::int32_t));
  const std::size_t rows = static_cast<std::size_t>(args.rows) * kRowBytes;
  if (bytes + rows <= room()) {
    args.held_rows = args.rows;
    bytes += rows;
  }
  launch_cooperative_early(hamming_kmeans_kernel<kShared>, args.teams.blocks(), kThreads, bytes,
                           stream, args);
}

}  // namespace

HammingPlan::HammingPlan(Arena& arena, const ClusterShape& of, int iterations)
    : shape(of),
      teams(make_teams(of.problems(), of.rows, multiprocessors(), nullptr)),
      rows(((of.rows + teams.size - 1) / teams.size + 63) / 64 * 64),
      segments((rows + kSegmentRows - 1) / kSegmentRows),
      columns(min(most_columns(), padded_columns(of.clusters))),
      votes_shared(Stage::bytes(columns, of.clusters, true) <= room()) {
  const std::int64_t problems = shape.problems(), clusters = shape.clusters,
                     blocks = teams.blocks();
  centroids = arena.take<std::uint64_t>(problems * clusters);
  votes = arena.take<std::int32_t>(problems * clusters * 64);
  if (votes_shared) changes = arena.take<std::uint32_t>(blocks * segments * clusters * 32);
  histograms = arena.take<std::int32_t>(2 * blocks * clusters);
  zeroed.count = teams.count + problems * iterations;
  zeroed.data = teams.arrivals = arena.take<unsigned>(zeroed.count);
}

void hamming_kmeans(const HammingPlan& plan, const HammingRun& run, cudaStream_t stream) {
  const HammingArgs args{plan, run, reinterpret_cast<int*>(plan.zeroed.data + plan.teams.count),
                         0,    0,   512};
  if (plan.votes_shared)
    launch<true>(args, stream);
  else
    launch<false>(args, stream);
}

}  // namespace coterie::cuda
