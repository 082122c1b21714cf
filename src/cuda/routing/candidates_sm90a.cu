// SPDX-License-Identifier: MIT
// Candidates for routing's members: rows whose rounded score is not below a threshold of the
// centroid, which about kCandidateAim times the wanted number of rows reach; choose.cu makes the
// selection exact. The statistics of the rows are computed along the way.
//
// Grid and block: cooperative, one block of four warpgroups per multiprocessor. A team of up to 16
// blocks takes 256 centroids of a head, which are kept in shared memory. A warpgroup loads 64 rows
// from global memory into registers and takes 64 centroids at a time. Both are f16: normalised rows
// are at most sqrt(Dk) long, so their elements fit, and scores are eight times as accurate as with
// bf16 factors.
//   sample   the largest score of each part of the sample is kept; the one that about as many rows
//            as wanted reach becomes the centroid's threshold; one team barrier
//   hits     all rows; scores that reach the threshold go through a queue per warp to the lists
// Shared memory: CandidateMemory, 128 KB (160 KB for Dk = 128): centroids, queues, limits, counts.
// __launch_bounds__(512, 1): 128 registers.
// Preconditions: candidates_pay (Hopper, bf16, long sequences that are not packed) and aligned
// rows; otherwise the lists stay empty or are absent and top.cu selects.
#include <cstdint>

#include "cuda/launch/device.h"
#include "cuda/launch/dispatch.h"
#include "cuda/launch/launch.h"
#include "cuda/prim/dependent.cuh"
#include "cuda/prim/load.cuh"
#include "cuda/prim/team.cuh"
#include "cuda/prim/tile.cuh"
#include "cuda/prim/warp.cuh"
#include "cuda/prim/wgmma.cuh"
#include "cuda/routing/row_statistics.cuh"
#include "cuda/routing/stages.h"
#include "cuda/routing/top.cuh"

namespace coterie::cuda {

namespace {

// Multiples of the wanted rows: the target number of candidates, and the least sequence length.
constexpr float kCandidateAim = 2.25f;
constexpr int kLeastCandidateRows = 16;
constexpr int kSampled = 32;  // one in width / kSampled rows is sampled

constexpr int kCandidateGroups = 4, kCandidateThreads = kCandidateGroups * kWarpgroup,
              kCandidateWarps = kCandidateThreads / 32;
constexpr int kTokenTile = 64;                       // rows per warpgroup
constexpr int kTeamColumns = 256, kColumnStep = 64;  // centroids of a team, and at a time
constexpr int kSampleParts = 128;                    // parts of the sample, if there are enough

using CandidateElement = Bf16;

using CandidateSide = TopRows<CandidateElement>;

struct CandidateArgs {
  CandidateSide sides[2];
  CentredCentroids centroids;
  ZeroedWords zeroed;
  Teams teams;
  int passes;             // over the rows, for kTeamColumns centroids each
  int warp_cells;         // parts of the sample per warp: 1, 2, 4 or 8
  std::uint32_t* maxima;  // (problems, passes, cells, kTeamColumns / 2): two centroids each
  unsigned zero;          // 0, unknown to the compiler: see RowFragments

  __host__ __device__ int cells() const { return teams.size * kCandidateWarps * warp_cells; }
};

// One head of a batch entry, and kTeamColumns of its centroids.
struct CandidateProblem {
  const CandidateSide& side;
  int number, head, length, column;
  Rows<const CandidateElement> rows;
  RowStatistics* stats;
  std::int64_t list;  // of the first centroid

