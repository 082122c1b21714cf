// SPDX-License-Identifier: MIT
// Scores, data and budgets of tasks for pretrained encoders. tests/python/test_encoder.py compares
// the encoder with transformers.
#include <gtest/gtest.h>

#include <cstdlib>
#include <fstream>
#include <nlohmann/json.hpp>

#include "coterie/error.h"
#include "temporary_folder.h"
#include "train/pretrained/approximate.h"
#include "train/pretrained/calibrate.h"
#include "train/pretrained/data.h"
#include "train/pretrained/scores.h"

namespace coterie::train {
namespace {

TEST(PretrainedScores, Correlations) {
  const std::vector<double> x = {1, 2, 3, 4, 10}, y = {2, 4, 6, 8, 20}, z = {5, 5, 5, 5, 5};
  EXPECT_NEAR(pearson(x, y), 1, 1e-12);
  EXPECT_EQ(pearson(x, z), 0);
  const std::vector<double> a = {0.1, 0.9, 0.5, 0.5}, b = {1, 4, 2, 3};
  // Ranks 1, 4, 2.5, 2.5 and 1, 4, 2, 3.
  EXPECT_NEAR(spearman(a, b), 4.5 / std::sqrt(4.5 * 5.0), 1e-12);
}

TEST(PretrainedScores, Counts) {
  BinaryCounts counts;
  for (int i = 0; i < 6; ++i) counts.add(true, true);
  for (int i = 0; i < 3; ++i) counts.add(false, false);
  for (int i = 0; i < 1; ++i) counts.add(true, false);
  for (int i = 0; i < 2; ++i) counts.add(false, true);
  EXPECT_NEAR(counts.accuracy(), 9.0 / 12, 1e-12);
  EXPECT_NEAR(counts.f1(), 12.0 / 15, 1e-12);
  EXPECT_NEAR(counts.matthews(), (6.0 * 3 - 1 * 2) / std::sqrt(7.0 * 8 * 4 * 5), 1e-12);
  EXPECT_EQ(BinaryCounts{}.matthews(), 0);
}

// The interval of a mean of n values with deviation s is about 4 s / sqrt(n) wide.
TEST(PretrainedScores, BootstrapHasTheWidthOfTheMean) {
  const auto mean = [](const std::vector<std::size_t>& units) {
    double sum = 0;
    for (const std::size_t unit : units) sum += unit % 2 == 0 ? 0.0 : 1.0;
    return std::vector<double>{sum / static_cast<double>(units.size())};
  };
  const Interval found = bootstrap(mean, 400, 2000, 3).front();
  EXPECT_NEAR(found.value, 0.5, 1e-12);
  EXPECT_NEAR(found.high - found.low, 2 * 1.96 * 0.5 / 20, 0.01);
  const Interval again = bootstrap(mean, 400, 2000, 3).front();
  EXPECT_EQ(found.low, again.low);
  EXPECT_EQ(found.high, again.high);
}

TEST(PretrainedScores, SquadRules) {
  EXPECT_EQ(squad_normalised("The  Cat, an  A-frame!"), "cat aframe");
  EXPECT_EQ(squad_normalised("a\u2013B, \u00c9t\u00e9\u00a0the"), "\u2013b \u00e9t\u00e9");
  EXPECT_EQ(squad_exact("the cat.", {"dog", "Cat"}), 1);
  EXPECT_EQ(squad_exact("cats", {"cat"}), 0);
  EXPECT_NEAR(squad_f1("big black cat", {"black cat"}), 2.0 * 2 / 5, 1e-12);
  EXPECT_EQ(squad_f1("cat", {"dog"}), 0);
}

// COTERIE_SQUAD names the pack with dev-v1.1.json and published_predictions.
TEST(PretrainedScores, SquadRulesGiveThePublishedScores) {
  const char* const path = std::getenv("COTERIE_SQUAD");
  if (path == nullptr) GTEST_SKIP() << "COTERIE_SQUAD is not set";
  const std::vector<CorpusFile> files = read_task_files({path});
  const SquadData data = read_squad(files);
  EXPECT_EQ(data.questions.size(), 10570u);
  EXPECT_EQ(data.paragraphs.size(), 2067u);
  struct Published {
    const char* name;
    double exact, f1;
  };
  for (const auto& [name, exact, f1] : {Published{"BERT", 86.206, 92.196},
                                        {"r-net+", 82.469, 88.478},
                                        {"SLQA+", 81.949, 88.384},
                                        {"Match-LSTM", 67.635, 76.756},
                                        {"Logistic", 40.142, 50.982}}) {
    const auto found =
        std::find_if(files.begin(), files.end(), [&, wanted = std::string(name)](const auto& file) {
          return file.name.find("/" + wanted) != std::string::npos;
        });
    ASSERT_NE(found, files.end()) << name;
    const auto answers = nlohmann::json::parse(found->text);
    double exact_sum = 0, f1_sum = 0;
    for (const SquadQuestion& question : data.questions) {
      if (!answers.contains(question.id)) continue;
      const std::string answer = answers[question.id].get<std::string>();
      exact_sum += squad_exact(answer, question.answers);
      f1_sum += squad_f1(answer, question.answers);
    }
    const auto count = static_cast<double>(data.questions.size());
    EXPECT_NEAR(100 * exact_sum / count, exact, 5e-4) << name;
    EXPECT_NEAR(100 * f1_sum / count, f1, 5e-4) << name;
  }
}

TEST(PretrainedData, Tables) {
  const auto rows = csv_rows("a,\"b, \"\"c\"\"\",1\r\nd,e,2.5\n\"x\ny\",z,3", "t");
  ASSERT_EQ(rows.size(), 3u);
  EXPECT_EQ(rows[0], (std::vector<std::string>{"a", "b, \"c\"", "1"}));
  EXPECT_EQ(rows[2][0], "x\ny");
  EXPECT_THROW(csv_rows("a,\"b", "t"), Error);
  const auto tabs = tsv_rows("\xef\xbb\xbfq\t\"x\n\ny\t2\r\n");
  ASSERT_EQ(tabs.size(), 2u);
  EXPECT_EQ(tabs[0], (std::vector<std::string>{"q", "\"x"}));
  EXPECT_EQ(tabs[1], (std::vector<std::string>{"y", "2"}));
}

TEST(PretrainedData, Squad) {
  const std::string text = R"({"data": [{"paragraphs": [{"context": "Die Größe war 5 m.", "qas": [
    {"id": "a", "question": "?", "answers": [{"text": "5 m", "answer_start": 14}]}]}]}]})";
  const SquadData data = parse_squad(text, "t");
  ASSERT_EQ(data.questions.size(), 1u);
  const SquadQuestion& question = data.questions[0];
  EXPECT_EQ(data.paragraphs[0].text.substr(question.answer_begin, 3), "5 m");
  EXPECT_THROW(parse_squad("{}", "t"), Error);
  EXPECT_THROW(parse_squad("[", "t"), Error);
}

