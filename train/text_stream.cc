// SPDX-License-Identifier: MIT
#include "train/text_stream.h"

#include <algorithm>
#include <cstdint>
#include <utility>

#include "coterie/error.h"

namespace coterie::train {
namespace {

// Length of the longest end of `text` that is the beginning of `stop`.
std::size_t begun(const std::string& text, const std::string& stop) {
  for (std::size_t n = std::min(text.size(), stop.size() - 1); n > 0; --n) {
    if (text.compare(text.size() - n, n, stop, 0, n) == 0) return n;
  }
  return 0;
}

// The character at the start of some bytes.
struct Character {
  std::size_t bytes;  // at least 1
  enum { whole, cut, invalid } state;
};

std::uint8_t byte_at(const std::string& text, std::size_t i) {
  return static_cast<std::uint8_t>(text[i]);
}

// Unicode's table of well-formed UTF-8: overlong forms, surrogates and numbers above U+10FFFF are
// excluded by the range of the second byte. The bytes of an invalid one are its longest valid
// start.
Character first_character(const std::string& text, std::size_t at) {
  const std::uint8_t lead = byte_at(text, at);
  if (lead < 0x80) return {1, Character::whole};
  if (lead < 0xC2 || lead > 0xF4) return {1, Character::invalid};
  const std::size_t length = lead < 0xE0 ? 2 : lead < 0xF0 ? 3 : 4;
  for (std::size_t i = 1; i < length; ++i) {
    if (at + i == text.size()) return {i, Character::cut};
    const std::uint8_t low = i > 1 ? 0x80 : lead == 0xE0 ? 0xA0 : lead == 0xF0 ? 0x90 : 0x80;
    const std::uint8_t high = i > 1 ? 0xBF : lead == 0xED ? 0x9F : lead == 0xF4 ? 0x8F : 0xBF;
    const std::uint8_t next = byte_at(text, at + i);
    if (next < low || next > high) return {i, Character::invalid};
  }
  return {length, Character::whole};
}

}  // namespace

StopFilter::StopFilter(std::vector<std::string> stops) : stops_(std::move(stops)) {
  for (const std::string& stop : stops_) {
    if (stop.empty()) throw Error("[generate] a stop text is empty; expected at least one byte");
  }
}

std::string StopFilter::push(const std::string& piece) {
  if (stopped_) return {};
  held_ += piece;
  std::size_t end = std::string::npos;
  for (const std::string& stop : stops_) end = std::min(end, held_.find(stop));
  stopped_ = end != std::string::npos;
  if (!stopped_) {
    std::size_t kept = 0;
    for (const std::string& stop : stops_) kept = std::max(kept, begun(held_, stop));
    end = held_.size() - kept;
  }
  std::string shown = held_.substr(0, end);
  held_ = stopped_ ? "" : held_.substr(end);
  return shown;
}

std::string StopFilter::finish() { return std::exchange(held_, {}); }

std::string Utf8Filter::push(const std::string& piece) {
  held_ += piece;
  std::string shown;
  std::size_t at = 0;
  while (at < held_.size()) {
    const Character next = first_character(held_, at);
    if (next.state == Character::cut) break;
    shown += next.state == Character::whole ? held_.substr(at, next.bytes) : "\xEF\xBF\xBD";
    at += next.bytes;
  }
  held_.erase(0, at);
  return shown;
}

}  // namespace coterie::train
