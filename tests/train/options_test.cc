// SPDX-License-Identifier: MIT
#include "train/options.h"

#include <gtest/gtest.h>

#include <CLI/CLI.hpp>
#include <fstream>
#include <functional>
#include <limits>
#include <sstream>

#include "coterie/error.h"
#include "coterie/runtime.h"
#include "formats/config_text.h"
#include "temporary_folder.h"

namespace coterie::train {
namespace {

// Structured bindings: after adding a field this does not compile until the field is listed here.
Config config_without_defaults() {
  Config config;
  auto& [task, data, data_limit, length, attention, attention_at, out, init_from, device, threads,
         seed, copy, recall, masked, listops, pathfinder, images, speech, text, model, optimizer,
         schedule, train, checkpoint] = config;
  task = "words";
  data = "a \"quoted\" folder # with a \\ and\ta tab\n";
  data_limit = 3 << 20;
  length = 333;
  attention = "2*local(window=8)+2*routing(clusters=4,window=8)";
  attention_at = {{"0-1", "full"}, {"2", "i-clustered(clusters=3,topk=4)"}};
  out = "runs/ä ö";
  init_from = "runs/first";
  device = "cuda:1";
  threads = 3;
  seed = std::numeric_limits<std::uint64_t>::max();
  auto& [symbols, mask] = copy;
  symbols = 7;
  mask = 1.0 / 3.0;
  auto& [keys, values, pairs, queries, causal] = recall;
  keys = 5, values = 6, pairs = 9, queries = 2, causal = true;
  auto& [share] = masked;
  share = 0.4;
  auto& [shortest, depth, arguments] = listops;
  shortest = 22, depth = 23, arguments = 24;
  auto& [paddles, distractors] = pathfinder;
  paddles = 25, distractors = 26;
  auto& [predict] = images;
  predict = "pixels";
  auto& [speech_symbols, join, subsample, beam, masks, tempo] = speech;
  speech_symbols = "phones", join = 27, subsample = 28, beam = 29, masks = 30, tempo = 0.15;
  auto& [valid, test, vocabulary, tokenizer] = text;
  valid = 0.1, test = 0.2, vocabulary = 1000, tokenizer = "gpt2/";
  auto& [dim, layers, heads, kv_heads, ffn, dropout, attention_dropout, positions, embedding_std,
         position_base, bias, tied, recompute] = model;
  embedding_std = 0.3, position_base = 77.5;
  dim = 48, layers = 3, heads = 6, kv_heads = 2, ffn = 100, dropout = 0.1, attention_dropout = 0.2,
  positions = "learned";
  bias = !bias, tied = !tied, recompute = !recompute;
  auto& [name, lr, beta1, beta2, eps, weight_decay, clip, relative, shard] = optimizer;
  name = "adafactor", lr = 0.1 + 0.2, beta1 = 0.5, beta2 = 0.97, eps = 1e-7, weight_decay = 0.3;
  clip = 2.5, relative = true, shard = true;
  auto& [warmup, decay, floor] = schedule;
  warmup = 11, decay = "rsqrt", floor = 0.25;
  auto& [steps, batch, micro_batch, context, log_every, eval_every, eval_batches, final_batches,
         patience, truncate, centroids, dtype, fast, graph] = train;
  steps = 12, batch = 13, micro_batch = 14, log_every = 15, eval_every = 16, eval_batches = 17;
  final_batches = 21, context = 2;
  patience = 18, truncate = 0.7, centroids = "random", dtype = "bf16", fast = true;
  graph = true;
  auto& [every, keep] = checkpoint;
  every = 19, keep = 20;
  return config;
}

std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream stream(text);
  for (std::string line; std::getline(stream, line);) {
    if (line.find(" = ") != std::string::npos) lines.push_back(line);
  }
  return lines;
}

std::string message_of(const std::function<void()>& act) {
  try {
    act();
  } catch (const Error& error) {
    return error.what();
  } catch (const CLI::Error& error) {
    return error.what();
  }
  return "nothing was thrown";
}

std::string refusal(const std::string& text) {
  return message_of([&] { parse_config(text, "a.toml"); });
}

Config parsed(std::vector<std::string> arguments) {
  Config config;
  CLI::App program;
  CLI::App* verb = program.add_subcommand("train");
  add_options(*verb, config);
  arguments.insert(arguments.begin(), "train");
  std::reverse(arguments.begin(), arguments.end());  // the order CLI11 expects
  program.parse(arguments);
  return config;
}

#define EXPECT_HAS(text, part) EXPECT_NE((text).find(part), std::string::npos) << (text)

TEST(Options, EveryFieldSurvivesTheRoundTripThroughText) {
  const Config config = config_without_defaults();
  const std::string text = config_text(config);
  EXPECT_EQ(config_text(parse_config(text, "text")), text);
  // The text has every field, with a value other than its default.
  const auto lines = lines_of(text), defaults = lines_of(config_text(Config()));
  ASSERT_EQ(lines.size(), 11 + 2 + 5 + 1 + 3 + 2 + 1 + 6 + 4 + 13 + 9 + 3 + 14 + 2);
  ASSERT_EQ(defaults.size(), lines.size());
  for (std::size_t i = 0; i < lines.size(); ++i) EXPECT_NE(lines[i], defaults[i]);
}

TEST(Options, NumbersAreWrittenExactly) {
  Config config;
  config.optimizer.lr = 0.1 + 0.2;
  config.seed = std::numeric_limits<std::uint64_t>::max();
  const Config read = parse_config(config_text(config), "text");
  EXPECT_EQ(read.optimizer.lr, 0.1 + 0.2);
  EXPECT_EQ(read.seed, config.seed);
}

TEST(Options, SizesHaveUnits) {
  const auto limit = [](const std::string& text) {
    return parsed({"--data-limit", text}).data_limit;
  };
  EXPECT_EQ(limit("1000"), 1000u);
  EXPECT_EQ(limit("64k"), 65536u);
  EXPECT_EQ(limit("500M"), 500u << 20);
  EXPECT_EQ(limit("8G"), std::uint64_t{8} << 30);
  EXPECT_EQ(parse_config("data-limit = \"8G\"\n", "text").data_limit, std::uint64_t{8} << 30);
  for (const char* const text : {"", "0", "0k", "-1", "k", "1.5G", "1kM", "1T", "1 k", "1048577G",
                                 "18446744073709551615G"}) {
    EXPECT_HAS(message_of([&] { limit(text); }), "--data-limit") << text;
  }
  for (const std::uint64_t bytes : {1ull, 1023ull, 1024ull, 3ull << 19, 5ull << 40, 1ull << 50}) {
    Config config;
    config.data_limit = bytes;
    EXPECT_EQ(parse_config(config_text(config), "text").data_limit, bytes);
  }
}

TEST(Options, DefaultsAreThoseOfTheConfig) {
  EXPECT_EQ(config_text(parsed({})), config_text(Config()));
  EXPECT_EQ(config_text(parse_config("", "text")), config_text(Config()));
}

TEST(Options, TheCommandLineWinsOverTheFile) {
  const TemporaryFolder folder;
  const std::string path = folder.path() + "/a.toml";
  std::ofstream(path) << "length = 99\n[model]\ndim = 32 # narrow\nbias = false\n"
                      << "[train]\nsteps = 5\n";
  const Config config = parsed({"--model.dim", "16", "--config", path, "--seed", "3"});
  EXPECT_EQ(config.model.dim, 16);
  EXPECT_EQ(config.length, 99);
  EXPECT_EQ(config.train.steps, 5);
  EXPECT_EQ(config.seed, 3u);
  EXPECT_FALSE(config.model.bias);
  EXPECT_TRUE(parsed({"--model.bias", "--config", path}).model.bias);
  EXPECT_FALSE(parsed({"--model.tied=false"}).model.tied);
}

TEST(Options, AttentionOfLayersMayBeGivenSeveralTimes) {
  const Config config = parsed({"--attention-at", "0", "full", "--seed", "2", "--attention-at",
                                "1-2", "local(window=3,kind=blocked)"});
  ASSERT_EQ(config.attention_at.size(), 2u);
  EXPECT_EQ(config.attention_at[1].first, "1-2");
  EXPECT_EQ(config.attention_at[1].second, "local(window=3,kind=blocked)");
}

TEST(Options, RefusalsSayWhatIsAllowed) {
  const auto told = [](std::vector<std::string> arguments) {
    return message_of([&] { parsed(arguments); });
  };
  EXPECT_HAS(told({"--model.dim", "0"}), "--model.dim: expected a whole number from 1 to 65536");
  EXPECT_HAS(told({"--model.dim", "many"}), "got \"many\"");
  EXPECT_EQ(parsed({"--threads", std::to_string(kMaxThreads)}).threads, kMaxThreads);
  EXPECT_HAS(told({"--threads", std::to_string(kMaxThreads + 1)}), "--threads: expected");
  EXPECT_HAS(told({"--seed", "-1"}), "--seed");
  EXPECT_HAS(told({"--seed", "99999999999999999999"}), "--seed");
  EXPECT_EQ(parsed({"--seed", "010"}).seed, 10u);
  EXPECT_HAS(told({"--optimizer.lr", "nan"}), "expected a number from 0 to");
  EXPECT_HAS(told({"--schedule.decay", "linear"}), "expected one of constant|rsqrt|cosine");
  EXPECT_HAS(told({"--device", "gpu"}), "expected cpu, cuda or cuda:N");
  EXPECT_HAS(told({"--attention-at", "0"}), "--attention-at");
  EXPECT_HAS(told({"--model.width", "3"}), "--model.width");
  EXPECT_HAS(told({"--config", "no/such/file"}), "no/such/file");
}

TEST(Options, RefusalsOfAFileNameItsLine) {
  EXPECT_HAS(refusal("\n[model]\nwidth = 3\n"), "a.toml, line 3: expected one of model.dim, ");
  EXPECT_HAS(refusal("[modal]\nwidth = 3\n"),
             "line 2: expected a key of a known section such as model");
  EXPECT_HAS(refusal("[model]\ndim = 0\n"), "line 2: --model.dim: expected a whole number");
  EXPECT_HAS(refusal("length = 3\n[model]\n[train]\nlength = 4"), "line 4");
  EXPECT_HAS(refusal("attention-at = [\"0\", \"full\", \"1\"]\n"),
             "expected a multiple of 2 values; got 3");
  EXPECT_HAS(refusal("length = [3, 4]\n"), "length");
  EXPECT_HAS(refusal("config = \"b.toml\"\n"), "expected one of");
  EXPECT_HAS(refusal("help = true\n"), "expected one of");
}

TEST(Options, WhatIsNotTomlIsRefusedWithAdvice) {
  EXPECT_EQ(refusal("length = 3\nlength = 4\n"),
            "[config] a.toml, line 2: key-value pair: cannot redefine existing integer 'length'; "
            "write each key and each [section] once");
  EXPECT_HAS(refusal("[model]\ndim = 8\n[model]\n"), "line 3: table header: cannot redefine");
  EXPECT_HAS(refusal("\ndevice = cpu\n"), "line 2: ");
  EXPECT_HAS(refusal("\ndevice = cpu\n"), "; write key = value with a \"quoted text\", a number");
  EXPECT_HAS(refusal("data-limit = 8G\n"), "line 1: ");
  EXPECT_HAS(refusal("length 3\n"), "line 1: key-value pair: expected '=', saw '3'; write key = ");
  EXPECT_HAS(refusal("x"), "line 1: key-value pair: encountered end-of-file");
  EXPECT_HAS(refusal("length = 3 4\n"), "line 1: ");
  EXPECT_HAS(refusal("length = 010\n"), "leading zeroes");
  EXPECT_HAS(refusal("[model\n"), "write a section as [model]");
  for (const char* const header : {"[+model]", "[[[model]]]", "[[=", "[.]", "[#"}) {
    EXPECT_HAS(refusal("length = 3\n\n" + std::string(header) + "\ndim = 4\n\n"), "line 3: ");
    EXPECT_HAS(refusal(header), "line 1: ");
  }
  EXPECT_HAS(refusal("data = \"open\n"), "line 1: ");
  EXPECT_HAS(refusal("data = \"C:\\x\""), "write \\\\ for a backslash");
  EXPECT_HAS(refusal("data = \"\xff\""), "save the file as UTF-8");
  EXPECT_HAS(refusal("seed = 18446744073709551615\n"), "line 1: ");
  EXPECT_HAS(refusal("data = [\n  [1],\n]\n"),
             "line 1: expected a \"quoted text\", a number, true or false; got a list in a list");
  EXPECT_HAS(refusal("data = [{a = 1}]\n"), "got a table in a list");
  EXPECT_HAS(refusal("data = 2026-01-02\n"), "got a date or time");
  EXPECT_HAS(refusal("[[model]]\ndim = 8\n"), "got a table in a list");
  EXPECT_HAS(refusal("model.dim = 8\n\"model.dim\" = 9\n"), "line 2: expected each key once");
}

TEST(Options, TomlOfAnyFormSetsTheFields) {
  const Config config = parse_config(R"(
length = 1_000 # a comment
"seed" = "18446744073709551615"
model = {dim = 0x30, heads = 6}
train.steps = 0b101
train."batch" = +13
out = "\u00e9 \U0001F600"
data = """
a \
    b"""
attention-at = [
  "0-1", "full", # first
  '2', 'local(window=3)',
]
[optimizer]
lr = 5e-1
relative = true
)",
                                     "a.toml");
  EXPECT_EQ(config.length, 1000);
  EXPECT_EQ(config.seed, std::numeric_limits<std::uint64_t>::max());
  EXPECT_EQ(config.model.dim, 48);
  EXPECT_EQ(config.model.heads, 6);
  EXPECT_EQ(config.train.steps, 5);
  EXPECT_EQ(config.train.batch, 13);
  EXPECT_EQ(config.out, "\u00e9 \U0001F600");
  EXPECT_EQ(config.data, "a b");
  EXPECT_EQ(config.attention_at, (std::vector<std::pair<std::string, std::string>>{
                                     {"0-1", "full"}, {"2", "local(window=3)"}}));
  EXPECT_EQ(config.optimizer.lr, 0.5);
  EXPECT_TRUE(config.optimizer.relative);
}

