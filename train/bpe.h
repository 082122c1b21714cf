// SPDX-License-Identifier: MIT
// Byte-level byte-pair encoding (Sennrich et al. 2016; Radford et al. 2019), as GPT-2's.
//
// Text is cut into added tokens and words (next_word); the bytes of a word are tokens, of which the
// adjacent pair whose merge was learnt first is joined, the leftmost if it occurs several times,
// until no pair has a merge. Every byte is a token, so decode(encode(x)) == x for any bytes x.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

namespace coterie::train {

// The end of the word that begins at `begin`: the match of GPT-2's pattern
// 's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+
std::size_t next_word(std::string_view text, std::size_t begin);

// The contents of a tokenizer: tokens by id, and merges in the order in which they were learnt.
struct BpeModel {
  std::vector<std::string> tokens;                            // bytes, not printable stand-ins
  std::vector<std::pair<std::int32_t, std::int32_t>> merges;  // ids of both parts
  std::vector<std::int32_t> added;  // tokens that are matched as a whole, before anything else
  bool whole_words = false;         // a word that is a token is not merged ("ignore_merges")
};

class BpeTokenizer {
 public:
  // Throws Error unless every byte is a token, tokens differ and merges give tokens. Messages call
  // the model's origin `name`.
  BpeTokenizer(BpeModel model, const std::string& name);

  BpeTokenizer(BpeTokenizer&&) = default;
  BpeTokenizer(const BpeTokenizer&) = delete;  // words_ refers to model_
  BpeTokenizer& operator=(const BpeTokenizer&) = delete;
  ~BpeTokenizer() = default;

  // A file tokenizer.json, or a folder or archive with one, with vocab.json and merges.txt, or with
  // encoder.json and vocab.bpe. Throws Error naming what is wrong or not supported.
  static BpeTokenizer load(const std::string& path);
  // The text of a tokenizer.json as Hugging Face's library `tokenizers` writes it.
  static BpeTokenizer parse(const std::string& text, const std::string& name);
  // The texts of GPT-2's two files. Tokens that are neither bytes nor merged are added tokens.
  static BpeTokenizer parse(const std::string& vocabulary, const std::string& merges,
                            const std::string& name);

  // Learns merges: always of the most frequent pair, of the one with the smaller ids (first the
  // left, then the right one) among equals, until there are `vocabulary` tokens (at least 256) or
  // no pair occurs twice. The result depends on the text only.
  static BpeTokenizer train(std::string_view text, std::int64_t vocabulary);

  // Bytes without merges; the id of a token is its byte.
  static BpeTokenizer bytes();

  std::vector<std::int32_t> encode(std::string_view text) const;
  std::string decode(const std::vector<std::int32_t>& ids) const;
  const std::string& token(std::int64_t id) const;  // its bytes; throws Error on an unknown id

  std::int64_t vocabulary() const { return static_cast<std::int64_t>(model_.tokens.size()); }
  const BpeModel& model() const { return model_; }

  std::string text() const;  // of a tokenizer.json
  void save(const std::string& path) const;

 private:
  struct Merge {
    std::int32_t rank = 0, id = 0;
  };
  class Encoder;

  const Merge* merge_of(std::int32_t left, std::int32_t right) const;

  BpeModel model_;
  std::array<std::int32_t, 256> byte_ids_{};
  std::unordered_map<std::uint64_t, Merge> merges_;           // by both ids
  std::unordered_map<std::string_view, std::int32_t> words_;  // with model_.whole_words
};

}  // namespace coterie::train
