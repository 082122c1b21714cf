// SPDX-License-Identifier: MIT
#include "coterie/wrap.h"

#include <sstream>

namespace coterie {

void append_wrapped(std::string& text, const std::string& words, std::size_t indent) {
  constexpr std::size_t kColumns = 80;
  std::istringstream in(words);
  bool first = true;
  for (std::string word; in >> word; first = false) {
    const std::size_t column = text.size() - (text.rfind('\n') + 1);  // npos + 1 is 0
    const bool fits = first ? column == 0 || column < indent : column + 1 + word.size() <= kColumns;
    if (!fits) text += '\n';
    text.append(!fits ? indent : first ? indent - column : 1, ' ');
    text += word;
  }
  text += '\n';
}

}  // namespace coterie