TEST(Options, WholeNumbersAreNotWrittenAsFractions) {
  EXPECT_HAS(refusal("length = 1e3\n"),
             "--length: expected a whole number from 2 to 16777216; got \"1000.0\"");
  EXPECT_EQ(parse_config("optimizer.lr = 1\n", "text").optimizer.lr, 1.0);
  const Config zero = parse_config("optimizer.lr = -0.0\n", "text");  // -0 is an integer in TOML
  EXPECT_EQ(config_text(parse_config(config_text(zero), "text")), config_text(zero));
}

TEST(Options, WhatCannotBeReadBackIsNotWritten) {
  Config config;
  config.data = "a\xff";
  EXPECT_EQ(message_of([&] { config_text(config); }),
            "[config] --data: expected a text in UTF-8; got other bytes");
  config.data = std::string(1 << 16, 'a');
  EXPECT_HAS(message_of([&] { config_text(config); }), "expected options of at most 64k bytes");
}

TEST(ConfigText, KeysHaveSectionsAndTheOrderOfTheFile) {
  const auto lines = read_config_lines(
      "# a comment\r\n\n  z = 'lit\\eral # no comment' # a comment\n[s.t]\nb-c = [1, -2e-3 , "
      "true]\n"
      "d.e = \"\\u0001\\n\\\"\"\nf = []\n",
      "text");
  ASSERT_EQ(lines.size(), 4u);
  EXPECT_EQ(lines[0].key, "z");
  EXPECT_EQ(lines[0].values, std::vector<std::string>{"lit\\eral # no comment"});
  EXPECT_EQ(lines[1].key, "s.t.b-c");
  EXPECT_EQ(lines[1].values, (std::vector<std::string>{"1", "-0.002", "true"}));
  EXPECT_EQ(lines[2].key, "s.t.d.e");
  EXPECT_EQ(lines[2].values, std::vector<std::string>{"\x01\n\""});
  EXPECT_EQ(lines[2].number, 6);
  EXPECT_TRUE(lines[3].values.empty());
}

