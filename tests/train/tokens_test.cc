// SPDX-License-Identifier: MIT
// The task `tokens`.
#include <gtest/gtest.h>

#include "coterie/error.h"
#include "formats/files.h"
#include "tests/train/temporary_folder.h"
#include "train/bpe.h"
#include "train/task.h"

namespace coterie::train {
namespace {

class TokensTaskTest : public testing::Test {
 protected:
  TokensTaskTest() {
    std::string text;
    for (int i = 0; i < 3000; ++i) {
      text += "word" + std::to_string(i * i % 37) + (i % 9 == 8 ? "\n" : " ");
    }
    write_file(folder_.path("text"), text);
    config_.task = "tokens";
    config_.length = 16;
    config_.data = folder_.path("text");
    config_.text.vocabulary = 270;
  }

  std::string error() const {
    try {
      make_task(config_);
    } catch (const Error& error) {
      return error.what();
    }
    return "";
  }

  TemporaryFolder folder_;
  Config config_;
};

TEST_F(TokensTaskTest, LearnsATokenizer) {
  const auto task = make_task(config_);
  EXPECT_EQ(task->vocabulary(), 270);
  const std::string text = "word12 word3\nother — \xff";
  EXPECT_EQ(task->decode(task->encode(text)), text);
  EXPECT_LT(task->encode("word12 word12").size(), 6u);
  EXPECT_EQ(make_task(config_)->tokenizer_text(), task->tokenizer_text());
  EXPECT_EQ(metric_name(task->metric()), std::string("perplexity"));
  EXPECT_EQ(task->baselines().at(0).name, "tokens by frequency");
  EXPECT_LT(task->baselines().at(0).value, 270);
  EXPECT_THROW(task->decode({270}), Error);

  config_.text.vocabulary = 0;  // 4096, of which this text has fewer
  EXPECT_GT(make_task(config_)->vocabulary(), 270);
}

TEST_F(TokensTaskTest, HeldOutRowsAreTheEncodedText) {
  const std::string valid = "word1 word2\nword3 word1\nand other words that occur nowhere else\n";
  write_file(folder_.path("train.txt"), read_file(config_.data));
  write_file(folder_.path("valid.txt"), valid);
  std::filesystem::remove(config_.data);
  config_.data = folder_.path();
  const auto task = make_task(config_);
  std::vector<std::int64_t> tokens;
  for (std::int64_t i = 0; i < task->batches(Split::valid, 1); ++i) {
    const Batch batch = task->batch(Split::valid, i, 1);
    if (i == 0) tokens.push_back(batch.tokens[0][0].item<std::int64_t>());
    for (std::int64_t n = 0; n < batch.targets.size(1); ++n) {
      const auto target = batch.targets[0][n].item<std::int64_t>();
      if (target != kIgnore) tokens.push_back(target);
    }
  }
  EXPECT_EQ(task->decode(tokens), valid);
}

TEST_F(TokensTaskTest, LoadsATokenizer) {
  BpeTokenizer::train("words and words", 260).save(folder_.path("tokenizer.json"));
  config_.text.tokenizer = folder_.path("tokenizer.json");
  EXPECT_NE(error().find("either text.vocabulary, to learn a tokenizer, or text.tokenizer"),
            std::string::npos);
  config_.text.vocabulary = 0;
  EXPECT_EQ(make_task(config_)->vocabulary(), 260);
  EXPECT_EQ(make_task(config_)->tokenizer_text(), read_file(config_.text.tokenizer));
  config_.text.tokenizer = folder_.path("missing");
  EXPECT_NE(error().find("no such file"), std::string::npos);
}

TEST_F(TokensTaskTest, BytesHaveATokenizerToo) {
  config_.task = "bytes";
  const std::string text = make_task(config_)->tokenizer_text();
  EXPECT_EQ(BpeTokenizer::parse(text, "x").encode("a"), std::vector<std::int32_t>{97});
}

}  // namespace
}  // namespace coterie::train
