// SPDX-License-Identifier: MIT
// The one exception type of the library.
#pragma once

#include <stdexcept>
#include <string>

namespace coterie {

// Thrown for invalid arguments and for back-end failures. Messages start with the name of the
// operation: "[op] expected ...; got ...".
class Error : public std::runtime_error {
 public:
  explicit Error(const std::string& message) : std::runtime_error(message) {}
};

}  // namespace coterie