  __device__ CandidateProblem(const CandidateArgs& args, int of_all)
      : side(args.sides[of_all / args.passes >= args.sides[0].shape.problems()]),
        number(of_all),
        column(of_all % args.passes * kTeamColumns) {
    const int all = of_all / args.passes;
    const int problem =
        all - (all >= args.sides[0].shape.problems() ? args.sides[0].shape.problems() : 0);
    const int batch = problem / side.shape.heads;
    head = problem % side.shape.heads;
    length = uniform_trips(side.shape.q.span(batch).length);
    rows = side.x.rows(batch, head, 0);
    stats = side.stats + static_cast<std::int64_t>(problem) * side.shape.q.rows;
    list = static_cast<std::int64_t>(problem) * args.centroids.clusters + column;
  }
};

// One of every `step` rows is sampled, at aperiodic places.
struct Sample {
  int step, rows;

  __device__ explicit Sample(const CandidateProblem& problem) {
    step = problem.side.width / kSampled;
    rows = problem.length < kLeastCandidateRows * problem.side.width ? 0 : problem.length / step;
  }
  // Each round gives cell `cell` one of `cells` neighbours, in changing order: neighbours are often
  // alike, and cells should not be. Some rows occur twice in the last round.
  __device__ int row(int round, int cell, int cells) const {
    const auto count = static_cast<unsigned>(cells);
    const unsigned turned = (static_cast<unsigned>(cell) + mixed(round) % count) % count;
    const int number = static_cast<int>((static_cast<unsigned>(round) * count + turned) %
                                        static_cast<unsigned>(rows));
    return number * step + static_cast<int>(mixed(number) % static_cast<unsigned>(step));
  }

 private:
  __device__ static unsigned mixed(int number) {
    return static_cast<unsigned>(number) * 2654435761u >> 16;
  }
};

// The tiles of a warpgroup of the team: group, group + groups, ...
struct OwnTiles {
  int group, groups;

  __device__ explicit OwnTiles(const Team& team)
      : group(team.rank * kCandidateGroups +
              uniform_trips(static_cast<int>(threadIdx.x) / kWarpgroup)),
        groups(team.size * kCandidateGroups) {}
};

constexpr int kTableBand = kTeamColumns * 128;  // bytes of 64 depths of all centroids

// Stages the team's centroids, scaled, in shared memory; depths in the order of RowFragments.
template <int kChunks>
__device__ __forceinline__ void stage_centroids(const CentredCentroids& centroids, int head,
                                                int first, std::uint32_t table) {
  for (int i = threadIdx.x; i < kTeamColumns * kChunks; i += kCandidateThreads) {
    const int column = i / kChunks, chunk = i % kChunks;
    const auto* from = reinterpret_cast<const float4*>(
        centroids.rows +
        (static_cast<std::int64_t>(head) * centroids.clusters + first + column) * centroids.pitch +
        32 * chunk);
    float value[32], most = 0.0f;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      float4 m = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      if (first + column < centroids.clusters) m = from[j];
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        value[4 * j + k] = (&m.x)[k];
        most = fmaxf(most, fabsf((&m.x)[k]));
      }
    }
#pragma unroll
    for (int step = 1; step < kChunks; step *= 2)
      most = fmaxf(most, __shfl_xor_sync(~0u, most, step));
    const float scale = centroid_scale(most);
    const Tile<F16, 64> band{table + chunk / 2 * kTableBand};
#pragma unroll
    for (int pair = 0; pair < 4; ++pair) {
      uint4 words;
#pragma unroll
      for (int k = 0; k < 4; ++k)
        (&words.x)[k] =
            pack2<F16>(value[8 * k + 2 * pair] * scale, value[8 * k + 2 * pair + 1] * scale);
      store_shared16(band.chunk(column, chunk % 2 * 4 + pair), words);
    }
  }
  fence_async_proxy();
}

// A warp's 16 rows of a tile: in flight, and then as left factors.
template <int kChunks>
struct TokenRows {
  RowWords<CandidateElement, kChunks> words[2];
  RowFragments<F16, kChunks, 1> rows;

