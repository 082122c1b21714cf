// SPDX-License-Identifier: MIT
// The tokenizer files of a BERT model: tokenizer.json, or vocab.txt and tokenizer_config.json.
#include <fmt/core.h>

#include <filesystem>
#include <nlohmann/json.hpp>

#include "coterie/error.h"
#include "formats/files.h"
#include "formats/json_lines.h"
#include "train/pretrained/wordpiece.h"

namespace coterie::train {
namespace {

using nlohmann::json;

constexpr FileLimit kVocabularyFile = {kLongestJson, "is it a tokenizer?"};

[[noreturn]] void refuse_tokenizer(const std::string& name, const std::string& reason) {
  throw Error("[wordpiece] " + name + ": " + reason);
}

bool is_file(const std::string& path) {
  std::error_code error;
  return std::filesystem::is_regular_file(path, error);
}

json read_object(const std::string& path) {
  const std::string text = read_file(path, kVocabularyFile);
  check_json(text, "[wordpiece] " + path);
  json parsed = json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (!parsed.is_object()) refuse_tokenizer(path, "expected a JSON object");
  return parsed;
}

const json& member_of(const json& object, const char* key) {
  static const json missing;
  if (!object.is_object()) return missing;
  const auto found = object.find(key);
  return found == object.end() ? missing : *found;
}

void expect_type(const json& part, const char* key, const char* wanted, const std::string& name) {
  const json& type = member_of(part, "type");
  if (type == wanted) return;
  refuse_tokenizer(
      name, fmt::format("expected the {} {}; got {} (only BERT's tokenizers are supported)", key,
                        wanted, type.is_string() ? type.get<std::string>() : std::string("none")));
}

bool flag(const json& object, const char* key, bool otherwise, const std::string& name) {
  const json& value = member_of(object, key);
  if (value.is_null()) return otherwise;
  if (!value.is_boolean())
    refuse_tokenizer(name, fmt::format("expected {} to be true or false", key));
  return value.get<bool>();
}

std::string text(const json& object, const char* key, const char* otherwise,
                 const std::string& name) {
  const json& value = member_of(object, key);
  if (value.is_null()) return otherwise;
  if (!value.is_string()) refuse_tokenizer(name, fmt::format("expected {} to be a string", key));
  return value.get<std::string>();
}

std::int32_t token_id(const json& value, const std::string& token, const std::string& name) {
  if (value.is_number_integer() && value >= 0 && value < (1 << 24)) {
    return value.get<std::int32_t>();
  }
  refuse_tokenizer(name, "expected an id from 0 to 16777215 for token \"" + token + "\"");
}

void read_added(const json& file, const std::string& name, WordPieceModel& model) {
  const json& list = member_of(file, "added_tokens");
  if (list.is_null()) return;
  if (!list.is_array()) refuse_tokenizer(name, "expected a list of added_tokens");
  for (const json& entry : list) {
    const std::string content = text(entry, "content", "", name);
    if (content.empty())
      refuse_tokenizer(name, "expected added_tokens with a content that is not empty");
    for (const char* key : {"single_word", "lstrip", "rstrip", "normalized"}) {
      if (flag(entry, key, false, name)) {
        refuse_tokenizer(
            name, fmt::format("expected {} to be false for the added token \"{}\"", key, content));
      }
    }
    model.added[content] = token_id(member_of(entry, "id"), content, name);
  }
}

WordPieceModel parse_tokenizer(const json& file, const std::string& name) {
  const json& pieces = member_of(file, "model");
  expect_type(pieces, "model", "WordPiece", name);
  const json& normalizer = member_of(file, "normalizer");
  expect_type(normalizer, "normalizer", "BertNormalizer", name);
  expect_type(member_of(file, "pre_tokenizer"), "pre_tokenizer", "BertPreTokenizer", name);
  WordPieceModel model;
  const json& vocabulary = member_of(pieces, "vocab");
  if (!vocabulary.is_object())
    refuse_tokenizer(name, "expected a vocabulary: an object with tokens and ids");
  for (const auto& [token, id] : vocabulary.items()) {
    model.vocabulary[token] = token_id(id, token, name);
  }
  model.unknown = text(pieces, "unk_token", "[UNK]", name);
  model.prefix = text(pieces, "continuing_subword_prefix", "##", name);
  const json& longest = member_of(pieces, "max_input_chars_per_word");
  if (longest.is_number_unsigned()) model.longest_word = longest.get<std::size_t>();
  model.clean = flag(normalizer, "clean_text", true, name);
  model.separate_cjk = flag(normalizer, "handle_chinese_chars", true, name);
  model.lower_case = flag(normalizer, "lowercase", true, name);
  model.strip_accents = flag(normalizer, "strip_accents", model.lower_case, name);
  read_added(file, name, model);
  return model;
}

// One token a line; the number of the line is the id.
WordPieceModel parse_vocabulary(const std::string& lines, const json& config,
                                const std::string& name) {
  WordPieceModel model;
  std::int32_t id = 0;
  for (std::size_t at = 0; at < lines.size(); ++id) {
    const std::size_t end = std::min(lines.find('\n', at), lines.size());
    std::string token = lines.substr(at, end - at);
    if (!token.empty() && token.back() == '\r') token.pop_back();
    model.vocabulary[token] = id;  // as in transformers, the last of equal lines counts
    at = end + 1;
  }
  model.lower_case = flag(config, "do_lower_case", true, name);
  model.separate_cjk = flag(config, "tokenize_chinese_chars", true, name);
  model.strip_accents = flag(config, "strip_accents", model.lower_case, name);
  for (const char* special : {"[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"}) {
    const auto found = model.vocabulary.find(special);
    if (found != model.vocabulary.end()) model.added[special] = found->second;
  }
  return model;
}

}  // namespace

WordPieceTokenizer WordPieceTokenizer::load(const std::string& folder) {
  const std::string whole = folder + "/tokenizer.json", list = folder + "/vocab.txt",
                    config = folder + "/tokenizer_config.json";
  if (is_file(whole)) return {parse_tokenizer(read_object(whole), whole), whole};
  if (!is_file(list)) {
    refuse_tokenizer(folder, "expected tokenizer.json or vocab.txt; got neither");
  }
  const json settings = is_file(config) ? read_object(config) : json::object();
  return {parse_vocabulary(read_file(list, kVocabularyFile), settings, list), list};
}

}  // namespace coterie::train
