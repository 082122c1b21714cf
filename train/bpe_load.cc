// SPDX-License-Identifier: MIT
#include <fmt/core.h>

#include <algorithm>
#include <filesystem>
#include <map>

#include "coterie/error.h"
#include "formats/files.h"
#include "formats/json_lines.h"
#include "train/bpe.h"
#include "train/corpus.h"

namespace coterie::train {
namespace {

namespace fs = std::filesystem;

constexpr FileLimit kTokenizerFile = {kLongestJson, "is it a tokenizer?"};
constexpr std::uint64_t kArchive = std::uint64_t{4} * kLongestJson;
constexpr const char* kJson = "tokenizer.json";
constexpr std::pair<const char*, const char*> kPairs[] = {{"vocab.json", "merges.txt"},
                                                          {"encoder.json", "vocab.bpe"}};

using Texts = std::map<std::string, std::string>;  // by file name

bool is_wanted(const std::string& name) {
  return name == kJson || std::any_of(std::begin(kPairs), std::end(kPairs), [&](const auto& pair) {
           return name == pair.first || name == pair.second;
         });
}

Texts texts_of_folder(const std::string& path) {
  Texts texts;
  std::error_code error;
  for (auto entry = fs::directory_iterator(path, error);
       !error && entry != fs::directory_iterator(); entry.increment(error)) {
    const std::string name = entry->path().filename().string();
    if (is_wanted(name)) texts[name] = read_file(entry->path().string(), kTokenizerFile);
  }
  if (error) throw Error(fmt::format("[bpe] cannot list {}: {}", path, error.message()));
  return texts;
}

// The wanted files, which must be in one folder of the archive.
Texts texts_of_archive(const std::string& path, std::vector<CorpusFile> files) {
  Texts texts;
  fs::path folder;
  for (CorpusFile& file : files) {
    const fs::path place = file.name;
    if (!is_wanted(place.filename().string())) continue;
    if (!texts.empty() && folder != place.parent_path()) {
      throw Error(
          fmt::format("[bpe] {}: expected one tokenizer; got one in \"{}\" and one in "
                      "\"{}\" (unpack it and name the folder)",
                      path, folder.string(), place.parent_path().string()));
    }
    folder = place.parent_path();
    texts[place.filename().string()] = std::move(file.text);
  }
  return texts;
}

}  // namespace

BpeTokenizer BpeTokenizer::load(const std::string& path) {
  Texts texts;
  if (fs::is_directory(path)) {
    texts = texts_of_folder(path);
  } else {
    std::vector<CorpusFile> files = read_corpus_files(path, kArchive);
    // A file alone is a tokenizer.json of any name.
    if (files.size() == 1 && !is_wanted(fs::path(files[0].name).filename().string())) {
      files[0].name = kJson;
    }
    texts = texts_of_archive(path, std::move(files));
  }
  if (texts.contains(kJson)) return parse(texts.at(kJson), path);
  for (const auto& [vocabulary, merges] : kPairs) {
    if (texts.contains(vocabulary) && texts.contains(merges)) {
      return parse(texts.at(vocabulary), texts.at(merges), path);
    }
  }
  throw Error(fmt::format(
      "[bpe] expected a tokenizer.json, or a folder or archive with one, with vocab.json and "
      "merges.txt or with encoder.json and vocab.bpe; got {}",
      path));
}

void BpeTokenizer::save(const std::string& path) const { write_file(path, text()); }

}  // namespace coterie::train
