// SPDX-License-Identifier: MIT
// The one exception type of the library.
#pragma once

#include <stdexcept>
#include <string>

namespace coterie {

// Thrown for everything a caller can get wrong and for failures of a back end. The text reads
// "[op] expected what; got what".
class Error : public std::runtime_error {
 public:
  explicit Error(const std::string& message) : std::runtime_error(message) {}
};

}  // namespace coterie
