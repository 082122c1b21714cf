// SPDX-License-Identifier: MIT
// Softmax over the keys that positions and a mask admit (full, local, strided), or over the best of
// them (oracle-top). s_ij = scale q_i . k_j.
#include "ref/problem.h"
#include "ref/rows.h"
#include "ref/selection.h"

namespace coterie::ref {

namespace {

// Whether the pattern lets a query at position i see key j; causality and mask come in addition.
bool in_pattern(const FullParams&, Index, Index, bool) { return true; }
bool in_pattern(const OracleTopParams&, Index, Index, bool) { return true; }

bool in_pattern(const LocalParams& params, Index i, Index j, bool causal) {
  const Index w = params.window;
  if (params.kind == LocalKind::blocked) {
    const Index distance = i / w - j / w;
    return distance <= params.flange && -distance <= (causal ? 0 : params.flange);
  }
  if (causal) return i - w < j;
  return i - w / 2 <= j && j <= i + (w + 1) / 2 - 1;
}

bool in_pattern(const StridedParams& params, Index i, Index j, bool) {
  return (i - j) % params.stride == 0;
}

template <class T, class Params>
std::vector<Row> admissible_rows(const Params& params, const Problem<T>& problem) {
  std::vector<Row> rows;
  for (Index i = 0; i < problem.q.rows; ++i) {
    const Index position = problem.position(i);
    Row row{.query = i, .keys = {}};
    for (Index j = 0; j < problem.k.rows; ++j) {
      if (problem.causal && j > position) continue;
      if (problem.mask.rows > 0 && problem.mask(i, j) == 0) continue;
      if (in_pattern(params, position, j, problem.causal)) row.keys.push_back(j);
    }
    rows.push_back(row);
  }
  return rows;
}

template <class T>
Matrix<T> logits_of(const Problem<T>& problem) {
  return scaled(inner_products(problem.q, problem.k), problem.scale);
}

template <class T>
void backward_of(const std::vector<Row>& rows, const Problem<T>& problem, const Matrix<T>& dweights,
                 ProblemGradients<T>& gradients) {
  Matrix<T> dlogits(problem.q.rows, problem.k.rows);
  softmax_rows_backward(logits_of(problem), rows, dweights, dlogits);
  dlogits = scaled(dlogits, problem.scale);
  add(gradients.dq, multiply(dlogits, problem.k));
  add(gradients.dk, transposed_multiply(dlogits, problem.q));
}

// The formula of a mechanism whose keys are rows(problem).
template <class T, class Rows>
Formula<T> formula_of(Rows rows) {
  return {.weights =
              [=](const Problem<T>& problem) {
                return softmax_rows(logits_of(problem), rows(problem));
              },
          .backward =
              [=](const Problem<T>& problem, const Matrix<T>& dweights,
                  ProblemGradients<T>& gradients) {
                backward_of(rows(problem), problem, dweights, gradients);
              }};
}

template <class T>
std::vector<Row> selected_rows(const Problem<T>& problem) {
  const Lists top_keys = read_lists(problem.place.queries(problem.saved[0]));
  std::vector<Row> rows;
  for (Index i = 0; i < problem.q.rows; ++i) rows.push_back({.query = i, .keys = top_keys[i]});
  return rows;
}

template <class T>
void select_top_keys(const OracleTopParams& params, const Problem<T>& problem) {
  const Matrix<T> logits = logits_of(problem);
  Lists top_keys;
  for (const Row& row : admissible_rows(params, problem))
    top_keys.push_back(top_of_row(logits, row.query, row.keys, params.topk));
  write_lists(problem.place.queries(problem.saved[0]), top_keys);
}

}  // namespace

template <class T>
Formula<T> formula(const FullParams& params) {
  return formula_of<T>([=](const Problem<T>& problem) { return admissible_rows(params, problem); });
}

template <class T>
Formula<T> formula(const LocalParams& params) {
  return formula_of<T>([=](const Problem<T>& problem) { return admissible_rows(params, problem); });
}

template <class T>
Formula<T> formula(const StridedParams& params) {
  return formula_of<T>([=](const Problem<T>& problem) { return admissible_rows(params, problem); });
}

template <class T>
Formula<T> formula(const OracleTopParams& params) {
  Formula<T> result =
      formula_of<T>([](const Problem<T>& problem) { return selected_rows(problem); });
  result.select = [=](const Problem<T>& problem) { select_top_keys(params, problem); };
  return result;
}

template Formula<float> formula(const FullParams&);
template Formula<double> formula(const FullParams&);
template Formula<float> formula(const LocalParams&);
template Formula<double> formula(const LocalParams&);
template Formula<float> formula(const StridedParams&);
template Formula<double> formula(const StridedParams&);
template Formula<float> formula(const OracleTopParams&);
template Formula<double> formula(const OracleTopParams&);

}  // namespace coterie::ref
