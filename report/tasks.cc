// SPDX-License-Identifier: MIT
// The section of a task.
#include <fmt/core.h>

#include <cmath>

#include "report/sections.h"
#include "report/text.h"

namespace coterie::train {

namespace {

std::string task_text(const std::string& task) {
  if (task == "copy")
    return "A word and its copy with different symbols masked in each: every masked symbol can be "
           "read from the other copy.";
  if (task == "recall")
    return "Pairs of a key and a value, then queries: which value came with this key?";
  if (task == "bytes") return "The next byte of a text.";
  if (task == "words") return "The next word of a text.";
  return "";
}

std::string or_dash(double value, const std::string& text) {
  return std::isfinite(value) ? text : "–";
}

std::string attention_cell(const PanelRun& run) {
  const bool whole = run.log->end && run.log->end->reason != "interrupted";
  return key_html(run.kind.colour, run.dash, run.log->attention, whole ? "" : state_text(*run.log));
}

std::vector<std::string> table_row(const PanelRun& run, bool best) {
  const RunLog& log = *run.log;
  const double result = log.result();
  const std::string score = or_dash(result, metric_text(log.metric, result));
  const auto baseline = best_baseline(log);
  const double seconds = log.seconds(), rate = log.tokens_per_s(), peak = log.peak_memory_bytes();
  return {attention_cell(run),
          best ? "<strong>" + score + "</strong>" : score,
          baseline ? metric_text(log.metric, baseline->second) : "–",
          log.parameters > 0 ? grouped(log.parameters) : "–",
          or_dash(seconds, fmt::format("{:.1f}", seconds)),
          or_dash(rate, compact(rate)),
          or_dash(peak, mebibytes_text(peak))};
}

double best_result(const Panel& panel) {
  double best = kUnknown;
  for (const PanelRun& run : panel.runs) {
    const double result = run.log->result();
    best = higher_is_better(run.log->metric) ? std::fmax(best, result) : std::fmin(best, result);
  }
  return best;
}

std::string results_table(const TaskGroup& group) {
  const bool several = group.panels.size() > 1;
  Table table;
  table.columns = {{"attention", false}, {group.metric}, {"without a model"},  {"parameters"},
                   {"time (s)"},         {"tokens/s"},   {"peak memory (MiB)"}};
  if (several) table.columns.insert(table.columns.begin(), {"tokens"});
  for (const Panel& panel : group.panels) {
    const double best = best_result(panel);
    for (const PanelRun& run : panel.runs) {
      table.rows.push_back(table_row(run, run.log->result() == best));
      if (several) table.rows.back().insert(table.rows.back().begin(), grouped(panel.length));
    }
  }
  return table_html(table);
}

// With several lengths, each has a title and all its figures; with one, the scores by stratum are
// next to the table.
std::string panels_html(const TaskGroup& group) {
  const std::string table = results_table(group);
  if (group.panels.size() == 1) {
    const std::string strata = strata_figure(group.panels[0]);
    return figures_html(panel_figures(group.panels[0])) +
           (strata.empty() ? table : "<div class=\"beside\">" + strata + table + "</div>\n");
  }
  std::string html;
  for (const Panel& panel : group.panels) {
    std::vector<std::string> figures = panel_figures(panel);
    const std::string strata = strata_figure(panel);
    if (!strata.empty()) figures.push_back(strata);
    const std::string title =
        panel.length > 0 ? grouped(panel.length) + " tokens" : "unknown length";
    html += "<h3>" + title + "</h3>\n" + figures_html(figures);
  }
  return html + table;
}

// "Scores are the best on validation data; higher is better. ..."
std::string metric_note(const TaskGroup& group) {
  bool tested = false;
  for (const RunLog* run : group.logs()) {
    const LoggedEvaluation* const best = run->best_evaluation();
    tested = tested || (best && best->split == "test");
  }
  return fmt::format("Scores are {}; {} is better. Time is training time without evaluation.",
                     tested ? "from the test data" : "the best on validation data",
                     higher_is_better(group.metric) ? "higher" : "lower");
}

}  // namespace

std::optional<std::pair<std::string, double>> best_baseline(const RunLog& run) {
  std::optional<std::pair<std::string, double>> best;
  for (const auto& baseline : run.baselines) {
    if (!std::isfinite(baseline.second)) continue;
    const bool better = !best || (higher_is_better(run.metric) ? baseline.second > best->second
                                                               : baseline.second < best->second);
    if (better) best = baseline;
  }
  return best;
}

std::string task_section(const TaskGroup& group) {
  std::string html = fmt::format("<section id=\"{}\"><h2>{}</h2>\n", group.id, escape(group.title));
  html += fmt::format("<p class=\"lede\">{}</p>\n", escape(task_text(group.task)));
  html += grid_html(group) + panels_html(group);
  return html + fmt::format("<p class=\"note\">{}</p></section>\n", metric_note(group));
}

}  // namespace coterie::train
