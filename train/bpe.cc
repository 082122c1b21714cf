// SPDX-License-Identifier: MIT
#include "train/bpe.h"

#include <fmt/core.h>

#include <algorithm>
#include <functional>
#include <limits>

#include "coterie/error.h"
#include "train/unicode.h"

namespace coterie::train {
namespace {

std::uint64_t key_of(std::int32_t left, std::int32_t right) {
  return static_cast<std::uint64_t>(left) << 32 | static_cast<std::uint32_t>(right);
}

// The end of the run of characters of one class.
std::size_t run_end(std::string_view text, std::size_t at, CharClass kind) {
  while (at < text.size()) {
    const Character character = character_at(text, at);
    if (character.kind != kind) return at;
    at += character.bytes;
  }
  return at;
}

std::size_t contraction_bytes(std::string_view text) {
  for (const std::string_view ending : {"'s", "'t", "'re", "'ve", "'m", "'ll", "'d"}) {
    if (text.starts_with(ending)) return ending.size();
  }
  return 0;
}

// White space goes with the following word only as a single ' ': the last character of a longer run
// begins the next word.
std::size_t space_end(std::string_view text, std::size_t begin) {
  std::size_t last = begin, end = begin;
  while (end < text.size()) {
    const Character character = character_at(text, end);
    if (character.kind != CharClass::space) return last == begin ? end : last;
    last = end;
    end += character.bytes;
  }
  return end;
}

}  // namespace

std::size_t next_word(std::string_view text, std::size_t begin) {
  const std::size_t contraction = contraction_bytes(text.substr(begin, 3));
  if (contraction > 0) return begin + contraction;
  const std::size_t first = text[begin] == ' ' ? begin + 1 : begin;
  if (first == text.size()) return first;
  const Character character = character_at(text, first);
  if (character.kind == CharClass::space) return space_end(text, begin);
  return run_end(text, first + character.bytes, character.kind);
}

// Encodes the words of one text, each only once.
class BpeTokenizer::Encoder {
 public:
  Encoder(const BpeTokenizer& tokenizer, std::vector<std::int32_t>& ids)
      : tokenizer_(tokenizer), ids_(ids) {}

  void add_words(std::string_view text) {
    for (std::size_t begin = 0; begin < text.size();) {
      const std::size_t end = next_word(text, begin);
      add_word(text.substr(begin, end - begin));
      begin = end;
    }
  }

 private:
  struct Symbol {
    std::int32_t id, previous, next;  // places in symbols_, -1 at the ends; id -1: merged away
  };
  struct Candidate {
    std::int32_t rank, place, id;
    bool operator>(const Candidate& other) const {
      return rank != other.rank ? rank > other.rank : place > other.place;
    }
  };
  struct Range {
    std::size_t begin, count;  // in ids_
  };

  void add_word(std::string_view word) {
    const auto [found, unknown] = known_.try_emplace(word, Range{ids_.size(), 0});
    if (unknown) {
      merge_word(word);
      found->second.count = ids_.size() - found->second.begin;
      return;
    }
    for (std::size_t i = 0; i < found->second.count; ++i) {
      ids_.push_back(ids_[found->second.begin + i]);
    }
  }

  void merge_word(std::string_view word) {
    const auto whole = tokenizer_.words_.find(word);
    if (whole != tokenizer_.words_.end()) return ids_.push_back(whole->second);
    if (word.size() > std::numeric_limits<std::int32_t>::max()) {
      throw Error(
          fmt::format("[bpe] expected words below 2 GiB; got one of {} bytes", word.size()));
    }
    symbols_.clear();
    for (const char byte : word) {
      const auto place = static_cast<std::int32_t>(symbols_.size());
      symbols_.push_back(
          {tokenizer_.byte_ids_[static_cast<unsigned char>(byte)], place - 1, place + 1});
    }
    symbols_.back().next = -1;
    for (std::int32_t place = 0; place >= 0; place = at(place).next) propose(place);
    while (!candidates_.empty()) {
      std::pop_heap(candidates_.begin(), candidates_.end(), std::greater<>());
      const Candidate best = candidates_.back();
      candidates_.pop_back();
      apply(best);
    }
    for (std::int32_t place = 0; place >= 0; place = at(place).next) {
      ids_.push_back(at(place).id);
    }
  }

  Symbol& at(std::int32_t place) { return symbols_[static_cast<std::size_t>(place)]; }

  // The merge of the symbol at `place` with the next one; null if there is none.
  const Merge* merge_at(std::int32_t place) {
    const Symbol& left = at(place);
    return left.id < 0 || left.next < 0 ? nullptr : tokenizer_.merge_of(left.id, at(left.next).id);
  }

