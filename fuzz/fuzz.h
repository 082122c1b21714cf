// SPDX-License-Identifier: MIT
// Property tests with malformed input: random bytes and mutated examples go to a parser, which must
// accept them or throw coterie::Error: no other exception, no crash, no hang, no huge allocation.
//
//   fuzz_spec [seconds [seed]]
#pragma once

#include <functional>
#include <string>
#include <vector>

namespace coterie::fuzz {

struct Target {
  std::vector<std::string> examples;  // well-formed, to be mutated
  std::vector<std::string> words;     // of the format, to be inserted
  // Gives the input to the parser; throws what that throws, and whatever else when a property of
  // accepted input does not hold.
  std::function<void(const std::string&)> consume;
};

// The main function: returns 0 when all inputs behaved. The first that did not is written to a
// file.
int run(const Target& target, int argc, char** argv);

}  // namespace coterie::fuzz
