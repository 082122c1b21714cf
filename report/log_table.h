// SPDX-License-Identifier: MIT
// The numbers in the log of a run, for other programs: as a table and as events of TensorBoard.
#pragma once

#include <string>
#include <vector>

#include "formats/event_file.h"
#include "report/data.h"

namespace coterie::train {

// The numbers of one line.
struct LogRow {
  std::string kind, split;  // "step", "eval" or "clusters"; split: of eval lines
  std::int64_t step = 0;
  double time = 0;  // seconds since 1970: of the run's start plus those of training
  NamedValues values;
};

struct LogTable {
  double start = 0;    // of the run, seconds since 1970
  std::string metric;  // "bits per byte"
  std::vector<LogRow> rows;
};

// Values of nested objects get names such as "strata.9-64"; of a clusters line the mean over the
// heads of a group, such as "layer0.group1.mass". Numbers that are not finite are left out. Throws
// Error if there is no log or no step in it.
LogTable read_log_table(const std::string& folder);

// Step and eval lines as comma-separated values: the columns kind, step, split, then those of
// log.h, empty where a line has no such number. Lines end with "\n".
std::string log_csv(const LogTable& table);

// Tags: train/NAME, SPLIT/NAME with the metric by its name, clusters/NAME.
std::vector<ScalarEvent> log_events(const LogTable& table);

}  // namespace coterie::train
