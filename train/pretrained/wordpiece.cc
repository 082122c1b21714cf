// SPDX-License-Identifier: MIT
#include "train/pretrained/wordpiece.h"

#include <algorithm>

#include "coterie/error.h"
#include "train/unicode.h"

namespace coterie::train {
namespace {

// Ranges of CJK ideographs that BERT's tokenizer sets apart; Hangul and kana are not among them.
bool is_cjk(char32_t c) {
  constexpr std::pair<char32_t, char32_t> kRanges[] = {
      {0x4E00, 0x9FFF},   {0x3400, 0x4DBF},   {0x20000, 0x2A6DF}, {0x2A700, 0x2B73F},
      {0x2B740, 0x2B81F}, {0x2B920, 0x2CEAF}, {0xF900, 0xFAFF},   {0x2F800, 0x2FA1F}};
  return std::any_of(std::begin(kRanges), std::end(kRanges),
                     [c](const auto& range) { return c >= range.first && c <= range.second; });
}

bool is_ascii_punctuation(char32_t c) {
  return (c >= 33 && c <= 47) || (c >= 58 && c <= 64) || (c >= 91 && c <= 96) ||
         (c >= 123 && c <= 126);
}

bool is_line_space(char32_t c) { return c == '\t' || c == '\n' || c == '\r'; }

std::int32_t required(const WordPieceModel& model, const std::string& token,
                      const std::string& name) {
  if (const auto added = model.added.find(token); added != model.added.end()) return added->second;
  const auto found = model.vocabulary.find(token);
  if (found != model.vocabulary.end()) return found->second;
  throw Error("[wordpiece] " + name + ": expected the token " + token +
              " in the vocabulary; it is missing (is this the vocabulary of a BERT model?)");
}

}  // namespace

struct WordPieceTokenizer::Unit {
  char32_t value = 0;
  std::size_t begin = 0, end = 0;
};

WordPieceTokenizer::WordPieceTokenizer(WordPieceModel model, const std::string& name)
    : model_(std::move(model)),
      unknown_(required(model_, model_.unknown, name)),
      first_(required(model_, "[CLS]", name)),
      separator_(required(model_, "[SEP]", name)) {}

std::vector<WordPieceTokenizer::Unit> WordPieceTokenizer::normalised(std::string_view text,
                                                                     std::size_t offset) const {
  std::vector<Unit> units;
  for (std::size_t at = 0; at < text.size();) {
    const auto [value, bytes] = code_point_at(text, at);
    const std::size_t begin = offset + at, end = begin + bytes;
    at += bytes;
    char32_t c = value;
    if (model_.clean) {
      if (c == 0 || c == 0xFFFD || (!is_line_space(c) && is_control(c))) continue;
      if (is_line_space(c) || is_white_space(c)) c = ' ';
    }
    const bool apart = model_.separate_cjk && is_cjk(c);
    if (apart) units.push_back({' ', begin, begin});
    for (char32_t part : model_.strip_accents ? decomposed(c) : std::u32string{c}) {
      if (model_.strip_accents && is_nonspacing_mark(part)) continue;
      // The only character whose lower case has two.
      if (model_.lower_case && part == 0x130) {
        units.push_back({'i', begin, end});
        part = 0x307;
      }
      units.push_back({model_.lower_case ? lower_case(part) : part, begin, end});
    }
    if (apart) units.push_back({' ', end, end});
  }
  return units;
}

void WordPieceTokenizer::add_word(const std::vector<Unit>& word, std::vector<Piece>& pieces) const {
  const Piece unknown{unknown_, word.front().begin, word.back().end};
  if (word.size() > model_.longest_word) {
    pieces.push_back(unknown);
    return;
  }
  const std::size_t before = pieces.size();
  std::vector<std::size_t> ends;  // of the characters from `first` on, in bytes of `text`
  for (std::size_t first = 0; first < word.size();) {
    std::string text = first > 0 ? model_.prefix : "";
    ends.clear();
    for (std::size_t i = first; i < word.size(); ++i) {
      append_utf8(word[i].value, text);
      ends.push_back(text.size());
    }
    std::size_t count = ends.size();
    auto found = model_.vocabulary.end();
    for (; count > 0; --count) {
      text.resize(ends[count - 1]);
      found = model_.vocabulary.find(text);
      if (found != model_.vocabulary.end()) break;
    }
    if (count == 0) {
      pieces.resize(before);
      pieces.push_back(unknown);
      return;
    }
    pieces.push_back({found->second, word[first].begin, word[first + count - 1].end});
    first += count;
  }
}

void WordPieceTokenizer::add_plain(std::string_view text, std::size_t offset,
                                   std::vector<Piece>& pieces) const {
  std::vector<Unit> word;
  const auto finish = [&] {
    if (!word.empty()) add_word(word, pieces);
    word.clear();
  };
  for (const Unit& unit : normalised(text, offset)) {
    if (is_white_space(unit.value)) {
      finish();
    } else if (is_ascii_punctuation(unit.value) || is_punctuation(unit.value)) {
      finish();
      word = {unit};
      finish();
    } else {
      word.push_back(unit);
    }
  }
  finish();
}

std::vector<WordPieceTokenizer::Piece> WordPieceTokenizer::pieces(std::string_view text) const {
  std::vector<Piece> pieces;
  for (std::size_t at = 0; at < text.size();) {
    // The next added token: the first one, the longest of those that begin there.
    std::size_t place = text.size(), length = 0;
    std::int32_t token = 0;
    for (const auto& [content, id] : model_.added) {
      const std::size_t found = text.find(content, at);
      if (found == std::string_view::npos) continue;
      if (found < place || (found == place && content.size() > length)) {
        place = found;
        length = content.size();
        token = id;
      }
    }
    add_plain(text.substr(at, place - at), at, pieces);
    if (length == 0) break;
    pieces.push_back({token, place, place + length});
    at = place + length;
  }
  return pieces;
}

std::vector<std::int32_t> WordPieceTokenizer::encode(std::string_view text) const {
  std::vector<std::int32_t> tokens;
  for (const Piece& piece : pieces(text)) tokens.push_back(piece.token);
  return tokens;
}

EncodedText WordPieceTokenizer::single(std::string_view text, std::size_t longest) const {
  std::vector<std::int32_t> tokens = encode(text);
  tokens.resize(std::min(tokens.size(), std::max<std::size_t>(longest, 2) - 2));
  EncodedText out;
  out.tokens = {first_};
  out.tokens.insert(out.tokens.end(), tokens.begin(), tokens.end());
  out.tokens.push_back(separator_);
  out.types.assign(out.tokens.size(), 0);
  return out;
}

EncodedText WordPieceTokenizer::pair(std::string_view first, std::string_view second,
                                     std::size_t longest) const {
  if (second.empty()) return single(first, longest);  // as transformers
  std::vector<std::int32_t> a = encode(first), b = encode(second);
  const std::size_t budget = std::max<std::size_t>(longest, 3) - 3;
  if (a.size() + b.size() > budget) {
    std::vector<std::int32_t>&longer = a.size() > b.size() ? a : b, &other = &longer == &a ? b : a;
    const std::size_t half = budget / 2;
    if (other.size() > half) other.resize(half);
    longer.resize(budget - other.size());
  }
  EncodedText out;
  out.tokens = {first_};
  out.tokens.insert(out.tokens.end(), a.begin(), a.end());
  out.tokens.push_back(separator_);
  out.types.assign(out.tokens.size(), 0);
  out.tokens.insert(out.tokens.end(), b.begin(), b.end());
  out.tokens.push_back(separator_);
  out.types.resize(out.tokens.size(), 1);
  return out;
}

std::int32_t WordPieceTokenizer::id(const std::string& token) const {
  return required(model_, token, "tokenizer");
}

std::int64_t WordPieceTokenizer::vocabulary() const {
  std::int64_t size = 0;
  for (const auto& [token, id] : model_.vocabulary) size = std::max<std::int64_t>(size, id + 1);
  for (const auto& [token, id] : model_.added) size = std::max<std::int64_t>(size, id + 1);
  return size;
}

}  // namespace coterie::train