  // row_of(i), i < 16, is a row, or negative. Rows are aligned.
  template <class RowOf>
  __device__ __forceinline__ void load(const Rows<const CandidateElement>& from,
                                       const RowOf& row_of) {
#pragma unroll
    for (int side = 0; side < 2; ++side) {
      const int row = row_of(8 * side + static_cast<int>(threadIdx.x) % 32 / 4);
      words[side].template load<true>(from, row, row >= 0);
    }
  }

  // Calls put(side, statistics).
  template <class Put>
  __device__ __forceinline__ void normalise(int width, unsigned zero, const Put& put) {
#pragma unroll
    for (int side = 0; side < 2; ++side) {
      float x[8 * kChunks];
      unpack(words[side], x);
      const RowStatistics own = statistics_of<kChunks>(x, width);
      const float shift = -own.mean * own.inverse;
      RowWords<F16, kChunks> y;
#pragma unroll
      for (int i = 0; i < 4 * kChunks; ++i)
        (&y.word[i / 4].x)[i % 4] =
            pack2<F16>(fmaf(x[2 * i], own.inverse, shift), fmaf(x[2 * i + 1], own.inverse, shift));
      rows.set(side, y, zero);
      put(side, own);
    }
  }

  // Starts the scores of kColumnStep centroids; kAdd 1: they are added to d.
  template <int kAdd>
  __device__ __forceinline__ void start(std::uint64_t table, float (&d)[32]) const {
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < 2 * kChunks; ++step) {
      const std::uint64_t b = descriptor_behind(table, step / 4 * kTableBand + step % 4 * 32);
      wgmma_step<F16, 0>(kAdd + step, d, rows.a[0][step], b);
    }
    wgmma_commit();
  }
  __device__ static __forceinline__ void finish(float (&d)[32]) {
    wgmma_wait<0>();
    wgmma_settle(d);
  }
};

// Maximum of two half-precision numbers at a time.
__device__ __forceinline__ std::uint32_t max_halves(std::uint32_t a, std::uint32_t b) {
  std::uint32_t most;
  asm("max.f16x2 %0, %1, %2;" : "=r"(most) : "r"(a), "r"(b));
  return most;
}
constexpr std::uint32_t kLeastHalves = 0xfc00fc00u;  // -infinity

// Unsigned integers in the order of half-precision numbers, and back.
__device__ __forceinline__ std::uint32_t ordered_half(std::uint32_t bits) {
  return bits & 0x8000u ? ~bits & 0xffffu : bits | 0x8000u;
}
__device__ __forceinline__ float from_ordered_half(std::uint32_t value) {
  const std::uint32_t bits = value & 0x8000u ? value & 0x7fffu : ~value & 0xffffu;
  return to_float(F16{static_cast<unsigned short>(bits)});
}

