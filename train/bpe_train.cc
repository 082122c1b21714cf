// SPDX-License-Identifier: MIT
// Learning merges. The distinct words of the text are lists of symbols in one array; every pair of
// adjacent symbols has a count (weighted by how often its word occurs) and a list of places. A heap
// has the pairs by count. Merging a pair changes only the pairs around its places.
#include <fmt/core.h>

#include <algorithm>
#include <limits>
#include <numeric>
#include <queue>
#include <unordered_map>

#include "coterie/error.h"
#include "train/bpe.h"
#include "train/bpe_bytes.h"

namespace coterie::train {
namespace {

constexpr std::int32_t kNone = -1;

struct Symbol {
  std::int32_t id = kNone;                      // kNone: merged into the previous one
  std::int32_t previous = kNone, next = kNone;  // of the same word
  std::int32_t word = 0;
};

struct Pair {
  std::int32_t left = 0, right = 0;
  bool operator==(const Pair&) const = default;
  auto operator<=>(const Pair&) const = default;
};
struct HashPair {
  std::size_t operator()(const Pair& pair) const {
    constexpr std::uint64_t kMix = 0x9e3779b97f4a7c15;  // 2^64 / golden ratio
    const auto both =
        static_cast<std::uint64_t>(pair.left) << 32 | static_cast<std::uint32_t>(pair.right);
    return static_cast<std::size_t>((both * kMix) >> 16);
  }
};

struct PairFacts {
  std::int64_t count = 0;
  std::vector<std::int32_t> places{};  // of the left symbol; some may be outdated
};

struct Entry {
  std::int64_t count = 0;
  Pair pair;
  bool operator<(const Entry& other) const {  // the largest is at the top
    return count != other.count ? count < other.count : pair > other.pair;
  }
};

class Trainer {
 public:
  explicit Trainer(std::string_view text) {
    std::unordered_map<std::string_view, std::int32_t> words;
    for (std::size_t begin = 0; begin < text.size();) {
      const std::size_t end = next_word(text, begin);
      const std::string_view word = text.substr(begin, end - begin);
      const auto [found, unknown] =
          words.try_emplace(word, static_cast<std::int32_t>(counts_.size()));
      if (unknown) add_word(word);
      ++counts_[static_cast<std::size_t>(found->second)];
      begin = end;
    }
    for (std::size_t i = 0; i < symbols_.size(); ++i) {
      const auto place = static_cast<std::int32_t>(i);
      if (symbols_[i].next != kNone) add_pair(place);
    }
    for (const auto& [pair, facts] : pairs_) heap_.push({facts.count, pair});
  }

  // The most frequent pair; a count of 0 if there is none.
  Entry best() {
    while (!heap_.empty()) {
      const Entry top = heap_.top();
      heap_.pop();
      const std::int64_t count = pairs_[top.pair].count;
      if (count == top.count) return top;
      if (count > 0) heap_.push({count, top.pair});  // it was outdated
    }
    return {};
  }

  void merge(const Pair& pair, std::int32_t id) {
    std::vector<std::int32_t> places = std::move(pairs_[pair].places);
    pairs_.erase(pair);
    std::sort(places.begin(), places.end());  // from left to right: "aaa" is (aa)(a)
    changed_.clear();
    for (const std::int32_t place : places) {
      Symbol& left = at(place);
      if (left.id != pair.left || left.next == kNone || at(left.next).id != pair.right) continue;
      replace(place, id);
    }
    std::sort(changed_.begin(), changed_.end());
    changed_.erase(std::unique(changed_.begin(), changed_.end()), changed_.end());
    for (const Pair& other : changed_) heap_.push({pairs_[other].count, other});
  }

 private:
  Symbol& at(std::int32_t place) { return symbols_[static_cast<std::size_t>(place)]; }
  std::int64_t count_of(const Symbol& symbol) const {
    return counts_[static_cast<std::size_t>(symbol.word)];
  }
  Pair pair_at(std::int32_t place) { return {at(place).id, at(at(place).next).id}; }

  void add_word(std::string_view word) {
    if (symbols_.size() + word.size() > std::numeric_limits<std::int32_t>::max()) {
      throw Error(
          "[bpe] expected at most 2 GiB of distinct words to learn merges from; got more (lower "
          "--data-limit, or load a tokenizer)");
    }
    const auto first = static_cast<std::int32_t>(symbols_.size());
    for (const char byte : word) {
      const auto place = static_cast<std::int32_t>(symbols_.size());
      symbols_.push_back({.id = first_id(static_cast<unsigned char>(byte)),
                          .previous = place == first ? kNone : place - 1,
                          .next = place + 1,
                          .word = static_cast<std::int32_t>(counts_.size())});
    }
    symbols_.back().next = kNone;
    counts_.push_back(0);
  }

  void add_pair(std::int32_t place) {
    PairFacts& facts = pairs_[pair_at(place)];
    facts.count += count_of(at(place));
    facts.places.push_back(place);
  }

  void remove_pair(std::int32_t place) {
    const auto found = pairs_.find(pair_at(place));
    if (found != pairs_.end()) found->second.count -= count_of(at(place));
  }

  // The symbol at `place` takes the next one in and gets a new id.
  void replace(std::int32_t place, std::int32_t id) {
    Symbol& left = at(place);
    Symbol& right = at(left.next);
    if (left.previous != kNone) remove_pair(left.previous);
    if (right.next != kNone) remove_pair(left.next);
    left.id = id;
    right.id = kNone;
    left.next = right.next;
    if (left.next != kNone) at(left.next).previous = place;
    for (const std::int32_t changed : {left.previous, place}) {
      if (changed == kNone || at(changed).next == kNone) continue;
      add_pair(changed);
      changed_.push_back(pair_at(changed));
    }
  }

  std::vector<Symbol> symbols_;
  std::vector<std::int64_t> counts_;  // of words
  std::unordered_map<Pair, PairFacts, HashPair> pairs_;
  std::priority_queue<Entry> heap_;
  std::vector<Pair> changed_;
};

}  // namespace

BpeTokenizer BpeTokenizer::train(std::string_view text, std::int64_t vocabulary) {
  constexpr std::int64_t kMost = 1 << 24;
  if (vocabulary < kBytes || vocabulary > kMost) {
    throw Error(fmt::format("[bpe] expected a vocabulary of {} (all bytes) to {} tokens; got {}",
                            kBytes, kMost, vocabulary));
  }
  BpeModel model;
  model.tokens.resize(kBytes);
  for (int byte = 0; byte < kBytes; ++byte) {
    const auto character = static_cast<unsigned char>(byte);
    model.tokens[static_cast<std::size_t>(first_id(character))] = static_cast<char>(character);
  }
  Trainer trainer(text);
  while (static_cast<std::int64_t>(model.tokens.size()) < vocabulary) {
    const Entry best = trainer.best();
    if (best.count < 2) break;
    const auto& [left, right] = best.pair;
    trainer.merge(best.pair, static_cast<std::int32_t>(model.tokens.size()));
    model.merges.emplace_back(left, right);
    model.tokens.push_back(model.tokens[static_cast<std::size_t>(left)] +
                           model.tokens[static_cast<std::size_t>(right)]);
  }
  return BpeTokenizer(std::move(model), "the learnt tokenizer");
}

BpeTokenizer BpeTokenizer::bytes() {
  BpeModel model;
  for (int byte = 0; byte < kBytes; ++byte) model.tokens.emplace_back(1, static_cast<char>(byte));
  return BpeTokenizer(std::move(model), "the bytes");
}

}  // namespace coterie::train
