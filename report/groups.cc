// SPDX-License-Identifier: MIT
#include "report/groups.h"

#include <algorithm>
#include <cctype>
#include <charconv>
#include <map>
#include <set>
#include <tuple>

#include "coterie/error.h"
#include "coterie/spec.h"
#include "formats/config_text.h"
#include "report/plot.h"

namespace coterie::train {

namespace {

// A mechanism's index in the variant is its colour.
static_assert(std::variant_size_v<Mechanism> <= kPlotColours);

struct Clusters {
  std::int64_t operator()(const ClusteredParams& params) const {
    return params.clustering.clusters;
  }
  std::int64_t operator()(const ImprovedClusteredParams& params) const {
    return params.clustering.clusters;
  }
  std::int64_t operator()(const RoutingParams& params) const { return params.clusters; }
  std::int64_t operator()(const CastParams& params) const { return params.clusters; }
  template <class Params>
  std::int64_t operator()(const Params&) const {
    return 0;
  }
};

// The specs in a run's attention: "full; 0-1: local(window=8)" has two.
std::vector<std::string> specs_of(const std::string& text) {
  std::vector<std::string> specs;
  for (std::size_t at = 0; at <= text.size();) {
    const std::size_t end = std::min(text.find("; ", at), text.size());
    const std::string part = text.substr(at, end - at);
    const std::size_t layers = part.find(": ");
    specs.push_back(layers == std::string::npos ? part : part.substr(layers + 2));
    at = end + 2;
  }
  return specs;
}

void add_group(const HeadGroup& group, AttentionKind& kind) {
  const std::string name = mechanism_name(group.mechanism);
  if (!kind.family.ends_with(name)) kind.family += (kind.family.empty() ? "" : " + ") + name;
  if (kind.clusters == 0) kind.clusters = std::visit(Clusters(), group.mechanism);
  kind.colour = std::max(kind.colour, static_cast<int>(group.mechanism.index()));
}

// The "key=value" parts of a spec.
std::set<std::string> settings_of(const std::string& spec) {
  std::set<std::string> settings;
  for (std::size_t at = 0; at < spec.size();) {
    const std::size_t end = std::min(spec.find_first_of("(),+; ", at), spec.size());
    const std::string part = spec.substr(at, end - at);
    if (part.find('=') != std::string::npos) settings.insert(part);
    at = end + 1;
  }
  return settings;
}

// "clusters=8" -> "8", "membership=balanced" -> "balanced", "window=32" unchanged.
std::string short_setting(const std::string& setting) {
  const std::size_t value = setting.find('=') + 1;
  const bool number =
      value < setting.size() && std::isdigit(static_cast<unsigned char>(setting[value])) != 0;
  return number && !setting.starts_with("clusters=") ? setting : setting.substr(value);
}

std::set<std::string> common_to(const std::vector<std::set<std::string>>& all) {
  std::set<std::string> common = all.empty() ? std::set<std::string>() : all[0];
  for (const std::set<std::string>& settings : all) {
    std::erase_if(common, [&](const std::string& setting) { return !settings.contains(setting); });
  }
  return common;
}

std::int64_t length_of(const RunLog& run) {
  const std::string text = config_value(run, "length");
  std::int64_t length = 0;
  std::from_chars(text.data(), text.data() + text.size(), length);
  return length;
}

// Variants of a task that must not be compared with each other get different titles.
std::string title_of(const RunLog& run) {
  std::string title = run.task.empty() ? "unknown task" : run.task;
  if (run.task == "recall") {
    title += config_value(run, "recall.causal") == "true" ? ", causal" : ", bidirectional";
  }
  if (run.task == "images" && run.metric != "accuracy") title += ", value by value";
  if (config_value(run, "speech.symbols") == "phones") title += ", phones";
  const std::string joined = config_value(run, "speech.join");
  if (run.task == "speech" && !joined.empty() && joined != "1") title += ", " + joined + " joined";
  if (length_of(run) >= kLongSequence) title += ", long sequences";
  const std::string data = config_value(run, "data");
  return data.empty() ? title : title + ": " + data;
}

void name_runs(std::vector<PanelRun>& runs) {
  std::vector<std::string> specs;
  for (const PanelRun& run : runs) specs.push_back(run.log->attention);
  const std::vector<std::string> names = short_names(specs);
  std::map<std::string, int> uses;
  std::map<int, int> colours;
  for (const std::string& name : names) ++uses[name];
  for (std::size_t r = 0; r < runs.size(); ++r) {
    runs[r].label = names[r];
    runs[r].dash = colours[runs[r].kind.colour]++;
    if (uses[names[r]] > 1) runs[r].label += ", seed " + std::to_string(runs[r].log->seed);
  }
}

void sort_runs(std::vector<PanelRun>& runs) {
  const auto key = [](const PanelRun& run) {
    return std::make_tuple(run.kind.order, run.kind.family, run.kind.clusters, run.log->attention,
                           run.log->seed, run.log->folder);
  };
  std::stable_sort(runs.begin(), runs.end(),
                   [&](const auto& a, const auto& b) { return key(a) < key(b); });
}

Panel& panel_of(TaskGroup& group, std::int64_t length) {
  const auto found = std::find_if(group.panels.begin(), group.panels.end(),
                                  [&](const Panel& panel) { return panel.length >= length; });
  if (found != group.panels.end() && found->length == length) return *found;
  return *group.panels.insert(found, Panel{.length = length, .runs = {}});
}

}  // namespace

AttentionKind attention_kind(const std::string& text) {
  AttentionKind kind;
  try {
    for (const std::string& spec : specs_of(text)) {
      for (const HeadGroup& group : AttentionSpec::parse(spec).groups) add_group(group, kind);
    }
    kind.order = kind.colour;
  } catch (const Error&) {  // from another version, or not a spec
    kind = {.family = text.empty() ? "unknown attention" : text, .colour = 0, .order = 100};
  }
  return kind;
}

std::vector<std::string> short_names(const std::vector<std::string>& specs) {
  std::map<std::string, std::vector<std::set<std::string>>> families;
  for (const std::string& spec : specs) {
    families[attention_kind(spec).family].push_back(settings_of(spec));
  }
  std::vector<std::string> names;
  for (const std::string& spec : specs) {
    const std::string family = attention_kind(spec).family;
    const std::set<std::string> common = common_to(families[family]);
    std::string own;
    for (const std::string& setting : settings_of(spec)) {
      if (common.contains(setting)) continue;
      own += (own.empty() ? "" : ", ") + short_setting(setting);
    }
    names.push_back(own.empty() ? family : family + "(" + own + ")");
  }
  return names;
}

std::string config_value(const RunLog& run, const std::string& key) {
  try {
    for (const ConfigLine& line : read_config_lines(run.config, run.folder)) {
      if (line.key == key && line.values.size() == 1) return line.values[0];
    }
  } catch (const Error&) {  // the run's facts show it unparsed
  }
  return "";
}

std::vector<const RunLog*> TaskGroup::logs() const {
  std::vector<const RunLog*> all;
  for (const Panel& panel : panels) {
    for (const PanelRun& run : panel.runs) all.push_back(run.log);
  }
  return all;
}

std::vector<TaskGroup> group_runs(const std::vector<RunLog>& runs) {
  std::vector<TaskGroup> groups;
  for (const RunLog& run : runs) {
    const std::string title = title_of(run);
    auto group = std::find_if(groups.begin(), groups.end(),
                              [&](const TaskGroup& other) { return other.title == title; });
    if (group == groups.end()) {
      group = groups.insert(groups.end(), TaskGroup{.task = run.task,
                                                    .title = title,
                                                    .id = "task-" + std::to_string(groups.size()),
                                                    .metric = run.metric,
                                                    .panels = {}});
    }
    panel_of(*group, length_of(run))
        .runs.push_back({.log = &run, .kind = attention_kind(run.attention), .label = {}});
  }
  std::stable_partition(groups.begin(), groups.end(), [](const TaskGroup& group) {
    return group.panels.back().length >= kLongSequence;
  });
  for (TaskGroup& group : groups) {
    for (Panel& panel : group.panels) {
      sort_runs(panel.runs);
      name_runs(panel.runs);
    }
  }
  return groups;
}

}  // namespace coterie::train
