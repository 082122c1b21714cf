// SPDX-License-Identifier: MIT
// Progress of long work on stderr: a bar on a terminal, a few lines elsewhere.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>

#include "train/log.h"

namespace coterie::cli {

class Progress {
 public:
  Progress();
  ~Progress() { clear(); }
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  void show(const train::ProgressLine& line);  // of a training run
  // Of work with `all` parts, called first with none done: "reading the prompt", ..., "tokens".
  void show_parts(const std::string& work, std::int64_t done, std::int64_t all, const char* unit);
  void warn(const std::string& text);  // a separate line
  void clear();                        // removes the bar

 private:
  using Clock = std::chrono::steady_clock;
  void show_bar(const train::ProgressLine& line);
  void show_line(const train::ProgressLine& line);

  bool terminal_;
  bool bar_shown_ = false;
  Clock::time_point shown_{};
  Clock::time_point parts_start_{};
  std::string label_;  // of the last line; a new label means a new run
};

// "[######----]": `width` characters plus the brackets.
std::string progress_bar(std::int64_t step, std::int64_t steps, int width);
// "42 s", "3:07", "1:02:33"
std::string duration_text(double seconds);
// "950", "12.3k", "4.5M"
std::string count_text(double count);

}  // namespace coterie::cli