TEST(PretrainedData, Refusals) {
  const TemporaryFolder folder;
  const auto write = [&](const std::string& name, const std::string& text) {
    std::ofstream(folder.path() + "/" + name) << text;
  };
  EXPECT_THROW(read_task_files({}), Error);
  write("other.txt", "text");
  EXPECT_THROW(read_sts_b(read_task_files({folder.path()})), Error);
  write("stsb-en-test.csv", "a,b\n");
  EXPECT_THROW(read_sts_b(read_task_files({folder.path()})), Error);
  write("stsb-en-test.csv", "a,b,x\na,b,1\na,b,2\n");
  EXPECT_THROW(read_sts_b(read_task_files({folder.path()})), Error);
  write("x.test.jsonl", "{\"text\": 1}\n");
  EXPECT_THROW(read_imdb(read_task_files({folder.path()}), "test"), Error);
  EXPECT_THROW(read_imdb(read_task_files({folder.path()}), "train"), Error);
  EXPECT_THROW(read_glue(read_task_files({folder.path()}), "RTE"), Error);
}

TEST(PretrainedBudget, Covers) {
  const auto says = [](const char* spec, std::int64_t length) {
    return covers(AttentionSpec::parse(spec).groups[0].mechanism, length);
  };
  EXPECT_TRUE(says("full", 100000));
  EXPECT_TRUE(says("local(window=32)", 16));
  EXPECT_FALSE(says("local(window=32)", 17));
  EXPECT_TRUE(says("local(window=8,kind=blocked)", 16));
  EXPECT_FALSE(says("local(window=8,kind=blocked)", 17));
  EXPECT_TRUE(says("oracle-top(topk=32)", 32));
  EXPECT_FALSE(says("oracle-top(topk=32)", 33));
  EXPECT_TRUE(says("clustered(clusters=25)", 25));
  EXPECT_FALSE(says("clustered(clusters=25)", 26));
  EXPECT_TRUE(says("clustered(clusters=5,near=16)", 32));
  EXPECT_FALSE(says("clustered(clusters=5,near=16)", 33));
  EXPECT_TRUE(says("i-clustered(clusters=8,topk=40)", 40));
  EXPECT_FALSE(says("i-clustered(clusters=8,topk=40)", 41));
}

