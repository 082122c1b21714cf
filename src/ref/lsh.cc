// SPDX-License-Identifier: MIT
// LSH attention: tokens are sorted by hash bucket and attend to their chunk of the sorted order and
// to the chunk before it. s_ij = scale q_i . q_j / |q_j|.
//   combine=lse   one softmax over the keys of all rounds; self only if no round has another key;
//                 the first chunk also sees the last (Reformer, Kitaev et al. 2020)
//   combine=mean  the mean of the rounds' softmaxes, self kept in each
#include <algorithm>
#include <cmath>
#include <numeric>

#include "coterie/random.h"
#include "ref/problem.h"
#include "ref/rows.h"
#include "ref/selection.h"

namespace coterie::ref {

namespace {

template <class T>
T norm_of_row(const Matrix<T>& x, Index row) {
  T sum = 0;
  for (Index d = 0; d < x.cols; ++d) sum += x(row, d) * x(row, d);
  return std::sqrt(sum);
}

// Rows divided by their norms; a zero row stays zero.
template <class T>
Matrix<T> unit_rows(Matrix<T> x) {
  for (Index i = 0; i < x.rows; ++i) {
    const T norm = norm_of_row(x, i);
    for (Index d = 0; d < x.cols && norm > 0; ++d) x(i, d) /= norm;
  }
  return x;
}

// Adds (I - k k^T) dk / |x| to dx, k = x / |x|.
template <class T>
void unit_rows_backward(const Matrix<T>& x, const Matrix<T>& dunit, Matrix<T>& dx) {
  const Matrix<T> unit = unit_rows(x);
  for (Index i = 0; i < x.rows; ++i) {
    const T norm = norm_of_row(x, i);
    if (!(norm > 0)) continue;
    T along = 0;
    for (Index d = 0; d < x.cols; ++d) along += unit(i, d) * dunit(i, d);
    for (Index d = 0; d < x.cols; ++d) dx(i, d) += (dunit(i, d) - along * unit(i, d)) / norm;
  }
}

// Slots that the queries of chunk `chunk` see in a sorted list of `tokens`.
std::vector<Index> visible_slots(const LshParams& params, Index chunk, Index tokens) {
  const Index chunks = (tokens + params.chunk - 1) / params.chunk;
  std::vector<Index> seen = {chunk};
  if (chunk > 0) seen.push_back(chunk - 1);
  if (chunk == 0 && chunks > 1 && params.combine == LshCombine::lse) seen.push_back(chunks - 1);
  std::vector<Index> slots;
  for (Index c : seen)
    for (Index slot = c * params.chunk; slot < std::min((c + 1) * params.chunk, tokens); ++slot)
      slots.push_back(slot);
  return slots;
}

// The keys each query sees in one round.
Lists keys_of_round(const LshParams& params, const std::vector<Index>& order, bool causal) {
  Lists keys(order.size());
  for (std::size_t slot = 0; slot < order.size(); ++slot) {
    const Index query = order[slot];
    std::vector<Index>& list = keys[query];
    for (Index other : visible_slots(params, static_cast<Index>(slot) / params.chunk,
                                     static_cast<Index>(order.size())))
      if (!causal || order[other] <= query) list.push_back(order[other]);
  }
  return keys;
}

template <class T>
std::vector<Row> attended_rows(const LshParams& params, const Problem<T>& problem) {
  const TensorView& order = problem.saved[0];  // (B, H, R, N)
  const Span& span = problem.place.q;
  const Matrix<double> orders = read_matrix<double>(order.narrowed(0, span.batch, 1)
                                                        .narrowed(1, problem.place.head, 1)
                                                        .narrowed(3, span.begin, span.length));
  const bool merge = params.combine == LshCombine::lse;
  std::vector<Row> rows;
  for (Index i = 0; merge && i < span.length; ++i) rows.push_back({.query = i, .keys = {}});
  for (Index round = 0; round < params.rounds; ++round) {
    std::vector<Index> sorted;
    for (Index slot = 0; slot < span.length; ++slot)
      sorted.push_back(static_cast<Index>(orders(round, slot)));
    const Lists keys = keys_of_round(params, sorted, problem.causal);
    for (Index i = 0; i < span.length; ++i) {
      if (merge) {
        rows[i].keys.insert(rows[i].keys.end(), keys[i].begin(), keys[i].end());
      } else {
        rows.push_back({.query = i, .keys = keys[i], .factor = 1.0 / params.rounds});
      }
    }
  }
  for (Row& row : rows)
    if (merge && std::ranges::any_of(row.keys, [&](Index key) { return key != row.query; }))
      std::erase(row.keys, row.query);
  return rows;
}

template <class T>
Matrix<T> lsh_logits(const Problem<T>& problem) {
  return scaled(inner_products(problem.q, unit_rows(problem.q)), problem.scale);
}

template <class T>
void lsh_backward(const LshParams& params, const Problem<T>& problem, const Matrix<T>& dweights,
                  ProblemGradients<T>& gradients) {
  Matrix<T> dlogits(problem.q.rows, problem.q.rows);
  softmax_rows_backward(lsh_logits(problem), attended_rows(params, problem), dweights, dlogits);
  dlogits = scaled(dlogits, problem.scale);
  add(gradients.dq, multiply(dlogits, unit_rows(problem.q)));
  unit_rows_backward(problem.q, transposed_multiply(dlogits, problem.q), gradients.dq);
}

// argmax over [x R ; -x R].
template <class T>
std::vector<Index> buckets_of(const Matrix<T>& x, Index buckets, const RandomStream& stream) {
  Matrix<T> rotation(x.cols, buckets / 2);
  for (Index d = 0; d < rotation.rows; ++d)
    for (Index b = 0; b < rotation.cols; ++b)
      rotation(d, b) = static_cast<T>(random_normal(stream, d * rotation.cols + b));
  const Matrix<T> half = multiply(x, rotation);
  Matrix<T> scores(x.rows, buckets);
  for (Index i = 0; i < x.rows; ++i)
    for (Index b = 0; b < half.cols; ++b) {
      scores(i, b) = half(i, b);
      scores(i, half.cols + b) = -half(i, b);
    }
  return best_of_rows(scores);
}

template <class T>
void select_order(const LshParams& params, const Problem<T>& problem) {
  const Span& span = problem.place.q;
  for (Index round = 0; round < params.rounds; ++round) {
    const RandomStream stream{problem.seed, RandomUse::lsh_rotation,
                              static_cast<std::uint32_t>(round)};
    const std::vector<Index> buckets = buckets_of(problem.q, params.buckets, stream);
    write_indices(problem.saved[0]
                      .narrowed(0, span.batch, 1)
                      .narrowed(1, problem.place.head, 1)
                      .narrowed(2, round, 1)
                      .narrowed(3, span.begin, span.length),
                  runs_of(members_of(buckets, params.buckets)).order);
  }
}

}  // namespace

template <class T>
Formula<T> formula(const LshParams& params) {
  return {.weights =
              [=](const Problem<T>& p) {
                return softmax_rows(lsh_logits(p), attended_rows(params, p));
              },
          .backward = [=](const Problem<T>& p, const Matrix<T>& dweights,
                          ProblemGradients<T>& g) { lsh_backward(params, p, dweights, g); },
          .select = [=](const Problem<T>& p) { select_order(params, p); }};
}

template Formula<float> formula(const LshParams&);
template Formula<double> formula(const LshParams&);

}  // namespace coterie::ref
