// SPDX-License-Identifier: MIT
// One self-contained HTML page from run folders and records of bench and approximate.
#pragma once

#include <string>
#include <vector>

namespace coterie::train {

struct ReportInputs {
  std::vector<std::string> runs;  // folders with log.jsonl, or folders that contain some
  std::string bench;              // JSON lines of coterie bench --json; empty: none
  std::vector<std::string> approximations{};  // JSON lines of coterie approximate --json
  std::string title = "Coterie";
};

// Throws Error if a path has no runs or a record cannot be read. The page mentions missing
// and unreadable parts of logs.
std::string make_report(const ReportInputs& inputs);

}  // namespace coterie::train