std::string utf8(std::uint32_t code) {
  const auto byte = [](std::uint32_t bits) { return static_cast<char>(bits); };
  const auto tail = [&](int shift) { return byte(0x80 | (code >> shift & 0x3f)); };
  if (code < 0x80) return {byte(code)};
  if (code < 0x800) return {byte(0xc0 | code >> 6), tail(0)};
  if (code < 0x10000) return {byte(0xe0 | code >> 12), tail(6), tail(0)};
  return {byte(0xf0 | code >> 18), tail(12), tail(6), tail(0)};
}

TEST(ConfigText, AnyCharacterInQuotesComesBack) {
  std::string text;
  for (std::uint32_t code = 0; code <= 0x10ffff; ++code) {
    if (code < 0xd800 || code > 0xdfff) text += utf8(code);
    if (code % 0x2000 != 0x1fff) continue;
    const auto lines = read_config_lines("a = " + quoted_text(text), "text");
    ASSERT_EQ(lines.size(), 1u);
    ASSERT_EQ(lines[0].values[0], text);
    text.clear();
  }
  for (const char* const bytes : {"\xff", "\x80", "\xc0\x80", "\xed\xa0\x80", "\xf4\x90\x80\x80"}) {
    EXPECT_THROW(quoted_text(bytes), Error);
  }
}

