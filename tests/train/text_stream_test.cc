// SPDX-License-Identifier: MIT
// Stop strings and characters in text that arrives in pieces.
#include "train/text_stream.h"

#include <gtest/gtest.h>

#include "coterie/error.h"

namespace coterie::train {
namespace {

// Feeds the text in pieces of `size` bytes; ends at a stop.
struct Shown {
  std::string text;
  bool stopped = false;
};
Shown filtered(const std::string& text, const std::vector<std::string>& stops, std::size_t size) {
  StopFilter filter(stops);
  Shown shown;
  for (std::size_t at = 0; at < text.size() && !filter.stopped(); at += size) {
    shown.text += filter.push(text.substr(at, size));
  }
  shown.text += filter.finish();
  shown.stopped = filter.stopped();
  return shown;
}

void expect_shown(const std::string& text, const std::vector<std::string>& stops,
                  const std::string& expected, bool stopped) {
  for (std::size_t size = 1; size <= text.size(); ++size) {
    const Shown shown = filtered(text, stops, size);
    EXPECT_EQ(shown.text, expected) << text << " in pieces of " << size;
    EXPECT_EQ(shown.stopped, stopped) << text << " in pieces of " << size;
  }
}

TEST(StopFilter, EndsBeforeTheFirstStop) {
  expect_shown("one two three", {}, "one two three", false);
  expect_shown("one two three", {"two"}, "one ", true);
  expect_shown("one two three", {"three", "two"}, "one ", true);
  expect_shown("one two three", {"four"}, "one two three", false);
  expect_shown("aaab", {"aab"}, "a", true);  // a false start is shown
  expect_shown("one tw", {"two"}, "one tw", false);
  expect_shown("abcabd", {"abd"}, "abc", true);
  expect_shown("x\n\ny", {"\n\n"}, "x", true);
}

TEST(StopFilter, ShowsWhatCannotBeginAStop) {
  StopFilter filter({"end"});
  EXPECT_EQ(filter.push("the e"), "the ");
  EXPECT_EQ(filter.push("n"), "");
  EXPECT_EQ(filter.push("try"), "entry");
  EXPECT_EQ(filter.push(" end."), " ");
  EXPECT_TRUE(filter.stopped());
  EXPECT_EQ(filter.push("more"), "");
  EXPECT_EQ(filter.finish(), "");
}

TEST(StopFilter, RefusesAnEmptyStop) { EXPECT_THROW(StopFilter({"a", ""}), Error); }

std::string characters(const std::string& bytes, std::size_t size) {
  Utf8Filter filter;
  std::string shown;
  for (std::size_t at = 0; at < bytes.size(); at += size) {
    const std::string next = filter.push(bytes.substr(at, size));
    Utf8Filter again;
    EXPECT_EQ(again.push(next), next);  // whole characters only
    shown += next;
  }
  return shown;
}

TEST(Utf8Filter, PassesWholeCharacters) {
  const std::string text = "a\u00e4\u20ac\U0001F600z";
  for (std::size_t size = 1; size <= text.size(); ++size) EXPECT_EQ(characters(text, size), text);
}

TEST(Utf8Filter, DropsACutCharacterAtTheEnd) {
  for (const char* cut : {"\xC3", "\xE2\x82", "\xE2", "\xF0\x9F\x98"}) {
    for (std::size_t size = 1; size <= 4; ++size) {
      EXPECT_EQ(characters(std::string("ab") + cut, size), "ab");
    }
  }
}

TEST(Utf8Filter, ReplacesBytesOfNoCharacter) {
  const std::string mark = "\uFFFD";
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"a\xFFz", "a" + mark + "z"},
      {"\x80", mark},
      {"\xC3(", mark + "("},                            // a lead byte without its second
      {"\xE2\x82(", mark + "("},                        // one mark for the valid start
      {"\xC0\xAF", mark + mark},                        // overlong
      {"\xE0\x80\x80", mark + mark + mark},             // overlong
      {"\xED\xA0\x80", mark + mark + mark},             // surrogate
      {"\xF4\x90\x80\x80", mark + mark + mark + mark},  // above U+10FFFF
      {"\xE2\xE2\x82\xAC", mark + "\u20ac"}};
  for (const auto& [bytes, expected] : cases) {
    for (std::size_t size = 1; size <= bytes.size(); ++size) {
      EXPECT_EQ(characters(bytes, size), expected);
    }
  }
}

}  // namespace
}  // namespace coterie::train
