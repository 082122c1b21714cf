// SPDX-License-Identifier: MIT
#include "train/speech_files.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/isfinite.h>
#include <fmt/core.h>

#include <array>
#include <bit>
#include <filesystem>
#include <map>
#include <set>
#include <sstream>

#include "coterie/error.h"
#include "formats/checksum.h"
#include "train/corpus.h"
#include "train/mfcc.h"

namespace coterie::train {
namespace {

using FileMap = std::map<std::string, const CorpusFile*>;

[[noreturn]] void refuse_speech(const std::string& name, const std::string& reason) {
  throw Error("[data] " + name + ": " + reason);
}

std::uint32_t number_at(std::string_view bytes, std::size_t place, std::size_t count,
                        std::endian order) {
  std::uint32_t value = 0;
  for (std::size_t i = 0; i < count; ++i) {
    const std::size_t byte = place + (order == std::endian::big ? i : count - 1 - i);
    value = value << 8 | static_cast<unsigned char>(bytes[byte]);
  }
  return value;
}

// Cepstra: a count of floats, then these, with their highest byte first.
at::Tensor read_mfc(const CorpusFile& file) {
  const std::string_view text = file.text;
  const std::size_t count = text.size() < 4 ? 0 : number_at(text, 0, 4, std::endian::big);
  if (count == 0 || count % kCepstra != 0 || text.size() != 4 + 4 * count) {
    refuse_speech(file.name,
                  fmt::format("expected a count of floats, a multiple of {}, and as many "
                              "floats; got {} in {} bytes",
                              kCepstra, count, text.size()));
  }
  at::Tensor values = at::empty({static_cast<std::int64_t>(count)}, at::kFloat);
  auto* const to = values.mutable_data_ptr<float>();
  for (std::size_t i = 0; i < count; ++i) {
    to[i] = std::bit_cast<float>(number_at(text, 4 + 4 * i, 4, std::endian::big));
  }
  if (!at::isfinite(values).all().item<bool>()) {
    refuse_speech(file.name, "expected finite numbers; got others");
  }
  return values.view({-1, kCepstra});
}

// Cepstra of 16-bit sound in one channel.
at::Tensor read_wav(const CorpusFile& file) {
  const std::string_view text = file.text;
  const auto number = [&](std::size_t place, std::size_t bytes) {
    return number_at(text, place, bytes, std::endian::little);
  };
  const char* const wanted =
      "expected a WAV file with 16-bit samples in one channel, 8,000 to "
      "48,000 a second; got ";
  if (text.size() < 12 || text.substr(0, 4) != "RIFF" || text.substr(8, 4) != "WAVE") {
    refuse_speech(file.name, wanted + std::string("another format"));
  }
  std::uint32_t rate = 0;
  for (std::size_t at = 12; at + 8 <= text.size();) {
    const std::string_view kind = text.substr(at, 4);
    const std::size_t bytes = number(at + 4, 4);
    at += 8;
    if (bytes > text.size() - at) refuse_speech(file.name, "it is cut off");
    if (kind == "fmt " && bytes >= 16) {
      rate = number(at + 4, 4);
      const std::uint32_t coding = number(at, 2), channels = number(at + 2, 2),
                          bits = number(at + 14, 2);
      if (coding != 1 || channels != 1 || bits != 16 || rate < 8'000 || rate > 48'000) {
        refuse_speech(file.name,
                      wanted + fmt::format("coding {}, {} channels, {} bits, {} a second", coding,
                                           channels, bits, rate));
      }
    }
    if (kind == "data" && rate != 0 && bytes >= 2) {
      at::Tensor samples = at::empty({static_cast<std::int64_t>(bytes / 2)}, at::kFloat);
      auto* const to = samples.mutable_data_ptr<float>();
      for (std::size_t i = 0; i < bytes / 2; ++i) {
        to[i] = static_cast<float>(static_cast<std::int16_t>(number(at + 2 * i, 2))) / 32768.0F;
      }
      return cepstra(samples, rate);
    }
    at += bytes + bytes % 2;
  }
  refuse_speech(file.name, "it has no samples");
}

std::vector<std::string> lines_of(const CorpusFile& file) {
  std::vector<std::string> lines;
  std::istringstream stream(file.text);
  for (std::string line; std::getline(stream, line);) {
    if (line.ends_with('\r')) line.pop_back();
    if (!line.empty()) lines.push_back(line);
  }
  return lines;
}

const CorpusFile& file_at(const FileMap& files, const std::string& name) {
  const auto found = files.find(name);
  if (found == files.end()) throw Error("[data] expected a file " + name + " in --data");
  return *found->second;
}

// "YES NO (an251-fash-b)" without its id.
std::string transcript_of(const std::string& line, const std::string& name) {
  const std::size_t id = line.rfind(" (");
  const std::string text = id == std::string::npos ? "" : line.substr(0, id);
  const bool known = text.find_first_not_of("ABCDEFGHIJKLMNOPQRSTUVWXYZ ") == std::string::npos;
  if (text.empty() || !known || !line.ends_with(')')) {
    refuse_speech(name,
                  "expected lines of words from A to Z and an id in brackets; got \"" + line + '"');
  }
  return text;
}

// Transcripts as symbols.
class Alphabet {
 public:
  Alphabet() = default;  // characters

