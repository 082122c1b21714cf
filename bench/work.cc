// SPDX-License-Identifier: MIT
#include "bench/work.h"

#include <algorithm>

namespace coterie::bench {
namespace {

// Query-key pairs that one head computes.
struct Pairs {
  std::int64_t N;
  bool causal;

  double triangle(double n) const { return causal ? n * (n + 1) / 2 : n * n; }
  double of_centroids(const ClusteringParams& params) const {
    return static_cast<double>(std::min(params.clusters, N) * N);
  }

  // Near keys: of the own block of positions and the two beside it.
  double of_near(std::int64_t near) const {
    double pairs = 0;
    for (std::int64_t first = 0; near > 0 && first < N; first += near) {
      const std::int64_t rows = std::min(near, N - first);
      const std::int64_t keys =
          std::min(first + 2 * near, N) - std::max<std::int64_t>(first - near, 0);
      pairs += static_cast<double>(rows) * static_cast<double>(keys);
    }
    return pairs;
  }

  std::optional<double> operator()(const FullParams&) const {
    return triangle(static_cast<double>(N));
  }
  std::optional<double> operator()(const LocalParams& params) const {
    if (params.kind != LocalKind::sliding) return std::nullopt;
    const std::int64_t before = causal ? params.window - 1 : params.window / 2;
    const std::int64_t after = causal ? 0 : (params.window + 1) / 2 - 1;
    std::int64_t pairs = 0;
    for (std::int64_t i = 0; i < N; ++i) {
      pairs += std::min(i + after, N - 1) - std::max<std::int64_t>(i - before, 0) + 1;
    }
    return static_cast<double>(pairs);
  }
  std::optional<double> operator()(const StridedParams& params) const {
    const std::int64_t longer = N % params.stride;  // residues with one token more
    const double tokens = static_cast<double>(N / params.stride);
    return static_cast<double>(longer) * triangle(tokens + 1) +
           static_cast<double>(params.stride - longer) * triangle(tokens);
  }
  std::optional<double> operator()(const ClusteredParams& params) const {
    return of_centroids(params.clustering) + of_near(params.near);
  }
  std::optional<double> operator()(const ImprovedClusteredParams& params) const {
    if (causal) return std::nullopt;
    return of_centroids(params.clustering) + of_near(params.near) +
           static_cast<double>(std::min(params.topk, N) * N);
  }
  template <class Params>
  std::optional<double> operator()(const Params&) const {
    return std::nullopt;
  }
};

}  // namespace

std::optional<double> attention_flops(const Entry& entry, const Problem& problem, Pass pass) {
  const double per_pair =
      (pass != Pass::backward ? 4.0 : 0.0) + (pass != Pass::forward ? 10.0 : 0.0);
  const std::vector<std::int64_t> heads = entry.spec.head_counts(problem.heads);
  double pairs = 0;
  for (std::size_t g = 0; g < heads.size(); ++g) {
    const std::optional<double> of_head =
        std::visit(Pairs{problem.N, entry.causal}, entry.spec.groups[g].mechanism);
    if (!of_head) return std::nullopt;
    pairs += *of_head * static_cast<double>(heads[g]);
  }
  return per_pair * pairs * static_cast<double>(problem.D * problem.B);
}

double least_bytes(const Problem& problem, Pass pass) {
  const std::int64_t heads = 2 * problem.heads + 2 * problem.kv_heads;  // q, out and k, v
  const std::int64_t bytes = problem.B * heads * problem.N * problem.D * dtype_bytes(problem.dtype);
  // The backward pass reads all four and the output's gradient, and writes gradients of q, k and v.
  const int times = (pass != Pass::backward ? 1 : 0) + (pass != Pass::forward ? 2 : 0);
  return static_cast<double>(times * bytes);
}

}  // namespace coterie::bench
