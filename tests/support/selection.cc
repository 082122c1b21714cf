// SPDX-License-Identifier: MIT
#include <algorithm>
#include <cmath>
#include <set>
#include <string>

#include "coterie/random.h"
#include "ref/ref.h"
#include "tests/support/expect.h"

namespace coterie::test {
namespace {

// The part of a selection that is one decision: a label, or a whole list.
struct Row {
  std::size_t tensor;
  std::size_t first, width;
  auto operator<=>(const Row&) const = default;
};

using Selection = std::vector<std::vector<double>>;

template <class T>
Selection specified(const Mechanism& mechanism, const AttentionInputs& inputs,
                    const SavedLayout& layout) {
  std::vector<HostTensor> storage;
  std::vector<TensorView> views;
  for (std::size_t s = 0; s < layout.tensors.size(); ++s) {
    cases::poison(storage.emplace_back(layout.tensors[s]));
    views.push_back(storage.back());
  }
  ref::select<T>(mechanism, inputs, views);
  Selection selection;
  for (std::size_t s = 0; s < layout.selection_count; ++s) {
    selection.push_back(read_values(views[s]));
  }
  return selection;
}

std::vector<Row> rows_of(const SavedLayout& layout) {
  std::vector<Row> rows;
  for (std::size_t s = 0; s < layout.selection_count; ++s) {
    const TensorLayout& tensor = layout.tensors[s];
    std::size_t count = 1;
    for (std::int64_t size : tensor.sizes) count *= static_cast<std::size_t>(size);
    const bool labels = tensor.name.find("labels") != std::string::npos;
    const std::size_t width = labels ? 1 : static_cast<std::size_t>(tensor.sizes.back());
    for (std::size_t first = 0; first < count; first += width) rows.push_back({s, first, width});
  }
  return rows;
}

bool same_row(const Selection& a, const Selection& b, const Row& row) {
  const auto begin = a[row.tensor].begin() + static_cast<std::ptrdiff_t>(row.first);
  return std::equal(begin, begin + static_cast<std::ptrdiff_t>(row.width),
                    b[row.tensor].begin() + static_cast<std::ptrdiff_t>(row.first));
}

std::string text_of(const Selection& selection, const Row& row) {
  std::string text;
  for (std::size_t t = 0; t < row.width; ++t) {
    text += std::to_string(static_cast<std::int64_t>(selection[row.tensor][row.first + t])) + " ";
  }
  return text;
}

// The inputs in double, every element moved by a factor within 1 +- bound.
class MovedInputs {
 public:
  MovedInputs(const AttentionInputs& inputs, double bound, std::uint64_t seed) : inputs_(inputs) {
    std::uint32_t number = 0;
    storage_.reserve(5);
    for (TensorView* view :
         {&inputs_.q, &inputs_.k, &inputs_.v, &inputs_.centroids, &inputs_.gate}) {
      const RandomStream stream{seed, RandomUse::data, 100 + number++};
      if (!view->present()) continue;
      const std::vector<double> values = read_values(*view);
      storage_.emplace_back(DType::f64,
                            std::vector<std::int64_t>(view->sizes, view->sizes + view->rank));
      *view = storage_.back();
      fill(*view, [&](std::int64_t i) {
        const double unit = random_unit(stream.at(static_cast<std::uint64_t>(i)).word[0]);
        return values[static_cast<std::size_t>(i)] * (1.0 + bound * (2.0 * unit - 1.0));
      });
    }
  }
  const AttentionInputs& inputs() const { return inputs_; }

 private:
  AttentionInputs inputs_;
  std::vector<HostTensor> storage_;
};

// Relative error that a sum of as many terms as the longest of a selection can have.
double rounding_bound(const AttentionInputs& inputs) {
  const double unit_roundoff = ulp(accumulator_dtype(inputs.q.dtype), 1.0) / 2.0;
  const auto terms = inputs.q.size(3) + std::max(inputs.q.size(2), inputs.v.size(2));
  return static_cast<double>(terms) * unit_roundoff;
}

}  // namespace

void expect_selection(const cases::Problem& problem, const cases::Pass& run, bool exact) {
  const SavedLayout layout = attention_saved(problem.mechanism, problem.inputs);
  Selection actual;
  for (std::size_t s = 0; s < layout.selection_count; ++s) {
    actual.push_back(read_values(run.result.saved[s]));
  }
  const Selection expected = specified<double>(problem.mechanism, problem.inputs, layout);
  std::set<Row> open;
  for (const Row& row : rows_of(layout)) {
    if (!same_row(actual, expected, row)) open.insert(row);
  }
  const double bound = rounding_bound(problem.inputs);
  constexpr std::uint64_t kTrials = 64;
  for (std::uint64_t trial = 0; !exact && !open.empty() && trial < kTrials; ++trial) {
    const MovedInputs moved(problem.inputs, bound, trial);
    // In float too, for scores that round to the same number there.
    for (const Selection& other : {specified<double>(problem.mechanism, moved.inputs(), layout),
                                   specified<float>(problem.mechanism, moved.inputs(), layout)}) {
      std::erase_if(open, [&](const Row& row) { return same_row(actual, other, row); });
    }
  }
  if (open.empty()) return;
  const Row& row = *open.begin();
  ADD_FAILURE() << open.size() << " selections differ from the specification, the first in "
                << layout.tensors[row.tensor].name << " at element " << row.first << ": "
                << text_of(actual, row) << "; expected " << text_of(expected, row);
}

}  // namespace coterie::test