  // Phones of lines like "AND  AE N D"; "AND(2)  AH N D" is a second pronunciation, which is not
  // used.
  explicit Alphabet(const CorpusFile& dictionary) : name_(dictionary.name) {
    std::map<std::string, std::vector<std::string>> words;
    std::map<std::string, std::int64_t> numbers;
    for (const std::string& line : lines_of(dictionary)) {
      std::istringstream parts(line);
      std::string word;
      std::vector<std::string> phones;
      parts >> word;
      for (std::string phone; parts >> phone;) {
        phones.push_back(phone);
        numbers[phone] = 0;
      }
      if (phones.empty() || !words.emplace(word, phones).second) {
        refuse_speech(name_,
                      "expected a word, once, and its phones in every line; got \"" + line + '"');
      }
    }
    if (words.empty()) refuse_speech(name_, "expected lines of a word and its phones; got none");
    for (auto& [phone, number] : numbers) number = ++symbols_;
    for (const auto& [word, phones] : words) {
      for (const std::string& phone : phones) phones_[word].push_back(numbers[phone]);
    }
  }

  std::int64_t symbols() const { return symbols_ == 0 ? kSpace : symbols_; }
  std::int64_t space() const { return symbols_ == 0 ? kSpace : 0; }

  std::vector<std::int64_t> symbols_of(const std::string& text) const {
    std::vector<std::int64_t> found;
    if (symbols_ == 0) {
      for (const char character : text) {
        found.push_back(character == ' ' ? kSpace : character - 'A' + 1);
      }
      return found;
    }
    std::istringstream words(text);
    for (std::string word; words >> word;) {
      const auto phones = phones_.find(word);
      if (phones == phones_.end())
        refuse_speech(name_, "expected the word " + word + "; it is missing");
      found.insert(found.end(), phones->second.begin(), phones->second.end());
    }
    return found;
  }

 private:
  static constexpr std::int64_t kSpace = 27;  // A to Z are 1 to 26

