// SPDX-License-Identifier: MIT
// One self-contained HTML page from run folders and a bench record.
#pragma once

#include <string>
#include <vector>

namespace coterie::train {

struct ReportInputs {
  std::vector<std::string> runs;  // folders with log.jsonl, or folders of such
  std::string bench;              // JSON lines of coterie bench --json; empty: none
  std::string title = "Coterie";
};

// Throws Error when a path has no runs or the bench record cannot be read. What a log lacks, and
// lines that cannot be read, are named in the page.
std::string make_report(const ReportInputs& inputs);

}  // namespace coterie::train