// What `covers` promises, on rows without structure.
TEST(PretrainedBudget, CoveredIsExact) {
  at::manual_seed(1);
  const at::Tensor q = at::randn({1, 2, 33, 8}), k = at::randn({1, 2, 33, 8}),
                   v = at::randn({1, 2, 33, 8});
  const at::Tensor full = torch_api::attention(q, k, v, "full");
  for (const char* spec :
       {"local(window=66)", "local(window=65)", "local(window=17,kind=blocked)",
        "oracle-top(topk=33)", "clustered(clusters=33)", "clustered(clusters=3,near=17)",
        "i-clustered(clusters=3,topk=33)", "i-clustered(clusters=33,topk=2)"}) {
    ASSERT_TRUE(covers(AttentionSpec::parse(spec).groups[0].mechanism, 33)) << spec;
    const at::Tensor out = torch_api::attention(q, k, v, spec);
    EXPECT_LT((out - full).abs().max().item<double>(), 1e-5) << spec;
  }
}

TEST(PretrainedLadder, LeavesOutWhatIsExact) {
  for (const std::int64_t length : {64, 512, 4096}) {
    const std::vector<std::string> ladder = default_ladder(length);
    EXPECT_EQ(ladder.back(), "full");
    for (std::size_t i = 0; i + 1 < ladder.size(); ++i) {
      EXPECT_FALSE(covers(AttentionSpec::parse(ladder[i]).groups[0].mechanism, length));
    }
  }
}

// A random encoder with a vocabulary of letters.
PretrainedEncoder tiny_encoder() {
  at::manual_seed(5);
  torch_api::EncoderOptions options{
      .vocabulary = 64, .max_length = 64, .dim = 16, .layers = 2, .heads = 4, .ffn = 24};
  WordPieceModel model;
  std::int32_t id = 0;
  for (const char* special : {"[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"}) {
    model.vocabulary[special] = model.added[special] = id++;
  }
  for (char c = 'a'; c <= 'z'; ++c) {
    model.vocabulary[std::string(1, c)] = id++;
    model.vocabulary[std::string("##") + c] = id++;
  }
  torch_api::Encoder encoder(options);
  encoder->eval();
  return {encoder, WordPieceTokenizer(model, "letters"), Pooling::mean, "tiny"};
}

std::string letters(std::size_t count) {
  std::string text;
  for (std::size_t i = 0; i < count; ++i) {
    text += static_cast<char>('a' + (i * i + i / 7) % 26);
    if (i % 5 == 4) text += ' ';
  }
  return text;
}

