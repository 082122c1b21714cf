// SPDX-License-Identifier: MIT
// The reader of config files. An accepted config prints as a text that reads as the same config.
#include <stdexcept>

#include "formats/config_text.h"
#include "fuzz/fuzz.h"
#include "train/options.h"

namespace {

using coterie::train::config_text;
using coterie::train::parse_config;

void consume(const std::string& input) {
  coterie::train::read_config_lines(input,
                                    "input");  // most inputs end here, before options are made
  const std::string text = config_text(parse_config(input, "input"));
  if (config_text(parse_config(text, "printed")) != text) {
    throw std::runtime_error("does not print as it reads: " + text);
  }
}

const char* const kShort = R"toml(
task = "bytes"
model.dim = 32 # wide
[train]
steps = 10
micro-batch = 2
[optimizer]
lr = 1e-3
name = "adafactor"
[recall]
causal = true
)toml";

const char* const kForms = R"toml(
"length" = 1_000
seed = "18446744073709551615"
model = {dim = 0x20, "heads" = 0b10, bias = false}
attention-at = [
  "0-1", 'full', # first
  "2", """local(window=3)""",
]
data = '''
a'b'''
out = """\
  \u00e9 "" \U0001F600\t"""
optimizer . eps = 1_0.5e-3
)toml";

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  return coterie::fuzz::check_input(consume, data, size);
}

coterie::fuzz::Target coterie::fuzz::target() {
  return {.examples = {config_text({}), kShort, kForms},
          .words = {"[",
                    "]",
                    "=",
                    "\"",
                    "#",
                    "\n",
                    ".",
                    "[model]\n",
                    "true",
                    "length = 3\n",
                    "'",
                    "\\",
                    "\\n",
                    "[[",
                    "attention = \"full\"\n",
                    "lr = 1e-400\n",
                    "-0.0",
                    "{",
                    "}",
                    ",",
                    "\"\"\"",
                    "'''",
                    "\\u00e9",
                    "\r\n",
                    "inf",
                    "0x",
                    "[[model]]\n",
                    "a.a.a.a",
                    "1979-05-27T07:32:00Z"}};
}
