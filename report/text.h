// SPDX-License-Identifier: MIT
// Text of the report: escaped HTML, tables, numbers as people read them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace coterie::train {

// With & < > " ' replaced, for content and for attributes in double quotes.
std::string escape(std::string_view text);

// At most `count` characters, with a final ellipsis if cut. Does not split UTF-8 characters.
std::string shortened(std::string_view text, std::size_t count);

// A table in a box that scrolls horizontally on narrow pages. Cells are HTML.
struct Table {
  struct Column {
    std::string title;   // text
    bool number = true;  // aligned to the right
  };
  std::vector<Column> columns;
  std::vector<std::vector<std::string>> rows;
};
std::string table_html(const Table& table);

// <details> with a summary line.
struct Folding {
  bool open = false;  // initially
};
std::string folded(const std::string& summary_html, const std::string& content_html,
                   Folding folding = {});

// Names and values as a definition list; both are text.
std::string facts_html(const std::vector<std::pair<std::string, std::string>>& facts);

std::string counted(std::int64_t count, const std::string& what);  // 1 line, 2 lines
std::string compact(double value);                                 // 0.05, 12, 3.4k, 1.2M
std::string grouped(std::int64_t value);                           // 1 234 567, with thin spaces
std::string mebibytes_text(double bytes);                          // 12.3
std::string capitalised(std::string text);                         // the first letter, ASCII only
std::string percent_text(double share);  // 99.4 %; 100 % only for exactly 1

std::string base64(std::string_view bytes);

// Metrics by their names in logs: "accuracy", "bits per byte", "perplexity", "error rate", ...
bool higher_is_better(const std::string& metric);
std::string metric_text(const std::string& metric, double value);

}  // namespace coterie::train
