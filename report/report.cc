// SPDX-License-Identifier: MIT
#include "report/report.h"

#include <fmt/core.h>

#include <set>

#include "coterie/error.h"
#include "report/sections.h"
#include "report/text.h"

namespace coterie::train {

namespace {

ReportData read_inputs(const ReportInputs& inputs) {
  ReportData data;
  for (const std::string& path : inputs.runs) {
    for (const std::string& folder : find_runs(path)) {
      std::optional<RunLog> run = read_run(folder);
      if (run) {
        data.runs.push_back(std::move(*run));
      } else {
        data.problems.push_back(folder + ": the log has no line of kind \"run\"");
      }
    }
  }
  if (data.runs.empty() && !data.problems.empty() && inputs.bench.empty()) {
    throw Error(
        "[report] expected logs of runs; got " + data.problems[0] +
        (data.problems.size() > 1 ? fmt::format(", and {} more", data.problems.size() - 1) : ""));
  }
  if (!inputs.bench.empty()) data.bench = read_bench(inputs.bench);
  data.groups = group_runs(data.runs);
  return data;
}

// A fact about the machines of all runs; empty if they differ.
std::string common_fact(const std::vector<RunLog>& runs, const std::string& name) {
  std::set<std::string> values;
  for (const RunLog& run : runs) {
    for (const auto& [key, value] : run.machine) {
      if (key == name) values.insert(value);
    }
  }
  return values.size() == 1 ? *values.begin() : "";
}

// "12 runs of 3 tasks · 2026-07-01 · AMD EPYC"
std::string subtitle_of(const ReportData& data) {
  if (data.runs.empty()) return "";
  std::string text =
      fmt::format("{} of {}", counted(static_cast<std::int64_t>(data.runs.size()), "run"),
                  counted(static_cast<std::int64_t>(data.groups.size()), "task"));
  std::string last;
  for (const RunLog& run : data.runs) last = std::max(last, run.date);
  for (const std::string& part :
       {last.substr(0, 10), common_fact(data.runs, "cpu"), common_fact(data.runs, "gpu")}) {
    if (!part.empty()) text += " · " + part;
  }
  return text;
}

}  // namespace

std::string make_report(const ReportInputs& inputs) {
  if (inputs.runs.empty() && inputs.bench.empty() && inputs.approximations.empty()) {
    throw Error("[report] expected run folders, --bench FILE or --approximate FILE; got none");
  }
  std::vector<PageSection> records;
  for (const std::string& path : inputs.approximations) {
    PageSection section{fmt::format("approximation-{}", records.size()), "", ""};
    section.html = approximation_section(path, section.id, section.name);
    records.push_back(std::move(section));
  }
  if (inputs.runs.empty() && inputs.bench.empty()) return page_html(inputs.title, "", records);
  const ReportData data = read_inputs(inputs);
  std::vector<PageSection> sections = {{"summary", "Summary", summary_section(data)}};
  for (const TaskGroup& group : data.groups) {
    sections.push_back({group.id, group.title, task_section(group)});
  }
  for (PageSection& section : records) sections.push_back(std::move(section));
  sections.push_back({"bench", "Speed and error", bench_section(data)});
  sections.push_back({"clusters", "Cluster health", cluster_section(data)});
  sections.push_back({"runs", "Runs and machines", runs_section(data)});
  return page_html(inputs.title, subtitle_of(data), sections);
}

}  // namespace coterie::train
