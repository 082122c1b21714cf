// SPDX-License-Identifier: MIT
// WordPiece (Wu et al. 2016) as BERT's tokenizer does it.
//
// Added tokens such as [MASK] are found first. The rest is normalised (control characters removed,
// CJK characters set apart, accents removed, lower case), cut at white space and around
// punctuation, and every word is cut into the longest tokens of the vocabulary from left to right;
// those that do not begin a word have the prefix "##". A word that cannot be cut is one unknown
// token.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

namespace coterie::train {

struct WordPieceModel {
  std::unordered_map<std::string, std::int32_t> vocabulary;
  std::map<std::string, std::int32_t> added;  // matched as they are, before normalisation
  std::string unknown = "[UNK]", prefix = "##";
  std::size_t longest_word = 100;  // in characters; longer words are unknown
  bool clean = true, separate_cjk = true, strip_accents = true, lower_case = true;
};

// Tokens of an input and the segment of each: 0, in the second text of a pair 1.
struct EncodedText {
  std::vector<std::int32_t> tokens, types;
};

class WordPieceTokenizer {
 public:
  // Throws Error unless the unknown token, [CLS] and [SEP] are in the vocabulary. Messages call the
  // model's origin `name`.
  WordPieceTokenizer(WordPieceModel model, const std::string& name);

  // A Hugging Face folder: tokenizer.json, or vocab.txt with the settings of tokenizer_config.json.
  // Throws Error naming what is wrong or not supported.
  static WordPieceTokenizer load(const std::string& folder);

  std::vector<std::int32_t> encode(std::string_view text) const;  // without [CLS] and [SEP]
  // [CLS] text [SEP], at most `longest` tokens: the end of the text is cut off.
  EncodedText single(std::string_view text, std::size_t longest) const;
  // [CLS] first [SEP] second [SEP]; tokens are cut off the longer text, the second if equal.
  EncodedText pair(std::string_view first, std::string_view second, std::size_t longest) const;

  // A piece of text and where its word begins and ends in the text, in bytes.
  struct Piece {
    std::int32_t token = 0;
    std::size_t begin = 0, end = 0;
  };
  std::vector<Piece> pieces(std::string_view text) const;

  std::int32_t id(const std::string& token) const;  // throws Error if there is none
  std::int64_t vocabulary() const;                  // the largest id + 1

 private:
  struct Unit;  // a normalised character and the bytes it comes from
  std::vector<Unit> normalised(std::string_view text, std::size_t offset) const;
  void add_plain(std::string_view text, std::size_t offset, std::vector<Piece>& pieces) const;
  void add_word(const std::vector<Unit>& word, std::vector<Piece>& pieces) const;

  WordPieceModel model_;
  std::int32_t unknown_ = 0, first_ = 0, separator_ = 0;  // [UNK], [CLS], [SEP]
};

}  // namespace coterie::train
