// SPDX-License-Identifier: MIT
// Checks that throw coterie::Error with a message "[op] ...".
#pragma once

#include <sstream>
#include <string>

#include "coterie/error.h"

namespace coterie {

template <class... Parts>
[[noreturn]] void fail(const std::string& op, const Parts&... parts) {
  std::ostringstream text;
  text << '[' << op << "] ";
  (text << ... << parts);
  throw Error(text.str());
}

}  // namespace coterie

// Checks arguments of the caller: COTERIE_CHECK(n > 0, "op", "expected ...; got ", n).
#define COTERIE_CHECK(condition, ...)               \
  do {                                              \
    if (!(condition)) ::coterie::fail(__VA_ARGS__); \
  } while (false)

// Checks internal invariants, in builds with COTERIE_ASSERTS.
#if defined(COTERIE_ASSERTS)
#define COTERIE_ASSERT(condition) \
  COTERIE_CHECK(condition, "internal", "broken invariant: ", #condition)
#else
#define COTERIE_ASSERT(condition) \
  do {                            \
  } while (false)
#endif
