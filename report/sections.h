// SPDX-License-Identifier: MIT
// The sections of the report, each as HTML.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "report/data.h"
#include "report/groups.h"

namespace coterie::train {

struct ReportData {
  std::vector<RunLog> runs;
  std::vector<TaskGroup> groups;      // of `runs`
  std::optional<BenchLog> bench{};    // absent: none was given
  std::vector<std::string> problems;  // what could not be read, as text
};

// The results in sentences.
std::string summary_section(const ReportData& data);
// Curves, scores and costs of one task.
std::string task_section(const TaskGroup& group);
// Speed and error compared with full attention.
std::string bench_section(const ReportData& data);
// Cluster sizes, empty clusters and kept mass per layer and head.
std::string cluster_section(const ReportData& data);
// A record of coterie approximate; `name` is set to the title of the section.
std::string approximation_section(const std::string& path, const std::string& id,
                                  std::string& name);
// Config, machine and state of every run.
std::string runs_section(const ReportData& data);

// A page with a list of its sections at the top.
struct PageSection {
  std::string id, name;  // name: text
  std::string html;
};
std::string page_html(const std::string& title, const std::string& subtitle,
                      const std::vector<PageSection>& sections);

// Loss, score against time, score against memory.
std::vector<std::string> panel_figures(const Panel& panel);
// Score by stratum; empty if there are no strata.
std::string strata_figure(const Panel& panel);

// Pieces that sections share.
std::string figure_html(const std::string& title, const std::string& picture,
                        const std::string& note = "", bool collapsed = false);
std::string figures_html(const std::vector<std::string>& figures);  // side by side where they fit
std::string swatch_html(int colour, int dash);             // a sample of the line of an attention
std::string attention_html(const std::string& attention);  // as code, with line-break opportunities
// A swatch, its attention, and an optional badge.
std::string key_html(int colour, int dash, const std::string& attention,
                     const std::string& badge = "");
std::string state_text(const RunLog& run);  // "finished", "interrupted", "unfinished"

// Results of a family over sequence length x clusters.
struct ClusterGrid {
  std::string family;
  std::vector<std::int64_t> lengths, clusters;
  std::vector<std::vector<double>> results;  // [clusters][length]; kUnknown: not run
};
// One for each family that was run with several cluster counts.
std::vector<ClusterGrid> cluster_grids(const TaskGroup& group);
std::string grid_html(const TaskGroup& group);  // as heat maps; empty if there are none
// The mean result of full attention on each length; kUnknown where it was not run.
std::vector<double> full_results(const TaskGroup& group);

// The best baseline; std::nullopt if there is none.
std::optional<std::pair<std::string, double>> best_baseline(const RunLog& run);

// Where an attention beats its opponent: "from 1 032 tokens", "at every length", "never".
std::string crossover_text(const BenchSeries& series);

}  // namespace coterie::train