// The largest scores of parts of the sample, in half precision, which is enough for thresholds.
template <int kChunks>
__device__ __forceinline__ void find_maxima(const CandidateArgs& args,
                                            const CandidateProblem& problem, const Sample& sample,
                                            const Team& team, std::uint64_t table, int steps) {
  constexpr int kMost = kTeamColumns / kColumnStep;
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const OwnTiles own(team);
  std::uint32_t most[kMost][8];  // of neighbouring centroids
#pragma unroll
  for (int c = 0; c < kMost; ++c)
#pragma unroll
    for (int i = 0; i < 8; ++i) most[c][i] = kLeastHalves;
  const int each = 8 / args.warp_cells;  // rows l / 4 per cell
  const int first_cell = (team.rank * kCandidateWarps + warp) * args.warp_cells;
  const int tiles = (sample.rows + own.groups * kTokenTile - 1) / (own.groups * kTokenTile);
  TokenRows<kChunks> tokens;
  const auto load = [&](int tile) {
    tokens.load(problem.rows, [&](int i) {
      const int round = (tile * 2 + i / 8) * each + i % each;
      return tile < tiles ? sample.row(round, first_cell + i % 8 / each, args.cells()) : -1;
    });
  };
  load(0);
#pragma unroll 1
  for (int tile = 0; tile < tiles; ++tile) {
    tokens.normalise(problem.rows.width, args.zero, [](int, const RowStatistics&) {});
    load(tile + 1);
#pragma unroll
    for (int c = 0; c < kMost; ++c) {
      if (c >= steps) break;
      float d[32];
      tokens.template start<0>(descriptor_behind(table, c * kColumnStep * 128), d);
      tokens.finish(d);
#pragma unroll
      for (int i = 0; i < 8; ++i)
        most[c][i] = max_halves(most[c][i], pack2<F16>(fmaxf(d[4 * i], d[4 * i + 2]),
                                                       fmaxf(d[4 * i + 1], d[4 * i + 3])));
    }
  }
  for (int step = 4; step < 32 / args.warp_cells; step *= 2)
#pragma unroll
    for (int c = 0; c < kMost; ++c)
#pragma unroll
      for (int i = 0; i < 8; ++i)
        most[c][i] = max_halves(most[c][i], __shfl_xor_sync(~0u, most[c][i], step));
  if (lane / 4 % each != 0) return;
  const int cell = first_cell + lane / 4 / each;
  std::uint32_t* to =
      args.maxima +
      (static_cast<std::int64_t>(problem.number) * args.cells() + cell) * (kTeamColumns / 2) +
      lane % 4;
#pragma unroll
  for (int c = 0; c < kMost; ++c)
#pragma unroll
    for (int i = 0; i < 8; ++i)
      if (c < steps) to[c * (kColumnStep / 2) + i * 4] = most[c][i];
}

// The number of parts of the sample whose largest score reaches a threshold that leaves the wanted
// rows. Cells beyond the first kSampleParts are merged into those.
__device__ __forceinline__ int wanted_parts(const CandidateArgs& args,
                                            const CandidateProblem& problem, int sampled) {
  const auto parts = static_cast<float>(min(kSampleParts, args.cells()));
  // Rows that occur twice count twice: they are in different cells.
  const int at_once = args.teams.size * kCandidateGroups * kTokenTile;
  sampled = (sampled + at_once - 1) / at_once * at_once;
  const float missed = log1pf(-kCandidateAim * static_cast<float>(problem.side.width) /
                              static_cast<float>(problem.length));
  return max(1,
             static_cast<int>(parts * (1.0f - expf(missed * static_cast<float>(sampled) / parts))));
}

// Thresholds of the team's centroids, four at a time: the keys that the wanted number of the parts'
// maxima reach. limits: the negated ones of two neighbours, twice.
__device__ __forceinline__ void find_limits(const CandidateArgs& args,
                                            const CandidateProblem& problem, int sampled,
                                            int columns, float* limits) {
  constexpr int kAtOnce = 4, kEach = kSampleParts / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32, cells = args.cells();
  const int rank = sampled > 0 ? wanted_parts(args, problem, sampled) : 0;
  const std::uint32_t* maxima =
      args.maxima + static_cast<std::int64_t>(problem.number) * cells * (kTeamColumns / 2);
#pragma unroll 1
  for (int first = static_cast<int>(threadIdx.x) / 32 * kAtOnce; first < columns;
       first += kCandidateWarps * kAtOnce) {
    std::uint32_t key[kAtOnce][kEach] = {}, found[kAtOnce] = {};
    for (int base = 0; base < (sampled > 0 ? cells : 0); base += kSampleParts) {
      uint2 most[kEach];
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        const int cell = base + 32 * i + lane;
        most[i] = make_uint2(kLeastHalves, kLeastHalves);
        if (cell < cells)
          most[i] = __ldcg(reinterpret_cast<const uint2*>(
              maxima + static_cast<std::int64_t>(cell) * (kTeamColumns / 2) + first / 2));
      }
#pragma unroll
      for (int i = 0; i < kEach; ++i)
#pragma unroll
        for (int c = 0; c < kAtOnce; ++c)
          key[c][i] =
              max(key[c][i], ordered_half((c / 2 ? most[i].y : most[i].x) >> c % 2 * 16 & 0xffffu));
    }
#pragma unroll 1
    for (int bit = 15; bit >= 0; --bit)
#pragma unroll
      for (int c = 0; c < kAtOnce; ++c) {
        const std::uint32_t probe = found[c] | 1u << bit;
        int count = 0;
#pragma unroll
        for (int i = 0; i < kEach; ++i) count += key[c][i] >= probe;
        if (__reduce_add_sync(~0u, count) >= rank) found[c] = probe;
      }
    if (lane < kAtOnce) {
      const std::uint32_t own =
          lane & 2 ? (lane & 1 ? found[3] : found[2]) : (lane & 1 ? found[1] : found[0]);
      const bool there = sampled > 0 && problem.column + first + lane < args.centroids.clusters;
      const float limit = there ? -from_ordered_half(own) : -INFINITY;
      float* to = limits + (first + lane) / 2 * 4 + lane % 2;
      to[0] = to[2] = limit;
    }
  }
}

