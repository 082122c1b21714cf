// SPDX-License-Identifier: MIT
#include <cstdio>
#include <cstdlib>
#include <exception>

#include "coterie/error.h"
#include "fuzz/fuzz.h"

namespace coterie::fuzz {
namespace {

std::uint64_t accepted = 0;

}  // namespace

int check_input(void (*consume)(const std::string&), const std::uint8_t* data, std::size_t size) {
  try {
    consume(std::string(data, data + size));
    ++accepted;
  } catch (const Error&) {  // NOLINT: malformed input must end here
  } catch (const std::exception& error) {
    std::fprintf(stderr, "not an Error: %s\n", error.what());
    std::abort();
  }
  return 0;
}

std::uint64_t accepted_inputs() { return accepted; }

}  // namespace coterie::fuzz
