// SPDX-License-Identifier: MIT
#include "train/tasks/text.h"

#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <sstream>
#include <utility>

#include "coterie/error.h"
#include "formats/checksum.h"
#include "train/corpus.h"

namespace coterie::train {
namespace {

// The part named by one of the dot-separated words of a file name; null if there is none.
std::string* part_of(const std::string& name, TextParts& parts) {
  std::istringstream words(std::filesystem::path(name).filename().string());
  for (std::string word; std::getline(words, word, '.');) {
    if (word == "train") return &parts.train;
    if (word == "valid" || word == "validation") return &parts.valid;
    if (word == "test") return &parts.test;
  }
  return nullptr;
}

// Parts by file name; train or valid stay empty if no name matches.
TextParts parts_by_name(const std::vector<CorpusFile>& files) {
  TextParts parts;
  for (const CorpusFile& file : files) {
    std::string* const part = part_of(file.name, parts);
    if (part != nullptr) *part += file.text;
  }
  return parts;
}

std::size_t cut_place(const std::string& text, double share, CutAt cut) {
  const auto place = static_cast<std::size_t>(share * static_cast<double>(text.size()));
  if (cut == CutAt::byte || place == 0) return place;
  const std::size_t end = text.find('\n', place - 1);
  return end == std::string::npos ? text.size() : end + 1;
}

TextParts cut_by_shares(std::string text, const TextConfig& config, CutAt cut) {
  const double held_out = config.valid + config.test;
  if (!(config.valid > 0.0 && config.test >= 0.0 && held_out < 1.0)) {
    throw Error(
        fmt::format("[text] expected text.valid above 0, text.test of 0 or more and a sum "
                    "below 1; got {} and {}",
                    config.valid, config.test));
  }
  const std::size_t valid = cut_place(text, 1.0 - held_out, cut);
  const std::size_t test = std::max(valid, cut_place(text, 1.0 - config.test, cut));
  TextParts parts;
  parts.test = text.substr(test);
  parts.valid = text.substr(valid, test - valid);
  text.resize(valid);
  parts.train = std::move(text);
  return parts;
}

}  // namespace

const std::string& TextParts::operator[](Split split) const {
  return split == Split::train ? train : split == Split::valid ? valid : test;
}

TextParts read_text(const Config& config, CutAt cut) {
  if (config.data.empty()) return cut_by_shares(std::string(builtin_corpus()), config.text, cut);
  const std::vector<CorpusFile> files = read_corpus_files(config.data, config.data_limit);
  TextParts parts = parts_by_name(files);
  if (!parts.train.empty() && !parts.valid.empty()) return parts;
  std::string text;
  for (const CorpusFile& file : files) text += file.text;
  return cut_by_shares(std::move(text), config.text, cut);
}

DataFacts facts_of(const TextParts& parts) {
  std::string sums;
  std::size_t bytes = 0;
  for (const std::string* part : {&parts.train, &parts.valid, &parts.test}) {
    sums += text_checksum(*part);
    bytes += part->size();
  }
  return {text_checksum(sums), static_cast<std::int64_t>(bytes)};
}

std::vector<std::int64_t> EncodedText::counts(Split split, std::int64_t vocabulary) const {
  std::vector<std::int64_t> counts(static_cast<std::size_t>(vocabulary));
  for (const std::int32_t token : (*this)[split]) ++counts[static_cast<std::size_t>(token)];
  return counts;
}

void TextTask::check_parts() const {
  if (size(Split::train) <= length()) {
    throw Error(
        fmt::format("[text] expected more than {} training tokens (the sequence length); got {}: "
                    "shorten --length or use more text",
                    length(), size(Split::train)));
  }
  if (size(Split::valid) <= length()) {
    throw Error(
        fmt::format("[text] expected more than {} validation tokens (the sequence length); got {}: "
                    "shorten --length, raise --text.valid or use more text",
                    length(), size(Split::valid)));
  }
}

std::int64_t TextTask::held_out_rows(Split split) const {
  const std::int64_t targets = std::max<std::int64_t>(0, size(split) - 1);
  return (targets + length() - 1) / length();
}

std::int64_t TextTask::begin_of(const Row& row) const {
  if (row.split != Split::train) return row.index * length();
  const auto places = static_cast<std::uint64_t>(size(Split::train) - length());
  return static_cast<std::int64_t>(random_u64(random(row, 0), 0) % places);
}

void TextTask::fill(Row& row) const {
  const std::int64_t begin = begin_of(row);
  row.length = std::min(length(), size(row.split) - 1 - begin);
  for (std::int64_t i = 0; i < row.length; ++i) {
    const auto place = static_cast<std::size_t>(i);
    row.tokens[place] = token(row.split, begin + i);
    row.targets[place] = token(row.split, begin + i + 1);
    if (!row.strata.empty()) row.strata[place] = stratum(row.targets[place]);
  }
}

double frequency_loss(const std::vector<std::int64_t>& counts,
                      const std::vector<std::int64_t>& wanted) {
  double total = 0.0, nats = 0.0, tokens = 0.0;
  for (const std::int64_t count : counts) total += static_cast<double>(count + 1);
  for (std::size_t i = 0; i < wanted.size(); ++i) {
    const auto times = static_cast<double>(wanted[i]);
    nats -= times * std::log(static_cast<double>(counts[i] + 1) / total);
    tokens += times;
  }
  return nats / tokens;
}

}  // namespace coterie::train
