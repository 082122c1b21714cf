// SPDX-License-Identifier: MIT
#include "train/pretrained/scores.h"

#include <algorithm>
#include <cctype>
#include <cmath>
#include <map>
#include <numeric>
#include <sstream>

#include "coterie/error.h"
#include "coterie/random.h"

namespace coterie::train {
namespace {

// Ranks from 1; equal values have the mean of theirs.
std::vector<double> ranks(std::span<const double> x) {
  std::vector<std::size_t> order(x.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) { return x[a] < x[b]; });
  std::vector<double> rank(x.size());
  for (std::size_t first = 0, end = 0; first < order.size(); first = end) {
    while (end < order.size() && x[order[end]] == x[order[first]]) ++end;
    const double mean = 0.5 * static_cast<double>(first + 1 + end);
    for (std::size_t i = first; i < end; ++i) rank[order[i]] = mean;
  }
  return rank;
}

double ratio(double above, double below) { return below == 0 ? 0.0 : above / below; }

std::vector<std::string> words_of(const std::string& text) {
  std::istringstream stream(text);
  std::vector<std::string> words;
  for (std::string word; stream >> word;) words.push_back(word);
  return words;
}

double word_f1(const std::string& answer, const std::string& reference) {
  const std::vector<std::string> found = words_of(squad_normalised(answer)),
                                 wanted = words_of(squad_normalised(reference));
  std::map<std::string, std::int64_t> left;
  for (const std::string& word : wanted) ++left[word];
  std::int64_t common = 0;
  for (const std::string& word : found) {
    if (left[word]-- > 0) ++common;
  }
  return ratio(2.0 * static_cast<double>(common),
               static_cast<double>(found.size() + wanted.size()));
}

}  // namespace

double pearson(std::span<const double> x, std::span<const double> y) {
  if (x.size() != y.size()) throw Error("[internal] pearson of lists of different lengths");
  const auto count = static_cast<double>(std::max<std::size_t>(x.size(), 1));
  const double x_mean = std::accumulate(x.begin(), x.end(), 0.0) / count,
               y_mean = std::accumulate(y.begin(), y.end(), 0.0) / count;
  double xy = 0, xx = 0, yy = 0;
  for (std::size_t i = 0; i < x.size(); ++i) {
    const double dx = x[i] - x_mean, dy = y[i] - y_mean;
    xy += dx * dy;
    xx += dx * dx;
    yy += dy * dy;
  }
  return ratio(xy, std::sqrt(xx) * std::sqrt(yy));
}

double spearman(std::span<const double> x, std::span<const double> y) {
  return pearson(ranks(x), ranks(y));
}

void BinaryCounts::add(bool found, bool right) {
  ++(found ? (right ? true_positive : false_positive) : (right ? false_negative : true_negative));
}

double BinaryCounts::accuracy() const {
  return ratio(
      static_cast<double>(true_positive + true_negative),
      static_cast<double>(true_positive + true_negative + false_positive + false_negative));
}

double BinaryCounts::matthews() const {
  const auto tp = static_cast<double>(true_positive), tn = static_cast<double>(true_negative),
             fp = static_cast<double>(false_positive), fn = static_cast<double>(false_negative);
  return ratio(tp * tn - fp * fn, std::sqrt((tp + fp) * (tp + fn) * (tn + fp) * (tn + fn)));
}

double BinaryCounts::f1() const {
  return ratio(2.0 * static_cast<double>(true_positive),
               static_cast<double>(2 * true_positive + false_positive + false_negative));
}

std::vector<Interval> bootstrap(const ScoreSample& scores, std::size_t units, std::int64_t draws,
                                std::uint64_t seed) {
  std::vector<std::size_t> sample(units);
  std::iota(sample.begin(), sample.end(), std::size_t{0});
  std::vector<Interval> intervals;
  for (const double value : scores(sample)) intervals.push_back({value, value, value});
  if (draws < 1 || units == 0) return intervals;
  std::vector<std::vector<double>> drawn(intervals.size());
  for (std::int64_t draw = 0; draw < draws; ++draw) {
    const RandomStream stream{seed, RandomUse::sample, static_cast<std::uint32_t>(draw)};
    for (std::size_t i = 0; i < units; ++i) {
      sample[i] = random_below(stream, i, static_cast<std::uint32_t>(units));
    }
    const std::vector<double> values = scores(sample);
    for (std::size_t s = 0; s < values.size(); ++s) drawn[s].push_back(values[s]);
  }
  for (std::size_t s = 0; s < intervals.size(); ++s) {
    std::sort(drawn[s].begin(), drawn[s].end());
    const auto last = static_cast<double>(drawn[s].size() - 1);
    intervals[s].low = drawn[s][static_cast<std::size_t>(std::floor(0.025 * last))];
    intervals[s].high = drawn[s][static_cast<std::size_t>(std::ceil(0.975 * last))];
  }
  return intervals;
}

std::string squad_normalised(const std::string& answer) {
  std::string plain;
  for (const char c : answer) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte < 0x80 && std::ispunct(byte) != 0) continue;
    plain += byte < 0x80 ? static_cast<char>(std::tolower(byte)) : c;
  }
  std::string out;
  for (const std::string& word : words_of(plain)) {
    if (word == "a" || word == "an" || word == "the") continue;
    out += (out.empty() ? "" : " ") + word;
  }
  return out;
}

double squad_exact(const std::string& answer, const std::vector<std::string>& references) {
  const std::string found = squad_normalised(answer);
  return std::any_of(
             references.begin(), references.end(),
             [&](const std::string& reference) { return squad_normalised(reference) == found; })
             ? 1.0
             : 0.0;
}

double squad_f1(const std::string& answer, const std::vector<std::string>& references) {
  double best = 0;
  for (const std::string& reference : references) best = std::max(best, word_f1(answer, reference));
  return best;
}

}  // namespace coterie::train