// Characters that toml++ asks whether they are spaces.
TEST(ConfigText, OtherAlphabetsAreRead) {
  for (const std::uint32_t code : {0xa7u, 0xe9u, 0x5d0u, 0x1681u, 0x2030u, 0x3042u, 0xfc7fu}) {
    const std::string c = utf8(code);
    const auto lines = read_config_lines(
        "a = \"\"\"\\\n  " + c + "\"\"\" # " + c + "\n'" + c + "'.b = '" + c + "'\n", "text");
    ASSERT_EQ(lines.size(), 2u);
    EXPECT_EQ(lines[0].values[0], c);
    EXPECT_EQ(lines[1].key, c + ".b");
    EXPECT_HAS(refusal("[tr" + c + "]\n"), "line 1: ");
    EXPECT_HAS(refusal("\na" + c + " = 1\n"), "line 2: ");
    EXPECT_HAS(refusal("length = 3 " + c + "\n"), "line 1: ");
    EXPECT_HAS(refusal("length = " + c + "3\n"), "line 1: ");
    EXPECT_HAS(refusal("data = \"\"\"\\" + c + "\"\"\"\n"), "line 1: ");
  }
}

// toml++ makes a table per part of a key, and frees them by recursion.
TEST(ConfigText, DeepKeysAreRefused) {
  const auto dots = [](const std::string& part, std::int64_t count) {
    std::string key = part;
    for (std::int64_t i = 1; i < count; ++i) key += "." + part;
    return key;
  };
  const std::string allowed = dots("a", kMostKeyParts), deep = dots("a", kMostKeyParts + 1);
  EXPECT_EQ(read_config_lines("[" + allowed + "]\n" + allowed + " = 1\n", "text").size(), 1u);
  EXPECT_EQ(read_config_lines("a = \"" + deep + "\" # " + deep + "\n", "text").size(), 1u);
  EXPECT_EQ(read_config_lines("a = '''\n''" + deep + "'''''\nb = 1.5", "text").size(), 2u);
  for (const std::string& text :
       {deep + " = 1", "[" + deep + "]", "[[" + deep + "]]", "a = {" + deep + " = 1}",
        dots("'.='", kMostKeyParts + 1) + " = 1", dots("\"\\\"=\"", kMostKeyParts + 1) + " = 1",
        "b = \"\"\"\" \"\"\"\"\"\n" + deep + " = 1", dots(" a ", kMostKeyParts + 1) + " = 1",
        "[" + dots("a", 30000) + "]"}) {
    EXPECT_HAS(refusal(text), "expected keys of at most 16 parts; got more");
  }
  EXPECT_HAS(refusal("\n\n" + deep + " = 1"), "a.toml, line 3: expected keys");
}

TEST(ConfigText, HostileTextsAreCheap) {
  constexpr std::size_t kLength = 60000;
  EXPECT_HAS(refusal("data = " + std::string(kLength, '[')), "nested value");
  EXPECT_HAS(refusal(std::string(kLength, 'a')), "key-value pair");
  EXPECT_HAS(refusal("[a" + std::string(kLength, '.') + "]"), "expected keys of at most 16 parts");
  const std::string word(kLength / 3, 'a');
  const std::string twice = refusal(word + " = 1\n" + word + " = 2\n");
  EXPECT_HAS(twice, "cannot redefine existing integer 'aaa");
  EXPECT_LT(twice.size(), 500u);
  EXPECT_HAS(refusal(std::string(1 << 17, ' ')),
             "[config] a.toml: expected at most 64k bytes; got 128k (is it a config file?)");
}

}  // namespace
}  // namespace coterie::train
