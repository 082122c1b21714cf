// SPDX-License-Identifier: MIT
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "coterie/error.h"
#include "formats/files.h"
#include "tests/train/temporary_folder.h"
#include "train/corpus.h"
#include "train/task.h"

namespace coterie::train {
namespace {

using Tokens = std::vector<std::int64_t>;

Config config_for(const std::string& task, std::int64_t length) {
  Config config;
  config.task = task;
  config.length = length;
  return config;
}

Tokens row(const at::Tensor& tensor, std::int64_t index) {
  const at::Tensor one = tensor.select(0, index).contiguous();
  const std::int64_t* const begin = one.const_data_ptr<std::int64_t>();
  return {begin, begin + one.numel()};
}

void expect_equal(const Batch& a, const Batch& b) {
  EXPECT_TRUE(a.tokens.equal(b.tokens));
  EXPECT_TRUE(a.targets.equal(b.targets));
  ASSERT_EQ(a.strata.defined(), b.strata.defined());
  if (a.strata.defined()) {
    EXPECT_TRUE(a.strata.equal(b.strata));
  }
}

std::string error_of(const Config& config) {
  try {
    make_task(config);
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

// Configs of all tasks; the words task needs a text file.
std::vector<Config> all_configs(const TemporaryFolder& folder) {
  std::string text;
  for (int i = 0; i < 4000; ++i)
    text += "w" + std::to_string(i * i % 17) + (i % 9 == 8 ? "\n" : " ");
  write_file(folder.path("words.txt"), text);
  std::vector<Config> configs;
  for (const char* const name : {"copy", "recall", "bytes", "masked", "words", "tokens"}) {
    configs.push_back(config_for(name, 64));
    if (name[0] == 'w' || name[0] == 't') configs.back().data = folder.path("words.txt");
  }
  configs.push_back(config_for("recall", 64));
  configs.back().recall.causal = true;
  return configs;
}

TEST(Tasks, AreFoundByName) {
  EXPECT_EQ(task_names(), (std::vector<std::string>{"copy", "recall", "bytes", "masked", "words",
                                                    "tokens", "listops", "pathfinder", "images",
                                                    "imdb", "retrieval", "speech"}));
  const TemporaryFolder folder;
  for (const Config& config : all_configs(folder))
    EXPECT_EQ(make_task(config)->name(), config.task);
  EXPECT_EQ(
      error_of(config_for("paste", 64)),
      "[task] expected one of copy, recall, bytes, masked, words, tokens, listops, pathfinder, "
      "images, imdb, retrieval, speech; got \"paste\"");
}

TEST(Tasks, BatchesArePureFunctionsOfSeedSplitAndIndex) {
  const TemporaryFolder folder;
  for (Config config : all_configs(folder)) {
    SCOPED_TRACE(config.task);
    const auto task = make_task(config), again = make_task(config);
    const Batch batch = task->batch(Split::train, 3, 4);
    task->batch(Split::train, 7, 2);
    expect_equal(task->batch(Split::train, 3, 4), batch);
    expect_equal(again->batch(Split::train, 3, 4), batch);
    // Rows do not depend on how they are batched.
    EXPECT_TRUE(task->batch(Split::train, 7, 2).tokens.equal(batch.tokens.narrow(0, 2, 2)));
    EXPECT_FALSE(task->batch(Split::train, 4, 4).tokens.equal(batch.tokens));
    config.seed = 2;
    EXPECT_FALSE(make_task(config)->batch(Split::train, 3, 4).tokens.equal(batch.tokens));
  }
}

TEST(Tasks, TokensAndTargetsAreInTheVocabulary) {
  const TemporaryFolder folder;
  for (const Config& config : all_configs(folder)) {
    SCOPED_TRACE(config.task);
    const auto task = make_task(config);
    for (const Split split : {Split::train, Split::valid}) {
      const Batch batch = task->batch(split, 0, 4);
      EXPECT_EQ(batch.tokens.dim(), 2);
      EXPECT_EQ(batch.tokens.size(1), config.length);
      EXPECT_EQ(batch.targets.sizes(), batch.tokens.sizes());
      const auto in_range = [&](std::int64_t id) { return id >= 0 && id < task->vocabulary(); };
      for (std::int64_t r = 0; r < batch.tokens.size(0); ++r) {
        for (const std::int64_t id : row(batch.tokens, r)) EXPECT_TRUE(in_range(id)) << id;
        std::int64_t asked = 0;
        for (const std::int64_t id : row(batch.targets, r)) {
          asked += id != kIgnore;
          EXPECT_TRUE(id == kIgnore || in_range(id)) << id;
        }
        EXPECT_GT(asked, 0);
      }
    }
  }
}

TEST(Tasks, HeldOutBatchesEnd) {
  const TemporaryFolder folder;
  for (const Config& config : all_configs(folder)) {
    SCOPED_TRACE(config.task);
    const auto task = make_task(config);
    for (const Split split : {Split::valid, Split::test}) {
      const std::int64_t all = task->batches(split, 1), batches = task->batches(split, 7);
      EXPECT_EQ(batches, (all + 6) / 7);
      EXPECT_EQ(task->batch(split, batches - 1, 7).tokens.size(0), all - 7 * (batches - 1));
      EXPECT_THROW(task->batch(split, batches, 7), Error);
      EXPECT_THROW(task->batch(split, -1, 7), Error);
      EXPECT_THROW(task->batch(split, 0, 0), Error);
    }
    EXPECT_NO_THROW(task->batch(Split::train, 1'000'000'000, 2));
  }
}

TEST(Tasks, OnlyTextHasText) {
  EXPECT_THROW(make_task(config_for("copy", 64))->encode("a"), Error);
  EXPECT_THROW(make_task(config_for("recall", 64))->decode({1}), Error);
}

TEST(Tasks, LengthsThatMakeNoSenseAreRefused) {
  for (const char* const name : {"copy", "recall", "bytes", "masked"}) {
    for (const std::int64_t length : {std::int64_t{-5}, std::int64_t{0}, std::int64_t{1} << 40}) {
      EXPECT_NE(error_of(config_for(name, length)), "") << name << ' ' << length;
    }
  }
}

TEST(Metrics, FollowFromSums) {
  const Score score{.nats = 4.0 * std::log(8.0), .count = 4, .correct = 3};
  EXPECT_DOUBLE_EQ(metric_value(Metric::accuracy, score), 0.75);
  EXPECT_DOUBLE_EQ(metric_value(Metric::bits_per_byte, score), 3.0);
  EXPECT_DOUBLE_EQ(metric_value(Metric::bits_per_masked_byte, score), 3.0);
  EXPECT_DOUBLE_EQ(metric_value(Metric::perplexity, score), 8.0);
  EXPECT_DOUBLE_EQ(metric_value(Metric::accuracy, {}), 0.0);
  EXPECT_TRUE(better(Metric::accuracy, 0.9, 0.8));
  EXPECT_TRUE(better(Metric::perplexity, 8.0, 9.0));
  EXPECT_FALSE(better(Metric::bits_per_byte, 1.0, 1.0));
}

TEST(CopyTask, EveryAnswerIsInTheOtherCopy) {
  Config config = config_for("copy", 66);
  config.copy.mask = 0.5;
  const auto task = make_task(config);
  EXPECT_EQ(task->vocabulary(), 12);
  EXPECT_FALSE(task->causal());
  constexpr std::size_t kWord = 32, kSecond = 2 + kWord;
  const std::int64_t mask = 11;
  const Batch batch = task->batch(Split::train, 0, 20);
  std::set<std::int64_t> symbols;
  std::int64_t left = 0, right = 0;
  for (std::int64_t r = 0; r < 20; ++r) {
    const Tokens tokens = row(batch.tokens, r), targets = row(batch.targets, r);
    EXPECT_EQ(tokens[0], 0);
    EXPECT_EQ(tokens[1 + kWord], 0);
    std::int64_t masked = 0;
    for (std::size_t i = 0; i < kWord; ++i) {
      const std::int64_t a = tokens[1 + i], b = tokens[kSecond + i];
      const std::int64_t target_a = targets[1 + i], target_b = targets[kSecond + i];
      if (a == b) {  // no target
        EXPECT_EQ(target_a, kIgnore);
        EXPECT_EQ(target_b, kIgnore);
        EXPECT_NE(a, mask);
        symbols.insert(a);
        continue;
      }
      ++masked;
      ++(a == mask ? left : right);
      EXPECT_EQ(a == mask ? target_a : target_b, a == mask ? b : a);
      EXPECT_EQ(a == mask ? target_b : target_a, kIgnore);
    }
    EXPECT_EQ(masked, 16);
  }
  EXPECT_EQ(symbols, (std::set<std::int64_t>{1, 2, 3, 4, 5, 6, 7, 8, 9, 10}));
  EXPECT_GT(left, 100);  // of 320; seven standard deviations
  EXPECT_GT(right, 100);
}

TEST(CopyTask, EverySymbolIsAsLikelyAsTheOthers) {
  const auto task = make_task(config_for("copy", 66));
  const Batch batch = task->batch(Split::train, 0, 500);
  std::map<std::int64_t, double> counts;
  double total = 0;
  for (std::int64_t r = 0; r < 500; ++r) {
    for (const std::int64_t target : row(batch.targets, r)) {
      if (target != kIgnore) ++counts[target], ++total;
    }
  }
  for (const auto& [symbol, count] : counts) {  // five standard deviations
    EXPECT_NEAR(count, total / 10.0, 5.0 * std::sqrt(total * 0.09)) << symbol;
  }
  EXPECT_DOUBLE_EQ(task->baselines().at(0).value, 0.1);
}

TEST(CopyTask, ImpossibleConfigsAreRefused) {
  EXPECT_NE(error_of(config_for("copy", 65)).find("expected an even length"), std::string::npos);
  EXPECT_NE(error_of(config_for("copy", 2)).find("expected an even length"), std::string::npos);
  EXPECT_EQ(error_of(config_for("copy", 4)), "");
  Config config = config_for("copy", 64);
  config.copy.symbols = 1;
  EXPECT_NE(error_of(config).find("symbols; got 1"), std::string::npos);
  config = config_for("copy", 64);
  for (const double mask : {0.0, -0.1, 1.1, std::nan("")}) {
    config.copy.mask = mask;
    EXPECT_NE(error_of(config).find("copy.mask"), std::string::npos) << mask;
  }
}

// The contents of a recall row, parsed from its tokens.
struct RecallRow {
  std::map<std::int64_t, std::size_t> pair_places;  // by key
  std::map<std::int64_t, std::int64_t> values;      // by key
  std::map<std::size_t, std::int64_t> queries;      // key by place
};

RecallRow read_recall(const Tokens& tokens, const RecallConfig& config) {
  RecallRow found;
  const std::int64_t first_query = 1 + config.keys * config.values;
  for (std::size_t place = 0; place < tokens.size(); ++place) {
    const std::int64_t id = tokens[place];
    if (id >= first_query) {
      found.queries[place] = id - first_query;
    } else if (id > 0) {
      const std::int64_t key = (id - 1) / config.values;
      EXPECT_FALSE(found.pair_places.contains(key)) << "two pairs have the same key";
      found.pair_places[key] = place;
      found.values[key] = (id - 1) % config.values;
    }
  }
  return found;
}

TEST(RecallTask, EveryQueryAsksForTheValueOfItsKey) {
  for (const bool causal : {false, true}) {
    Config config = config_for("recall", 100);
    config.recall = {.keys = 20, .values = 4, .pairs = 12, .queries = 30, .causal = causal};
    const auto task = make_task(config);
    EXPECT_EQ(task->causal(), causal);
    const std::vector<std::string> strata = task->strata();
    EXPECT_EQ(strata.front(), "distance 1");
    EXPECT_EQ(strata.back(), "distance 64-127");
    EXPECT_EQ(task->vocabulary(), 1 + 20 * 4 + 20);
    const Batch batch = task->batch(Split::train, 5, 50);
    std::int64_t before = 0;
    for (std::int64_t r = 0; r < 50; ++r) {
      const Tokens targets = row(batch.targets, r), strata_of = row(batch.strata, r);
      const RecallRow found = read_recall(row(batch.tokens, r), config.recall);
      EXPECT_EQ(found.pair_places.size(), 12u);
      EXPECT_EQ(found.queries.size(), 30u);
      EXPECT_EQ(std::count(targets.begin(), targets.end(), kIgnore), 70);
      for (const auto& [place, key] : found.queries) {
        ASSERT_TRUE(found.values.contains(key));
        EXPECT_EQ(targets[place], found.values.at(key));
        const std::int64_t distance =
            static_cast<std::int64_t>(place) - static_cast<std::int64_t>(found.pair_places.at(key));
        before += distance < 0;
        const std::int64_t low = std::int64_t{1} << strata_of[place];
        EXPECT_GE(std::abs(distance), low);
        EXPECT_LT(std::abs(distance), 2 * low);
        EXPECT_TRUE(strata.at(static_cast<std::size_t>(strata_of[place]))
                        .starts_with("distance " + std::to_string(low)));
      }
    }
    EXPECT_EQ(before == 0, causal);
  }
}

TEST(RecallTask, ARowMayBeFull) {
  Config config = config_for("recall", 10);
  config.recall = {.keys = 5, .values = 2, .pairs = 5, .queries = 5, .causal = true};
  const Tokens tokens = row(make_task(config)->batch(Split::valid, 0, 1).tokens, 0);
  EXPECT_EQ(std::count(tokens.begin(), tokens.end(), 0), 0);
}

TEST(RecallTask, ImpossibleConfigsAreRefused) {
  const auto error = [](RecallConfig recall, std::int64_t length) {
    Config config = config_for("recall", length);
    config.recall = recall;
    return error_of(config);
  };
  EXPECT_NE(error({.keys = 8, .values = 2, .pairs = 9, .queries = 4}, 64)
                .find("at least 9 keys, one per pair; got 8"),
            std::string::npos);
  EXPECT_NE(error({.keys = 8, .values = 2, .pairs = 8, .queries = 9}, 16)
                .find("8 pairs + 9 queries; got 16"),
            std::string::npos);
  EXPECT_NE(error({.keys = 0, .values = 2, .pairs = 1, .queries = 1}, 16).find("1 keys or more"),
            std::string::npos);
  EXPECT_NE(error({.keys = 8, .values = 1, .pairs = 1, .queries = 1}, 16).find("2 values or more"),
            std::string::npos);
  EXPECT_NE(error({.keys = 8, .values = 2, .pairs = 0, .queries = 1}, 16).find("1 pairs or more"),
            std::string::npos);
  EXPECT_NE(error({.keys = 8, .values = 2, .pairs = 1, .queries = 0}, 16).find("1 queries or more"),
            std::string::npos);
  EXPECT_NE(error({.keys = std::int64_t{1} << 40, .values = 2, .pairs = 1, .queries = 1}, 16), "");
}

// The tokens of a held-out part, concatenated from its rows. Each row continues where the previous
// one ended, and targets are the next tokens.
Tokens part_of(const Task& task, Split split, std::int64_t rows) {
  Tokens part;
  for (std::int64_t b = 0; b < task.batches(split, rows); ++b) {
    const Batch batch = task.batch(split, b, rows);
    for (std::int64_t r = 0; r < batch.tokens.size(0); ++r) {
      const Tokens tokens = row(batch.tokens, r), targets = row(batch.targets, r);
      const auto length = static_cast<std::size_t>(
          batch.lengths.defined() ? batch.lengths[r].item<std::int64_t>() : batch.tokens.size(1));
      for (std::size_t i = 0; i < tokens.size(); ++i) {
        if (i >= length) {
          EXPECT_EQ(targets[i], kIgnore);
          continue;
        }
        if (part.empty()) part.push_back(tokens[i]);
        EXPECT_EQ(part.back(), tokens[i]);
        part.push_back(targets[i]);
      }
    }
  }
  return part;
}

// The text of the rows of a held-out part, with the masked bytes put back.
std::string unmasked_part(const Task& task, Split split, std::int64_t rows) {
  std::string part;
  for (std::int64_t b = 0; b < task.batches(split, rows); ++b) {
    const Batch batch = task.batch(split, b, rows);
    for (std::int64_t r = 0; r < batch.tokens.size(0); ++r) {
      const Tokens tokens = row(batch.tokens, r), targets = row(batch.targets, r);
      const auto length = static_cast<std::size_t>(
          batch.lengths.defined() ? batch.lengths[r].item<std::int64_t>() : batch.tokens.size(1));
      for (std::size_t i = 0; i < length; ++i) {
        EXPECT_EQ(tokens[i] == 256, targets[i] != kIgnore);  // 256: the mask
        part += static_cast<char>(tokens[i] == 256 ? targets[i] : tokens[i]);
      }
    }
  }
  return part;
}

TEST(MaskedTask, HeldOutRowsCoverTheirPart) {
  const TemporaryFolder folder;
  std::string text;
  for (int i = 0; i < 1000; ++i) text += static_cast<char>(i * i % 251);
  write_file(folder.path("a"), text);
  Config config = config_for("masked", 16);
  config.data = folder.path("a");
  config.text.valid = 0.1;
  config.text.test = 0.2;
  const auto task = make_task(config);
  EXPECT_EQ(task->vocabulary(), 257);
  EXPECT_FALSE(task->causal());
  EXPECT_STREQ(metric_name(task->metric()), "bits per masked byte");
  EXPECT_EQ(unmasked_part(*task, Split::valid, 3), text.substr(700, 100));
  EXPECT_EQ(unmasked_part(*task, Split::test, 4), text.substr(800));
  EXPECT_EQ(task->batches(Split::valid, 1), 7);
}

TEST(MaskedTask, MasksTheShareOfEveryRow) {
  Config config = config_for("masked", 200);
  for (const double share : {0.001, 0.15, 0.5, 1.0}) {
    config.masked.share = share;
    const Batch batch = make_task(config)->batch(Split::train, 0, 50);
    const auto wanted = std::max<std::int64_t>(1, std::llround(share * 200));
    for (std::int64_t r = 0; r < 50; ++r) {
      const Tokens tokens = row(batch.tokens, r), targets = row(batch.targets, r);
      EXPECT_EQ(std::count(tokens.begin(), tokens.end(), 256), wanted);
      EXPECT_EQ(std::count(targets.begin(), targets.end(), kIgnore), 200 - wanted);
    }
  }
}

// Equal questions for all seeds; other masks in every row.
TEST(MaskedTask, HeldOutMasksDoNotDependOnTheSeed) {
  Config config = config_for("masked", 100);
  const auto task = make_task(config);
  config.seed = 2;
  const auto other = make_task(config);
  for (const Split split : {Split::valid, Split::test}) {
    expect_equal(task->batch(split, 0, 8), other->batch(split, 0, 8));
  }
  const at::Tensor asked = task->batch(Split::valid, 0, 2).targets.ne(kIgnore);
  EXPECT_FALSE(asked[0].equal(asked[1]));
}

TEST(MaskedTask, LinesOfTablesAreScoredSeparately) {
  const TemporaryFolder folder;
  std::string text;
  while (text.size() < 4000) text += "prose | and +\n  | a | b |\n\n+---+\n   \n| cut";
  write_file(folder.path("a"), text);
  Config config = config_for("masked", 50);
  config.data = folder.path("a");
  config.text.valid = config.text.test = 0.1;
  const auto task = make_task(config);
  EXPECT_EQ(task->strata(), (std::vector<std::string>{"outside tables", "in tables"}));
  const auto begin = static_cast<std::size_t>(0.8 * static_cast<double>(text.size()));
  std::vector<std::int64_t> wanted;  // of every byte of the text
  for (std::size_t at = 0; at < text.size();) {
    const std::size_t end = std::min(text.find('\n', at), text.size() - 1) + 1;
    const std::string line = text.substr(at, end - at);
    const std::size_t first = line.find_first_not_of(" \n");
    const bool table = first != std::string::npos && (line[first] == '|' || line[first] == '+');
    wanted.insert(wanted.end(), line.size(), table ? 1 : 0);
    at = end;
  }
  const Batch batch = task->batch(Split::valid, 0, 3);  // rows that begin inside of lines
  for (std::int64_t r = 0; r < 3; ++r) {
    const Tokens strata = row(batch.strata, r);
    for (std::size_t i = 0; i < 50; ++i) {
      const std::size_t place = begin + static_cast<std::size_t>(r) * 50 + i;
      // The part begins in the middle of a line, whose beginning is in the training part.
      if (place < text.find('\n', begin)) continue;
      EXPECT_EQ(strata[i], wanted[place]) << "row " << r << ", byte " << i;
    }
  }
}

TEST(MaskedTask, ImpossibleSharesAreRefused) {
  Config config = config_for("masked", 64);
  for (const double share : {0.0, -0.1, 1.1, std::nan("")}) {
    config.masked.share = share;
    EXPECT_NE(error_of(config).find("masked.share"), std::string::npos) << share;
  }
}

TEST(BytesTask, HeldOutRowsCoverTheirPart) {
  const TemporaryFolder folder;
  std::string text;
  for (int i = 0; i < 1000; ++i) text += static_cast<char>(i * i % 251);
  write_file(folder.path("a"), text);
  Config config = config_for("bytes", 16);
  config.data = folder.path("a");
  config.text.valid = 0.1;
  config.text.test = 0.2;
  const auto task = make_task(config);
  EXPECT_EQ(task->vocabulary(), 256);
  EXPECT_TRUE(task->causal());
  EXPECT_EQ(part_of(*task, Split::valid, 3), task->encode(text.substr(700, 100)));
  EXPECT_EQ(part_of(*task, Split::test, 4), task->encode(text.substr(800)));
  EXPECT_EQ(task->batches(Split::valid, 1), 7);  // 99 targets
}

TEST(BytesTask, TrainingRowsAreWindowsOfTheTrainingPart) {
  const TemporaryFolder folder;
  std::string text;
  for (int i = 0; i < 240; ++i) text += static_cast<char>(i);  // each byte is its position
  write_file(folder.path("a"), text);
  Config config = config_for("bytes", 16);
  config.data = folder.path("a");
  config.text.valid = config.text.test = 0.25;
  const auto task = make_task(config);
  const Batch batch = task->batch(Split::train, 0, 2000);
  EXPECT_FALSE(batch.lengths.defined());
  std::set<std::int64_t> starts;
  for (std::int64_t r = 0; r < 2000; ++r) {
    const Tokens tokens = row(batch.tokens, r), targets = row(batch.targets, r);
    starts.insert(tokens[0]);
    for (std::size_t i = 0; i < 16; ++i) {
      EXPECT_EQ(tokens[i], tokens[0] + static_cast<std::int64_t>(i));
      EXPECT_EQ(targets[i], tokens[i] + 1);
    }
  }
  EXPECT_EQ(*starts.begin(), 0);
  EXPECT_EQ(*starts.rbegin(), 120 - 16 - 1);
  EXPECT_EQ(starts.size(), 104u);
}

TEST(BytesTask, TheBuiltInTextNeedsNoData) {
  const auto task = make_task(config_for("bytes", 64));
  const double bits = task->baselines().at(0).value;
  EXPECT_GT(bits, 4.0);  // English and C++ by frequency
  EXPECT_LT(bits, 6.0);
  const auto size = static_cast<std::int64_t>(builtin_corpus().size());
  EXPECT_NEAR(task->batches(Split::valid, 1), static_cast<double>(size) * 0.05 / 64.0, 2.0);
}

TEST(BytesTask, FrequenciesOfAnEvenTextCostTheirLogarithm) {
  const TemporaryFolder folder;
  std::string text;
  for (int i = 0; i < 100'000; ++i) text += "abcd"[i % 4];
  write_file(folder.path("a"), text);
  Config config = config_for("bytes", 16);
  config.data = folder.path("a");
  // Two bits, plus a little for the 252 bytes that do not occur.
  EXPECT_NEAR(make_task(config)->baselines().at(0).value, 2.0, 0.01);
}

TEST(BytesTask, TextIsItsBytes) {
  const auto task = make_task(config_for("bytes", 64));
  const std::string text = "a\xc3\xa4\n\xff";
  EXPECT_EQ(task->encode(text), (Tokens{97, 195, 164, 10, 255}));
  EXPECT_EQ(task->decode(task->encode(text)), text);
  EXPECT_THROW(task->decode({256}), Error);
  EXPECT_THROW(task->decode({-1}), Error);
}

TEST(BytesTask, TextThatIsTooShortIsRefused) {
  const TemporaryFolder folder;
  write_file(folder.path("a"), std::string(100, 'a'));
  Config config = config_for("bytes", 90);
  config.data = folder.path("a");
  EXPECT_NE(error_of(config).find("expected more than 90 training tokens"), std::string::npos);
  config.length = 4;
  EXPECT_EQ(error_of(config), "");
  config.length = 5;
  EXPECT_NE(error_of(config).find("expected more than 5 validation tokens"), std::string::npos);
  for (const auto& [valid, test] :
       {std::pair{0.0, 0.1}, {0.5, 0.5}, {0.1, -0.1}, {std::nan(""), 0.1}}) {
    config.text.valid = valid;
    config.text.test = test;
    EXPECT_NE(error_of(config).find("expected text.valid above 0"), std::string::npos);
  }
  config.data = folder.path("missing");
  EXPECT_NE(error_of(config).find("no such file or folder"), std::string::npos);
}

// A folder like WikiText-2's.
Config split_config(const TemporaryFolder& folder) {
  std::filesystem::create_directory(folder.path("text"));
  write_file(folder.path("text/train.txt"), " = Title = \n \n the cat and the dog \n the <unk> \n");
  write_file(folder.path("text/valid.txt"), "the cow\tand the cat\r\n");
  write_file(folder.path("text/test.txt"), "dog\n\n");
  write_file(folder.path("text/README"), "not a part");
  Config config = config_for("words", 4);
  config.data = folder.path("text");
  return config;
}

TEST(WordsTask, FilesNamedAsPartsAreTheParts) {
  const TemporaryFolder folder;
  const auto task = make_task(split_config(folder));
  // <unk> <eos>, then by frequency: the = Title and cat dog
  EXPECT_EQ(task->vocabulary(), 8);
  EXPECT_EQ(part_of(*task, Split::valid, 2), task->encode("the cow and the cat\n"));
  EXPECT_EQ(part_of(*task, Split::test, 2), task->encode("dog\n\n"));
  EXPECT_EQ(task->encode("the = and cow <unk>\nthe"), (Tokens{2, 3, 5, 0, 0, 1, 2}));
}

TEST(WordsTask, RareWordsAreUnknown) {
  const TemporaryFolder folder;
  Config config = split_config(folder);
  config.text.vocabulary = 4;
  const auto task = make_task(config);
  EXPECT_EQ(task->vocabulary(), 4);
  EXPECT_EQ(task->encode("the = cat dog"), (Tokens{2, 3, 0, 0}));
  config.text.vocabulary = 2;
  EXPECT_NE(error_of(config).find("expected a vocabulary of 3 words or more"), std::string::npos);
}

TEST(WordsTask, TextComesBackPieceByPiece) {
  const TemporaryFolder folder;
  const auto task = make_task(split_config(folder));
  const Tokens tokens = task->encode("the cat\nand cow");
  EXPECT_EQ(task->decode(tokens), "the cat \nand <unk> ");
  std::string pieces;
  for (const std::int64_t token : tokens) pieces += task->decode({token});
  EXPECT_EQ(pieces, task->decode(tokens));
  EXPECT_THROW(task->decode({8}), Error);
}

TEST(WordsTask, OtherTextIsCutBetweenLines) {
  const TemporaryFolder folder;
  std::string text;
  for (int i = 0; i < 100; ++i) text += "a b c\n";
  write_file(folder.path("a.txt"), text);
  Config config = config_for("words", 8);
  config.data = folder.path("a.txt");
  config.text.valid = 0.099;  // in the middle of a line
  config.text.test = 0.201;
  const auto task = make_task(config);
  const auto lines = [&](Split split) {
    const Tokens part = part_of(*task, split, 1);
    EXPECT_EQ(part.front(), task->encode("a")[0]);
    EXPECT_EQ(part.back(), task->encode("\n")[0]);
    return std::count(part.begin(), part.end(), task->encode("\n")[0]);
  };
  EXPECT_EQ(lines(Split::valid), 10);
  EXPECT_EQ(lines(Split::test), 20);
  // Four equally frequent words; <unk> does not occur.
  EXPECT_NEAR(task->baselines().at(0).value, 4.0, 0.05);
}

TEST(WordsTask, WantsText) {
  EXPECT_NE(error_of(config_for("words", 8)).find("expected text in --data"), std::string::npos);
}

}  // namespace
}  // namespace coterie::train
