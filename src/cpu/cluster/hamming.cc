// SPDX-License-Identifier: MIT
#include "cpu/cluster/hamming.h"

#include <algorithm>
#include <cstring>
#include <numeric>

#include "core/parallel.h"
#include "coterie/random.h"
#include "cpu/kernels/kernels.h"

namespace coterie::cpu {

namespace {

constexpr std::int64_t kChunk = 4096;

std::int64_t num_chunks(std::int64_t rows) {
  return std::max<std::int64_t>(1, (rows + kChunk - 1) / kChunk);
}

// If there are no more codes than clusters, every code gets its own cluster: equal codes of
// different queries must not merge.
bool one_each(const CodeKMeans& params, const CodeProblem& problem) {
  return problem.count <= params.clusters;
}

void start(const CodeKMeans& params, const CodeProblem& problem) {
  std::fill_n(problem.centroids, params.clusters, std::uint64_t{0});
  if (one_each(params, problem)) {
    std::iota(problem.labels, problem.labels + problem.count, 0);
    std::copy_n(problem.codes, problem.count, problem.centroids);
    return;
  }
  const RandomStream stream{params.seed, RandomUse::initial_centroid, problem.stream};
  for (std::int64_t c = 0; c < params.clusters; ++c)
    problem.centroids[c] = problem.codes[random_permutation(
        stream, static_cast<std::uint32_t>(c), static_cast<std::uint32_t>(problem.count))];
}

// New centroids by majority of the chunks' votes.
void update(const CodeKMeans& params, const CodeProblem& problem, std::int64_t iteration,
            std::int32_t* votes, std::int32_t* sizes) {
  const std::int64_t clusters = params.clusters, chunks = num_chunks(problem.count);
  for (std::int64_t chunk = 1; chunk < chunks; ++chunk) {
    for (std::int64_t e = 0; e < clusters * 64; ++e) votes[e] += votes[chunk * clusters * 64 + e];
    for (std::int64_t c = 0; c < clusters; ++c) sizes[c] += sizes[chunk * clusters + c];
  }
  const RandomStream stream{params.seed, RandomUse::empty_cluster, problem.stream};
  const std::uint64_t mask = (std::uint64_t{1} << params.bits) - 1;
  for (std::int64_t c = 0; c < clusters; ++c) {
    if (sizes[c] == 0) {
      problem.centroids[c] =
          random_u64(stream, static_cast<std::uint64_t>(iteration * clusters + c)) & mask;
      continue;
    }
    std::uint64_t code = 0;
    for (std::int64_t bit = 0; bit < params.bits; ++bit)
      code |= static_cast<std::uint64_t>(2 * votes[c * 64 + bit] > sizes[c]) << bit;
    problem.centroids[c] = code;
  }
}

}  // namespace

VoteBuffer::VoteBuffer(Arena& arena, std::int64_t problems, std::int64_t rows,
                       std::int64_t clusters)
    : chunks(num_chunks(rows)),
      votes(arena.take<std::int32_t>(problems * chunks * clusters * 64)),
      sizes(arena.take<std::int32_t>(problems * chunks * clusters)) {}

void hamming_kmeans(const CodeKMeans& params, const std::vector<CodeProblem>& problems,
                    VoteBuffer& buffer) {
  const CodeKernels& kernel = kernel_table().codes;
  const std::int64_t count = static_cast<std::int64_t>(problems.size()), clusters = params.clusters;
  const auto votes_of = [&](std::int64_t p, std::int64_t chunk) {
    return buffer.votes + (p * buffer.chunks + chunk) * clusters * 64;
  };
  const auto sizes_of = [&](std::int64_t p, std::int64_t chunk) {
    return buffer.sizes + (p * buffer.chunks + chunk) * clusters;
  };
  parallel_for(count,
               [&](std::int64_t p, int) { start(params, problems[static_cast<std::size_t>(p)]); });
  for (std::int64_t iteration = 0; iteration <= params.iterations; ++iteration) {
    const bool last = iteration == params.iterations;
    parallel_for(count * buffer.chunks, [&](std::int64_t task, int) {
      const std::int64_t p = task / buffer.chunks, chunk = task % buffer.chunks;
      const CodeProblem& problem = problems[static_cast<std::size_t>(p)];
      const std::int64_t first = chunk * kChunk;
      if (first >= problem.count || one_each(params, problem)) return;
      const std::int64_t rows = std::min(kChunk, problem.count - first);
      kernel.nearest(problem.codes + first, rows, problem.centroids, clusters,
                     problem.labels + first);
      if (last) return;
      std::memset(votes_of(p, chunk), 0,
                  static_cast<std::size_t>(clusters) * 64 * sizeof(std::int32_t));
      std::memset(sizes_of(p, chunk), 0, static_cast<std::size_t>(clusters) * sizeof(std::int32_t));
      kernel.vote(problem.codes + first, problem.labels + first, rows, votes_of(p, chunk),
                  sizes_of(p, chunk));
    });
    if (last) return;
    parallel_for(count, [&](std::int64_t p, int) {
      const CodeProblem& problem = problems[static_cast<std::size_t>(p)];
      if (!one_each(params, problem))
        update(params, problem, iteration, votes_of(p, 0), sizes_of(p, 0));
    });
  }
}

}  // namespace coterie::cpu
