// SPDX-License-Identifier: MIT
// Text that arrives in pieces: stop strings, and whole UTF-8 characters.
#pragma once

#include <string>
#include <vector>

namespace coterie::train {

// Passes text on up to the first stop string. Bytes that may begin one are held back.
class StopFilter {
 public:
  explicit StopFilter(std::vector<std::string> stops);  // none of them empty

  std::string push(const std::string& piece);  // what may be shown by now
  std::string finish();                        // what was held back
  bool stopped() const { return stopped_; }

 private:
  std::vector<std::string> stops_;
  std::string held_;
  bool stopped_ = false;
};

// Passes whole characters on. Bytes that are part of no character become U+FFFD; a character that
// is not complete is held back, and dropped if nothing follows.
class Utf8Filter {
 public:
  std::string push(const std::string& piece);

 private:
  std::string held_;
};

}  // namespace coterie::train
