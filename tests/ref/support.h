// SPDX-License-Identifier: MIT
// A case with its selection made by the executable specification in double.
#pragma once

#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "cases/problem.h"
#include "ref/ref.h"

namespace coterie::ref {

// Largest difference between two orders of the same sums in double.
constexpr double kExact = 1e-12;

struct Selected {
  cases::Problem problem;
  std::vector<HostTensor> storage;
  std::vector<TensorView> saved;

  std::vector<double> weights() const {
    return ref::weights<double>(problem.mechanism, problem.inputs, saved);
  }
  std::vector<double> attend() const {
    return ref::attend<double>(problem.mechanism, problem.inputs, saved);
  }
  Gradients<double> backward() const {
    return ref::backward<double>(problem.mechanism, problem.inputs, saved, problem.grad_out);
  }
};

inline void select_again(Selected& selected) {
  ref::select<double>(selected.problem.mechanism, selected.problem.inputs, selected.saved);
}

inline void allocate_saved(Selected& selected) {
  selected.storage.clear();
  selected.saved.clear();
  for (const TensorLayout& tensor :
       attention_saved(selected.problem.mechanism, selected.problem.inputs).tensors)
    selected.storage.emplace_back(tensor);
  for (const HostTensor& tensor : selected.storage) selected.saved.push_back(tensor);
}

// Other forms of a case.
inline cases::Case causal(cases::Case c) {
  c.causal = true;
  return c;
}
inline cases::Case cross(cases::Case c, std::int64_t queries, std::int64_t keys) {
  c.N = queries;
  c.S = keys;
  return c;
}

inline Selected make_selected(const cases::Case& c, std::uint64_t seed = 1) {
  Selected selected;
  selected.problem = cases::make_problem(c, seed);
  allocate_saved(selected);
  select_again(selected);
  return selected;
}

inline std::vector<int> indices_of(const TensorView& tensor) {
  const std::vector<double> values = read_values(tensor);
  return {values.begin(), values.end()};
}

inline double largest_difference(const std::vector<double>& a, const std::vector<double>& b) {
  if (a.size() != b.size()) return INFINITY;
  double largest = 0.0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    if (!(std::abs(a[i] - b[i]) <= largest)) largest = std::abs(a[i] - b[i]);  // NaN counts
  }
  return largest;
}

}  // namespace coterie::ref
