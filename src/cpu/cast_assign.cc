// SPDX-License-Identifier: MIT
// CAST with every token in one cluster: pairs (token, cluster) are accepted by descending score,
// ties by lower token, then lower cluster, while token and cluster have room.
//
// Both sides rank each other by the same order of pairs, so this is the one stable matching, and
// deferred acceptance finds it without sorting N C pairs: tokens apply to their best cluster not
// yet tried, a full cluster drops its worst token for a better one, and whoever is left over tries
// on. A cluster takes at most `size` tokens, or ceil(tokens / C) if that is more, so that all find
// room.
#include <algorithm>
#include <cmath>

#include "core/parallel.h"
#include "cpu/cast_select.h"
#include "cpu/pass.h"

namespace coterie::cpu {

namespace {

template <class T>
class Assignment {
 public:
  Assignment(const CastScores<T>& scores, std::int32_t* members, std::int64_t width,
             CastSelectWorkspace<T>& workspace)
      : scores_(scores),
        members_(members),
        width_(width),
        workspace_(workspace),
        clusters_(scores.params.clusters),
        tokens_(scores.call.item(scores.item).q.length) {
    const std::int64_t fair = (tokens_ + clusters_ - 1) / clusters_;
    capacity_ = std::min(std::max(scores.params.size, fair), tokens_);
  }

  void run() {
    std::fill_n(workspace_.sizes, clusters_, 0);
    std::fill_n(workspace_.num_choices, tokens_, 0);
    for (std::int64_t t = 0; t < tokens_; ++t) workspace_.waiting[t] = static_cast<std::int32_t>(t);
    for (std::int64_t count = tokens_; count > 0;) {
      find_choices(count);
      count = place(count);
      std::swap(workspace_.waiting, workspace_.still_waiting);
    }
    for (std::int64_t c = 0; c < clusters_; ++c) {
      std::int32_t *row = members_ + c * width_, *end = row + workspace_.sizes[c];
      std::sort(row, end);
      std::fill(end, row + width_, -1);
    }
  }

 private:
  using Choice = CastChoice<T>;
  static constexpr std::int64_t kChoices = CastSelectWorkspace<T>::kChoices;

  static bool before(const Choice& a, const Choice& b) {
    return a.score > b.score || (a.score == b.score && a.cluster < b.cluster);
  }

  // The next choices of all waiting tokens: scores are made again, the same to the bit, for
  // clusters that come after the last one tried.
  void find_choices(std::int64_t count) {
    const RowList list{count, workspace_.waiting};
    parallel_for((count + kQueryTile - 1) / kQueryTile, [&](std::int64_t task, int worker) {
      const Range tokens{task * kQueryTile, std::min((task + 1) * kQueryTile, count)};
      Tiles<T>& tiles = workspace_.tiles[static_cast<std::size_t>(worker)];
      const std::int64_t rows = tokens.end - tokens.begin;
      Choice tried[kQueryTile];
      bool any_tried[kQueryTile];
      for (std::int64_t r = 0; r < rows; ++r) {
        const std::int32_t token = workspace_.waiting[tokens.begin + r];
        std::int32_t& num = workspace_.num_choices[token];
        any_tried[r] = num > 0;
        if (any_tried[r]) tried[r] = workspace_.choices[token * kChoices + num - 1];
        num = workspace_.next_choice[token] = 0;
      }
      for (std::int64_t begin = 0; begin < clusters_; begin += kKeyTile) {
        const Range clusters{begin, std::min(begin + kKeyTile, clusters_)};
        scores_.scores(list, tokens, clusters, tiles);
        for (std::int64_t r = 0; r < rows; ++r)
          for (std::int64_t c = clusters.begin; c < clusters.end; ++c) {
            const T score = tiles.s[r * kKeyTile + c - begin];
            const Choice choice{std::isnan(score) ? kNegInf<T> : score,
                                static_cast<std::int32_t>(c)};
            if (!any_tried[r] || before(tried[r], choice))
              keep(workspace_.waiting[tokens.begin + r], choice);
          }
      }
    });
  }

  // Keeps the best choices in order.
  void keep(std::int32_t token, const Choice& choice) {
    Choice* best = workspace_.choices + token * kChoices;
    std::int32_t& num = workspace_.num_choices[token];
    if (num == kChoices && !before(choice, best[num - 1])) return;
    std::int64_t at = num < kChoices ? num++ : num - 1;
    for (; at > 0 && before(choice, best[at - 1]); --at) best[at] = best[at - 1];
    best[at] = choice;
  }

  // Lets the waiting tokens apply; returns how many ran out of known choices.
  std::int64_t place(std::int64_t count) {
    std::int64_t left = 0;
    for (std::int64_t t = 0; t < count; ++t) {
      std::int32_t token = workspace_.waiting[t];
      while (token >= 0) {
        std::int32_t& next = workspace_.next_choice[token];
        // There is room for all, so a token cannot have tried every cluster.
        COTERIE_CHECK(workspace_.num_choices[token] > 0, "internal", "cast left a token out");
        if (next == workspace_.num_choices[token]) {
          workspace_.still_waiting[left++] = token;
          break;
        }
        const Choice& choice = workspace_.choices[token * kChoices + next++];
        token = apply(token, choice);
      }
    }
    return left;
  }

  // Returns the token that now has no cluster, -1 if none.
  std::int32_t apply(std::int32_t token, const Choice& choice) {
    const T* held = workspace_.held;
    // A heap with the worst token on top.
    const auto better = [held](std::int32_t a, std::int32_t b) {
      return held[a] > held[b] || (held[a] == held[b] && a < b);
    };
    std::int32_t& size = workspace_.sizes[choice.cluster];
    std::int32_t* row = members_ + choice.cluster * width_;
    workspace_.held[token] = choice.score;
    std::int32_t dropped = -1;
    if (size == capacity_) {
      if (!better(token, row[0])) return token;
      std::pop_heap(row, row + size, better);
      dropped = row[--size];
    }
    row[size++] = token;
    std::push_heap(row, row + size, better);
    return dropped;
  }

  const CastScores<T>& scores_;
  std::int32_t* members_;
  std::int64_t width_;
  CastSelectWorkspace<T>& workspace_;
  std::int64_t clusters_, tokens_, capacity_ = 0;
};

}  // namespace

template <class T>
void cast_assign(const CastScores<T>& scores, std::int32_t* members, std::int64_t width,
                 CastSelectWorkspace<T>& workspace) {
  Assignment<T>(scores, members, width, workspace).run();
}

template void cast_assign(const CastScores<float>&, std::int32_t*, std::int64_t,
                          CastSelectWorkspace<float>&);
template void cast_assign(const CastScores<double>&, std::int32_t*, std::int64_t,
                          CastSelectWorkspace<double>&);

}  // namespace coterie::cpu
