// SPDX-License-Identifier: MIT
// The reader of tokenizer.json. An accepted tokenizer gives any text back and prints as a text that
// reads as the same tokenizer.
#include <stdexcept>

#include "fuzz/fuzz.h"
#include "train/bpe.h"

namespace {

using coterie::train::BpeTokenizer;

void consume(const std::string& input) {
  const BpeTokenizer tokenizer = BpeTokenizer::parse(input, "input");
  const std::string sample = "the other <end>'s \xff\xe6\x97" + input.substr(0, 1000);
  if (tokenizer.decode(tokenizer.encode(sample)) != sample) {
    throw std::runtime_error("the text does not come back");
  }
  const std::string text = tokenizer.text();
  if (BpeTokenizer::parse(text, "printed").text() != text) {
    throw std::runtime_error("does not print as it reads: " + text);
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  return coterie::fuzz::check_input(consume, data, size);
}

coterie::fuzz::Target coterie::fuzz::target() {
  const std::string text = BpeTokenizer::train("the other the other", 262).text();
  std::string added = text;
  added.replace(added.find("[]"), 2, R"([{"id":262,"content":"<end>","special":true}])");
  return {.examples = {text, added, BpeTokenizer::bytes().text(), "{}"},
          .words = {"{",
                    "}",
                    "[",
                    "]",
                    ":",
                    ",",
                    "\"",
                    "null",
                    "true",
                    "false",
                    "\\u0120",
                    "\"h e\"",
                    "[\"h\",\"e\"]",
                    "\"merges\":[]",
                    "\"type\":\"BPE\"",
                    "262",
                    "-1",
                    "\"added_tokens\":",
                    "\"vocab\":{}",
                    "\"ignore_merges\":true"}};
}