  std::string name_;                                         // of the dictionary
  std::map<std::string, std::vector<std::int64_t>> phones_;  // by word
  std::int64_t symbols_ = 0;                                 // phones; 0: characters
};

void read_an4(const FileMap& files, const std::string& part, const Alphabet& alphabet,
              Speech& speech) {
  const CorpusFile& ids = file_at(files, "etc/an4_" + part + ".fileids");
  const CorpusFile& texts = file_at(files, "etc/an4_" + part + ".transcription");
  const std::vector<std::string> names = lines_of(ids), lines = lines_of(texts);
  if (names.size() != lines.size()) {
    refuse_speech(texts.name, fmt::format("expected {} lines, as many as {}; got {}", names.size(),
                                          ids.name, lines.size()));
  }
  const auto speaker_of = [](const std::string& name) {
    return std::filesystem::path(name).parent_path().filename().string();
  };
  std::set<std::string> speakers, held_out;
  for (const std::string& name : names) speakers.insert(speaker_of(name));
  std::size_t number = 0;
  for (const std::string& speaker : speakers) {
    if (number++ % 10 == 0) held_out.insert(speaker);
  }
  for (std::size_t i = 0; i < names.size(); ++i) {
    const Split split = part == "test"                            ? Split::test
                        : held_out.contains(speaker_of(names[i])) ? Split::valid
                                                                  : Split::train;
    speech.parts[static_cast<std::size_t>(split)].push_back(
        {speech_features(read_mfc(file_at(files, "feat/" + names[i] + ".mfc"))),
         alphabet.symbols_of(transcript_of(lines[i], texts.name))});
  }
}

constexpr std::array<const char*, 10> kDigitNames = {"ZERO", "ONE", "TWO",   "THREE", "FOUR",
                                                     "FIVE", "SIX", "SEVEN", "EIGHT", "NINE"};

// "7_theo_12.wav"
void add_digit(const CorpusFile& file, const Alphabet& alphabet, Speech& speech) {
  const std::string name = std::filesystem::path(file.name).stem().string();
  const std::size_t last = name.rfind('_');
  const std::string number = last == std::string::npos ? "" : name.substr(last + 1);
  const bool digits = !number.empty() && number.size() < 7 &&
                      number.find_first_not_of("0123456789") == std::string::npos;
  if (!digits || name[0] < '0' || name[0] > '9' || name[1] != '_') {
    refuse_speech(file.name, "expected a name like 7_theo_12.wav: digit, speaker and number");
  }
  const int take = std::stoi(number);
  const Split split = take < 5 ? Split::test : take < 10 ? Split::valid : Split::train;
  speech.parts[static_cast<std::size_t>(split)].push_back(
      {speech_features(read_wav(file)),
       alphabet.symbols_of(kDigitNames[static_cast<std::size_t>(name[0] - '0')])});
}

// From the folder `etc` or `feat` on.
std::string name_in_an4(const std::string& name) {
  for (const char* const folder : {"etc/", "feat/"}) {
    const std::size_t at = ("/" + name).rfind(std::string("/") + folder);
    if (at != std::string::npos) return name.substr(at);
  }
  return name;
}

}  // namespace

Speech read_speech(const Config& config) {
  if (config.data.empty()) {
    throw Error(
        "[speech] expected --data with AN4 or recorded digits: a folder or archive; got none");
  }
  const std::vector<CorpusFile> files =
      read_corpus_files(config.data, config.data_limit, FileKind::any);
  Speech speech;
  FileMap by_name;
  std::string sums;
  for (const CorpusFile& file : files) {
    by_name[name_in_an4(file.name)] = &file;
    sums += text_checksum(file.text);
    speech.facts.bytes += static_cast<std::int64_t>(file.text.size());
  }
  speech.facts.checksum = text_checksum(sums);
  const Alphabet alphabet =
      config.speech.symbols == "phones" ? Alphabet(file_at(by_name, "etc/an4.dic")) : Alphabet();
  speech.symbols = alphabet.symbols();
  speech.space = alphabet.space();
  for (const CorpusFile& file : files) {
    if (file.name.ends_with(".wav")) add_digit(file, alphabet, speech);
  }
  if (by_name.contains("etc/an4_train.fileids")) {
    read_an4(by_name, "train", alphabet, speech);
    read_an4(by_name, "test", alphabet, speech);
  }
  for (const Split split : {Split::train, Split::valid, Split::test}) {
    if (!speech[split].empty()) continue;
    constexpr const char* kNames[] = {"training", "validation", "test"};
    refuse_speech(config.data,
                  fmt::format("expected AN4 (etc/an4_train.fileids) or recorded digits "
                              "(7_theo_12.wav) with {} recordings; got none",
                              kNames[static_cast<std::size_t>(split)]));
  }
  return speech;
}

}  // namespace coterie::train
