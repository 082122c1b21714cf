// SPDX-License-Identifier: MIT
#include "report/text.h"

#include <fmt/core.h>

#include <algorithm>
#include <cmath>

namespace coterie::train {

namespace {

const char* const kThinSpace = "\u202f";

bool starts_character(char byte) { return (static_cast<unsigned char>(byte) & 0xc0) != 0x80; }

std::string cell_html(const char* tag, const Table::Column& column, const std::string& content) {
  return fmt::format("<{0}{1}>{2}</{0}>", tag, column.number ? " class=\"n\"" : "", content);
}

}  // namespace

std::string escape(std::string_view text) {
  std::string safe;
  safe.reserve(text.size());
  for (const char letter : text) {
    switch (letter) {
      case '&':
        safe += "&amp;";
        break;
      case '<':
        safe += "&lt;";
        break;
      case '>':
        safe += "&gt;";
        break;
      case '"':
        safe += "&quot;";
        break;
      case '\'':
        safe += "&#39;";
        break;
      default:
        safe += letter;
    }
  }
  return safe;
}

std::string shortened(std::string_view text, std::size_t count) {
  std::size_t characters = 0, cut = 0;  // cut: bytes of the first count - 1 characters
  for (std::size_t at = 0; at < text.size(); ++at) {
    if (!starts_character(text[at])) continue;
    if (characters + 1 == count) cut = at;
    if (++characters > count) return std::string(text.substr(0, cut)) + "…";
  }
  return std::string(text);
}

std::string table_html(const Table& table) {
  std::string html = "<div class=\"table\"><table><thead><tr>";
  for (const Table::Column& column : table.columns) {
    html += cell_html("th", column, escape(column.title));
  }
  html += "</tr></thead><tbody>\n";
  for (const std::vector<std::string>& row : table.rows) {
    html += "<tr>";
    for (std::size_t c = 0; c < row.size(); ++c) html += cell_html("td", table.columns[c], row[c]);
    html += "</tr>\n";
  }
  return html + "</tbody></table></div>\n";
}

std::string folded(const std::string& summary_html, const std::string& content_html,
                   Folding folding) {
  return fmt::format("<details{}><summary>{}</summary>\n{}</details>\n",
                     folding.open ? " open" : "", summary_html, content_html);
}

std::string facts_html(const std::vector<std::pair<std::string, std::string>>& facts) {
  std::string html = "<dl>";
  for (const auto& [name, value] : facts) {
    html += fmt::format("<div><dt>{}</dt><dd>{}</dd></div>", escape(name), escape(value));
  }
  return html + "</dl>\n";
}

std::string counted(std::int64_t count, const std::string& what) {
  return fmt::format("{} {}{}", count, what, count == 1 ? "" : "s");
}

std::string compact(double value) {
  const double size = std::abs(value);
  if (size >= 999.5e3) return fmt::format("{:.3g}M", value / 1e6);
  if (size >= 1e3) return fmt::format("{:.3g}k", value / 1e3);
  return fmt::format("{:.3g}", value);
}

std::string grouped(std::int64_t value) {
  std::string digits = fmt::format("{}", value);
  const std::size_t first = value < 0 ? 1 : 0;
  for (std::size_t at = digits.size(); at > first + 3;) digits.insert(at -= 3, kThinSpace);
  return digits;
}

std::string mebibytes_text(double bytes) {
  const double size = bytes / (1 << 20);
  return size < 100 ? fmt::format("{:.1f}", size)
                    : grouped(static_cast<std::int64_t>(std::llround(size)));
}

std::string capitalised(std::string text) {
  if (!text.empty() && text[0] >= 'a' && text[0] <= 'z') text[0] = static_cast<char>(text[0] - 32);
  return text;
}

std::string percent_text(double share) {
  const double percent = 100 * share;
  const bool nearly_all = share < 1 && percent >= 99.95;
  return nearly_all ? fmt::format("{:.2f}{}%", std::min(percent, 99.99), kThinSpace)
                    : fmt::format("{:.1f}{}%", percent, kThinSpace);
}

std::string base64(std::string_view bytes) {
  constexpr std::string_view kDigits =
      "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  std::string text;
  for (std::size_t i = 0; i < bytes.size(); i += 3) {
    const std::string_view three = bytes.substr(i, 3);
    std::uint32_t bits = 0;
    for (std::size_t j = 0; j < 3; ++j) {
      bits = bits << 8 | (j < three.size() ? static_cast<unsigned char>(three[j]) : 0U);
    }
    for (std::size_t j = 0; j < 4; ++j) {
      text += j <= three.size() ? kDigits[bits >> (18 - 6 * j) & 63] : '=';
    }
  }
  return text;
}

bool higher_is_better(const std::string& metric) { return metric == "accuracy"; }

std::string metric_text(const std::string& metric, double value) {
  if (metric == "accuracy" || metric == "error rate") return percent_text(value);
  return fmt::format("{:.{}f}", value, metric == "perplexity" ? 2 : 3);
}

}  // namespace coterie::train
