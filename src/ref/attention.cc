// SPDX-License-Identifier: MIT
// The loops over items and heads that all mechanisms share: out = W v, dv = W^T g, dW = g v^T; with
// the factors M of dropout, out = (M W) v, dv = (M W)^T g, dW = M g v^T, elementwise in M.
#include <algorithm>
#include <cmath>

#include "core/check.h"
#include "ref/problem.h"
#include "ref/ref.h"

namespace coterie::ref {

namespace {

bool shares_keys(const Mechanism& mechanism) {
  const auto* routing = std::get_if<RoutingParams>(&mechanism);
  return std::holds_alternative<LshParams>(mechanism) || (routing && routing->shared());
}

template <class T>
struct Call {
  Mechanism mechanism;
  AttentionInputs inputs;
  std::vector<TensorView> saved;
  Formula<T> formula;
  std::vector<Place> places;

  Index batches() const { return inputs.q.size(0); }
  Index heads() const { return inputs.q.size(1); }
  Index queries() const { return inputs.q.size(2); }
  Index keys() const { return inputs.v.size(2); }
};

template <class T>
Call<T> make_call(const Mechanism& mechanism, const AttentionInputs& inputs,
                  const std::vector<TensorView>& saved) {
  const Mechanism resolved = resolve(mechanism, inputs.causal);
  return {.mechanism = resolved,
          .inputs = inputs,
          .saved = saved,
          .formula = std::visit([](const auto& params) { return formula<T>(params); }, resolved),
          .places = make_places("ref", inputs)};
}

template <class T>
T scale_of(const Mechanism& mechanism, const AttentionInputs& inputs) {
  if (inputs.scale != 0.0) return static_cast<T>(inputs.scale);
  if (std::holds_alternative<RoutingParams>(mechanism)) return 1;
  return static_cast<T>(1.0 / std::sqrt(static_cast<double>(inputs.q.size(3))));
}

// The rows of one head of (H, C, Dk); consecutive query heads share one if there are fewer heads.
TensorView head_of(const TensorView& tensor, const Place& place) {
  return tensor.narrowed(0, place.head / (place.num_heads / tensor.size(0)), 1);
}

TensorView tokens_of(const TensorView& gate, const Place& place) {
  return gate.narrowed(0, place.q.batch, 1).narrowed(1, place.q.begin, place.q.length);
}

template <class T>
Problem<T> make_problem(const Call<T>& call, const Place& place) {
  const AttentionInputs& inputs = call.inputs;
  const bool shared = shares_keys(call.mechanism);
  COTERIE_CHECK(!shared || place.q.length == place.k.length, "ref",
                "expected equal lengths of shared queries and keys; got ", place.q.length, " and ",
                place.k.length);
  Problem<T> problem;
  problem.q = read_matrix<T>(place.queries(inputs.q));
  problem.k = shared ? problem.q : read_matrix<T>(place.keys(inputs.k));
  if (inputs.mask.present())
    problem.mask = read_matrix<std::uint8_t>(
        place.queries(inputs.mask).narrowed(3, place.k.begin, place.k.length));
  if (inputs.centroids.present())
    problem.centroids = read_matrix<T>(head_of(inputs.centroids, place));
  if (inputs.gate.present()) problem.gate = read_matrix<T>(tokens_of(inputs.gate, place)).values;
  if (inputs.logit_scale.present())
    problem.logit_scale = read_matrix<T>(head_of(inputs.logit_scale, place)).values[0];
  problem.scale = scale_of<T>(call.mechanism, inputs);
  problem.causal = resolve_causality(call.mechanism, inputs.causal) != Causality::none;
  problem.seed = inputs.seed;
  problem.dropout = make_dropout(inputs.dropout_seed, inputs.dropout);
  problem.place = place;
  problem.saved = call.saved;
  return problem;
}

// The factors of the weights: (queries x keys), 1 without dropout.
template <class T>
Matrix<T> kept(const Formula<T>& formula, const Problem<T>& problem) {
  Matrix<T> factors(problem.q.rows, problem.k.rows);
  std::fill(factors.values.begin(), factors.values.end(), T{1});
  if (!problem.dropout.on() || formula.drops_itself) return factors;
  Matrix<Index> clusters;
  if (formula.shares) clusters = formula.shares(problem);
  for (Index i = 0; i < factors.rows; ++i)
    for (Index j = 0; j < factors.cols; ++j)
      factors(i, j) = formula.shares && clusters(i, j) >= 0
                          ? problem.cluster_kept(clusters(i, j), j)
                          : problem.kept(i, j);
  return factors;
}

// A factor 0 makes a product 0, whatever the other one is.
template <class T>
Matrix<T> elementwise(Matrix<T> a, const Matrix<T>& b) {
  for (std::size_t e = 0; e < a.values.size(); ++e)
    a.values[e] = b.values[e] == 0 ? T{0} : a.values[e] * b.values[e];
  return a;
}

// W with dropout.
template <class T>
Matrix<T> dropped_weights(const Formula<T>& formula, const Problem<T>& problem) {
  return elementwise(formula.weights(problem), kept(formula, problem));
}

template <class T>
ProblemGradients<T> zero_gradients(const Problem<T>& problem) {
  return {.dq = Matrix<T>(problem.q.rows, problem.q.cols),
          .dk = Matrix<T>(problem.k.rows, problem.k.cols),
          .dcentroids = Matrix<T>(problem.centroids.rows, problem.centroids.cols),
          .dgate = std::vector<T>(problem.gate.size(), 0)};
}

template <class T>
std::vector<T> zeros_like(const TensorView& tensor) {
  return std::vector<T>(static_cast<std::size_t>(tensor.count()), 0);
}

// A view of `values` with the sizes of `like`.
template <class T>
TensorView dense_like(std::vector<T>& values, const TensorView& like) {
  TensorView view = dense_view(values, {static_cast<Index>(values.size())});
  view.rank = like.rank;
  Index stride = 1;
  for (int dim = like.rank - 1; dim >= 0; --dim) {
    view.sizes[dim] = like.sizes[dim];
    view.strides[dim] = stride;
    stride *= like.sizes[dim];
  }
  return view;
}

// Adds the gradients of one item and head to those of the call.
template <class T>
void scatter(const Call<T>& call, const Place& place, const ProblemGradients<T>& from,
             Gradients<T>& to) {
  const AttentionInputs& inputs = call.inputs;
  add_matrix(place.queries(dense_like(to.dq, inputs.q)), from.dq);
  if (!to.dk.empty()) add_matrix(place.keys(dense_like(to.dk, inputs.k)), from.dk);
  if (!to.dcentroids.empty())
    add_matrix(head_of(dense_like(to.dcentroids, inputs.centroids), place), from.dcentroids);
  if (!to.dgate.empty()) {
    Matrix<T> dgate(1, static_cast<Index>(from.dgate.size()));
    dgate.values = from.dgate;
    add_matrix(tokens_of(dense_like(to.dgate, inputs.gate), place), dgate);
  }
  if (!to.dlogit_scale.empty()) to.dlogit_scale[place.head] += from.dlogit_scale;
}

}  // namespace

template <class T>
void select(const Mechanism& mechanism, const AttentionInputs& inputs,
            const std::vector<TensorView>& saved) {
  const Call<T> call = make_call<T>(mechanism, inputs, saved);
  for (const TensorView& tensor : saved)
    if (tensor.dtype == DType::i32) fill(tensor, [](Index) { return -1.0; });
  std::vector<Problem<T>> heads;
  for (const Place& place : call.places) {
    const Problem<T> problem = make_problem(call, place);
    if (call.formula.select) call.formula.select(problem);
    heads.push_back(problem);
    if (place.head + 1 < place.num_heads) continue;
    if (call.formula.select_item) call.formula.select_item(heads);
    heads.clear();
  }
}

template <class T>
std::vector<T> weights(const Mechanism& mechanism, const AttentionInputs& inputs,
                       const std::vector<TensorView>& saved) {
  const Call<T> call = make_call<T>(mechanism, inputs, saved);
  std::vector<T> result(
      static_cast<std::size_t>(call.batches() * call.heads() * call.queries() * call.keys()), 0);
  const TensorView view =
      dense_view(result, {call.batches(), call.heads(), call.queries(), call.keys()});
  for (const Place& place : call.places)
    write_matrix(place.queries(view).narrowed(3, place.k.begin, place.k.length),
                 dropped_weights(call.formula, make_problem(call, place)));
  return result;
}

template <class T>
std::vector<T> attend(const Mechanism& mechanism, const AttentionInputs& inputs,
                      const std::vector<TensorView>& saved) {
  const Call<T> call = make_call<T>(mechanism, inputs, saved);
  const Index dim = inputs.v.size(3);
  std::vector<T> result(
      static_cast<std::size_t>(call.batches() * call.heads() * call.queries() * dim), 0);
  const TensorView view = dense_view(result, {call.batches(), call.heads(), call.queries(), dim});
  for (const Place& place : call.places)
    write_matrix(place.queries(view),
                 multiply(dropped_weights(call.formula, make_problem(call, place)),
                          read_matrix<T>(place.keys(inputs.v))));
  return result;
}

template <class T>
Gradients<T> backward(const Mechanism& mechanism, const AttentionInputs& inputs,
                      const std::vector<TensorView>& saved, const TensorView& grad_out) {
  const Call<T> call = make_call<T>(mechanism, inputs, saved);
  const bool cast = std::holds_alternative<CastParams>(call.mechanism);
  Gradients<T> result;
  result.dq = zeros_like<T>(inputs.q);
  result.dv = zeros_like<T>(inputs.v);
  result.dlogit_scale = zeros_like<T>(inputs.logit_scale);
  if (!shares_keys(call.mechanism)) result.dk = zeros_like<T>(inputs.k);
  if (cast) result.dcentroids = zeros_like<T>(inputs.centroids);
  if (cast) result.dgate = zeros_like<T>(inputs.gate);
  for (const Place& place : call.places) {
    const Problem<T> problem = make_problem(call, place);
    const Matrix<T> v = read_matrix<T>(place.keys(inputs.v));
    const Matrix<T> dout = read_matrix<T>(place.queries(grad_out));
    ProblemGradients<T> gradients = zero_gradients(problem);
    call.formula.backward(
        problem, elementwise(inner_products(dout, v), kept(call.formula, problem)), gradients);
    scatter(call, place, gradients, result);
    add_matrix(place.keys(dense_like(result.dv, inputs.v)),
               transposed_multiply(dropped_weights(call.formula, problem), dout));
  }
  return result;
}

template void select<float>(const Mechanism&, const AttentionInputs&,
                            const std::vector<TensorView>&);
template void select<double>(const Mechanism&, const AttentionInputs&,
                             const std::vector<TensorView>&);
template std::vector<float> weights(const Mechanism&, const AttentionInputs&,
                                    const std::vector<TensorView>&);
template std::vector<double> weights(const Mechanism&, const AttentionInputs&,
                                     const std::vector<TensorView>&);
template std::vector<float> attend(const Mechanism&, const AttentionInputs&,
                                   const std::vector<TensorView>&);
template std::vector<double> attend(const Mechanism&, const AttentionInputs&,
                                    const std::vector<TensorView>&);
template Gradients<float> backward(const Mechanism&, const AttentionInputs&,
                                   const std::vector<TensorView>&, const TensorView&);
template Gradients<double> backward(const Mechanism&, const AttentionInputs&,
                                    const std::vector<TensorView>&, const TensorView&);

}  // namespace coterie::ref
