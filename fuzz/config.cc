// SPDX-License-Identifier: MIT
// The reader of config files. What is accepted prints as a text that reads as the same.
#include <stdexcept>

#include "fuzz/fuzz.h"
#include "train/options.h"

namespace {

using coterie::train::config_text;
using coterie::train::parse_config;

void consume(const std::string& input) {
  const std::string text = config_text(parse_config(input, "input"));
  if (config_text(parse_config(text, "printed")) != text) {
    throw std::runtime_error("does not print as it reads: " + text);
  }
}

}  // namespace

int main(int argc, char** argv) {
  const coterie::fuzz::Target target = {
      .examples = {config_text({}), "task = \"bytes\"\nlength = 64\n[model]\ndim = 32\n",
                   "model.dim = 32 # wide\n[train]\nsteps = 10\nmicro_batch = 2\n",
                   "[optimizer]\nlr = 1e-3\nname = \"adafactor\"\n[recall]\ncausal = true\n"},
      .words = {"[", "]", "=", "\"", "#", "\n", ".", "[model]\n", "true", "length = 3\n", "'", "\\",
                "\\n", "[[", "attention = \"full\"\n", "lr = 1e-400\n"},
      .consume = consume};
  return coterie::fuzz::run(target, argc, argv);
}
