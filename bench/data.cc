// SPDX-License-Identifier: MIT
// Queries, keys and values: synthetic, or saved from a model.
#include <algorithm>
#include <cmath>

#include "bench/attention.h"
#include "bench/threads.h"
#include "coterie/error.h"
#include "coterie/random.h"

namespace coterie::bench {
namespace {

constexpr int kCentres = 32;
constexpr double kSpread = 0.5;  // deviation of rows from their centre, which has variance 1

// Uses of random streams. kCentre draws the centres of q and k, kCentre + 1 those of v.
enum Draw : std::uint32_t { kQuery, kKey, kValue, kGradient, kToken, kCentre, kDraws = 16 };

RandomStream stream(const Problem& problem, std::uint32_t draw, std::int64_t b, std::int64_t head) {
  const std::int64_t number = (b * problem.heads + head) * kDraws + draw;
  return {problem.seed, RandomUse::data, static_cast<std::uint32_t>(number)};
}

// The centre of every token of an item and key/value head, popular ones first.
std::vector<int> token_centres(const Problem& problem, std::int64_t b, std::int64_t kv_head) {
  std::vector<double> until(kCentres);
  double total = 0;
  for (int c = 0; c < kCentres; ++c) until[c] = total += 1.0 / (c + 1);
  const RandomStream draws = stream(problem, kToken, b, kv_head);
  std::vector<int> centres;
  for (std::int64_t i = 0; i < problem.N; ++i) {
    const double at = total * random_unit(draws.at(i).word[0]);
    const auto centre = std::lower_bound(until.begin(), until.end(), at) - until.begin();
    centres.push_back(static_cast<int>(centre));
  }
  return centres;
}

void normalise_rows(std::vector<double>& values, std::int64_t D) {
  for (std::size_t begin = 0; begin < values.size(); begin += D) {
    double mean = 0, square = 0;
    for (std::int64_t d = 0; d < D; ++d) mean += values[begin + d] / D;
    for (std::int64_t d = 0; d < D; ++d) square += std::pow(values[begin + d] - mean, 2) / D;
    const double factor = 1.0 / std::sqrt(square + 1e-6);
    for (std::int64_t d = 0; d < D; ++d) values[begin + d] = factor * (values[begin + d] - mean);
  }
}

// Rows of one head. Queries and keys share centres; values have others.
std::vector<double> head_rows(const Problem& problem, Draw what, std::int64_t b,
                              std::int64_t head) {
  const std::int64_t D = problem.D;
  const bool mixture = problem.data == DataKind::mixture && what != kGradient;
  const bool is_query = what == kQuery;
  const std::int64_t kv_head = is_query ? head / (problem.heads / problem.kv_heads) : head;
  const RandomStream noise = stream(problem, what, b, head);
  std::vector<double> values(problem.N * D);
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = random_normal(noise, i);
  if (mixture) {
    const std::vector<int> centres = token_centres(problem, b, kv_head);
    // The same for all items: centres belong to the head, as in a trained model.
    const RandomStream rows = stream(problem, kCentre + (what == kValue ? 1 : 0), 0, kv_head);
    std::vector<double> centre(kCentres * D);
    for (std::size_t i = 0; i < centre.size(); ++i) centre[i] = random_normal(rows, i);
    for (std::size_t i = 0; i < values.size(); ++i) {
      values[i] = centre[centres[i / D] * D + i % D] + kSpread * values[i];
    }
  }
  if (what == kQuery || what == kKey) normalise_rows(values, D);
  return values;
}

HostTensor make_tensor(const Problem& problem, Draw what, std::int64_t heads) {
  HostTensor tensor(problem.dtype, {problem.B, heads, problem.N, problem.D});
  run_on_all_cores(problem.B * heads, [&](std::int64_t i) {
    const std::int64_t b = i / heads, h = i % heads;
    write_values(tensor.view().narrowed(0, b, 1).narrowed(1, h, 1), head_rows(problem, what, b, h));
  });
  return tensor;
}

// The first N rows of every head, in the problem's type.
HostTensor take_saved(const Problem& problem, const TensorView& saved, std::int64_t heads) {
  HostTensor tensor(problem.dtype, {problem.B, heads, problem.N, problem.D});
  if (saved.size(2) < problem.N) {
    throw Error("[bench] expected at least " + std::to_string(problem.N) + " saved tokens; got " +
                describe(saved));
  }
  write_values(tensor, read_values(saved.narrowed(2, 0, problem.N)));
  return tensor;
}

}  // namespace

AttentionData make_data(const Problem& problem, Pass pass) {
  AttentionData data;
  data.problem = problem;
  if (problem.data == DataKind::saved) {
    data.q = {take_saved(problem, problem.saved->q, problem.heads), problem.device};
    data.k = {take_saved(problem, problem.saved->k, problem.kv_heads), problem.device};
    data.v = {take_saved(problem, problem.saved->v, problem.kv_heads), problem.device};
  } else {
    data.q = {make_tensor(problem, kQuery, problem.heads), problem.device};
    data.k = {make_tensor(problem, kKey, problem.kv_heads), problem.device};
    data.v = {make_tensor(problem, kValue, problem.kv_heads), problem.device};
  }
  if (pass != Pass::forward) {
    data.grad_out = {make_tensor(problem, kGradient, problem.heads), problem.device};
  }
  return data;
}

}  // namespace coterie::bench
