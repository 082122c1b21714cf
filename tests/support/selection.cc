// SPDX-License-Identifier: MIT
#include <algorithm>
#include <cmath>
#include <iterator>
#include <set>
#include <string>
#include <variant>

#include "coterie/random.h"
#include "ref/ref.h"
#include "tests/support/expect.h"

namespace coterie::test {
namespace {

// The part of a selection that forms one decision: a label or a whole list.
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

// The inputs in double, every element multiplied by a factor within 1 +- bound.
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

// Bound on the relative error of the longest sum in a selection.
double rounding_bound(const AttentionInputs& inputs) {
  const double unit_roundoff = ulp(accumulator_dtype(inputs.q.dtype), 1.0) / 2.0;
  const auto terms = inputs.q.size(3) + std::max(inputs.q.size(2), inputs.v.size(2));
  return static_cast<double>(terms) * unit_roundoff;
}

// Scores of all keys of an item for one row of top_keys, by the definition: of a query, or of the
// mean of a cluster's queries. Also the largest sum of absolute terms.
struct Scores {
  std::vector<double> values;
  double magnitude = 0.0;

  Scores(const TensorView& query_sum, double count, const TensorView& keys) {
    const std::vector<double> q = read_values(query_sum), k = read_values(keys);
    for (std::size_t first = 0; first < k.size(); first += q.size()) {
      double sum = 0.0, absolute = 0.0;
      for (std::size_t d = 0; d < q.size(); ++d) {
        sum += q[d] / count * k[first + d];
        absolute += std::abs(q[d] / count * k[first + d]);
      }
      values.push_back(sum);
      magnitude = std::max(magnitude, absolute);
    }
  }
};

struct Span {
  std::int64_t batch, begin, length;
};

Span span_of(const Sequences& sequences, std::int64_t item, std::int64_t rows) {
  if (!sequences.cu_seqlens.present()) return {item, 0, cases::used_rows(sequences, item, rows)};
  const std::vector<double> cu = read_values(sequences.cu_seqlens);
  return {0, static_cast<std::int64_t>(cu[item]),
          static_cast<std::int64_t>(cu[item + 1] - cu[item])};
}

TensorView rows_of(const TensorView& tensor, const Span& span, std::int64_t head) {
  return tensor.narrowed(0, span.batch, 1)
      .narrowed(1, head, 1)
      .narrowed(2, span.begin, span.length);
}

// The scores for one row of oracle-top's (B, H, N, k) or i-clustered's (items, H, C, k) top keys.
Scores scores_of(const cases::Problem& problem, const cases::Pass& run, const TensorView& top_keys,
                 std::int64_t row) {
  const AttentionInputs& in = problem.inputs;
  const std::int64_t index = row % top_keys.size(2), heads = top_keys.size(1);
  const std::int64_t head = row / top_keys.size(2) % heads, first = row / top_keys.size(2) / heads;
  const std::int64_t kv = head / (heads / in.k.size(1));
  if (std::holds_alternative<OracleTopParams>(problem.mechanism)) {
    // Row `index` of batch entry `first`; find its item.
    std::int64_t item = first;
    if (in.q_sequences.cu_seqlens.present()) {
      const std::vector<double> cu = read_values(in.q_sequences.cu_seqlens);
      item = std::upper_bound(cu.begin(), cu.end(), static_cast<double>(index)) - cu.begin() - 1;
    }
    const TensorView query = in.q.narrowed(0, first, 1).narrowed(1, head, 1).narrowed(2, index, 1);
    return {query, 1.0, rows_of(in.k, span_of(in.k_sequences, item, in.k.size(2)), kv)};
  }
  const Span span = span_of(in.q_sequences, first, in.q.size(2));
  const std::vector<double> labels = read_values(rows_of(run.result.saved[0], span, head));
  const std::vector<double> q = read_values(rows_of(in.q, span, head));
  const std::int64_t dim = in.q.size(3);
  HostTensor sum(DType::f64, {dim});
  double members = 0.0;
  for (std::size_t i = 0; i < labels.size(); ++i) {
    if (labels[i] != static_cast<double>(index)) continue;
    ++members;
    for (std::int64_t d = 0; d < dim; ++d) {
      sum.data<double>()[d] += q[i * static_cast<std::size_t>(dim) + static_cast<std::size_t>(d)];
    }
  }
  return {sum, members, rows_of(in.k, span_of(in.k_sequences, first, in.k.size(2)), kv)};
}

// Lists of the same length; where they differ, the scores differ by no more than rounding.
bool equally_good(const Scores& scores, const std::vector<double>& a, const std::vector<double>& b,
                  double bound) {
  std::vector<double> only_a, only_b;
  std::set_difference(a.begin(), a.end(), b.begin(), b.end(), std::back_inserter(only_a));
  std::set_difference(b.begin(), b.end(), a.begin(), a.end(), std::back_inserter(only_b));
  if (only_a.size() != only_b.size()) return false;
  for (double i : only_a)
    for (double j : only_b) {
      if (i < 0.0 || i >= static_cast<double>(scores.values.size())) return false;
      const double difference =
          scores.values[static_cast<std::size_t>(i)] - scores.values[static_cast<std::size_t>(j)];
      if (std::abs(difference) > 2.0 * bound * scores.magnitude) return false;
    }
  return true;
}

std::vector<double> list_of(const Selection& selection, const Row& row) {
  const auto begin = selection[row.tensor].begin() + static_cast<std::ptrdiff_t>(row.first);
  std::vector<double> list(begin, begin + static_cast<std::ptrdiff_t>(row.width));
  std::erase(list, -1.0);
  return list;
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
  std::erase_if(open, [&](const Row& row) {
    if (exact || layout.tensors[row.tensor].name != "top_keys") return false;
    const TensorView& top_keys = run.result.saved[row.tensor];
    return equally_good(
        scores_of(problem, run, top_keys, static_cast<std::int64_t>(row.first / row.width)),
        list_of(actual, row), list_of(expected, row), bound);
  });
  constexpr std::uint64_t kTrials = 64;
  for (std::uint64_t trial = 0; !exact && !open.empty() && trial < kTrials; ++trial) {
    const MovedInputs moved(problem.inputs, bound, trial);
    // In float too, because scores may round to the same number there.
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
