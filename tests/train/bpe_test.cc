// SPDX-License-Identifier: MIT
// Words, merges and ids are those of Hugging Face's tokenizers 0.23 for the same text (ByteLevel
// without a prefix space; BpeTrainer with the bytes as initial alphabet and a minimum frequency of
// 2). COTERIE_GPT2_TOKENIZER may name a folder with GPT-2's encoder.json and vocab.bpe.
#include "train/bpe.h"

#include <archive.h>
#include <archive_entry.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <nlohmann/json.hpp>

#include "coterie/error.h"
#include "coterie/random.h"
#include "formats/files.h"
#include "tests/train/temporary_folder.h"
#include "train/bpe_bytes.h"

namespace coterie::train {
namespace {

using nlohmann::json;
using Ids = std::vector<std::int32_t>;
using Texts = std::vector<std::string>;

const char* const kText =
    "the cat sat on the mat, and the other cat didn't.\n"
    "they're here; we'll see 12 cats at 12:30\n"
    "naïve café — été, 日本 日本語 😀😀\n"
    " the  then\tthese\n\n  those\n";

BpeTokenizer small_tokenizer() { return BpeTokenizer::train(kText, 300); }

Texts words_of(const std::string& text) {
  Texts words;
  for (std::size_t begin = 0; begin < text.size();) {
    const std::size_t end = next_word(text, begin);
    words.push_back(text.substr(begin, end - begin));
    begin = end;
  }
  return words;
}

TEST(Words, AreThoseOfGpt2) {
  EXPECT_EQ(words_of("It's we'll 'tis I'D don't'"),
            Texts({"It", "'s", " we", "'ll", " '", "tis", " I", "'", "D", " don", "'t", "'"}));
  EXPECT_EQ(words_of("  two  spaces \n"), Texts({" ", " two", " ", " spaces", " \n"}));
  EXPECT_EQ(words_of("a1b22 ½Ⅳ²"), Texts({"a", "1", "b", "22", " ½Ⅳ²"}));
  EXPECT_EQ(words_of("x\u00a0\u3000y \u2028z"),
            Texts({"x", "\u00a0", "\u3000", "y", " ", "\u2028", "z"}));
  EXPECT_EQ(words_of("日本語 text, naïve!! 😀e\u0301"),
            Texts({"日本語", " text", ",", " naïve", "!!", " 😀", "e", "\u0301"}));
  EXPECT_EQ(words_of("\t\tx \ty"), Texts({"\t", "\t", "x", " ", "\t", "y"}));
  EXPECT_EQ(words_of(" '' 's"), Texts({" ''", " '", "s"}));
  EXPECT_EQ(words_of("\x1c\u0085_"), Texts({"\x1c", "\u0085", "_"}));
  EXPECT_EQ(words_of("a\xff\xe6\x97 b"), Texts({"a", "\xff\xe6\x97", " b"}));  // not UTF-8
}

TEST(PrintableBytes, ComeBack) {
  std::string all;
  for (int byte = 0; byte < kBytes; ++byte) all += static_cast<char>(byte);
  EXPECT_EQ(from_printable(to_printable(all)), all);
  EXPECT_EQ(to_printable(" a\n\xe9\xad"), "ĠaĊéŃ");
  EXPECT_EQ(from_printable("a b"), std::nullopt);
  EXPECT_EQ(from_printable("日"), std::nullopt);
  EXPECT_EQ(from_printable("a\xc4"), std::nullopt);
}

TEST(Bpe, LearnsFrequentPairsFirstAndSmallIdsAmongEquals) {
  const BpeTokenizer tokenizer = small_tokenizer();
  Texts merged;
  for (std::size_t id = 256; id < tokenizer.model().tokens.size(); ++id) {
    merged.push_back(to_printable(tokenizer.model().tokens[id]));
  }
  EXPECT_EQ(merged,
            Texts({"he", "the", "at", "Ġc",  "Ġthe", "se", "Ã©", "Ġcat", "12",   "re",     "¥æ",
                   "æĹ", "ðŁ",  "Ġo", "Ġ12", "ĠæĹ",  "ĺĢ", "ľ¬", "¥æľ¬", "ðŁĺĢ", "ĠæĹ¥æľ¬"}));
  EXPECT_EQ(tokenizer.text(), small_tokenizer().text());
  EXPECT_EQ(BpeTokenizer::train(kText, 260).vocabulary(), 260);
  EXPECT_EQ(BpeTokenizer::train("", 300).vocabulary(), 256);
}

TEST(Bpe, OverlappingPairsAreMergedFromTheLeft) {
  const BpeTokenizer tokenizer = BpeTokenizer::train("aaaaa aaaaa", 258);
  EXPECT_EQ(tokenizer.token(256), "aa");
  EXPECT_EQ(tokenizer.token(257), "aaa");  // (aa)(a) is as frequent as (aa)(aa), with smaller ids
  EXPECT_EQ(tokenizer.encode("aaaaaaa"), Ids({256, 256, 257}));
}

TEST(Bpe, IdsAreThoseOfTheOtherLibrary) {
  const BpeTokenizer tokenizer = small_tokenizer();
  const std::pair<const char*, Ids> expected[] = {
      {"the cat", {257, 263}},
      {"They're", {51, 256, 88, 6, 265}},
      {"we'll  see", {86, 68, 6, 75, 75, 220, 220, 261, 68}},
      {"12 1 123", {264, 220, 16, 270, 18}},
      {"café été", {66, 64, 69, 262, 220, 262, 83, 262}},
      {"日本人", {267, 274, 160, 118, 118}},
      {"😀 😃", {275, 220, 268, 246, 225}},
      {"\x01\x7f\t \n", {189, 221, 197, 220, 198}},
      {"a\u00a0b\u3000 c", {64, 126, 254, 65, 159, 222, 222, 259}},
      {"'tis the cats'", {6, 83, 72, 82, 260, 263, 82, 6}},
      {"x   y\n", {87, 220, 220, 220, 88, 198}},
      {"e\u0301", {68, 136, 223}}};
  for (const auto& [text, ids] : expected) EXPECT_EQ(tokenizer.encode(text), ids) << text;
}

TEST(Bpe, AnyBytesComeBack) {
  const BpeTokenizer tokenizer = small_tokenizer();
  for (std::uint64_t round = 0; round < 200; ++round) {
    std::string text;
    for (std::uint64_t i = 0; i < round; ++i) {
      const std::uint64_t drawn = random_u64(RandomStream{.seed = round}, i);
      text += drawn % 2 == 0 ? static_cast<char>(drawn >> 8) : kText[(drawn >> 8) % 150];
    }
    EXPECT_EQ(tokenizer.decode(tokenizer.encode(text)), text) << round;
  }
}

// Quadratic work would take minutes.
TEST(Bpe, LongWordsTakeTimeInProportion) {
  const std::string text(200'000, 'a');
  const BpeTokenizer tokenizer = BpeTokenizer::train(text, 280);
  EXPECT_EQ(tokenizer.vocabulary(), 273);  // 2, 4, ..., 2^17 letters
  EXPECT_EQ(tokenizer.decode(tokenizer.encode(text)), text);
}

TEST(Bpe, BytesAreTheirOwnIds) {
  EXPECT_EQ(BpeTokenizer::bytes().encode("a\n\xff"), Ids({97, 10, 255}));
  EXPECT_EQ(BpeTokenizer::parse(BpeTokenizer::bytes().text(), "x").encode("a\n\xff"),
            Ids({97, 10, 255}));
}

TEST(Bpe, TokenizerJsonComesBack) {
  const BpeTokenizer tokenizer = small_tokenizer();
  const BpeTokenizer again = BpeTokenizer::parse(tokenizer.text(), "tokenizer.json");
  EXPECT_EQ(again.text(), tokenizer.text());
  EXPECT_EQ(again.encode(kText), tokenizer.encode(kText));
  // Newer versions of the other library write merges as lists.
  json file = json::parse(tokenizer.text());
  for (json& merge : file["model"]["merges"]) {
    const auto text = merge.get<std::string>();
    merge = {text.substr(0, text.find(' ')), text.substr(text.find(' ') + 1)};
  }
  EXPECT_EQ(BpeTokenizer::parse(file.dump(), "x").encode(kText), tokenizer.encode(kText));
}

// GPT-2's two files, with added tokens that its merges cannot give.
std::pair<std::string, std::string> two_files() {
  const BpeTokenizer tokenizer = small_tokenizer();
  json vocabulary = json::parse(tokenizer.text())["model"]["vocab"];
  vocabulary["<end>"] = tokenizer.vocabulary();
  vocabulary["<end> of"] = tokenizer.vocabulary() + 1;
  std::string merges = "#version: 0.2\n";
  for (const auto& [left, right] : tokenizer.model().merges) {
    merges +=
        to_printable(tokenizer.token(left)) + " " + to_printable(tokenizer.token(right)) + "\n";
  }
  return {vocabulary.dump(), merges};
}

TEST(Bpe, AddedTokensAreMatchedFirstAndTheLongestWins) {
  const auto [vocabulary, merges] = two_files();
  const BpeTokenizer tokenizer = BpeTokenizer::parse(vocabulary, merges, "gpt2");
  const std::int32_t end = 277, end_of = 278;
  ASSERT_EQ(tokenizer.vocabulary(), 279);
  EXPECT_EQ(tokenizer.encode("the<end> cat<end> of"), Ids({257, end, 263, end_of}));
  EXPECT_EQ(tokenizer.encode("<end><end"), Ids({end, 27, 68, 77, 67}));
  EXPECT_EQ(tokenizer.decode({end_of}), "<end> of");
  const BpeTokenizer again = BpeTokenizer::parse(tokenizer.text(), "again");
  EXPECT_EQ(again.encode("the<end> cat<end> of"), Ids({257, end, 263, end_of}));
}

void write_tar(const std::string& path,
               const std::vector<std::pair<std::string, std::string>>& files) {
  archive* const writer = archive_write_new();
  archive_write_set_format_pax(writer);
  ASSERT_EQ(archive_write_open_filename(writer, path.c_str()), ARCHIVE_OK);
  for (const auto& [name, text] : files) {
    archive_entry* const entry = archive_entry_new();
    archive_entry_set_pathname(entry, name.c_str());
    archive_entry_set_size(entry, static_cast<la_int64_t>(text.size()));
    archive_entry_set_filetype(entry, AE_IFREG);
    archive_entry_set_perm(entry, 0644);
    ASSERT_EQ(archive_write_header(writer, entry), ARCHIVE_OK);
    archive_write_data(writer, text.data(), text.size());
    archive_entry_free(entry);
  }
  archive_write_free(writer);
}

std::string load_error(const std::string& path) {
  try {
    BpeTokenizer::load(path);
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

TEST(Bpe, LoadsFilesFoldersAndArchives) {
  const TemporaryFolder folder;
  const auto [vocabulary, merges] = two_files();
  const Ids expected = {257, 277, 263};
  const std::string text = "the<end> cat";
  write_file(folder.path("encoder.json"), vocabulary);
  write_file(folder.path("vocab.bpe"), merges);
  EXPECT_EQ(BpeTokenizer::load(folder.path()).encode(text), expected);
  write_tar(
      folder.path("a.tar"),
      {{"gpt2/vocab.json", vocabulary}, {"gpt2/merges.txt", merges}, {"bert/vocab.txt", "other"}});
  EXPECT_EQ(BpeTokenizer::load(folder.path("a.tar")).encode(text), expected);
  BpeTokenizer::load(folder.path("a.tar")).save(folder.path("any name"));
  EXPECT_EQ(BpeTokenizer::load(folder.path("any name")).encode(text), expected);

  write_tar(folder.path("b.tar"), {{"a/vocab.json", vocabulary}, {"b/merges.txt", merges}});
  EXPECT_NE(load_error(folder.path("b.tar")).find("expected one tokenizer"), std::string::npos);
  const TemporaryFolder empty;
  EXPECT_NE(load_error(empty.path()).find("expected a tokenizer.json"), std::string::npos);
  EXPECT_NE(load_error(folder.path("missing")).find("no such file"), std::string::npos);
}

std::string parse_error(const json& file) {
  try {
    BpeTokenizer::parse(file.dump(), "t.json");
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

TEST(Bpe, RefusesWhatItWouldEncodeDifferently) {
  const json good = json::parse(small_tokenizer().text());
  ASSERT_EQ(parse_error(good), "");
  const std::tuple<const char*, json, const char*> changes[] = {
      {"/normalizer", {{"type", "NFC"}}, "expected no normalizer"},
      {"/pre_tokenizer", {{"type", "Whitespace"}}, "expected the pre_tokenizer ByteLevel"},
      {"/pre_tokenizer", nullptr, "expected the pre_tokenizer ByteLevel (GPT-2's); got null"},
      {"/pre_tokenizer/add_prefix_space", true, "expected add_prefix_space to be false; got true"},
      {"/pre_tokenizer/use_regex", false, "expected use_regex to be true; got false"},
      {"/post_processor", {{"type", "TemplateProcessing"}}, "got TemplateProcessing (set it to"},
      {"/model/type", "WordPiece", "expected a model of type BPE; got WordPiece"},
      {"/model/dropout", 0.1, "expected dropout to be null; got 0.1"},
      {"/model/end_of_word_suffix", "</w>", "expected end_of_word_suffix to be null"},
      {"/model/byte_fallback", true, "expected byte_fallback to be false"},
      {"/model/vocab/he", 900, "without gaps; got 900 for \"he\""},
      {"/model/vocab/he", 257, "id 257 belongs to two tokens"},
      {"/model/vocab/he", -1, "expected an id from 0"},
      {"/model/vocab/日", 277, "is it a byte-level tokenizer?"},
      {"/model/vocab", json::array(), "expected a vocabulary"},
      {"/model/merges/0", "h", "expected merges of two tokens"},
      {"/model/merges/0", "h q q", "expected merges of two tokens"},
      {"/model/merges/0", "h hehe", "is not in the vocabulary"},
      {"/model/merges/0", "q q", "merge 0 gives \"qq\", which is not a token"},
      {"/model/merges", 3, "expected a list of merges"},
      {"/added_tokens", {{{"id", 300}, {"content", ""}}}, "expected a content and an id"},
      {"/added_tokens", {{{"id", 277}, {"content", "<x>"}, {"lstrip", true}}}, "expected lstrip"},
      {"/added_tokens", {{{"id", 3}, {"content", "he"}}}, "has the ids 256 and 3"}};
  for (const auto& [place, value, message] : changes) {
    json bad = good;
    bad[json::json_pointer(place)] = value;
    EXPECT_NE(parse_error(bad).find(message), std::string::npos)
        << place << " " << value << ": " << parse_error(bad);
  }
  json bad = good;
  bad["model"]["vocab"].erase("Ġ");
  bad["model"]["vocab"]["qq"] = good["model"]["vocab"]["Ġ"];
  bad["model"]["merges"] = json::array();
  EXPECT_NE(parse_error(bad).find("byte 0x20 has none"), std::string::npos) << parse_error(bad);
  EXPECT_NE(parse_error(json::array()).find("expected a JSON object"), std::string::npos);
  EXPECT_THROW(BpeTokenizer::train("abc", 255), Error);
  EXPECT_THROW(small_tokenizer().decode({277}), Error);
  EXPECT_THROW(small_tokenizer().decode({-1}), Error);
}

TEST(Bpe, WholeWordsThatAreTokensNeedNoMerges) {
  json file = json::parse(small_tokenizer().text());
  file["model"]["vocab"]["sat"] = 277;  // no merge gives it
  EXPECT_EQ(BpeTokenizer::parse(file.dump(), "x").encode("sat"), Ids({82, 258}));
  file["model"]["ignore_merges"] = true;
  EXPECT_EQ(BpeTokenizer::parse(file.dump(), "x").encode("sat"), Ids({277}));
}

TEST(Bpe, ReadsGpt2) {
  const char* const path = std::getenv("COTERIE_GPT2_TOKENIZER");
  if (path == nullptr) GTEST_SKIP() << "COTERIE_GPT2_TOKENIZER names no folder";
  const BpeTokenizer tokenizer = BpeTokenizer::load(path);
  EXPECT_EQ(tokenizer.vocabulary(), 50257);
  EXPECT_EQ(tokenizer.encode("Hello world"), Ids({15496, 995}));
  EXPECT_EQ(tokenizer.encode("<|endoftext|>"), Ids({50256}));
}

}  // namespace
}  // namespace coterie::train