TEST(PretrainedRun, ApproximatesAndChooses) {
  const TemporaryFolder folder;
  std::ofstream(folder.path() + "/text.txt") << letters(4000);
  PretrainedEncoder encoder = tiny_encoder();
  EncoderTaskOptions options;
  options.data = {folder.path()};
  options.length = 48;
  const auto task = make_encoder_task(options, encoder);
  const auto results = approximate(
      encoder, *task,
      {{"covering", {AttentionSpec::parse("i-clustered(clusters=4,topk=64)")}},
       {"rough",
        {AttentionSpec::parse("1*full+3*clustered(clusters=2)"), AttentionSpec::parse("full")}}},
      {.draws = 10, .speed_lengths = {16}, .speed_seconds = 0}, {});
  ASSERT_EQ(results.size(), 3u);
  EXPECT_NEAR(results[1].cosine, 1, 1e-6);
  EXPECT_EQ(results[1].exact_share, 1);
  EXPECT_EQ(results[2].exact_share, 0);
  EXPECT_LT(results[1].embedding_error, 1e-5);
  EXPECT_GT(results[2].embedding_error, results[1].embedding_error);
  ASSERT_EQ(results[2].head_error.size(), 2u);
  EXPECT_LT(results[2].head_error[0][0], 1e-6);  // full
  EXPECT_GT(results[2].head_error[0][1], 1e-3);
  EXPECT_LT(results[2].head_error[1][3], 1e-6);

  const std::vector<EncodedText> texts = text_inputs(options, encoder, 4);
  CalibrateOptions choice;
  choice.ladder = {"clustered(clusters=2)", "i-clustered(clusters=4,topk=8)", "full"};
  choice.targets = {1e-6, 0.5};
  choice.seconds = 0;
  std::vector<at::Tensor> rows;
  for (const EncodedText& text : texts) rows.push_back(encoder_batch({&text}, 0, at::kCPU).tokens);
  const std::vector<at::Tensor> batches = equal_batches(rows, 100);
  ASSERT_EQ(batches.size(), 2u);
  EXPECT_EQ(batches[0].size(0), 2);
  const Calibration found =
      calibrate(calibrated_model(encoder), {batches[0]}, {batches[1]}, choice);
  ASSERT_EQ(found.targets.size(), 2u);
  EXPECT_EQ(found.uniform.size(), 3u);
  ASSERT_EQ(found.seconds.size(), 2u);  // layers
  EXPECT_EQ(found.seconds[1].size(), 3u);
  for (const CalibratedTarget& target : found.targets) {
    EXPECT_LE(target.measured.error, target.target);
  }
  // Nothing but full attention has no error.
  for (const AttentionSpec& spec : found.targets[0].choice.layers) {
    EXPECT_EQ(spec.to_string(), "full");
  }
  EXPECT_NE(explain(found.targets[0], 48)[0].find("full attention is the answer"),
            std::string::npos);
}

TEST(PretrainedRun, PositionsAreStretchedOnlyIfAsked) {
  PretrainedEncoder encoder = tiny_encoder();
  const at::Tensor tokens = at::full({1, 65}, 7, at::kLong);
  EXPECT_THROW(encoder.model->forward(tokens, {}), Error);
  encoder.model->stretch_positions(true);
  EXPECT_EQ(encoder.model->forward(tokens, {}).out.size(1), 65);
  EXPECT_THROW(encoder.model->set_attention({AttentionSpec::parse("routing(clusters=2,window=4)")}),
               Error);
  EXPECT_THROW(encoder.model->set_attention({AttentionSpec::parse("lsh")}), Error);
  EXPECT_THROW(encoder.model->set_attention({AttentionSpec::parse("3*full")}), Error);
}

// A head learns what the text says, and the encoder can be trained.
TEST(PretrainedRun, LearnsLabels) {
  const TemporaryFolder folder;
  const auto lines = [](std::size_t count) {
    std::string text = "sentence\tlabel\n";
    for (std::size_t i = 0; i < count; ++i) {
      text += std::string(i % 2 == 0 ? "a a b" : "y z z") + " " + letters(3 + i % 4) +
              (i % 2 == 0 ? "\t0\n" : "\t1\n");
    }
    return text;
  };
  std::filesystem::create_directory(folder.path() + "/SST-2");
  std::ofstream(folder.path() + "/SST-2/train.tsv") << lines(60);
  std::ofstream(folder.path() + "/SST-2/dev.tsv") << lines(30);
  for (const bool tuned : {false, true}) {
    PretrainedEncoder encoder = tiny_encoder();
    EncoderTaskOptions options;
    options.name = "glue";
    options.data = {folder.path()};
    options.tune.encoder = tuned;
    options.tune.epochs = 8;
    options.tune.rate = 5e-3;
    options.tune.head_rate = 5e-2;
    const auto task = make_encoder_task(options, encoder);
    const auto results = approximate(encoder, *task, {}, {.draws = 50, .error_inputs = 0}, {});
    ASSERT_EQ(results[0].scores.size(), 1u);
    EXPECT_GT(results[0].scores[0].value.value, 0.9) << tuned;
    EXPECT_EQ(results[0].scores[0].difference.value, 0);
    EXPECT_LE(results[0].scores[0].value.low, results[0].scores[0].value.value);
  }
}

}  // namespace
}  // namespace coterie::train
