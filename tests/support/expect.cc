// SPDX-License-Identifier: MIT
#include "tests/support/expect.h"

#include <cmath>
#include <cstring>
#include <string>

#include "ref/ref.h"
#include "tests/support/magnitude.h"

namespace coterie::test {
namespace {

template <class T>
std::vector<double> doubles(const std::vector<T>& values) {
  return {values.begin(), values.end()};
}

// Rows (dimension 2) beyond an item's length are exactly 0.
void expect_zero_padding(const std::string& name, const TensorView& tensor,
                         const Sequences& sequences) {
  if (!tensor.present()) return;
  for (std::int64_t b = 0; b < tensor.size(0); ++b) {
    const std::int64_t used = cases::used_rows(sequences, b, tensor.size(2));
    const TensorView rest = tensor.narrowed(0, b, 1).narrowed(2, used, tensor.size(2) - used);
    for (double value : read_values(rest)) {
      ASSERT_EQ(value, 0.0) << name << " in the padding of batch entry " << b;
    }
  }
}

// Rows that are 0 in the specification, because they have no keys, are exactly 0.
void expect_zero_rows(const TensorView& out, const std::vector<double>& exact) {
  const std::vector<double> values = read_values(out);
  const auto width = static_cast<std::size_t>(out.size(3));
  for (std::size_t first = 0; first < exact.size(); first += width) {
    bool zero = true;
    for (std::size_t d = 0; d < width; ++d) zero = zero && exact[first + d] == 0.0;
    for (std::size_t d = 0; zero && d < width; ++d) {
      ASSERT_EQ(values[first + d], 0.0) << "row " << first / width << " has no keys";
    }
  }
}

void expect_gradient(const char* name, const TensorView& actual, const Expected& expected) {
  if (!actual.present()) return;
  EXPECT_TRUE(follows_rule(name, actual, expected));
}

}  // namespace

Expected expected_out(const cases::Problem& problem, const std::vector<TensorView>& saved) {
  return {.exact = ref::attend<double>(problem.mechanism, problem.inputs, saved),
          .naive = doubles(ref::attend<float>(problem.mechanism, problem.inputs, saved)),
          .magnitude = magnitudes(problem.mechanism, problem.inputs, saved, problem.grad_out).out};
}

ExpectedGradients expected_gradients(const cases::Problem& problem,
                                     const std::vector<TensorView>& saved) {
  const auto exact =
      ref::backward<double>(problem.mechanism, problem.inputs, saved, problem.grad_out);
  const auto naive =
      ref::backward<float>(problem.mechanism, problem.inputs, saved, problem.grad_out);
  const Magnitudes m = magnitudes(problem.mechanism, problem.inputs, saved, problem.grad_out);
  const auto expected = [&](const auto& exact_values, const auto& naive_values, auto member) {
    return Expected{.exact = exact_values, .naive = doubles(naive_values), .magnitude = m.*member};
  };
  using M = Magnitudes;
  return {.dq = expected(exact.dq, naive.dq, &M::dq),
          .dk = expected(exact.dk, naive.dk, &M::dk),
          .dv = expected(exact.dv, naive.dv, &M::dv),
          .dcentroids = expected(exact.dcentroids, naive.dcentroids, &M::dcentroids),
          .dgate = expected(exact.dgate, naive.dgate, &M::dgate),
          .dlogit_scale = expected(exact.dlogit_scale, naive.dlogit_scale, &M::dlogit_scale)};
}

void expect_forward(const cases::Problem& problem, const cases::Pass& run) {
  const Expected expected = expected_out(problem, run.result.saved);
  EXPECT_TRUE(follows_rule("out", run.result.out, expected));
  expect_zero_rows(run.result.out, expected.exact);
  expect_zero_padding("out", run.result.out, problem.inputs.q_sequences);
}

void expect_backward(const cases::Problem& problem, const cases::Pass& run) {
  expect_gradients(problem, run, expected_gradients(problem, run.result.saved));
}

void expect_gradients(const cases::Problem& problem, const cases::Pass& run,
                      const ExpectedGradients& expected) {
  const AttentionGradients& g = run.gradients;
  expect_gradient("dq", g.dq, expected.dq);
  expect_gradient("dk", g.dk, expected.dk);
  expect_gradient("dv", g.dv, expected.dv);
  expect_gradient("dcentroids", g.dcentroids, expected.dcentroids);
  expect_gradient("dgate", g.dgate, expected.dgate);
  expect_gradient("dlogit_scale", g.dlogit_scale, expected.dlogit_scale);
  expect_zero_padding("dq", g.dq, problem.inputs.q_sequences);
  expect_zero_padding("dk", g.dk, problem.inputs.k_sequences);
  expect_zero_padding("dv", g.dv, problem.inputs.k_sequences);
}

namespace {

// The tensor of `storage` that contains the view.
const HostTensor& owner(const std::vector<HostTensor>& storage, const TensorView& view) {
  for (const HostTensor& tensor : storage) {
    const char* begin = static_cast<const char*>(tensor.view().data);
    const char* end = begin + tensor.view().count() * dtype_bytes(tensor.view().dtype);
    if (begin <= view.data && view.data < end) return tensor;
  }
  throw std::logic_error("a view without an owner");
}

// Sets all elements of the view to NaN in a copy of its owner; all of the copy must then be NaN.
void expect_gaps_untouched(const std::string& name, const HostTensor& tensor,
                           const TensorView& view) {
  HostTensor copy = tensor;
  TensorView inside = view;
  inside.data = static_cast<char*>(copy.view().data) +
                (static_cast<char*>(view.data) - static_cast<char*>(tensor.view().data));
  fill(inside, [](std::int64_t) { return std::nan(""); });
  for (double value : read_values(copy)) {
    ASSERT_TRUE(std::isnan(value)) << name << " was written outside of its view";
  }
}

void expect_tensor_written(const std::string& name, const TensorView& view) {
  constexpr double kPoisonedInt = 0x7F7F7F7F;
  std::size_t index = 0;
  for (double value : read_values(view)) {
    ASSERT_TRUE(is_floating(view.dtype) ? !std::isnan(value) : value != kPoisonedInt)
        << name << " " << describe(view) << " was not written at element " << index;
    ++index;
  }
}

}  // namespace

void expect_written(const cases::Pass& run, bool with_gradients) {
  for (std::size_t s = 0; s < run.result.saved.size(); ++s) {
    expect_tensor_written("saved " + std::to_string(s), run.result.saved[s]);
  }
  const AttentionGradients& g = run.gradients;
  std::vector<TensorView> views = {run.result.out};
  if (with_gradients) {
    for (const TensorView& view : {g.dq, g.dk, g.dv, g.dcentroids, g.dgate, g.dlogit_scale}) {
      if (view.present()) views.push_back(view);
    }
  }
  for (const TensorView& view : views) {
    if (view.count() == 0) continue;
    expect_tensor_written("out or gradient", view);
    expect_gaps_untouched("out or gradient", owner(run.storage, view), view);
  }
}

::testing::AssertionResult same_bits(const TensorView& a, const TensorView& b) {
  if (describe(a) != describe(b)) {
    return ::testing::AssertionFailure() << describe(a) << " and " << describe(b);
  }
  if (!a.present()) return ::testing::AssertionSuccess();
  // Compared as bits: NaN equals itself, and 0 differs from -0.
  const std::vector<double> left = read_values(a), right = read_values(b);
  for (std::size_t i = 0; i < left.size(); ++i) {
    if (std::memcmp(&left[i], &right[i], sizeof(double)) != 0) {
      return ::testing::AssertionFailure()
             << describe(a) << " differ at element " << i << ": " << left[i] << " and " << right[i]
             << ", by " << left[i] - right[i];
    }
  }
  return ::testing::AssertionSuccess();
}

}  // namespace coterie::test
