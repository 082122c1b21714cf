// SPDX-License-Identifier: MIT
// Settings for libFuzzer, which has the main function: the target's examples and words, and limits
// on time and memory. Arguments of the caller come later and win.
//
//   fuzz_spec -max_total_time=60    writes an input that fails to fuzz_spec.input-crash-...
//   fuzz_spec FILE                  repeats one input
#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "fuzz/fuzz.h"

namespace {

// Words in the format of -dict: quoted, here with all bytes as \xHH.
void write_words(const std::string& path, const std::vector<std::string>& words) {
  std::ofstream file(path);
  for (const std::string& word : words) {
    file << '"';
    for (const char c : word) {
      char code[8];
      std::snprintf(code, sizeof(code), "\\x%02X", static_cast<unsigned>(c) & 0xff);
      file << code;
    }
    file << "\"\n";
  }
}

// One file per example. The folder keeps what earlier runs found.
void write_examples(const std::string& folder, const std::vector<std::string>& examples) {
  std::filesystem::create_directories(folder);
  for (std::size_t i = 0; i < examples.size(); ++i) {
    std::ofstream(folder + "/example-" + std::to_string(i), std::ios::binary) << examples[i];
  }
}

}  // namespace

extern "C" int LLVMFuzzerInitialize(int* argc, char*** argv) {
  const std::string program = (*argv)[0];
  const coterie::fuzz::Target target = coterie::fuzz::target();
  write_words(program + ".words", target.words);
  write_examples(program + ".corpus", target.examples);
  static std::vector<std::string> arguments = {program,
                                               "-dict=" + program + ".words",
                                               "-artifact_prefix=" + program + ".input-",
                                               "-max_len=65536",
                                               "-timeout=10",
                                               "-malloc_limit_mb=64",
                                               "-print_final_stats=1"};
  arguments.insert(arguments.end(), *argv + 1, *argv + *argc);
  const bool only_options = std::all_of(*argv + 1, *argv + *argc,
                                        [](const char* argument) { return argument[0] == '-'; });
  if (only_options) arguments.push_back(program + ".corpus");
  static std::vector<char*> pointers;
  for (std::string& argument : arguments) pointers.push_back(argument.data());
  *argc = static_cast<int>(pointers.size());
  pointers.push_back(nullptr);
  *argv = pointers.data();
  return 0;
}
