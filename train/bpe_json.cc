// SPDX-License-Identifier: MIT
// The files of tokenizers: tokenizer.json of Hugging Face, and GPT-2's vocabulary and merges.
#include <fmt/core.h>

#include <nlohmann/json.hpp>
#include <sstream>

#include "coterie/error.h"
#include "formats/json_lines.h"
#include "train/bpe.h"
#include "train/bpe_bytes.h"

namespace coterie::train {
namespace {

using nlohmann::json;
using Merges = std::vector<std::pair<std::string, std::string>>;  // printable
using Vocabulary = std::map<std::string, std::int32_t>;           // printable

[[noreturn]] void refuse(const std::string& name, const std::string& reason) {
  throw Error("[bpe] " + name + ": " + reason);
}

json parse_json(const std::string& text, const std::string& name) {
  check_json(text, "[bpe] " + name);
  json parsed = json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (!parsed.is_object()) refuse(name, "expected a JSON object");
  return parsed;
}

// Null if the key is missing.
const json& at(const json& object, const char* key) {
  static const json missing;
  const auto found = object.find(key);
  return found == object.end() ? missing : *found;
}

// Throws unless object[key] is missing, null, `allowed` or an empty string.
void expect_only(const json& object, const char* key, const json& allowed,
                 const std::string& name) {
  const json& value = at(object, key);
  if (value.is_null() || value == allowed || value == "") return;
  refuse(name, fmt::format("expected {} to be {}; got {}", key, allowed.dump(),
                           value.dump(-1, ' ', false, json::error_handler_t::replace)));
}

std::string type_of(const json& value) {
  if (value.is_null()) return "null";
  const json& type = value.is_object() ? at(value, "type") : value;
  return type.is_string() ? type.get<std::string>() : "unknown";
}

void check_steps(const json& file, const std::string& name) {
  if (!at(file, "normalizer").is_null()) {
    refuse(name, "expected no normalizer, because decoding must give the text back; got " +
                     type_of(at(file, "normalizer")));
  }
  const json& splits = at(file, "pre_tokenizer");
  if (type_of(splits) != "ByteLevel") {
    refuse(name, "expected the pre_tokenizer ByteLevel (GPT-2's); got " + type_of(splits));
  }
  expect_only(splits, "add_prefix_space", false, name);
  expect_only(splits, "use_regex", true, name);
  const json& last = at(file, "post_processor");
  if (!last.is_null() && type_of(last) != "ByteLevel") {
    refuse(name, "expected the post_processor ByteLevel or null; got " + type_of(last) +
                     " (set it to null: text is encoded without tokens for its begin and end)");
  }
}

Vocabulary read_vocabulary(const json& object, const std::string& name) {
  if (!object.is_object()) refuse(name, "expected a vocabulary: an object with tokens and ids");
  Vocabulary vocabulary;
  for (const auto& [token, id] : object.items()) {
    if (!id.is_number_integer() || id < 0 || id >= (1 << 24)) {
      refuse(name, "expected an id from 0 to 16777215 for token \"" + token + "\"");
    }
    vocabulary[token] = id.get<std::int32_t>();
  }
  return vocabulary;
}

// "a b".
std::pair<std::string, std::string> split_merge(const std::string& text, const std::string& name) {
  const std::size_t space = text.find(' ');
  if (space == std::string::npos || text.find(' ', space + 1) != std::string::npos) {
    refuse(name, "expected merges of two tokens with a space between them; got \"" + text + "\"");
  }
  return {text.substr(0, space), text.substr(space + 1)};
}

Merges read_merges(const json& list, const std::string& name) {
  if (!list.is_array()) refuse(name, "expected a list of merges");
  Merges merges;
  for (const json& merge : list) {
    if (merge.is_string()) {
      merges.push_back(split_merge(merge.get<std::string>(), name));
    } else if (merge.is_array() && merge.size() == 2 && merge[0].is_string() &&
               merge[1].is_string()) {
      merges.emplace_back(merge[0].get<std::string>(), merge[1].get<std::string>());
    } else {
      refuse(name, "expected merges of two tokens");
    }
  }
  return merges;
}

// Takes the added tokens' contents as they are and other tokens as printable bytes.
BpeModel make_model(const Vocabulary& vocabulary, const Merges& merges, const Vocabulary& added,
                    const std::string& name) {
  Vocabulary all = vocabulary;
  for (const auto& [token, id] : added) {
    const auto [place, is_new] = all.emplace(token, id);
    if (!is_new && place->second != id) {
      refuse(name,
             fmt::format("added token \"{}\" has the ids {} and {}", token, place->second, id));
    }
  }
  BpeModel model;
  model.tokens.resize(all.size());
  for (const auto& [token, id] : all) {
    if (static_cast<std::size_t>(id) >= all.size()) {
      refuse(name, fmt::format("expected ids from 0 to {} without gaps; got {} for \"{}\"",
                               all.size() - 1, id, token));
    }
    const auto bytes = added.contains(token) ? token : from_printable(token);
    if (!bytes) {
      refuse(name, "token \"" + token +
                       "\" is not written in the characters of bytes (is it a "
                       "byte-level tokenizer?)");
    }
    std::string& own = model.tokens[static_cast<std::size_t>(id)];
    if (!own.empty()) refuse(name, fmt::format("id {} belongs to two tokens", id));
    own = *bytes;
  }
  for (const auto& [left, right] : merges) {
    const auto first = vocabulary.find(left), second = vocabulary.find(right);
    if (first == vocabulary.end() || second == vocabulary.end()) {
      refuse(name, "merge \"" + left + " " + right + "\" has a part that is not in the vocabulary");
    }
    model.merges.emplace_back(first->second, second->second);
  }
  for (const auto& [token, id] : added) model.added.push_back(id);
  return model;
}

Vocabulary read_added(const json& list, const std::string& name) {
  constexpr std::size_t kMost = 1024;  // encoding looks for each of them
  Vocabulary added;
  if (list.is_null()) return added;
  if (!list.is_array() || list.size() > kMost) {
    refuse(name, fmt::format("expected a list of at most {} added_tokens", kMost));
  }
  for (const json& token : list) {
    const json& content = at(token, "content");
    const json& id = at(token, "id");
    if (!content.is_string() || content == "" || !id.is_number_integer() || id < 0 ||
        id >= (1 << 24)) {
      refuse(name, "expected a content and an id from 0 to 16777215 for every added token");
    }
    for (const char* key : {"single_word", "lstrip", "rstrip"})
      expect_only(token, key, false, name);
    added[content.get<std::string>()] = id.get<std::int32_t>();
  }
  return added;
}

std::string quoted(
    const std::string& text) {  // tokens need not be valid UTF-8 after from_printable
  return json(text).dump(-1, ' ', false, json::error_handler_t::replace);
}

}  // namespace

BpeTokenizer BpeTokenizer::parse(const std::string& text, const std::string& name) {
  const json file = parse_json(text, name);
  const json& model = at(file, "model");
  if (!model.is_object()) refuse(name, "expected a tokenizer.json with a model");
  if (const std::string type = type_of(model); type != "BPE") {
    refuse(name, "expected a model of type BPE; got " + type);
  }
  check_steps(file, name);
  for (const char* key :
       {"dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix"}) {
    expect_only(model, key, nullptr, name);
  }
  expect_only(model, "byte_fallback", false, name);
  BpeModel made =
      make_model(read_vocabulary(at(model, "vocab"), name), read_merges(at(model, "merges"), name),
                 read_added(at(file, "added_tokens"), name), name);
  made.whole_words = at(model, "ignore_merges") == true;
  return BpeTokenizer(std::move(made), name);
}

BpeTokenizer BpeTokenizer::parse(const std::string& vocabulary, const std::string& merges,
                                 const std::string& name) {
  const Vocabulary tokens = read_vocabulary(parse_json(vocabulary, name), name);
  Merges pairs;
  std::istringstream lines(merges);
  Vocabulary added = tokens;  // less all bytes and merged tokens
  for (std::string line; std::getline(lines, line);) {
    if (line.empty() || line.starts_with("#version")) continue;
    pairs.push_back(split_merge(line, name));
    added.erase(pairs.back().first + pairs.back().second);
  }
  for (int byte = 0; byte < kBytes; ++byte) {
    added.erase(to_printable(std::string(1, static_cast<char>(byte))));
  }
  return BpeTokenizer(make_model(tokens, pairs, added, name), name);
}

// Written piece by piece, because a JSON library would sort the vocabulary by name, not by id.
std::string BpeTokenizer::text() const {
  std::vector<bool> is_added(model_.tokens.size());
  for (const std::int32_t id : model_.added) is_added[static_cast<std::size_t>(id)] = true;
  const auto name = [&](std::size_t id) {
    return is_added[id] ? model_.tokens[id] : to_printable(model_.tokens[id]);
  };
  std::string added, vocabulary, merges;
  for (std::size_t id = 0; id < model_.tokens.size(); ++id) {
    vocabulary +=
        (id == 0 ? "" : ",") + ("\n      " + quoted(name(id))) + ": " + std::to_string(id);
    if (!is_added[id]) continue;
    added += (added.empty() ? "" : ",") +
             fmt::format(
                 "\n    {{\"id\": {}, \"content\": {}, \"single_word\": false, \"lstrip\": "
                 "false, \"rstrip\": false, \"normalized\": false, \"special\": true}}",
                 id, quoted(name(id)));
  }
  for (const auto& [left, right] : model_.merges) {
    const std::string both =
        name(static_cast<std::size_t>(left)) + " " + name(static_cast<std::size_t>(right));
    merges += (merges.empty() ? "" : ",") + ("\n      " + quoted(both));
  }
  const char* const bytes =
      R"({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true})";
  return fmt::format(R"({{
  "version": "1.0",
  "truncation": null,
  "padding": null,
  "added_tokens": [{}],
  "normalizer": null,
  "pre_tokenizer": {},
  "post_processor": null,
  "decoder": {},
  "model": {{
    "type": "BPE",
    "dropout": null,
    "unk_token": null,
    "continuing_subword_prefix": null,
    "end_of_word_suffix": null,
    "fuse_unk": false,
    "byte_fallback": false,
    "ignore_merges": {},
    "vocab": {{{}
    }},
    "merges": [{}]
  }}
}}
)",
                     added, bytes, bytes, model_.whole_words, vocabulary, merges);
}

}  // namespace coterie::train