// Hits of a warp: scores of 16 tokens and 64 centroids that reach the centroids' limits, to be
// added to the lists. Products start with the negated limits, so a hit has no sign bit. Four scores
// of a lane, of two tokens and two neighbouring centroids, are tested together; groups of four with
// hits go to a queue of the warp, from which each lane takes one when there are 32. Hits are
// uneven: some tokens have many.

// Destination of the hits of a block, in shared memory.
struct HitTarget {
  uint2* entries;              // of the block's first centroid
  int stride, capacity, rows;  // stride: between the centroids' entries
};

struct CandidateHits {
  static constexpr int kFours = 8;                // per lane and step
  static constexpr int kRoom = 32 * kFours + 32;  // groups of four in the queue
  static constexpr int kWarpBytes = kRoom * (16 + 4);
  static constexpr int kColumnBits = 8;  // of a group's name; the other bits are the row

  // Addresses in shared memory: the queue, the negated limits of all centroids (two neighbours,
  // twice), and their counts.
  std::uint32_t queue, limits, counts;
  std::uint32_t before;  // mask of lower lanes
  int count = 0;         // in the queue

  __device__ CandidateHits(std::uint32_t memory, std::uint32_t all_limits, std::uint32_t all_counts)
      : queue(memory),
        limits(all_limits),
        counts(all_counts),
        before((1u << threadIdx.x % 32) - 1) {}

  // Loads the values that products with centroids from `column` on are added to.
  __device__ __forceinline__ void begin(float (&d)[4 * kFours], int column) const {
    const std::uint32_t at = limits + 8 * column + static_cast<int>(threadIdx.x) % 4 * 16;
#pragma unroll
    for (int i = 0; i < kFours; ++i)
      asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                   : "=f"(d[4 * i]), "=f"(d[4 * i + 1]), "=f"(d[4 * i + 2]), "=f"(d[4 * i + 3])
                   : "r"(at + i * 64));
  }

  // Appends hits to the queue, which has fewer than 32 entries: rows from `first` on, which is the
  // warp's first, centroids from `column` on.
  __device__ __forceinline__ void push(const float (&d)[4 * kFours], int first, int column) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const std::uint32_t name = (first + lane / 4) << kColumnBits | (column + lane % 4 * 2);
