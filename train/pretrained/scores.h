// SPDX-License-Identifier: MIT
// Scores of tasks, and how far they vary over samples of the same size.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

namespace coterie::train {

// Correlations of x and y, 0 if one is constant. spearman: of ranks, equal values share theirs.
double pearson(std::span<const double> x, std::span<const double> y);
double spearman(std::span<const double> x, std::span<const double> y);

// Counts of the binary answers `found` to questions with the answers `right`.
struct BinaryCounts {
  std::int64_t true_positive = 0, true_negative = 0, false_positive = 0, false_negative = 0;

  void add(bool found, bool right);
  double accuracy() const;
  double matthews() const;  // correlation coefficient; 0 if a class was never found or is empty
  double f1() const;
};

struct Interval {
  double value = 0, low = 0, high = 0;
};

// Values of all scores for a sample of units, which may repeat.
using ScoreSample = std::function<std::vector<double>(const std::vector<std::size_t>& units)>;

// The scores on all units and the 2.5 % and 97.5 % points of `draws` bootstrap samples (Efron
// 1979), which are functions of the seed and the number of units.
std::vector<Interval> bootstrap(const ScoreSample& scores, std::size_t units, std::int64_t draws,
                                std::uint64_t seed);

// SQuAD's rules (Rajpurkar et al. 2016): answers are compared in lower case, without ASCII
// punctuation, the words a, an and the, and surplus white space.
std::string squad_normalised(const std::string& answer);
// 1 if the answer equals a reference, and the largest F1 of words against a reference.
double squad_exact(const std::string& answer, const std::vector<std::string>& references);
double squad_f1(const std::string& answer, const std::vector<std::string>& references);

}  // namespace coterie::train
