// SPDX-License-Identifier: MIT
// The data of tasks for encoders, from files, folders or archives as they are published.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "train/corpus.h"

namespace coterie::train {

// All files of `paths`; throws Error if there are none.
std::vector<CorpusFile> read_task_files(const std::vector<std::string>& paths);
// The file whose path ends in `ending` ("STS-B/stsb-en-test.csv"), or its last part if no path
// does; throws an Error that names the task.
const CorpusFile& file_of(const std::vector<CorpusFile>& files, const std::string& ending,
                          const std::string& task);

// Rows of comma-separated values with quotes ("" is a quote inside them), and of tab-separated
// values, where quotes have no meaning.
std::vector<std::vector<std::string>> csv_rows(std::string_view text, const std::string& name);
std::vector<std::vector<std::string>> tsv_rows(std::string_view text);

// One or two texts with a label.
struct LabelledText {
  std::string first, second;
  double label = 0;  // a score, or 0 and 1
};

struct GlueData {
  std::vector<LabelledText> train, test;
  std::string test_name;  // "dev", "test"
  bool pairs = false;
};
std::vector<LabelledText> read_sts_b(const std::vector<CorpusFile>& files);
// SST-2, CoLA, RTE, MRPC or WNLI. Scores are on dev, MRPC's on test without its last 408 rows of
// train.
GlueData read_glue(const std::vector<CorpusFile>& files, const std::string& name);
// Lines with "text" and "label"; `part` is "train" or "test", a part of the file's name.
std::vector<LabelledText> read_imdb(const std::vector<CorpusFile>& files, const std::string& part);

struct SquadQuestion {
  std::string id, text;
  std::size_t paragraph = 0;
  std::vector<std::string> answers{};
  std::size_t answer_begin = 0;  // of the first answer, in bytes of the paragraph
};
struct SquadParagraph {
  std::string text;
  std::size_t article = 0;
};
struct SquadData {
  std::vector<SquadParagraph> paragraphs;
  std::vector<SquadQuestion> questions;
};
SquadData read_squad(const std::vector<CorpusFile>& files);
SquadData parse_squad(const std::string& text, const std::string& name);

// `count` of `size` places, evenly spaced; all if count is 0 or not smaller.
std::vector<std::size_t> spaced(std::size_t size, std::size_t count);

}  // namespace coterie::train
