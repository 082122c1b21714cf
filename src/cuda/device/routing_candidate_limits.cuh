// SPDX-License-Identifier: MIT
// Thresholds of routing_candidates_sm90a.cu from a sample of the rows.
#pragma once

#include "cuda/device/routing_candidate_rows.cuh"

namespace coterie::cuda {

// Two half-precision numbers at a time.
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

// The largest scores of parts of the sample, in half precision: thresholds need no more.
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
  const int each = 8 / args.warp_cells;  // rows l / 4 of a cell
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

// Of the parts of the sample those whose largest score is not below a threshold, if it leaves the
// wanted rows. Cells beyond the first kSampleParts add to those.
__device__ __forceinline__ int wanted_parts(const CandidateArgs& args,
                                            const CandidateProblem& problem, int sampled) {
  const auto parts = static_cast<float>(min(kSampleParts, args.cells()));
  // Rows that come twice count twice: they are in different cells.
  const int at_once = args.teams.size * kCandidateGroups * kTokenTile;
  sampled = (sampled + at_once - 1) / at_once * at_once;
  const float missed = log1pf(-kCandidateAim * static_cast<float>(problem.side.width) /
                              static_cast<float>(problem.length));
  return max(1,
             static_cast<int>(parts * (1.0f - expf(missed * static_cast<float>(sampled) / parts))));
}

// Thresholds of the team's centroids, four at a time: keys that as many of the parts' maxima as
// wanted are not below. limits: the negative ones of two neighbours, twice.
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

}  // namespace coterie::cuda
