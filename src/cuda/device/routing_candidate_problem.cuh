// SPDX-License-Identifier: MIT
// What the blocks of routing_candidates_sm90a.cu work on.
#pragma once

#include <cstdint>

#include "cuda/device/cleared.cuh"
#include "cuda/device/team.cuh"
#include "cuda/device/warp.cuh"
#include "cuda/device/wgmma.cuh"
#include "cuda/routing.h"

namespace coterie::cuda {

// Times the wanted rows: candidates that thresholds should leave, and the least rows of a sequence.
constexpr float kCandidateAim = 2.25f;
constexpr int kLeastCandidateRows = 16;
constexpr int kSampled = 32;  // in width / kSampled rows one is in the sample

constexpr int kCandidateGroups = 4, kCandidateThreads = kCandidateGroups * kWarpgroup,
              kCandidateWarps = kCandidateThreads / 32;
constexpr int kTokenTile = 64;                       // rows of a warpgroup
constexpr int kTeamColumns = 256, kColumnStep = 64;  // centroids of a team, and at a time
constexpr int kSampleParts = 128;                    // parts of the sample, where there are enough

using CandidateElement = Bf16;

struct CandidateSide {
  Tensor4<const CandidateElement> x;
  SequenceSpans spans;
  int heads, group, problems;
  RowStatistics* stats;
  int width;  // of the members
  CandidateLists lists;
};

struct CandidateArgs {
  CandidateSide sides[2];
  CentredCentroids centroids;
  ZeroedWords zeroed;
  ClearedSpan cleared;  // a part for every tile of all rows
  Teams teams;
  int passes;             // over the rows, for kTeamColumns centroids each
  int warp_cells;         // parts of the sample that a warp tells apart: 1, 2, 4 or 8
  std::uint32_t* maxima;  // (problems, passes, cells, kTeamColumns / 2): of two centroids each
  unsigned zero;          // 0, unknown to the compiler: see RowFragments

  __host__ __device__ int cells() const { return teams.size * kCandidateWarps * warp_cells; }
};

// One head of a batch entry, and kTeamColumns of its centroids.
struct CandidateProblem {
  const CandidateSide& side;
  int number, head, length, column;
  Rows<const CandidateElement> rows;
  RowStatistics* stats;
  std::int64_t list;  // of the first one of the centroids

  __device__ CandidateProblem(const CandidateArgs& args, int of_all)
      : side(args.sides[of_all / args.passes >= args.sides[0].problems]),
        number(of_all),
        column(of_all % args.passes * kTeamColumns) {
    const int all = of_all / args.passes;
    const int problem = all - (all >= args.sides[0].problems ? args.sides[0].problems : 0);
    const int batch = problem / side.heads;
    head = problem % side.heads;
    length = uniform_trips(side.spans.span(batch).length);
    rows = side.x.rows(batch, head, 0);
    stats = side.stats + static_cast<std::int64_t>(problem) * side.spans.rows;
    list = static_cast<std::int64_t>(problem) * args.centroids.clusters + column;
  }
};

// Rows are sampled one of every `step`, at places without a period.
struct Sample {
  int step, rows;

  __device__ explicit Sample(const CandidateProblem& problem) {
    step = problem.side.width / kSampled;
    rows = problem.length < kLeastCandidateRows * problem.side.width ? 0 : problem.length / step;
  }
  // Cell `cell` of `cells` has one of as many neighbours in every round, in an order that changes:
  // neighbours are often alike, and cells should not be. Some come twice in the last round.
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

// Of `count` tiles those of a warpgroup of the team: group, group + groups, ...
struct OwnTiles {
  int group, groups;

  __device__ explicit OwnTiles(const Team& team)
      : group(team.rank * kCandidateGroups +
              uniform_trips(static_cast<int>(threadIdx.x) / kWarpgroup)),
        groups(team.size * kCandidateGroups) {}
};

}  // namespace coterie::cuda
