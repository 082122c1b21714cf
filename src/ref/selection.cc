// SPDX-License-Identifier: MIT
#include "ref/selection.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

namespace coterie::ref {

namespace {

template <class T>
T rank_value(T score) {
  return std::isnan(score) ? -std::numeric_limits<T>::infinity() : score;
}

}  // namespace

template <class T>
std::vector<Index> top_of_row(const Matrix<T>& scores, Index row, std::vector<Index> candidates,
                              Index count) {
  std::sort(candidates.begin(), candidates.end(), [&](Index a, Index b) {
    const T score_a = rank_value(scores(row, a)), score_b = rank_value(scores(row, b));
    return score_a != score_b ? score_a > score_b : a < b;
  });
  candidates.resize(std::min(candidates.size(), static_cast<std::size_t>(count)));
  std::sort(candidates.begin(), candidates.end());
  return candidates;
}

template <class T>
Lists top_of_rows(const Matrix<T>& scores, Index count) {
  std::vector<Index> all(static_cast<std::size_t>(scores.cols));
  std::iota(all.begin(), all.end(), Index{0});
  Lists lists;
  for (Index row = 0; row < scores.rows; ++row)
    lists.push_back(top_of_row(scores, row, all, count));
  return lists;
}

template <class T>
std::vector<Index> best_of_rows(const Matrix<T>& scores) {
  std::vector<Index> labels;
  for (Index row = 0; row < scores.rows; ++row) {
    Index best = 0;
    for (Index c = 1; c < scores.cols; ++c)
      if (rank_value(scores(row, c)) > rank_value(scores(row, best))) best = c;
    labels.push_back(best);
  }
  return labels;
}

template <class T>
std::vector<Index> balanced_walk(const Matrix<T>& scores, Index capacity) {
  std::vector<Index> pairs(scores.values.size());  // token * clusters + cluster
  std::iota(pairs.begin(), pairs.end(), Index{0});
  std::stable_sort(pairs.begin(), pairs.end(), [&](Index a, Index b) {
    return rank_value(scores.values[a]) > rank_value(scores.values[b]);
  });
  std::vector<Index> labels(static_cast<std::size_t>(scores.rows), -1);
  std::vector<Index> taken(static_cast<std::size_t>(scores.cols), 0);
  for (Index pair : pairs) {
    const Index token = pair / scores.cols, cluster = pair % scores.cols;
    if (labels[token] >= 0 || taken[cluster] == capacity) continue;
    labels[token] = cluster;
    ++taken[cluster];
  }
  return labels;
}

Lists members_of(const std::vector<Index>& labels, Index clusters) {
  Lists members(static_cast<std::size_t>(clusters));
  for (std::size_t i = 0; i < labels.size(); ++i)
    if (labels[i] >= 0) members[labels[i]].push_back(static_cast<Index>(i));
  return members;
}

Runs runs_of(const Lists& lists) {
  Runs runs{.order = {}, .offsets = {0}};
  for (const std::vector<Index>& list : lists) {
    runs.order.insert(runs.order.end(), list.begin(), list.end());
    runs.offsets.push_back(static_cast<Index>(runs.order.size()));
  }
  return runs;
}

template <class T>
Matrix<T> means_of(const Matrix<T>& x, const std::vector<Index>& labels, Matrix<T> otherwise) {
  const Lists members = members_of(labels, otherwise.rows);
  for (Index c = 0; c < otherwise.rows; ++c) {
    if (members[c].empty()) continue;
    for (Index d = 0; d < x.cols; ++d) {
      T sum = 0;
      for (Index i : members[c]) sum += x(i, d);
      otherwise(c, d) = sum / static_cast<T>(members[c].size());
    }
  }
  return otherwise;
}

template std::vector<Index> top_of_row(const Matrix<float>&, Index, std::vector<Index>, Index);
template Lists top_of_rows(const Matrix<float>&, Index);
template std::vector<Index> best_of_rows(const Matrix<float>&);
template std::vector<Index> balanced_walk(const Matrix<float>&, Index);
template Matrix<float> means_of(const Matrix<float>&, const std::vector<Index>&, Matrix<float>);
template std::vector<Index> top_of_row(const Matrix<double>&, Index, std::vector<Index>, Index);
template Lists top_of_rows(const Matrix<double>&, Index);
template std::vector<Index> best_of_rows(const Matrix<double>&);
template std::vector<Index> balanced_walk(const Matrix<double>&, Index);
template Matrix<double> means_of(const Matrix<double>&, const std::vector<Index>&, Matrix<double>);

}  // namespace coterie::ref
