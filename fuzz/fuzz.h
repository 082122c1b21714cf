// SPDX-License-Identifier: MIT
// Property tests with malformed input. A parser must accept an input or throw coterie::Error: no
// other exception, no crash, no hang, no huge allocation.
//
// A target (fuzz/spec.cc) defines LLVMFuzzerTestOneInput and target(). Two drivers call them:
// libFuzzer, which looks for inputs that reach new code (fuzz/libfuzzer.cc), and, with any
// compiler, random bytes and mutated examples (fuzz/fuzz.cc).
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace coterie::fuzz {

struct Target {
  std::vector<std::string> examples;  // to be tried as they are, and mutated
  std::vector<std::string> words;     // of the format, to be inserted
};

Target target();

// Calls `consume`, which gives the input to the parser and throws std::runtime_error when a
// property of accepted input does not hold. Aborts on any exception but Error. Returns 0, as
// LLVMFuzzerTestOneInput must.
int check_input(void (*consume)(const std::string&), const std::uint8_t* data, std::size_t size);

// Inputs since the start that `consume` accepted.
std::uint64_t accepted_inputs();

}  // namespace coterie::fuzz

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size);