#pragma unroll
    for (int i = 0; i < kFours; ++i)
      asm volatile(
          "{.reg .pred p, q;\n.reg .b32 t, u, votes;\n"
          "setp.ne.b32 q, 0, 0;\n"
          "lop3.b32 t, %1, %2, %3, 0x80;\n"
          "lop3.or.b32 t|p, t, %4, 0x80000000, 0x80, q;\n"  // no hit
          "vote.sync.ballot.b32 votes, !p, 0xffffffff;\n"
          "and.b32 t, votes, %7;\n"
          "popc.b32 t, t;\n"
          "add.s32 t, t, %0;\n"
          "mad.lo.u32 u, t, 16, %5;\n"
          "@!p st.shared.v4.b32 [u], {%1, %2, %3, %4};\n"
          "mad.lo.u32 u, t, 4, %5;\n"
          "@!p st.shared.b32 [u + %8], %6;\n"
          "popc.b32 t, votes;\n"
          "add.s32 %0, %0, t;}"
          : "+r"(count)
          : "r"(__float_as_uint(d[4 * i])), "r"(__float_as_uint(d[4 * i + 1])),
            "r"(__float_as_uint(d[4 * i + 2])), "r"(__float_as_uint(d[4 * i + 3])), "r"(queue),
            "r"(name + 8 * i), "r"(before), "n"(kRoom * 16)
          : "memory");
  }

  // Moves the last 32 groups of the queue, or all, to the lists.
  __device__ __forceinline__ void flush(const HitTarget& target) {
    const volatile HitTarget& to = target;
    __syncwarp();
    const int place = count - 1 - static_cast<int>(threadIdx.x) % 32;
    if (place >= 0) {
      float above[4];
      std::uint32_t name;
      asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                   : "=f"(above[0]), "=f"(above[1]), "=f"(above[2]), "=f"(above[3])
                   : "r"(queue + 16 * place));
      asm volatile("ld.shared.b32 %0, [%1];" : "=r"(name) : "r"(queue + 4 * place + kRoom * 16));
      const int capacity = to.capacity, rows = to.rows, stride = to.stride;
      const auto row = static_cast<int>(name >> kColumnBits);
      const auto column = static_cast<int>(name & ((1 << kColumnBits) - 1));
      int at[4] = {capacity, capacity, capacity, capacity};
#pragma unroll
      for (int e = 0; e < 4; ++e)
        asm volatile(
            "{.reg .pred p;\n"
            "setp.lt.s32 p, %2, %3;\n"
            "setp.ge.and.f32 p, %1, 0f00000000, p;\n"
            "@p atom.shared.add.u32 %0, [%4], 1;}"
            : "+r"(at[e])
            : "f"(above[e]), "r"(row + e / 2 * 8), "r"(rows), "r"(counts + 4 * column + e % 2 * 4)
            : "memory");
      uint2* entries = to.entries;
#pragma unroll
      for (int e = 0; e < 4; ++e)
        if (at[e] < capacity)
          entries[(column + e % 2) * stride + at[e]] =
              make_uint2(__float_as_uint(above[e]), row + e / 2 * 8);
    }
    __syncwarp();
    count = max(count - 32, 0);
  }
};

constexpr int kCandidateRoom = 4;  // space for candidates, as a multiple of the wanted rows
constexpr int kPartRoom = 32;      // additional space if blocks share a list
constexpr int kLeastWidth = 32, kMostWidth = 1024;
constexpr int kMostRows = 1 << (32 - CandidateHits::kColumnBits);
constexpr int kMostTeam = 16;

// All rows against the team's centroids.
template <int kChunks>
__device__ __forceinline__ void find_hits(const CandidateArgs& args,
                                          const CandidateProblem& problem, const Team& team,
                                          std::uint64_t table, int steps, CandidateHits hits,
                                          const HitTarget& target) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int place = static_cast<int>(threadIdx.x) % kWarpgroup / 32 * 16;
  const OwnTiles own(team);
  const int tiles = (problem.length + kTokenTile - 1) / kTokenTile;
  TokenRows<kChunks> tokens;
  const auto load = [&](int tile) {
    tokens.load(problem.rows, [&](int i) {
      const int row = tile * kTokenTile + place + i;
      return row < problem.length ? row : -1;
    });
  };
  load(own.group);
