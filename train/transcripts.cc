// SPDX-License-Identifier: MIT
#include "train/transcripts.h"

#include <ATen/ops/argmax.h>

#include <cmath>
#include <limits>
#include <map>
#include <utility>

namespace coterie::train {
namespace {

constexpr double kNever = -std::numeric_limits<double>::infinity();

double log_sum(double a, double b) {
  const double larger = std::max(a, b);
  return larger == kNever ? kNever : larger + std::log1p(std::exp(std::min(a, b) - larger));
}

// Log-probabilities of the alignments of a prefix.
struct Prefix {
  double ends_blank = kNever, ends_symbol = kNever;

  double all() const { return log_sum(ends_blank, ends_symbol); }
};
using Prefixes = std::map<Symbols, Prefix>;

Symbols greedy(const at::Tensor& log_probabilities_TV) {
  const at::Tensor best = log_probabilities_TV.argmax(-1);
  const auto* const symbols = best.const_data_ptr<std::int64_t>();
  Symbols found;
  for (std::int64_t t = 0; t < best.numel(); ++t) {
    if (symbols[t] != 0 && (t == 0 || symbols[t] != symbols[t - 1])) found.push_back(symbols[t]);
  }
  return found;
}

// All prefixes after one more position.
Prefixes extended(const Prefixes& prefixes, const float* log_probabilities, std::int64_t classes) {
  Prefixes next;
  const auto add = [](double& sum, double part) { sum = log_sum(sum, part); };
  for (const auto& [symbols, prefix] : prefixes) {
    Prefix& same = next[symbols];
    add(same.ends_blank, prefix.all() + log_probabilities[0]);
    for (std::int64_t symbol = 1; symbol < classes; ++symbol) {
      const bool repeats = !symbols.empty() && symbols.back() == symbol;
      const double p = log_probabilities[symbol];
      if (repeats) add(same.ends_symbol, prefix.ends_symbol + p);
      Symbols longer = symbols;
      longer.push_back(symbol);
      add(next[std::move(longer)].ends_symbol, (repeats ? prefix.ends_blank : prefix.all()) + p);
    }
  }
  return next;
}

Prefixes most_likely(const Prefixes& prefixes, std::int64_t beam) {
  std::vector<std::pair<double, const Prefixes::value_type*>> order;
  for (const auto& item : prefixes) order.emplace_back(item.second.all(), &item);
  const auto kept = std::min(order.size(), static_cast<std::size_t>(beam));
  std::partial_sort(order.begin(), order.begin() + static_cast<std::ptrdiff_t>(kept), order.end(),
                    [](const auto& a, const auto& b) {
                      return a.first != b.first ? a.first > b.first
                                                : a.second->first < b.second->first;
                    });
  Prefixes best;
  for (std::size_t i = 0; i < kept; ++i) best.insert(*order[i].second);
  return best;
}

std::vector<Symbols> words_of(const Symbols& symbols, std::int64_t space) {
  std::vector<Symbols> words;
  Symbols word;
  for (const std::int64_t symbol : symbols) {
    if (symbol != space) {
      word.push_back(symbol);
    } else if (!word.empty()) {
      words.push_back(std::exchange(word, {}));
    }
  }
  if (!word.empty()) words.push_back(word);
  return words;
}

template <class T>
void add_errors(Score& score, const std::vector<T>& found, const std::vector<T>& wanted) {
  const auto count = static_cast<std::int64_t>(wanted.size());
  score.count += count;
  score.correct += count - edit_distance(found, wanted);
}

}  // namespace

Symbols decode_ctc(const at::Tensor& log_probabilities_TV, std::int64_t beam) {
  const at::Tensor rows = log_probabilities_TV.to(at::kFloat).contiguous();
  if (beam <= 1) return greedy(rows);
  const std::int64_t classes = rows.size(1);
  Prefixes prefixes = {{Symbols{}, Prefix{.ends_blank = 0}}};
  for (std::int64_t t = 0; t < rows.size(0); ++t) {
    const float* const row = rows.const_data_ptr<float>() + t * classes;
    prefixes = most_likely(extended(prefixes, row, classes), beam);
  }
  return most_likely(prefixes, 1).begin()->first;
}

Score score_transcripts(const torch_api::ModelImpl& model, const TranscriptAnswer& answer,
                        const at::Tensor& out, const Batch& batch, std::vector<Score>& strata) {
  Score score{.nats = model.nats(out, batch.targets, batch.lengths).item<double>()};
  const at::Tensor rows = out.to(at::kCPU), targets = batch.targets.to(at::kCPU).contiguous();
  const at::Tensor lengths = batch.lengths.to(at::kCPU);
  for (std::int64_t row = 0; row < rows.size(0); ++row) {
    const std::int64_t frames = lengths[row].item<std::int64_t>();
    const std::int64_t positions = (frames + answer.subsample - 1) / answer.subsample;
    const Symbols found = decode_ctc(rows[row].narrow(0, 0, positions), answer.beam);
    const std::int64_t* const begin = targets[row].const_data_ptr<std::int64_t>();
    const Symbols wanted(begin, std::find(begin, begin + targets.size(1), kIgnore));
    add_errors(score, found, wanted);
    if (!strata.empty()) {
      add_errors(strata[0], words_of(found, answer.space), words_of(wanted, answer.space));
    }
  }
  return score;
}

}  // namespace coterie::train
