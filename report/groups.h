// SPDX-License-Identifier: MIT
// Groups of runs that are compared, with the label and colour of each run.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "report/data.h"

namespace coterie::train {

// The attention of a run ("full", or "full; 0-1: local(window=8)" if layers differ), reduced to
// what the report distinguishes.
struct AttentionKind {
  std::string family;         // "full", "i-clustered", "local + routing"; the text when unknown
  std::int64_t clusters = 0;  // of the first group that has them; 0: none
  int colour = 0;             // of the group that selects by content, or of the last
  int order = 0;              // full first, then the order of mechanisms
};
AttentionKind attention_kind(const std::string& text);

// Short names of attentions that are compared: the family, and in parentheses the settings that
// distinguish it within its family: "full", "clustered(8)", "routing(balanced)". Equal specs get
// equal names.
std::vector<std::string> short_names(const std::vector<std::string>& specs);

struct PanelRun {
  const RunLog* log = nullptr;
  AttentionKind kind;
  std::string label;  // short and unique within a panel
  int dash = 0;       // index among the runs of a panel with the same colour
};

// Runs of one task with the same sequence length.
struct Panel {
  std::int64_t length = 0;  // 0: unknown
  std::vector<PanelRun> runs;
};

// From this many tokens on, attention is most of the cost of a small model: such runs are a group
// of their own, and the summary begins with them.
constexpr std::int64_t kLongSequence = 2048;

struct TaskGroup {
  std::string task;
  std::string title;  // "copy", "recall, causal", "bytes: corpus/", "masked, long sequences"
  std::string id;     // its anchor in the page
  std::string metric;
  std::vector<Panel> panels;  // lengths ascending

  std::vector<const RunLog*> logs() const;
};

// Long sequences first, then in order of the first run of each task.
std::vector<TaskGroup> group_runs(const std::vector<RunLog>& runs);

// A value of a run's config by key ("model.dim"); empty if missing.
std::string config_value(const RunLog& run, const std::string& key);

}  // namespace coterie::train
