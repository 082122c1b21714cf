// SPDX-License-Identifier: MIT
#include "apps/coterie/progress.h"

#include <fmt/core.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>

namespace coterie::cli {
namespace {

constexpr double kBarEvery = 0.1, kLineEvery = 30.0;  // seconds
constexpr std::int64_t kLines = 10;                   // of a run, without a terminal

int terminal_columns() {
  winsize size{};
  return ::ioctl(STDERR_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0 ? size.ws_col : 80;
}

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// "loss 0.512  accuracy 0.913  12.3k tokens/s  0:42 left"
std::string numbers_text(const train::ProgressLine& line) {
  std::string text = fmt::format("{}  {} tokens/s", line.score, count_text(line.tokens_per_s));
  if (line.step < line.steps) text += "  " + duration_text(line.seconds_left) + " left";
  return text;
}

}  // namespace

std::string progress_bar(std::int64_t step, std::int64_t steps, int width) {
  const auto full = static_cast<std::size_t>(width * step / std::max<std::int64_t>(steps, 1));
  return fmt::format("[{:#<{}}{:-<{}}]", "", full, "", static_cast<std::size_t>(width) - full);
}

std::string duration_text(double seconds) {
  const auto whole = static_cast<std::int64_t>(std::lround(seconds));
  if (whole < 60) return fmt::format("{} s", whole);
  if (whole < 3600) return fmt::format("{}:{:02}", whole / 60, whole % 60);
  return fmt::format("{}:{:02}:{:02}", whole / 3600, whole / 60 % 60, whole % 60);
}

std::string count_text(double count) {
  if (count < 1e3) return fmt::format("{:.0f}", count);
  return count < 1e6 ? fmt::format("{:.1f}k", count / 1e3) : fmt::format("{:.1f}M", count / 1e6);
}

Progress::Progress() : terminal_(::isatty(STDERR_FILENO) != 0) {}

void Progress::show(const train::ProgressLine& line) {
  terminal_ ? show_bar(line) : show_line(line);
  label_ = line.label;
}

void Progress::show_bar(const train::ProgressLine& line) {
  if (seconds_since(shown_) < kBarEvery && line.step < line.steps) return;
  shown_ = Clock::now();
  const std::string rest = fmt::format("{}/{}  {}", line.step, line.steps, numbers_text(line));
  // The numbers first: a narrow terminal shortens the label.
  const auto columns = static_cast<std::size_t>(terminal_columns() - 1);
  const std::size_t left = columns > rest.size() + 2 ? columns - rest.size() - 2 : 0;
  std::string text = line.label;
  if (text.size() > left) text = left > 3 ? text.substr(0, left - 3) + "..." : "";
  const std::size_t bar = std::min<std::size_t>(left - text.size(), 34);
  if (bar >= 9) text += "  " + progress_bar(line.step, line.steps, static_cast<int>(bar) - 4);
  text += (text.empty() ? "" : "  ") + rest;
  fmt::print(stderr, "\r\x1b[K{}", text.substr(0, columns));
  std::fflush(stderr);
  bar_shown_ = true;
}

// Prints the first and last step, every tenth of the run, and at least one line per 30 s.
void Progress::show_line(const train::ProgressLine& line) {
  const auto part = [&](std::int64_t step) {
    return kLines * step / std::max<std::int64_t>(line.steps, 1);
  };
  const bool starts = line.label != label_;
  if (!starts && seconds_since(shown_) < kLineEvery && part(line.step) == part(line.step - 1))
    return;
  shown_ = Clock::now();
  if (starts) fmt::print(stderr, "{}\n", line.label);
  fmt::print(stderr, "  step {}/{}  {}\n", line.step, line.steps, numbers_text(line));
}

// Work that takes less than a second shows nothing.
void Progress::show_parts(const std::string& work, std::int64_t done, std::int64_t all,
                          const char* unit) {
  if (done == 0) parts_start_ = Clock::now();
  const double seconds = seconds_since(parts_start_);
  const double since = std::min(seconds, seconds_since(shown_));
  if (done == 0 || seconds < 1 || since < (terminal_ ? kBarEvery : kLineEvery)) return;
  shown_ = Clock::now();
  const double left = seconds * static_cast<double>(all - done) / static_cast<double>(done);
  fmt::print(stderr, "{}{} {} {}/{} {}  {} left{}", terminal_ ? "\r\x1b[K" : "  ", work,
             progress_bar(done, all, 20), done, all, unit, duration_text(left),
             terminal_ ? "" : "\n");
  std::fflush(stderr);
  bar_shown_ = terminal_;
}

void Progress::warn(const std::string& text) {
  clear();
  fmt::print(stderr, "coterie: warning: {}\n", text);
}

void Progress::clear() {
  if (!bar_shown_) return;
  fmt::print(stderr, "\r\x1b[K");
  std::fflush(stderr);
  bar_shown_ = false;
}

}  // namespace coterie::cli
