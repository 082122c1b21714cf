// SPDX-License-Identifier: MIT
// Placeholders for the verbs that need torch, in a program built without it.
#include <CLI/CLI.hpp>
#include <string>

#include "apps/coterie/export.h"
#include "coterie/error.h"
#include "verbs.h"

namespace coterie::cli {
namespace {

const char* const kWithoutTorch =
    "this program was built without torch: install torch 2.11 (scripts/setup torch) and build "
    "again";

void add_missing(CLI::App& program, const std::string& name, const std::string& what) {
  CLI::App* verb = program.add_subcommand(name, what + " (not in this build: needs torch)");
  verb->allow_extras();
  verb->callback([name] { throw Error("[" + name + "] " + kWithoutTorch); });
}

}  // namespace

void add_train(CLI::App& program) { add_missing(program, "train", "Train a model"); }
void add_eval(CLI::App& program) { add_missing(program, "eval", "Score a trained model"); }
void add_generate(CLI::App& program) { add_missing(program, "generate", "Generate text"); }
void add_inspect(CLI::App& program) { add_missing(program, "inspect", "Inspect attention"); }
void add_compare(CLI::App& program) { add_missing(program, "compare", "Compare attentions"); }
void add_approximate(CLI::App& program) {
  add_missing(program, "approximate", "Approximate a pretrained encoder");
}

const bool kExportsHuggingFace = false;
void export_huggingface(const std::string& /*run*/, const std::string& /*attention*/,
                        const std::string& /*out*/) {
  throw Error(std::string("[export] ") + kWithoutTorch);
}

}  // namespace coterie::cli
