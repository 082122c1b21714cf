// SPDX-License-Identifier: MIT
#include "train/pretrained/data.h"

#include <fmt/core.h>

#include <algorithm>
#include <charconv>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "coterie/error.h"
#include "formats/json_lines.h"
#include "train/reviews.h"
#include "train/unicode.h"

namespace coterie::train {
namespace {

using nlohmann::json;

[[noreturn]] void refuse_data(const std::string& name, const std::string& reason) {
  throw Error("[data] " + name + ": " + reason);
}

double number(const std::string& text, const std::string& name) {
  double value = 0;
  const char* const end = text.data() + text.size();
  const auto read = std::from_chars(text.data(), end, value);
  if (read.ec != std::errc() || read.ptr != end)
    refuse_data(name, "expected a number; got \"" + text + '"');
  return value;
}

std::vector<std::string> split(std::string_view line, char by) {
  std::vector<std::string> fields;
  for (std::size_t at = 0;;) {
    const std::size_t end = std::min(line.find(by, at), line.size());
    fields.emplace_back(line.substr(at, end - at));
    if (end == line.size()) return fields;
    at = end + 1;
  }
}

// Rows of a table with these columns; a first row that names them is left out.
std::vector<LabelledText> labelled(const CorpusFile& file, std::size_t columns, std::size_t first,
                                   std::size_t second, std::size_t label, bool header) {
  constexpr std::size_t kNone = 99;
  std::vector<LabelledText> rows;
  std::size_t line = 0;
  for (const std::vector<std::string>& fields : tsv_rows(file.text)) {
    ++line;
    if (header && line == 1) continue;
    if (fields.size() != columns) {
      refuse_data(file.name, fmt::format("expected {} columns in line {}; got {}", columns, line,
                                         fields.size()));
    }
    const std::string& answer = fields[label];
    if (answer != "0" && answer != "1" && answer != "entailment" && answer != "not_entailment") {
      refuse_data(file.name,
                  fmt::format("expected a label 0, 1, entailment or not_entailment in line "
                              "{}; got \"{}\"",
                              line, answer));
    }
    const bool positive = answer == "1" || answer == "entailment";
    rows.push_back({fields[first], second == kNone ? "" : fields[second], positive ? 1.0 : 0.0});
  }
  if (rows.empty()) refuse_data(file.name, "expected labelled rows; got none");
  return rows;
}

constexpr std::size_t kNoSecond = 99;

}  // namespace

std::vector<CorpusFile> read_task_files(const std::vector<std::string>& paths) {
  if (paths.empty()) throw Error("[data] expected --data with the data of the task; got none");
  std::vector<CorpusFile> files;
  for (const std::string& path : paths) {
    for (CorpusFile& file : read_corpus_files(path)) files.push_back(std::move(file));
  }
  return files;
}

const CorpusFile& file_of(const std::vector<CorpusFile>& files, const std::string& ending,
                          const std::string& task) {
  const std::string last = std::filesystem::path(ending).filename().string();
  for (const std::string& wanted : {ending, last}) {
    for (const CorpusFile& file : files) {
      if (file.name == wanted || file.name.ends_with("/" + wanted)) return file;
    }
    if (ending.find('/') != std::string::npos && last == "train.tsv") break;  // of which task?
    if (ending.find('/') != std::string::npos && last == "dev.tsv") break;
  }
  throw Error(fmt::format("[data] expected the file {} for the task {}; got {} other files", ending,
                          task, files.size()));
}

std::vector<std::vector<std::string>> csv_rows(std::string_view text, const std::string& name) {
  std::vector<std::vector<std::string>> rows;
  std::vector<std::string> fields;
  std::string field;
  bool quoted = false, any = false;
  const auto end_row = [&] {
    fields.push_back(std::move(field));
    field.clear();
    rows.push_back(std::move(fields));
    fields.clear();
    any = false;
  };
  for (std::size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (quoted) {
      if (c != '"') {
        field += c;
      } else if (i + 1 < text.size() && text[i + 1] == '"') {
        field += text[++i];
      } else {
        quoted = false;
      }
      continue;
    }
    if (c == '"' && field.empty()) {
      quoted = any = true;
    } else if (c == ',') {
      fields.push_back(std::move(field));
      field.clear();
      any = true;
    } else if (c == '\n') {
      if (!field.empty() && field.back() == '\r') field.pop_back();
      if (any || !field.empty()) end_row();
    } else {
      field += c;
      any = true;
    }
  }
  if (quoted) refuse_data(name, "expected a closing quote before the end of the file");
  if (any || !field.empty()) end_row();
  return rows;
}

std::vector<std::vector<std::string>> tsv_rows(std::string_view text) {
  if (text.starts_with("\xef\xbb\xbf")) text.remove_prefix(3);
  std::vector<std::vector<std::string>> rows;
  for (std::string line : split(text, '\n')) {
    if (!line.empty() && line.back() == '\r') line.pop_back();
    if (!line.empty()) rows.push_back(split(line, '\t'));
  }
  return rows;
}

std::vector<LabelledText> read_sts_b(const std::vector<CorpusFile>& files) {
  const CorpusFile& file = file_of(files, "STS-B/stsb-en-test.csv", "sts-b");
  std::vector<LabelledText> rows;
  for (const std::vector<std::string>& fields : csv_rows(file.text, file.name)) {
    if (fields.size() != 3) {
      refuse_data(file.name, fmt::format("expected 3 columns in row {}; got {}", rows.size() + 1,
                                         fields.size()));
    }
    rows.push_back({fields[0], fields[1], number(fields[2], file.name)});
  }
  if (rows.size() < 3) refuse_data(file.name, "expected at least 3 pairs of sentences");
  return rows;
}

GlueData read_glue(const std::vector<CorpusFile>& files, const std::string& name) {
  GlueData data;
  data.test_name = "dev";
  data.pairs = name == "RTE" || name == "WNLI" || name == "MRPC";
  const auto table = [&](const char* part, std::size_t columns, std::size_t first,
                         std::size_t second, std::size_t label, bool header) {
    const CorpusFile& file = file_of(files, name + "/" + part, "glue " + name);
    return labelled(file, columns, first, second, label, header);
  };
  if (name == "SST-2") {
    data.train = table("train.tsv", 2, 0, kNoSecond, 1, true);
    data.test = table("dev.tsv", 2, 0, kNoSecond, 1, true);
  } else if (name == "CoLA") {
    data.train = table("train.tsv", 4, 3, kNoSecond, 1, false);
    data.test = table("dev.tsv", 4, 3, kNoSecond, 1, false);
  } else if (name == "RTE" || name == "WNLI") {
    data.train = table("train.tsv", 4, 1, 2, 3, true);
    data.test = table("dev.tsv", 4, 1, 2, 3, true);
  } else if (name == "MRPC") {
    constexpr std::size_t kDev = 408;
    data.train = table("msr_paraphrase_train.txt", 5, 3, 4, 0, true);
    if (data.train.size() > 2 * kDev) data.train.resize(data.train.size() - kDev);
    data.test = table("msr_paraphrase_test.txt", 5, 3, 4, 0, true);
    data.test_name = "test";
  } else {
    throw Error("[data] expected one of SST-2, CoLA, RTE, MRPC, WNLI; got \"" + name + '"');
  }
  return data;
}

std::vector<LabelledText> read_imdb(const std::vector<CorpusFile>& files, const std::string& part) {
  std::vector<LabelledText> rows;
  for (Review& review : read_reviews(files, part)) {
    rows.push_back({std::move(review.text), "", review.positive ? 1.0 : 0.0});
  }
  return rows;
}

SquadData parse_squad(const std::string& text, const std::string& name) {
  check_json(text, "[data] " + name);
  const json file = json::parse(text, nullptr, /*allow_exceptions=*/false);
  SquadData data;
  try {
    std::size_t article_number = 0;
    for (const json& article : file.at("data")) {
      for (const json& paragraph : article.at("paragraphs")) {
        const auto context = paragraph.at("context").get<std::string>();
        // Places of characters in bytes: the file counts characters.
        std::vector<std::size_t> places;
        for (std::size_t at = 0; at < context.size(); at += code_point_at(context, at).bytes) {
          places.push_back(at);
        }
        for (const json& question : paragraph.at("qas")) {
          SquadQuestion own{question.at("id").get<std::string>(),
                            question.at("question").get<std::string>(),
                            data.paragraphs.size(),
                            {},
                            0};
          for (const json& answer : question.at("answers")) {
            own.answers.push_back(answer.at("text").get<std::string>());
          }
          const auto first = question.at("answers").at(0).at("answer_start").get<std::size_t>();
          own.answer_begin = places.at(first);
          data.questions.push_back(std::move(own));
        }
        data.paragraphs.push_back({context, article_number});
      }
      ++article_number;
    }
  } catch (const std::exception& error) {  // of nlohmann-json, and places.at
    refuse_data(name, std::string("expected SQuAD 1.1: data, paragraphs, context, qas, answers (") +
                          error.what() + ")");
  }
  if (data.questions.empty()) refuse_data(name, "expected questions; got none");
  return data;
}

SquadData read_squad(const std::vector<CorpusFile>& files) {
  const CorpusFile& file = file_of(files, "dev-v1.1.json", "squad");
  return parse_squad(file.text, file.name);
}

std::vector<std::size_t> spaced(std::size_t size, std::size_t count) {
  if (count == 0 || count > size) count = size;
  std::vector<std::size_t> places(count);
  for (std::size_t i = 0; i < count; ++i) places[i] = i * size / count;
  return places;
}

}  // namespace coterie::train
