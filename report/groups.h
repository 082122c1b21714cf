// SPDX-License-Identifier: MIT
// Which runs are compared with each other, and how each is called and coloured there.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "report/data.h"

namespace coterie::train {

// The attention of a run ("full", or "full; 0-1: local(window=8)" with other layers), as far as the
// report tells attentions apart.
struct AttentionKind {
  std::string family;         // "full", "i-clustered", "local + routing"; the text when unknown
  std::int64_t clusters = 0;  // of the first group that has them; 0: none
  int colour = 0;             // of the group that selects by content, or of the last
  int order = 0;              // full first, then as mechanisms are listed
};
AttentionKind attention_kind(const std::string& text);

// Short names of attentions side by side: the family, and in brackets what tells it from others of
// its family: "full", "clustered(8)", "routing(balanced)". Equal specs get equal names.
std::vector<std::string> short_names(const std::vector<std::string>& specs);

struct PanelRun {
  const RunLog* log = nullptr;
  AttentionKind kind;
  std::string label;  // short, and different for each run of a panel
  int dash = 0;       // counts runs of a panel that share a colour
};

// Runs of one task on rows of one length.
struct Panel {
  std::int64_t length = 0;  // 0: unknown
  std::vector<PanelRun> runs;
};

struct TaskGroup {
  std::string task;
  std::string title;  // "copy", "recall, causal", "bytes: corpus/"
  std::string id;     // its anchor in the page
  std::string metric;
  std::vector<Panel> panels;  // lengths ascending

  std::vector<const RunLog*> logs() const;
};

// In the order in which tasks first occur.
std::vector<TaskGroup> group_runs(const std::vector<RunLog>& runs);

// A value of a run's config by key, "model.dim"; empty when it has none.
std::string config_value(const RunLog& run, const std::string& key);

}  // namespace coterie::train
