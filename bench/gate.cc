// SPDX-License-Identifier: MIT
#include "bench/gate.h"

#include <algorithm>
#include <cmath>
#include <sstream>
#include <stdexcept>
#include <variant>

#include "bench/reference.h"
#include "ref/ref.h"

namespace coterie::bench {
namespace {

// An odd length longer than one kernel tile, short enough for the scalar specification.
constexpr std::int64_t kLongest = 193;

struct Bounds {
  double output, gradient;
};

// Bounds on rounding errors with some margin: outputs of half types are rounded once, and sums of a
// few hundred terms in f32 are accurate to 1e-6.
Bounds bounds_of(DType dtype) {
  switch (dtype) {
    case DType::f64:
      return {1e-12, 1e-11};
    case DType::bf16:
      return {3e-3, 1e-2};
    case DType::f16:
      return {5e-4, 2e-3};
    default:
      return {1e-5, 1e-4};
  }
}

struct Checker {
  std::string attention;
  std::vector<Check>& checks;
  double least = 0;  // errors are relative to the tensor's norm, or to this if it is larger

  void operator()(const char* tensor, const TensorView& got, const std::vector<double>& wanted,
                  double bound) const {
    if (!got.present()) return;
    SquaredNorms norms;
    norms.add(read_values(got), wanted);
    checks.push_back({attention, tensor, norms.relative_error(least), bound});
  }
};

// Inputs and results in host memory, where the specification can read them.
HeadRun on_host(const HeadRun& group) {
  HeadRun host;
  host.mechanism = group.mechanism;
  const auto copy = [&host](const TensorView& view) {
    return view.present() ? host.own({host_copy(view), Device::cpu}) : view;
  };
  host.inputs = group.inputs;
  for (TensorView* view : {&host.inputs.q, &host.inputs.k, &host.inputs.v, &host.inputs.centroids,
                           &host.inputs.gate}) {
    *view = copy(*view);
  }
  host.result.out = copy(group.result.out);
  for (const TensorView& saved : group.result.saved) host.result.saved.push_back(copy(saved));
  const AttentionGradients& from = group.gradients;
  host.gradients.dq = copy(from.dq);
  host.gradients.dk = copy(from.dk);
  host.gradients.dv = copy(from.dv);
  host.gradients.dcentroids = copy(from.dcentroids);
  host.gradients.dgate = copy(from.dgate);
  host.grad_out = copy(group.grad_out);
  return host;
}

// Elements that are not written stay NaN.
void poison_results(const HeadRun& group) {
  const AttentionGradients& gradients = group.gradients;
  for (const TensorView& view : {group.result.out, gradients.dq, gradients.dk, gradients.dv,
                                 gradients.dcentroids, gradients.dgate}) {
    if (view.present()) poison(view);
  }
}

double norm(const std::vector<double>& values) {
  SquaredNorms norms;
  norms.add(values, values);
  return std::sqrt(norms.reference);
}

// Gradients of queries and keys are less exact if their sums come from the rounded output
// (AttentionInputs::delta_from_output), most where keys have a large mean: 1.3 % in bf16 on
// mixtures.
double keys_bound(const HeadRun& group, const Bounds& bounds) {
  const Mechanism& mechanism = group.mechanism;
  const bool takes = std::holds_alternative<FullParams>(mechanism) ||
                     std::holds_alternative<LocalParams>(mechanism);
  const bool rounded = group.inputs.delta_from_output && dtype_bytes(group.inputs.q.dtype) == 2;
  return takes && rounded ? 4 * bounds.gradient : bounds.gradient;
}

void check_group(const HeadRun& group, const Bounds& bounds, double keys_bound, Checker check) {
  const AttentionResult& result = group.result;
  const Mechanism mechanism = resolve(group.mechanism, group.inputs.causal);
  check("output", result.out, ref::attend<double>(mechanism, group.inputs, result.saved),
        bounds.output);
  const ref::Gradients<double> wanted =
      ref::backward<double>(mechanism, group.inputs, result.saved, group.grad_out);
  check("dq", group.gradients.dq, wanted.dq, keys_bound);
  check("dk", group.gradients.dk, wanted.dk, keys_bound);
  check("dv", group.gradients.dv, wanted.dv, bounds.gradient);
  // These gradients cancel, to 0 if all clusters have the same tokens.
  check.least = norm(wanted.dq);
  check("dcentroids", group.gradients.dcentroids, wanted.dcentroids, bounds.gradient);
  check("dgate", group.gradients.dgate, wanted.dgate, bounds.gradient);
}

}  // namespace

std::vector<Check> gate(const std::vector<Entry>& entries, const Problem& problem,
                        const Progress& progress) {
  Problem small = problem;
  small.B = 1;
  small.N = std::min(problem.N, kLongest);
  const AttentionData data = make_data(small, Pass::both);
  const Gradients gradients(data);
  std::vector<Check> checks;
  for (const Entry& entry : entries) {
    const std::string name = entry.spec.to_string();
    if (progress) progress({name + " against the specification", {}}, 1, 1);
    AttentionRun run(entry, data, gradients);
    for (const HeadRun& group : run.groups()) poison_results(group);
    run.forward();
    run.backward();
    for (const HeadRun& group : run.groups()) {
      const Bounds bounds = bounds_of(small.dtype);
      check_group(on_host(group), bounds, keys_bound(group, bounds), {name, checks});
    }
  }
  return checks;
}

void refuse_wrong(const std::vector<Check>& checks) {
  std::ostringstream wrong;
  for (const Check& check : checks) {
    if (check.passed()) continue;
    wrong << (wrong.tellp() > 0 ? "; " : "") << check.attention << " gives a wrong " << check.tensor
          << " (relative error " << check.error << ", allowed " << check.bound << ")";
  }
  if (wrong.tellp() > 0) throw std::runtime_error("not timed: " + wrong.str());
}

}  // namespace coterie::bench