#pragma unroll 1
  for (int tile = own.group; tile < tiles; tile += own.groups) {
    const int row = tile * kTokenTile + place;
    tokens.normalise(problem.rows.width, args.zero, [&](int side, const RowStatistics& stats) {
      const int at = row + 8 * side + lane / 4;
      if (lane % 4 == 0 && at < problem.length && problem.column == 0)
        reinterpret_cast<float2*>(problem.stats)[at] = make_float2(stats.mean, stats.inverse);
    });
    load(tile + own.groups);
#pragma unroll 1
    for (int c = 0; c < steps; ++c) {
      float d[32];
      hits.begin(d, c * kColumnStep);
      tokens.template start<1>(descriptor_behind(table, c * kColumnStep * 128), d);
      while (hits.count >= 32) hits.flush(target);  // while the products run
      tokens.finish(d);
      hits.push(d, row, c * kColumnStep);
    }
  }
  while (hits.count > 0) hits.flush(target);
}

template <int kChunks>
struct CandidateMemory {
  static constexpr int kHits = kTeamColumns * kChunks * 64;
  static constexpr int kLimits = kHits + kCandidateWarps * CandidateHits::kWarpBytes;
  static constexpr int kCounts = kLimits + kTeamColumns * 8;
  static constexpr int kTarget = kCounts + kTeamColumns * 4;
  static constexpr int kBytes = kTarget + static_cast<int>(sizeof(HitTarget));
};

// Teams work on the problems of both sides.
template <int kChunks>
__global__ void __launch_bounds__(kCandidateThreads, 1)
    candidates_kernel(const __grid_constant__ CandidateArgs args) {
  await_previous();
  using Memory = CandidateMemory<kChunks>;
  extern __shared__ __align__(1024) unsigned char memory[];
  const std::uint32_t base = shared_address(memory);
  auto* limits = reinterpret_cast<float*>(memory + Memory::kLimits);
  auto* counts = reinterpret_cast<int*>(memory + Memory::kCounts);
  auto& target = *reinterpret_cast<HitTarget*>(memory + Memory::kTarget);
  const int thread = static_cast<int>(threadIdx.x);
  const std::uint64_t table = matrix_descriptor(uniform(static_cast<int>(base)));
  Team team(args.teams);
  args.zeroed.zero();
  const int problems =
      (args.sides[0].shape.problems() + args.sides[1].shape.problems()) * args.passes;
#pragma unroll 1
  for (int number = team.number; number < problems; number += args.teams.count) {
    const CandidateProblem problem(args, number);
    const Sample sample(problem);
    const CandidateLists& lists = problem.side.candidates;
    const int columns = min(kTeamColumns, args.centroids.clusters - problem.column);
    const int steps = (columns + kColumnStep - 1) / kColumnStep;
    stage_centroids<kChunks>(args.centroids, problem.head / problem.side.shape.group,
                             problem.column, base);
    if (thread < kTeamColumns) counts[thread] = 0;
    if (thread == 0)
      target = {lists.entries + (problem.list * lists.parts + team.rank) * lists.capacity,
                lists.parts * lists.capacity, lists.capacity, problem.length};
    __syncthreads();
    find_maxima<kChunks>(args, problem, sample, team, table, steps);
    team.sync();
    find_limits(args, problem, sample.rows, steps * kColumnStep, limits);
    __syncthreads();
    const CandidateHits hits(base + Memory::kHits + thread / 32 * CandidateHits::kWarpBytes,
                             base + Memory::kLimits, base + Memory::kCounts);
    find_hits<kChunks>(args, problem, team, table, steps, hits, target);
    if (problem.column == 0)
      for (int row = problem.length + team.rank * kCandidateThreads + thread;
           row < problem.side.shape.q.rows; row += team.size * kCandidateThreads)
        problem.stats[row] = {0.0f, 0.0f};
    __syncthreads();
    if (thread < columns)
      lists.count[(problem.list + thread) * lists.parts + team.rank] = counts[thread];
  }
}