  void propose(std::int32_t place) {
    const Merge* const merge = merge_at(place);
    if (merge == nullptr) return;
    candidates_.push_back({merge->rank, place, merge->id});
    std::push_heap(candidates_.begin(), candidates_.end(), std::greater<>());
  }

  void apply(const Candidate& candidate) {
    const Merge* const merge = merge_at(candidate.place);
    if (merge == nullptr || merge->id != candidate.id) return;  // one of its symbols was merged
    Symbol& left = at(candidate.place);
    Symbol& right = at(left.next);
    left.id = merge->id;
    left.next = right.next;
    right.id = -1;
    if (left.next >= 0) at(left.next).previous = candidate.place;
    if (left.previous >= 0) propose(left.previous);
    propose(candidate.place);
  }

  const BpeTokenizer& tokenizer_;
  std::vector<std::int32_t>& ids_;
  std::unordered_map<std::string_view, Range> known_;
  std::vector<Symbol> symbols_;
  std::vector<Candidate> candidates_;  // a heap, the lowest rank first, then the leftmost
};

BpeTokenizer::BpeTokenizer(BpeModel model, const std::string& name) : model_(std::move(model)) {
  character_at(" ", 0);  // throws in a build without ICU
  const auto count = static_cast<std::int64_t>(model_.tokens.size());
  std::unordered_map<std::string_view, std::int32_t> ids;
  byte_ids_.fill(-1);
  for (std::int32_t id = 0; id < count; ++id) {
    const std::string& token = model_.tokens[static_cast<std::size_t>(id)];
    if (token.empty() || !ids.emplace(token, id).second) {
      throw Error(
          fmt::format("[bpe] {}: expected tokens that are not empty and differ; got \"{}\" "
                      "as token {}",
                      name, token, id));
    }
    if (token.size() == 1) byte_ids_[static_cast<unsigned char>(token[0])] = id;
  }
  for (std::size_t byte = 0; byte < byte_ids_.size(); ++byte) {
    if (byte_ids_[byte] >= 0) continue;
    throw Error(
        fmt::format("[bpe] {}: expected a token for every byte; byte {:#04x} has none (is "
                    "it a byte-level tokenizer?)",
                    name, byte));
  }
  for (std::size_t rank = 0; rank < model_.merges.size(); ++rank) {
    const auto& [left, right] = model_.merges[rank];
    const std::string merged = model_.tokens.at(static_cast<std::size_t>(left)) +
                               model_.tokens.at(static_cast<std::size_t>(right));
    const auto found = ids.find(merged);
    if (found == ids.end()) {
      throw Error(
          fmt::format("[bpe] {}: merge {} gives \"{}\", which is not a token", name, rank, merged));
    }
    merges_[key_of(left, right)] = {static_cast<std::int32_t>(rank), found->second};
  }
  if (model_.whole_words) words_ = std::move(ids);
}

const BpeTokenizer::Merge* BpeTokenizer::merge_of(std::int32_t left, std::int32_t right) const {
  const auto found = merges_.find(key_of(left, right));
  return found == merges_.end() ? nullptr : &found->second;
}

std::vector<std::int32_t> BpeTokenizer::encode(std::string_view text) const {
  std::vector<std::int32_t> ids;
  Encoder encoder(*this, ids);
  // The next place of each added token; the first of them, the longest among equals, ends a part.
  std::vector<std::size_t> places(model_.added.size(), 0);
  for (std::size_t begin = 0; begin < text.size();) {
    std::size_t end = text.size(), length = 0;
    std::int32_t token = -1;
    for (std::size_t i = 0; i < places.size(); ++i) {
      const std::string& added = model_.tokens[static_cast<std::size_t>(model_.added[i])];
      if (places[i] < begin || begin == 0)
        places[i] = std::min(text.find(added, begin), text.size());
      if (places[i] < end || (places[i] == end && end < text.size() && added.size() > length)) {
        end = places[i];
        length = added.size();
        token = model_.added[i];
      }
    }
    encoder.add_words(text.substr(begin, end - begin));
    if (token >= 0) ids.push_back(token);
    begin = end + length;
  }
  return ids;
}

std::string BpeTokenizer::decode(const std::vector<std::int32_t>& ids) const {
  std::string text;
  for (const std::int32_t id : ids) text += token(id);
  return text;
}

const std::string& BpeTokenizer::token(std::int64_t id) const {
  if (id < 0 || id >= vocabulary()) {
    throw Error(fmt::format("[bpe] expected tokens from 0 to {}; got {}", vocabulary() - 1, id));
  }
  return model_.tokens[static_cast<std::size_t>(id)];
}

}  // namespace coterie::train
