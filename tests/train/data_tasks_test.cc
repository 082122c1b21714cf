// SPDX-License-Identifier: MIT
// Tasks on examples: ListOps, Pathfinder, images, reviews, retrieval and speech, on tiny files.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <filesystem>
#include <map>
#include <numbers>
#include <set>
#include <string>
#include <vector>

#include "coterie/error.h"
#include "formats/files.h"
#include "tests/support/tensors.h"
#include "tests/train/runs.h"
#include "tests/train/temporary_folder.h"
#include "train/evaluate.h"
#include "train/image_files.h"
#include "train/inspect.h"
#include "train/mfcc.h"
#include "train/task.h"
#include "train/trainer.h"
#include "train/transcripts.h"

namespace coterie::train {
namespace {

using test::error_of;

std::string be32(std::uint32_t value) {
  std::string bytes;
  for (int shift = 24; shift >= 0; shift -= 8) bytes += static_cast<char>(value >> shift & 0xFF);
  return bytes;
}

std::string le(std::uint32_t value, int bytes) {
  std::string text;
  for (int i = 0; i < bytes; ++i) text += static_cast<char>(value >> 8 * i & 0xFF);
  return text;
}

void write_at(const TemporaryFolder& folder, const std::string& name, const std::string& text) {
  const std::string path = folder.path(name);
  std::filesystem::create_directories(std::filesystem::path(path).parent_path());
  write_file(path, text);
}

// 40 training and 8 test images of 4 x 4: those of class c are dark in row c.
void write_idx(const TemporaryFolder& folder) {
  for (const auto& [name, count] : std::map<std::string, int>{{"train", 40}, {"t10k", 8}}) {
    const auto size = static_cast<std::uint32_t>(count);
    std::string images = be32(2051) + be32(size) + be32(4) + be32(4),
                labels = be32(2049) + be32(size);
    for (int i = 0; i < count; ++i) {
      for (int place = 0; place < 16; ++place) {
        images += static_cast<char>(place / 4 == i % 4 ? i : 200 + i);
      }
      labels += static_cast<char>(i % 4);
    }
    write_at(folder, name + "-images-idx3-ubyte", images);
    write_at(folder, name + "-labels-idx1-ubyte", labels);
  }
}

void write_reviews(const TemporaryFolder& folder) {
  for (const char* const part : {"train", "test"}) {
    std::string lines;
    for (int i = 0; i < 40; ++i) {
      const bool good = i < 20;
      lines += std::string(R"({"id": 1, "text": ")") + (good ? "good " : "bad ") +
               std::string(static_cast<std::size_t>(i), 'x') + R"(", "label": )" +
               (good ? "1" : "0") + "}\n";
    }
    write_at(folder, std::string("reviews.") + part + ".jsonl", lines);
  }
}

// Articles whose bytes are one letter each.
void write_articles(const TemporaryFolder& folder) {
  for (const auto& [name, first] : std::map<std::string, char>{{"train", 'a'}, {"valid", 'n'}}) {
    std::string text = "no title yet\n = = Section = = \n" + std::string(100, 'z') + "\n";
    for (int i = 0; i < 12; ++i) {
      text += " = Title = \n" + std::string(100, static_cast<char>(first + i)) + "\n";
    }
    write_at(folder, std::string(name) + ".txt", text);
  }
}

// A recording that says its transcript: each symbol is a burst in a cepstrum of its own.
std::string mfc_of(const std::string& text) {
  std::string floats;
  for (const char character : text) {
    const int symbol = character == ' ' ? 12 : (character - 'A') % 12;
    for (int frame = 0; frame < 8; ++frame) {
      for (int c = 0; c < 13; ++c) {
        floats += be32(std::bit_cast<std::uint32_t>(c == symbol && frame < 5 ? 3.0F : 0.0F));
      }
    }
  }
  return be32(static_cast<std::uint32_t>(floats.size() / 4)) + floats;
}

void write_an4(const TemporaryFolder& folder) {
  const std::vector<std::string> texts = {"A B", "BC", "CAB A", "B"};
  for (const std::string part : {"train", "test"}) {
    std::string ids, lines;
    const std::string root = part == "train" ? "an4_clstk" : "an4test_clstk";
    for (int speaker = 0; speaker < 11; ++speaker) {
      for (std::size_t i = 0; i < texts.size(); ++i) {
        const std::string who = std::string("s") + static_cast<char>('a' + speaker);
        const std::string name = "an" + std::to_string(i) + "-" + who;
        ids += root + "/" + who + "/" + name + "\n";
        lines += texts[i] + " (" + name + ")\n";
        write_at(folder, "an4/feat/" + root + "/" + who + "/" + name + ".mfc", mfc_of(texts[i]));
      }
    }
    write_at(folder, "an4/etc/an4_" + part + ".fileids", ids);
    write_at(folder, "an4/etc/an4_" + part + ".transcription", lines);
  }
}

std::string wav(std::uint32_t rate, const std::vector<std::int16_t>& samples) {
  std::string data;
  for (const std::int16_t sample : samples) data += le(static_cast<std::uint16_t>(sample), 2);
  return "RIFF" + le(static_cast<std::uint32_t>(36 + data.size()), 4) + "WAVEfmt " + le(16, 4) +
         le(1, 2) + le(1, 2) + le(rate, 4) + le(2 * rate, 4) + le(2, 2) + le(16, 2) + "LIST" +
         le(2, 4) + "xy" + "data" + le(static_cast<std::uint32_t>(data.size()), 4) + data;
}

std::vector<std::int16_t> tone(double hertz, int samples) {
  std::vector<std::int16_t> values;
  for (int i = 0; i < samples; ++i) {
    values.push_back(
        static_cast<std::int16_t>(8000 * std::sin(2 * std::numbers::pi * hertz * i / 8000)));
  }
  return values;
}

Config small(const std::string& task, std::int64_t length) {
  Config config = tiny_config(task);
  config.length = length;
  config.model.embedding_std = 0;
  return config;
}

// Every task with its data in `folder`.
std::vector<Config> data_configs(const TemporaryFolder& folder) {
  const auto with_data = [&](Config config, const char* name) {
    config.data = folder.path(name);
    return config;
  };
  write_idx(folder);
  const TemporaryFolder& f = folder;
  std::filesystem::create_directories(f.path("images"));
  for (const char* const name : {"train-images-idx3-ubyte", "train-labels-idx1-ubyte",
                                 "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"}) {
    std::filesystem::rename(f.path(name), f.path(std::string("images/") + name));
  }
  write_an4(folder);
  for (const char* const name : {"reviews.train.jsonl", "train.txt"}) {
    EXPECT_FALSE(std::filesystem::exists(f.path(name)));
  }
  write_reviews(folder);
  std::filesystem::create_directories(f.path("reviews"));
  for (const char* const name : {"reviews.train.jsonl", "reviews.test.jsonl"}) {
    std::filesystem::rename(f.path(name), f.path(std::string("reviews/") + name));
  }
  write_articles(folder);
  std::filesystem::create_directories(f.path("articles"));
  for (const char* const name : {"train.txt", "valid.txt"}) {
    std::filesystem::rename(f.path(name), f.path(std::string("articles/") + name));
  }
  std::vector<Config> configs = {small("listops", 60),
                                 small("pathfinder", 400),
                                 with_data(small("images", 16), "images"),
                                 with_data(small("images", 16), "images"),
                                 with_data(small("imdb", 24), "reviews"),
                                 with_data(small("retrieval", 41), "articles"),
                                 with_data(small("speech", 80), "an4"),
                                 with_data(small("speech", 80), "an4")};
  configs[1].pathfinder.paddles = 4;
  configs[1].pathfinder.distractors = 1;
  configs[3].images.predict = "pixels";
  configs[6].speech.subsample = 2;
  configs[7].speech.join = 2;
  configs[7].speech.beam = 4;
  return configs;
}

// A training row as numbers, whatever its kind.
std::string row_text(const Batch& batch, std::int64_t row) {
  const at::Tensor tokens = batch.tokens[row].to(at::kDouble).flatten();
  const at::Tensor targets = batch.targets[row].to(at::kDouble);
  std::string text;
  for (const at::Tensor& part : {tokens, targets}) {
    for (std::int64_t i = 0; i < part.numel(); ++i) {
      const double value = part[i].item<double>();
      if (value != 0 && value != kIgnore) text += std::to_string(value) + " ";
    }
  }
  return text;
}

TEST(DataTasks, EpochsHaveAllExamplesInAnOrderOfTheSeed) {
  const TemporaryFolder folder;
  for (Config config : data_configs(folder)) {
    if (config.task == "listops" || config.task == "pathfinder" || config.task == "retrieval" ||
        config.speech.join > 1) {
      continue;  // too many examples, or joined ones
    }
    SCOPED_TRACE(config.task);
    std::set<std::string> epochs[3];
    constexpr std::int64_t examples = 36;  // of all these tasks
    const auto task = make_task(config);
    std::vector<std::string> order[2];
    for (std::int64_t i = 0; i < 2 * examples; ++i) {
      const std::string row = row_text(task->batch(Split::train, i, 1), 0);
      epochs[i / examples].insert(row);
      order[i / examples].push_back(row);
    }
    EXPECT_EQ(epochs[0], epochs[1]);
    EXPECT_NE(order[0], order[1]);
    config.seed = 2;
    const auto other = make_task(config);
    for (std::int64_t i = 0; i < examples; ++i) {
      epochs[2].insert(row_text(other->batch(Split::train, i, 1), 0));
    }
    EXPECT_EQ(epochs[0], epochs[2]);
    EXPECT_NE(
        row_text(task->batch(Split::train, 0, 8), 0) + row_text(task->batch(Split::train, 0, 8), 1),
        row_text(other->batch(Split::train, 0, 8), 0) +
            row_text(other->batch(Split::train, 0, 8), 1));
    // Held-out data does not depend on the seed.
    EXPECT_EQ(row_text(task->batch(Split::valid, 0, 1), 0),
              row_text(other->batch(Split::valid, 0, 1), 0));
  }
}

TEST(DataTasks, HeldOutBatchesEndAndRowsAreEqualInAnyBatch) {
  const TemporaryFolder folder;
  for (const Config& config : data_configs(folder)) {
    SCOPED_TRACE(config.task);
    const auto task = make_task(config);
    EXPECT_EQ(task->name(), config.task);
    EXPECT_EQ(row_text(task->batch(Split::train, 5, 1), 0),
              row_text(task->batch(Split::train, 1, 4), 1));
    for (const Split split : {Split::valid, Split::test}) {
      const std::int64_t all = task->batches(split, 1), batches = task->batches(split, 3);
      if (config.task == "retrieval" && split == Split::test) {
        EXPECT_EQ(all, 0);  // there is no test file
        continue;
      }
      EXPECT_GT(all, 0);
      EXPECT_EQ(batches, (all + 2) / 3);
      EXPECT_EQ(task->batch(split, batches - 1, 3).tokens.size(0), all - 3 * (batches - 1));
      EXPECT_THROW(task->batch(split, batches, 3), Error);
      EXPECT_THROW(task->batch(split, -1, 3), Error);
      EXPECT_THROW(task->batch(split, 0, 0), Error);
    }
  }
}

// All verbs need these: a step, a score, an inspection, and equal bits after a resume.
TEST(DataTasks, TrainEvaluateInspectAndResume) {
  const TemporaryFolder folder;
  std::int64_t number = 0;
  for (Config config : data_configs(folder)) {
    SCOPED_TRACE(config.task);
    config.train.steps = 4;
    config.train.batch = 3;
    config.train.eval_every = 2;
    config.attention = config.images.predict == "pixels"
                           ? "1*local(window=8)+1*routing(clusters=2,window=8)"
                           : "i-clustered(clusters=4,topk=4)";
    config.out = folder.path("whole" + std::to_string(number));
    const TrainResult whole = run(config);
    ASSERT_TRUE(whole.evaluation);
    EXPECT_TRUE(std::isfinite(whole.evaluation->score.loss()));
    EXPECT_GT(whole.evaluation->score.count, 0);

    Config half = config;
    half.out = folder.path("half" + std::to_string(number++));
    half.schedule.decay = "constant";
    config.schedule.decay = "constant";
    config.out += "-constant";
    run(config);
    half.train.steps = 2;
    run(half);
    half.train.steps = 4;
    run(half, /*resume=*/true);
    EXPECT_EQ(losses(half.out), losses(config.out));

    const auto task = make_task(config);
    const torch_api::Model model = make_model(config, *task);
    EXPECT_FALSE(inspect(model, *task, 2, 0).groups.empty());
    EXPECT_THROW(language_model(model, *task), Error);
    if (config.train.micro_batch == 0) {  // splitting a batch changes the order of sums only
      Config split = config;
      split.attention = "full";
      split.out = folder.path("split" + std::to_string(number));
      Config together = split;
      together.out += "-together";
      split.train.micro_batch = 1;
      run(split);
      run(together);
      const std::vector<double> a = losses(split.out), b = losses(together.out);
      for (std::size_t i = 0; i < a.size(); ++i)
        EXPECT_NEAR(a[i], b[i], 1e-3 * (1 + std::abs(b[i])));
    }
  }
}

TEST(DataTasks, OptionsForAnswersPerTokenAreRefused) {
  const Config listops = small("listops", 60);
  const auto refused = [&](auto change) {
    Config config = listops;
    change(config);
    const auto task = make_task(config);
    return error_of([&] { make_model(config, *task); });
  };
  EXPECT_NE(refused([](Config& c) { c.train.truncate = 0.5; }).find("--train.truncate"),
            std::string::npos);
  EXPECT_NE(refused([](Config& c) { c.train.context = 2; }).find("--train.context"),
            std::string::npos);
  EXPECT_NE(refused([](Config& c) { c.model.tied = true; }).find("--model.tied"),
            std::string::npos);
  EXPECT_EQ(refused([](Config& c) { c.model.positions = "learned"; }), "");
}

// The value of an expression by its definition, from its text.
std::int64_t value_of_listops(const std::vector<std::int64_t>& tokens, std::size_t& at) {
  const std::int64_t token = tokens[at++];
  if (token < 10) return token;
  std::vector<std::int64_t> values;
  while (tokens[at] != 14) values.push_back(value_of_listops(tokens, at));
  ++at;
  EXPECT_GE(values.size(), 2U);
  EXPECT_LE(values.size(), 10U);
  std::sort(values.begin(), values.end());
  std::int64_t sum = 0;
  for (const std::int64_t value : values) sum += value;
  const std::size_t n = values.size();
  if (token == 10) return values[0];
  if (token == 11) return values[n - 1];
  if (token == 12) return n % 2 ? values[n / 2] : (values[n / 2] + values[n / 2 - 1]) / 2;
  EXPECT_EQ(token, 13);
  return sum % 10;
}

TEST(Listops, RowsAreExpressionsWithTheirValues) {
  const Config config = small("listops", 60);
  const auto task = make_task(config);
  std::set<std::int64_t> values, operators;
  for (std::int64_t i = 0; i < 60; ++i) {
    const Batch batch = task->batch(Split::train, i, 1);
    ASSERT_TRUE(batch.lengths.defined());
    const std::int64_t length = batch.lengths[0].item<std::int64_t>();
    EXPECT_GT(length, 15);
    EXPECT_LT(length, 60);
    std::vector<std::int64_t> tokens(batch.tokens.const_data_ptr<std::int64_t>(),
                                     batch.tokens.const_data_ptr<std::int64_t>() + length);
    std::size_t at = 0;
    const std::int64_t value = value_of_listops(tokens, at);
    EXPECT_EQ(static_cast<std::int64_t>(at), length);
    EXPECT_EQ(batch.targets[0][0].item<std::int64_t>(), value);
    values.insert(value);
    operators.insert(tokens[0]);
  }
  EXPECT_GE(values.size(), 8U);
  EXPECT_EQ(operators.size(), 4U);
  Config bad = config;
  bad.listops.shortest = 58;
  EXPECT_NE(error_of([&] { make_task(bad); }).find("listops.shortest"), std::string::npos);
  bad.listops.shortest = 40;
  bad.listops.depth = 2;
  EXPECT_NE(error_of([&] { make_task(bad); }).find("found no expression"), std::string::npos);
}

TEST(Pathfinder, HasTwoDiscsAndBothClasses) {
  Config config = small("pathfinder", 1024);
  const auto task = make_task(config);
  const Batch batch = task->batch(Split::train, 0, 40);
  const double ones = batch.targets.to(at::kDouble).mean().item<double>();
  EXPECT_GT(ones, 0.2);
  EXPECT_LT(ones, 0.8);
  // Some but not most pixels are bright.
  const double light = (batch.tokens > 128).to(at::kDouble).mean().item<double>();
  EXPECT_GT(light, 0.05);
  EXPECT_LT(light, 0.5);
  config.length = 1000;
  EXPECT_NE(error_of([&] { make_task(config); }).find("square"), std::string::npos);
  config.length = 256;
  config.pathfinder.paddles = 60;
  EXPECT_NE(error_of([&] { make_task(config); }).find("do not fit"), std::string::npos);
}

TEST(Images, AreReadFromIdxFiles) {
  const TemporaryFolder folder;
  write_idx(folder);
  Config config = small("images", 16);
  config.data = folder.path("");
  const auto task = make_task(config);
  EXPECT_EQ(task->batches(Split::valid, 1), 4);
  EXPECT_EQ(task->batches(Split::test, 1), 8);
  const Batch batch = task->batch(Split::valid, 0, 4);  // images 36 to 39
  EXPECT_TRUE(batch.targets.equal(at::arange(4).view({4, 1})));
  EXPECT_EQ(batch.tokens[1][0].item<std::int64_t>(), 237);
  EXPECT_EQ(batch.tokens[1][4].item<std::int64_t>(), 37);
  EXPECT_EQ(task->baselines()[0].value, 0.25);

  config.length = 15;
  EXPECT_EQ(error_of([&] { make_task(config); }),
            "[images] expected --length 16, the values of an image; got 15");
  config.length = 16;
  write_at(folder, "t10k-labels-idx1-ubyte", be32(2049) + be32(7) + "abcdefg");
  EXPECT_NE(error_of([&] { make_task(config); }).find("expected 8 labels; got 7"),
            std::string::npos);
  write_at(folder, "t10k-labels-idx1-ubyte", "short");
  EXPECT_NE(error_of([&] { make_task(config); }).find("idx file"), std::string::npos);
  write_at(folder, "t10k-labels-idx1-ubyte", be32(2049) + be32(0xFFFFFFFF) + "a");
  EXPECT_NE(error_of([&] { make_task(config); }).find("after its header"), std::string::npos);
  std::filesystem::remove(folder.path("t10k-labels-idx1-ubyte"));
  EXPECT_NE(error_of([&] { make_task(config); }).find("t10k-labels-idx1-ubyte"), std::string::npos);
  config.data.clear();
  EXPECT_NE(error_of([&] { make_task(config); }).find("expected --data"), std::string::npos);
}

TEST(Images, AreReadFromRecordsOfPlanes) {
  const TemporaryFolder folder;
  std::string records;
  for (int i = 0; i < 20; ++i) {
    records += static_cast<char>(i % 10);
    for (int channel = 0; channel < 3; ++channel) {
      records += std::string(1024, static_cast<char>(10 * (channel + 1) + i));
    }
  }
  write_at(folder, "train.bin", records);
  write_at(folder, "test.bin", records);
  Config config = small("images", 3072);
  config.data = folder.path("");
  config.images.predict = "pixels";
  const Batch values = make_task(config)->batch(Split::test, 0, 2);
  for (std::int64_t channel = 0; channel < 3; ++channel) {
    EXPECT_EQ(values.tokens[1][300 + channel].item<std::int64_t>(), 10 * (channel + 1) + 1);
  }
  EXPECT_TRUE(values.targets.equal(values.tokens));
  config.images.predict = "class";
  config.length = 1024;
  const Batch grey = make_task(config)->batch(Split::test, 0, 2);
  // 0.299 * 11 + 0.587 * 21 + 0.114 * 31
  EXPECT_EQ(grey.tokens[1][7].item<std::int64_t>(), 19);
  write_at(folder, "test.bin", records + "x");
  EXPECT_NE(error_of([&] { make_task(config); }).find("records of 3073 bytes"), std::string::npos);
}

// A grey JPEG of 8 x 8 pixels that are all 128: a block without coefficients.
std::string grey_jpeg() {
  std::string file = "\xFF\xD8";
  const auto segment = [&](char kind, const std::string& content) {
    file += std::string("\xFF") + kind;
    file += static_cast<char>((content.size() + 2) >> 8);
    file += static_cast<char>(content.size() + 2) + content;
  };
  segment('\xDB', std::string(1, '\0') + std::string(64, '\1'));
  segment('\xC0', std::string("\x08\0\x08\0\x08\x01\x01\x11\0", 9));
  // One code of one bit in each Huffman table: DC difference 0, end of block.
  for (const char table : {'\0', '\x10'}) {
    segment('\xC4', std::string(1, table) + '\1' + std::string(15, '\0') + '\0');
  }
  segment('\xDA', std::string("\x01\x01\0\0\x3F\0", 6));
  return file + "\x3F\xFF\xD9";
}

TEST(Images, AreReadFromFoldersOfJpegFiles) {
  const TemporaryFolder folder;
  const std::string jpeg = grey_jpeg();
  for (const char* const label : {"cat", "dog"}) {
    for (int i = 0; i < 10; ++i) {
      write_at(folder, std::string("set/train/") + label + "/" + std::to_string(i) + ".jpg", jpeg);
    }
    write_at(folder, std::string("set/test/") + label + "/0.jpg", jpeg);
  }
  Config config = small("images", 64);
  config.data = folder.path("set");
  std::string error;
  try {
    const auto task = make_task(config);
    const Batch batch = task->batch(Split::valid, 0, 2);  // the last image of every class
    EXPECT_TRUE(batch.tokens.eq(128).all().item<bool>());
    EXPECT_TRUE(batch.targets.flatten().equal(at::arange(2)));
  } catch (const Error& caught) {
    error = caught.what();
  }
  if (error.find("without libjpeg") != std::string::npos) GTEST_SKIP() << error;
  EXPECT_EQ(error, "");
  write_at(folder, "set/test/dog/0.jpg", jpeg.substr(0, 60));
  EXPECT_NE(error_of([&] { make_task(config); }).find("test/dog/0.jpg"), std::string::npos);
  write_at(folder, "set/test/dog/0.jpg", "no picture");
  EXPECT_NE(error_of([&] { make_task(config); }).find("test/dog/0.jpg"), std::string::npos);
}

TEST(Imdb, ReadsBytesAndHoldsOutATenthOfEachLabel) {
  const TemporaryFolder folder;
  write_reviews(folder);
  Config config = small("imdb", 24);
  config.data = folder.path("");
  const auto task = make_task(config);
  EXPECT_EQ(task->batches(Split::valid, 1), 4);
  const Batch batch = task->batch(Split::valid, 0, 4);
  EXPECT_TRUE(batch.targets.flatten().equal(at::tensor({1, 1, 0, 0}, at::kLong)));
  EXPECT_EQ(batch.tokens[0][0].item<std::int64_t>(), 'g');
  EXPECT_TRUE(batch.lengths.equal(at::tensor({23, 24, 24, 24}, at::kLong)));  // good + 18 x, ...
  write_at(folder, "reviews.test.jsonl", "{\"text\": 3}\n");
  EXPECT_NE(error_of([&] { make_task(config); }).find("line 1"), std::string::npos);
  std::filesystem::remove(folder.path("reviews.test.jsonl"));
  EXPECT_NE(error_of([&] { make_task(config); }).find("*.test.jsonl"), std::string::npos);
  config.data.clear();
  EXPECT_NE(error_of([&] { make_task(config); }).find("expected --data"), std::string::npos);
}

TEST(Retrieval, AsksWhetherPassagesAreOfOneArticle) {
  const TemporaryFolder folder;
  write_articles(folder);
  Config config = small("retrieval", 41);
  config.data = folder.path("");
  const auto task = make_task(config);
  const Batch batch = task->batch(Split::valid, 0, 50);
  std::int64_t same = 0;
  for (std::int64_t row = 0; row < 50; ++row) {
    const at::Tensor tokens = batch.tokens[row];
    EXPECT_EQ(tokens[20].item<std::int64_t>(), 256);
    // Inside of a passage are letters of its article.
    const std::int64_t first = tokens[10].item<std::int64_t>();
    const bool equal = first == tokens[31].item<std::int64_t>();
    EXPECT_NE(first, 'z');
    EXPECT_EQ(batch.targets[row][0].item<std::int64_t>() == 1, equal);
    same += equal;
  }
  EXPECT_GT(same, 10);
  EXPECT_LT(same, 40);
  config.length = 500;
  EXPECT_NE(error_of([&] { make_task(config); }).find("at least 2 articles"), std::string::npos);
}

TEST(Speech, ReadsCepstraAndTranscripts) {
  const TemporaryFolder folder;
  write_an4(folder);
  Config config = small("speech", 80);
  config.data = folder.path("an4");
  const auto task = make_task(config);
  EXPECT_EQ(task->batches(Split::train, 1) > 1000, true);
  EXPECT_EQ(task->batches(Split::valid, 1), 8);  // speakers 0 and 10
  EXPECT_EQ(task->batches(Split::test, 1), 44);
  const Batch batch = task->batch(Split::valid, 0, 4);
  EXPECT_EQ(batch.tokens.sizes(), at::IntArrayRef({4, 40, 39}));
  EXPECT_TRUE(batch.lengths.equal(at::tensor({24, 16, 40, 8}, at::kLong)));
  EXPECT_TRUE(batch.targets[0].equal(at::tensor({1, 27, 2, -100, -100}, at::kLong)));
  EXPECT_NEAR(batch.tokens[0].narrow(0, 0, 24).mean().item<double>(), 0, 1e-5);

  config.speech.join = 2;
  const Batch joined = make_task(config)->batch(Split::valid, 0, 1);
  EXPECT_EQ(joined.lengths[0].item<std::int64_t>(), 40);
  EXPECT_TRUE(joined.targets[0].equal(at::tensor({1, 27, 2, 27, 2, 3}, at::kLong)));
  config.length = 79;
  EXPECT_NE(error_of([&] { make_task(config); }).find("--length of at least 80"),
            std::string::npos);
  config.length = 80;

  write_at(folder, "an4/feat/an4_clstk/sa/an0-sa.mfc", be32(13) + std::string(51, 'a'));
  EXPECT_NE(error_of([&] { make_task(config); }).find("an0-sa.mfc: expected a count of floats"),
            std::string::npos);
  write_at(folder, "an4/feat/an4_clstk/sa/an0-sa.mfc", be32(13) + std::string(52, '\xFF'));
  EXPECT_NE(error_of([&] { make_task(config); }).find("finite"), std::string::npos);
  std::filesystem::remove(folder.path("an4/feat/an4_clstk/sa/an0-sa.mfc"));
  EXPECT_NE(error_of([&] { make_task(config); }).find("feat/an4_clstk/sa/an0-sa.mfc"),
            std::string::npos);
  write_at(folder, "an4/etc/an4_train.transcription", "A B (an0-sa)\n");
  EXPECT_NE(error_of([&] { make_task(config); }).find("44 lines"), std::string::npos);
}

TEST(Speech, PhonesAreThoseOfTheFirstPronunciation) {
  const TemporaryFolder folder;
  write_an4(folder);
  Config config = small("speech", 80);
  config.data = folder.path("an4");
  config.speech.symbols = "phones";
  EXPECT_NE(error_of([&] { make_task(config); }).find("expected a file etc/an4.dic"),
            std::string::npos);
  const std::string words = "A  AH\nA(2)  EY\nB  B IY\nBC  B IY S\n";
  write_at(folder, "an4/etc/an4.dic", words);
  EXPECT_NE(error_of([&] { make_task(config); }).find("expected the word CAB; it is missing"),
            std::string::npos);
  write_at(folder, "an4/etc/an4.dic", words + "CAB\n");
  EXPECT_NE(error_of([&] { make_task(config); }).find("in every line; got \"CAB\""),
            std::string::npos);
  write_at(folder, "an4/etc/an4.dic", words + "A  EY\n");
  EXPECT_NE(error_of([&] { make_task(config); }).find("in every line; got \"A  EY\""),
            std::string::npos);
  write_at(folder, "an4/etc/an4.dic", "\n");
  EXPECT_NE(error_of([&] { make_task(config); }).find("its phones; got none"), std::string::npos);
  write_at(folder, "an4/etc/an4.dic", words + "CAB  K AE B\n");
  const auto task = make_task(config);
  // AE AH B EY IY K S; recordings A B, BC, CAB A and B, which are not separated from each other.
  const auto answer = std::get<TranscriptAnswer>(task->answers());
  EXPECT_EQ(answer.symbols, 7);
  EXPECT_EQ(answer.space, 0);
  EXPECT_TRUE(task->strata().empty());
  const Batch batch = task->batch(Split::valid, 0, 4);
  const at::Tensor targets =
      at::tensor({2, 3, 5, -100, 3, 5, 7, -100, 6, 1, 3, 2, 3, 5, -100, -100}, at::kLong);
  EXPECT_TRUE(batch.targets.equal(targets.view({4, 4}))) << batch.targets;
  config.speech.join = 2;
  EXPECT_TRUE(make_task(config)
                  ->batch(Split::valid, 0, 1)
                  .targets[0]
                  .equal(at::tensor({2, 3, 5, 3, 5, 7}, at::kLong)));
}

TEST(Speech, RecordingsForTrainingAreChangedAnewInEveryEpoch) {
  const TemporaryFolder folder;
  write_an4(folder);
  Config config = small("speech", 80);
  config.data = folder.path("an4");
  const auto plain = make_task(config);
  config.speech.masks = 2;
  const auto masked = make_task(config);
  config.speech.tempo = 0.25;
  const auto both = make_task(config);
  config.length = 49;  // 40 frames are up to 50
  EXPECT_NE(error_of([&] { make_task(config); }).find("--length of at least 50"),
            std::string::npos);
  std::set<std::int64_t> lengths;
  std::int64_t zeros = 0, values = 0;
  for (std::int64_t row = 0; row < 72; ++row) {
    const Batch own = plain->batch(Split::train, row, 1),
                holes = masked->batch(Split::train, row, 1);
    EXPECT_TRUE(own.targets.equal(both->batch(Split::train, row, 1).targets));
    lengths.insert(both->batch(Split::train, row, 1).lengths.item<std::int64_t>() -
                   own.lengths.item<std::int64_t>());
    // What is not masked stays, up to the rounding of resampling to the same frames.
    const at::Tensor kept = holes.tokens != 0;
    EXPECT_TRUE(at::allclose(holes.tokens.masked_select(kept), own.tokens.masked_select(kept)));
    zeros += (~kept & (own.tokens != 0)).sum().item<std::int64_t>();
    values += (own.tokens != 0).sum().item<std::int64_t>();
  }
  EXPECT_GT(zeros, values / 10);
  EXPECT_LT(zeros, values / 2);
  EXPECT_LE(*lengths.rbegin(), 10);
  EXPECT_GE(*lengths.begin(), -10);
  EXPECT_GT(lengths.size(), 8U);
  // Equal rows in any batch and any run; held-out recordings stay as they are.
  EXPECT_TRUE(both->batch(Split::train, 1, 4).tokens.equal(both->batch(Split::train, 1, 4).tokens));
  EXPECT_EQ(row_text(both->batch(Split::train, 5, 1), 0),
            row_text(both->batch(Split::train, 1, 4), 1));
  EXPECT_TRUE(
      both->batch(Split::valid, 0, 4).tokens.equal(plain->batch(Split::valid, 0, 4).tokens));
}

TEST(Speech, ReadsRecordedDigits) {
  const TemporaryFolder folder;
  for (int i = 0; i < 12; ++i) {
    write_at(folder, "3_anna_" + std::to_string(i) + ".wav", wav(8000, tone(440, 2000)));
  }
  Config config = small("speech", 64);
  config.data = folder.path("");
  const auto task = make_task(config);
  EXPECT_EQ(task->batches(Split::test, 1), 5);
  EXPECT_EQ(task->batches(Split::valid, 1), 5);
  const Batch batch = task->batch(Split::test, 0, 1);
  EXPECT_EQ(batch.tokens.size(1), 23);  // 1 + (2000 - 200) / 80
  EXPECT_TRUE(batch.targets[0].equal(at::tensor({20, 8, 18, 5, 5}, at::kLong)));  // THREE
  write_at(folder, "3_anna_0.wav", wav(8000, tone(440, 2000)).substr(0, 1000));
  EXPECT_NE(error_of([&] { make_task(config); }).find("3_anna_0.wav: it is cut off"),
            std::string::npos);
  write_at(folder, "3_anna_0.wav", wav(4000, tone(440, 2000)));
  EXPECT_NE(error_of([&] { make_task(config); }).find("4000 a second"), std::string::npos);
  std::filesystem::remove(folder.path("3_anna_0.wav"));
  write_at(folder, "anna.wav", wav(8000, tone(440, 2000)));
  EXPECT_NE(error_of([&] { make_task(config); }).find("7_theo_12.wav"), std::string::npos);
}

// The definition, term by term, for one window.
TEST(Cepstra, FollowTheirDefinition) {
  const int window = 200, bins = 101;
  std::vector<double> samples;
  for (int i = 0; i < window; ++i) samples.push_back(std::sin(0.3 * i) + 0.2 * std::cos(1.7 * i));
  const auto mel = [](double hertz) { return 1127 * std::log(1 + hertz / 700); };
  const auto corner = [&](int i) { return 700 * (std::exp(mel(4000) * i / 27 / 1127) - 1); };
  std::vector<double> logs(26);
  for (int band = 0; band < 26; ++band) {
    double sum = 0;
    for (int k = 0; k < bins; ++k) {
      double re = 0, im = 0;
      for (int i = 0; i < window; ++i) {
        const double hamming = 0.54 - 0.46 * std::cos(2 * std::numbers::pi * i / window);
        const double angle = 2 * std::numbers::pi * i * k / window;
        re += hamming * samples[i] * std::cos(angle);
        im += hamming * samples[i] * std::sin(angle);
      }
      const double hertz = 40.0 * k;
      const double rise = (hertz - corner(band)) / (corner(band + 1) - corner(band));
      const double fall = (corner(band + 2) - hertz) / (corner(band + 2) - corner(band + 1));
      sum += std::max(0.0, std::min(rise, fall)) * (re * re + im * im);
    }
    logs[band] = std::log(std::max(sum, 1e-10));
  }
  const at::Tensor found = cepstra(at::tensor(samples, at::kDouble), 8000);
  ASSERT_EQ(found.sizes(), at::IntArrayRef({1, 13}));
  for (int c = 0; c < 13; ++c) {
    double wanted = 0;
    for (int band = 0; band < 26; ++band) {
      wanted += logs[band] * std::cos(std::numbers::pi / 26 * (band + 0.5) * c);
    }
    EXPECT_NEAR(found[0][c].item<double>(), wanted, 1e-5 * (1 + std::abs(wanted)));
  }
}

TEST(Cepstra, FeaturesHaveSlopesAndUnitVariance) {
  const at::Tensor ramp = at::arange(20, at::kFloat).unsqueeze(1).expand({20, 13});
  const at::Tensor features = speech_features(ramp);
  ASSERT_EQ(features.sizes(), at::IntArrayRef({20, 39}));
  EXPECT_NEAR(features.select(1, 0).square().mean().item<double>(), 1, 1e-5);
  // The slope of a ramp is constant but for both ends.
  const at::Tensor slope = features.select(1, 13).narrow(0, 2, 16);
  EXPECT_NEAR((slope.max() - slope.min()).item<double>(), 0, 1e-4);
}

Symbols decoded(const std::vector<std::vector<double>>& rows, std::int64_t beam) {
  std::vector<double> flat;
  for (const std::vector<double>& row : rows) flat.insert(flat.end(), row.begin(), row.end());
  const auto T = static_cast<std::int64_t>(rows.size());
  return decode_ctc(at::tensor(flat, at::kDouble).view({T, -1}).log().to(at::kFloat), beam);
}

TEST(Transcripts, GreedyDecodingMergesRepeatsAndDropsBlanks) {
  const std::vector<double> blank = {0.8, 0.1, 0.1}, a = {0.1, 0.8, 0.1}, b = {0.1, 0.1, 0.8};
  EXPECT_EQ(decoded({a, a, blank, a, b, b, blank}, 1), (Symbols{1, 1, 2}));
  EXPECT_EQ(decoded({blank, blank}, 1), Symbols{});
}

TEST(Transcripts, PrefixSearchAddsUpAlignments) {
  // Greedy says nothing (0.36); "a" has 0.4 * 0.6 + 0.6 * 0.4 + 0.4 * 0.4 = 0.64.
  const std::vector<std::vector<double>> rows = {{0.6, 0.4}, {0.6, 0.4}};
  EXPECT_EQ(decoded(rows, 1), Symbols{});
  EXPECT_EQ(decoded(rows, 4), Symbols{1});
}

// The most likely of all transcripts, by the loss.
TEST(Transcripts, PrefixSearchFindsTheBestTranscript) {
  at::manual_seed(3);
  const torch_api::CtcModel model(torch_api::CtcModelOptions{
      .features = 1,
      .symbols = 2,
      .transformer = {
          .dim = 4, .layers = 1, .heads = 1, .attention = {AttentionSpec::parse("full")}}});
  for (int draw = 0; draw < 20; ++draw) {
    const at::Tensor rows = at::randn({1, 4, 3}, at::kDouble).mul(2).log_softmax(-1);
    Symbols best;
    double least = INFINITY;
    for (int length = 0; length <= 4; ++length) {
      for (int code = 0; code < 1 << length; ++code) {
        Symbols symbols;
        for (int i = 0; i < length; ++i) symbols.push_back(1 + (code >> i & 1));
        const at::Tensor targets = at::tensor(symbols, at::kLong).view({1, length});
        double nats = model->nats(rows, targets, {}).item<double>();
        if (length > 0 && nats == 0) continue;  // has no alignment
        if (nats < least) {
          least = nats;
          best = symbols;
        }
      }
    }
    EXPECT_EQ(decode_ctc(rows[0], 64), best);
  }
}

TEST(Transcripts, EditDistance) {
  const auto distance = [](const std::string& a, const std::string& b) {
    return edit_distance(std::vector<char>(a.begin(), a.end()),
                         std::vector<char>(b.begin(), b.end()));
  };
  EXPECT_EQ(distance("", ""), 0);
  EXPECT_EQ(distance("", "abc"), 3);
  EXPECT_EQ(distance("abc", ""), 3);
  EXPECT_EQ(distance("kitten", "sitting"), 3);
  EXPECT_EQ(distance("flaw", "lawn"), 2);
}

TEST(Transcripts, ScoresCountErrorsOfSymbolsAndWords) {
  const torch_api::CtcModel model(torch_api::CtcModelOptions{
      .features = 1,
      .symbols = 3,
      .transformer = {
          .dim = 4, .layers = 1, .heads = 1, .attention = {AttentionSpec::parse("full")}}});
  // Says 1, space (3), 2; the transcript is 1 1, space, 2.
  at::Tensor out = at::full({1, 4, 4}, -5.0);
  for (const auto& [t, symbol] :
       std::map<std::int64_t, std::int64_t>{{0, 1}, {1, 3}, {2, 0}, {3, 2}}) {
    out[0][t][symbol] = -0.1;
  }
  Batch batch;
  batch.targets = at::tensor({1, 1, 3, 2, -100}, at::kLong).view({1, 5});
  batch.lengths = at::tensor({4}, at::kLong);
  std::vector<Score> strata(1);
  const Score score = score_transcripts(
      *model, {.features = 1, .symbols = 3, .subsample = 1, .space = 3, .beam = 1}, out, batch,
      strata);
  EXPECT_EQ(score.count, 4);
  EXPECT_EQ(score.correct, 3);
  EXPECT_DOUBLE_EQ(metric_value(Metric::error_rate, score), 0.25);
  EXPECT_EQ(strata[0].count, 2);
  EXPECT_EQ(strata[0].correct, 1);
  EXPECT_TRUE(better(Metric::error_rate, 0.1, 0.2));
}

}  // namespace
}  // namespace coterie::train
