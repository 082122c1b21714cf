// SPDX-License-Identifier: MIT
#include "coterie/near_miss.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <utility>

namespace coterie {
namespace {

// Edits (insert, delete, replace a character, swap two neighbours) that turn a into b.
std::size_t edit_distance(std::string_view a, std::string_view b) {
  // Of the first i and i - 1 characters of a to the first j of b, then of the first i + 1.
  std::vector<std::size_t> row(b.size() + 1), before, next;
  std::iota(row.begin(), row.end(), std::size_t{0});
  for (std::size_t i = 0; i < a.size(); ++i) {
    next.assign(1, i + 1);
    for (std::size_t j = 0; j < b.size(); ++j) {
      next.push_back(std::min({next[j] + 1, row[j + 1] + 1, row[j] + (a[i] == b[j] ? 0 : 1)}));
      const bool swapped = i > 0 && j > 0 && a[i] == b[j - 1] && a[i - 1] == b[j];
      if (swapped) next.back() = std::min(next.back(), before[j - 1] + 1);
    }
    before = std::exchange(row, std::move(next));
  }
  return row[b.size()];
}

}  // namespace

std::string near_miss(std::string_view text, const std::vector<std::string>& names) {
  std::string best;
  std::size_t best_distance = std::numeric_limits<std::size_t>::max();
  for (const std::string& name : names) {
    // Long texts are not typos, and the distance takes quadratic time.
    if (text.size() > 2 * name.size()) continue;
    const std::size_t distance = edit_distance(text, name);
    if (distance > std::max<std::size_t>(1, name.size() / 3) || distance >= best_distance) continue;
    best = name;
    best_distance = distance;
  }
  return best.empty() ? "" : "; did you mean \"" + best + "\"?";
}

}  // namespace coterie