// Number of parts of all lists.
std::int64_t list_count(const CandidateRun& run) {
  return static_cast<std::int64_t>(run.side.shape.problems()) * run.side.shape.clusters *
         run.lists.parts;
}

void take_lists(CandidateRun& run, int parts, Arena& arena) {
  run.lists.parts = parts;
  run.lists.capacity = kCandidateRoom * run.side.width / parts + (parts > 1 ? kPartRoom : 0);
  run.lists.count = arena.take<std::int32_t>(list_count(run));
  run.lists.entries = arena.take<uint2>(list_count(run) * run.lists.capacity);
}

// Unaligned rows get no candidates.
void leave_open(const AttentionCall& call, const CandidateRun& queries, const CandidateRun& keys,
                const ZeroedWords& zeroed, cudaStream_t stream) {
  COTERIE_CUDA(cudaMemsetAsync(zeroed.data, 0, zeroed.count * sizeof(unsigned), stream));
  for (const CandidateRun* run : {&queries, &keys})
    if (run->wanted)
      COTERIE_CUDA(
          cudaMemsetAsync(run->lists.count, 0, list_count(*run) * sizeof(std::int32_t), stream));
  row_statistics(call, queries.side, keys.side.width > 0 ? &keys.side : nullptr, stream);
}

}  // namespace

bool candidates_pay(const RoutingSide& side) {
  const int width = side.width;
  // Memory for the lists must not depend on addresses: find_candidates checks alignment.
  return side.rows.size(3) % 8 == 0 && side.rows.dtype == DType::bf16 && !side.shape.q.cu_seqlens &&
         width >= kLeastWidth && width <= kMostWidth &&
         side.shape.rows >= kLeastCandidateRows * width && side.shape.rows < kMostRows &&
         on_hopper();
}

void find_candidates(const AttentionCall& call, const CentredCentroids& centroids,
                     CandidateRun& queries, CandidateRun& keys, const ZeroedWords& zeroed,
                     unsigned* arrivals, Arena& arena, cudaStream_t stream) {
  CandidateArgs args{};
  args.centroids = centroids;
  args.zeroed = zeroed;
  args.passes = (centroids.clusters + kTeamColumns - 1) / kTeamColumns;
  int problems = 0;
  for (const CandidateRun* run : {&queries, &keys})
    if (run->wanted) problems += run->side.shape.problems();
  const auto rows = static_cast<int>(max(call.N, call.S));
  args.teams = make_teams(problems, rows, multiprocessors(), arrivals);
  args.teams.size = min(args.teams.size, kMostTeam);
  args.warp_cells = 8;
  while (args.warp_cells > 1 && args.cells() > kSampleParts) args.warp_cells /= 2;
  for (CandidateRun* run : {&queries, &keys})
    if (run->wanted) take_lists(*run, args.teams.size, arena);
  args.sides[0] = top_rows<CandidateElement>(queries.wanted ? queries : keys);
  if (queries.wanted && keys.wanted) args.sides[1] = top_rows<CandidateElement>(keys);
  args.maxima = arena.take<std::uint32_t>(static_cast<std::int64_t>(problems) * args.passes *
                                          args.cells() * (kTeamColumns / 2));
  if (arena.counting() || problems == 0) return;
  if (!args.sides[0].x.aligned || (args.sides[1].shape.problems() && !args.sides[1].x.aligned)) {
    leave_open(call, queries, keys, zeroed, stream);
    return;
  }
  dispatch_head_dim(call.op, call.Dk, [&](auto width) {
    constexpr int kChunks = decltype(width)::value / 32;
    launch_cooperative_early(candidates_kernel<kChunks>, args.teams.blocks(), kCandidateThreads,
                             CandidateMemory<kChunks>::kBytes, stream, args);
  });
}

}  // namespace coterie::cuda
